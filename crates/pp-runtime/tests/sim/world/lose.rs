//! A rank dies, all others hear of it, and all meet again with another process in its place. Or the job is aborted.

use pp_runtime::core::{Decision, EndEvent, Ending};

use super::{Map, Operation, Phase, Shared, Step, World, hold};

impl World {
    pub(super) fn losses(&self, map: &Map, steps: &mut Vec<Step>) {
        for rank in 0..self.ranks.len() {
            let is_there = self.lives(rank) || self.waits(rank);
            if is_there && map.shape.may_die(rank) && self.deaths < map.shape.deaths {
                steps.push(Step::Lose { rank });
            }
            if self.unaware[rank] && self.lives(rank) {
                steps.push(Step::HearLoss { rank });
            }
        }
        let is_done = self.at(0).phase == Phase::Finished && !self.has_aborted;
        for rank in 1..self.ranks.len() {
            if self.waits(rank) && is_done {
                steps.push(Step::Leave { rank });
            }
            let is_said = is_done || (self.lives(0) && self.at(0).core.ending().is_served());
            let may_hear = is_said && map.shape.deaths > 0 && self.lives(rank);
            if may_hear && self.at(rank).core.ending() < Ending::Served {
                steps.push(Step::HearServed { rank });
            }
        }
        if map.shape.may_abort && !self.has_aborted && self.lives(0) {
            steps.push(Step::Abort);
        }
        let all_wait = (0..self.ranks.len()).all(|r| self.ranks[r].is_none() || self.waits(r));
        if all_wait && self.ranks.iter().any(Option::is_none) {
            steps.push(Step::Meet);
        }
    }

    /// A rank is gone. What it has sent may still be heard.
    pub(super) fn lose(&mut self, map: &Map, rank: usize) {
        self.deaths += 1;
        self.ranks[rank] = None;
        self.leave_edges(map, rank);
        self.tell_loss();
    }

    pub(super) fn abort(&mut self) {
        self.has_aborted = true;
        self.tell_loss();
    }

    fn tell_loss(&mut self) {
        for rank in 0..self.ranks.len() {
            self.unaware[rank] = self.lives(rank) && self.at(rank).core.ending() < Ending::Alone;
        }
    }

    pub(super) fn hear_served(&mut self, rank: usize) {
        self.node(rank).core.handle_end(EndEvent::Serve);
    }

    pub(super) fn hear_loss(&mut self, map: &Map, rank: usize) {
        self.unaware[rank] = false;
        // As the switch does, and then the driver.
        let event = match self.has_aborted {
            true => EndEvent::Fault,
            false => EndEvent::Lose,
        };
        let core = &mut self.node(rank).core;
        core.handle_end(event);
        core.handle_end(EndEvent::Leave);
        self.leave_group(map, rank);
        if self.is_alone(rank) {
            return self.conclude_all(map, rank);
        }
        let node = self.node(rank);
        hold(
            node.core.poll(&[]) == Decision::Stop,
            "an abort stops a rank at once",
            || format!("rank {rank}"),
        );
    }

    /// What a rank does that has stopped: it ends if the others can do without it, and waits for them otherwise.
    pub(super) fn stop(&mut self, map: &Map, rank: usize) {
        self.leave_edges(map, rank);
        let has_aborted = self.has_aborted;
        let node = self.node(rank);
        node.operations
            .retain(|operation| matches!(operation, Operation::Work(_)));
        if node.core.is_closing() || has_aborted {
            return self.finish(map, rank);
        }
        node.phase = Phase::Waiting;
    }

    pub(super) fn finish(&mut self, map: &Map, rank: usize) {
        let sink = map.shape.pipeline.sink().get() as usize;
        if rank == 0 && sink != 0 && !self.has_aborted {
            let last = map.places[sink].len() - 1;
            let has_stored = self.at(sink).core.has_closed(last);
            hold(
                has_stored,
                "the sink has stored all before the source is done",
                String::new,
            );
        }
        self.leave_edges(map, rank);
        self.unaware[rank] = false;
        self.node(rank).phase = Phase::Finished;
    }

    /// Nobody reads what is on the edges to this rank.
    fn leave_edges(&mut self, map: &Map, rank: usize) {
        for edge in 0..self.lanes.len() {
            if map.target(edge).0 == rank {
                let lane = &mut self.lanes[edge];
                lane.is_open = false;
                lane.queue.clear();
                lane.arriving = 0;
            }
        }
    }

    /// All edges are made anew, and each rank begins the attempt.
    pub(super) fn meet(&mut self, map: &Map) {
        for edge in 0..self.lanes.len() {
            self.lanes[edge] = map.lane(edge, self.lanes[edge].generation + 1);
        }
        self.sent.clear();
        self.told = self.hard.len();
        let attempt = u16::from(self.deaths);
        for rank in 0..self.ranks.len() {
            if self.ranks[rank].is_none() {
                self.ranks[rank] = Some(Shared::new(map.node(rank)));
            }
            let node = self.node(rank);
            node.core.handle_attempt(attempt);
            node.core.handle_end(EndEvent::Reconnect);
            node.phase = Phase::Running;
            node.reports.clear();
            self.conclude_all(map, rank);
        }
    }
}
