//! The handshake: what every rank tells before the first transfer, and what must agree.
//!
//! *Hazard.* A setting that steers communication and was set on one rank only, a device that two
//! ranks share, a count that differs: each hangs or corrupts much later, with no hint of the cause.
//! *Guarantee.* [`compare()`] finds any difference and names the key, both values and both ranks;
//! [`check_devices`] finds ranks on the wrong device and shows the map. The frame of a [`Hello`]
//! carries its version outside of what the version governs, so that a rank of another version is
//! told so.

mod compare;
mod devices;
mod settings;

pub use compare::{Mismatch, compare};
pub use devices::{DeviceClash, DeviceConflict, DeviceMap, check_devices};
pub use settings::{MAX_SETTINGS, Settings};

use serde::{Deserialize, Serialize};

use crate::bounded::Text;
use crate::codec::{self, BodyError};
use crate::header::{WIRE_VERSION, array};
use crate::ids::{Rank, WorldSize};
use crate::plan::Plan;

/// Size of the fixed part of an encoded [`Hello`].
pub const HELLO_HEADER_BYTES: usize = 16;
/// Most bytes of an encoded [`Hello`]; all fields at their bounds stay below it.
pub const MAX_HELLO_BYTES: usize = 64 << 10;
const MAGIC: [u8; 4] = *b"PPH1";

/// Why the bytes of a handshake are refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// Too few bytes, too many, or not as many as announced.
    #[error("a handshake of {got} bytes where {expected} were announced")]
    Length {
        /// As announced, or the bound that is broken.
        expected: usize,
        /// What arrived.
        got: usize,
    },
    /// The first bytes are not those of a handshake.
    #[error("not a handshake: it begins with {got:02x?}, not {MAGIC:02x?}")]
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
    /// Bytes that must be 0 are not.
    #[error("reserved bytes hold {got:#x}, not 0")]
    Reserved {
        /// What they hold.
        got: u16,
    },
    /// The bytes were damaged on their way.
    #[error("handshake checksum is {computed:08x}, the frame says {stated:08x}")]
    Checksum {
        /// Of the bytes as they arrived.
        computed: u32,
        /// As the sender wrote it.
        stated: u32,
    },
    /// The body does not decode, or does not encode.
    #[error("handshake body refused")]
    Body(#[from] BodyError),
    /// The rank is not one of the world.
    #[error("rank {rank} is not in a world of {world_size}; check RANK and WORLD_SIZE")]
    RankOutsideWorld {
        /// The rank.
        rank: Rank,
        /// The size of the world.
        world_size: WorldSize,
    },
}

/// The fields of a [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloParts {
    /// Digest of the name of the job.
    pub job: u64,
    /// The rank that speaks.
    pub rank: Rank,
    /// Size of the world as it sees it.
    pub world_size: WorldSize,
    /// [`Plan::NAME`].
    pub plan_name: Text<64>,
    /// [`Plan::VERSION`].
    pub plan_version: u16,
    /// The settings that all ranks must have alike.
    pub settings: Settings,
    /// Those of what carries payloads between devices. Empty for host memory.
    pub device_settings: Settings,
    /// How many chunks there will be, if that is known.
    pub chunks: Option<u64>,
    /// Identity of the host.
    pub host: Text<128>,
    /// UUID of the device it opened; `None` for host memory.
    pub device: Option<Text<64>>,
    /// UUID of the device that the launcher or the environment assigned; `None` if neither did.
    pub device_given: Option<Text<64>>,
    /// The user named this GPU for this rank, as [`DeviceName::Cuda`](crate::DeviceName::Cuda). Ranks for which one GPU was
    /// named share it.
    pub device_named: bool,
}

impl HelloParts {
    /// The name and version of plan `P`, for the two fields of that name.
    #[must_use]
    pub fn plan<P: Plan>() -> (Text<64>, u16) {
        const {
            assert!(
                P::NAME.len() <= 64,
                "the name of a plan is at most 64 bytes"
            )
        };
        (Text::truncated(P::NAME), P::VERSION)
    }
}

/// What a rank says of itself before the first transfer. Its rank is one of its world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello(HelloParts);

impl Hello {
    /// The hello made of these parts.
    ///
    /// # Errors
    /// [`HandshakeError::RankOutsideWorld`].
    pub fn new(parts: HelloParts) -> Result<Self, HandshakeError> {
        let (rank, world_size) = (parts.rank, parts.world_size);
        if !world_size.contains(rank) {
            return Err(HandshakeError::RankOutsideWorld { rank, world_size });
        }
        Ok(Self(parts))
    }

    /// Its fields.
    #[must_use]
    pub const fn parts(&self) -> &HelloParts {
        &self.0
    }

    /// The rank that speaks.
    #[must_use]
    pub const fn rank(&self) -> Rank {
        self.0.rank
    }

    /// Its frame, at most [`MAX_HELLO_BYTES`].
    ///
    /// # Errors
    /// [`HandshakeError::Body`]; a hello always fits, so none is known to occur.
    pub fn encode(&self) -> Result<Vec<u8>, HandshakeError> {
        let body = codec::encode("a hello", &self.0)?;
        let mut frame = Vec::with_capacity(HELLO_HEADER_BYTES + body.len());
        frame.extend(MAGIC);
        frame.extend(WIRE_VERSION.to_le_bytes());
        frame.extend(0u16.to_le_bytes());
        frame.extend((body.len() as u32).to_le_bytes());
        let crc = checksum(&frame, &body);
        frame.extend(crc.to_le_bytes());
        frame.extend(body);
        Ok(frame)
    }

    /// Decodes a frame that takes up `frame` entirely.
    ///
    /// # Errors
    /// [`HandshakeError`]; the version is looked at before anything that it governs.
    pub fn decode(frame: &[u8]) -> Result<Self, HandshakeError> {
        let got = frame.len();
        if got > MAX_HELLO_BYTES {
            let expected = MAX_HELLO_BYTES;
            return Err(HandshakeError::Length { expected, got });
        }
        let Some((header, body)) = frame.split_first_chunk::<HELLO_HEADER_BYTES>() else {
            let expected = HELLO_HEADER_BYTES;
            return Err(HandshakeError::Length { expected, got });
        };
        let magic = array(header, 0);
        if magic != MAGIC {
            return Err(HandshakeError::Magic { got: magic });
        }
        let theirs = u16::from_le_bytes(array(header, 4));
        if theirs != WIRE_VERSION {
            return Err(HandshakeError::Version { theirs });
        }
        let reserved = u16::from_le_bytes(array(header, 6));
        if reserved != 0 {
            return Err(HandshakeError::Reserved { got: reserved });
        }
        let announced = u32::from_le_bytes(array(header, 8)) as usize;
        if body.len() != announced {
            let expected = HELLO_HEADER_BYTES.saturating_add(announced);
            return Err(HandshakeError::Length { expected, got });
        }
        let stated = u32::from_le_bytes(array(header, 12));
        let computed = checksum(&header[..12], body);
        if stated != computed {
            return Err(HandshakeError::Checksum { computed, stated });
        }
        Self::new(codec::decode("a hello", body)?)
    }
}

/// CRC-32 of the first 12 bytes of the header and of the body.
fn checksum(header: &[u8], body: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(header);
    crc.update(body);
    crc.finalize()
}
