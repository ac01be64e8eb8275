//! The front's driver: admit, send, receive, decode; and, with restarts, all that again for a
//! Phase B that was started anew.
//!
//! Hazard: a Phase B dies, and with it what it knew, what it was sent and what it had computed.
//! Guarantee: the front loses nothing. What was sent stays until its result was accepted, and goes
//! again, under its old numbers, together with the context that the new Phase B lacks; results
//! that had arrived are decoded; none is taken twice, because a link knows only the calls that
//! went over it.
//!
//! Choices: what lasts ([`FrontRun`]) and what lasts as long as one link ([`session`]) are two
//! things. Without restarts nothing is kept and the slots go back as early as they can.

mod in_flight;
mod run;
mod send;
mod session;

use pp_contract::{Fault, FaultKind, Lockstep};
use pp_transport::link::Link;

pub use self::run::{FrontOptions, FrontRun, FrontSummary};
use self::session::FrontSession;
use super::Blame;
use crate::stage::FrontStages;
use crate::switch::Switch;

/// How a run over one link ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Driven {
    /// Everything is emitted.
    Finished,
    /// Phase B is lost. With a link to a new one the run goes on.
    Lost(Fault),
}

/// Runs the front until its source has ended or a drain was asked for, and everything in flight
/// has been emitted.
///
/// # Errors
/// The fault that ended the run: the first that any thread or rank of the job raised. What was
/// in flight is poisoned.
pub fn run_front<L, S>(
    link: L,
    stages: &mut S,
    switch: &Switch,
    options: FrontOptions,
) -> Result<FrontSummary, Fault>
where
    L: Link,
    S: FrontStages<L::Tx, L::Rx>,
{
    let mut run = FrontRun::new(stages, options);
    match run.drive(link, switch)? {
        Driven::Finished => Ok(run.finish()),
        Driven::Lost(fault) => Err(fault),
    }
}

impl<L, S> FrontRun<'_, L, S>
where
    L: Link,
    S: FrontStages<L::Tx, L::Rx>,
{
    /// Runs over this link until everything is emitted, or Phase B is lost and may be started anew.
    ///
    /// The switch then has the fault; the next call needs a new link and a new switch, of a new
    /// generation. The old link is kept until then, or until [`FrontRun::drop_link`], since to end it
    /// may take its time, and who is to start another Phase B should hear of it before. A drain that
    /// was asked for stays asked for.
    ///
    /// # Errors
    /// The fault that ended the run: the first that any thread or rank of the job raised. What was
    /// in flight is poisoned.
    pub fn drive(&mut self, link: L, switch: &Switch) -> Result<Driven, Fault> {
        let blame = Blame {
            rank: switch.rank(),
            peer: self.options.peer,
        };
        self.drop_link();
        let capabilities = link.capabilities();
        self.transport = capabilities.name;
        let mut session = FrontSession {
            run: self,
            switch,
            blame,
            lockstep: Lockstep::replies(),
            spare: None,
            capabilities,
            is_broken: false,
            is_alone: false,
            goodbye: None,
            link,
        };
        let Err(fault) = session.run() else {
            return Ok(Driven::Finished);
        };
        let may_go_on = !session.is_broken && session.run.options.keeps();
        let fault = match switch.fault() {
            Some(first) => first.clone(),
            None if may_go_on => verdict(fault, switch),
            None => fault,
        };
        switch.raise(fault.clone());
        let run = &mut *session.run;
        let is_lost =
            may_go_on && fault.kind.is_worth_a_restart() && fault.rank == run.options.peer;
        if is_lost && run.core.is_closing() {
            // It had only to say goodbye.
            session.link.peer_is_gone();
            return Ok(Driven::Finished);
        }
        if !is_lost || run.restarts.len() >= run.options.restarts as usize {
            run.core.abandon();
            return Err(switch.fault().cloned().unwrap_or(fault));
        }
        run.lose(&fault);
        if switch.is_draining() {
            run.core.handle_drain();
        }
        let FrontSession { run, link, .. } = session;
        run.old_link = Some(link);
        Ok(Driven::Lost(fault))
    }
}

/// A link that fails under the front may have lost its peer. Then the watch thread will say so.
fn verdict(fault: Fault, switch: &Switch) -> Fault {
    let unclear = matches!(fault.kind, FaultKind::Device | FaultKind::TimedOut)
        && fault.rank == switch.rank();
    let verdict = unclear.then(|| switch.verdict()).flatten();
    verdict.cloned().unwrap_or(fault)
}
