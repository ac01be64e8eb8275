//! What a rank sends: new chunks and lost ones, the work of its stages, acceptances, and the goodbye.

use std::time::Instant;

use pp_contract::{Bare, ChunkIndex, Fault, FaultKind, Message, StageReport, Stamp};
use pp_transport::edge::{EdgeLocal as _, Edges};
use pp_transport::in_flight::{InFlight, Resend as _};

use super::blame::Blame;
use super::payload::Payload;
use super::ports::Output;
use super::rank::{Waiting, Working};
use super::retained::{Admitted, Kept};
use super::session::Session;
use crate::clock::now_ns;
use crate::core::{EndEvent, ONWARD, Ticket};
use crate::progress::Doing;
use crate::report::ChunkRecord;
use crate::stage::{Done, Place, Source, StageError, send_as_it_was};

/// What became of a payload that was handed on: its send, where it was one.
type Left<E> = Option<InFlight<<E as Edges>::Sending>>;

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    pub(super) fn build(&mut self, place: Place) -> Result<(), Fault> {
        let mut slot = self
            .take_slot(0, ONWARD)
            .expect("the core builds only on a credit");
        let build_start_ns = now_ns();
        self.switch.progress().at(Doing::Build);
        let source = self
            .run
            .stages
            .source
            .as_mut()
            .expect("rank 0 has the source");
        let built = source.build(place, &mut slot);
        let source_queue = source.queued();
        let built = self.of_stage(built)?;
        let spec = &self.run.options.pipeline.stages()[0];
        let message = Message::new(built.plan, spec, built.tensors)
            .and_then(|message| message.with_note(built.note))
            .map_err(StageError::from);
        let message = self.of_stage(message)?;
        let build_end_ns = now_ns();
        let (first_read_ns, last_read_ns) =
            built.read_ns.unwrap_or((build_start_ns, build_start_ns));
        let call_id = self.run.next_call;
        let stamp = self.stamp(Stamp::new(place.chunk, place.epoch, call_id));
        let bytes = message.tensors().payload_bytes();
        let mut slot = Some(slot);
        let sent = self.hand_on((0, ONWARD), stamp, message.clone(), &mut slot);
        self.run.count_call();
        let (sending, sent) = match sent {
            Ok(sending) => (sending, Ok(())),
            // It was built, and is sent once another process is there: a source builds a chunk only once.
            Err(fault) => {
                if slot.is_none() && bytes > 0 {
                    self.run.core.handle_end(EndEvent::Break);
                }
                let unsent = |slot| InFlight::new(E::Sending::unsent(slot));
                (slot.map(unsent), Err(fault))
            }
        };
        let sending = self.keep_or_leave(sending);
        let record = ChunkRecord {
            chunk_index: place.chunk.get(),
            call_id: call_id.get(),
            cache_epoch: place.epoch.get(),
            frames: built.frames,
            first_read_ns,
            last_read_ns,
            build_start_ns,
            build_end_ns,
            sent_ns: now_ns(),
            source_bytes: bytes,
            source_queue,
            in_flight: self.run.core.in_flight() + 1,
            ..ChunkRecord::before(&self.run.options.pipeline)
        };
        let admitted = Admitted {
            place,
            call_id,
            message,
            carry: Some(built.carry),
            sending,
            record,
        };
        let cut = self
            .run
            .core
            .handle_built(place.chunk, place.epoch, admitted);
        if let Some(epoch) = cut {
            self.switch.cut(epoch);
        }
        sent?;
        self.run.note_sent(place.chunk, false);
        Ok(())
    }

    /// Sends a chunk again that was lost with a rank, under the numbers it had; without its payload if a hard cut
    /// overtook it.
    pub(super) fn send_again(&mut self, rebuilds: bool) -> Result<(), Fault> {
        let mut slot = self
            .take_slot(0, ONWARD)
            .expect("the core sends only on a credit");
        self.switch.progress().at(Doing::Build);
        let run = &mut *self.run;
        let oldest = run.core.oldest_epoch();
        let lost = &*run.core.lost();
        let place = Place {
            rebuilds,
            ..lost.place
        };
        let call_id = lost.call_id;
        let is_overtaken = place.epoch < oldest;
        let kept = Kept {
            lost,
            context: &run.context,
        };
        let source = run.stages.source.as_mut().expect("rank 0 has the source");
        let composed = match is_overtaken {
            // Only the sink can say whether it has the chunk.
            true => None,
            false if rebuilds => Some(source.rebuild(place, &lost.message, &kept, &mut slot)),
            false => Some(send_as_it_was(&lost.message, &kept, &mut slot)),
        };
        let sent = lost.message.clone();
        let spec = &run.options.pipeline.stages()[0];
        let message = composed.map_or(Ok(sent.clone().overtaken()), |composed| {
            let (plan, tensors) = composed?;
            let message = Message::new(plan, spec, tensors)?;
            Ok(message.with_note(sent.note().to_vec())?)
        });
        let message = self.of_stage(message)?;
        let stamp = self.stamp(Stamp::new(place.chunk, place.epoch, call_id));
        let bytes = message.tensors().payload_bytes();
        let mut slot = Some(slot);
        let sending = self.hand_on((0, ONWARD), stamp, message.clone(), &mut slot)?;
        let sending = self.keep_or_leave(sending);
        let admitted = self.run.core.handle_sent_again();
        admitted.record.sent_ns = now_ns();
        admitted.record.source_bytes = bytes;
        admitted.message = message;
        // What it was copied from goes back to its pool when the copy is done.
        admitted.sending = sending;
        self.run.note_sent(place.chunk, true);
        Ok(())
    }

    /// A payload of the source stays in its slot where it may be sent again. Otherwise its slot comes back by itself.
    fn keep_or_leave(&mut self, sending: Left<E>) -> Left<E> {
        if self.run.options.keeps() {
            return sending;
        }
        if let (Some(sending), Output::Edge(out)) =
            (sending, &mut self.run.ports.outputs[0][ONWARD])
        {
            out.sends.push(sending);
        }
        None
    }

    /// The stamp of a chunk in the attempt that goes on.
    fn stamp(&self, stamp: Stamp) -> Stamp {
        Stamp {
            attempt: self.run.core.attempt(),
            ..stamp
        }
    }

    /// The slot that was leased ahead for an output.
    pub(super) fn take_slot(&mut self, stage: usize, output: usize) -> Option<E::Tx> {
        self.run.ports.outputs[stage][output].spare()?.take()
    }

    /// A slot that was not used is leased ahead again.
    fn put_back(&mut self, stage: usize, output: usize, slot: Option<E::Tx>) {
        if let (Some(spare), Some(slot)) = (self.run.ports.outputs[stage][output].spare(), slot) {
            *spare = Some(slot);
        }
    }

    /// A stage is done with a chunk, and so are the other members of its group: hands it on. At the sink, accepts it.
    pub(super) fn conclude(
        &mut self,
        stage: usize,
        ticket: Ticket,
        mut work: Working<E, S>,
    ) -> Result<(), Fault> {
        let done = work.done.take();
        let (Done { tensors, report }, end_ns) = done.expect("only what is done is concluded");
        let (work_ns, idle_ns) = match report.worked {
            Some(worked) => (worked.work_ns, worked.idle_ns),
            None => (
                end_ns - work.start_ns,
                work.start_ns.saturating_sub(self.run.last_end_ns[stage]),
            ),
        };
        self.run.last_end_ns[stage] = end_ns;
        let is_current = self.run.core.is_current(&ticket);
        let waited_ns = work.waited_ns.min(work_ns);
        let said = StageReport {
            calls: report.calls,
            start_frame: report.start_frame,
            work_us: (work_ns - waited_ns) / 1000,
            idle_us: (idle_ns + waited_ns) / 1000,
            seal: report.seal,
        };
        let at = self.run.places[stage].at;
        let pipeline = self.run.options.pipeline.clone();
        let kept_to_plan = said.check(
            work.message.plan(),
            (&pipeline.stages()[at], self.blame.rank),
            ticket.lap..ticket.lap + 1,
            pipeline.laps_of(at, work.message.plan()),
        );
        kept_to_plan.map_err(|e| {
            let (rank, name) = (self.blame.rank, &pipeline.stages()[at].name);
            let detail = format!("{e}; let Taken::of make the report");
            Fault::new(FaultKind::Usage, rank, name, detail)
        })?;
        let follows = self.run.places[stage].follows();
        if let Some(admitted) = self.run.core.admitted(ticket.chunk)
            && !follows
        {
            let times = &mut admitted.record.stages[at - 1].times;
            if let Some(times) = times {
                (times.start_ns, times.end_ns) =
                    (end_ns.saturating_sub(work_ns).max(work.start_ns), end_ns);
            }
        }
        if self.run.places[stage].is_sink {
            self.run.core.handle_taken(ticket.chunk);
            let message = work.message.accepted(&pipeline, &said, report.note);
            let message = self.of_stage(message.map_err(StageError::from))?;
            self.remember(stage, ticket.chunk, &message);
            if !is_current && self.is_source_apart(stage) {
                // Chunks before it are accepted anew. So is this one, when it comes again.
                return Ok(());
            }
            return self.accept(stage, work.stamp, message);
        }
        if !is_current {
            // Its slot may be one of an edge that is gone: it goes back where it came from.
            return Ok(());
        }
        if follows {
            let message = work.message.reported(&pipeline, at, &said);
            self.hand_on((stage, ONWARD), work.stamp, message, &mut None)?;
            return Ok(());
        }
        let (output, lap) = ticket.way_out;
        let message = work
            .message
            .hand_on(&pipeline, (at, ticket.lap), tensors, &said);
        let message = self.of_stage(message.map_err(StageError::from))?;
        let message = self.take_reports(stage, work.stamp, message)?;
        let stamp = Stamp { lap, ..work.stamp };
        let mut slot = work.slot;
        let left = self.hand_on((stage, output), stamp, message, &mut slot)?;
        if let (Some(sending), Output::Edge(out)) =
            (left, &mut self.run.ports.outputs[stage][output])
        {
            out.sends.push(sending);
        }
        Ok(())
    }

    /// Adds the reports of the other members of a group behind that of its leader.
    fn take_reports(
        &mut self,
        stage: usize,
        stamp: Stamp,
        mut message: Message<S::Plan>,
    ) -> Result<Message<S::Plan>, Fault> {
        for input in self.run.ports.reports_for_mut(stage) {
            let (of, report) = input.reports.pop_front().expect("each member has reported");
            if (of.chunk_index, of.attempt) != (stamp.chunk_index, stamp.attempt) {
                let detail = format!(
                    "a report on chunk {} of attempt {} came, that on chunk {} of attempt {} was due",
                    of.chunk_index, of.attempt, stamp.chunk_index, stamp.attempt
                );
                let kind = FaultKind::PeerMisbehaved;
                return Err(Fault::new(kind, input.peer, "receive report", detail));
            }
            message = message.joined(&report);
        }
        Ok(message)
    }

    /// Hands a chunk on that a hard cut overtook: without tensors. From the sink its acceptance goes.
    pub(super) fn pass_on(
        &mut self,
        stage: usize,
        ticket: Ticket,
        waiting: Waiting<E, S>,
    ) -> Result<(), Fault> {
        let message = waiting.message.overtaken();
        if self.run.places[stage].is_sink {
            self.run.core.handle_taken(ticket.chunk);
            self.remember(stage, ticket.chunk, &message);
            return self.accept(stage, waiting.stamp, message);
        }
        let (output, lap) = ticket.way_out;
        let stamp = Stamp {
            lap,
            ..waiting.stamp
        };
        self.hand_on((stage, output), stamp, message, &mut None)?;
        Ok(())
    }

    /// Releases a chunk that no stage works on. What the sink has it accepts again, in the same words: the source waits
    /// for what it sent again, and where a rank was lost the first acceptance may be too.
    pub(super) fn release(&mut self, stage: usize, input: usize) -> Result<(), Fault> {
        let (ticket, waiting, _) = self.run.core.begin(stage, input);
        let place = self.run.places[stage];
        if !(place.is_sink && self.run.core.is_current(&ticket)) {
            return Ok(());
        }
        drop(waiting.payload);
        let mut known = self.run.acceptances.iter();
        let said = known.find(|(chunk, _)| *chunk == ticket.chunk);
        // A source on this rank has heard it the first time.
        let message = said.map_or(waiting.message, |(_, message)| message.clone());
        self.accept(stage, waiting.stamp, message)
    }

    /// Keeps what the sink says of a chunk where that may be lost: the source sends such a chunk again. No more than
    /// `depth` chunks are in flight.
    fn remember(&mut self, stage: usize, chunk: ChunkIndex, message: &Message<S::Plan>) {
        if !self.run.options.keeps() || !self.is_source_apart(stage) {
            return;
        }
        let run = &mut *self.run;
        if run.acceptances.len() == run.options.depth as usize {
            run.acceptances.pop_front();
        }
        run.acceptances.push_back((chunk, message.clone()));
    }

    /// Whether the acceptances of this stage, the sink, go to another rank.
    fn is_source_apart(&self, stage: usize) -> bool {
        matches!(self.run.ports.outputs[stage][ONWARD], Output::Edge(_))
    }

    /// Hands a chunk to the stage behind. Where that fails its payload stays in `slot`, unless it is lost. Where the rank
    /// behind is gone and needed no more, the chunk goes nowhere.
    fn hand_on(
        &mut self,
        (stage, output): (usize, usize),
        stamp: Stamp,
        message: Message<S::Plan>,
        slot: &mut Option<E::Tx>,
    ) -> Result<Left<E>, Fault> {
        let left = self.hand_to((stage, output), stamp, message, slot);
        let is_edge = matches!(self.run.ports.outputs[stage][output], Output::Edge(_));
        match left {
            // The stage made more than its slots hold.
            Err(fault) if fault.kind == FaultKind::Usage => {
                let at = self.run.places[stage].at;
                let name = &self.run.options.pipeline.stages()[at].name;
                Err(Fault::new(fault.kind, fault.rank, name, fault.detail))
            }
            Err(fault) if is_edge => self.unless_served(Err(fault)).map(|()| None),
            left => left,
        }
    }

    fn hand_to(
        &mut self,
        (stage, output): (usize, usize),
        stamp: Stamp,
        message: Message<S::Plan>,
        slot: &mut Option<E::Tx>,
    ) -> Result<Left<E>, Fault> {
        let bytes = message.tensors().payload_bytes();
        if bytes == 0 {
            // A message without a payload needs no slot.
            self.put_back(stage, output, slot.take());
        }
        match &mut self.run.ports.outputs[stage][output] {
            Output::Local { edge, to, .. } => {
                let to = *to;
                let (sending, payload) = match slot.take() {
                    None => (None, Payload::None),
                    Some(full) => match edge.hand_on(full, bytes) {
                        Ok((sending, lease)) => (Some(sending), Payload::Here(lease)),
                        Err(rejected) => {
                            *slot = rejected.buffer;
                            return Err(self.blame.transport("hand on", rejected.error));
                        }
                    },
                };
                let waiting = Waiting {
                    stamp,
                    message,
                    payload,
                    arrived_ns: now_ns(),
                };
                self.arrive(to, waiting, self.blame)?;
                Ok(sending)
            }
            Output::Edge(out) => out.send(
                (self.switch, self.blame),
                &mut self.run.composer,
                stamp,
                slot,
                "message sent",
                |composer| composer.prepare(&message),
            ),
            Output::None | Output::Source => unreachable!("a chunk goes on to a stage"),
        }
    }

    /// Tells the source that the sink has a chunk.
    fn accept(
        &mut self,
        stage: usize,
        stamp: Stamp,
        message: Message<S::Plan>,
    ) -> Result<(), Fault> {
        match &mut self.run.ports.outputs[stage][ONWARD] {
            Output::Edge(_) => {
                let stamp = Stamp { lap: 0, ..stamp };
                self.hand_on((stage, ONWARD), stamp, message, &mut None)?;
                Ok(())
            }
            _ => self.accepted(stamp, &message, self.blame),
        }
    }

    /// The sink has a chunk.
    pub(super) fn accepted(
        &mut self,
        stamp: Stamp,
        message: &Message<S::Plan>,
        blame: Blame,
    ) -> Result<(), Fault> {
        let is_overtaken = message.is_stale();
        let core = &mut self.run.core;
        let accepted = core.handle_accepted(stamp.chunk_index, stamp.attempt, is_overtaken);
        let accepted = accepted.map_err(|e| blame.body("receive acceptance", &e))?;
        let Some(mut admitted) = accepted else {
            return Ok(());
        };
        self.run.note_served();
        let oldest = self.run.core.oldest_epoch();
        self.run.context.accept(&mut admitted, oldest);
        for (at, stage) in (1..).zip(&mut admitted.record.stages) {
            stage.take_in(message.trail().of(&self.run.options.pipeline, at));
        }
        self.forget(admitted, (!is_overtaken).then_some(message.note()))
    }

    /// Stores the record of a chunk that is no longer in flight. `note` is what the sink says of the chunk; `None` if a hard
    /// cut overtook the chunk.
    pub(super) fn forget(
        &mut self,
        mut admitted: Admitted<E, S>,
        note: Option<&[u8]>,
    ) -> Result<(), Fault> {
        let is_overtaken = note.is_none();
        let chunk = admitted.place.chunk;
        let source = self.run.stages.source.as_mut();
        let source = source.expect("rank 0 has the source");
        let mut built_ns = Ok(None);
        if let Some(mut carry) = admitted.carry.take() {
            let built = source.is_built(&mut carry);
            built_ns = built.and_then(|_| source.accepted(chunk, carry, note));
        }
        let built_ns = self.of_stage(built_ns)?;
        let record = &mut admitted.record;
        if let Some(built_ns) = built_ns {
            // What waits in the queue of a device is no work.
            record.build_end_ns = record.build_start_ns.saturating_add(built_ns);
        }
        record.accepted_ns = now_ns();
        record.dropped = is_overtaken;
        record.sink_queue = self.run.stages.work.last().map_or(0, |last| last.queued());
        let mut record = std::mem::take(record);
        self.run.clock.place(&mut record);
        self.run.recorder.push(record);
        if is_overtaken {
            // Not poisoned: what still moves is reaped when it is done.
            drop(admitted.sending.take());
            tracing::debug!(
                chunk_index = chunk.get(),
                cache_epoch = admitted.place.epoch.get(),
                group = "pp",
                "a chunk that a hard cut overtook is dropped"
            );
        }
        Ok(())
    }

    /// Says over all outputs of a stage that nothing more comes, and to the other members of its group.
    pub(super) fn close(&mut self, stage: usize) -> Result<(), Fault> {
        let run = &mut *self.run;
        let is_source = run.places[stage].is_source();
        if is_source {
            let chunk = ChunkIndex::new(run.core.counts().admitted);
            let last = Stamp::new(chunk, run.core.epoch(), run.next_call);
            let attempt = run.core.attempt();
            self.goodbye = Some((Stamp { attempt, ..last }, Instant::now()));
            run.count_call();
        } else {
            // First, so that the source hears of it only if it went well.
            self.switch.progress().works(stage);
            let own = self.work_of(stage);
            let finished = self.run.stages.work[own].finish();
            self.of_stage(finished)?;
        }
        let is_alone = self.is_alone();
        let run = &mut *self.run;
        for out in run.ports.outgoing_of(stage) {
            // Of a rank that is alone nothing is asked any more.
            let (Some(_), Some((stamp, _)), false) = (&out.end, self.goodbye, is_alone) else {
                continue;
            };
            out.send(
                (self.switch, self.blame),
                &mut run.composer,
                stamp,
                &mut None,
                "shutdown sent",
                |composer| Ok(composer.prepare_bare(Bare::Shutdown)),
            )?;
        }
        run.core.handle_closed_behind(stage);
        Ok(())
    }
}
