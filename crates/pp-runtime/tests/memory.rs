//! A run may last for days: nothing grows with the number of chunks. A test program of its own,
//! so that no other test allocates meanwhile.

use std::cell::Cell;

use pp_contract::{Envelope, Rank};
use pp_runtime::core::Cut;
use pp_runtime::driver::{FrontOptions, run_front, run_phase_b};
use pp_runtime::stage::{Offer, Progress};
use pp_testing::{Pair, Toy, ToyFront, ToyPhaseB, bytes, computed, edge};
use pp_transport::bell::Bell;

const CHUNKS: u64 = 100_000;
const WARM: u64 = 1_000;

/// Bytes of this process that are in memory.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

#[test]
fn resident_size_at_chunk_100_000_is_what_it_was_at_chunk_1_000() {
    let plain = FrontOptions::new(Rank::new(1), 4);
    // Payloads are kept for a restart, and nothing for them.
    let keeping = FrontOptions {
        restarts: 1,
        context_chunks: 2,
        ..plain
    };
    for options in [plain, keeping] {
        run_long(options);
    }
}

fn run_long(options: FrontOptions) {
    let edge = |depth| edge(depth, 4096);
    let (up, down) = (edge(options.depth + options.context_chunks), edge(4));
    let pair = Pair::new(up, down, Bell::new().unwrap());
    let manifest = bytes(4096);
    let built = Cell::new(0);
    let (mut decoded, mut warm, mut end) = (0, 0, 0);
    let mut front = ToyFront::new(
        || match built.get() {
            CHUNKS => Offer::End,
            _ => Offer::Chunk(Cut::None),
        },
        |slot| {
            built.set(built.get() + 1);
            slot.bytes_mut().fill(built.get() as u8);
            Envelope::new(Toy(0), manifest.clone(), manifest.clone()).unwrap()
        },
        |_| {
            decoded += 1;
            match decoded {
                WARM => warm = resident(),
                CHUNKS => end = resident(),
                _ => {}
            }
        },
    );
    let mut back = ToyPhaseB::new(|_, envelope: &Envelope<Toy>, _, _| {
        Ok(Progress::Done(computed(envelope.plan())))
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            run_phase_b(pair.back, &mut back, &pair.back_switch, Rank::new(0), 4).unwrap()
        });
        run_front(pair.front, &mut front, &pair.front_switch, options).unwrap();
    });
    assert_eq!(decoded, CHUNKS);
    // The allocator may touch a page or two late; a leak of a byte a chunk would be 99,000.
    assert!(end <= warm + 64 * 1024, "{warm} bytes grew to {end}");
}
