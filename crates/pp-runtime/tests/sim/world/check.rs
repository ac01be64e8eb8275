//! What must never be, and what has to be so at the end.

use pp_runtime::core::{Cut, LAP, ONWARD, StageFacts, Wire};

use super::{Map, Phase, Pool, World};

/// A property must hold.
#[track_caller]
pub(crate) fn hold(yes: bool, property: &str, detail: impl FnOnce() -> String) {
    assert!(yes, "{property}: {}", detail());
}

impl World {
    /// What holds at any moment.
    pub(crate) fn check(&self, map: &Map) {
        let source = self.at(0);
        let depth = u64::from(map.shape.depth);
        let counts = source.core.counts();
        let open = counts.admitted - self.accepted;
        let in_flight = u64::from(source.core.in_flight());
        hold(
            open <= in_flight && in_flight <= depth,
            "in flight stays within the depth",
            || format!("{open}, {in_flight} at depth {depth}"),
        );
        for rank in (0..self.ranks.len()).filter(|rank| self.lives(*rank)) {
            for asked in self.at(rank).asked.iter().flatten() {
                let never_comes = match *asked {
                    Pool::Edge { edge, generation } => {
                        self.is_alone(rank) || self.lanes[edge].generation != generation
                    }
                    _ => false,
                };
                hold(
                    !never_comes,
                    "no payload is asked for that never comes",
                    || format!("rank {rank}: {asked:?}"),
                );
            }
        }
    }

    /// What is inside of a ring goes before what wants in: it holds slots, and leaves sooner.
    pub(super) fn holds_order(
        &self,
        map: &Map,
        rank: usize,
        facts: &[StageFacts],
        (stage, input): (usize, usize),
    ) {
        let places = &map.places[rank];
        let Some(end) = places[stage].ring_end.filter(|_| input == ONWARD) else {
            return;
        };
        for inside in stage..=end {
            for other in [LAP, ONWARD] {
                let is_entry = (inside, other) == (stage, ONWARD);
                let goes = |output| {
                    facts[inside].is_free[output] || places[inside].outputs[output] == Wire::None
                };
                let has_work = !self.at(rank).is_stale[inside][other];
                let is_here = facts[inside].is_here[other] && has_work;
                let is_ready = is_here && goes(ONWARD) && goes(LAP);
                hold(
                    is_entry || !is_ready,
                    "what is in a ring goes first",
                    || format!("rank {rank}, stage {inside}"),
                );
            }
        }
    }

    /// What holds where nothing more can happen.
    pub(crate) fn check_end(&self, map: &Map) {
        if self.has_aborted {
            let lives = (0..self.ranks.len()).find(|rank| self.lives(*rank));
            return hold(lives.is_none(), "an aborted job ends", || {
                format!("{lives:?}")
            });
        }
        for rank in 0..self.ranks.len() {
            // Nobody takes the place of a rank that dies once the source needs it no more.
            let is_over = |rank: usize| self.at(rank).phase == Phase::Finished;
            let has_ended = self.ranks[rank].is_none() || is_over(rank);
            hold(is_over(0) && has_ended, "nobody waits for ever", || {
                format!("rank {rank}")
            });
        }
        let is_quiet = |lane: &super::Lane| {
            lane.queue.is_empty() && lane.arriving == 0 && lane.begun.is_empty()
        };
        let is_whole = |lane: &super::Lane| is_quiet(lane) && lane.is_closed;
        hold(
            self.deaths > 0 || self.lanes.iter().all(is_whole),
            "nothing is left on an edge, and one SHUTDOWN goes over each",
            String::new,
        );
        let counts = self.at(0).core.counts();
        let script = &map.shape.script;
        hold(
            self.has_drained || counts.admitted == script.len() as u64,
            "all chunks are admitted",
            || format!("{counts:?}"),
        );
        let all_end = counts.emitted + counts.dropped == counts.admitted;
        hold(all_end, "all chunks end", || format!("{counts:?}"));
        let taken = self.taken.len() as u64;
        let is_told = counts.emitted == taken;
        hold(is_told, "the source hears of what the sink takes", || {
            format!("{taken} were taken: {counts:?}")
        });
        let is_hard = script.contains(&Cut::Hard);
        let all: Vec<u64> = (0..counts.admitted).collect();
        let mut sorted = self.taken.clone();
        sorted.sort_unstable();
        let taken = match self.turns.is_empty() {
            true => &self.taken,
            false => &sorted,
        };
        hold(is_hard || *taken == all, "the sink takes all", || {
            format!("{:?}", self.taken)
        });
        self.check_turns(map, counts.admitted);
        let newest = map.shape.script.iter().rposition(|cut| *cut == Cut::Hard);
        let newest = newest.map_or(0, |at| at as u64)..counts.admitted;
        hold(
            newest.clone().all(|chunk| self.taken.contains(&chunk)),
            "what follows the last cut is taken",
            || format!("{:?}", self.taken),
        );
    }
}
