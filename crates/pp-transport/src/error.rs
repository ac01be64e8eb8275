//! What can go wrong between two ranks, sorted by who can mend it.

use pp_contract::Rank;
use rustix::io::Errno;

/// An error of the data path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The kernel would not give shared memory.
    #[error("{what}; lower --depth or --frames-per-chunk, or free memory")]
    Shared {
        /// What was wanted, with its size.
        what: String,
        /// The kernel's reason.
        source: Errno,
    },
    /// More shared memory than there is memory.
    #[error(
        "{wanted} bytes of shared memory do not fit the {available} bytes of memory that are \
         available; lower --depth, --frames-per-chunk or --bytes, or free memory"
    )]
    NoMemory {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes there are.
        available: u64,
    },
    /// A peer passed a descriptor that is not the region that was agreed.
    #[error("the shared region of a peer is refused: {why}")]
    BadRegion {
        /// What is wrong with it.
        why: String,
    },
    /// The shape asked for an edge cannot be laid out.
    #[error(
        "an edge of {depth} slots of {slot_bytes} bytes cannot be made: the depth must be 1 to \
         {max_depth} and the whole must fit the address space"
    )]
    BadShape {
        /// Slots asked for.
        depth: u32,
        /// Bytes asked for in each.
        slot_bytes: u64,
        /// The most slots an edge has.
        max_depth: u32,
    },
    /// The payload does not fit the slot, or does not go with the message.
    #[error("a payload of {payload_bytes} bytes does not go with {with}")]
    PayloadMismatch {
        /// Bytes that the manifest names.
        payload_bytes: u64,
        /// What the caller handed over for it.
        with: String,
    },
    /// The lane to the peer is full: a normal answer, try again later.
    #[error("the lane to rank {peer} is full")]
    Backpressure {
        /// The rank that has to read first.
        peer: Rank,
    },
    /// The lane to a rank on another host cannot be used any more.
    #[error("the lane to rank {peer} is broken: {why}")]
    Lane {
        /// The rank at its other end.
        peer: Rank,
        /// What happened.
        why: String,
    },
    /// The peer broke the rules of the shared region.
    #[error("rank {rank} misbehaved: {why}")]
    PeerMisbehaved {
        /// The rank at fault.
        rank: Rank,
        /// Which rule, with the numbers.
        why: String,
    },
}

impl TransportError {
    /// True when the caller should try again after a ring of the bell, and nothing is broken.
    pub fn is_backpressure(&self) -> bool {
        matches!(self, Self::Backpressure { .. })
    }
}
