//! A run of a rank until everything is done, or another rank is lost.

use pp_contract::{Fault, FaultKind, MAX_FRAME_BYTES};
use pp_transport::edge::Edges;

use super::blame::Blame;
use super::rank::RankRun;
use super::session::Session;
use crate::core::{EndEvent, Ending};
use crate::stage::Source;
use crate::switch::Switch;

/// How a run ended for now.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Driven {
    /// Everything is done.
    Finished,
    /// The rank that this fault names is lost. With edges to a new one the run goes on.
    Lost(Fault),
}

impl<E, S> RankRun<'_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    /// Runs until everything is done, or a rank is lost that may be started anew.
    ///
    /// The switch then has the fault. The next call needs a new switch, and new edges ([`RankRun::detach`],
    /// [`RankRun::attach`], [`RankRun::begin_attempt`]). To end the old edges may take its time, and who is to start another
    /// process should hear of it before. A drain that was asked for stays asked for.
    ///
    /// # Errors
    /// The fault that ended the run: the first that any thread or rank of the job raised. What was
    /// in flight is poisoned.
    pub fn drive(&mut self, switch: &Switch) -> Result<Driven, Fault> {
        let blame = Blame {
            rank: self.rank,
            peer: self.rank,
        };
        let mut session = Session {
            run: self,
            switch,
            blame,
            goodbye: None,
            held: None,
            held_frame: Vec::with_capacity(MAX_FRAME_BYTES),
        };
        let Err(fault) = session.run() else {
            return Ok(Driven::Finished);
        };
        let may_go_on = self.core.ending() != Ending::Aborted && self.options.keeps();
        let fault = match switch.fault() {
            Some(first) => first.clone(),
            None if may_go_on => verdict(fault, switch),
            None => fault,
        };
        switch.raise(fault.clone());
        let is_lost = may_go_on
            && fault.kind.is_worth_a_restart()
            && fault.rank != self.rank
            && self.options.pipeline.may_restart(fault.rank);
        if is_lost && self.core.is_closing() {
            // It had only to say goodbye.
            switch.say_served();
            return self.leave();
        }
        if !is_lost || self.restarts.len() >= self.options.restarts as usize {
            self.abandon();
            return Err(switch.fault().cloned().unwrap_or(fault));
        }
        self.lose(&fault);
        if switch.is_draining() {
            self.core.handle_end(EndEvent::Drain);
        }
        Ok(Driven::Lost(fault))
    }

    /// Finishes without the other ranks, after one was lost that the source needs no more
    /// ([`Switch::is_source_done`]).
    ///
    /// # Errors
    /// A stage cannot be finished.
    pub fn leave(&mut self) -> Result<Driven, Fault> {
        let first = usize::from(self.stages.source.is_some());
        for (stage, work) in (first..).zip(&mut self.stages.work) {
            if !self.core.has_closed(stage) {
                work.finish().map_err(|e| e.into_fault(self.rank))?;
            }
        }
        self.leave_alone();
        Ok(Driven::Finished)
    }
}

/// An edge that fails may have lost its peer. Then the watchdog says so.
fn verdict(fault: Fault, switch: &Switch) -> Fault {
    let unclear = matches!(fault.kind, FaultKind::Device | FaultKind::TimedOut)
        && fault.rank == switch.rank();
    let verdict = unclear.then(|| switch.verdict()).flatten();
    verdict.cloned().unwrap_or(fault)
}
