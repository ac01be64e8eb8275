//! A link that breaks the rules between two ranks.
//!
//! What is sent wrongly goes through the inner link as any message does, which has to refuse it.
//! What is received wrongly was sent right: the frame is altered where it is polled.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pp_contract::{
    Bare, CacheEpoch, Composer, DType, Envelope, HEADER_BYTES, Manifest, Matched, Plan, Prepared,
    Rank, Stamp, TensorSpec,
};
use pp_transport::bell::Bell;
use pp_transport::error::TransportError;
use pp_transport::in_flight::{InFlight, Rejected};
use pp_transport::link::{Capabilities, Link, Sent};

use super::breakable::Breakable;
use super::frame::{self, altered, edited, longer, with_envelope, with_inputs, without};
use super::plan::{AnyParts, AnyPlan, unchecked};
use super::{Arm, Break};

/// A link that has sent nothing for so long, and hears nothing, is idle.
const IDLE_AFTER: Duration = Duration::from_millis(500);

/// A link with a hook.
#[derive(Debug)]
pub(crate) struct Faulty<L> {
    pub(super) inner: L,
    arm: Rc<Arm>,
    /// Frames to be heard before any other.
    first: VecDeque<Vec<u8>>,
    /// A frame that lets the next one go first.
    held: Option<Vec<u8>>,
    /// What was heard is broken: no receive may be posted for it.
    is_broken: bool,
    /// The chunk that was sent last, and its epoch.
    sent: Option<(u64, CacheEpoch)>,
    /// When.
    sent_at: Instant,
    /// Chunks of which something was heard.
    heard: u64,
    /// The epoch in which the chunk of the hook was sent.
    epoch_of_hook: Option<CacheEpoch>,
    keeps_back: bool,
}

impl<L: Breakable> Faulty<L> {
    pub(crate) fn new(inner: L, arm: &Rc<Arm>) -> Self {
        Self {
            inner,
            arm: Rc::clone(arm),
            first: VecDeque::new(),
            held: None,
            is_broken: false,
            sent: None,
            sent_at: Instant::now(),
            heard: 0,
            epoch_of_hook: None,
            keeps_back: false,
        }
    }

    /// Whether results are kept back: when that of the hook's chunk is the next one due, until
    /// something of a later epoch was sent.
    fn is_deaf(&mut self) -> bool {
        let (Some((_, now)), Some(epoch)) = (self.sent, self.epoch_of_hook) else {
            return false;
        };
        let chunk = self.arm.hook.chunk;
        if self.heard == chunk {
            self.keeps_back |= self.arm.strikes(Break::LateResult, chunk);
        }
        self.keeps_back && now == epoch
    }

    /// What must not be sent, before the message that is due: what the inner link says of it.
    fn send_wrongly(
        &mut self,
        stamp: Stamp,
        payload: &mut Option<L::Tx>,
    ) -> Result<(), Rejected<L::Tx>> {
        let chunk = stamp.chunk_index.get();
        let me = self.arm.me;
        let refuse = |error| Rejected {
            buffer: None,
            error,
        };
        if self.arm.strikes(Break::LoneCollective, chunk) {
            self.inner.broadcast_alone(me, me, stamp).map_err(refuse)?;
        }
        if self.arm.strikes(Break::WrongGroup, chunk) {
            let peer = Rank::new(1 - me.get());
            let asked = self.inner.broadcast_alone(me, peer, stamp);
            asked.map_err(refuse)?;
            self.arm.misses("it was not refused");
        }
        if self.arm.strikes(Break::SideTransfer, chunk) {
            let mut composer = Composer::new();
            let noop = composer.prepare_bare(Bare::Noop);
            self.inner.send(noop, stamp, payload.take())?;
            self.arm.misses("it was not refused");
        }
        Ok(())
    }

    /// What the peer is made to have sent in place of this frame; false where that is nothing.
    fn alter(&mut self, inbox: &mut Vec<u8>) -> bool {
        let what = self.arm.hook.what;
        let chunk = frame::chunk_of(inbox);
        if !chunk.is_some_and(|chunk| self.arm.is_due(what, chunk)) {
            return true;
        }
        match what {
            Break::Duplicated => self.first.push_back(inbox.clone()),
            Break::Skipped => {}
            Break::Swapped => self.held = Some(std::mem::take(inbox)),
            Break::TruncatedFrame => {
                inbox.truncate(HEADER_BYTES + (inbox.len() - HEADER_BYTES) / 2)
            }
            Break::DamagedBody => inbox[HEADER_BYTES] ^= 1,
            Break::WrongVersion => {
                frame::put(
                    inbox,
                    frame::VERSION,
                    &(pp_contract::WIRE_VERSION + 1).to_le_bytes(),
                );
                frame::seal(inbox);
            }
            Break::LyingBody => {
                let body = (inbox.len() - HEADER_BYTES) as u32 + 8;
                frame::put(inbox, frame::BODY_LEN, &body.to_le_bytes());
                frame::seal(inbox);
            }
            Break::LyingPayload => {
                let bytes = frame::get(inbox, frame::PAYLOAD_BYTES) / 2 + 1;
                frame::put(inbox, frame::PAYLOAD_BYTES, &bytes.to_le_bytes());
                frame::seal(inbox);
            }
            other => match altered_body(other, self.arm.me.get(), inbox) {
                Some(frame) => *inbox = frame,
                // No fault of what is heard, or not of such a message.
                None => return true,
            },
        }
        self.arm.strike();
        self.is_broken = what != Break::Duplicated;
        !matches!(what, Break::Skipped | Break::Swapped)
    }
}

