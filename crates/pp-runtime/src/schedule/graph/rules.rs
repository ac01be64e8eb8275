//! The rules that a schedule follows before its ranks are looked at together.
//!
//! Hazard: a forward twice, a gradient that nobody sends, two messages in another order than they are received: data is
//! wrong, and nothing fails. Guarantee: the first action that breaks a rule is named, with the one that it contradicts.

use super::{BOTH, Graph, NONE, Neighbour, against, maker, message, table, way_of};
use crate::schedule::flaw::Flaw;
use crate::schedule::graph::Message;
use crate::schedule::{Action, Op, Step, Way};

impl Graph<'_> {
    /// Fills the tables, and looks for the first thing that is wrong.
    pub(super) fn judge(&mut self, are_reductions_awaited: bool) -> Result<(), Flaw> {
        self.look_for_gap()?;
        self.place_all()?;
        self.look_for_lack()?;
        self.look_at_order()?;
        self.look_at_reductions(are_reductions_awaited)?;
        self.number_messages()
    }

    /// No table is larger than the schedule: a forward that is missing is found before they are made.
    fn look_for_gap(&self) -> Result<(), Flaw> {
        let (stages, microbatches) = (self.schedule.stages(), self.schedule.microbatches);
        let is_forward = |action: &Action| action.op == Op::Forward;
        let actions = || self.actions().map(|(_, _, action)| action);
        let forwards = || actions().filter(is_forward);
        if forwards().count() as u64 >= u64::from(stages) * u64::from(microbatches) {
            return Ok(());
        }
        let there = forwards().map(|action| (action.microbatch, action.stage));
        let mut there: Vec<(u32, u32)> = there.collect();
        there.sort_unstable();
        there.dedup();
        let mut all = (0..microbatches).flat_map(|at| (0..stages).map(move |stage| (at, stage)));
        let mut there = there.into_iter();
        let gap = all.find(|wanted| there.next().as_ref() != Some(wanted));
        let Some((microbatch, stage)) = gap else {
            return Ok(());
        };
        let forward = Action::new(stage, Op::Forward, microbatch);
        let mut others = self.actions();
        let other = others.find(|(_, _, other)| {
            other.op.is_compute() && (other.stage, other.microbatch) == (stage, microbatch)
        });
        let rank = self.rank_of(stage);
        Err(match other {
            Some((_, node, _)) => self.missing(node, forward),
            None => Flaw::Absent { forward, rank },
        })
    }

    /// The step of this node needs an action that is not there.
    fn missing(&self, by: u32, needed: Action) -> Flaw {
        Flaw::Missing {
            by: self.place(by),
            needed,
            rank: self.rank_of(needed.stage),
        }
    }

    /// The step of one node comes before that of the other, which it needs.
    fn too_early(&self, early: u32, needed: u32) -> Flaw {
        Flaw::TooEarly {
            early: self.place(early),
            needed: self.place(needed),
        }
    }

    /// Fills the tables of nodes.
    fn place_all(&mut self) -> Result<(), Flaw> {
        let (stages, microbatches) = (self.schedule.stages(), self.schedule.microbatches);
        let size = self.index_of(stages, 0);
        let used = match (self.is_lowered, self.has_waits) {
            (_, true) => 9,
            (true, false) => 7,
            (false, false) => 3,
        };
        self.nodes[..used].fill(vec![NONE; size]);
        for (rank, node, action) in self.actions() {
            let is_inside = action.stage < stages && action.microbatch < microbatches;
            if !is_inside || self.rank_of(action.stage) != rank {
                return Err(Flaw::Outside(self.place(node)));
            }
            let Some(at) = table(action.op) else { continue };
            let way = match action.op {
                Op::Send(way) | Op::WaitSend(way) => Some(way),
                Op::Receive(way) => Some(against(way)),
                _ => None,
            };
            if way.is_some_and(|way| self.across(action.stage, way).is_none()) {
                return Err(Flaw::NoEdge(self.place(node)));
            }
            self.put(at, action, node)?;
            if action.op == Op::Backward {
                self.put(2, action, node)?;
            }
        }
        Ok(())
    }

    fn put(&mut self, at: usize, action: Action, node: u32) -> Result<(), Flaw> {
        let index = self.index(action);
        let before = std::mem::replace(&mut self.nodes[at][index], node);
        if before == NONE {
            return Ok(());
        }
        let (first, second) = (self.place(before), self.place(node));
        let is_same = first.step.actions().any(|other| other == action);
        Err(match is_same {
            true => Flaw::Twice {
                action,
                first,
                second,
            },
            false => Flaw::TwoBackwards { first, second },
        })
    }

    /// Looks for an action that another one asks for.
    fn look_for_lack(&self) -> Result<(), Flaw> {
        let (stages, microbatches) = (self.schedule.stages(), self.schedule.microbatches);
        let lacks = |stage, microbatch| self.lack(stage, microbatch);
        let mut all = (0..stages).flat_map(|stage| (0..microbatches).map(move |at| (stage, at)));
        if all.all(|(stage, microbatch)| lacks(stage, microbatch).is_none()) {
            return Ok(());
        }
        // The first microbatch explains more than the first stage.
        let mut all = (0..microbatches).flat_map(|at| (0..stages).map(move |stage| (stage, at)));
        let first = all.find_map(|(stage, microbatch)| lacks(stage, microbatch));
        first.map_or(Ok(()), Err)
    }

    /// What of a stage and a microbatch lacks what. All forwards are there.
    fn lack(&self, stage: u32, microbatch: u32) -> Option<Flaw> {
        let action = |op| Action::new(stage, op, microbatch);
        let is_there = |op| self.node(action(op)) != NONE;
        let (input, weight) = (Op::BackwardInput, Op::BackwardWeight);
        let pair = match (is_there(input), is_there(weight)) {
            (true, true) => None,
            (true, false) => Some((action(input), action(weight))),
            (false, true) => Some((action(weight), action(input))),
            (false, false) => Some((action(Op::Forward), action(Op::Backward))),
        };
        let mut pairs = pair.into_iter().chain(
            BOTH.into_iter()
                .filter_map(|way| self.lack_of_message(action(maker(way)), way)),
        );
        let (by, needed) = pairs.next()?;
        Some(self.missing(self.node(by), needed))
    }

    /// An action that is there, and one about the same message that is not, where the message comes to `user`.
    fn lack_of_message(&self, user: Action, way: Way) -> Option<(Action, Action)> {
        if !self.is_lowered && !self.has_waits {
            return None;
        }
        let message = self.arriving(user)?;
        let action = |stage, op| Action::new(stage, op, message.microbatch);
        let send = action(message.from, Op::Send(way));
        let receive = action(message.to, Op::Receive(way));
        let wait = action(message.from, Op::WaitSend(way));
        let is_there = |action| self.node(action) != NONE;
        match (is_there(send), is_there(receive), is_there(wait)) {
            (true, true, waits) => (self.has_waits && !waits).then_some((send, wait)),
            (true, false, _) => Some((send, receive)),
            (false, true, _) => Some((receive, send)),
            (false, false, true) => Some((wait, send)),
            (false, false, false) => self.is_lowered.then_some((user, receive)),
        }
    }

    /// Looks for a step that stands before one of its rank that it needs.
    fn look_at_order(&self) -> Result<(), Flaw> {
        for (_, node, action) in self.actions() {
            for needed in self.needed_here(action).into_iter().flatten() {
                let needed = self.node(needed);
                if needed >= node {
                    return Err(self.too_early(node, needed));
                }
            }
        }
        Ok(())
    }

    /// What an action needs of its own rank.
    fn needed_here(&self, action: Action) -> [Option<Action>; 2] {
        let here = |op| Some(Action::new(action.stage, op, action.microbatch));
        match action.op {
            Op::BackwardWeight => [here(Op::BackwardInput), None],
            Op::Send(way) => [here(maker(way)), None],
            Op::WaitSend(way) => [here(Op::Send(way)), None],
            op => {
                let Some(way) = way_of(op) else {
                    return [None; 2];
                };
                let input = match self.next(action.stage, against(way)) {
                    Neighbour::Here(from) => Some(Action::new(from, maker(way), action.microbatch)),
                    Neighbour::There(_) if self.is_lowered => here(Op::Receive(way)),
                    Neighbour::There(_) | Neighbour::End => None,
                };
                [input, here(Op::Forward).filter(|_| way == Way::Backward)]
            }
        }
    }

    /// A reduction comes after the last gradient of its stage, and one at a time is pending on a rank. Where nothing
    /// waits for reductions, each ends by itself.
    fn look_at_reductions(&self, are_awaited: bool) -> Result<(), Flaw> {
        let stages = self.schedule.stages() as usize;
        let (mut begun, mut ended) = (vec![NONE; stages], vec![NONE; stages]);
        let mut pending = None;
        let mut of_rank = 0;
        for (rank, node, step) in self.steps() {
            if rank != of_rank {
                (pending, of_rank) = (None, rank);
            }
            let Step::One(action) = step else { continue };
            let stage = action.stage as usize;
            let all = match action.op {
                Op::ReduceGrad => &mut begun,
                Op::WaitReduceGrad => &mut ended,
                _ => continue,
            };
            let before = std::mem::replace(&mut all[stage], node);
            if before != NONE {
                return Err(Flaw::Twice {
                    action,
                    first: self.place(before),
                    second: self.place(node),
                });
            }
            if action.op == Op::WaitReduceGrad {
                pending = None;
                continue;
            }
            if let Some(first) = pending.filter(|_| are_awaited) {
                return Err(Flaw::TwoReductions {
                    first: self.place(first),
                    second: self.place(node),
                });
            }
            pending = Some(node);
            let microbatches = self.schedule.microbatches as usize;
            let weights = &self.nodes[2][stage * microbatches..][..microbatches];
            if let Some(last) = weights.iter().max().filter(|last| **last > node) {
                return Err(self.too_early(node, *last));
            }
        }
        let pairs = (0..).zip(begun.into_iter().zip(ended));
        for (stage, (begun, ended)) in pairs.filter(|_| are_awaited) {
            let missing = |by, op| self.missing(by, Action::new(stage, op, 0));
            match (begun, ended) {
                (NONE, NONE) => {}
                (NONE, ended) => return Err(missing(ended, Op::ReduceGrad)),
                (begun, NONE) => return Err(missing(begun, Op::WaitReduceGrad)),
                (begun, ended) if ended < begun => return Err(self.too_early(ended, begun)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Numbers the messages of each edge as they are made and used, and looks whether they are received in the order in
    /// which they are sent.
    fn number_messages(&mut self) -> Result<(), Flaw> {
        let stages = self.schedule.stages();
        let none = vec![NONE; self.index_of(stages, 0)];
        let count = vec![0_u32; stages as usize];
        self.turns.fill(none.clone());
        self.users.fill(none.clone());
        let (mut made, mut used) = (
            [count.clone(), count.clone()],
            [count.clone(), count.clone()],
        );
        // The microbatches as they are sent, by way, stage and place.
        let mut sent = [none.clone(), none];
        let (mut sends, mut receives) = (made.clone(), made.clone());
        let next = |counts: &mut [Vec<u32>; 2], way: Way, from: u32| {
            let count = &mut counts[way as usize][from as usize];
            std::mem::replace(count, *count + 1)
        };
        for (_, node, action) in self.actions() {
            let microbatch = action.microbatch;
            if let Some(Message { way, from, .. }) = self.making(action) {
                let index = self.index_of(from, microbatch);
                self.turns[way as usize][index] = next(&mut made, way, from);
            }
            if let Some(Message { way, from, .. }) = self.arriving(action) {
                let index = self.index_of(from, next(&mut used, way, from));
                self.users[way as usize][index] = node;
            }
            if let Op::Send(way) = action.op {
                let index = self.index_of(action.stage, next(&mut sends, way, action.stage));
                sent[way as usize][index] = microbatch;
            }
        }
        for (_, _, action) in self.actions() {
            if let Some(received) = self.received(action) {
                let Message { way, from, .. } = received;
                let index = self.index_of(from, next(&mut receives, way, from));
                let wanted = sent[way as usize][index];
                if wanted != action.microbatch {
                    return Err(self.swapped(message(way, from, action.stage, wanted), action));
                }
            }
        }
        Ok(())
    }

    /// A receive that stands where that of the message sent first should.
    fn swapped(&self, first: Message, receive: Action) -> Flaw {
        let second = Message {
            microbatch: receive.microbatch,
            ..first
        };
        let place = |action| self.place(self.node(action));
        Flaw::Swapped {
            sends: Box::new([first, second].map(|message| place(self.sending(message)))),
            receives: Box::new([second, first].map(|message| place(self.receiving(message)))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Schedule;

    #[test]
    fn an_action_of_no_stage_of_its_rank_or_of_no_microbatch_is_refused() {
        let of = |stage, microbatch| {
            let forwards = [(0, 0), (stage, microbatch)];
            let step = |(stage, microbatch)| Step::One(Action::new(stage, Op::Forward, microbatch));
            let schedule = Schedule {
                ranks: vec![forwards.map(step).to_vec(), Vec::new()],
                rank_of: vec![0, 1],
                microbatches: 1,
            };
            Graph::new(&schedule).err()
        };
        for (stage, microbatch) in [(0, 1), (1, 0), (2, 0)] {
            let found = of(stage, microbatch);
            let is_outside = matches!(&found, Some(Flaw::Outside(place)) if place.number == 2);
            assert!(is_outside, "{stage} {microbatch}: {found:?}");
        }
    }
}
