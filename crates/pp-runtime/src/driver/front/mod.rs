//! The front's driver: admit, send, receive, decode; and, with restarts, all that again for a
//! Phase B that was started anew.
//!
//! Hazard: a Phase B dies, and with it what it knew, what it was sent and what it had computed.
//! Guarantee: the front loses nothing. What was sent stays until its result was accepted, and goes
//! again, under its old numbers, together with the context that the new Phase B lacks; results
//! that had arrived are decoded; none is taken twice, because a link knows only the calls that
//! went over it.
//!
//! Choices: what lasts ([`FrontRun`]) and what lasts as long as one link ([`on_link`]) are two
//! things. Without restarts nothing is kept and the slots go back as early as they can.

mod flight;
mod on_link;
mod send;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pp_contract::{CallId, ChunkIndex, Composer, Fault, FaultKind, Lockstep, Rank};
use pp_transport::link::Link;

use self::flight::{Flight, Kept, Leg};
use self::on_link::OnLink;
use super::Blame;
use crate::clock::{PeerClock, now_ns};
use crate::core::{Counts, FrontCore};
use crate::report::{Recorder, Restart};
use crate::stage::FrontStages;
use crate::switch::Switch;

/// Time for the watch thread to say that the peer is gone, once the link has failed under it: a
/// backend may learn it first, and cannot tell it from a failure of its own.
const VERDICT_WITHIN: Duration = Duration::from_secs(1);

/// How the front runs.
#[derive(Clone, Copy, Debug)]
pub struct FrontOptions {
    /// The rank that runs Phase B.
    pub peer: Rank,
    /// The most chunks in flight.
    pub depth: u32,
    /// How often Phase B may be started anew. With 0 nothing is kept for it.
    pub restarts: u32,
    /// Chunks before one that hold all that Phase B must know to begin with it: their payloads are
    /// kept, where there may be a restart.
    pub context_chunks: u32,
}

impl FrontOptions {
    /// Without restarts.
    pub fn new(peer: Rank, depth: u32) -> Self {
        Self {
            peer,
            depth,
            restarts: 0,
            context_chunks: 0,
        }
    }

    /// Slots that the edge to Phase B needs so that what is kept takes none away from what is in
    /// flight.
    pub fn forward_slots(&self) -> u32 {
        self.depth + if self.keeps() { self.context_chunks } else { 0 }
    }

    /// Whether payloads are kept until their results are accepted.
    fn keeps(&self) -> bool {
        self.restarts > 0
    }
}

/// What a front that finished has to tell.
#[derive(Debug)]
pub struct FrontSummary {
    /// How many chunks went where.
    pub counts: Counts,
    /// The records of the latest chunks.
    pub recorder: Recorder,
    /// Short name of the backend that carried them.
    pub transport: &'static str,
    /// Every time that Phase B was lost and the run went on.
    pub restarts: Vec<Restart>,
}

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

/// A run of the front, over one link after the other.
///
/// # If dropped
/// What is in flight is poisoned.
pub struct FrontRun<'s, L: Link, S: FrontStages<L::Tx, L::Rx>> {
    stages: &'s mut S,
    options: FrontOptions,
    core: FrontCore,
    composer: Composer,
    inbox: Vec<u8>,
    flights: VecDeque<Flight<L, S::Plan>>,
    /// Payloads of chunks of this epoch whose results were accepted, the oldest first.
    kept: VecDeque<Kept<L>>,
    next_call: CallId,
    recorder: Recorder,
    peer_clock: PeerClock,
    /// The next chunk is here, and whoever takes the output is not.
    waits_for_sink: bool,
    transport: &'static str,
    restarts: Vec<Restart>,
    /// The link to the Phase B that was lost.
    old_link: Option<L>,
}

