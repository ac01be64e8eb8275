//! The header: 64 bytes, little endian, first, always received whole.
//!
//! *Hazard.* A header is believed before anything else is known; a wrong one makes the receiver
//! allocate, wait or transfer the wrong amount.
//! *Guarantee.* Decoding checks magic, version, checksum, every bound and every combination; a
//! [`Header`] that exists makes sense. Only [`Prepared::commit`](crate::Prepared::commit) makes one
//! to send.

use core::fmt;

use crate::codes::UnknownCode;
use crate::ids::{CacheEpoch, CallId, ChunkIndex, EdgeSeq};
use crate::manifest::MAX_PAYLOAD_BYTES;

/// Version of the header, the bodies and the handshake. Raised by any change of any byte.
///
/// Both ends speak the same version: all ranks of a job are one binary, so a rank of another version is a mistake in the
/// deployment. The handshake names both versions.
pub const WIRE_VERSION: u16 = 8;
/// Size of a header.
pub const HEADER_BYTES: usize = 64;
/// Most bytes of a body.
pub const MAX_BODY_BYTES: usize = 64 << 10;
/// Most bytes of a frame: a header and its body.
pub const MAX_FRAME_BYTES: usize = HEADER_BYTES + MAX_BODY_BYTES;
/// The first four bytes of a frame.
pub const MAGIC: [u8; 4] = *b"PPW1";

wire_enum! {
    /// What a message asks for.
    pub enum Action {
        /// Nothing; shows that the sender lives.
        Noop = 0 => "NOOP",
        /// A chunk: a stage hands it to the next one, or the sink says that it took it. Its body is a
        /// [`Message`](crate::Message). The only action with a body, and with a payload.
        Infer = 1 => "INFER",
        /// The sender will send nothing more. Terminal.
        Shutdown = 2 => "SHUTDOWN",
    }
}

impl Action {
    /// Says whether nothing may follow it.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Shutdown)
    }
}

/// Why a header is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The first bytes are not [`MAGIC`].
    #[error("not a frame: it begins with {got:02x?}, not {MAGIC:02x?}")]
    Magic {
        /// The first four bytes.
        got: [u8; 4],
    },
    /// The peer speaks another version.
    #[error("wire version {theirs} is not {WIRE_VERSION}; run the same build on every rank")]
    Version {
        /// The version of the peer.
        theirs: u16,
    },
    /// The header was damaged on its way.
    #[error("header checksum is {computed:08x}, the header says {stated:08x}")]
    Checksum {
        /// Of the bytes as they arrived.
        computed: u32,
        /// As the sender wrote it.
        stated: u32,
    },
    /// An action that does not exist.
    #[error(transparent)]
    Code(#[from] UnknownCode),
    /// A byte that must be 0 is not.
    #[error("the reserved byte holds {got:#x}, not 0")]
    Reserved {
        /// What it holds.
        got: u8,
    },
    /// An action with a body that it cannot have, or without the one it needs.
    #[error("{action} cannot go with a body of {bytes} bytes")]
    Body {
        /// The action.
        action: Action,
        /// The length of its body.
        bytes: u32,
    },
    /// A body over [`MAX_BODY_BYTES`].
    #[error("a body of {bytes} bytes is over the bound of {MAX_BODY_BYTES}")]
    BodyTooLarge {
        /// The length announced.
        bytes: u32,
    },
    /// A payload over [`MAX_PAYLOAD_BYTES`].
    #[error("a payload of {bytes} bytes is over the bound of {MAX_PAYLOAD_BYTES}")]
    PayloadTooLarge {
        /// The length announced.
        bytes: u64,
    },
    /// A payload with an action other than INFER.
    #[error("{action} cannot have a payload, this one announces {bytes} bytes")]
    PayloadNotAllowed {
        /// The action.
        action: Action,
        /// The length announced.
        bytes: u64,
    },
    /// A payload without a sequence number, or the other way round.
    #[error("a payload of {bytes} bytes does not go with edge sequence {edge_seq}")]
    EdgeSeq {
        /// The length announced.
        bytes: u64,
        /// The sequence number; `u64::MAX` says that there is no payload.
        edge_seq: u64,
    },
}

/// What the sender adds to a message when it commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// The chunk the message is about.
    pub chunk_index: ChunkIndex,
    /// The epoch it belongs to.
    pub cache_epoch: CacheEpoch,
    /// The number of the call.
    pub call_id: CallId,
    /// The attempt that it belongs to.
    pub attempt: u16,
    /// The lap of its ring in which the receiving stage works on it, from 0; 0 for a stage outside of a ring.
    pub lap: u16,
}

impl Stamp {
    /// The stamp of the first attempt, for a stage outside of a ring or its first lap.
    #[must_use]
    pub const fn new(chunk_index: ChunkIndex, cache_epoch: CacheEpoch, call_id: CallId) -> Self {
        Self {
            chunk_index,
            cache_epoch,
            call_id,
            attempt: 0,
            lap: 0,
        }
    }

    /// The stamp of a message that goes on with this one, in the same lap.
    #[must_use]
    pub const fn of(header: &Header) -> Self {
        header.stamp
    }
}

/// The fixed part of a frame: what the message is, which chunk it is about, how much follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub(crate) action: Action,
    pub(crate) stamp: Stamp,
    pub(crate) edge_seq: Option<EdgeSeq>,
    pub(crate) payload_bytes: u64,
    pub(crate) body_len: u32,
    pub(crate) body_crc32: u32,
}

