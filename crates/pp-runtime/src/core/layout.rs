//! The stages of one rank, and what each is connected to.

use pp_contract::pipeline::EdgeKind;
use pp_contract::{Pipeline, Rank};

/// The input from the stage before, and the output to the stage behind.
pub const ONWARD: usize = 0;
/// The input from the last stage of a ring to its first, and the output from there.
pub const LAP: usize = 1;

/// What an input or an output of a stage is connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wire {
    /// Nothing.
    None,
    /// Another stage of this rank, by its place among those.
    Local(usize),
    /// An edge to another rank, by its place in [`Pipeline::edges`].
    Edge(usize),
}

/// A stage of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LocalStage {
    /// Its place in the pipeline.
    pub at: usize,
    /// Where chunks come from, by [`ONWARD`] and [`LAP`]. To the source come acceptances.
    pub inputs: [Wire; 2],
    /// Where chunks go to, by [`ONWARD`] and [`LAP`]. From the sink go acceptances.
    pub outputs: [Wire; 2],
    /// It is the last stage.
    pub is_sink: bool,
    /// The last stage of this rank that stands in the same ring, if it is the first stage of a ring.
    pub ring_end: Option<usize>,
}

impl LocalStage {
    /// Whether it is the first stage.
    #[must_use]
    pub const fn is_source(&self) -> bool {
        self.at == 0
    }
}

/// The stages that `rank` leads, in the order of the pipeline.
#[must_use]
pub fn stages_of(pipeline: &Pipeline, rank: Rank) -> Vec<LocalStage> {
    let all = pipeline.stages();
    let last = all.len() - 1;
    let own: Vec<usize> = (0..=last).filter(|at| all[*at].leader() == rank).collect();
    let local = |at: usize| own.iter().position(|own| *own == at);
    let edge = |kind, from, to| {
        let mut edges = pipeline.edges();
        edges.position(|edge| (edge.kind, edge.from, edge.to) == (kind, from, to))
    };
    let wire = |kind, from: usize, to: usize, other: usize| match local(other) {
        Some(place) => Wire::Local(place),
        None => edge(kind, from, to).map_or(Wire::None, Wire::Edge),
    };
    own.iter()
        .map(|&at| {
            let mut inputs = [Wire::None; 2];
            let mut outputs = [Wire::None; 2];
            let (kind, from) = match at {
                0 => (EdgeKind::Accept, last),
                _ => (EdgeKind::Onward, at - 1),
            };
            inputs[ONWARD] = wire(kind, from, at, from);
            let (kind, to) = match at == last {
                true => (EdgeKind::Accept, 0),
                false => (EdgeKind::Onward, at + 1),
            };
            outputs[ONWARD] = wire(kind, at, to, to);
            let mut ring_end = None;
            if let Some(ring) = pipeline.ring_at(at) {
                if at == ring.first {
                    inputs[LAP] = wire(EdgeKind::Lap, ring.last, at, ring.last);
                    ring_end = own.iter().rposition(|own| *own <= ring.last);
                }
                if at == ring.last {
                    outputs[LAP] = wire(EdgeKind::Lap, at, ring.first, ring.first);
                }
            }
            LocalStage {
                at,
                inputs,
                outputs,
                is_sink: at == last,
                ring_end,
            }
        })
        .collect()
}

/// The output by which a chunk leaves stage `at` that works on it in lap `lap`, and the lap in which the next stage works
/// on it. `laps` is how often a chunk goes through the stage in all.
#[must_use]
pub fn way_out(pipeline: &Pipeline, at: usize, lap: u16, laps: u16) -> (usize, u16) {
    match pipeline.ring_at(at) {
        Some(ring) if at < ring.last => (ONWARD, lap),
        Some(_) if lap + 1 < laps => (LAP, lap + 1),
        _ => (ONWARD, 0),
    }
}
