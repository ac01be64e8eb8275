//! The loop of a rank: take in frames, ask the core what to do, do it, sleep.

use std::time::Instant;

use pp_contract::pipeline::EdgeKind;
use pp_contract::{Action as Message, Fault, FaultKind, Rank, Stamp, with_source};
use pp_transport::edge::{EdgeRx as _, Edges, GroupEnd as _};

use super::blame::Blame;
use super::idle::IdleWait;
use super::payload::{Payload, post_receive};
use super::ports::Incoming;
use super::rank::{RankRun, Waiting, Working};
use crate::clock::now_ns;
use crate::core::{
    Action, Cut, EndEvent, Ending, LAP, LocalStage, ONWARD, StageFacts, Ticket, TooMany, way_out,
};
use crate::progress::{Awaited, Doing};
use crate::report::StageTimes;
use crate::stage::{Chunk, Offer, Place, Source, StageError};
use crate::switch::Switch;
use crate::times;

/// What a stage has begun, and the payload that it reads.
type Begun<E, S> = (Ticket, Working<E, S>, Option<<E as Edges>::Rx>);

/// A run until a rank is lost.
pub(super) struct Session<'a, 's, E: Edges, S: Source<E::Tx>> {
    pub(super) run: &'a mut RankRun<'s, E, S>,
    pub(super) switch: &'a Switch,
    pub(super) blame: Blame,
    /// The stamp of the SHUTDOWN, and when it was sent or came.
    pub(super) goodbye: Option<(Stamp, Instant)>,
    /// The input of a frame that is taken in once this rank has begun what a leader has told it.
    pub(super) held: Option<usize>,
    pub(super) held_frame: Vec<u8>,
}

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    pub(super) fn run(&mut self) -> Result<(), Fault> {
        let bell = self.switch.bell().clone();
        let completions_ring = self.run.options.capabilities.completions_ring;
        let stages = self.run.options.pipeline.stages();
        let names = self.run.places.iter();
        let names = names.map(|place| stages[place.at].name.to_string());
        self.switch.progress().name_stages(names.collect());
        let mut idle = IdleWait::new(&bell, completions_ring);
        let peers = self.run.ports.peers();
        let mut left = Vec::with_capacity(peers.len());
        let mut facts = vec![StageFacts::default(); self.run.places.len()];
        loop {
            if let Some(event) = self.switch.ending().reached_by() {
                self.run.core.handle_end(event);
            }
            self.run.core.handle_cut(self.switch.oldest_epoch());
            // Looked at first: what a rank sent before it left is taken in.
            left.clear();
            left.extend(peers.iter().filter(|peer| self.switch.has_left(**peer)));
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
            let looked = self.look(&mut facts);
            self.unless_served(looked)?;
            if !self.switch.is_served() && self.is_served()? && self.switch.set_served() {
                tracing::debug!("nothing more is needed of other ranks");
            }
            if !left.is_empty() && self.switch.is_served() {
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
                Action::Run { stage, input } => {
                    let worked = self.work(stage, input);
                    self.unless_served(worked)?;
                }
                Action::RunOverlapped { stages } => self.work_overlapped(stages)?,
                Action::Later { stage, chunk } => self.do_later(stage, chunk)?,
                Action::PassOn { stage, input } => {
                    let (ticket, waiting, _) = self.run.core.begin(stage, input);
                    self.pass_on(stage, ticket, waiting)?;
                }
                Action::Drop { stage, input } => self.release(stage, input)?,
                Action::Close { stage } => {
                    let closed = self.close(stage);
                    self.unless_served(closed)?;
                }
                Action::Finish => {
                    if self.is_alone() {
                        self.run.leave_alone();
                    }
                    return Ok(());
                }
                Action::Wait if finished => {}
                Action::Wait if self.is_unanswered() => self.go_alone(),
                Action::Wait => {
                    if let Some(peer) = left.iter().find(|peer| self.is_missed(**peer)) {
                        return Err(self.blame.on(*peer).left_early());
                    }
                    let is_working = self.is_working();
                    self.switch.progress().awaits(self.awaited(is_working));
                    self.run.waited_ns += idle.take(is_working, self.is_in_flight());
                }
            }
        }
    }

    /// Takes in all that came. Where a device does one thing after the other, a receive that is issued before a collective
    /// would wait for a send behind that collective on another rank. So what a leader has told goes first, and is looked for
    /// again once a message is here: what the leader told before that message was sent is here too.
    fn listen(&mut self) -> Result<(), Fault> {
        self.hear_all(|input| !input.has_payloads())?;
        if let Some(input) = self.held.take_if(|_| !self.run.core.is_told()) {
            std::mem::swap(&mut self.run.inbox, &mut self.held_frame);
            self.take_in(input)?;
        }
        let follows = self.run.places.iter().any(LocalStage::follows);
        for input in 0..self.run.ports.inputs.len() {
            if !self.run.ports.inputs[input].has_payloads() {
                continue;
            }
            while !self.run.core.is_told() && self.poll(input)? {
                if follows {
                    std::mem::swap(&mut self.run.inbox, &mut self.held_frame);
                    self.hear_all(|input| input.kind == EdgeKind::Follow)?;
                    if self.run.core.is_told() {
                        self.held = Some(input);
                        break;
                    }
                    std::mem::swap(&mut self.run.inbox, &mut self.held_frame);
                }
                self.take_in(input)?;
            }
        }
        for output in self.run.ports.outputs.iter_mut().flatten() {
            self.switch.progress().at(Doing::Lease);
            output.lease(self.blame)?;
        }
        Ok(())
    }

    /// Goes on without other ranks where the loss of one is why this failed, and none is needed any more.
    pub(super) fn unless_served(&mut self, done: Result<(), Fault>) -> Result<(), Fault> {
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
        let is_owed = is_first && !self.is_alone() && self.switch.is_served();
        let is_late = is_owed && since > Some(times::ANSWERED_WITHIN);
        if is_late {
            tracing::warn!("no answer to the shutdown");
        }
        is_late
    }

    /// Goes on without other ranks: no edge is asked for anything.
    fn go_alone(&mut self) {
        self.run.core.handle_end(EndEvent::Serve);
        self.run.core.handle_end(EndEvent::Leave);
    }

    pub(super) fn is_alone(&self) -> bool {
        self.run.core.ending() == Ending::Alone
    }

    /// Whether an edge to this rank is still needed.
    fn is_missed(&self, peer: Rank) -> bool {
        let open = |input: &Incoming<E>| input.peer == peer && !input.is_closed;
        !self.is_alone() && (self.goodbye.is_none() || self.run.ports.inputs.iter().any(open))
    }

    fn ask_source(&mut self) -> Result<(), Fault> {
        let Some(source) = &mut self.run.stages.source else {
            return Ok(());
        };
        self.switch.progress().at(Doing::Source);
        let mut built = Ok(true);
        if !self.run.options.capabilities.completions_ring {
            // A device works on one chunk after the other. The sooner it is seen done, the better the times.
            for admitted in self.run.core.all_admitted() {
                built = admitted
                    .carry
                    .as_mut()
                    .map_or(built, |c| source.is_built(c));
                if built != Ok(true) {
                    break;
                }
            }
        }
        let offer = match self.run.core.wants_offer() {
            true => built.and_then(|_| source.poll()),
            false => built.map(|_| Offer::Later),
        };
        self.switch.progress().at(Doing::Looking);
        let offer = self.of_stage(offer)?;
        let core = &mut self.run.core;
        let refuse = |why: String| Err(StageError::new(FaultKind::BadInput, "ask the source", why));
        let taken = match offer {
            Offer::Chunk(Cut::Flush | Cut::Hard) if self.run.options.order.fixed().is_some() => {
                refuse("it offers a cut, and a fixed order has none; offer chunks without".into())
            }
            Offer::Chunk(cut) => {
                core.handle_offer(cut);
                Ok(())
            }
            Offer::Later => Ok(()),
            Offer::End => core
                .handle_source_end()
                .or_else(|e| refuse(with_source(&e))),
        };
        self.of_stage(taken)
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
            // The leader of a group would keep what is made for as long as it works on the next chunk.
            let is_made = |work: &Working<E, S>| work.done.is_some();
            if self.run.core.working(stage).any(is_made) && !self.have_reported(stage) {
                facts.is_here = [false; 2];
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
    pub(super) fn acceptances(&self) -> Option<&Incoming<E>> {
        let places = &self.run.places;
        let mut inputs = self.run.ports.inputs.iter();
        inputs.find(|input| places[input.to.0].is_source())
    }

    /// Takes in what came by these inputs.
    fn hear_all(&mut self, these: impl Fn(&Incoming<E>) -> bool) -> Result<(), Fault> {
        for input in 0..self.run.ports.inputs.len() {
            while these(&self.run.ports.inputs[input]) && self.poll(input)? {
                self.take_in(input)?;
            }
        }
        Ok(())
    }

    /// Copies the next frame of an input; false when there is none.
    fn poll(&mut self, input: usize) -> Result<bool, Fault> {
        let port = &mut self.run.ports.inputs[input];
        let blame = self.blame.on(port.peer);
        let polled = port
            .end
            .as_mut()
            .map_or(Ok(false), |(end, _)| end.poll_frame(&mut self.run.inbox));
        polled.map_err(|e| blame.transport("receive header", e))
    }

    /// Takes in the frame that was copied last.
    fn take_in(&mut self, input: usize) -> Result<(), Fault> {
        let run = &mut *self.run;
        let port = &mut run.ports.inputs[input];
        let blame = self.blame.on(port.peer);
        let Some((end, log)) = &mut port.end else {
            return Ok(());
        };
        let matched = port.lockstep.admit(&run.inbox);
        let matched = matched.map_err(|e| blame.body("receive header", &e))?;
        let header = *matched.header();
        let record = log.hears(&header);
        let (stage, which) = port.to;
        match header.action() {
            Message::Infer => {
                let (pipeline, at) = (&run.options.pipeline, run.places[stage].at);
                // Judged before the receive is posted: nothing is received for a bad message.
                let message = match port.kind {
                    EdgeKind::Follow => matched.followed(pipeline, at, port.slot_bytes),
                    EdgeKind::Report => matched.reported(pipeline, at, port.peer),
                    _ => matched.message(pipeline, port.maker),
                };
                let message = message.map_err(|e| blame.body("decode message", &e))?;
                if port.kind == EdgeKind::Report {
                    let depth = run.options.depth;
                    if port.reports.len() >= depth as usize {
                        let chunk = header.chunk_index();
                        let many = TooMany { chunk, depth };
                        return Err(blame.body("receive report", &many));
                    }
                    let report = message.trail().of(pipeline, at).first().copied();
                    let stamp = Stamp::of(&header);
                    port.reports.extend(report.map(|report| (stamp, report)));
                    return Ok(());
                }
                // Another rank was lost, and the source has begun anew.
                run.core.handle_attempt(header.attempt());
                if run.places[stage].is_source() {
                    return self.accepted(Stamp::of(&header), &message, blame);
                }
                self.switch.progress().at(Doing::Receive);
                let payload = match port.kind {
                    // It stays with the leader.
                    EdgeKind::Follow => Payload::None,
                    _ => {
                        let payload_moves = run.options.capabilities.payload_moves;
                        post_receive(end, &matched, blame, (record, payload_moves))?
                    }
                };
                let waiting = Waiting {
                    stamp: Stamp::of(&header),
                    message,
                    payload,
                    arrived_ns: now_ns(),
                };
                self.arrive((stage, which), waiting, blame)?;
            }
            Message::Shutdown => {
                port.is_closed = true;
                match port.kind {
                    EdgeKind::Report if !run.core.has_closed(stage) => {
                        return Err(blame.left_early());
                    }
                    EdgeKind::Report => run.core.handle_left(stage),
                    _ => run.core.handle_closed(stage, which),
                }
                if self.goodbye.is_none() {
                    self.goodbye = Some((Stamp::of(&header), Instant::now()));
                }
            }
            Message::Noop => {}
        }
        Ok(())
    }

    /// A chunk is here for a stage of this rank.
    pub(super) fn arrive(
        &mut self,
        (stage, input): (usize, usize),
        waiting: Waiting<E, S>,
        blame: Blame,
    ) -> Result<(), Fault> {
        let run = &mut *self.run;
        let (at, pipeline) = (run.places[stage].at, &run.options.pipeline);
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
        if let Some(admitted) = run.core.admitted(ticket.chunk)
            && !run.places[stage].follows()
        {
            admitted.record.stages[at - 1].times = Some(StageTimes {
                arrived_ns: waiting.arrived_ns,
                ..StageTimes::default()
            });
        }
        let arrived = run.core.handle_arrival(stage, input, ticket, waiting);
        arrived.map_err(|e| blame.body("receive message", &e))?;
        Ok(())
    }

    /// Works on the next chunk of an input.
    pub(super) fn work(&mut self, stage: usize, input: usize) -> Result<(), Fault> {
        let (ticket, work, payload) = self.begin(stage, input)?;
        // The credit goes back before the result leaves: the stage before can fill the slot meanwhile.
        drop(payload);
        self.settle(stage, ticket, work)
    }

    /// Lets a stage work on the next chunk of an input. Gives what it read, too.
    pub(super) fn begin(&mut self, stage: usize, input: usize) -> Result<Begun<E, S>, Fault> {
        let (ticket, mut waiting, starts_epoch) = self.run.core.begin(stage, input);
        let payload = waiting.payload.take();
        let mut slot = self.take_slot(stage, ticket.way_out.0);
        self.tell_followers(stage, &waiting)?;
        let start_ns = now_ns();
        self.switch.progress().works(stage);
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
            waited_ns: self.run.waited_ns,
            puts_off: self.run.core.puts_off(stage, ticket.chunk),
        };
        let own = self.work_of(stage);
        let group = self.run.groups[stage].as_mut();
        let had_waited_ns = group.as_ref().map_or(0, |group| group.waited_ns());
        let done =
            self.run.stages.work[own]
                .work()
                .run(chunk, payload.as_ref(), slot.as_mut(), group);
        let done = self.of_work(stage, done)?;
        let group = self.run.groups[stage].as_ref();
        let work = Working {
            stamp: waiting.stamp,
            message: waiting.message,
            slot,
            start_ns,
            waited_ns: group.map_or(0, |group| group.waited_ns() - had_waited_ns),
            done: done.map(|done| (done, now_ns())),
        };
        Ok((ticket, work, payload))
    }

    /// Hands a chunk on that a stage is done with. What a device works on, or other members, is asked for later.
    pub(super) fn settle(
        &mut self,
        stage: usize,
        ticket: Ticket,
        work: Working<E, S>,
    ) -> Result<(), Fault> {
        if work.done.is_some() && self.run.places[stage].followers() == 0 {
            return self.conclude(stage, ticket, work);
        }
        self.run.core.handle_working(stage, ticket, work);
        Ok(())
    }

    /// Tells the other members of a group that this rank begins with a chunk.
    fn tell_followers(&mut self, stage: usize, chunk: &Waiting<E, S>) -> Result<(), Fault> {
        let run = &mut *self.run;
        for out in &mut run.ports.followers[stage] {
            out.send(
                (self.switch, self.blame),
                &mut run.composer,
                chunk.stamp,
                &mut None,
                "member told",
                |composer| composer.prepare_without_payload(&chunk.message),
            )?;
        }
        Ok(())
    }

    /// Whether each other member of the group of this stage has reported on the chunk that is concluded next.
    fn have_reported(&self, stage: usize) -> bool {
        let mut reports = self.run.ports.reports_for(stage);
        reports.all(|input| !input.reports.is_empty())
    }

    /// Takes in the work that devices have done; whether there was some.
    fn finish_work(&mut self) -> Result<bool, Fault> {
        let mut any = false;
        for stage in 0..self.run.places.len() {
            while let Some((ticket, mut work)) = self.run.core.take_working(stage) {
                if work.done.is_none() {
                    let own = self.work_of(stage);
                    let done = self.run.stages.work[own].work().poll();
                    work.done = self.of_work(stage, done)?.map(|done| (done, now_ns()));
                }
                if let (None, Some(group)) = (&work.done, &self.run.groups[stage]) {
                    let looked = group.look().map_err(StageError::from);
                    self.of_work(stage, looked)?;
                }
                // What an abort cut short looks done, and the fault is there before the abort.
                let is_cut_short =
                    self.run.groups[stage].is_some() && self.switch.fault().is_some();
                // Of an older attempt no reports come.
                let is_awaited = self.run.core.is_current(&ticket);
                if work.done.is_none() || is_cut_short || is_awaited && !self.have_reported(stage) {
                    self.run.core.handle_still_working(stage, ticket, work);
                    break;
                }
                self.conclude(stage, ticket, work)?;
                any = true;
            }
        }
        Ok(any)
    }

    /// The place of a stage among those behind the source.
    pub(super) fn work_of(&self, stage: usize) -> usize {
        stage - usize::from(self.run.stages.source.is_some())
    }

    /// What a stage says of its work. A collective fails where a member is lost or has failed, and is no fault of this
    /// rank then.
    fn of_work<T>(&mut self, stage: usize, said: Result<T, StageError>) -> Result<T, Fault> {
        let is_of_group = self.run.groups[stage].is_some();
        if is_of_group && said.as_ref().is_err_and(|error| error.is_of_transport) {
            if self.switch.is_served() {
                return Err(self.blame.left_early());
            }
            let within = match self.run.places[stage].follows() {
                true => times::VERDICT_WITHIN,
                false => times::LEADER_SPEAKS_AFTER,
            };
            if let Some(lost) = self.switch.verdict_within(within) {
                return Err(lost.clone());
            }
        }
        self.of_stage(said)
    }

    /// What a stage says, as a fault of this rank.
    pub(super) fn of_stage<T>(&mut self, said: Result<T, StageError>) -> Result<T, Fault> {
        said.map_err(|error| {
            self.run.core.handle_end(EndEvent::Break);
            let fault = error.into_fault(self.blame.rank);
            // First, so that its own words are those that the others hear.
            self.switch.raise(fault.clone());
            fault
        })
    }
}
