//! When a rank is done: what it hears and says of the end.

use super::layout::{LAP, LocalStage, Membership, ONWARD, Wire};
use super::ledger::Ledger;
use super::rank::RankCore;

impl<L, C, W> RankCore<L, C, W> {
    /// Nothing more comes by this input of a stage: another rank has said so.
    pub fn handle_closed(&mut self, stage: usize, input: usize) {
        self.stages[stage].is_closed[input] = true;
    }

    /// Nothing more comes from another member of the group of this stage: it has said so.
    pub fn handle_left(&mut self, stage: usize) {
        self.stages[stage].left += 1;
    }

    /// The stages behind this one were told that nothing more comes.
    pub fn handle_closed_behind(&mut self, stage: usize) {
        self.stages[stage].has_closed = true;
    }

    /// Says whether nothing more is needed of other ranks: no chunk will be admitted, and each that the sink does not have
    /// waits, with all that belongs to it, before stages that stand on this rank to the last. `is_here` says whether all
    /// of a waiting chunk is here.
    pub fn is_served(&mut self, mut is_here: impl FnMut(&mut C) -> bool) -> bool {
        let Some(ledger) = &self.ledger else {
            return false;
        };
        // In a fixed order something that was put off is left to do elsewhere.
        let is_over = self.turns.is_none() || self.is_finished();
        if !ledger.admits_no_more() || !is_over {
            return false;
        }
        let mut here = Vec::new();
        for place in (0..self.stages.len()).rev() {
            let stage = self.stages[place].stage;
            let is_last = stage.is_sink;
            let goes_on = stage.outputs[ONWARD] == Wire::Local(place + 1);
            let is_alone =
                stage.membership == Membership::Alone && stage.outputs[LAP] == Wire::None;
            if stage.is_source() || !is_alone || !(is_last || goes_on) {
                break;
            }
            let attempt = self.attempt;
            let state = &mut self.stages[place];
            // What the sink works on is accepted, of whichever attempt it is.
            let working = state.working.iter().map(|(ticket, _)| ticket);
            let working = working.filter(|ticket| is_last || ticket.attempt == attempt);
            here.extend(working.map(|ticket| ticket.chunk));
            let waiting = state.waiting.iter_mut().flatten();
            let waiting = waiting.filter(|(ticket, _)| ticket.attempt == attempt);
            let arrived = waiting.filter_map(|(ticket, record)| is_here(record).then_some(ticket));
            here.extend(arrived.map(|ticket| ticket.chunk));
        }
        let mut needed = self.not_accepted();
        needed.all(|chunk| here.contains(&chunk))
    }

    /// Says whether this is the rank of the source and all is done but the goodbyes: the sink has all chunks, and if it is on
    /// another rank it has said so.
    pub fn is_closing(&self) -> bool {
        self.ledger.is_some() && self.stages[0].has_closed && self.has_heard_sink()
    }

    /// Says whether the stages behind this one were told that nothing more comes.
    pub fn has_closed(&self, stage: usize) -> bool {
        self.stages[stage].has_closed
    }

    /// Says whether the last word of the sink is here, where it comes from another rank.
    pub fn has_heard_sink(&self) -> bool {
        self.stages.first().is_none_or(|state| {
            let comes =
                state.stage.is_source() && matches!(state.stage.inputs[ONWARD], Wire::Edge(_));
            !comes || state.is_closed[ONWARD]
        })
    }

    /// The stage that has nothing more to do and whose successors do not know it. In a fixed order what was put off has been
    /// done: it waits for nothing.
    pub(super) fn closes(&self) -> Option<usize> {
        let mut stages = self.stages.iter();
        stages.position(|state| {
            !state.has_closed && state.is_empty() && self.is_closed_before(&state.stage)
        })
    }

    pub(super) fn is_finished(&self) -> bool {
        // The source meets all ranks again if one is lost before it needs none.
        let may_meet = self.meets_again && !self.ending.is_served();
        let may_leave = self.ledger.is_some() || !may_meet;
        let mut stages = self.stages.iter();
        may_leave
            && stages.all(|state| {
                let all_closed = [ONWARD, LAP]
                    .into_iter()
                    .all(|input| self.is_closed(&state.stage, input));
                let have_left = self.is_alone() || state.left == state.stage.followers();
                state.has_closed && all_closed && have_left
            })
    }

    /// Says whether nothing more comes to a stage, but for what is inside of its ring.
    fn is_closed_before(&self, stage: &LocalStage) -> bool {
        if stage.is_source() {
            return self.ledger.as_ref().is_some_and(Ledger::is_done);
        }
        self.is_closed(stage, ONWARD)
    }

    fn is_closed(&self, stage: &LocalStage, input: usize) -> bool {
        match stage.inputs[input] {
            Wire::None => true,
            Wire::Local(before) => self.stages[before].has_closed,
            Wire::Edge(_) => {
                let state = self.stages.iter().find(|state| state.stage.at == stage.at);
                self.is_alone() || state.is_some_and(|state| state.is_closed[input])
            }
        }
    }
}
