//! Proves that a schedule runs to its end, and says what that takes.
//!
//! Hazard: a schedule that runs with many slots on each edge may be a deadlock with few, and nothing says so before the job.
//! Guarantee: an accepted schedule has every action once, receives in the order in which it sends, and runs to its end with
//! [`Report::slots_per_edge`] slots on every edge, whatever its actions take; a smaller number is not enough.
//!
//! Choices: a message has a slot of its edge from the start of the computation that makes it to the end of the one that uses
//! it: the first waits for a free slot. So a compute list and what it is lowered to need the same. With 0 slots a send ends
//! only when its receive has begun: a `SEND` when the receiver's rank has come to the `RECV`; in a compute list, where a
//! computation sends at its end, when that rank has come to the computation that uses the message. A receive is posted and
//! does not hold its rank up; a `WAIT_SEND` waits until its message is received.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::clock::{Cost, Costs, Span, spans};
use super::crossing::{Crossing, crossings};
use super::flaw::Flaw;
use super::graph::Graph;
use super::limits::Limits;
use super::walk::{least_slots, walk};
use super::{Op, Schedule, Way};

/// The use of an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdgeUse {
    /// Which way.
    pub way: Way,
    /// The stage that sends.
    pub from: u32,
    /// The stage that receives.
    pub to: u32,
    /// The most slots that are taken at a time.
    pub peak: u32,
}

/// Counts the resources that a schedule needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// By rank: the most activations that it keeps at a time. An `F` makes one, a `W` or a `B` frees it.
    pub activation_slots: Vec<u32>,
    /// By rank, over all its stages: the most pending `W` at a time. A `W` is pending from the end of its `I`.
    pub undone_weights: Vec<u32>,
    /// By rank: the most sends that are not retired. One lasts from its `SEND` to its `WAIT_SEND`; in a schedule without
    /// those, as long as its message has a slot.
    pub outstanding_sends: Vec<u32>,
    /// The smallest number of slots that suffices on all edges; 0 where there is no edge.
    pub slots_per_edge: u32,
    /// The use of each edge, in the order of sending stages.
    pub edges: Vec<EdgeUse>,
    /// For each two ranks, one way: the first messages that cross. It is empty for a list of computations.
    pub crossings: Vec<Crossing>,
}

impl Schedule {
    /// Proves that the schedule runs to its end, within the limits. Without a limit any number of slots will do.
    ///
    /// What depends on times (`edges`, and `outstanding_sends` of a schedule without `WAIT_SEND`) is that of a run with
    /// [`Report::slots_per_edge`] slots in which each of `F`, `I` and `W` takes one unit, and a transfer none.
    ///
    /// # Errors
    /// The first [`Flaw`].
    pub fn check(&self, limits: Limits) -> Result<Report, Flaw> {
        let graph = Graph::new(self)?;
        let least = least_slots(&graph)?;
        if let Some(slots) = limits.slots.filter(|slots| *slots == 0 || *slots < least) {
            walk(&graph, Some(slots), &mut ())?;
        }
        report(&graph, &Costs::default(), least)
    }

    /// By rank: the most activations that it keeps at a time, each as much as `size_of` its stage.
    ///
    /// With a size in bytes the sum is in bytes; it ends at [`u64::MAX`].
    #[must_use]
    pub fn activations(&self, size_of: impl Fn(u32) -> u64) -> Vec<u64> {
        let frees = |op| matches!(op, Op::Backward | Op::BackwardWeight);
        self.peaks(|op| op == Op::Forward, frees, size_of)
    }

    /// By rank: the most pending `W` at a time, each as much as `size_of` its stage. A `W` is pending from the end of its `I`.
    #[must_use]
    pub fn undone_weights(&self, size_of: impl Fn(u32) -> u64) -> Vec<u64> {
        let takes = |op| op == Op::BackwardInput;
        self.peaks(takes, |op| op == Op::BackwardWeight, size_of)
    }

