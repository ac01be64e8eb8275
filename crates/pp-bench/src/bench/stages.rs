//! The stages of `pp bench overlap` on processors.

use std::convert::Infallible;
use std::time::Instant;

use pp_contract::{FaultKind, Message};
use pp_runtime::core::Cut;
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, OnHost, Place, Progress, Sink, Source, Stage, StageError,
    StageResult, Taken, Worked,
};
use pp_transport::host::{RxLease, TxLease};

use super::against::Payloads;
use super::paced::Paced;
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

/// What a stage tells of its work, so that the time of the driver itself can be found: as its idle time how long the driver
/// waited since the stage's last work.
#[derive(Default)]
struct Meter {
    waited_ns: u64,
    /// Reports have whole microseconds. What is left of the work and of the wait goes into the next report.
    rest_ns: [u64; 2],
}

impl Meter {
    /// The report of a work on this chunk that began at `start` and ends now.
    fn report(&mut self, chunk: &Chunk<'_, BenchPlan>, start: Instant) -> Taken {
        let work_ns = start.elapsed().as_nanos() as u64;
        // It begins anew with each run.
        let waited_ns = chunk.waited_ns.saturating_sub(self.waited_ns);
        self.waited_ns = chunk.waited_ns;
        let [work_rest, idle_rest] = &mut self.rest_ns;
        let with_rest = |ns: u64, rest: &mut u64| {
            let all = ns + *rest;
            *rest = all % 1_000;
            all
        };
        Taken {
            worked: Some(Worked {
                work_ns: with_rest(work_ns, work_rest),
                idle_ns: with_rest(waited_ns, idle_rest),
            }),
            ..Taken::of(chunk.message.plan(), 1)
        }
    }
}

/// Builds payloads in a fixed time.
pub(super) struct BenchSource {
    pub(super) payloads: Payloads,
    pub(super) left: u64,
    pub(super) work: Work,
    pub(super) touch: bool,
    /// When chunks are there, where the source does not wait.
    pub(super) paced: Option<Paced>,
    /// Chunks that were dropped before the next one.
    pub(super) skipped: u32,
}

impl Source<TxLease> for BenchSource {
    type Plan = BenchPlan;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        Ok(match (self.left, &self.paced) {
            (0, _) => Offer::End,
            (left, Some(paced)) if paced.there_ns(left).is_none() => Offer::Later,
            _ => Offer::Chunk(Cut::None),
        })
    }

    fn drop_late(&mut self, before_ns: u64) -> StageResult<u64> {
        let before = self.left;
        while self.oldest_ns().is_some_and(|at| at < before_ns)
            && (self.paced.as_ref()).is_some_and(|paced| paced.there_ns(self.left - 1).is_some())
        {
            self.left -= 1;
        }
        self.skipped += (before - self.left) as u32;
        Ok(before - self.left)
    }

    fn oldest_ns(&self) -> Option<u64> {
        self.paced.as_ref()?.there_ns(self.left)
    }

    fn build(&mut self, place: Place, slot: &mut TxLease) -> StageResult<Built<BenchPlan, ()>> {
        let there_ns = self.oldest_ns();
        self.left -= 1;
        let chunk = place.chunk.get();
        self.work.run();
        let manifest = self.payloads.of_chunk(chunk);
        if self.touch {
            let bytes = manifest.payload_bytes() as usize;
            produce(&mut slot.bytes_mut()[..bytes], chunk);
        }
        let plan = BenchPlan {
            chunk,
            hands_on: true,
        };
        let mut built = Built::new(plan, manifest.clone(), ());
        built.read_ns = there_ns.map(|at| (at, at));
        built.skipped_frames = std::mem::take(&mut self.skipped);
        Ok(built)
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
    let mut meter = Meter::default();
    OnHost::new(
        move |chunk: Chunk<'_, BenchPlan>, input: &[u8], output: &mut [u8]| {
            let (start, message) = (Instant::now(), chunk.message);
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
                report: meter.report(&chunk, start),
            })
        },
    )
}

/// A sink that takes a fixed time.
pub(super) struct BenchSink {
    work: Work,
    touch: bool,
    meter: Meter,
}

impl BenchSink {
    pub(super) fn new(work: Work, touch: bool) -> Self {
        Self {
            work,
            touch,
            meter: Meter::default(),
        }
    }
}

impl Sink<RxLease> for BenchSink {
    type Plan = BenchPlan;
    type Kept = Infallible;

    fn take(
        &mut self,
        chunk: Chunk<'_, BenchPlan>,
        input: Option<&RxLease>,
    ) -> StageResult<Progress<Taken, Infallible>> {
        let start = Instant::now();
        if let Some(input) = input.filter(|_| self.touch) {
            check(chunk.message, input.bytes())?;
        }
        self.work.run();
        Ok(Progress::Done(self.meter.report(&chunk, start)))
    }
}
