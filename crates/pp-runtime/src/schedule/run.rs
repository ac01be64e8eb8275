//! A schedule on the ranks of a job.
//!
//! A training step is a chain of stages, `data -> forward … forward -> backward … backward -> done`: each stage of the model
//! stands there twice on its rank, and a microbatch is a chunk that goes through once. So an edge that carries a gradient is
//! an edge like any other.

use std::fmt;

use pp_contract::pipeline::{MAX_DEPTH, MAX_STAGES};
use pp_contract::{Pipeline, PipelineError, Rank, tensor_digest};

use super::{Action, Op, Schedule, Step};
use crate::core::{FixedOrder, OrderError, Task, Turn};

/// Most stages of the model.
const MOST_STAGES: usize = (MAX_STAGES - 2) / 2;

/// Why a schedule cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// An action that the runtime does by itself, or not at all.
    #[error(
        "{action}: a run takes F, I, W and B alone, and sends and receives by itself; remove sends, receives, waits and FSDP actions"
    )]
    NotComputed {
        /// The action.
        action: Action,
    },
    /// The pipeline would be too long.
    #[error("{stages} stages; a run takes 1 to {MOST_STAGES}")]
    Stages {
        /// Stages of the model.
        stages: usize,
    },
    /// No room for what is in flight.
    #[error("{depth} microbatches are in flight at once; a run takes up to {MAX_DEPTH}")]
    InFlight {
        /// Microbatches between their data and the end of their backward.
        depth: u64,
    },
    /// A send cannot wait for its receive.
    #[error("0 slots an edge; a run sends without waiting, into one slot at least")]
    NoSlots,
    /// A rank has no stage, or there are too many.
    #[error("the stages make no pipeline")]
    Pipeline(#[from] PipelineError),
    /// What a rank does is no order.
    #[error("the actions of rank {rank} make no fixed order")]
    Order {
        /// The rank.
        rank: u32,
        /// Why not.
        source: OrderError,
    },
}

/// A schedule on the ranks of a job, made by [`Schedule::runnable`] or [`Schedule::trainable`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runnable {
    pipeline: Pipeline,
    orders: Vec<FixedOrder>,
    depth: u32,
    slots: u32,
}

impl Runnable {
    /// The stages `data`, `forward`, `backward` and `done`. The k-th part of `forward` is stage k of the model, and the parts
    /// of `backward` stand in descending order.
    #[must_use]
    pub fn pipeline(&self) -> &Pipeline {
        &self.pipeline
    }

    /// Returns the fixed order of each rank.
    #[must_use]
    pub fn orders(&self) -> &[FixedOrder] {
        &self.orders
    }

    /// The most microbatches in flight: with fewer the ranks would wait for ever.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Slots of each edge.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.slots
    }
}

/// What all ranks of a job must have alike, beside the pipeline and the depth: a digest of the orders, and the slots.
impl fmt::Display for Runnable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = |task: Task| [task.stage as u64, task.chunk];
        let turn = |turn: &Turn| match *turn {
            Turn::Run(task) => [&[0][..], &words(task)].concat(),
            Turn::Overlapped([first, second]) => [&[1][..], &words(first), &words(second)].concat(),
            Turn::Later(task) => [&[2][..], &words(task)].concat(),
        };
        let order = |order: &FixedOrder| {
            let turns = order.turns().iter().flat_map(turn);
            let size = [order.turns().len() as u64, order.chunks()].into_iter();
            let all = size.chain(turns);
            all.flat_map(u64::to_le_bytes).collect::<Vec<u8>>()
        };
        let bytes: Vec<u8> = self.orders.iter().flat_map(order).collect();
        write!(f, "{:016x}, slots {}", tensor_digest(&bytes), self.slots)
    }
}

impl Schedule {
    /// The stages and orders that run this schedule with so many slots on each edge. Does not check the schedule: call
    /// [`Schedule::check`] first, with the same slots.
    ///
    /// # Errors
    /// [`RunError`]: the schedule has more than a run can do.
    pub fn runnable(&self, slots: u32) -> Result<Runnable, RunError> {
        self.on_ranks(slots, false)
    }

    /// As [`Schedule::runnable`], and each step ends with one chunk more, the *exchange*. It goes forward through all stages
    /// once they have done all else, and back. So what stage 0 sends comes to all others, the last stage knows of all, and
    /// what it says comes to all. In front of it each forward does what it has put off of the last microbatch: it sums up the
    /// gradients while other ranks still work. Behind it each backward does what it has put off of the exchange: the work of
    /// the optimizer.
    ///
    /// # Errors
    /// As [`Schedule::runnable`].
    pub fn trainable(&self, slots: u32) -> Result<Runnable, RunError> {
        self.on_ranks(slots, true)
    }