    /// By rank: the most that is taken and not freed at a time.
    fn peaks(
        &self,
        takes: impl Fn(Op) -> bool,
        frees: impl Fn(Op) -> bool,
        size_of: impl Fn(u32) -> u64,
    ) -> Vec<u64> {
        let peak = |steps: &Vec<super::Step>| {
            let (mut held, mut peak) = (0_u64, 0);
            for action in steps.iter().flat_map(super::Step::actions) {
                if takes(action.op) {
                    held = held.saturating_add(size_of(action.stage));
                    peak = peak.max(held);
                }
                if frees(action.op) {
                    held = held.saturating_sub(size_of(action.stage));
                }
            }
            peak
        };
        self.ranks.iter().map(peak).collect()
    }
}

/// What a proven schedule takes, with the use of edges in a run at these costs with so many slots.
pub(super) fn report(
    graph: &Graph<'_>,
    costs: &impl Cost,
    slots_per_edge: u32,
) -> Result<Report, Flaw> {
    let slots = Some(slots_per_edge).filter(|slots| *slots > 0);
    let spans = spans(graph, costs, slots)?;
    let counts = |peaks: Vec<u64>| peaks.into_iter().map(|peak| peak as u32).collect();
    let schedule = graph.schedule;
    Ok(Report {
        activation_slots: counts(schedule.activations(|_| 1)),
        undone_weights: counts(schedule.undone_weights(|_| 1)),
        outstanding_sends: match graph.has_waits {
            true => counts(schedule.peaks(
                |op| matches!(op, Op::Send(_)),
                |op| matches!(op, Op::WaitSend(_)),
                |_| 1,
            )),
            false => outstanding(graph, &spans),
        },
        slots_per_edge,
        edges: uses(graph, &spans),
        crossings: crossings(graph),
    })
}

fn span(graph: &Graph<'_>, spans: &[Vec<Span>], rank: u32, node: u32) -> Span {
    spans[rank as usize][(node - graph.first(rank)) as usize]
}

/// By rank: the most messages at a time that it has begun to make and that are not used up.
fn outstanding(graph: &Graph<'_>, spans: &[Vec<Span>]) -> Vec<u32> {
    let peak = |rank: u32| {
        let mut ends = BinaryHeap::new();
        let mut peak = 0;
        for node in graph.first(rank)..graph.first(rank + 1) {
            let now = span(graph, spans, rank, node).start;
            let actions = graph.step(rank, node).actions();
            for message in actions.filter_map(|action| graph.making(action)) {
                while ends.peek().is_some_and(|Reverse(end)| *end <= now) {
                    ends.pop();
                }
                let user = span(graph, spans, graph.rank_of(message.to), graph.user(message));
                ends.push(Reverse(user.end));
                peak = peak.max(ends.len());
            }
        }
        peak as u32
    };
    (0..graph.ranks()).map(peak).collect()
}

/// The most slots of each edge that are taken at a time.
fn uses(graph: &Graph<'_>, spans: &[Vec<Span>]) -> Vec<EdgeUse> {
    let stages = graph.schedule.stages() as usize;
    // By way and sending stage.
    let mut made = [0; 2].map(|_: u32| vec![0_usize; stages]);
    let (mut freed, mut peaks) = (made.clone(), made.clone());
    for (rank, node, action) in graph.actions() {
        let Some(message) = graph.making(action) else {
            continue;
        };
        let now = span(graph, spans, rank, node).start;
        let (way, from) = (message.way as usize, message.from as usize);
        let to = graph.rank_of(message.to);
        let users = graph.users(message.way, message.from);
        // Where actions take no time, later messages are used at the same moment.
        let users = &users[freed[way][from]..made[way][from]];
        let ended = |user: &&u32| span(graph, spans, to, **user).end <= now;
        freed[way][from] += users.iter().take_while(ended).count();
        made[way][from] += 1;
        peaks[way][from] = peaks[way][from].max(made[way][from] - freed[way][from]);
    }
    let edge_use = |(way, from, to): (Way, u32, u32)| EdgeUse {
        way,
        from,
        to,
        peak: peaks[way as usize][from as usize] as u32,
    };
    graph.edges().map(edge_use).collect()
}
