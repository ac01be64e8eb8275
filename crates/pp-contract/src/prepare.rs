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

use crate::codec;
use crate::header::{Action, HEADER_BYTES, Header, MAX_BODY_BYTES, Stamp};
use crate::ids::EdgeSeq;
use crate::message::Message;
use crate::plan::Plan;

/// Why a message cannot be sent. Nothing of it has left, no number is used up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// The body does not fit.
    #[error("the message takes up more than {MAX_BODY_BYTES} bytes; move bulk into tensors")]
    TooLarge,
    /// A part of it refuses to be serialized.
    #[error("the message cannot be serialized: {reason}")]
    Unserializable {
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

    /// Prepares INFER with a message; its payload is as long as its manifest says.
    ///
    /// # Errors
    /// [`PrepareError`]: the plan is too large, or refuses to be serialized.
    pub fn prepare<P: Plan>(&mut self, message: &Message<P>) -> Result<Prepared<'_>, PrepareError> {
        self.clear();
        codec::append(&message.to_body(), &mut self.frame).map_err(|reason| match reason {
            postcard::Error::SerializeBufferFull => PrepareError::TooLarge,
            reason => PrepareError::Unserializable { reason },
        })?;
        Ok(Prepared {
            frame: &mut self.frame,
            action: Action::Infer,
            payload_bytes: message.tensors().payload_bytes(),
        })
    }

    /// Prepares INFER with a message whose payload stays where it is: for the members of a group.
    ///
    /// # Errors
    /// As [`Composer::prepare`].
    pub fn prepare_without_payload<P: Plan>(
        &mut self,
        message: &Message<P>,
    ) -> Result<Prepared<'_>, PrepareError> {
        let prepared = self.prepare(message)?;
        Ok(Prepared {
            payload_bytes: 0,
            ..prepared
        })
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
            payload_bytes: 0,
        }
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
/// use pp_contract::{Bare, CacheEpoch, CallId, ChunkIndex, Composer, Sequencer, Stamp};
/// let mut composer = Composer::new();
/// let mut sequencer = Sequencer::new();
/// let stamp = Stamp::new(ChunkIndex::new(0), CacheEpoch::new(0), CallId::new(0));
/// let prepared = composer.prepare_bare(Bare::Noop);
/// let committed = prepared.commit(&mut sequencer, stamp);
/// assert_eq!(committed.frame().len(), pp_contract::HEADER_BYTES);
/// ```
///
/// ```compile_fail,E0382
/// use pp_contract::{Bare, CacheEpoch, CallId, ChunkIndex, Composer, Sequencer, Stamp};
/// let mut composer = Composer::new();
/// let mut sequencer = Sequencer::new();
/// let stamp = Stamp::new(ChunkIndex::new(0), CacheEpoch::new(0), CallId::new(0));
/// let prepared = composer.prepare_bare(Bare::Noop);
/// let _ = prepared.commit(&mut sequencer, stamp);
/// let _ = prepared.commit(&mut sequencer, stamp); // committed twice
/// ```
///
/// ```compile_fail,E0499
/// use pp_contract::{Bare, CacheEpoch, CallId, ChunkIndex, Composer, Sequencer, Stamp};
/// let mut composer = Composer::new();
/// let mut sequencer = Sequencer::new();
/// let stamp = Stamp::new(ChunkIndex::new(0), CacheEpoch::new(0), CallId::new(0));
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
            stamp,
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

/// Numbers the payloads of one directed edge.
///
/// Not `Clone`: two of them on one edge would give a number twice.
#[derive(Debug)]
pub struct Sequencer {
    next_edge: EdgeSeq,
}

impl Sequencer {
    /// A sequencer for an edge on which nothing was sent yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            next_edge: EdgeSeq::FIRST,
        }
    }

    // At a payload per nanosecond the numbers last for 584 years. Then the last one is given
    // again, and the receiver refuses it.
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
