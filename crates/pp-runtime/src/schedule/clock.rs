//! When each step of a schedule begins and ends.
//!
//! Guarantee: a step begins as soon as its rank is free and all that it waits for is there, to the unit.
//!
//! Choices: times are whole numbers in the caller's unit. A transfer takes time and no rank. Nothing is sent between
//! stages of one rank. Receives are posted and wait for nothing; the computation waits for what was received. What costs
//! nothing in [`Costs`] (sends, receives, waits) gives lowered lists the times of their compute lists.

use super::flaw::{Flaw, Why};
use super::graph::{Graph, Message};
use super::walk::{Visit, walk};
use super::{Action, Op, Step};

/// Ticks of a unit of time where times have fractions: in pictures and on a command line.
pub const TICKS: u64 = 1_000_000;

/// How long things take, in any unit.
pub trait Cost {
    /// How long an action takes on its rank.
    fn action(&self, rank: u32, action: Action) -> u64;

    /// How long a step takes: the sum of its actions, unless it is known to overlap better.
    fn step(&self, rank: u32, step: Step) -> u64 {
        let times = step.actions().map(|action| self.action(rank, action));
        times.fold(0, u64::saturating_add)
    }

    /// How long a message takes from the end of its sender's step until its receiver can use it.
    fn transfer(&self, _message: Message) -> u64 {
        0
    }
}

/// A function of rank and action, with transfers that take no time.
impl<F: Fn(u32, Action) -> u64> Cost for F {
    fn action(&self, rank: u32, action: Action) -> u64 {
        self(rank, action)
    }
}

/// By stage, a number for each microbatch. A microbatch behind the last number has the last one, and a stage behind the last
/// has the numbers of that one, so a single number is that of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerStage(pub Vec<Vec<u64>>);

impl PerStage {
    /// The number of a microbatch of a stage; 0 if there are none.
    #[must_use]
    pub fn of(&self, stage: u32, microbatch: u32) -> u64 {
        let of_stage = self.of_stage(stage);
        let known = of_stage.get(microbatch as usize).or(of_stage.last());
        known.copied().unwrap_or(0)
    }

    /// The numbers of a stage.
    #[must_use]
    pub fn of_stage(&self, stage: u32) -> &[u64] {
        let known = self.0.get(stage as usize).or(self.0.last());
        known.map_or(&[], Vec::as_slice)
    }
}

impl From<u64> for PerStage {
    fn from(number: u64) -> Self {
        Self(vec![vec![number]])
    }
}

/// Costs of stages. A `B` takes as long as `I` and `W`. What computes nothing costs nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Of an `F`.
    pub forward: PerStage,
    /// Of an `I`.
    pub input: PerStage,
    /// Of a `W`.
    pub weight: PerStage,
    /// Of a transfer between two ranks, by the stage that sends.
    pub transfer: PerStage,
}

impl Default for Costs {
    /// One unit for each of `F`, `I` and `W`, and none for a transfer.
    fn default() -> Self {
        Self {
            forward: 1.into(),
            input: 1.into(),
            weight: 1.into(),
            transfer: 0.into(),
        }
    }
}

impl Cost for Costs {
    fn action(&self, _: u32, action: Action) -> u64 {
        let of = |costs: &PerStage| costs.of(action.stage, action.microbatch);
        match action.op {
            Op::Forward => of(&self.forward),
            Op::BackwardInput => of(&self.input),
            Op::BackwardWeight => of(&self.weight),
            Op::Backward => of(&self.input).saturating_add(of(&self.weight)),
            _ => 0,
        }
    }

    fn transfer(&self, message: Message) -> u64 {
        self.transfer.of(message.from, message.microbatch)
    }
}

/// When a step begins and ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its start.
    pub start: u64,
    /// Its end.
    pub end: u64,
}

/// The spans of all steps, by rank, with so many slots an edge.
pub(super) fn spans(
    graph: &Graph<'_>,
    costs: &impl Cost,
    slots: Option<u32>,
) -> Result<Vec<Vec<Span>>, Flaw> {
    let steps = &graph.schedule.ranks;
    let mut clock = WalkClock {
        graph,
        costs,
        slots,
        spans: steps
            .iter()
            .map(|steps| Vec::with_capacity(steps.len()))
            .collect(),
        reached: match slots {
            Some(0) => steps.iter().map(|_| vec![0]).collect(),
            _ => Vec::new(),
        },
    };
    walk(graph, slots, &mut clock)?;
    Ok(clock.spans)
}

/// Tells the steps of a walk their times.
struct WalkClock<'a, C> {
    graph: &'a Graph<'a>,
    costs: &'a C,
    slots: Option<u32>,
    spans: Vec<Vec<Span>>,
    /// Where a send waits for its receive: when each rank came to each of its steps.
    reached: Vec<Vec<u64>>,
}

impl<C: Cost> WalkClock<'_, C> {
    fn end(&self, rank: u32, node: u32) -> u64 {
        let at = node - self.graph.first(rank);
        self.spans[rank as usize][at as usize].end
    }

    fn reached(&self, rank: u32, node: u32) -> u64 {
        let at = node - self.graph.first(rank);
        self.reached[rank as usize][at as usize]
    }

    /// When a message has left.
    fn sent(&self, message: Message) -> u64 {
        let sending = self.graph.node(self.graph.sending(message));
        let end = self.end(self.graph.rank_of(message.from), sending);
        if self.slots != Some(0) {
            return end;
        }
        let receiving = self.graph.node(self.graph.receiving(message));
        end.max(self.reached(self.graph.rank_of(message.to), receiving))
    }
}

impl<C: Cost> Visit for WalkClock<'_, C> {
    fn begin(&mut self, rank: u32, node: u32) -> Result<(), Flaw> {
        let mut start = match self.slots {
            Some(0) => self.reached(rank, node),
            _ => self.spans[rank as usize].last().map_or(0, |span| span.end),
        };
        let mut is_past = false;
        self.graph.waits(rank, node, self.slots, |wait| {
            let there = match wait.why {
                Why::Slot | Why::Receive => Some(self.end(wait.rank, wait.node)),
                Why::Input => {
                    let transfer = self.costs.transfer(wait.message);
                    self.sent(wait.message).checked_add(transfer)
                }
            };
            is_past |= there.is_none();
            start = start.max(there.unwrap_or(u64::MAX));
        });
        let duration = self.costs.step(rank, self.graph.step(rank, node));
        match start.checked_add(duration).filter(|_| !is_past) {
            None => Err(Flaw::TooLong(self.graph.place(node))),
            Some(end) => {
                self.spans[rank as usize].push(Span { start, end });
                Ok(())
            }
        }
    }

    fn leave(&mut self, rank: u32, node: u32) {
        if self.slots != Some(0) {
            return;
        }
        let mut left = self.end(rank, node);
        self.graph.holds(rank, node, |hold| {
            left = left.max(self.reached(hold.rank, hold.node));
        });
        self.reached[rank as usize].push(left);
    }
}