impl Header {
    /// Decodes a header.
    ///
    /// # Errors
    /// [`HeaderError`]; the version is looked at before the checksum, so that a peer of another
    /// version is named as such.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, HeaderError> {
        let got = array(bytes, 0);
        if got != MAGIC {
            return Err(HeaderError::Magic { got });
        }
        let theirs = u16::from_le_bytes(array(bytes, 4));
        if theirs != WIRE_VERSION {
            return Err(HeaderError::Version { theirs });
        }
        let stated = u32::from_le_bytes(array(bytes, 60));
        let computed = crc32fast::hash(&bytes[..60]);
        if stated != computed {
            return Err(HeaderError::Checksum { computed, stated });
        }
        if bytes[7] != 0 {
            return Err(HeaderError::Reserved { got: bytes[7] });
        }
        let payload_bytes = u64::from_le_bytes(array(bytes, 40));
        let edge_seq = u64::from_le_bytes(array(bytes, 32));
        let header = Self {
            action: Action::try_from(bytes[6])?,
            stamp: Stamp {
                call_id: CallId::new(u64::from_le_bytes(array(bytes, 8))),
                chunk_index: ChunkIndex::new(u64::from_le_bytes(array(bytes, 16))),
                cache_epoch: CacheEpoch::new(u64::from_le_bytes(array(bytes, 24))),
                attempt: u16::from_le_bytes(array(bytes, 56)),
                lap: u16::from_le_bytes(array(bytes, 58)),
            },
            edge_seq: EdgeSeq::new(edge_seq).ok(),
            payload_bytes,
            body_len: u32::from_le_bytes(array(bytes, 48)),
            body_crc32: u32::from_le_bytes(array(bytes, 52)),
        };
        header.check(edge_seq)?;
        Ok(header)
    }

    fn check(&self, edge_seq: u64) -> Result<(), HeaderError> {
        let (action, bytes) = (self.action, self.body_len);
        if bytes as usize > MAX_BODY_BYTES {
            return Err(HeaderError::BodyTooLarge { bytes });
        }
        let body_makes_sense = match action {
            Action::Noop | Action::Shutdown => bytes == 0 && self.body_crc32 == 0,
            Action::Infer => bytes > 0,
        };
        if !body_makes_sense {
            return Err(HeaderError::Body { action, bytes });
        }
        let bytes = self.payload_bytes;
        if bytes > MAX_PAYLOAD_BYTES {
            return Err(HeaderError::PayloadTooLarge { bytes });
        }
        if bytes > 0 && action != Action::Infer {
            return Err(HeaderError::PayloadNotAllowed { action, bytes });
        }
        if (bytes > 0) != self.edge_seq.is_some() {
            return Err(HeaderError::EdgeSeq { bytes, edge_seq });
        }
        Ok(())
    }

    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let edge_seq = self.edge_seq.map_or(u64::MAX, EdgeSeq::get);
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&WIRE_VERSION.to_le_bytes());
        bytes[6] = self.action.code();
        bytes[8..16].copy_from_slice(&self.stamp.call_id.get().to_le_bytes());
        bytes[16..24].copy_from_slice(&self.stamp.chunk_index.get().to_le_bytes());
        bytes[24..32].copy_from_slice(&self.stamp.cache_epoch.get().to_le_bytes());
        bytes[32..40].copy_from_slice(&edge_seq.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[52..56].copy_from_slice(&self.body_crc32.to_le_bytes());
        bytes[56..58].copy_from_slice(&self.stamp.attempt.to_le_bytes());
        bytes[58..60].copy_from_slice(&self.stamp.lap.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// What the message asks for.
    #[must_use]
    pub const fn action(&self) -> Action {
        self.action
    }

    /// Number of the call: the source numbers them, and every stage hands the number on.
    #[must_use]
    pub const fn call_id(&self) -> CallId {
        self.stamp.call_id
    }

    /// The chunk it is about.
    #[must_use]
    pub const fn chunk_index(&self) -> ChunkIndex {
        self.stamp.chunk_index
    }

    /// The epoch it belongs to.
    #[must_use]
    pub const fn cache_epoch(&self) -> CacheEpoch {
        self.stamp.cache_epoch
    }

    /// Number of its payload on the edge; `None` when it has no payload.
    #[must_use]
    pub const fn edge_seq(&self) -> Option<EdgeSeq> {
        self.edge_seq
    }

    /// How often a rank of the job had been replaced when the source sent the chunk. What is older than the newest
    /// attempt is received and dropped.
    #[must_use]
    pub const fn attempt(&self) -> u16 {
        self.stamp.attempt
    }

    /// The lap of its ring in which the receiving stage works on the chunk, from 0; 0 for a stage outside of a ring.
    #[must_use]
    pub const fn lap(&self) -> u16 {
        self.stamp.lap
    }

    /// Size of its payload; 0 means that there is none and nothing is transferred.
    #[must_use]
    pub const fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Length of the body that follows, at most [`MAX_BODY_BYTES`].
    #[must_use]
    pub const fn body_bytes(&self) -> usize {
        self.body_len as usize
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} call_id={} chunk_index={} cache_epoch={} payload_bytes={}",
            self.action,
            self.call_id(),
            self.chunk_index(),
            self.cache_epoch(),
            self.payload_bytes
        )
    }
}

/// The `N` bytes from `at`, which lie within a header at every call.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}
