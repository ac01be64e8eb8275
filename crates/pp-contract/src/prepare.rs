//! Sending: prepare, where everything can fail, and commit, where nothing can.
//!
//! *Hazard.* A header that is out before its message could be serialized leaves the peer waiting
//! for the rest of something that never comes.
//! *Guarantee.* The header is a commitment: [`Prepared::commit`] is the only way to one, it cannot
//! fail, and a [`Prepared`] exists only once the body lies ready. A message that was prepared and
//! not committed has used up no number.
//!
//! A [`Composer`] reuses one buffer, with the header directly in front of the body: composing
//! allocates nothing once the buffer has grown to the size of the largest message.

use serde::Serialize;

use crate::codec;
use crate::envelope::Envelope;
use crate::header::{Action, BodyKind, HEADER_BYTES, Header, MAX_BODY_BYTES};
use crate::ids::{CacheEpoch, CallId, ChunkIndex, EdgeSeq};
use crate::outcome::{Failure, Outcome};
use crate::plan::Plan;

/// Why a message cannot be sent. Nothing of it has left, no number is used up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// The body does not fit.
    #[error("the {kind} takes up more than {MAX_BODY_BYTES} bytes; move bulk into tensors")]
    TooLarge {
        /// The kind of body.
        kind: BodyKind,
    },
    /// A part of it refuses to be serialized.
    #[error("the {kind} cannot be serialized: {reason}")]
    Unserializable {
        /// The kind of body.
        kind: BodyKind,
        /// What the serializer says.
        reason: postcard::Error,
    },
}

/// A message without a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bare {
    /// [`Action::Noop`].
    Noop,
    /// [`Action::Shutdown`].
    Shutdown,
}

/// The buffer in which frames are put together, one at a time.
#[derive(Debug)]
pub struct Composer {
    frame: Vec<u8>,
}

impl Composer {
    /// A buffer with room for a message of the usual size.
    #[must_use]
    pub fn new() -> Self {
        Self {
            frame: Vec::with_capacity(1024),
        }
    }

    /// Prepares INFER with an envelope.
    ///
    /// # Errors
    /// [`PrepareError`]: the plan is too large, or refuses to be serialized.
    pub fn prepare_envelope<P: Plan>(
        &mut self,
        envelope: &Envelope<P>,
    ) -> Result<Prepared<'_>, PrepareError> {
        let payload_bytes = envelope.inputs().payload_bytes();
        let body = envelope.to_body();
        self.prepare(Action::Infer, BodyKind::Envelope, &body, payload_bytes)
    }

    /// Prepares INFER with a result.
    ///
    /// # Errors
    /// [`PrepareError`]; an [`Outcome`] always fits, so none is known to occur.
    pub fn prepare_outcome(&mut self, outcome: &Outcome) -> Result<Prepared<'_>, PrepareError> {
        let payload_bytes = outcome.outputs.payload_bytes();
        self.prepare(Action::Infer, BodyKind::Result, outcome, payload_bytes)
    }

    /// Prepares ERROR with the reason.
    ///
    /// # Errors
    /// [`PrepareError`]; a [`Failure`] always fits, so none is known to occur.
    pub fn prepare_failure(&mut self, failure: &Failure) -> Result<Prepared<'_>, PrepareError> {
        self.prepare(Action::Error, BodyKind::Failure, failure, 0)
    }

    /// Prepares NOOP or SHUTDOWN.
    pub fn prepare_bare(&mut self, message: Bare) -> Prepared<'_> {
        let action = match message {
            Bare::Noop => Action::Noop,
            Bare::Shutdown => Action::Shutdown,
        };
        self.clear();
        Prepared {
            frame: &mut self.frame,
            action,
            kind: BodyKind::None,
            payload_bytes: 0,
        }
    }

    fn prepare(
        &mut self,
        action: Action,
        kind: BodyKind,
        body: &impl Serialize,
        payload_bytes: u64,
    ) -> Result<Prepared<'_>, PrepareError> {
        self.clear();
        codec::append(body, &mut self.frame).map_err(|reason| match reason {
            postcard::Error::SerializeBufferFull => PrepareError::TooLarge { kind },
            reason => PrepareError::Unserializable { kind, reason },
        })?;
        Ok(Prepared {
            frame: &mut self.frame,
            action,
            kind,
            payload_bytes,
        })
    }

    /// Empties the buffer but for the place of the header.
    fn clear(&mut self) {
        self.frame.clear();
        self.frame.resize(HEADER_BYTES, 0);
    }
}

impl Default for Composer {
    fn default() -> Self {
        Self::new()
    }
}

