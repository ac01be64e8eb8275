//! The record of a chunk at the source, and payloads that outlive it.
//!
//! What was sent is held until the sink has accepted it, and where a stage that is started anew
//! would need it as context, longer: it is not written any more, so nothing is copied for that.

use std::collections::VecDeque;

use pp_contract::{CacheEpoch, CallId, ChunkIndex, Manifest, Message};
use pp_transport::edge::Edges;
use pp_transport::error::TransportError;
use pp_transport::in_flight::{InFlight, Part};

use crate::report::ChunkRecord;
use crate::stage::{Place, RetainedPayloads, Source};

/// A chunk between its admission and its acceptance.
///
/// # If dropped
/// Its payload, if it is still under way, is poisoned.
pub(super) struct Admitted<E: Edges, S: Source<E::Tx>> {
    pub(super) place: Place,
    pub(super) call_id: CallId,
    pub(super) message: Message<S::Plan>,
    /// What the source keeps of it.
    pub(super) carry: Option<S::Carry>,
    /// Its payload, where it may be sent again.
    pub(super) sending: Option<InFlight<E::Sending>>,
    pub(super) record: ChunkRecord,
}

impl<E: Edges, S: Source<E::Tx>> Drop for Admitted<E, S> {
    fn drop(&mut self) {
        drop(self.sending.take().map(InFlight::abort));
    }
}

/// The payload of a chunk that was accepted, kept because it is context of later chunks.
struct Retained<E: Edges> {
    chunk: ChunkIndex,
    tensors: Manifest,
    /// `None`: the payload had no bytes, so nothing was sent of it.
    sending: Option<InFlight<E::Sending>>,
}

/// Payloads of the chunks of one epoch that were accepted last, the oldest first.
pub(super) struct Context<E: Edges> {
    payloads: VecDeque<Retained<E>>,
    most: usize,
}

impl<E: Edges> Context<E> {
    /// Keeps at most so many.
    pub(super) fn new(most: usize) -> Self {
        Self {
            payloads: VecDeque::with_capacity(most),
            most,
        }
    }

    /// The sink has this chunk. What was sent for it goes back to its
    /// pool, or is kept while it is context.
    pub(super) fn accept<S: Source<E::Tx>>(
        &mut self,
        chunk: &mut Admitted<E, S>,
        oldest: CacheEpoch,
    ) {
        let sending = chunk.sending.take();
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
        self.payloads.push_back(Retained {
            chunk: chunk.place.chunk,
            tensors: chunk.message.tensors().clone(),
            sending,
        });
        // No code waits for these sends, and a recorder sees that one is done only when it is asked.
        for retained in &self.payloads {
            let _ = retained.sending.as_ref().map(InFlight::is_done);
        }
    }
}

/// What there is to compose a chunk from again.
pub(super) struct Kept<'a, E: Edges, S: Source<E::Tx>> {
    pub(super) chunk: ChunkIndex,
    /// What was sent of the chunk itself, if it was.
    pub(super) lost: Option<&'a Admitted<E, S>>,
    pub(super) context: &'a Context<E>,
}

impl<E: Edges, S: Source<E::Tx>> Kept<'_, E, S> {
    fn retained(&self, chunks_back: usize) -> Option<&Retained<E>> {
        let payloads = &self.context.payloads;
        let retained = payloads.get(payloads.len().checked_sub(chunks_back)?)?;
        // Each is accepted before the one behind it, so none is missing between them.
        debug_assert_eq!(retained.chunk.get() + chunks_back as u64, self.chunk.get());
        Some(retained)
    }
}

impl<E, S> RetainedPayloads<E::Tx> for Kept<'_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    fn inputs(&self, chunks_back: usize) -> Option<&Manifest> {
        match chunks_back {
            0 => self.lost.map(|lost| lost.message.tensors()),
            _ => self.retained(chunks_back).map(|retained| &retained.tensors),
        }
    }

    fn copy(
        &self,
        chunks_back: usize,
        parts: &[Part],
        slot: &mut E::Tx,
    ) -> Result<(), TransportError> {
        let sent = match chunks_back {
            0 => self.lost.and_then(|lost| lost.sending.as_ref()),
            _ => (self.retained(chunks_back)).and_then(|retained| retained.sending.as_ref()),
        };
        let sent = sent.ok_or_else(|| TransportError::PayloadMismatch {
            payload_bytes: parts.iter().map(|part| part.bytes).sum(),
            with: format!("the payload sent {chunks_back} chunks before, which is not kept"),
        })?;
        sent.copy_into(parts, slot)
    }
}
