//! The front while it has one link: the loop that admits, receives and decodes.

use std::time::Instant;

use pp_contract::{
    Action, Failure, FailureCode, Fault, FaultKind, Lockstep, Replies, Side, Verdict,
};
use pp_transport::link::{Capabilities, Link};

use super::super::idle::IdleWait;
use super::super::{Blame, post_receive};
use super::in_flight::Transfers;
use super::run::FrontRun;
use crate::clock::now_ns;
use crate::core::{Facts, FrontAction};
use crate::progress::{Awaited, Doing};
use crate::report::ChunkRecord;
use crate::stage::{Decoded, FrontStages, Offer, Place, Progress, StageError};
use crate::switch::Switch;
use crate::times;

/// What lasts as long as one link, and the run that goes on after it.
pub(super) struct FrontSession<'a, 's, L: Link, S: FrontStages<L::Tx, L::Rx>> {
    pub(super) run: &'a mut FrontRun<'s, L, S>,
    pub(super) link: L,
    pub(super) switch: &'a Switch,
    pub(super) blame: Blame,
    pub(super) lockstep: Lockstep<Replies>,
    /// A slot leased ahead: having it is the credit.
    pub(super) spare: Option<L::Tx>,
    pub(super) capabilities: Capabilities,
    /// A stage failed, or a payload is lost: what is left of the chunks under way is not enough to
    /// go on with.
    pub(super) is_broken: bool,
    /// The peer is gone, and needed no more: the link is not asked for anything.
    pub(super) is_alone: bool,
    /// When the shutdown was sent.
    pub(super) goodbye: Option<Instant>,
}

