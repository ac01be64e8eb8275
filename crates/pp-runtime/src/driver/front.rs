//! The front's driver: admit, send, receive, decode.

use std::collections::VecDeque;

use pp_contract::{
    Action, Bare, ChunkIndex, Composer, Expectation, Failure, FailureCode, Fault, FaultKind,
    Header, Lockstep, Manifest, Matched, Outcome, Plan, Rank, Replies, Side, Stamp, Verdict,
};
use pp_transport::in_flight::InFlight;
use pp_transport::link::{Capabilities, Link};

use super::rest::Rest;
use super::{Blame, Payload, send};
use crate::clock::{PeerClock, now_ns};
use crate::core::{Counts, Facts, FrontAction, FrontCore};
use crate::progress::Doing;
use crate::report::{ChunkRecord, PhaseBTimes, Recorder};
use crate::stage::{Decoded, FrontStages, Offer, Place, Progress};
use crate::switch::Switch;

/// How the front runs.
#[derive(Clone, Copy, Debug)]
pub struct FrontOptions {
    /// The rank that runs Phase B.
    pub peer: Rank,
    /// The most chunks in flight.
    pub depth: u32,
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
    let mut driver = Front {
        blame: Blame {
            rank: switch.rank(),
            peer: options.peer,
        },
        core: FrontCore::new(options.depth),
        lockstep: Lockstep::replies(),
        composer: Composer::new(),
        inbox: Vec::with_capacity(pp_contract::MAX_FRAME_BYTES),
        spare: None,
        flights: VecDeque::with_capacity(options.depth as usize),
        recorder: Recorder::new(),
        peer_clock: PeerClock::default(),
        waits_for_sink: false,
        capabilities: link.capabilities(),
        link,
        stages,
        switch,
    };
    match driver.run() {
        Ok(()) => Ok(FrontSummary {
            counts: driver.core.counts(),
            recorder: driver.recorder,
            transport: driver.capabilities.name,
        }),
        Err(fault) => {
            switch.raise(fault.clone());
            driver.abandon();
            Err(switch.fault().cloned().unwrap_or(fault))
        }
    }
}

/// A chunk between its admission and the end of its decode.
struct Flight<L: Link> {
    header: Header,
    expected_calls: u32,
    start_frame: u64,
    outputs: Manifest,
    sending: Option<InFlight<L::Sending>>,
    leg: Leg<L>,
    record: ChunkRecord,
}

/// How far a flight is.
enum Leg<L: Link> {
    Away,
    Back(Outcome, Payload<L::Receiving>),
    Decoding,
}

struct Front<'a, L: Link, S> {
    link: L,
    stages: &'a mut S,
    switch: &'a Switch,
    blame: Blame,
    core: FrontCore,
    lockstep: Lockstep<Replies>,
    composer: Composer,
    inbox: Vec<u8>,
    /// A slot leased ahead: having it is the credit.
    spare: Option<L::Tx>,
    flights: VecDeque<Flight<L>>,
    recorder: Recorder,
    peer_clock: PeerClock,
    /// The next chunk is here, and whoever takes the output is not.
    waits_for_sink: bool,
    capabilities: Capabilities,
}

