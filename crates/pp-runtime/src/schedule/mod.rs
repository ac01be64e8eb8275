//! Training schedules as values: which rank does what in which order.
//!
//! Hazard: a schedule is a list per rank that nobody can check by eye. One swapped receive gives wrong data, one send too
//! early is a deadlock, one forgotten backward trains on half a gradient. Guarantee: what [`check`](Schedule::check)
//! accepts runs to its end with the slots that it names, and what it refuses it refuses with the actions that are wrong.
//!
//! Choices: the notation is PyTorch's, so its files can be checked as they are. Nothing here does I/O or knows a backend.

mod action;
mod build;
mod check;
mod clock;
mod crossing;
mod flaw;
mod graph;
mod kind;
mod limits;
mod lower;
mod measured;
mod merge;
mod run;
mod simulate;
mod text;
mod turns;
mod walk;

pub use action::{Action, Op, Step, Way};
pub use check::{EdgeUse, Report};
pub use clock::{Cost, Costs, PerStage, Span, TICKS};
pub use crossing::Crossing;
pub use flaw::{Cycle, Flaw, Link, StepPlace, Why};
pub use graph::Message;
pub use kind::{Kind, Size, SizeError, UnknownKind};
pub use limits::Limits;
pub use lower::{LowerError, Standstill};
pub use measured::{Cause, MeasuredStep};
pub use run::{RunError, Runnable};
pub use simulate::Timeline;
pub use text::{Cell, CellFault, ParseError};

/// Lists the steps of each rank in the order in which it runs them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// By rank.
    pub(crate) ranks: Vec<Vec<Step>>,
    /// The rank that runs each stage.
    pub(crate) rank_of: Vec<u32>,
    /// Microbatches of one training step.
    pub(crate) microbatches: u32,
}

impl Schedule {
    /// The steps of each rank, in their order.
    #[must_use]
    pub fn ranks(&self) -> &[Vec<Step>] {
        &self.ranks
    }

    /// The rank that runs each stage.
    #[must_use]
    pub fn stage_to_rank(&self) -> &[u32] {
        &self.rank_of
    }

    /// Microbatches of one training step.
    #[must_use]
    pub const fn microbatches(&self) -> u32 {
        self.microbatches
    }

    /// Stages, over all ranks.
    #[must_use]
    pub fn stages(&self) -> u32 {
        self.rank_of.len() as u32
    }

    /// Says whether it names sends and receives; else it is a list of computations.
    #[must_use]
    pub fn is_lowered(&self) -> bool {
        let mut actions = self.ranks.iter().flatten().flat_map(Step::actions);
        actions.any(|action| matches!(action.op, Op::Send(_) | Op::Receive(_)))
    }
}
