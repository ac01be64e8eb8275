//! A fault: why a job ended, and which rank it blames. It travels with an abort.

use core::fmt;

use serde::{Deserialize, Serialize};

use crate::bounded::Text;
use crate::codec::{self, BodyError};
use crate::ids::Rank;

wire_enum! {
    /// What kind of thing ended the job.
    pub enum FaultKind {
        /// What the user gave cannot be worked on.
        BadInput = 1 => "bad input",
        /// A kernel plugin failed or was refused.
        Plugin = 2 => "plugin",
        /// A peer is gone.
        PeerDied = 3 => "peer died",
        /// A peer broke the contract.
        PeerMisbehaved = 4 => "peer misbehaved",
        /// Something did not happen in time.
        TimedOut = 5 => "timed out",
        /// The ranks were not started alike.
        HandshakeMismatch = 6 => "handshake mismatch",
        /// Reading the source or writing the sink failed.
        Io = 7 => "i/o",
        /// The user asked for it.
        Interrupted = 8 => "interrupted",
        /// A fault of our own.
        Internal = 9 => "internal error",
        /// A GPU, its driver or NCCL failed or is not there.
        Device = 10 => "device",
        /// A digest differs: bytes are not those that were sent, or that were there before.
        Drift = 11 => "drift",
        /// The command line, or the program that was written on this library, asks for what cannot be.
        Usage = 12 => "wrong usage",
        /// A GPU under NVIDIA's MPS failed, and with it every process on it. MPS does not say which process it was, and no rank is
        /// started again.
        SharedDevice = 13 => "shared device",
    }
}

impl FaultKind {
    /// Says whether another process in the place of the one that is blamed may do better: that one died, fell silent, or its
    /// device failed. What a plugin, the input or the protocol did would happen again.
    #[must_use]
    pub fn is_worth_a_restart(self) -> bool {
        matches!(self, Self::PeerDied | Self::TimedOut | Self::Device)
    }
}

/// Why a job ended, and which rank it blames. It shows as one line: control characters in the texts show as spaces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{kind}: rank {rank}: {operation}: {detail}")]
pub struct Fault {
    /// What kind of thing it was.
    pub kind: FaultKind,
    /// The rank it blames; not always the one that noticed.
    pub rank: Rank,
    /// What the rank that noticed the fault was doing, or the step of the job, such as "run".
    pub operation: Text<64>,
    /// What went wrong, and the remedy.
    pub detail: Text<512>,
}

impl Fault {
    /// A fault; what is too long is cut.
    #[must_use]
    pub fn new(kind: FaultKind, rank: Rank, operation: &str, detail: impl fmt::Display) -> Self {
        Self {
            kind,
            rank,
            operation: Text::truncated(operation),
            detail: Text::truncated(&detail.to_string()),
        }
    }

    /// The bytes of the fault, at most [`Fault::MAX_BYTES`].
    ///
    /// # Errors
    /// [`BodyError`]; a fault always fits, so none is known to occur.
    pub fn encode(&self) -> Result<Vec<u8>, BodyError> {
        codec::encode("a fault", self)
    }

    /// Decodes a fault that takes up `bytes` entirely.
    ///
    /// # Errors
    /// [`BodyError::Malformed`], [`BodyError::Trailing`].
    pub fn decode(bytes: &[u8]) -> Result<Self, BodyError> {
        codec::decode("a fault", bytes)
    }

    /// Most bytes of an encoded fault: kind, rank, and two texts with their lengths.
    pub const MAX_BYTES: usize = 1 + 5 + (1 + 64) + (2 + 512);
}

/// An error and the chain of its causes, on one line.
#[must_use]
pub fn with_source(error: &(dyn core::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        // Some errors name their cause themselves.
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = error.source();
    }
    text
}
