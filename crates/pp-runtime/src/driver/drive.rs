//! Runs a rank until everything is done, or until another rank is lost.

use pp_contract::{Fault, FaultKind};
use pp_transport::edge::Edges;

use super::blame::Blame;
use super::idle::IdleWait;
use super::rank::{RankRun, of_all_clients};
use super::session::Session;
use crate::core::{Decision, EndEvent, Ending, StageFacts};
use crate::progress::{Awaited, Doing};
use crate::stage::{Place, Source};
use crate::switch::Switch;

/// Tells how a call of [`RankRun::drive`] ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Driven {
    /// Everything is done.
    Finished,
    /// The rank that this fault names is lost. The run can go on over new edges.
    Lost(Fault),
}

impl<E, S> RankRun<'_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    /// Runs until everything is done, or until a rank is lost that may be started again.
    ///
    /// After a loss, the switch has the fault. The next call needs a new switch and new edges ([`RankRun::detach`],
    /// [`RankRun::attach`], [`RankRun::begin_attempt`]). Ending the old edges may take long, so first tell whoever starts
    /// the new process. A requested drain stays requested.
    ///
    /// # Errors
    /// Returns the fault that ended the run: the first one that any thread or rank of the job raised. All payloads in flight
    /// are poisoned.
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
        };
        let Err(fault) = session.run() else {
            return Ok(Driven::Finished);
        };
        let may_go_on = self.core.ending() != Ending::Aborted && self.options.keeps();
        let fault = verdict(fault, switch, may_go_on);
        let fault = of_all_clients(fault, self.rank, self.options.has_failed);
        switch.raise(fault.clone());
        let is_lost = may_go_on
            && fault.kind.is_worth_a_restart()
            && fault.rank != self.rank
            && self.options.pipeline.may_restart(fault.rank);
        if is_lost && self.core.is_closing() {
            // The lost rank had only to say goodbye.
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

    /// Finishes without the other ranks, after the loss of a rank that the source no longer needs
    /// ([`Switch::is_source_done`]).
    ///
    /// # Errors
    /// Returns the fault of a stage that cannot be finished.
    pub fn leave(&mut self) -> Result<Driven, Fault> {
        let first = usize::from(self.stages.source.is_some());
        for (stage, work) in (first..).zip(&mut self.stages.work) {
            if !self.core.has_closed(stage) {
                let failed = work.finish().err();
                if let Some(error) = failed {
                    return Err(self.in_stage((stage, None), error.into_fault(self.rank)));
                }
            }
        }
        self.leave_alone();
        Ok(Driven::Finished)
    }
}

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    /// Runs the loop: takes in frames, asks the core what to do, does it, and sleeps if there is nothing to do.
    fn run(&mut self) -> Result<(), Fault> {
        let bell = self.switch.bell().clone();
        let completions_ring = self.run.options.capabilities.completions_ring;
        let stages = self.run.options.pipeline.stages();
        let names = self.run.places.iter();
        let names = names.map(|place| stages[place.at].name.to_string());
        self.switch.progress().name_stages(names.collect());
        let mut idle = IdleWait::new(&bell, completions_ring);
        let peers = self.run.peers();
        let mut left = Vec::with_capacity(peers.len());
        let mut facts = vec![StageFacts::default(); self.run.places.len()];
        loop {
            if let Some(event) = self.switch.ending().reached_by() {
                self.run.core.handle_end(event);
            }
            self.run.core.handle_cut(self.switch.oldest_epoch());
            // Read who has left before taking in frames, so that everything a rank sent before it left is taken in.
            left.clear();
            left.extend(peers.iter().filter(|peer| self.switch.has_left(**peer)));
            let finished = self.look_around(&mut facts)?;
            if !left.is_empty() && self.switch.is_served() {
                self.go_alone();
            }
            let decision = self.run.core.poll(&facts);
            if finished || decision != Decision::Wait {
                idle.over();
                self.switch.progress().awaits(Awaited::Nothing);
            }
            match decision {
                Decision::Stop => {
                    let fault = self.switch.fault();
                    return Err(fault.expect("a fault stops the core").clone());
                }
                Decision::Finish => {
                    if self.is_alone() {
                        self.run.leave_alone();
                    }
                    return Ok(());
                }
                Decision::Wait if finished => {}
                Decision::Wait if self.is_unanswered() => self.go_alone(),
                Decision::Wait => {
                    if let Some(peer) = left.iter().find(|peer| self.is_missed(**peer)) {
                        return Err(self.blame.on(*peer).left_early());
                    }
                    let is_working = self.is_working();
                    self.switch.progress().awaits(self.awaited(is_working));
                    self.run.waited_ns += idle.take(is_working, self.is_in_flight());
                }
                decision => self.act(decision)?,
            }
        }
    }

    /// Finds out what the core cannot know by itself. Returns whether work was finished.
    fn look_around(&mut self, facts: &mut [StageFacts]) -> Result<bool, Fault> {
        self.switch.progress().at(Doing::Looking);
        if !self.is_alone() {
            let listened = self.listen();
            self.unless_served(listened)?;
        }
        self.ask_source()?;
        let finished = match self.finish_work() {
            Ok(finished) => finished,
            failed => self.unless_served(failed.map(drop)).map(|()| true)?,
        };
        self.switch.progress().queues(self.run.core.waiting());
        let looked = self.look(facts);
        self.unless_served(looked)?;
        if !self.switch.is_served() && self.is_served()? && self.switch.set_served() {
            tracing::debug!("nothing more is needed of other ranks");
        }
        Ok(finished)
    }

    /// Carries out a decision of the core.
    fn act(&mut self, decision: Decision) -> Result<(), Fault> {
        let done = match decision {
            Decision::Build {
                chunk,
                epoch,
                starts_epoch,
                rebuilds,
            } => {
                return self.build(Place {
                    chunk,
                    epoch,
                    lap: 0,
                    starts_epoch,
                    rebuilds,
                    steps: None,
                });
            }
            Decision::RunOverlapped { stages } => return self.work_overlapped(stages),
            Decision::Later { stage, chunk } => return self.do_later(stage, chunk),
            Decision::PassOn { stage, input } => return self.pass_on(stage, input),
            Decision::Drop { stage, input } => return self.release(stage, input),
            Decision::SendAgain { rebuilds } => self.send_again(rebuilds),
            Decision::Run { stage, input } => self.work(stage, input),
            Decision::Close { stage } => self.close(stage),
            Decision::Wait | Decision::Finish | Decision::Stop => unreachable!("the loop does it"),
        };
        self.unless_served(done)
    }
}

