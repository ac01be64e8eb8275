//! Stages of a model that only take time, and tell when they began and ended.

use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pp_bench::sleep_exactly;
use pp_contract::{ChunkIndex, FaultKind, Manifest};
use pp_runtime::clock::now_ns;
use pp_runtime::core::Cut;
use pp_runtime::schedule::{Action, Op};
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, Place, Progress, Source, Stage, StageError, StageResult, Taken,
};
use pp_testing::{Toy, bytes};
use pp_transport::host::{RxLease, TxLease};
use serde::{Deserialize, Serialize};

/// A payload: the microbatch, and how many stages it went through.
pub(super) const PAYLOAD: usize = 16;
/// Nothing happens for so long between two steps: what a rank has left of the first is done.
const PAUSE: Duration = Duration::from_millis(150);

/// When a rank did something, in nanoseconds of the host's clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Timed {
    /// As the schedule writes it, with the microbatches of all steps counted.
    pub(super) action: String,
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
}

/// What a rank did, in its order.
pub(super) type Log = Rc<RefCell<Vec<Timed>>>;

/// How long a stage takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lengths {
    pub(super) forward: Duration,
    pub(super) input: Duration,
    pub(super) weight: Duration,
}

impl Lengths {
    /// Of a stage whose forward takes about so long: no two neighbours take the same time.
    pub(super) fn of(stage: u32, forward_us: u64) -> Self {
        let eighths = |n: u64| Duration::from_nanos(forward_us * 125 * n);
        let more = u64::from(stage % 3);
        Self {
            forward: eighths(8 + more),
            input: eighths(10 + more),
            weight: eighths(6 + more),
        }
    }
}

/// The forward or the backward of a stage of the model.
pub(super) struct ModelStage {
    pub(super) stage: u32,
    pub(super) is_forward: bool,
    pub(super) lengths: Lengths,
    pub(super) log: Log,
}

impl ModelStage {
    fn work(&self, op: Op, chunk: u64, length: Duration) {
        let start_ns = now_ns();
        sleep_exactly(length);
        let end_ns = now_ns();
        let action = Action::new(self.stage, op, chunk as u32).to_string();
        self.log.borrow_mut().push(Timed {
            action,
            start_ns,
            end_ns,
        });
    }
}

fn words(payload: &[u8]) -> Option<[u64; 2]> {
    let (words, _) = payload.as_chunks::<8>();
    let [chunk, stages] = words else { return None };
    Some([*chunk, *stages].map(u64::from_le_bytes))
}

/// The stages that the payload of this chunk went through.
pub(super) fn read(payload: &[u8], chunk: ChunkIndex) -> StageResult<u64> {
    let right = words(payload).filter(|[of, _]| *of == chunk.get());
    right.map(|[_, stages]| stages).ok_or_else(|| {
        let detail = format!("the payload of microbatch {chunk} is {payload:?}");
        StageError::new(FaultKind::Internal, "read payload", detail)
    })
}

fn write(payload: &mut [u8], chunk: ChunkIndex, stages: u64) -> Manifest {
    payload[..8].copy_from_slice(&chunk.get().to_le_bytes());
    payload[8..PAYLOAD].copy_from_slice(&stages.to_le_bytes());
    bytes(PAYLOAD)
}

impl Stage<TxLease, RxLease> for ModelStage {
    type Plan = Toy;
    type Kept = Infallible;

    fn run(
        &mut self,
        chunk: Chunk<'_, Toy>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> StageResult<Progress<Done, Infallible>> {
        let index = chunk.place.chunk;
        let stages = read(input.map_or(&[], RxLease::bytes), index)?;
        let lengths = self.lengths;
        let (op, length) = match (self.is_forward, chunk.puts_off) {
            (true, _) => (Op::Forward, lengths.forward),
            (false, true) => (Op::BackwardInput, lengths.input),
            (false, false) => (Op::Backward, lengths.input + lengths.weight),
        };
        self.work(op, index.get(), length);
        Ok(Progress::Done(Done {
            tensors: write(output.bytes_mut(), index, stages + 1),
            report: Taken::of(chunk.message.plan(), 1),
        }))
    }

    fn later(&mut self, chunk: ChunkIndex) -> StageResult<()> {
        self.work(Op::BackwardWeight, chunk.get(), self.lengths.weight);
        Ok(())
    }
}

/// The data of so many steps.
pub(super) struct Data {
    microbatches: u64,
    left: u64,
    built: u64,
    /// Microbatches that are not through, and since when there is none.
    open: u64,
    idle_since: Instant,
}

impl Data {
    pub(super) fn new(microbatches: u64, steps: u64) -> Self {
        Self {
            microbatches,
            left: microbatches * steps,
            built: 0,
            open: 0,
            idle_since: Instant::now(),
        }
    }
}

impl Source<TxLease> for Data {
    type Plan = Toy;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        let is_between = self.built.is_multiple_of(self.microbatches);
        let is_quiet = self.open == 0 && self.idle_since.elapsed() >= PAUSE;
        Ok(match self.left {
            0 => Offer::End,
            _ if is_between && !is_quiet => Offer::Later,
            _ => Offer::Chunk(Cut::None),
        })
    }

    fn build(&mut self, place: Place, slot: &mut TxLease) -> StageResult<Built<Toy, ()>> {
        self.left -= 1;
        self.built += 1;
        self.open += 1;
        let tensors = write(slot.bytes_mut(), place.chunk, 0);
        Ok(Built::new(Toy(place.chunk.get()), tensors, ()))
    }

    fn accepted(&mut self, _: ChunkIndex, (): (), _: Option<&[u8]>) -> StageResult<Option<u64>> {
        self.open -= 1;
        self.idle_since = Instant::now();
        Ok(None)
    }
}