impl<L> Drop for Faulty<L> {
    fn drop(&mut self) {
        self.arm.ends();
    }
}

/// The frame with a body that breaks a rule, as the rank that hears it gets it.
fn altered_body(what: Break, me: u32, frame: &[u8]) -> Option<Vec<u8>> {
    if me == 0 {
        return frame::with_outcome(frame, what == Break::ExtraTensor, |mut outcome| {
            outcome.outputs = match what {
                Break::AlteredManifest => {
                    altered(&outcome.outputs, "latents_out", |spec| longer(spec, 2))
                }
                Break::ExtraTensor => with_extra(&outcome.outputs),
                _ => return outcome,
            };
            outcome
        })
        .filter(|_| matches!(what, Break::AlteredManifest | Break::ExtraTensor));
    }
    match what {
        Break::WrongCalls => with_envelope(frame, true, |envelope| {
            with_parts(&envelope, |any| any.parts.expected_generator_calls += 1)
        }),
        Break::AlteredManifest => with_envelope(frame, false, |envelope| {
            let inputs = altered(envelope.inputs(), "latents_in", |spec| longer(spec, 2));
            with_inputs(&envelope, inputs)
        }),
        Break::ExtraTensor => with_envelope(frame, true, |envelope| {
            with_inputs(&envelope, with_extra(envelope.inputs()))
        }),
        Break::MissingTensor => with_envelope(frame, true, |envelope| {
            let inputs = without(envelope.inputs(), "conditioning_embeds");
            with_inputs(&envelope, inputs)
        }),
        Break::LostContext => with_envelope(frame, true, |envelope| {
            let inputs = without(envelope.inputs(), "context_frames");
            with_inputs(&envelope, inputs)
        }),
        Break::StaleContext => with_envelope(frame, true, |envelope| {
            with_parts(&envelope, |any| {
                any.parts.do_kv_recompute = false;
                any.parts.expected_generator_calls = any.parts.planned_calls();
            })
        }),
        _ => None,
    }
}

/// The given envelope with another plan.
fn with_parts(envelope: &Envelope<AnyPlan>, alter: fn(&mut AnyParts)) -> Envelope<AnyPlan> {
    let mut parts = envelope.plan().parts().clone();
    alter(&mut parts);
    let (inputs, outputs) = (envelope.inputs().clone(), envelope.outputs().clone());
    unchecked(AnyPlan(parts), inputs, outputs)
}

/// The tensors of `inner`, and one that no plan calls for.
fn with_extra(inner: &Manifest) -> Manifest {
    let side = TensorSpec::new("side", DType::U8, &[256]).expect("a small tensor");
    edited(inner, |tensors| tensors.push(side))
}

impl<L: Breakable> Link for Faulty<L> {
    type Tx = L::Tx;
    type Rx = L::Rx;
    type Sending = L::Sending;
    type Receiving = L::Receiving;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn bell(&self) -> &Bell {
        self.inner.bell()
    }

    fn try_lease(&mut self) -> Result<Option<L::Tx>, TransportError> {
        self.inner.try_lease()
    }

    fn peer_is_gone(&mut self) {
        self.inner.peer_is_gone();
    }

    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        mut payload: Option<L::Tx>,
    ) -> Result<Sent<L::Sending>, Rejected<L::Tx>> {
        let chunk = stamp.chunk_index.get();
        self.sent = Some((chunk, stamp.cache_epoch));
        self.sent_at = Instant::now();
        if chunk == self.arm.hook.chunk {
            self.epoch_of_hook = Some(stamp.cache_epoch);
        }
        if payload.is_some() {
            self.send_wrongly(stamp, &mut payload)?;
            if let Some(slot) = &mut payload
                && self.arm.strikes(Break::ChangedTensor, chunk)
                && let Err(error) = self.inner.change_byte(slot)
            {
                let buffer = payload;
                return Err(Rejected { buffer, error });
            }
            if self.arm.strikes(Break::ForeignSlot, chunk) {
                payload = self.inner.slot_of_another();
            }
            if self.arm.strikes(Break::SecondThread, chunk) {
                return self.inner.send_elsewhere(message, stamp, payload);
            }
        }
        self.inner.send(message, stamp, payload)
    }

    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        if self.is_deaf() {
            return Ok(false);
        }
        if let Some(frame) = self.first.pop_front() {
            *inbox = frame;
            return Ok(true);
        }
        while self.inner.poll_frame(inbox)? {
            self.first.extend(self.held.take());
            self.heard += u64::from(frame::chunk_of(inbox).is_some());
            if self.alter(inbox) {
                return Ok(true);
            }
        }
        // What it has sent is on its way no longer.
        let is_idle = self.sent_at.elapsed() >= IDLE_AFTER;
        let sent = self.sent.filter(|_| is_idle);
        if sent.is_some_and(|(chunk, _)| self.arm.strikes(Break::LeaveIdle, chunk)) {
            pp_job::end_now(0);
        }
        Ok(false)
    }

    fn receive(&mut self, header: &Matched<'_>) -> Result<InFlight<L::Receiving>, TransportError> {
        let chunk = header.header().chunk_index().get();
        if self.is_broken && chunk >= self.arm.hook.chunk {
            let what = format!("a receive was posted for chunk {chunk}");
            self.arm.misses(&what);
        }
        self.inner.receive(header)
    }
}