impl<L: Link, S: FrontStages<L::Tx, L::Rx>> Front<'_, L, S> {
    fn run(&mut self) -> Result<(), Fault> {
        // A clone, so that listening does not borrow the link.
        let bell = self.link.bell().clone();
        let mut rest = Rest::new(&bell, self.capabilities.completions_ring);
        loop {
            if let Some(fault) = self.switch.fault() {
                return Err(fault.clone());
            }
            if self.switch.is_draining() {
                self.core.handle_drain();
            }
            let peer_had_left = self.switch.has_peer_left();
            self.switch.progress().at(Doing::Looking);
            while self.hear()? {}
            self.look_around()?;
            let emitted = self.finish_decodes()?;
            let facts = self.facts()?;
            let action = self.core.poll(facts);
            if emitted || action != FrontAction::Wait {
                rest.over();
                self.switch.progress().awaits(false);
            }
            match action {
                FrontAction::Build {
                    chunk,
                    epoch,
                    starts_epoch,
                } => self.build(Place {
                    chunk,
                    epoch,
                    starts_epoch,
                })?,
                FrontAction::Decode { chunk } => self.decode(chunk)?,
                FrontAction::Wait if emitted => {}
                FrontAction::Drop { chunk } => self.drop_stale(chunk),
                FrontAction::SendShutdown => self.send_shutdown()?,
                FrontAction::Finish => return Ok(()),
                FrontAction::Wait if peer_had_left => return Err(self.blame.left_early()),
                FrontAction::Wait => {
                    let in_flight = self.core.in_flight() > 0;
                    self.switch
                        .progress()
                        .awaits(in_flight && !self.waits_for_sink);
                    rest.take(self.core.decoding() > 0, in_flight);
                }
            }
        }
    }

    /// Asks the source and the edge for what the core can use.
    fn look_around(&mut self) -> Result<(), Fault> {
        if self.core.wants_offer() {
            self.switch.progress().at(Doing::Source);
            let offer = self.stages.poll_source();
            match offer.map_err(|e| e.into_fault(self.blame.rank))? {
                Offer::Chunk(cut) => self.core.handle_offer(cut),
                Offer::Later => {}
                Offer::End => self.core.handle_source_end(),
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
        let next = self.core.decoding();
        let arrived = match self.flights.get_mut(next).map(|f| &mut f.leg) {
            Some(Leg::Back(_, payload)) => payload
                .settle()
                .map_err(|e| self.blame.transport("receive payload", e))?,
            _ => false,
        };
        let sink_ready = arrived
            && self
                .stages
                .is_sink_ready()
                .map_err(|e| e.into_fault(self.blame.rank))?;
        self.waits_for_sink = arrived && !sink_ready;
        Ok(Facts {
            credit: self.spare.is_some(),
            sink_ready,
        })
    }

    /// Takes in one frame; false when there is none.
    fn hear(&mut self) -> Result<bool, Fault> {
        let blame = self.blame;
        let polled = self.link.poll_frame(&mut self.inbox);
        if !polled.map_err(|e| blame.transport("receive header", e))? {
            return Ok(false);
        }
        let matched = self.lockstep.admit(&self.inbox);
        let matched = matched.map_err(|e| blame.lockstep(e))?;
        let header = *matched.header();
        match header.action() {
            Action::Infer => {
                self.switch.progress().at(Doing::Receive);
                let payload = post_receive(&mut self.link, &matched, blame)?;
                let outcome = matched
                    .outcome()
                    .map_err(|e| blame.body("decode result", &e))?;
                self.take_result(&header, outcome, payload)?;
            }
            Action::Shutdown => {
                self.core.handle_peer_closed();
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

    fn take_result(
        &mut self,
        header: &Header,
        outcome: Outcome,
        payload: Payload<L::Receiving>,
    ) -> Result<(), Fault> {
        let blame = self.blame;
        self.core
            .handle_result(header.chunk_index(), header.cache_epoch())
            .map_err(|e| blame.body("receive result", &e))?;
        let epoch = self.core.epoch();
        let is_due = |f: &&mut Flight<L>| matches!(f.leg, Leg::Away);
        let due = self.flights.iter_mut().find(is_due);
        let flight = due.expect("the core has as many flights without a result");
        let expectation = Expectation {
            call_id: flight.header.call_id(),
            chunk_index: flight.header.chunk_index(),
            cache_epoch: flight.header.cache_epoch(),
            expected_calls: flight.expected_calls,
            start_frame: flight.start_frame,
            outputs: &flight.outputs,
        };
        let verdict = expectation
            .judge(header, &outcome, epoch)
            .map_err(|e| blame.body("judge result", &e))?;
        // The envelope was consumed: its slot is back, or is reaped when it comes.
        flight.sending = None;
        let record = &mut flight.record;
        record.received_ns = now_ns();
        record.phase_b_us = outcome.phase_b_us;
        record.idle_us = outcome.idle_us;
        record.back_bytes = header.payload_bytes();
        record.dropped = verdict == Verdict::Stale;
        let (start, end) = self.peer_clock.place(
            record.sent_ns,
            record.received_ns,
            outcome.idle_us,
            outcome.phase_b_us,
        );
        // Neither side looks while it computes, so nobody saw a payload arrive. Where payloads
        // are handed over they were there at once; where they move, no later than this.
        let recv_ns = if self.capabilities.payload_moves {
            start.saturating_sub(outcome.idle_us.saturating_mul(1000))
        } else {
            record.received_ns = end;
            0
        };
        record.phase_b = Some(PhaseBTimes {
            recv_ns: recv_ns.max(record.sent_ns),
            compute_start_ns: start,
            compute_end_ns: end,
            sent_ns: end,
        });
        flight.leg = Leg::Back(outcome, payload);
        Ok(())
    }

    fn build(&mut self, place: Place) -> Result<(), Fault> {
        let blame = self.blame;
        let mut slot = self.spare.take().expect("the core builds only on a credit");
        let build_start_ns = now_ns();
        self.switch.progress().at(Doing::Build);
        let envelope = self
            .stages
            .build(place, &mut slot)
            .map_err(|e| e.into_fault(blame.rank))?;
        let build_end_ns = now_ns();
        let bytes = envelope.inputs().payload_bytes();
        // A message without a payload needs no slot.
        let payload = if bytes > 0 {
            Some(slot)
        } else {
            self.spare = Some(slot);
            None
        };
        let stamp = Stamp::fresh(place.chunk, place.epoch);
        let sent = send(
            &mut self.link,
            self.switch,
            blame,
            &mut self.composer,
            stamp,
            payload,
            |composer| composer.prepare_envelope(&envelope),
        )?;
        self.lockstep.expect(&sent.header);
        self.core.handle_sent(place.chunk, place.epoch);
        log_commitment("envelope sent", &sent.header, blame.peer);
        self.flights.push_back(Flight {
            expected_calls: envelope.plan().expected_calls(),
            start_frame: envelope.plan().start_frame(),
            outputs: envelope.outputs().clone(),
            sending: sent.payload,
            leg: Leg::Away,
            record: ChunkRecord {
                chunk_index: place.chunk.get(),
                call_id: sent.header.call_id().get(),
                cache_epoch: place.epoch.get(),
                frames: self.stages.frames_built(),
                build_start_ns,
                build_end_ns,
                sent_ns: now_ns(),
                forward_bytes: bytes,
                source_queue: self.stages.queued().0,
                in_flight: self.core.in_flight(),
                ..ChunkRecord::default()
            },
            header: sent.header,
        });
        Ok(())
    }

    fn decode(&mut self, chunk: ChunkIndex) -> Result<(), Fault> {
        let next = self.core.decoding();
        let flight = &mut self.flights[next];
        let Leg::Back(outcome, mut payload) = std::mem::replace(&mut flight.leg, Leg::Decoding)
        else {
            unreachable!("the core decodes what is back");
        };
        flight.record.decode_start_ns = now_ns();
        self.switch.progress().at(Doing::Decode);
        let progress = self
            .stages
            .decode(chunk, &outcome, payload.take())
            .map_err(|e| e.into_fault(self.blame.rank))?;
        self.core.handle_decode_started();
        if let Progress::Done(decoded) = progress {
            self.emit(decoded);
        }
        Ok(())
    }

    /// Takes in the decodes that a device has done; whether there was one.
    fn finish_decodes(&mut self) -> Result<bool, Fault> {
        let mut any = false;
        while self.core.decoding() > 0 {
            let decoded = self.stages.poll_decoded();
            match decoded.map_err(|e| e.into_fault(self.blame.rank))? {
                Some(decoded) => self.emit(decoded),
                None => break,
            }
            any = true;
        }
        Ok(any)
    }

    /// The oldest decode is done and with the sink.
    fn emit(&mut self, decoded: Decoded) {
        let mut flight = self.flights.pop_front().expect("a decode was under way");
        let record = &mut flight.record;
        record.decode_end_ns = now_ns();
        record.emitted_ns = record.decode_end_ns;
        if let Some(worked) = decoded.worked {
            // The device's own time; its queue is no work.
            record.build_end_ns = record.build_start_ns.saturating_add(worked.build_ns);
            record.decode_start_ns = record.decode_end_ns.saturating_sub(worked.decode_ns);
        }
        record.sink_queue = self.stages.queued().1;
        self.core.handle_decoded();
        self.recorder.push(flight.record);
    }

    fn drop_stale(&mut self, chunk: ChunkIndex) {
        let flight = self
            .flights
            .pop_front()
            .expect("the core drops what is there");
        log_commitment("stale result dropped", &flight.header, self.blame.peer);
        self.stages.forget(chunk);
        self.core.handle_dropped();
        self.recorder.push(flight.record);
    }

    fn send_shutdown(&mut self) -> Result<(), Fault> {
        let stamp = Stamp::fresh(
            ChunkIndex::new(self.core.counts().admitted),
            self.core.epoch(),
        );
        let sent = send(
            &mut self.link,
            self.switch,
            self.blame,
            &mut self.composer,
            stamp,
            None,
            |composer| Ok(composer.prepare_bare(Bare::Shutdown)),
        )?;
        self.lockstep.expect(&sent.header);
        self.core.handle_shutdown_sent();
        log_commitment("shutdown sent", &sent.header, self.blame.peer);
        Ok(())
    }

    /// Poisons what is in flight.
    fn abandon(&mut self) {
        for flight in self.flights.drain(..) {
            drop(flight.sending.map(InFlight::abort));
            if let Leg::Back(_, Payload::Arriving(receive)) = flight.leg {
                drop(receive.abort());
            }
        }
    }
}

/// Posts the receive that a header announces, if it announces one.
pub(super) fn post_receive<L: Link>(
    link: &mut L,
    matched: &Matched<'_>,
    blame: Blame,
) -> Result<Payload<L::Receiving>, Fault> {
    let header = matched.header();
    if header.payload_bytes() == 0 {
        return Ok(Payload::None);
    }
    let receive = link
        .receive(matched)
        .map_err(|e| blame.transport("post receive", e))?;
    log_commitment("receive posted", header, blame.peer);
    Ok(Payload::Arriving(receive))
}

/// One record for each point of no return, as every rank logs it.
pub(super) fn log_commitment(what: &'static str, header: &Header, peer: Rank) {
    tracing::debug!(
        call_id = header.call_id().get(),
        chunk_index = header.chunk_index().get(),
        cache_epoch = header.cache_epoch().get(),
        group = "pp",
        peer = peer.get(),
        bytes = header.payload_bytes(),
        "{what}"
    );
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
