//! The loop of a rank: take in frames, ask the core what to do, do it, sleep.

use std::time::Instant;

use pp_contract::{Action as Message, Fault, Rank, Stamp};
use pp_transport::edge::{EdgeRx as _, Edges};

use super::idle::IdleWait;
use super::rank::{RankRun, Waiting, Working};
use super::{Blame, Payload, post_receive};
use crate::clock::now_ns;
use crate::core::{Action, LAP, ONWARD, StageFacts, Ticket, way_out};
use crate::progress::{Awaited, Doing};
use crate::report::StageTimes;
use crate::stage::{Chunk, Offer, Place, Source, StageError};
use crate::switch::Switch;
use crate::times;

/// A run until a rank is lost.
pub(super) struct Session<'a, 's, E: Edges, S: Source<E::Tx>> {
    pub(super) run: &'a mut RankRun<'s, E, S>,
    pub(super) switch: &'a Switch,
    pub(super) blame: Blame,
    /// A stage failed, or a payload is lost: what is left of the chunks under way is not enough to
    /// go on with.
    pub(super) is_broken: bool,
    /// Other ranks are gone, and needed no more: no edge is asked for anything.
    pub(super) is_alone: bool,
    /// The stamp of the SHUTDOWN, and when it was sent or came.
    pub(super) goodbye: Option<(Stamp, Instant)>,
}

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    pub(super) fn run(&mut self) -> Result<(), Fault> {
        let bell = self.switch.bell().clone();
        let completions_ring = self.run.options.capabilities.completions_ring;
        let mut idle = IdleWait::new(&bell, completions_ring);
        let peers = self.run.ports.peers();
        let mut facts = vec![StageFacts::default(); self.run.places.len()];
        loop {
            if self.switch.fault().is_some() {
                self.run.core.handle_abort();
            }
            if self.switch.is_draining() {
                self.run.core.handle_drain();
            }
            self.run.core.handle_cut(self.switch.oldest_epoch());
            // Looked at first: what a rank sent before it left is taken in.
            let left = peers
                .iter()
                .copied()
                .find(|peer| self.switch.has_left(*peer));
            self.switch.progress().at(Doing::Looking);
            if !self.is_alone {
                let listened = self.listen();
                self.unless_served(listened)?;
            }
            self.ask_source()?;
            let finished = self.finish_work()?;
            self.look(&mut facts)?;
            if !self.switch.is_served() && self.is_served()? && self.switch.set_served() {
                tracing::debug!("nothing more is needed of other ranks");
            }
            if left.is_some() && !self.is_alone && self.switch.is_served() {
                self.go_alone();
            }
            let action = self.run.core.poll(&facts);
            if finished || action != Action::Wait {
                idle.over();
                self.switch.progress().awaits(Awaited::Nothing);
            }
            match action {
                Action::Stop => {
                    let fault = self.switch.fault();
                    return Err(fault.expect("a fault stops the core").clone());
                }
                Action::Build {
                    chunk,
                    epoch,
                    starts_epoch,
                    rebuilds,
                } => self.build(Place {
                    chunk,
                    epoch,
                    lap: 0,
                    starts_epoch,
                    rebuilds,
                })?,
                Action::SendAgain { rebuilds } => {
                    let sent = self.send_again(rebuilds);
                    self.unless_served(sent)?;
                }
                Action::Run { stage, input } => self.work(stage, input)?,
                Action::PassOn { stage, input } => {
                    let (ticket, waiting, _) = self.run.core.begin(stage, input);
                    self.pass_on(stage, ticket, waiting)?;
                }
                Action::Drop { stage, input } => self.release(stage, input)?,
                Action::Forget => {
                    if let Some(admitted) = self.run.core.take_overtaken() {
                        self.forget(admitted, None)?;
                    }
                }
                Action::Close { stage } => {
                    let closed = self.close(stage);
                    self.unless_served(closed)?;
                }
                Action::Finish => {
                    if self.is_alone {
                        self.run.leave_alone();
                    }
                    return Ok(());
                }
                Action::Wait if finished => {}
                Action::Wait if self.is_unanswered() => self.go_alone(),
                Action::Wait => {
                    if let Some(peer) = left.filter(|peer| self.is_missed(*peer)) {
                        return Err(self.blame.on(peer).left_early());
                    }
                    let is_working = self.is_working();
                    self.switch.progress().awaits(self.awaited(is_working));
                    idle.take(is_working, self.is_in_flight());
                }
            }
        }
    }

    fn listen(&mut self) -> Result<(), Fault> {
        for input in 0..self.run.ports.inputs.len() {
            while self.hear(input)? {}
        }
        for output in self.run.ports.outputs.iter_mut().flatten() {
            self.switch.progress().at(Doing::Lease);
            output.lease(self.blame)?;
        }
        Ok(())
    }

    /// Goes on without other ranks where the loss of one is why this failed, and none is needed any more.
    fn unless_served(&mut self, done: Result<(), Fault>) -> Result<(), Fault> {
        match done {
            Err(fault) if self.switch.is_served() && fault.kind.is_worth_a_restart() => {
                tracing::debug!(%fault, "a rank is gone, and needed no more");
                self.go_alone();
                Ok(())
            }
            done => done,
        }
    }

    /// Whether the other ranks owe only the answer to the goodbye, and do not give it.
    fn is_unanswered(&self) -> bool {
        let is_first = self
            .run
            .places
            .first()
            .is_some_and(|stage| stage.is_source());
        let since = self.goodbye.map(|(_, said)| said.elapsed());
        let is_owed = is_first && !self.is_alone && self.switch.is_served();
        let is_late = is_owed && since > Some(times::ANSWERED_WITHIN);
        if is_late {
            tracing::warn!("no answer to the shutdown");
        }
        is_late
    }

    fn go_alone(&mut self) {
        self.run.core.handle_alone();
        self.is_alone = true;
    }

    /// Whether an edge to this rank is still needed.
    fn is_missed(&self, peer: Rank) -> bool {
        let open = |input: &super::ports::Incoming<E>| input.peer == peer && !input.is_closed;
        !self.is_alone && (self.goodbye.is_none() || self.run.ports.inputs.iter().any(open))
    }

    fn ask_source(&mut self) -> Result<(), Fault> {
        if !self.run.core.wants_offer() {
            return Ok(());
        }
        self.switch.progress().at(Doing::Source);
        let source = self
            .run
            .stages
            .source
            .as_mut()
            .expect("rank 0 has the source");
        let offer = source.poll();
        match self.of_stage(offer)? {
            Offer::Chunk(cut) => self.run.core.handle_offer(cut),
            Offer::Later => {}
            Offer::End => self.run.core.handle_source_end(),
        }
        Ok(())
    }

    /// What the core cannot know by itself.
    fn look(&mut self, facts: &mut [StageFacts]) -> Result<(), Fault> {
        self.run.waits_for_sink = false;
        for (stage, facts) in facts.iter_mut().enumerate() {
            let place = self.run.places[stage];
            for input in [ONWARD, LAP] {
                let waiting = self.run.core.oldest_waiting(stage, input);
                let is_here = waiting.map_or(Ok(false), |waiting| waiting.payload.settle());
                facts.is_here[input] =
                    is_here.map_err(|e| self.blame.transport("receive payload", e))?;
                facts.is_free[input] = self.run.ports.outputs[stage][input].is_free();
            }
            if place.is_sink && facts.is_here[ONWARD] {
                let own = self.work_of(stage);
                let ready = self.run.stages.work[own].work().is_ready();
                let ready = self.of_stage(ready)?;
                self.run.waits_for_sink = !ready;
                facts.is_free[ONWARD] &= ready;
            }
        }
        Ok(())
    }

    /// Whether nothing more is needed of other ranks. Of a sink on another rank its last word is: it has stored all.
    fn is_served(&mut self) -> Result<bool, Fault> {
        if !self.run.core.has_heard_sink() {
            return Ok(false);
        }
        let mut failed = None;
        let served = self.run.core.is_served(|waiting| {
            let is_here = waiting.payload.settle();
            is_here.unwrap_or_else(|error| {
                failed = Some(error);
                false
            })
        });
        match failed {
            Some(error) => Err(self.blame.transport("receive payload", error)),
            None => Ok(served),
        }
    }

    /// The edge by which the sink tells the source what it has, if the two stand on different ranks.
    fn acceptances(&self) -> Option<&super::ports::Incoming<E>> {
        let places = &self.run.places;
        let mut inputs = self.run.ports.inputs.iter();
        inputs.find(|input| places[input.to.0].is_source())
    }

    /// Takes in one frame; false when there is none.
    fn hear(&mut self, input: usize) -> Result<bool, Fault> {
        let run = &mut *self.run;
        let port = &mut run.ports.inputs[input];
        let blame = self.blame.on(port.peer);
        let Some(end) = &mut port.end else {
            return Ok(false);
        };
        let polled = end.poll_frame(&mut run.inbox);
        if !polled.map_err(|e| blame.transport("receive header", e))? {
            return Ok(false);
        }
        let matched = port.lockstep.admit(&run.inbox);
        let matched = matched.map_err(|e| blame.body("receive header", &e))?;
        let header = *matched.header();
        let (stage, which) = port.to;
        match header.action() {
            Message::Infer => {
                // Judged before the receive is posted: nothing is received for a bad message.
                let message = matched.message(&run.options.pipeline, port.maker);
                let message = message.map_err(|e| blame.body("decode message", &e))?;
                // Another rank was lost, and the source has begun anew.
                run.core.handle_attempt(header.attempt());
                if run.places[stage].is_source() {
                    self.accepted(Stamp::of(&header), &message, blame)?;
                    return Ok(true);
                }
                self.switch.progress().at(Doing::Receive);
                let payload = post_receive(end, &matched, blame)?;
                let waiting = Waiting {
                    stamp: Stamp::of(&header),
                    message,
                    payload,
                    arrived_ns: now_ns(),
                };
                let maker = port.maker;
                self.arrive((stage, which), maker, waiting, blame)?;
            }
            Message::Shutdown => {
                port.is_closed = true;
                run.core.handle_closed(stage, which);
                if self.goodbye.is_none() {
                    self.goodbye = Some((Stamp::of(&header), Instant::now()));
                }
            }
            Message::Noop => {}
        }
        Ok(true)
    }

    /// A chunk that stage `maker` made is here for a stage of this rank.
    pub(super) fn arrive(
        &mut self,
        (stage, input): (usize, usize),
        maker: usize,
        waiting: Waiting<E, S>,
        blame: Blame,
    ) -> Result<(), Fault> {
        let run = &mut *self.run;
        let (at, pipeline) = (run.places[stage].at, &run.options.pipeline);
        debug_assert!(maker < at || input == LAP);
        let laps = pipeline.laps_of(at, waiting.message.plan());
        let lap = waiting.stamp.lap;
        let ticket = Ticket {
            chunk: waiting.stamp.chunk_index,
            epoch: waiting.stamp.cache_epoch,
            attempt: waiting.stamp.attempt,
            lap,
            way_out: way_out(pipeline, at, lap, laps),
            is_overtaken: waiting.message.is_stale(),
        };
        if let Some(admitted) = run.core.admitted(ticket.chunk) {
            admitted.record.stages[at - 1].times = Some(StageTimes {
                arrived_ns: waiting.arrived_ns,
                ..StageTimes::default()
            });
        }
        let arrived = run.core.handle_arrival(stage, input, ticket, waiting);
        arrived.map_err(|e| blame.body("receive message", &e))?;
        Ok(())
    }

    /// Works on the oldest chunk of an input.
    fn work(&mut self, stage: usize, input: usize) -> Result<(), Fault> {
        let (ticket, mut waiting, starts_epoch) = self.run.core.begin(stage, input);
        let payload = waiting.payload.take();
        let mut slot = self.take_slot(stage, ticket.way_out.0);
        let start_ns = now_ns();
        let is_sink = self.run.places[stage].is_sink;
        let doing = if is_sink {
            Doing::Decode
        } else {
            Doing::Compute
        };
        self.switch.progress().at(doing);
        let place = Place {
            chunk: ticket.chunk,
            epoch: ticket.epoch,
            lap: ticket.lap,
            starts_epoch,
            rebuilds: false,
        };
        let chunk = Chunk {
            place,
            message: &waiting.message,
        };
        let own = self.work_of(stage);
        let done = self.run.stages.work[own]
            .work()
            .run(chunk, payload.as_ref(), slot.as_mut());
        // The credit goes back before the result leaves: the stage before can fill the slot meanwhile.
        drop(payload);
        let work = Working {
            stamp: waiting.stamp,
            message: waiting.message,
            slot,
            start_ns,
        };
        match self.of_stage(done)? {
            Some(done) => self.conclude(stage, ticket, work, done),
            None => {
                self.run.core.handle_working(stage, ticket, work);
                Ok(())
            }
        }
    }

    /// Takes in the work that devices have done; whether there was some.
    fn finish_work(&mut self) -> Result<bool, Fault> {
        let mut any = false;
        for stage in 0..self.run.places.len() {
            while let Some((ticket, work)) = self.run.core.take_working(stage) {
                let own = self.work_of(stage);
                let done = self.run.stages.work[own].work().poll();
                let Some(done) = self.of_stage(done)? else {
                    self.run.core.handle_still_working(stage, ticket, work);
                    break;
                };
                self.conclude(stage, ticket, work, done)?;
                any = true;
            }
        }
        Ok(any)
    }

    /// The place of a stage among those behind the source.
    pub(super) fn work_of(&self, stage: usize) -> usize {
        stage - usize::from(self.run.stages.source.is_some())
    }

    fn is_working(&self) -> bool {
        (0..self.run.places.len()).any(|stage| self.run.core.working(stage) > 0)
    }

    /// Whether a chunk, or what was sent of one, is on its way.
    fn is_in_flight(&self) -> bool {
        let mut outgoing = self.run.ports.outgoing();
        self.run.core.is_busy() || outgoing.any(|out| !out.sendings.is_empty())
    }

    /// What has to do its part before this rank can do anything.
    fn awaited(&mut self, is_working: bool) -> Awaited {
        let peer = self.run.ports.inputs.first().map(|input| input.peer);
        let peer = peer.map_or(Awaited::Nothing, Awaited::Peer);
        if is_working {
            return Awaited::Device;
        }
        if self.run.waits_for_sink {
            return Awaited::Nothing;
        }
        let is_arriving =
            |waiting: &mut Waiting<E, S>| matches!(waiting.payload, Payload::Arriving(_));
        let is_arriving = self.run.core.waiting_mut().any(is_arriving);
        let is_storing =
            self.goodbye.is_some() && self.acceptances().is_some_and(|input| !input.is_closed);
        match self.run.core.in_flight() > 0 || is_arriving || is_storing {
            true => peer,
            false => Awaited::Nothing,
        }
    }

    /// What a stage says, as a fault of this rank.
    pub(super) fn of_stage<T>(&mut self, said: Result<T, StageError>) -> Result<T, Fault> {
        said.map_err(|error| {
            self.is_broken = true;
            let fault = error.into_fault(self.blame.rank);
            // First, so that its own words are those that the others hear.
            self.switch.raise(fault.clone());
            fault
        })
    }
}
