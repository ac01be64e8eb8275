//! Phase B's driver: receive, compute, answer.

use std::collections::VecDeque;

use pp_contract::{
    Action, Bare, Composer, Envelope, Failure, FailureCode, Fault, FaultKind, Header, Lockstep,
    Manifest, Outcome, Plan, Rank, Requests, Side, Stamp, Text,
};
use pp_transport::in_flight::InFlight;
use pp_transport::link::Link;

use super::idle::IdleWait;
use super::{Blame, Payload, log_commitment, post_receive, send};
use crate::clock::now_ns;
use crate::core::{PhaseBAction, PhaseBCore};
use crate::progress::{Awaited, Doing};
use crate::stage::{Computed, PhaseBStages, Place, Progress, StageError};
use crate::switch::Switch;

/// Runs Phase B until the front says that it is done. Gives how many chunks it answered.
///
/// # Errors
/// The fault that ended the run: the first that any thread or rank of the job raised.
pub fn run_phase_b<L, S>(
    link: L,
    stages: &mut S,
    switch: &Switch,
    front: Rank,
    depth: u32,
) -> Result<u64, Fault>
where
    L: Link,
    S: PhaseBStages<L::Tx, L::Rx>,
{
    let mut driver = PhaseB {
        blame: Blame {
            rank: switch.rank(),
            peer: front,
        },
        core: PhaseBCore::new(depth),
        lockstep: Lockstep::requests(),
        composer: Composer::new(),
        inbox: Vec::with_capacity(pp_contract::MAX_FRAME_BYTES),
        spare: None,
        answers: VecDeque::with_capacity(depth as usize + 1),
        shutdown: None,
        epoch: None,
        last_end_ns: now_ns(),
        answered: 0,
        link,
        stages,
        switch,
    };
    match driver.run() {
        Ok(()) => Ok(driver.answered),
        Err(fault) => {
            switch.raise(fault.clone());
            driver.abandon();
            Err(switch.fault().cloned().unwrap_or(fault))
        }
    }
}

/// An envelope that waits for its compute.
struct Call<L: Link, P: Plan> {
    header: Header,
    envelope: Envelope<P>,
    payload: Payload<L::Receiving>,
}

/// A chunk whose compute has begun, and the slot its result will lie in.
struct Work<L: Link> {
    header: Header,
    outputs: Manifest,
    slot: L::Tx,
    start_ns: u64,
}

/// A chunk that a device computes.
type ComputingChunk<L, C> = (Work<L>, C);

struct PhaseB<'a, L: Link, S: PhaseBStages<L::Tx, L::Rx>> {
    link: L,
    stages: &'a mut S,
    switch: &'a Switch,
    blame: Blame,
    core: PhaseBCore<Call<L, S::Plan>, ComputingChunk<L, S::Computing>>,
    lockstep: Lockstep<Requests>,
    composer: Composer,
    inbox: Vec<u8>,
    spare: Option<L::Tx>,
    /// Results under way; each is given up once the next lease shows that it arrived.
    answers: VecDeque<InFlight<L::Sending>>,
    shutdown: Option<Header>,
    epoch: Option<pp_contract::CacheEpoch>,
    last_end_ns: u64,
    answered: u64,
}

