//! A run may last for days: nothing grows with the number of chunks. No other test allocates meanwhile in the process.

use std::sync::Mutex;

use pp_contract::Rank;
use pp_runtime::core::Cut;
use pp_runtime::driver::{BoxedStage, RankOptions, Stages};
use pp_runtime::stage::{Built, Offer, OnHost};
use pp_testing::{Toy, ToySink, ToySource, bytes, done, options, run_ranks};

const CHUNKS: u64 = 100_000;
const WARM: u64 = 1_000;

/// Bytes of this process that are in memory and are no pages of files: the kernel takes those away and brings them back.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: Vec<u64> = statm
        .split(' ')
        .map_while(|word| word.parse().ok())
        .collect();
    (pages[1] - pages[2]) * rustix::param::page_size() as u64
}

#[test]
fn resident_size_at_chunk_100_000_is_what_it_was_at_chunk_1_000() {
    if !pp_testing::alone!() {
        return;
    }
    for pipeline in ["a@0 -> b@1 -> c@0", "a@0 -> b@1 -> c@2"] {
        let plain = options(pipeline, 4);
        // Payloads are kept for a restart, and nothing for them.
        let keeping = RankOptions {
            restarts: 1,
            context_chunks: 2,
            ..plain.clone()
        };
        for options in [plain, keeping] {
            run_long(&options);
        }
    }
}

fn run_long(options: &RankOptions) {
    let manifest = bytes(4096);
    // Chunks that were taken, and the size at two of them.
    let taken = Mutex::new([0; 3]);
    let ended = run_ranks(
        options,
        4096,
        |rank| {
            let (manifest, mut offered) = (&manifest, 0);
            let source = ToySource::new(
                move || {
                    offered += 1;
                    match offered > CHUNKS {
                        true => Offer::End,
                        false => Offer::Chunk(Cut::None),
                    }
                },
                |place, slot| {
                    slot.bytes_mut().fill(place.chunk.get() as u8);
                    Built::new(Toy(0), manifest.clone(), ())
                },
            );
            let mut stages = Stages::new((rank == Rank::new(0)).then_some(source));
            if rank == Rank::new(1) {
                stages.push(BoxedStage::new(OnHost::<Toy, _>::new(|chunk, _, _| {
                    Ok(done(chunk.message, manifest.clone()))
                })));
            }
            if rank == options.pipeline.sink() {
                stages.push(BoxedStage::sink(ToySink::<Toy, _>::new(|_, _| {
                    let [taken, warm, end] = &mut *taken.lock().unwrap();
                    *taken += 1;
                    match *taken {
                        WARM => *warm = resident(),
                        CHUNKS => *end = resident(),
                        _ => {}
                    }
                    Ok(())
                })));
            }
            stages
        },
        |_| {},
    );
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
    let [taken, warm, end] = taken.into_inner().unwrap();
    assert_eq!(taken, CHUNKS);
    // The allocator may touch a page or two late; a leak of a byte a chunk would be 99,000.
    assert!(end <= warm + 64 * 1024, "{warm} bytes grew to {end}");
}
