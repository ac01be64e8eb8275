//! The front while it has one link: the loop that admits, receives and decodes.

use std::collections::VecDeque;

use pp_contract::{
    Action, ChunkIndex, Expectation, Failure, FailureCode, Fault, FaultKind, Header, Lockstep,
    Outcome, Plan, Replies, Side, Verdict,
};
use pp_transport::link::{Capabilities, Link};

use super::super::rest::Rest;
use super::super::{Blame, Payload, post_receive};
use super::flight::{Flight, Leg};
use super::run::FrontRun;
use crate::clock::now_ns;
use crate::core::{Facts, FrontAction, FrontCore};
use crate::progress::Doing;
use crate::stage::{Decoded, FrontStages, Offer, Place, Progress, StageError};
use crate::switch::Switch;

/// What lasts as long as one link, and the run that goes on after it.
pub(super) struct OnLink<'a, 's, L: Link, S: FrontStages<L::Tx, L::Rx>> {
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
}

impl<L, S> OnLink<'_, '_, L, S>
where
    L: Link,
    S: FrontStages<L::Tx, L::Rx>,
{
    pub(super) fn run(&mut self) -> Result<(), Fault> {
        // A clone, so that listening does not borrow the link.
        let bell = self.link.bell().clone();
        let mut rest = Rest::new(&bell, self.capabilities.completions_ring);
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
                self.run.stages.served();
                tracing::debug!(peer = self.blame.peer.get(), "all results are here");
            }
            if peer_had_left && !self.is_alone && self.switch.is_served() {
                self.go_alone();
            }
            let action = self.run.core.poll(facts);
            if emitted || action != FrontAction::Wait {
                rest.over();
                self.switch.progress().awaits(false);
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
                FrontAction::SendAgain {
                    chunk, rebuilds, ..
                } => self.send_again(chunk, rebuilds)?,
                FrontAction::Decode { chunk } => self.decode(chunk)?,
                FrontAction::Wait if emitted => {}
                FrontAction::Drop { chunk } => self.drop_stale(chunk),
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
                FrontAction::Wait if peer_had_left && !self.is_alone => {
                    return Err(self.blame.left_early());
                }
                FrontAction::Wait => {
                    let in_flight = self.run.core.in_flight() > 0;
                    self.switch
                        .progress()
                        .awaits(in_flight && !self.run.waits_for_sink);
                    rest.take(self.run.core.decoding() > 0, in_flight);
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
        let losses = [FaultKind::PeerDied, FaultKind::TimedOut, FaultKind::Device];
        match done {
            Err(fault) if self.switch.is_served() && losses.contains(&fault.kind) => {
                tracing::debug!(%fault, "the peer is gone, and needed no more");
                self.go_alone();
                Ok(())
            }
            done => done,
        }
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
        let next = self.run.core.decoding();
        let arrived = match self.run.flights.get_mut(next).map(|f| &mut f.leg) {
            Some(Leg::Back(_, payload)) => payload
                .settle()
                .map_err(|e| self.blame.transport("receive payload", e))?,
            _ => false,
        };
        let sink_ready = if arrived {
            self.run.accept(next);
            let ready = self.run.stages.is_sink_ready();
            self.of_stage(ready)?
        } else {
            false
        };
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
        for flight in &mut self.run.flights {
            if let Leg::Back(_, payload) = &mut flight.leg {
                let settled = payload.settle();
                if !settled.map_err(|e| self.blame.transport("receive payload", e))? {
                    return Ok(false);
                }
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
        let matched = matched.map_err(|e| blame.lockstep(e))?;
        let header = *matched.header();
        match header.action() {
            Action::Infer => {
                // Judged before the receive is posted: nothing is received for a bad result.
                let outcome = matched
                    .outcome()
                    .map_err(|e| blame.body("decode result", &e))?;
                let (core, flights) = (&mut self.run.core, &self.run.flights);
                let verdict = judge(core, flights, &header, &outcome, blame)?;
                self.switch.progress().at(Doing::Receive);
                let payload = post_receive(&mut self.link, &matched, blame)?;
                self.take_result(&header, outcome, payload, verdict);
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

    fn take_result(
        &mut self,
        header: &Header,
        outcome: Outcome,
        payload: Payload<L::Receiving>,
        verdict: Verdict,
    ) {
        let due = self.run.flights.iter_mut().find(|flight| is_due(flight));
        let flight = due.expect("judged against it");
        if !self.run.options.keeps() {
            // The envelope was consumed: its slot is back, or is reaped when it comes.
            flight.sending = None;
        }
        let record = &mut flight.record;
        record.received_ns = now_ns();
        record.phase_b_us = outcome.phase_b_us;
        record.idle_us = outcome.idle_us;
        record.back_bytes = header.payload_bytes();
        record.dropped = verdict == Verdict::Stale;
        let payload_moves = self.capabilities.payload_moves;
        let times =
            self.run
                .peer_clock
                .place(record.sent_ns, record.received_ns, &outcome, payload_moves);
        if !payload_moves {
            record.received_ns = times.compute_end_ns;
        }
        record.phase_b = Some(times);
        flight.leg = Leg::Back(outcome, payload);
        self.run.note_served();
    }

    fn decode(&mut self, chunk: ChunkIndex) -> Result<(), Fault> {
        let next = self.run.core.decoding();
        let flight = &mut self.run.flights[next];
        let result = flight.take_result();
        let (outcome, mut payload) = result.expect("the core decodes what is back");
        flight.record.decode_start_ns = now_ns();
        self.switch.progress().at(Doing::Decode);
        let progress = self.run.stages.decode(chunk, &outcome, payload.take());
        let progress = self.of_stage(progress)?;
        self.run.core.handle_decode_started();
        if let Progress::Done(decoded) = progress {
            self.emit(decoded);
        }
        Ok(())
    }

    /// Takes in the decodes that a device has done; whether there was one.
    fn finish_decodes(&mut self) -> Result<bool, Fault> {
        let mut any = false;
        while self.run.core.decoding() > 0 {
            let decoded = self.run.stages.poll_decoded();
            match self.of_stage(decoded)? {
                Some(decoded) => self.emit(decoded),
                None => break,
            }
            any = true;
        }
        Ok(any)
    }

    /// The oldest decode is done and with the sink.
    fn emit(&mut self, decoded: Decoded) {
        let mut flight = self
            .run
            .flights
            .pop_front()
            .expect("a decode was under way");
        let record = &mut flight.record;
        record.decode_end_ns = now_ns();
        record.emitted_ns = record.decode_end_ns;
        if let Some(worked) = decoded.worked {
            // The device's own time; its queue is no work.
            record.build_end_ns = record.build_start_ns.saturating_add(worked.build_ns);
            record.decode_start_ns = record.decode_end_ns.saturating_sub(worked.decode_ns);
        }
        record.sink_queue = self.run.stages.queued().1;
        self.run.core.handle_decoded();
        self.run.recorder.push(flight.record);
    }

    fn drop_stale(&mut self, chunk: ChunkIndex) {
        let flight = self.run.flights.pop_front();
        let mut flight = flight.expect("the core drops what is there");
        // Not poisoned: what still moves is reaped when it is done.
        drop((flight.take_result(), flight.sending.take()));
        // Of one whose result never came nobody has said so.
        flight.record.dropped = true;
        tracing::debug!(
            call_id = flight.call_id.get(),
            chunk_index = chunk.get(),
            cache_epoch = flight.place.epoch.get(),
            group = "pp",
            peer = self.blame.peer.get(),
            "stale result dropped"
        );
        self.run.stages.forget(chunk);
        self.run.core.handle_dropped();
        self.run.recorder.push(flight.record);
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

/// The result that is due is that of the oldest flight without one.
fn is_due<L: Link, P: Plan>(flight: &Flight<L, P>) -> bool {
    matches!(flight.leg, Leg::Away)
}

/// Whether a result is the one that is due, and what was asked for; or has come too late.
fn judge<L: Link, P: Plan>(
    core: &mut FrontCore,
    flights: &VecDeque<Flight<L, P>>,
    header: &Header,
    outcome: &Outcome,
    blame: Blame,
) -> Result<Verdict, Fault> {
    core.handle_result(header.chunk_index(), header.cache_epoch())
        .map_err(|e| blame.body("receive result", &e))?;
    let due = flights.iter().find(|flight| is_due(flight));
    let flight = due.expect("the core has as many flights without a result");
    let expectation = Expectation {
        call_id: flight.call_id,
        chunk_index: flight.place.chunk,
        cache_epoch: flight.place.epoch,
        expected_calls: flight.envelope.plan().expected_calls(),
        start_frame: flight.envelope.plan().start_frame(),
        outputs: flight.envelope.outputs(),
    };
    expectation
        .judge(header, outcome, core.epoch())
        .map_err(|e| blame.body("judge result", &e))
}
