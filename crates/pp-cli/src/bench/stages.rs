//! The stages of `pp bench overlap` on processors.

use std::convert::Infallible;

use pp_contract::{FaultKind, Manifest, Message};
use pp_runtime::core::Cut;
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, OnHost, Place, Progress, Sink, Source, Stage, StageError,
    StageResult, Taken,
};
use pp_transport::host::{RxLease, TxLease};

use super::plan::BenchPlan;
use super::simulate::{Work, consume, produce};

/// What is written into a payload: no other chunk has it, nor this one before another stage.
fn pattern(message: &Message<BenchPlan>) -> u64 {
    let reports = message.trail().reports().iter();
    let works: u64 = reports.map(|report| u64::from(report.calls)).sum();
    message.plan().chunk.wrapping_add(works << 40)
}

fn check(message: &Message<BenchPlan>, payload: &[u8]) -> StageResult<()> {
    if consume(payload, pattern(message)) {
        return Ok(());
    }
    let chunk = message.plan().chunk;
    let detail = format!("the payload of chunk {chunk} is not what was written into it");
    Err(StageError::new(FaultKind::Internal, "read payload", detail))
}

/// Builds payloads in a fixed time.
pub(super) struct BenchSource {
    pub(super) manifest: Manifest,
    pub(super) left: u64,
    pub(super) work: Work,
    pub(super) touch: bool,
}

impl Source<TxLease> for BenchSource {
    type Plan = BenchPlan;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        Ok(match self.left {
            0 => Offer::End,
            _ => Offer::Chunk(Cut::None),
        })
    }

    fn build(&mut self, place: Place, slot: &mut TxLease) -> StageResult<Built<BenchPlan, ()>> {
        self.left -= 1;
        let chunk = place.chunk.get();
        self.work.run();
        if self.touch {
            let bytes = self.manifest.payload_bytes() as usize;
            produce(&mut slot.bytes_mut()[..bytes], chunk);
        }
        let plan = BenchPlan {
            chunk,
            hands_on: true,
        };
        Ok(Built::new(plan, self.manifest.clone(), ()))
    }

    fn queued(&self) -> u32 {
        u32::from(self.left > 0)
    }
}

/// A stage that takes a fixed time.
pub(super) fn between(
    work: Work,
    touch: bool,
) -> impl Stage<TxLease, RxLease, Plan = BenchPlan, Kept = Infallible> {
    OnHost::new(
        move |chunk: Chunk<'_, BenchPlan>, input: &[u8], output: &mut [u8]| {
            let message = chunk.message;
            if touch {
                check(message, input)?;
            }
            work.run();
            if touch {
                let next = pattern(message).wrapping_add(1 << 40);
                produce(&mut output[..input.len()], next);
            }
            Ok(Done {
                tensors: message.tensors().clone(),
                report: Taken::of(message.plan(), 1),
            })
        },
    )
}

/// A sink that takes a fixed time.
pub(super) struct BenchSink {
    pub(super) work: Work,
    pub(super) touch: bool,
}

impl Sink<RxLease> for BenchSink {
    type Plan = BenchPlan;
    type Kept = Infallible;

    fn take(
        &mut self,
        chunk: Chunk<'_, BenchPlan>,
        input: Option<&RxLease>,
    ) -> StageResult<Progress<Taken, Infallible>> {
        if let Some(input) = input.filter(|_| self.touch) {
            check(chunk.message, input.bytes())?;
        }
        self.work.run();
        Ok(Progress::Done(Taken::of(chunk.message.plan(), 1)))
    }
}