    fn on_ranks(&self, slots: u32, exchanges: bool) -> Result<Runnable, RunError> {
        let stages = self.rank_of.len();
        if stages == 0 || stages > MOST_STAGES {
            return Err(RunError::Stages { stages });
        }
        if slots == 0 {
            return Err(RunError::NoSlots);
        }
        let mut actions = self.ranks.iter().flatten().flat_map(Step::actions);
        if let Some(action) = actions.find(|action| !action.op.is_compute()) {
            return Err(RunError::NotComputed { action });
        }
        let depth = self.most_in_flight();
        let fits = u32::try_from(depth)
            .ok()
            .filter(|depth| *depth <= MAX_DEPTH);
        let depth = fits.ok_or(RunError::InFlight { depth })?;
        let pipeline: Pipeline = self.pipeline_text().parse()?;
        let order = |(rank, steps): (u32, &Vec<Step>)| {
            let mut turns: Vec<Turn> = steps.iter().map(|step| turn_of(step, stages)).collect();
            let mut chunks = u64::from(self.microbatches);
            if exchanges {
                turns.extend(self.exchange(rank));
                chunks += 1;
            }
            let at = (&pipeline, Rank::new(rank));
            let order = FixedOrder::new(at, turns, chunks);
            order.map_err(|source| RunError::Order { rank, source })
        };
        let orders = (0..).zip(&self.ranks).map(order);
        let orders: Vec<FixedOrder> = orders.collect::<Result<_, _>>()?;
        let among = |order: &FixedOrder| order.clone().among(&orders);
        Ok(Runnable {
            pipeline,
            orders: orders.iter().map(among).collect(),
            depth,
            slots: slots.max(self.slots_of_data()).min(depth),
        })
    }

    /// What a rank does of the exchange.
    fn exchange(&self, rank: u32) -> Vec<Turn> {
        let own = |(at, of): (usize, &u32)| (*of == rank).then_some(at);
        let own: Vec<usize> = (self.rank_of.iter().enumerate()).filter_map(own).collect();
        let (stages, chunk) = (self.rank_of.len(), u64::from(self.microbatches));
        let forward = own.iter().map(|at| 1 + at);
        let backward = own.iter().rev().map(|at| 2 * stages - at);
        let task = |stage| Task { stage, chunk };
        let last = |stage| Task {
            stage,
            chunk: chunk.saturating_sub(1),
        };
        let sums = forward.clone().map(last).map(Turn::Later);
        let runs = forward.chain(backward.clone()).map(task).map(Turn::Run);
        let optimizers = backward.map(task).map(Turn::Later);
        sums.chain(runs).chain(optimizers).collect()
    }

    /// The slots that the edge to stage 0 needs: data come in order, and what is run first may wait for those before it.
    fn slots_of_data(&self) -> u32 {
        let (mut run, mut begun, mut most) = (0, 0, 1);
        for action in self.of_stage_0().filter(|action| action.op == Op::Forward) {
            begun = begun.max(action.microbatch + 1);
            most = most.max(begun - run);
            run += 1;
        }
        most
    }

    fn of_stage_0(&self) -> impl Iterator<Item = Action> {
        let rank = self.rank_of.first().map_or(0, |rank| *rank as usize);
        let steps = self.ranks.get(rank).into_iter().flatten();
        let actions = steps.flat_map(Step::actions);
        actions.filter(|action| action.stage == 0)
    }

    fn pipeline_text(&self) -> String {
        let forward = self.rank_of.iter().map(|rank| format!("forward@{rank}"));
        let backward = self.rank_of.iter().rev();
        let backward = backward.map(|rank| format!("backward@{rank}"));
        let model: Vec<String> = forward.chain(backward).collect();
        format!("data@0 -> {} -> done@0", model.join(" -> "))
    }

    /// Microbatches between their data, which come in order, and the end of their backward in stage 0.
    fn most_in_flight(&self) -> u64 {
        let (mut begun, mut ended, mut most) = (0, 0, 1);
        for action in self.of_stage_0() {
            match action.op {
                Op::Forward => begun = begun.max(u64::from(action.microbatch) + 1),
                Op::Backward | Op::BackwardInput => ended += 1,
                _ => {}
            }
            most = most.max(begun.saturating_sub(ended));
        }
        most
    }
}