impl<'s, L, S> FrontRun<'s, L, S>
where
    L: Link,
    S: FrontStages<L::Tx, L::Rx>,
{
    /// A run at whose beginning nothing was read yet.
    pub fn new(stages: &'s mut S, options: FrontOptions) -> Self {
        Self {
            stages,
            core: FrontCore::new(options.depth),
            composer: Composer::new(),
            inbox: Vec::with_capacity(pp_contract::MAX_FRAME_BYTES),
            flights: VecDeque::with_capacity(options.depth as usize),
            kept: VecDeque::with_capacity(options.context_chunks as usize + 1),
            next_call: CallId::new(0),
            recorder: Recorder::new(),
            peer_clock: PeerClock::default(),
            waits_for_sink: false,
            transport: "none",
            restarts: Vec::new(),
            old_link: None,
            options,
        }
    }

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
        let mut on_link = OnLink {
            run: self,
            switch,
            blame,
            lockstep: Lockstep::replies(),
            spare: None,
            capabilities,
            is_broken: false,
            is_alone: false,
            link,
        };
        let Err(fault) = on_link.run() else {
            return Ok(Driven::Finished);
        };
        let may_go_on = !on_link.is_broken && on_link.run.options.keeps();
        let fault = match switch.fault() {
            Some(first) => first.clone(),
            None if may_go_on => verdict(fault, switch),
            None => fault,
        };
        switch.raise(fault.clone());
        let run = &mut *on_link.run;
        let is_lost = may_go_on && is_worth_a_restart(&fault, run.options.peer);
        if is_lost && run.core.is_closing() {
            // It had only to say goodbye.
            on_link.link.peer_is_gone();
            return Ok(Driven::Finished);
        }
        if !is_lost || run.restarts.len() >= run.options.restarts as usize {
            run.flights.clear();
            return Err(switch.fault().cloned().unwrap_or(fault));
        }
        run.lose(&fault);
        if switch.is_draining() {
            run.core.handle_drain();
        }
        let OnLink { run, link, .. } = on_link;
        run.old_link = Some(link);
        Ok(Driven::Lost(fault))
    }

    /// Ends the link to the Phase B that was lost, if there is one.
    pub fn drop_link(&mut self) {
        self.old_link = None;
    }

    /// What the run came to, once it has finished.
    pub fn finish(self) -> FrontSummary {
        FrontSummary {
            counts: self.core.counts(),
            recorder: self.recorder,
            transport: self.transport,
            restarts: self.restarts,
        }
    }

    /// Phase B is gone: what it had not given back whole is to be sent again.
    fn lose(&mut self, fault: &Fault) {
        let mut arrived = self.core.decoding();
        // Results come in order: behind the first that is not here, none is taken for whole.
        while let Some(Leg::Back(_, payload)) = self.flights.get_mut(arrived).map(|f| &mut f.leg)
            && matches!(payload.settle(), Ok(true))
        {
            self.accept(arrived);
            arrived += 1;
        }
        let epoch = self.core.epoch();
        for flight in self.flights.iter_mut().skip(arrived) {
            flight.lose_result();
            // As the core has it: it is dropped in its turn, and no result is due for it.
            if flight.place.epoch != epoch {
                flight.leg = Leg::Gone;
            }
        }
        self.core.handle_lost(arrived);
        self.waits_for_sink = false;
        self.restarts.push(Restart {
            fault: fault.clone(),
            lost_ns: now_ns(),
            chunk: None,
            sent_ns: None,
            served_ns: None,
            sent_again: 0,
        });
    }

    /// The result of this flight is here, payload and all. What was sent for it goes back to its
    /// pool, or is kept while it is context.
    fn accept(&mut self, at: usize) {
        let flight = &mut self.flights[at];
        let Some(sending) = flight.sending.take() else {
            return;
        };
        let context = self.options.context_chunks as usize;
        if !self.options.keeps() || context == 0 || flight.place.epoch != self.core.epoch() {
            return;
        }
        if self.kept.len() == context {
            self.kept.pop_front();
        }
        let inputs = flight.envelope.inputs().clone();
        let chunk = flight.place.chunk;
        self.kept.push_back(Kept {
            chunk,
            inputs,
            sending,
        });
        // Nobody waits for them, and a recorder sees that a send is done only when somebody asks.
        for kept in &self.kept {
            let _ = kept.sending.is_done();
        }
    }

    /// The number that was given to a call is used up.
    fn count_call(&mut self) {
        self.next_call = self.next_call.next().unwrap_or(self.next_call);
    }

    /// A chunk has left, perhaps the first over this link.
    fn note_sent(&mut self, chunk: ChunkIndex, again: bool) {
        if let Some(restart) = self.restarts.last_mut() {
            restart.chunk.get_or_insert(chunk);
            restart.sent_ns.get_or_insert_with(now_ns);
            restart.sent_again += u32::from(again);
        }
    }

    /// A result is here, perhaps the first over this link.
    fn note_served(&mut self) {
        if let Some(restart) = self.restarts.last_mut() {
            restart.served_ns.get_or_insert_with(now_ns);
        }
    }
}

/// Whether a new Phase B may do better: not where the same would happen again, and not where the
/// front is to blame.
fn is_worth_a_restart(fault: &Fault, peer: Rank) -> bool {
    let gone = matches!(
        fault.kind,
        FaultKind::PeerDied | FaultKind::TimedOut | FaultKind::Device
    );
    gone && fault.rank == peer
}

/// A link that fails under the front may have lost its peer. Then the watch thread will say so.
fn verdict(fault: Fault, switch: &Switch) -> Fault {
    let unclear = matches!(fault.kind, FaultKind::Device | FaultKind::TimedOut)
        && fault.rank == switch.rank();
    if !unclear {
        return fault;
    }
    let deadline = Instant::now() + VERDICT_WITHIN;
    while Instant::now() < deadline {
        let ear = switch.bell().listen();
        if let Some(verdict) = switch.fault() {
            return verdict.clone();
        }
        ear.wait(deadline);
    }
    fault
}
