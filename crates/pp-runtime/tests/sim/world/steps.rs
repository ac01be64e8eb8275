//! What may happen next.

use pp_runtime::core::Decision;

use super::{Device, Map, Step, World};

impl World {
    /// All that may happen next.
    pub(crate) fn steps(&self, map: &Map) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.lives(0) && self.at(0).inside.is_none() && self.at(0).core.wants_offer() {
            steps.push(Step::Offer);
        }
        if (self.lives(0) || self.waits(0)) && map.shape.may_drain && !self.has_drained {
            steps.push(Step::Drain);
        }
        for rank in 0..self.ranks.len() {
            if self.lives(rank) && self.at(rank).inside.is_none() {
                self.steps_of(map, rank, &mut steps);
            }
        }
        for edge in 0..self.lanes.len() {
            let rank = map.target(edge).0;
            if !self.lives(rank) || self.is_alone(rank) {
                continue;
            }
            if !self.lanes[edge].queue.is_empty() && self.may_hear(map, edge) {
                steps.push(Step::Hear { edge });
            }
            let is_moving = matches!(map.shape.device, Device::Moving | Device::Both);
            if is_moving && self.lanes[edge].arriving > 0 {
                steps.push(Step::Arrive { edge });
            }
        }
        self.losses(map, &mut steps);
        steps
    }

    fn steps_of(&self, map: &Map, rank: usize, steps: &mut Vec<Step>) {
        for is_ready in [true, false] {
            let facts = self.facts(map, rank, is_ready);
            let action = self.at(rank).core.poll(&facts);
            if action != Decision::Wait {
                steps.push(Step::Act(rank, is_ready, action));
            }
            let takes = |stage: usize| map.places[rank][stage].is_sink;
            // Whether the sink is ready matters only where it would take a chunk.
            if !matches!(action, Decision::Run { stage, .. } if takes(stage)) {
                break;
            }
        }
        let told = self.at(rank).told;
        let cuts = self.hard[self.told..].iter().filter(|epoch| **epoch > told);
        steps.extend(cuts.map(|epoch| Step::Tell {
            rank,
            epoch: *epoch,
        }));
        match map.shape.device {
            Device::Working | Device::Both => {
                let stages = 0..map.places[rank].len();
                let works = stages.filter(|stage| self.may_finish(map, rank, *stage));
                steps.extend(works.map(|stage| Step::FinishWork { rank, stage }));
            }
            Device::InOrder if self.may_operate(map, rank) => steps.push(Step::Operate { rank }),
            _ => {}
        }
    }
}
