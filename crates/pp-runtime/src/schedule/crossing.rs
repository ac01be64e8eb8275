//! Messages between two ranks that are received in another order than they are sent.
//!
//! Hazard: PyTorch matches the messages from one rank to another by their order alone. If several edges lead from one rank to
//! another, each may keep its order, and PyTorch may still mix their messages up. Guarantee: the first such messages are
//! found for each two ranks, in time linear in the actions. They are no flaw: in `pp` each edge has a queue of its own.

use std::fmt;

use super::flaw::StepPlace;
use super::graph::{Graph, Message};

/// The first two messages from one rank to another that are received in another order than they are sent. They are of
/// different edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crossing {
    /// Two sends in their order.
    pub sends: [StepPlace; 2],
    /// The receives of the same messages in their order, which is the other one.
    pub receives: [StepPlace; 2],
}

impl fmt::Display for Crossing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sends, receives } = self;
        let (from, to) = (sends[0].rank, receives[0].rank);
        write!(
            f,
            "PyTorch matches the messages from rank {from} to rank {to} by their order, and would mix these up: {} comes \
             before {}, but {} comes before {}",
            sends[0], sends[1], receives[0], receives[1]
        )
    }
}

/// What was found between two ranks, one way.
#[derive(Clone, Default)]
struct Pair {
    /// The nodes of the sends, in their order.
    sent: Vec<u32>,
    received: usize,
    crossing: Option<Crossing>,
}

/// The first crossing of each directed pair of ranks, by sending rank, then by receiving rank.
pub(super) fn crossings(graph: &Graph<'_>) -> Vec<Crossing> {
    if !graph.is_lowered {
        return Vec::new();
    }
    let ranks_of = |from, to| (graph.rank_of(from), graph.rank_of(to));
    let mut ranks: Vec<_> = graph
        .edges()
        .map(|(_, from, to)| ranks_of(from, to))
        .collect();
    ranks.sort_unstable();
    ranks.dedup();
    // By way and sending stage.
    let mut places = [0; 2].map(|_: u32| vec![0; graph.schedule.stages() as usize]);
    for (way, from, to) in graph.edges() {
        let of_edge = ranks_of(from, to);
        places[way as usize][from as usize] = ranks.partition_point(|pair| *pair < of_edge);
    }
    let place_of = |message: Message| places[message.way as usize][message.from as usize];
    let mut pairs = vec![Pair::default(); ranks.len()];
    for (_, node, action) in graph.actions() {
        if let Some(message) = graph.sent(action) {
            pairs[place_of(message)].sent.push(node);
        }
    }
    for (_, node, action) in graph.actions() {
        if let Some(message) = graph.received(action) {
            let pair = &mut pairs[place_of(message)];
            let due = pair.sent[pair.received];
            pair.received += 1;
            let sending = graph.node(graph.sending(message));
            if due == sending || pair.crossing.is_some() {
                continue;
            }
            let mut first = graph.place(due).step.actions();
            let first = first.find_map(|action| graph.sent(action));
            pair.crossing = first.map(|first| Crossing {
                sends: [due, sending].map(|node| graph.place(node)),
                receives: [node, graph.node(graph.receiving(first))].map(|node| graph.place(node)),
            });
        }
    }
    pairs.into_iter().filter_map(|pair| pair.crossing).collect()
}
