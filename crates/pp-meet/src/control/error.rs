//! What can go wrong on a control channel, and whom it blames.

use std::io;
use std::time::Duration;

use pp_contract::{Fault, FaultKind, Rank};
use rustix::io::Errno;

use crate::limit::lift_limit;

/// Why a control channel did not do what was asked. Every case names the rank at the other end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The connection ended without a goodbye: the peer died, or the network took it.
    #[error("rank {rank} is gone: its control channel ended without a goodbye")]
    PeerLost {
        /// The peer.
        rank: Rank,
        /// What the socket said, if more than an end of stream.
        source: Option<io::Error>,
    },
    /// The peer said goodbye earlier; nothing more will come.
    #[error("rank {rank} has left")]
    PeerLeft {
        /// The peer.
        rank: Rank,
    },
    /// The peer did not do its part in time.
    #[error("{what} rank {rank}: not done after {after:.1?}")]
    TimedOut {
        /// What was waited for, ending in "to" or "from".
        what: &'static str,
        /// The peer.
        rank: Rank,
        /// How long the call waited.
        after: Duration,
    },
    /// The peer sent what it must not.
    #[error("rank {rank} broke the control protocol: {what}")]
    PeerMisbehaved {
        /// The peer.
        rank: Rank,
        /// What it did.
        what: String,
    },
    /// An earlier send ended in the middle of a frame, so the stream cannot be used.
    #[error("the control channel to rank {rank} was cut in the middle of an earlier message")]
    Broken {
        /// The peer.
        rank: Rank,
    },
    /// The caller asked for what this channel cannot do.
    #[error("control channel to rank {rank}: {what}")]
    ApiMisuse {
        /// The peer.
        rank: Rank,
        /// What was wrong with the call.
        what: String,
    },
    /// The socket failed in a way that blames no rank.
    #[error("control channel to rank {rank}: {source}{}", remedy(source))]
    Io {
        /// The peer.
        rank: Rank,
        /// What the socket said.
        source: io::Error,
    },
}

pub(super) fn remedy(source: &io::Error) -> String {
    let remedy = Errno::from_io_error(source).and_then(lift_limit);
    remedy.map_or_else(String::new, |remedy| format!("; {remedy}"))
}

impl ControlError {
    /// The rank at the other end.
    #[must_use]
    pub fn rank(&self) -> Rank {
        match self {
            Self::PeerLost { rank, .. }
            | Self::PeerLeft { rank }
            | Self::TimedOut { rank, .. }
            | Self::PeerMisbehaved { rank, .. }
            | Self::Broken { rank }
            | Self::ApiMisuse { rank, .. }
            | Self::Io { rank, .. } => *rank,
        }
    }

    /// The fault this is, with what was being done.
    #[must_use]
    pub fn fault(&self, operation: &str) -> Fault {
        let kind = match self {
            Self::PeerLost { .. } | Self::PeerLeft { .. } => FaultKind::PeerDied,
            Self::TimedOut { .. } => FaultKind::TimedOut,
            Self::PeerMisbehaved { .. } => FaultKind::PeerMisbehaved,
            Self::Broken { .. } | Self::Io { .. } => FaultKind::Io,
            Self::ApiMisuse { .. } => FaultKind::Internal,
        };
        Fault::new(kind, self.rank(), operation, self)
    }

    pub(crate) fn misbehaved(rank: Rank, what: impl ToString) -> Self {
        let what = what.to_string();
        Self::PeerMisbehaved { rank, what }
    }

    /// Sorts an error of the socket by who can be blamed.
    pub(crate) fn socket(rank: Rank, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::NotConnected
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::TimedOut => Self::PeerLost {
                rank,
                source: Some(error),
            },
            _ => Self::Io {
                rank,
                source: error,
            },
        }
    }
}
