//! Why the ranks of a job did not meet, and who else came.

use std::fmt;
use std::io;
use std::time::Duration;

use pp_contract::{Fault, FaultKind, Rank, WorldSize};

use crate::control::error::remedy;

/// The rank where all others meet.
pub(in crate::control) const MEETING_RANK: Rank = Rank::new(0);

/// Callers that were turned away, by reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TurnedAway {
    /// Sent nothing, or not enough, in time; or left before.
    pub silent: u64,
    /// Sent something else than this protocol.
    pub garbage: u64,
    /// Do not hold the job's secret.
    pub wrong_secret: u64,
    /// What the last of them claimed to be, and where it came from.
    pub last_wrong_secret: Option<String>,
    /// Repeated what another had sent, or could not go on after the first message.
    pub replay: u64,
    /// Speak another version of the protocol.
    pub other_version: u64,
    /// Of another user of this host.
    pub other_user: u64,
    /// Dropped for newer callers.
    pub crowded_out: u64,
    /// Hold the secret and were refused; the last reason.
    pub refused: Option<String>,
}

impl fmt::Display for TurnedAway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wrong_secret = match &self.last_wrong_secret {
            Some(last) => format!("without the secret of this job (the last {last})"),
            None => "without the secret of this job".into(),
        };
        let counts = [
            (self.wrong_secret, &*wrong_secret),
            (self.other_version, "of another protocol version"),
            (self.replay, "with a repeated or broken handshake"),
            (self.garbage, "with garbage"),
            (self.silent, "that said too little"),
            (self.other_user, "of another user"),
            (self.crowded_out, "for want of room"),
        ];
        let mut separator = "; turned away: ";
        for (count, who) in counts.iter().filter(|(count, _)| *count > 0) {
            let calls = if *count == 1 { "call" } else { "calls" };
            write!(f, "{separator}{count} {calls} {who}")?;
            separator = ", ";
        }
        match &self.refused {
            Some(reason) => write!(f, "{separator}{reason}"),
            None => Ok(()),
        }
    }
}

/// Why the ranks of a job did not meet.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// Some ranks never came (seen by rank 0).
    #[error(
        "rank{} {} of {world_size} did not join within {after:.1?} at {listening}{turned_away}; \
         start every rank, with the same job id and secret, or raise PP_MEET_WITHIN_MS (in a restart PP_RESTART_WITHIN_MS)",
        if missing.len() == 1 { "" } else { "s" },
        list(missing)
    )]
    MissingRanks {
        /// Who did not come.
        missing: Vec<Rank>,
        /// How many ranks the job has.
        world_size: WorldSize,
        /// How long rank 0 waited.
        after: Duration,
        /// Where it listened.
        listening: String,
        /// Who came and was not of the job.
        turned_away: Box<TurnedAway>,
    },
    /// A rank joined and was gone before the others had.
    #[error(
        "rank {rank} joined and left again before all {world_size} ranks had joined; look at the messages of rank {rank}"
    )]
    RankLeft {
        /// Who left.
        rank: Rank,
        /// How many ranks the job has.
        world_size: WorldSize,
    },
    /// The rank to meet could not be reached (seen by another rank).
    #[error(
        "rank {rank} did not reach rank {whom} at {at} within {after:.1?}: {last}; \
         start rank {whom}, with the same job id and secret"
    )]
    Unreachable {
        /// This rank.
        rank: Rank,
        /// The rank that it looked for.
        whom: Rank,
        /// Where it looked.
        at: String,
        /// How long it tried.
        after: Duration,
        /// What the last attempt met.
        last: String,
    },
    /// Rank 0 has accepted this rank, but not all have joined.
    #[error(
        "rank {rank} joined, but not all {world_size} ranks did within {after:.1?}; start every rank, with the same \
         job id and secret, or raise PP_MEET_WITHIN_MS (in a restart PP_RESTART_WITHIN_MS)"
    )]
    Incomplete {
        /// This rank.
        rank: Rank,
        /// How many ranks the job has.
        world_size: WorldSize,
        /// How long it waited.
        after: Duration,
    },
    /// The rank to meet refused this rank, and proved to be that rank.
    #[error("rank {whom} refused rank {rank}: {reason}")]
    Refused {
        /// This rank.
        rank: Rank,
        /// The rank that refused it.
        whom: Rank,
        /// Its words.
        reason: String,
    },
    /// The program that answers in rank 0's place says, again and again, that this rank's proof
    /// does not hold there.
    #[error(
        "rank {rank} was turned away at {at} for {after:.1?}: it does not hold the secret of the job \
         there; give every rank the same PP_JOB_SECRET or PP_JOB_SECRET_FILE, and the same PP_JOB_ID"
    )]
    WrongSecret {
        /// This rank.
        rank: Rank,
        /// Where it called.
        at: String,
        /// For how long it was told so.
        after: Duration,
    },
    /// The rank to meet went away while this rank waited for the others.
    #[error(
        "rank {whom} left before all {world_size} ranks had joined; look at the messages of rank {whom}"
    )]
    MeetingLost {
        /// The rank that went away.
        whom: Rank,
        /// How many ranks the job has.
        world_size: WorldSize,
    },
    /// A rank could not listen.
    #[error("rank {rank} cannot listen at {at}: {source}; {remedy}")]
    Listen {
        /// This rank.
        rank: Rank,
        /// Where.
        at: String,
        /// What the system said.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// A rank has ended the meeting, and said why: a rank that takes no part, or the rank to meet.
    #[error(transparent)]
    Ended(#[from] Fault),
    /// The system failed otherwise.
    #[error("rendezvous: {source}{}", remedy(source))]
    Io {
        /// What it said.
        #[from]
        source: io::Error,
    },
}

impl RendezvousError {
    /// Says whether another rank did not come in time, as far as this rank can tell.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        let is_late = matches!(
            self,
            Self::MissingRanks { .. } | Self::Unreachable { .. } | Self::Incomplete { .. }
        );
        is_late || self.is_dismissal()
    }

    /// Says whether rank 0 had let this rank join, and waited for another in vain.
    #[must_use]
    pub fn is_dismissal(&self) -> bool {
        matches!(self, Self::Ended(fault) if fault.kind == FaultKind::TimedOut)
    }

    /// The fault this is. `own` is blamed when no other rank can be.
    #[must_use]
    pub fn fault(&self, own: Rank) -> Fault {
        let (kind, rank) = match self {
            Self::MissingRanks { missing, .. } => {
                (FaultKind::TimedOut, missing.first().copied().unwrap_or(own))
            }
            Self::RankLeft { rank, .. } => (FaultKind::PeerDied, *rank),
            Self::MeetingLost { whom, .. } => (FaultKind::PeerDied, *whom),
            Self::Unreachable { whom, .. } => (FaultKind::TimedOut, *whom),
            Self::Ended(fault) => return fault.clone(),
            Self::Incomplete { .. } => (FaultKind::TimedOut, own),
            Self::Refused { .. } | Self::WrongSecret { .. } => (FaultKind::HandshakeMismatch, own),
            Self::Listen { .. } | Self::Io { .. } => (FaultKind::Io, own),
        };
        Fault::new(kind, rank, "rendezvous", self)
    }
}

/// Ranks as text; the first sixteen.
pub(super) fn list(ranks: &[Rank]) -> String {
    const SHOWN: usize = 16;
    let mut text: Vec<String> = ranks.iter().take(SHOWN).map(Rank::to_string).collect();
    if ranks.len() > SHOWN {
        text.push(format!("and {} more", ranks.len() - SHOWN));
    }
    text.join(", ")
}
