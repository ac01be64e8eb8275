//! From computations to sends and receives.
//!
//! Hazard: two ranks that order the transfers between them differently give each other the wrong data, or both wait.
//! Guarantee: the receives of an edge stand in the order of its sends, and the lists are PyTorch's, action by action.
//!
//! Choices: the ranks are walked in turn, one step a round, as PyTorch's runtime does. A send follows its computation at
//! once, and its receive is put at that moment at the end of what the other rank has so far. What PyTorch adds for stages
//! that are sharded takes its [turns] and is left out. A rank that has to wait is not looked at again until
//! what it waits for is there, so that the time grows with the number of actions.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;

use super::{Action, Op, Schedule, Step, Way, turns};

/// Most ranks that an error shows.
const SHOWN: usize = 16;

/// Why a schedule cannot be lowered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LowerError {
    /// An action that is no computation.
    #[error("rank {rank} has {action}; lower a schedule of F, I, W and B alone")]
    NotCompute {
        /// The rank.
        rank: u32,
        /// The action.
        action: Action,
    },
    /// A stage has fewer forwards than there are microbatches.
    #[error(
        "stage {stage} has {forwards} forwards of {microbatches} microbatches; give it one of each"
    )]
    Incomplete {
        /// The stage.
        stage: u32,
        /// Its forwards.
        forwards: usize,
        /// The microbatches of the schedule.
        microbatches: u32,
    },
    /// A deadlock.
    #[error("deadlock: {at}; run what each waits for before it")]
    Deadlock {
        /// Where the ranks wait.
        at: Standstill,
    },
}

/// The ranks that wait, each with the step at which it waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standstill(pub Vec<(u32, Step)>);

impl fmt::Display for Standstill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (rank, step)) in self.0.iter().take(SHOWN).enumerate() {
            let comma = if at > 0 { ", " } else { "" };
            write!(f, "{comma}rank {rank} waits at {step}")?;
        }
        match self.0.len().checked_sub(SHOWN) {
            None | Some(0) => Ok(()),
            Some(more) => write!(f, ", and {more} more ranks"),
        }
    }
}

impl Schedule {
    /// Adds sends and receives between stages on different ranks. With `waits` each send gets a `WAIT_SEND`. That of an
    /// activation follows the backward of the same stage and microbatch: the gradient came from the stage that received the
    /// activation, so no wait takes time. Those of gradients are the last actions of the rank.
    ///
    /// What [`check`](Self::check) accepts can be lowered; what it refuses may be lowered and is refused again.
    ///
    /// # Errors
    /// An action that is no computation; a stage without all its forwards; a deadlock, with the steps at which the
    /// ranks wait.
    pub fn lower(&self, waits: bool) -> Result<Self, LowerError> {
        self.is_complete()?;
        let mut lowering = Lowering::new(self, waits);
        let ranks = 0..self.ranks.len() as u32;
        let first = ranks
            .clone()
            .map(|rank| Reverse((lowering.pause(rank), rank)));
        let mut turns: BinaryHeap<_> = first.collect();
        while let Some(Reverse((round, rank))) = turns.pop() {
            let Some(step) = lowering.next(rank) else {
                continue;
            };
            if !step.actions().all(|action| lowering.is_ready(action)) {
                lowering.ranks[rank as usize].waits = true;
                continue;
            }
            lowering.run(rank, step, |other| {
                // A rank behind this one still has its turn in this round.
                turns.push(Reverse((round + usize::from(other < rank), other)));
            });
            turns.push(Reverse((round + 1 + lowering.pause(rank), rank)));
        }
        let at = ranks.filter_map(|rank| Some((rank, lowering.next(rank)?)));
        let at: Vec<_> = at.collect();
        match at.is_empty() {
            true => Ok(lowering.end()),
            false => Err(LowerError::Deadlock { at: Standstill(at) }),
        }
    }

    /// Says whether it has computations alone, and enough of them that the walk may keep a bit for each stage and microbatch.
    fn is_complete(&self) -> Result<(), LowerError> {
        let mut forwards = vec![0; self.rank_of.len()];
        for (rank, steps) in (0..).zip(&self.ranks) {
            for action in steps.iter().flat_map(Step::actions) {
                if !action.op.is_compute() {
                    return Err(LowerError::NotCompute { rank, action });
                }
                forwards[action.stage as usize] += usize::from(action.op == Op::Forward);
            }
        }
        let microbatches = self.microbatches;
        let mut few = (0..).zip(forwards);
        match few.find(|&(_, forwards)| forwards < microbatches as usize) {
            None => Ok(()),
            Some((stage, forwards)) => Err(LowerError::Incomplete {
                stage,
                forwards,
                microbatches,
            }),
        }
    }
}

/// How far a rank is.
struct LoweredRank {
    /// The turns that pass before each of its steps.
    pauses: Vec<usize>,
    /// Steps of the schedule that are done.
    done: usize,
    /// It waits for the input of its next step.
    waits: bool,
    /// What was written for it.
    steps: Vec<Step>,
    /// The waits for its sends, in the order of those.
    sent: Vec<Action>,
}

