//! The stages of one rank, and what each is connected to.

use pp_contract::pipeline::{EdgeKind, EdgeSpec};
use pp_contract::{Pipeline, Rank};

/// The input from the stage before, and the output to the stage behind.
pub const ONWARD: usize = 0;
/// The input from the last stage of a ring to its first, and the output from there.
pub const LAP: usize = 1;

/// Names the other end of an input or output of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wire {
    /// Nothing.
    None,
    /// Another stage of this rank, by its place among those.
    Local(usize),
    /// An edge to another rank, by its place in [`Pipeline::edges`].
    Edge(usize),
}

/// How a rank takes part in a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Membership {
    /// It runs the stage alone.
    Alone,
    /// It leads a group with so many other members, whose reports come to it.
    Leads {
        /// The other members.
        others: usize,
    },
    /// It is another member of a group: chunks come from the leader, and reports go there.
    Follows,
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
    /// How this rank takes part in it.
    pub membership: Membership,
    /// The last stage of this rank that stands in the same ring, if it is the first stage of a ring.
    pub ring_end: Option<usize>,
}

impl LocalStage {
    /// Says whether it is the first stage.
    #[must_use]
    pub const fn is_source(&self) -> bool {
        self.at == 0
    }

    /// Says whether this rank does in it what the leader does.
    #[must_use]
    pub const fn follows(&self) -> bool {
        matches!(self.membership, Membership::Follows)
    }

    /// The other members of the group that this rank leads.
    #[must_use]
    pub const fn followers(&self) -> usize {
        match self.membership {
            Membership::Leads { others } => others,
            Membership::Alone | Membership::Follows => 0,
        }
    }
}

/// The stages that `rank` runs, alone or as a member of a group, in the order of the pipeline.
#[must_use]
pub fn stages_of(pipeline: &Pipeline, rank: Rank) -> Vec<LocalStage> {
    let all = pipeline.stages();
    let last = all.len() - 1;
    let own: Vec<usize> = pipeline.stages_at(rank).map(|(at, _)| at).collect();
    // What comes to a stage comes to the rank that leads there.
    let leads = |at: usize| all[at].leader() == rank;
    let local = |at: usize| own.iter().position(|own| *own == at && leads(at));
    let edge = |kind, from, to| {
        let mut edges = pipeline.edges();
        edges.position(|edge| (edge.kind, edge.from, edge.to) == (kind, from, to))
    };
    let with_leader = |kind, at: usize| {
        let mut edges = pipeline.edges();
        let is_it = |edge: EdgeSpec| {
            (edge.kind, edge.from) == (kind, at) && [edge.source, edge.target].contains(&rank)
        };
        edges.position(is_it).map_or(Wire::None, Wire::Edge)
    };
    let wire = |kind, from: usize, to: usize, other: usize| match local(other) {
        Some(place) => Wire::Local(place),
        None => edge(kind, from, to).map_or(Wire::None, Wire::Edge),
    };
    own.iter()
        .map(|&at| {
            let mut inputs = [Wire::None; 2];
            let mut outputs = [Wire::None; 2];
            if !leads(at) {
                inputs[ONWARD] = with_leader(EdgeKind::Follow, at);
                outputs[ONWARD] = with_leader(EdgeKind::Report, at);
                return LocalStage {
                    at,
                    inputs,
                    outputs,
                    is_sink: false,
                    membership: Membership::Follows,
                    ring_end: None,
                };
            }
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
                membership: match all[at].ranks.len() - 1 {
                    0 => Membership::Alone,
                    others => Membership::Leads { others },
                },
                ring_end,
            }
        })
        .collect()
}

/// Stage and input, in the order in which a rank looks at them.
///
/// What goes to other ranks early keeps them busy, so stages are looked at in the order of the pipeline. Stages that hand
/// on to each other on this rank are looked at from the last to the first: a chunk is done before the next one begins.
pub(super) fn order(stages: &[LocalStage]) -> Vec<(usize, usize)> {
    let places: Vec<usize> = (0..stages.len()).collect();
    let hands_on = |from: &usize, to: &usize| stages[*from].outputs[ONWARD] == Wire::Local(*to);
    let mut order = Vec::new();
    for run in places.chunk_by(hands_on) {
        for &place in run.iter().rev() {
            if stages[place].inputs[LAP] != Wire::None {
                order.push((place, LAP));
            }
            // What is inside a ring goes before what wants in.
            let is_behind = |end: &usize| run.contains(end);
            if stages[place].ring_end.as_ref().is_none_or(is_behind) {
                order.push((place, ONWARD));
            }
        }
        let enters = |first: &usize| {
            stages[*first]
                .ring_end
                .is_some_and(|end| run.contains(&end))
        };
        let earlier = (0..run[0]).filter(enters);
        order.extend(earlier.map(|first| (first, ONWARD)));
    }
    // Other ranks wait in a collective for what a leader has told this one.
    order.sort_by_key(|(place, _)| !stages[*place].follows());
    order
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_done_before_the_next_begins_unless_other_ranks_wait_for_that() {
        let ordered = |text: &str, rank| {
            let stages = stages_of(&text.parse().unwrap(), Rank::new(rank));
            let name = |(place, input): (usize, usize)| {
                let name = ["a", "b", "c", "d", "e"][stages[place].at];
                format!("{name}{}", if input == LAP { "'" } else { "" })
            };
            let names: Vec<String> = order(&stages).into_iter().map(name).collect();
            names.join(" ")
        };
        for (text, rank, expected) in [
            ("a@0,b@0,c@0", 0, "c b a"),
            ("a@0,b@1,c@0", 0, "a c"),
            ("a@0,b@0,c@1,d@0", 0, "b a d"),
            ("a@0,b@1,c@0,d@1", 1, "b d"),
            ("a@0,b@0,c@1,d@1", 1, "d c"),
            // What is inside a ring goes first, also where the way leaves the rank.
            ("a@0,(b@0,c@0)*2,d@0", 0, "d c b' b a"),
            ("a@0,(b@0,c@1)*2,d@0", 0, "b' b a d"),
            ("a@0,(b@0,c@1,d@0)*2,e@0", 0, "b' a e d b"),
            // What the leader of a group has told goes before all else.
            ("a@0,b@1+0,c@0", 0, "b a c"),
        ] {
            assert_eq!(ordered(text, rank), expected, "{text}");
        }
    }
}
