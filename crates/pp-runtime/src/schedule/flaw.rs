//! Why a schedule is refused.
//!
//! Hazard: "not progressing" sends its reader through thousands of actions. Guarantee: every flaw names the actions that
//! contradict each other, as the file writes them, and where they stand.

use std::fmt;

use super::limits::Limits;
use super::{Action, Op, Step};

/// Most steps that are checked: 32-bit numbers count them, and two numbers are left over.
pub(super) const MOST_STEPS: u32 = u32::MAX - 2;
/// Most links of a cycle that its text shows.
const SHOWN: usize = 16;

/// Where a step stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepPlace {
    /// The rank: the row of the file, counted from 0 as ranks are.
    pub rank: u32,
    /// Which of the row's steps, counted from 1. Empty cells do not count.
    pub number: u32,
    /// The step.
    pub step: Step,
}

impl fmt::Display for StepPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, number, step } = self;
        write!(f, "{step} (rank {rank}, action {number})")
    }
}

/// Why a step cannot begin, or a send cannot end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It needs what the other makes.
    Input,
    /// It needs a slot of an edge, which the other frees by its end.
    Slot,
    /// It sends what the other receives, and cannot go on before that.
    Receive,
}

/// One step that waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The step at which its rank stands.
    pub blocked: StepPlace,
    /// Why.
    pub why: Why,
    /// What it waits for. It is the next link's step, or comes after that on the same rank.
    pub awaited: StepPlace,
}

/// A deadlock: each step waits for the next, and the last for the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cycle {
    /// The links; no rank has two.
    pub links: Vec<Link>,
    /// The slots of each edge. [`None`] where no number of slots helps.
    pub slots: Option<u32>,
}

impl fmt::Display for Cycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.slots {
            None => write!(f, "deadlock: ")?,
            Some(0) => write!(f, "deadlock if a send ends only when its receive begins: ")?,
            slots => write!(f, "deadlock with {}: ", Limits { slots })?,
        }
        for (at, link) in self.links.iter().enumerate() {
            let next = self.links[(at + 1) % self.links.len()].blocked;
            let more = self.links.len() - at - 1;
            if at == SHOWN && more > 1 {
                let first = self.links[0].blocked.step;
                return write!(f, ", which waits, over {more} more ranks, for {first}");
            }
            match at {
                0 => write!(f, "{} waits for ", link.blocked)?,
                _ => write!(f, ", which waits for ")?,
            }
            match link.why {
                Why::Input => write!(f, "{}", link.awaited)?,
                Why::Slot => write!(f, "the slot that {} frees", link.awaited)?,
                Why::Receive => write!(f, "{} to begin", link.awaited)?,
            }
            if (next.rank, next.number) == (link.awaited.rank, link.awaited.number) {
                continue;
            }
            match at + 1 == self.links.len() {
                true => write!(f, ", which comes after {}", next.step)?,
                false => write!(f, ", which comes after {next}")?,
            }
        }
        Ok(())
    }
}

/// Why a schedule is refused: the first thing that is wrong with it, with its witness.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Flaw {
    /// An action of a stage, a microbatch or a rank that the schedule does not have.
    #[error("{0} names a stage of another rank, or a microbatch that the schedule does not have")]
    Outside(StepPlace),
    /// An action stands twice.
    #[error("{first} and {second} both do {action}; remove one")]
    Twice {
        /// What both do.
        action: Action,
        /// The first.
        first: StepPlace,
        /// The second.
        second: StepPlace,
    },
    /// A `B` beside an `I` or a `W`.
    #[error(
        "{first} and {second} are of one microbatch, which has either one B, or one I and one W"
    )]
    TwoBackwards {
        /// The first.
        first: StepPlace,
        /// The second.
        second: StepPlace,
    },
    /// An action is not there that another one needs.
    #[error("{by} needs {}, and rank {rank} does not have it", or_both(.needed))]
    Missing {
        /// What needs it.
        by: StepPlace,
        /// What is missing.
        needed: Action,
        /// The rank that should have it.
        rank: u32,
    },
    /// A stage does nothing with a microbatch.
    #[error(
        "rank {rank} never runs {forward}, nor its backward; every stage needs every microbatch"
    )]
    Absent {
        /// The forward that is missing.
        forward: Action,
        /// The rank that should have it.
        rank: u32,
    },
    /// A send or a receive where no other rank is at the other end.
    #[error("{0} has no other rank at its other end; remove it")]
    NoEdge(StepPlace),
    /// A step comes before one of its rank that it needs.
    #[error("{early} needs {needed}, which comes later on this rank")]
    TooEarly {
        /// What comes too early.
        early: StepPlace,
        /// What it needs.
        needed: StepPlace,
    },
    /// Messages of one edge are received in another order than they are sent in.
    #[error(
        "one edge is received in another order than it is sent: {} comes before {}, but {} comes before {}",
        sends[0], sends[1], receives[0], receives[1]
    )]
    Swapped {
        /// Two sends in their order.
        sends: Box<[StepPlace; 2]>,
        /// Their receives in their order, which is the other one.
        receives: Box<[StepPlace; 2]>,
    },
    /// A rank begins a reduction while another one is pending.
    #[error(
        "{second} begins before {first} was waited for; a rank has one reduction pending at most"
    )]
    TwoReductions {
        /// The reduction that is pending.
        first: StepPlace,
        /// The next one.
        second: StepPlace,
    },
    /// A deadlock.
    #[error("{0}")]
    Deadlock(Cycle),
    /// A simulated time is past what 64 bits hold.
    #[error("{0} ends later than 64 bits can count; give the costs in a larger unit")]
    TooLong(StepPlace),
    /// There are more steps than a 32-bit number counts.
    #[error(
        "{steps} actions are too many; at most {MOST_STEPS} are checked; give fewer microbatches or ranks"
    )]
    TooLarge {
        /// The steps of all ranks.
        steps: usize,
    },
}

/// An action that is missing: a `B` may be an `I` and a `W`.
fn or_both(action: &Action) -> String {
    let (stage, microbatch) = (action.stage, action.microbatch);
    match action.op {
        Op::Backward => format!("{action} (or {stage}I{microbatch} and {stage}W{microbatch})"),
        _ => action.to_string(),
    }
}