/// A message that lies ready: nothing about it can fail any more.
///
/// A composer holds one message at a time, and a message is committed once:
///
/// ```
/// use pp_contract::{Bare, CacheEpoch, ChunkIndex, Composer, Sequencer, Stamp};
/// let mut composer = Composer::new();
/// let mut sequencer = Sequencer::new();
/// let stamp = Stamp::fresh(ChunkIndex::new(0), CacheEpoch::new(0));
/// let prepared = composer.prepare_bare(Bare::Noop);
/// let committed = prepared.commit(&mut sequencer, stamp);
/// assert_eq!(committed.frame().len(), pp_contract::HEADER_BYTES);
/// ```
///
/// ```compile_fail,E0382
/// use pp_contract::{Bare, CacheEpoch, ChunkIndex, Composer, Sequencer, Stamp};
/// let mut composer = Composer::new();
/// let mut sequencer = Sequencer::new();
/// let stamp = Stamp::fresh(ChunkIndex::new(0), CacheEpoch::new(0));
/// let prepared = composer.prepare_bare(Bare::Noop);
/// let _ = prepared.commit(&mut sequencer, stamp);
/// let _ = prepared.commit(&mut sequencer, stamp); // committed twice
/// ```
///
/// ```compile_fail,E0499
/// use pp_contract::{Bare, CacheEpoch, ChunkIndex, Composer, Sequencer, Stamp};
/// let mut composer = Composer::new();
/// let mut sequencer = Sequencer::new();
/// let stamp = Stamp::fresh(ChunkIndex::new(0), CacheEpoch::new(0));
/// let committed = composer.prepare_bare(Bare::Noop).commit(&mut sequencer, stamp);
/// let _ = composer.prepare_bare(Bare::Noop); // overwrites a frame that is still to be sent
/// let _ = committed.frame();
/// ```
///
/// # If dropped
/// Nothing was sent and no number is used up.
#[derive(Debug)]
#[must_use = "a prepared message leaves only once it is committed"]
pub struct Prepared<'a> {
    frame: &'a mut [u8],
    action: Action,
    kind: BodyKind,
    payload_bytes: u64,
}

impl<'a> Prepared<'a> {
    /// Size of the payload that will have to follow; 0 for none.
    #[must_use]
    pub const fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Numbers the message and writes its header: from here on it must be sent.
    pub fn commit(self, sequencer: &mut Sequencer, stamp: Stamp) -> Committed<'a> {
        let (place, body) = self.frame.split_at_mut(HEADER_BYTES);
        let header = Header {
            action: self.action,
            kind: self.kind,
            call_id: sequencer.call(stamp.call),
            chunk_index: stamp.chunk_index,
            cache_epoch: stamp.cache_epoch,
            edge_seq: (self.payload_bytes > 0).then(|| sequencer.edge()),
            payload_bytes: self.payload_bytes,
            body_len: body.len() as u32,
            body_crc32: crc32fast::hash(body),
        };
        place.copy_from_slice(&header.encode());
        Committed {
            frame: self.frame,
            header,
        }
    }
}

/// A message that was committed to: its frame is ready to go, and has to. There is no way to one
/// but through [`Prepared`]:
///
/// ```compile_fail,E0451
/// use pp_contract::{Committed, Header};
/// fn forge<'a>(frame: &'a [u8], header: Header) -> Committed<'a> {
///     Committed { frame, header }
/// }
/// ```
#[derive(Debug)]
#[must_use = "a committed message has used up its numbers and must be sent"]
pub struct Committed<'a> {
    frame: &'a [u8],
    header: Header,
}

impl<'a> Committed<'a> {
    /// Its header.
    #[must_use]
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// Header and body, in one piece.
    #[must_use]
    pub const fn frame(&self) -> &'a [u8] {
        self.frame
    }
}

/// What the sender adds to a message when it commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// The chunk the message is about.
    pub chunk_index: ChunkIndex,
    /// The epoch it belongs to.
    pub cache_epoch: CacheEpoch,
    /// Whether it is a call of its own or the answer to one.
    pub call: CallStamp,
}

/// Whether a message is a call of its own or the answer to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallStamp {
    /// A call of its own: the sequencer numbers it. What the front sends.
    Fresh,
    /// A call of its own under this number, which may be one that was made before, to a Phase B
    /// that is gone. What a front sends that numbers its calls itself; later ones count from it.
    Numbered(CallId),
    /// The answer to this call. What Phase B sends.
    Echo(CallId),
}

impl Stamp {
    /// The stamp of a call of its own.
    #[must_use]
    pub const fn fresh(chunk_index: ChunkIndex, cache_epoch: CacheEpoch) -> Self {
        Self {
            chunk_index,
            cache_epoch,
            call: CallStamp::Fresh,
        }
    }

    /// The stamp of a call that the front numbers itself.
    #[must_use]
    pub const fn numbered(
        chunk_index: ChunkIndex,
        cache_epoch: CacheEpoch,
        call_id: CallId,
    ) -> Self {
        Self {
            chunk_index,
            cache_epoch,
            call: CallStamp::Numbered(call_id),
        }
    }

    /// The stamp of the answer to this call.
    #[must_use]
    pub const fn echo(call: &Header) -> Self {
        Self {
            chunk_index: call.chunk_index(),
            cache_epoch: call.cache_epoch(),
            call: CallStamp::Echo(call.call_id()),
        }
    }
}

/// Numbers the messages of one directed edge: calls of its own, and payloads.
///
/// Not `Clone`: two of them on one edge would give a number twice.
#[derive(Debug)]
pub struct Sequencer {
    next_call: CallId,
    next_edge: EdgeSeq,
}

impl Sequencer {
    /// A sequencer for an edge on which nothing was sent yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            next_call: CallId::new(0),
            next_edge: EdgeSeq::FIRST,
        }
    }

    // At a message per nanosecond the numbers last for 584 years. Then the last one is given
    // again, and the receiver refuses it.
    fn call(&mut self, stamp: CallStamp) -> CallId {
        match stamp {
            CallStamp::Echo(call) => call,
            CallStamp::Numbered(call) => {
                self.next_call = call.next().unwrap_or(call);
                call
            }
            CallStamp::Fresh => {
                let call = self.next_call;
                self.next_call = call.next().unwrap_or(call);
                call
            }
        }
    }

    fn edge(&mut self) -> EdgeSeq {
        let seq = self.next_edge;
        self.next_edge = seq.next().unwrap_or(seq);
        seq
    }
}

impl Default for Sequencer {
    fn default() -> Self {
        Self::new()
    }
}
