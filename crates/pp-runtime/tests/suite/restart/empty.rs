//! A chunk without bytes is context as any other: it has its place between the chunks before and behind it, and what lies before
//! one that begins with a cut is not kept.

use std::sync::Mutex;

use pp_contract::{Manifest, Message, Rank};
use pp_runtime::core::Cut;
use pp_runtime::driver::{BoxedStage, Stages};
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, OnHost, Place, RetainedPayloads, Source, StageResult, send_as_it_was,
};
use pp_testing::{Toy, ToySink, bytes, done};
use pp_transport::host::TxLease;
use pp_transport::in_flight::Part;

use super::world::{Life, WHOLE, options, run};
use super::{CHAIN, PAIR};

const CHUNKS: u64 = 6;
/// The chunk without bytes.
const EMPTY: u64 = 2;

/// The bytes of a chunk: its number, or none.
fn tensors(chunk: u64) -> Manifest {
    if chunk == EMPTY {
        Manifest::empty()
    } else {
        bytes(1)
    }
}

/// What was kept when a chunk was sent again: the chunk, and each before it, the nearest first. `None` is one without bytes.
type Kept = (u64, Vec<Option<u8>>);

struct Numbers<'a> {
    cut: Cut,
    offered: u64,
    kept: &'a Mutex<Vec<Kept>>,
}

impl Numbers<'_> {
    fn note(&self, place: Place, kept: &dyn RetainedPayloads<TxLease>, slot: &mut TxLease) {
        if place.starts_epoch {
            // It has no context.
            return;
        }
        let mut found = Vec::new();
        for back in 1.. {
            let Some(inputs) = kept.inputs(back) else {
                break;
            };
            let part = Part {
                from: 0,
                to: 0,
                bytes: inputs.payload_bytes(),
            };
            found.push((part.bytes > 0).then(|| {
                kept.copy(back, &[part], slot).unwrap();
                slot.bytes_mut()[0]
            }));
        }
        self.kept.lock().unwrap().push((place.chunk.get(), found));
    }
}

impl Source<TxLease> for Numbers<'_> {
    type Plan = Toy;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        let next = self.offered;
        self.offered += 1;
        Ok(match next {
            EMPTY => Offer::Chunk(self.cut),
            ..CHUNKS => Offer::Chunk(Cut::None),
            _ => Offer::End,
        })
    }

    fn build(&mut self, place: Place, slot: &mut TxLease) -> StageResult<Built<Toy, ()>> {
        let chunk = place.chunk.get();
        slot.bytes_mut()[0] = chunk as u8;
        Ok(Built::new(Toy(chunk), tensors(chunk), ()))
    }

    fn build_anew(
        &mut self,
        place: Place,
        kept: &dyn RetainedPayloads<TxLease>,
        slot: &mut TxLease,
    ) -> StageResult<Built<Toy, ()>> {
        self.note(place, kept, slot);
        self.build(place, slot)
    }

    fn rebuild(
        &mut self,
        place: Place,
        sent: &Message<Toy>,
        kept: &dyn RetainedPayloads<TxLease>,
        slot: &mut TxLease,
    ) -> StageResult<(Toy, Manifest)> {
        self.note(place, kept, slot);
        send_as_it_was(sent, kept, slot)
    }
}

/// A stage that makes the chunk of what it received.
fn copies(chunk: Chunk<'_, Toy>, input: &[u8], output: &mut [u8]) -> StageResult<Done> {
    output[..input.len()].copy_from_slice(input);
    Ok(done(chunk.message, tensors(chunk.place.chunk.get())))
}

/// What is to be kept when the chunk is sent again.
fn wanted(chunk: u64, cut: Cut) -> Vec<Option<u8>> {
    let first = if cut != Cut::None && chunk >= EMPTY {
        EMPTY
    } else {
        0
    };
    let before = (first..chunk).rev().take(2);
    before
        .map(|before| (before != EMPTY).then_some(before as u8))
        .collect()
}

/// Runs the pipeline, and gives the operations of the ranks.
fn check(pipeline: &str, cut: Cut, lives: &[Life], seen: &mut Vec<u64>) -> Vec<usize> {
    let options = options(pipeline, 1, 1);
    let (kept, taken) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let end = run(&options, lives, false, &|rank, _| {
        let source = Numbers {
            cut,
            offered: 0,
            kept: &kept,
        };
        let mut stages = Stages::new((rank == Rank::new(0)).then_some(source));
        if rank == Rank::new(1) {
            stages.push(BoxedStage::new(OnHost::new(copies)));
        }
        if rank == options.pipeline.sink() {
            stages.push(BoxedStage::sink(ToySink::new(|chunk, bytes| {
                let taken = &mut *taken.lock().unwrap();
                taken.push((chunk.place.chunk.get(), bytes.first().copied()));
                Ok(())
            })));
        }
        stages
    });
    end.result.unwrap();
    let byte = |chunk| (chunk, (chunk != EMPTY).then_some(chunk as u8));
    let all: Vec<_> = (0..CHUNKS).map(byte).collect();
    assert_eq!(taken.into_inner().unwrap(), all, "{pipeline}: {lives:?}");
    for (chunk, found) in kept.into_inner().unwrap() {
        assert_eq!(
            found,
            wanted(chunk, cut),
            "{pipeline}: {lives:?}: chunk {chunk}"
        );
        seen.push(chunk);
    }
    end.done
}

#[test]
fn a_chunk_without_bytes_has_its_place_in_the_context() {
    for pipeline in [PAIR, CHAIN] {
        for cut in [Cut::None, Cut::Flush] {
            let mut seen = Vec::new();
            let done = check(pipeline, cut, &[WHOLE], &mut seen);
            for left in 0..done[1] {
                let life = Life { left, ..WHOLE };
                check(pipeline, cut, &[life, WHOLE], &mut seen);
            }
            for behind in EMPTY + 1..CHUNKS {
                assert!(
                    seen.contains(&behind),
                    "{pipeline}: chunk {behind} was not lost"
                );
            }
        }
    }
}