/// What the driver does for a step. The stage of a backward stands as far from the end as that of its forward from the
/// beginning.
fn turn_of(step: &Step, stages: usize) -> Turn {
    let task = |action: Action| {
        let stage = action.stage as usize;
        Task {
            stage: match action.op {
                Op::Forward => 1 + stage,
                _ => (2 * stages).saturating_sub(stage),
            },
            chunk: action.microbatch.into(),
        }
    };
    match *step {
        Step::Overlapped { forward, backward } => Turn::Overlapped([task(forward), task(backward)]),
        Step::One(action) if action.op == Op::BackwardWeight => Turn::Later(task(action)),
        Step::One(action) => Turn::Run(task(action)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Kind;

    fn built(kind: Kind, size: (u32, u32, u32)) -> Schedule {
        Schedule::build(kind, size.0, size.1, size.2).unwrap()
    }

    #[test]
    fn the_depth_is_what_is_in_flight_at_once() {
        for (kind, size, depth) in [
            (Kind::Naive, (4, 1, 8), 1),
            (Kind::GPipe, (4, 1, 8), 8),
            (Kind::OneFOneB, (4, 1, 8), 4),
            (Kind::LoopedBfs, (2, 2, 8), 8),
        ] {
            let runnable = built(kind, size).runnable(64).unwrap();
            assert_eq!((runnable.depth, runnable.slots), (depth, depth), "{kind}");
        }
        // Data come in order: what is run first waits for those before it.
        let descending = Schedule::parse_csv("0F1,0B1,0F0,0B0").unwrap();
        assert_eq!(descending.runnable(1).unwrap().depth, 2);
    }

    #[test]
    fn each_stage_stands_twice_on_its_rank() {
        let v = built(Kind::ZbV, (2, 2, 2)).runnable(1).unwrap();
        let text = "data@0 -> forward@0 -> forward@1 -> forward@1 -> forward@0 -> \
                    backward@0 -> backward@1 -> backward@1 -> backward@0 -> done@0";
        assert_eq!(v.pipeline.to_string(), text);
    }

    #[test]
    fn a_schedule_with_too_many_stages_or_chunks_for_a_job_is_refused() {
        let refused = |schedule: &Schedule, slots| schedule.runnable(slots).unwrap_err();
        let stages = refused(&built(Kind::LoopedBfs, (32, 4, 1)), 1);
        assert_eq!(stages, RunError::Stages { stages: 128 });
        let in_flight = refused(&built(Kind::GPipe, (2, 1, 257)), 1);
        assert_eq!(in_flight, RunError::InFlight { depth: 257 });
        let many = built(Kind::OneFOneB, (2, 1, 257)).runnable(1);
        assert_eq!(many.unwrap().depth, 2);
        assert_eq!(
            refused(&built(Kind::GPipe, (2, 1, 2)), 0),
            RunError::NoSlots
        );
        let gap = Schedule::parse_csv("0F0,0B0\n\n1F0,1B0").unwrap();
        assert!(matches!(refused(&gap, 1), RunError::Pipeline(_)));
    }

    #[test]
    fn a_step_that_trains_ends_with_an_exchange() {
        let trained = built(Kind::ZbV, (2, 2, 2)).trainable(1).unwrap();
        assert_eq!(trained.orders[0].chunks(), 3);
        let task = |stage| Task { stage, chunk: 2 };
        for (order, [first, second]) in trained.orders.iter().zip([[1, 4], [2, 3]]) {
            let back = [9 - second, 9 - first];
            let sums = [first, second].map(|stage| Turn::Later(Task { stage, chunk: 1 }));
            let runs = [first, second, back[0], back[1]].map(|at| Turn::Run(task(at)));
            let optimizers = back.map(|at| Turn::Later(task(at)));
            let last = [&sums[..], &runs, &optimizers].concat();
            assert!(order.turns().ends_with(&last), "{:?}", order.turns());
        }
    }

    #[test]
    fn stage_0_may_stand_on_any_rank() {
        let elsewhere = Schedule::parse_csv("1F0,1F1,1B0,1B1\n0F1,0F0,0B1,0B0").unwrap();
        let runnable = elsewhere.runnable(1).unwrap();
        let text = "data@0 -> forward@1 -> forward@0 -> backward@0 -> backward@1 -> done@0";
        assert_eq!(runnable.pipeline.to_string(), text);
        // The second microbatch is run first, and both lie in slots then.
        assert_eq!((runnable.depth, runnable.slots), (2, 2));
        assert_eq!(runnable.orders[1].arrivals_at(1), [0, 1]);
    }

    #[test]
    fn ranks_with_other_orders_do_not_agree() {
        let text = |csv: &str, slots| {
            let schedule = Schedule::parse_csv(csv).unwrap();
            schedule.runnable(slots).unwrap().to_string()
        };
        let all = [
            text("0F0,0F1,0B0,0B1", 1),
            text("0F0,0F1,0B1,0B0", 1),
            text("0F0,0F1,0I0,0W0,0B1", 1),
            text("0F0,0F1,0B0,0B1", 2),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[..at].contains(one), "{one}");
        }
    }
}