impl<L, S> FrontSession<'_, '_, L, S>
where
    L: Link,
    S: FrontStages<L::Tx, L::Rx>,
{
    pub(super) fn run(&mut self) -> Result<(), Fault> {
        // A clone, so that listening does not borrow the link.
        let bell = self.link.bell().clone();
        let mut idle = IdleWait::new(&bell, self.capabilities.completions_ring);
        loop {
            if let Some(fault) = self.switch.fault() {
                return Err(fault.clone());
            }
            if self.switch.is_draining() {
                self.run.core.handle_drain();
            }
            let peer_had_left = self.switch.has_peer_left();
            self.switch.progress().at(Doing::Looking);
            if !self.is_alone {
                let listened = self.listen();
                self.unless_served(listened)?;
            }
            let emitted = self.finish_decodes()?;
            let facts = self.facts()?;
            if !self.switch.is_served() && self.is_served()? && self.switch.set_served() {
                tracing::debug!(peer = self.blame.peer.get(), "all results are here");
            }
            if peer_had_left && !self.is_alone && self.switch.is_served() {
                self.go_alone();
            }
            let action = self.run.core.poll(facts);
            if emitted || action != FrontAction::Wait {
                idle.over();
                self.switch.progress().awaits(Awaited::Nothing);
            }
            match action {
                FrontAction::Build {
                    chunk,
                    epoch,
                    starts_epoch,
                    rebuilds,
                } => self.build(Place {
                    chunk,
                    epoch,
                    starts_epoch,
                    rebuilds,
                })?,
                FrontAction::SendAgain { rebuilds } => self.send_again(rebuilds)?,
                FrontAction::Decode => self.decode()?,
                FrontAction::Wait if emitted => {}
                FrontAction::Drop => self.drop_stale(),
                FrontAction::SendShutdown => {
                    let sent = self.send_shutdown();
                    self.unless_served(sent)?;
                }
                FrontAction::Finish => {
                    if self.is_alone {
                        self.link.peer_is_gone();
                    }
                    return Ok(());
                }
                FrontAction::Wait if self.is_unanswered() => self.go_alone(),
                FrontAction::Wait if peer_had_left && !self.is_alone => {
                    return Err(self.blame.left_early());
                }
                FrontAction::Wait => {
                    let in_flight = self.run.core.in_flight() > 0;
                    let decoding = self.run.core.decoding() > 0;
                    self.switch
                        .progress()
                        .awaits(match (in_flight, self.run.waits_for_sink) {
                            (true, false) if decoding => Awaited::Device,
                            (true, false) => Awaited::Peer(self.blame.peer),
                            _ => Awaited::Nothing,
                        });
                    idle.take(decoding, in_flight);
                }
            }
        }
    }

    fn listen(&mut self) -> Result<(), Fault> {
        while self.hear()? {}
        self.look_around()
    }

    /// Goes on without the peer where its loss is why this failed, and it is needed no more.
    fn unless_served(&mut self, done: Result<(), Fault>) -> Result<(), Fault> {
        match done {
            Err(fault) if self.switch.is_served() && fault.kind.is_worth_a_restart() => {
                tracing::debug!(%fault, "the peer is gone, and needed no more");
                self.go_alone();
                Ok(())
            }
            done => done,
        }
    }

    /// Whether the peer owes only the answer to the goodbye, and does not give it.
    fn is_unanswered(&self) -> bool {
        let since = self.goodbye.map(|said| said.elapsed());
        let is_late = !self.is_alone && since > Some(times::ANSWERED_WITHIN);
        if is_late {
            tracing::warn!(peer = self.blame.peer.get(), "no answer to the shutdown");
        }
        is_late
    }

    fn go_alone(&mut self) {
        self.run.core.handle_peer_gone();
        self.is_alone = true;
    }

    /// Asks the source and the edge for what the core can use.
    fn look_around(&mut self) -> Result<(), Fault> {
        if self.run.core.wants_offer() {
            self.switch.progress().at(Doing::Source);
            let offer = self.run.stages.poll_source();
            match self.of_stage(offer)? {
                Offer::Chunk(cut) => self.run.core.handle_offer(cut),
                Offer::Later => {}
                Offer::End => self.run.core.handle_source_end(),
            }
        }
        if self.spare.is_none() {
            self.switch.progress().at(Doing::Lease);
            let lease = self.link.try_lease();
            self.spare = lease.map_err(|e| self.blame.transport("lease a slot", e))?;
        }
        Ok(())
    }

    fn facts(&mut self) -> Result<Facts, Fault> {
        let oldest = self.run.core.oldest_epoch();
        let decoding = self.run.core.decoding();
        let mut arrived = false;
        let mut sink_ready = false;
        let next = self.run.core.chunks_mut().next();
        if let Some(next) = next {
            let is_back = next.transfers.is_back();
            arrived = is_back.map_err(|e| self.blame.transport("receive payload", e))?;
            if arrived {
                self.run.context.accept(next, oldest);
                let ready = self.run.stages.is_sink_ready(decoding);
                sink_ready = self.of_stage(ready)?;
            }
        }
        self.run.waits_for_sink = arrived && !sink_ready;
        Ok(Facts {
            credit: self.spare.is_some(),
            sink_ready,
        })
    }

    /// Whether Phase B is needed no more: every result is here, payload and all, and none will be asked for.
    fn is_served(&mut self) -> Result<bool, Fault> {
        if !self.run.core.is_served() {
            return Ok(false);
        }
        // A stale chunk that was lost has no result, and needs none.
        let mut chunks = self.run.core.chunks_mut();
        while let Some(chunk) = chunks.find(|chunk| chunk.transfers.result.is_some()) {
            let is_back = chunk.transfers.is_back();
            if !is_back.map_err(|e| self.blame.transport("receive payload", e))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes in one frame; false when there is none.
    fn hear(&mut self) -> Result<bool, Fault> {
        let blame = self.blame;
        let polled = self.link.poll_frame(&mut self.run.inbox);
        if !polled.map_err(|e| blame.transport("receive header", e))? {
            return Ok(false);
        }
        let matched = self.lockstep.admit(&self.run.inbox);
        let matched = matched.map_err(|e| blame.body("receive header", &e))?;
        let header = *matched.header();
        match header.action() {
            Action::Infer => {
                // Judged before the receive is posted: nothing is received for a bad result.
                let outcome = matched
                    .outcome()
                    .map_err(|e| blame.body("decode result", &e))?;
                let oldest = self.run.core.oldest_epoch();
                let core = &mut self.run.core;
                let due = core.handle_result(header.chunk_index(), header.cache_epoch());
                let due = due.map_err(|e| blame.body("receive result", &e))?;
                let verdict = due.judge(&header, &outcome, oldest);
                let verdict = verdict.map_err(|e| blame.body("judge result", &e))?;
                self.switch.progress().at(Doing::Receive);
                let payload = post_receive(&mut self.link, &matched, blame)?;
                if !self.run.options.keeps() {
                    // The envelope was consumed: its slot is back, or is reaped when it comes.
                    due.transfers.sending = None;
                }
                let record = &mut due.record;
                record.received_ns = now_ns();
                record.phase_b_us = outcome.phase_b_us;
                record.idle_us = outcome.idle_us;
                record.back_bytes = header.payload_bytes();
                record.dropped = verdict == Verdict::Stale;
                let payload_moves = self.capabilities.payload_moves;
                let (sent_ns, received_ns) = (record.sent_ns, record.received_ns);
                let clock = &mut self.run.peer_clock;
                let times = clock.place(sent_ns, received_ns, &outcome, payload_moves);
                if !payload_moves {
                    record.received_ns = times.compute_end_ns;
                }
                record.phase_b = Some(times);
                due.transfers.result = Some((outcome, payload));
                self.run.note_served();
            }
            Action::Shutdown => {
                self.run.core.handle_peer_closed();
            }
            Action::Error => {
                let failure = matched
                    .failure()
                    .map_err(|e| blame.body("decode failure", &e))?;
                return Err(fault_of(&failure, blame));
            }
            Action::Noop => {}
        }
        Ok(true)
    }

    fn decode(&mut self) -> Result<(), Fault> {
        let mut chunk = self.run.core.begin_decode();
        let result = chunk.transfers.result.take();
        let (outcome, mut payload) = result.expect("the core was told that it is here");
        let mut record = chunk.record;
        record.decode_start_ns = now_ns();
        self.switch.progress().at(Doing::Decode);
        let stages = &mut self.run.stages;
        let progress = stages.decode(chunk.place.chunk, chunk.carry, &outcome, payload.take());
        match self.of_stage(progress)? {
            Progress::Done(decoded) => self.emit(record, decoded),
            Progress::UnderWay(decoding) => {
                self.run.core.handle_decoding((decoding, record));
            }
        }
        Ok(())
    }

    /// Takes in the decodes that a device has done; whether there was one.
    fn finish_decodes(&mut self) -> Result<bool, Fault> {
        let mut any = false;
        while let Some((decoding, record)) = self.run.core.take_decoding() {
            let progress = self.run.stages.poll_decoded(decoding);
            match self.of_stage(progress)? {
                Progress::Done(decoded) => self.emit(record, decoded),
                Progress::UnderWay(decoding) => {
                    self.run.core.handle_still_decoding((decoding, record));
                    break;
                }
            }
            any = true;
        }
        Ok(any)
    }

    /// A decode is done and its chunk with the sink.
    fn emit(&mut self, mut record: ChunkRecord, decoded: Decoded) {
        record.decode_end_ns = now_ns();
        record.emitted_ns = record.decode_end_ns;
        if let Some(worked) = decoded.worked {
            // The device's own time; its queue is no work.
            record.build_end_ns = record.build_start_ns.saturating_add(worked.build_ns);
            record.decode_start_ns = record.decode_end_ns.saturating_sub(worked.decode_ns);
        }
        record.sink_queue = self.run.stages.queued().1;
        self.run.core.handle_decoded();
        self.run.recorder.push(record);
    }

    fn drop_stale(&mut self) {
        let mut chunk = self.run.core.handle_dropped();
        // Not poisoned: what still moves is reaped when it is done.
        let Transfers { sending, result } = &mut chunk.transfers;
        drop((result.take(), sending.take()));
        // A chunk whose result never came is not marked yet.
        chunk.record.dropped = true;
        tracing::debug!(
            call_id = chunk.call_id.get(),
            chunk_index = chunk.place.chunk.get(),
            cache_epoch = chunk.place.epoch.get(),
            group = "pp",
            peer = self.blame.peer.get(),
            "stale result dropped"
        );
        self.run.stages.forget(chunk.place.chunk, chunk.carry);
        self.run.recorder.push(chunk.record);
    }

    /// What a stage says, as a fault of this rank.
    pub(super) fn of_stage<T>(&mut self, said: Result<T, StageError>) -> Result<T, Fault> {
        said.map_err(|error| {
            self.is_broken = true;
            error.into_fault(self.blame.rank)
        })
    }
}

fn fault_of(failure: &Failure, blame: Blame) -> Fault {
    let rank = match failure.blames {
        Side::Front => blame.rank,
        Side::PhaseB => blame.peer,
    };
    let kind = match failure.code {
        FailureCode::BadMessage => FaultKind::PeerMisbehaved,
        FailureCode::BadInput => FaultKind::BadInput,
        FailureCode::Compute => FaultKind::Plugin,
        FailureCode::Interrupted => FaultKind::Interrupted,
        FailureCode::Device => FaultKind::Device,
        FailureCode::Drift => FaultKind::Drift,
        _ => FaultKind::Internal,
    };
    Fault::new(kind, rank, "phase_b", failure.message.as_str())
}
