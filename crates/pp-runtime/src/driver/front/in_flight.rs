//! The record of a chunk on its way, and payloads that outlive it.
//!
//! What was sent is held until its result was accepted, and where a Phase B that is started anew
//! would need it as context, longer: it is not written any more, so nothing is copied for that.

use std::collections::VecDeque;

use pp_contract::{
    CacheEpoch, CallId, ChunkIndex, Envelope, Expectation, Header, Manifest, Outcome, Plan,
    ResultFault, Verdict,
};
use pp_transport::error::TransportError;
use pp_transport::in_flight::{InFlight, Part};
use pp_transport::link::Link;

use super::super::Payload;
use crate::report::ChunkRecord;
use crate::stage::{FrontStages, Place, RetainedPayloads};

/// A chunk between its admission and the beginning of its decode.
pub(super) struct InFlightChunk<L: Link, S: FrontStages<L::Tx, L::Rx>> {
    pub(super) place: Place,
    pub(super) call_id: CallId,
    pub(super) envelope: Envelope<S::Plan>,
    /// What the stages keep of it.
    pub(super) carry: S::Carry,
    pub(super) transfers: Transfers<L>,
    pub(super) record: ChunkRecord,
}

/// What moves for a chunk.
///
/// # If dropped
/// What is still under way is poisoned.
pub(super) struct Transfers<L: Link> {
    pub(super) sending: Option<InFlight<L::Sending>>,
    pub(super) result: Option<(Outcome, Payload<L::Receiving>)>,
}

impl<L: Link> Transfers<L> {
    /// Whether the result is here, payload and all.
    pub(super) fn is_back(&mut self) -> Result<bool, TransportError> {
        let result = self.result.as_mut();
        result.map_or(Ok(false), |(_, payload)| payload.settle())
    }

    /// Gives up the result that was on its way.
    pub(super) fn lose_result(&mut self) {
        if let Some((_, Payload::Arriving(receive))) = self.result.take() {
            drop(receive.abort());
        }
    }
}

impl<L: Link> Drop for Transfers<L> {
    fn drop(&mut self) {
        drop(self.sending.take().map(InFlight::abort));
        self.lose_result();
    }
}

impl<L: Link, S: FrontStages<L::Tx, L::Rx>> InFlightChunk<L, S> {
    /// Whether a result is what was asked for, or has come too late.
    pub(super) fn judge(
        &self,
        header: &Header,
        outcome: &Outcome,
        oldest: CacheEpoch,
    ) -> Result<Verdict, ResultFault> {
        let expectation = Expectation {
            call_id: self.call_id,
            chunk_index: self.place.chunk,
            cache_epoch: self.place.epoch,
            expected_calls: self.envelope.plan().expected_calls(),
            start_frame: self.envelope.plan().start_frame(),
            outputs: self.envelope.outputs(),
        };
        expectation.judge(header, outcome, oldest)
    }
}

/// The payload of a chunk whose result was accepted, kept because it is context of later chunks.
struct RetainedPayload<L: Link> {
    chunk: ChunkIndex,
    inputs: Manifest,
    sending: InFlight<L::Sending>,
}

/// Payloads of the chunks of one epoch whose results were accepted last, the oldest first.
pub(super) struct Context<L: Link> {
    payloads: VecDeque<RetainedPayload<L>>,
    most: usize,
}

impl<L: Link> Context<L> {
    /// Keeps at most so many.
    pub(super) fn new(most: usize) -> Self {
        Self {
            payloads: VecDeque::with_capacity(most),
            most,
        }
    }

    /// The result of this chunk is here, payload and all. What was sent for it goes back to its
    /// pool, or is kept while it is context.
    pub(super) fn accept<S: FrontStages<L::Tx, L::Rx>>(
        &mut self,
        chunk: &mut InFlightChunk<L, S>,
        oldest: CacheEpoch,
    ) {
        let Some(sending) = chunk.transfers.sending.take() else {
            return;
        };
        if self.most == 0 || chunk.place.epoch < oldest {
            return;
        }
        if chunk.place.starts_epoch {
            // Nothing from before may influence it.
            self.payloads.clear();
        }
        if self.payloads.len() == self.most {
            self.payloads.pop_front();
        }
        self.payloads.push_back(RetainedPayload {
            chunk: chunk.place.chunk,
            inputs: chunk.envelope.inputs().clone(),
            sending,
        });
        // No code waits for these sends, and a recorder sees that one is done only when it is asked.
        for retained in &self.payloads {
            let _ = retained.sending.is_done();
        }
    }
}

/// What there is to rebuild a chunk from.
pub(super) struct Sources<'a, L: Link, S: FrontStages<L::Tx, L::Rx>> {
    pub(super) lost: &'a InFlightChunk<L, S>,
    pub(super) context: &'a Context<L>,
}

impl<L: Link, S: FrontStages<L::Tx, L::Rx>> Sources<'_, L, S> {
    fn retained(&self, chunks_back: usize) -> Option<&RetainedPayload<L>> {
        let payloads = &self.context.payloads;
        let retained = payloads.get(payloads.len().checked_sub(chunks_back)?)?;
        // Each is accepted before the one behind it, so none is missing between them.
        debug_assert_eq!(
            retained.chunk.get() + chunks_back as u64,
            self.lost.place.chunk.get()
        );
        Some(retained)
    }
}

impl<L, S> RetainedPayloads<L::Tx> for Sources<'_, L, S>
where
    L: Link,
    S: FrontStages<L::Tx, L::Rx>,
{
    fn inputs(&self, chunks_back: usize) -> Option<&Manifest> {
        match chunks_back {
            0 => Some(self.lost.envelope.inputs()),
            _ => self.retained(chunks_back).map(|retained| &retained.inputs),
        }
    }

    fn copy(
        &self,
        chunks_back: usize,
        parts: &[Part],
        slot: &mut L::Tx,
    ) -> Result<(), TransportError> {
        let sent = match chunks_back {
            0 => self.lost.transfers.sending.as_ref(),
            _ => self.retained(chunks_back).map(|retained| &retained.sending),
        };
        let sent = sent.ok_or_else(|| TransportError::PayloadMismatch {
            payload_bytes: parts.iter().map(|part| part.bytes).sum(),
            with: format!("the payload sent {chunks_back} chunks before, which is not kept"),
        })?;
        sent.copy_into(parts, slot)
    }
}