/// Returns the first fault of the job, if it is known. An edge that fails may have lost its peer; then this waits until the
/// watchdog has read the peer's reason.
fn verdict(fault: Fault, switch: &Switch, may_go_on: bool) -> Fault {
    let unclear = match fault.kind {
        FaultKind::PeerDied => !switch.has_left(fault.rank),
        FaultKind::Device | FaultKind::TimedOut => may_go_on && fault.rank == switch.rank(),
        _ => false,
    };
    let first = if unclear {
        switch.verdict()
    } else {
        switch.fault()
    };
    first.cloned().unwrap_or(fault)
}

#[cfg(test)]
mod tests {
    use pp_contract::Rank;
    use pp_transport::bell::Bell;

    use super::*;

    #[test]
    fn a_lane_that_breaks_waits_for_the_reason_of_the_peer() {
        let [own, peer] = [0, 1].map(Rank::new);
        let guess = Fault::new(FaultKind::PeerDied, peer, "send", "the lane is broken");
        let reason = Fault::new(FaultKind::Plugin, peer, "stage", "out of cheese");
        let switch = Switch::new(own, Bell::new().unwrap()).unwrap();
        std::thread::scope(|scope| {
            let found = scope.spawn(|| verdict(guess.clone(), &switch, false));
            switch.lose_peer(reason.clone());
            assert_eq!(found.join().unwrap(), reason);
        });
    }
}
