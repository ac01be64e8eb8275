//! Errors between two ranks, sorted by who can fix them.

use std::time::Duration;

use nccl_sys::{LoadError, NcclError};
use pp_contract::{FaultKind, Rank};
use rustix::io::Errno;

use pp_device::CudaError;
pub use pp_meet::lift_limit;

/// An error of the data path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The kernel refused shared memory.
    #[error("{what}; {}", of_shared_memory(*source))]
    Shared {
        /// What was wanted, with its size.
        what: String,
        /// The kernel's reason.
        source: Errno,
    },
    /// The requested shared memory exceeds the available memory.
    #[error(
        "{wanted} bytes of shared memory do not fit the {available} bytes of memory that are \
         available; lower --depth, --frames-per-chunk or --bytes, or free memory"
    )]
    NoMemory {
        /// Bytes that were requested.
        wanted: u64,
        /// Bytes that are available.
        available: u64,
    },
    /// A peer passed a descriptor of another region than the agreed one.
    #[error("the shared region of a peer is refused: {why}")]
    BadRegion {
        /// What is wrong with it.
        why: String,
    },
    /// A lane was made for another edge.
    #[error("a lane of {lane} slots does not go with an edge of {edge}")]
    OtherDepth {
        /// Slots of the lane.
        lane: u32,
        /// Slots of the edge.
        edge: u32,
    },
    /// The requested shape of an edge is not valid.
    #[error(
        "an edge of {depth} slots of {slot_bytes} bytes cannot be made: the depth must be 1 to \
         {max_slots} and the whole must fit the address space"
    )]
    BadShape {
        /// Number of slots that was requested.
        depth: u32,
        /// Size of each slot that was requested, in bytes.
        slot_bytes: u64,
        /// The most slots an edge has.
        max_slots: u32,
    },
    /// The tensors of a message are larger than its slot.
    #[error(
        "a payload of {payload_bytes} bytes does not fit a slot of {slot_bytes} bytes; make the slots of this edge larger, or \
         the payload smaller"
    )]
    TooLarge {
        /// Bytes that the manifest names.
        payload_bytes: u64,
        /// Bytes of the slot.
        slot_bytes: usize,
    },
    /// The payload does not match the message.
    #[error("a payload of {payload_bytes} bytes does not go with {with}")]
    PayloadMismatch {
        /// Bytes that the manifest names.
        payload_bytes: u64,
        /// What the caller passed as the payload.
        with: String,
    },
    /// The lane to the peer is full. This is a normal answer: try again later.
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
    /// The device or its driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Work was issued on a slot, but the event behind it was not recorded.
    #[error(
        "work on a slot was issued without an event behind it, so it is not known when it ends; \
         the slot is out of use"
    )]
    Unrecorded,
    /// Work was to be issued on a slot that already moves.
    #[error("the slot was sent ahead, so nothing may be written into it; write it whole before")]
    SentAhead,
    /// No usable NCCL was found.
    #[error(transparent)]
    NoNccl(#[from] LoadError),
    /// A backend without NCCL was to connect to a peer.
    #[error(
        "this rank's backend has no NCCL, so its device cannot exchange payloads with another rank; \
         make it with NcclBackend::new"
    )]
    Alone,
    /// A call into NCCL failed.
    #[error("{doing}: {source}")]
    Nccl {
        /// What was being done, for or with which rank.
        doing: String,
        /// What NCCL said.
        source: NcclError,
    },
    /// Another issuer of this process holds the device.
    #[error(
        "device {ordinal} has an issuer in this process already; use Issuer::share, on its thread, \
         or another device"
    )]
    DeviceTaken {
        /// The device.
        ordinal: u32,
    },
    /// Another thread issues for the device.
    #[error(
        "the communicators of device {ordinal} belong to another thread, or one is being made or \
         ended; issue from one thread, and nothing meanwhile"
    )]
    WrongThread {
        /// The device.
        ordinal: u32,
    },
    /// A rank, a buffer or a count does not belong to this group.
    #[error("group {group}: {why}")]
    WrongGroup {
        /// The group of the operation.
        group: String,
        /// What does not belong.
        why: String,
    },
    /// The peer, or the path to it, did not do its part in time.
    #[error(
        "{what}: `{step}` was not done after {after:.1?}, and the thread that waits is left \
         behind; see whether every rank was started, with the same settings, and can reach the \
         others"
    )]
    NotInTime {
        /// What was being made, and with whom.
        what: String,
        /// How far it came.
        step: &'static str,
        /// How long the caller waited.
        after: Duration,
    },
    /// A bounded end did not finish within its bound.
    #[error("{what}: `{step}` did not return within {after:.1?}; its thread is left behind")]
    LeftBehind {
        /// What was being ended.
        what: String,
        /// How far it came.
        step: &'static str,
        /// How long the caller waited.
        after: Duration,
    },
    /// The communicators were given up, so nothing that they moved can be trusted.
    #[error("{what} was aborted: {why}")]
    Aborted {
        /// What was given up.
        what: String,
        /// Why.
        why: String,
    },
    /// The peer broke the rules of the shared region.
    #[error("rank {rank} misbehaved: {why}")]
    PeerMisbehaved {
        /// The rank at fault.
        rank: Rank,
        /// The rule that was broken, with the numbers.
        why: String,
    },
}

pub(crate) fn misbehaved(rank: Rank, why: String) -> TransportError {
    TransportError::PeerMisbehaved { rank, why }
}

impl TransportError {
    /// Tells whether the caller should try again after a ring of the bell. Nothing is broken then.
    pub fn is_backpressure(&self) -> bool {
        matches!(self, Self::Backpressure { .. })
    }

    /// Returns the kind of the fault that ends a job for this error.
    pub fn fault_kind(&self) -> FaultKind {
        match self {
            Self::NoMemory { .. } | Self::BadShape { .. } => FaultKind::BadInput,
            Self::TooLarge { .. } => FaultKind::Usage,
            Self::Shared { .. } => FaultKind::Io,
            Self::Cuda(_) | Self::Unrecorded | Self::NoNccl(_) | Self::Nccl { .. } => {
                FaultKind::Device
            }
            Self::PeerMisbehaved { .. } | Self::BadRegion { .. } => FaultKind::PeerMisbehaved,
            Self::NotInTime { .. } | Self::LeftBehind { .. } => FaultKind::TimedOut,
            Self::Lane { .. } => FaultKind::PeerDied,
            _ => FaultKind::Internal,
        }
    }
}

fn of_shared_memory(error: Errno) -> &'static str {
    let remedy = lift_limit(error).filter(|_| error != Errno::NOMEM);
    remedy.unwrap_or("lower --depth or --frames-per-chunk, or free memory")
}