impl<L: Link, S: PhaseBStages<L::Tx, L::Rx>> PhaseB<'_, L, S> {
    fn run(&mut self) -> Result<(), Fault> {
        // A clone, so that listening does not borrow the link.
        let bell = self.link.bell().clone();
        let mut idle = IdleWait::new(&bell, self.link.capabilities().completions_ring);
        loop {
            if let Some(fault) = self.switch.fault() {
                return Err(fault.clone());
            }
            let peer_had_left = self.switch.has_peer_left();
            self.switch.progress().at(Doing::Looking);
            while self.hear()? {}
            let answered = self.finish_computes()?;
            let can_compute = self.can_compute()?;
            let action = self.core.poll(can_compute);
            if answered || action != PhaseBAction::Wait {
                idle.over();
                self.switch.progress().awaits(Awaited::Nothing);
            }
            match action {
                PhaseBAction::Compute => self.compute()?,
                PhaseBAction::AnswerShutdown => self.answer_shutdown()?,
                PhaseBAction::Finish => return Ok(()),
                PhaseBAction::Wait if answered => {}
                PhaseBAction::Wait if peer_had_left => return Err(self.blame.left_early()),
                PhaseBAction::Wait => {
                    let next = self.core.waiting_mut().next();
                    let arriving =
                        next.is_some_and(|call| matches!(call.payload, Payload::Arriving(_)));
                    let computing = self.core.computing() > 0;
                    self.switch.progress().awaits(match (computing, arriving) {
                        (true, _) => Awaited::Device,
                        (false, true) => Awaited::Peer(self.blame.peer),
                        (false, false) => Awaited::Nothing,
                    });
                    let in_flight = self.core.unanswered() > 0 || !self.answers.is_empty();
                    idle.take(computing, in_flight);
                }
            }
        }
    }

    /// Whether the oldest envelope's payload is there, and a slot for its result.
    fn can_compute(&mut self) -> Result<bool, Fault> {
        let blame = self.blame;
        while let Some(answer) = self.answers.front()
            && answer
                .is_done()
                .map_err(|e| blame.transport("send result", e))?
        {
            // Its slot goes back to the pool, where the lease below finds it.
            self.answers.pop_front();
        }
        if self.spare.is_none() {
            self.switch.progress().at(Doing::Lease);
            let lease = self.link.try_lease();
            self.spare = lease.map_err(|e| blame.transport("lease a slot", e))?;
        }
        let Some(call) = self.core.waiting_mut().next() else {
            return Ok(false);
        };
        let arrived = call.payload.settle();
        Ok(arrived.map_err(|e| blame.transport("receive payload", e))? && self.spare.is_some())
    }

    /// Takes in one frame; false when there is none.
    fn hear(&mut self) -> Result<bool, Fault> {
        let blame = self.blame;
        let polled = self.link.poll_frame(&mut self.inbox);
        if !polled.map_err(|e| blame.transport("receive header", e))? {
            return Ok(false);
        }
        let matched = self.lockstep.admit(&self.inbox);
        let matched = matched.map_err(|e| blame.body("receive header", &e))?;
        let header = *matched.header();
        match header.action() {
            Action::Infer => {
                // Validated before the receive is posted: nothing is received for a bad envelope.
                let envelope = matched
                    .envelope()
                    .map_err(|e| blame.body("decode envelope", &e))?;
                let call = Call {
                    header,
                    envelope,
                    payload: Payload::None,
                };
                let call = self.core.handle_envelope(header.chunk_index(), call);
                let call = call.map_err(|e| blame.body("receive envelope", &e))?;
                self.switch.progress().at(Doing::Receive);
                call.payload = post_receive(&mut self.link, &matched, blame)?;
            }
            Action::Shutdown => {
                self.shutdown = Some(header);
                self.core.handle_shutdown();
            }
            Action::Error => {
                let failure = matched
                    .failure()
                    .map_err(|e| blame.body("decode failure", &e))?;
                let text = failure.to_string();
                return Err(Fault::new(FaultKind::Internal, blame.peer, "front", text));
            }
            Action::Noop => {}
        }
        Ok(true)
    }

    fn compute(&mut self) -> Result<(), Fault> {
        let mut call = self.core.begin_compute();
        let mut slot = self
            .spare
            .take()
            .expect("the core computes only on a credit");
        let input = call.payload.take();
        let place = Place {
            chunk: call.header.chunk_index(),
            epoch: call.header.cache_epoch(),
            starts_epoch: self.epoch != Some(call.header.cache_epoch()),
            rebuilds: false,
        };
        self.epoch = Some(place.epoch);
        let start_ns = now_ns();
        self.switch.progress().at(Doing::Compute);
        let progress = self
            .stages
            .compute(place, &call.envelope, input.as_ref(), &mut slot);
        // The credit goes back before the result leaves: the front can fill the slot meanwhile.
        drop(input);
        let work = Work {
            header: call.header,
            outputs: call.envelope.outputs().clone(),
            slot,
            start_ns,
        };
        match progress {
            Ok(Progress::Done(computed)) => self.answer(work, computed),
            Ok(Progress::UnderWay(computing)) => {
                self.core.handle_computing((work, computing));
                Ok(())
            }
            Err(error) => Err(self.send_failure(&call.header, error)),
        }
    }

    /// Answers the computes that a device has done; whether there was one.
    fn finish_computes(&mut self) -> Result<bool, Fault> {
        let mut any = false;
        while let Some((work, computing)) = self.core.take_computing() {
            match self.stages.poll_computed(computing) {
                Ok(Progress::Done(computed)) => self.answer(work, computed)?,
                Ok(Progress::UnderWay(computing)) => {
                    self.core.handle_still_computing((work, computing));
                    break;
                }
                Err(error) => return Err(self.send_failure(&work.header, error)),
            }
            any = true;
        }
        Ok(any)
    }

    /// Sends the result of a compute.
    fn answer(&mut self, work: Work<L>, computed: Computed) -> Result<(), Fault> {
        let blame = self.blame;
        let end_ns = now_ns();
        let (phase_b_ns, idle_ns) = match computed.worked {
            Some(worked) => (worked.compute_ns, worked.idle_ns),
            None => (
                end_ns - work.start_ns,
                work.start_ns.saturating_sub(self.last_end_ns),
            ),
        };
        self.last_end_ns = end_ns;
        let outcome = Outcome {
            observed_calls: computed.observed_calls,
            phase_b_us: phase_b_ns / 1000,
            idle_us: idle_ns / 1000,
            start_frame: computed.start_frame,
            seal: computed.seal,
            outputs: work.outputs,
        };
        let mut payload = if outcome.outputs.payload_bytes() > 0 {
            Some(work.slot)
        } else {
            self.spare = Some(work.slot);
            None
        };
        let sent = send(
            &mut self.link,
            self.switch,
            blame,
            &mut self.composer,
            Stamp::echo(&work.header),
            &mut payload,
            |composer| composer.prepare_outcome(&outcome),
        )?;
        log_commitment("result sent", &sent.header, blame.peer);
        self.answers.extend(sent.payload);
        self.answered += 1;
        Ok(())
    }

    /// Tells the front why there is no result; gives the fault that ends this rank.
    fn send_failure(&mut self, call: &Header, error: StageError) -> Fault {
        let code = match error.kind {
            FaultKind::BadInput => FailureCode::BadInput,
            FaultKind::Interrupted => FailureCode::Interrupted,
            FaultKind::Plugin => FailureCode::Compute,
            FaultKind::Device => FailureCode::Device,
            FaultKind::PeerMisbehaved => FailureCode::BadMessage,
            FaultKind::Drift => FailureCode::Drift,
            _ => FailureCode::Internal,
        };
        let failure = Failure {
            code,
            blames: if code == FailureCode::BadMessage || error.blames == Some(self.blame.peer) {
                Side::Front
            } else {
                Side::PhaseB
            },
            message: Text::truncated(&error.detail),
        };
        let fault = error.into_fault(match failure.blames {
            Side::Front => self.blame.peer,
            Side::PhaseB => self.blame.rank,
        });
        // First, because the front raises what it makes of the message, which has fewer kinds and names no operation.
        self.switch.raise(fault.clone());
        let stamp = Stamp::echo(call);
        let told = send(
            &mut self.link,
            self.switch,
            self.blame,
            &mut self.composer,
            stamp,
            &mut None,
            |composer| composer.prepare_failure(&failure),
        );
        // Untold, the front learns it from the abort that follows.
        drop(told);
        fault
    }

    fn answer_shutdown(&mut self) -> Result<(), Fault> {
        let header = self
            .shutdown
            .take()
            .expect("the core answers what was said");
        send(
            &mut self.link,
            self.switch,
            self.blame,
            &mut self.composer,
            Stamp::echo(&header),
            &mut None,
            |composer| Ok(composer.prepare_bare(Bare::Shutdown)),
        )?;
        log_commitment("shutdown answered", &header, self.blame.peer);
        self.core.handle_shutdown_answered();
        Ok(())
    }

    /// Poisons what is in flight.
    fn abandon(&mut self) {
        for answer in self.answers.drain(..) {
            drop(answer.abort());
        }
        // Slots that a device may still write go nowhere: their leases know.
        while self.core.take_computing().is_some() {}
        for call in self.core.waiting_mut() {
            if let Payload::Arriving(receive) = std::mem::replace(&mut call.payload, Payload::Lost)
            {
                drop(receive.abort());
            }
        }
    }
}
