//! A chunk on its way, and payloads that outlive it.
//!
//! What was sent is held until its result was accepted, and where a Phase B that is started anew
//! would need it as context, longer: nobody writes it, so nothing is copied for that.

use std::collections::VecDeque;

use pp_contract::{CallId, ChunkIndex, Envelope, Manifest, Outcome, Plan};
use pp_transport::error::TransportError;
use pp_transport::in_flight::{InFlight, Part};
use pp_transport::link::Link;

use super::super::Payload;
use crate::report::ChunkRecord;
use crate::stage::{self, Place};

/// A chunk between its admission and the end of its decode.
///
/// # If dropped
/// What is still under way for it is poisoned.
pub(super) struct Flight<L: Link, P: Plan> {
    pub(super) place: Place,
    pub(super) call_id: CallId,
    pub(super) envelope: Envelope<P>,
    pub(super) sending: Option<InFlight<L::Sending>>,
    pub(super) leg: Leg<L>,
    pub(super) record: ChunkRecord,
}

/// How far a flight is.
pub(super) enum Leg<L: Link> {
    /// With Phase B, or lost with it.
    Away,
    Back(Outcome, Payload<L::Receiving>),
    Decoding,
    /// Lost with Phase B, and overtaken by a hard cut before: nothing comes for it any more.
    Gone,
}

impl<L: Link, P: Plan> Flight<L, P> {
    /// Its result, to be decoded or dropped.
    pub(super) fn take_result(&mut self) -> Option<(Outcome, Payload<L::Receiving>)> {
        match std::mem::replace(&mut self.leg, Leg::Decoding) {
            Leg::Back(outcome, payload) => Some((outcome, payload)),
            Leg::Away | Leg::Decoding | Leg::Gone => None,
        }
    }

    /// Gives up the result that was on its way.
    pub(super) fn lose_result(&mut self) {
        if let Leg::Back(_, Payload::Arriving(receive)) =
            std::mem::replace(&mut self.leg, Leg::Away)
        {
            drop(receive.abort());
        }
    }
}

impl<L: Link, P: Plan> Drop for Flight<L, P> {
    fn drop(&mut self) {
        drop(self.sending.take().map(InFlight::abort));
        self.lose_result();
    }
}

/// The payload of a chunk whose result was accepted, kept because it is context of later chunks.
pub(super) struct Kept<L: Link> {
    pub(super) chunk: ChunkIndex,
    pub(super) inputs: Manifest,
    pub(super) sending: InFlight<L::Sending>,
}

/// What there is to rebuild a chunk from.
pub(super) struct Sources<'a, L: Link, P: Plan> {
    pub(super) flight: &'a Flight<L, P>,
    pub(super) kept: &'a VecDeque<Kept<L>>,
}

impl<L: Link, P: Plan> Sources<'_, L, P> {
    fn kept(&self, chunks_back: usize) -> Option<&Kept<L>> {
        let kept = self.kept.get(self.kept.len().checked_sub(chunks_back)?)?;
        // Each is accepted before the one behind it, so none is missing between them.
        debug_assert_eq!(
            kept.chunk.get() + chunks_back as u64,
            self.flight.place.chunk.get()
        );
        Some(kept)
    }
}

impl<L: Link, P: Plan> stage::Kept<L::Tx> for Sources<'_, L, P> {
    fn inputs(&self, chunks_back: usize) -> Option<&Manifest> {
        match chunks_back {
            0 => Some(self.flight.envelope.inputs()),
            _ => self.kept(chunks_back).map(|kept| &kept.inputs),
        }
    }

    fn copy(
        &self,
        chunks_back: usize,
        parts: &[Part],
        slot: &mut L::Tx,
    ) -> Result<(), TransportError> {
        let sent = match chunks_back {
            0 => self.flight.sending.as_ref(),
            _ => self.kept(chunks_back).map(|kept| &kept.sending),
        };
        let sent = sent.ok_or_else(|| TransportError::PayloadMismatch {
            payload_bytes: parts.iter().map(|part| part.bytes).sum(),
            with: format!("the payload sent {chunks_back} chunks before, which is not kept"),
        })?;
        sent.copy_into(parts, slot)
    }
}