/// The walk over all ranks. Bits are by stage and microbatch.
struct Lowering<'a> {
    schedule: &'a Schedule,
    waits: bool,
    ranks: Vec<LoweredRank>,
    /// The activation for the stage is there.
    activations: Vec<bool>,
    /// The gradient for the stage is there.
    gradients: Vec<bool>,
    /// An activation was sent and not yet waited for.
    pending: Vec<bool>,
}

impl<'a> Lowering<'a> {
    fn new(schedule: &'a Schedule, waits: bool) -> Self {
        let (stages, microbatches) = (schedule.stages(), schedule.microbatches);
        let none = vec![false; stages as usize * microbatches as usize];
        let rank = |steps: &Vec<Step>| LoweredRank {
            pauses: turns::before(steps, stages, microbatches),
            done: 0,
            waits: false,
            steps: Vec::new(),
            sent: Vec::new(),
        };
        Self {
            schedule,
            waits,
            ranks: schedule.ranks.iter().map(rank).collect(),
            activations: none.clone(),
            gradients: none.clone(),
            pending: none,
        }
    }

    const fn bit(&self, stage: u32, microbatch: u32) -> usize {
        stage as usize * self.schedule.microbatches as usize + microbatch as usize
    }

    /// The step at which a rank stands; `None` if it is done.
    fn next(&self, rank: u32) -> Option<Step> {
        let rank = rank as usize;
        self.schedule.ranks[rank]
            .get(self.ranks[rank].done)
            .copied()
    }

    /// The turns that pass before the step at which a rank stands.
    fn pause(&self, rank: u32) -> usize {
        let rank = &self.ranks[rank as usize];
        rank.pauses.get(rank.done).copied().unwrap_or(0)
    }

    fn is_ready(&self, action: Action) -> bool {
        let at = self.bit(action.stage, action.microbatch);
        match action.op {
            Op::Forward => action.stage == 0 || self.activations[at],
            Op::BackwardInput | Op::Backward => {
                action.stage + 1 == self.schedule.stages() || self.gradients[at]
            }
            _ => true,
        }
    }

    /// Writes a step, the waits behind it, then its sends, and tells the ranks that waited for those.
    fn run(&mut self, rank: u32, step: Step, mut wake: impl FnMut(u32)) {
        self.ranks[rank as usize].done += 1;
        self.write(rank, step);
        for action in step.actions() {
            let at = self.bit(action.stage, action.microbatch);
            let backward = matches!(action.op, Op::BackwardInput | Op::Backward);
            if backward && std::mem::take(&mut self.pending[at]) && self.waits {
                let wait = Op::WaitSend(Way::Forward);
                self.write(rank, Step::One(Action { op: wait, ..action }));
            }
        }
        for action in step.actions() {
            if let Some(other) = self.hand_on(rank, action) {
                wake(other);
            }
        }
    }

    /// Gives what an action made to the stage that needs it. Returns that stage's rank if it waited.
    fn hand_on(&mut self, rank: u32, action: Action) -> Option<u32> {
        let Action {
            stage, microbatch, ..
        } = action;
        let (way, next) = match action.op {
            Op::Forward => (Way::Forward, stage + 1),
            Op::BackwardInput | Op::Backward => (Way::Backward, stage.checked_sub(1)?),
            _ => return None,
        };
        let &other = self.schedule.rank_of.get(next as usize)?;
        let at = self.bit(next, microbatch);
        match way {
            Way::Forward => self.activations[at] = true,
            Way::Backward => self.gradients[at] = true,
        }
        if other == rank {
            return None;
        }
        if way == Way::Forward {
            let at = self.bit(stage, microbatch);
            self.pending[at] = true;
        }
        let send = Action::new(stage, Op::Send(way), microbatch);
        let receive = Action::new(next, Op::Receive(way), microbatch);
        self.write(rank, Step::One(send));
        let wait = Action::new(stage, Op::WaitSend(way), microbatch);
        self.ranks[rank as usize].sent.push(wait);
        self.write(other, Step::One(receive));
        std::mem::take(&mut self.ranks[other as usize].waits).then_some(other)
    }

    fn write(&mut self, rank: u32, step: Step) {
        self.ranks[rank as usize].steps.push(step);
    }

    /// The schedule, with the waits that are left at the end of each rank.
    fn end(mut self) -> Schedule {
        let ranks = std::mem::take(&mut self.ranks);
        let is_left = |wait: &Action| {
            let at = self.bit(wait.stage, wait.microbatch);
            wait.op == Op::WaitSend(Way::Backward) || self.pending[at]
        };
        let end = |mut rank: LoweredRank| {
            let left = rank.sent.into_iter().filter(is_left);
            rank.steps
                .extend(left.filter(|_| self.waits).map(Step::One));
            rank.steps
        };
        Schedule {
            ranks: ranks.into_iter().map(end).collect(),
            rank_of: self.schedule.rank_of.clone(),
            microbatches: self.schedule.microbatches,
        }
    }
}
