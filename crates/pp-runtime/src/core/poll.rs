//! What a rank does next.

use pp_contract::ChunkIndex;

use super::decision::{Decision, StageFacts};
use super::layout::ONWARD;
use super::ledger::Due;
use super::order::Turn;
use super::rank::RankCore;

impl<L, C, W> RankCore<L, C, W> {
    /// Decides what to do now. `facts` has one entry for each stage.
    pub fn poll(&self, facts: &[StageFacts]) -> Decision {
        if self.ending.is_stopped() {
            return Decision::Stop;
        }
        if let Some(action) = self.releases() {
            return action;
        }
        let mut ready = self.order.iter().filter_map(|&(stage, input)| {
            let facts = &facts[stage];
            match self.stages[stage].stage.is_source() {
                true => self.feeds(facts),
                false => self.runs(stage, input, facts),
            }
        });
        if let Some(action) = ready.next().or_else(|| self.takes_turn(facts)) {
            return action;
        }
        if let Some(stage) = self.closes() {
            return Decision::Close { stage };
        }
        if self.is_finished() {
            return Decision::Finish;
        }
        Decision::Wait
    }

    /// What can go at once, whatever else there is.
    fn releases(&self) -> Option<Decision> {
        self.order.iter().find_map(|&(stage, input)| {
            let state = &self.stages[stage];
            let (ticket, _) = state.waiting[input].front()?;
            if !self.is_current(ticket) || self.has_taken(stage, ticket) {
                return Some(Decision::Drop { stage, input });
            }
            // Chunks of one lap leave in order, so what is being worked on comes first.
            let mut working = state.working.iter();
            let is_next = working.all(|(working, _)| working.lap != ticket.lap);
            let passes = self.is_stale(stage, ticket) && is_next;
            passes.then_some(Decision::PassOn { stage, input })
        })
    }

    fn feeds(&self, facts: &StageFacts) -> Option<Decision> {
        // A rank that is alone has all that is needed behind the source.
        if self.is_alone() || !facts.is_free[ONWARD] {
            return None;
        }
        match self.ledger.as_ref()?.due(self.oldest) {
            Due::Nothing => None,
            Due::SendAgain { rebuilds } => Some(Decision::SendAgain { rebuilds }),
            Due::Build {
                chunk,
                epoch,
                starts_epoch,
                rebuilds,
            } => Some(Decision::Build {
                chunk,
                epoch,
                starts_epoch,
                rebuilds,
            }),
        }
    }

    fn runs(&self, stage: usize, input: usize, facts: &StageFacts) -> Option<Decision> {
        let (ticket, _) = &self.stages[stage].waiting[input][self.next_at(stage, input)?];
        let is_ready = facts.is_here[input] && facts.is_free[ticket.way_out.0];
        let runs = is_ready && !self.is_stale(stage, ticket);
        runs.then_some(Decision::Run { stage, input })
    }

    /// The next turn of a fixed order, if all that it takes is there.
    fn takes_turn(&self, facts: &[StageFacts]) -> Option<Decision> {
        let is_ready = |stage: usize| self.runs(stage, ONWARD, &facts[stage]).is_some();
        match self.turns.as_ref()?.next()? {
            Turn::Run(task) => self.runs(task.stage, ONWARD, &facts[task.stage]),
            Turn::Overlapped(tasks) => {
                let stages = tasks.map(|task| task.stage);
                let are_ready = stages.iter().all(|stage| is_ready(*stage));
                are_ready.then_some(Decision::RunOverlapped { stages })
            }
            Turn::Later(task) => Some(Decision::Later {
                stage: task.stage,
                chunk: ChunkIndex::new(task.chunk),
            }),
        }
    }
}
