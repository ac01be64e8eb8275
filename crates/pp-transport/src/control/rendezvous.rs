//! How the ranks of a job find each other and rank 0 in the middle.
//!
//! Hazard: the place where ranks meet is open to everyone. Guarantee: who does not prove the
//! job's secret within a short time is turned away, whatever it sends; how many may try at once,
//! and what each may make us hold, is bounded; a rank of the job is not kept from joining by them.
//!
//! Choices: rank 0 listens on an abstract Unix socket (nothing in the file system, gone with the
//! process) and on TCP; the others try the first, then the second. One thread and `poll` serve all
//! callers. A rank counts as joined once a frame sealed with fresh keys has come from it, which no
//! recording can produce. When all have joined, the listeners close. Room at the door is shared
//! out by where callers come from, so a crowd makes room for others by losing its own. Who is told
//! that its secret is wrong believes it when it has heard nothing else for a while: anybody could
//! say so once.

mod gather;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use gather::fuzz;
mod join;
mod listen;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank, WorldSize};
use rustix::process::Pid;

use super::channel::ControlChannel;
use super::secure::JobKey;
use crate::launch::Launch;

/// The rank where all others meet.
pub(super) const MEETING_RANK: Rank = Rank::new(0);

/// How long to wait, and for how many.
#[derive(Debug, Clone)]
pub struct RendezvousOptions {
    /// Until all ranks have joined.
    pub timeout: Duration,
    /// For a caller to prove that it is of the job.
    pub stranger_timeout: Duration,
    /// Callers that have not yet done so, per kind of socket; one more drops the oldest.
    pub max_pending: usize,
    /// Told again and again while the ranks have not met: for whom this rank waits, and who was turned away.
    pub tell: Option<Tell>,
}

/// Who is told what a waiting rank waits for, and how often.
#[derive(Debug, Clone, Copy)]
pub struct Tell {
    /// Time between two lines.
    pub every: Duration,
    /// Takes a line; must not block for long, since callers wait meanwhile.
    pub take: fn(String),
}

/// Tells what a rank waits for, when it is time.
struct Waiting {
    tell: Option<Tell>,
    started: Instant,
    timeout: Duration,
    next: Option<Instant>,
}

impl Waiting {
    fn new(options: &RendezvousOptions, started: Instant) -> Self {
        Self {
            tell: options.tell,
            started,
            timeout: options.timeout,
            next: options.tell.map(|tell| started + tell.every),
        }
    }

    /// When [`Waiting::look`] has something to tell.
    fn next(&self) -> Option<Instant> {
        self.next
    }

    /// `what` is who is awaited and where, and why nobody is there yet.
    fn look(&mut self, rank: Rank, what: impl FnOnce() -> String) {
        let now = Instant::now();
        if let (Some(tell), Some(next)) = (self.tell, self.next)
            && now >= next
        {
            self.next = Some(now + tell.every);
            let (waited, of) = (now - self.started, self.timeout);
            (tell.take)(format!(
                "rank {rank} has waited {:.0} s of {:.0} s for {}",
                waited.as_secs_f64(),
                of.as_secs_f64(),
                what()
            ));
        }
    }
}

impl Default for RendezvousOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            stranger_timeout: Duration::from_secs(2),
            max_pending: 64,
            tell: None,
        }
    }
}

/// Meets the other ranks of the job; returns when all have joined. Blocks until then, or until
/// the timeout. A world of one rank meets nobody and opens nothing.
///
/// # Errors
/// [`RendezvousError`]; at rank 0 it names the ranks that are missing.
pub fn rendezvous(launch: &Launch, options: &RendezvousOptions) -> Result<Peers, RendezvousError> {
    let started = Instant::now();
    let key = JobKey::derive(launch);
    let mut turned_away = TurnedAway::default();
    let channels = if launch.world_size().get() == 1 {
        BTreeMap::new()
    } else if launch.rank() == MEETING_RANK {
        let met = gather::gather(launch, &key, options, started)?;
        turned_away = met.turned_away;
        met.channels
    } else {
        let channel = join::join(launch, &key, options, started)?;
        BTreeMap::from([(MEETING_RANK, channel)])
    };
    Ok(Peers {
        rank: launch.rank(),
        world_size: launch.world_size(),
        channels,
        turned_away,
    })
}

/// The channels of one rank, by peer.
#[derive(Debug)]
pub struct Peers {
    rank: Rank,
    world_size: WorldSize,
    channels: BTreeMap<Rank, ControlChannel>,
    turned_away: TurnedAway,
}

impl Peers {
    /// Who else came while rank 0 waited for its ranks; nobody at any other rank.
    #[must_use]
    pub fn turned_away(&self) -> &TurnedAway {
        &self.turned_away
    }

    /// This process's rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks the job has.
    #[must_use]
    pub fn world_size(&self) -> WorldSize {
        self.world_size
    }

    /// How many peers there are channels to.
    #[must_use]
    pub fn len(&self) -> usize {
        self.channels.len()
    }

    /// True in a world of one rank.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.channels.is_empty()
    }

    /// The channel to a peer.
    pub fn get_mut(&mut self, peer: Rank) -> Option<&mut ControlChannel> {
        self.channels.get_mut(&peer)
    }

    /// The channel to a peer, out of the set.
    pub fn take(&mut self, peer: Rank) -> Option<ControlChannel> {
        self.channels.remove(&peer)
    }

    /// All channels in the order of the peers' ranks.
    pub fn iter(&self) -> impl Iterator<Item = &ControlChannel> {
        self.channels.values()
    }

    /// All channels in the order of the peers' ranks.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut ControlChannel> {
        self.channels.values_mut()
    }
}

impl IntoIterator for Peers {
    type Item = ControlChannel;
    type IntoIter = std::collections::btree_map::IntoValues<Rank, ControlChannel>;
    fn into_iter(self) -> Self::IntoIter {
        self.channels.into_values()
    }
}

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
        "rank{} {} of {world_size} did not join within {after:.1?} at {listening}{turned_away}",
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
    #[error("rank {rank} joined and left again before all {world_size} ranks had joined")]
    RankLeft {
        /// Who left.
        rank: Rank,
        /// How many ranks the job has.
        world_size: WorldSize,
    },
    /// Rank 0 could not be reached (seen by another rank).
    #[error(
        "rank {rank} did not reach rank 0 at {at} within {after:.1?}: {last}; \
         start rank 0, with the same job id and secret"
    )]
    Unreachable {
        /// This rank.
        rank: Rank,
        /// Where it looked.
        at: String,
        /// How long it tried.
        after: Duration,
        /// What the last attempt met.
        last: String,
    },
    /// Rank 0 has accepted this rank, but not all have joined.
    #[error("rank {rank} joined, but not all {world_size} ranks did within {after:.1?}")]
    Incomplete {
        /// This rank.
        rank: Rank,
        /// How many ranks the job has.
        world_size: WorldSize,
        /// How long it waited.
        after: Duration,
    },
    /// Rank 0 refused this rank, and proved to be rank 0.
    #[error("rank 0 refused rank {rank}: {reason}")]
    Refused {
        /// This rank.
        rank: Rank,
        /// Rank 0's words.
        reason: String,
    },
    /// Whoever answers in rank 0's place says, again and again, that this rank's proof does not
    /// hold there.
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
    /// Rank 0 went away while this rank waited for the others.
    #[error("rank 0 left before all {world_size} ranks had joined")]
    MeetingLost {
        /// How many ranks the job has.
        world_size: WorldSize,
    },
    /// Rank 0 could not listen.
    #[error("rank 0 cannot listen at {at}: {source}; {remedy}")]
    Listen {
        /// Where.
        at: String,
        /// What the system said.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// The system failed otherwise.
    #[error("rendezvous: {source}")]
    Io {
        /// What it said.
        #[from]
        source: io::Error,
    },
}

impl RendezvousError {
    /// Whether time ran out before the ranks had met.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        match self {
            Self::MissingRanks { .. } | Self::Unreachable { .. } | Self::Incomplete { .. } => true,
            Self::RankLeft { .. }
            | Self::Refused { .. }
            | Self::WrongSecret { .. }
            | Self::MeetingLost { .. }
            | Self::Listen { .. }
            | Self::Io { .. } => false,
        }
    }

    /// The fault this is. `own` is blamed when no other rank can be.
    #[must_use]
    pub fn fault(&self, own: Rank) -> Fault {
        let (kind, rank) = match self {
            Self::MissingRanks { missing, .. } => {
                (FaultKind::TimedOut, missing.first().copied().unwrap_or(own))
            }
            Self::RankLeft { rank, .. } => (FaultKind::PeerDied, *rank),
            Self::MeetingLost { .. } => (FaultKind::PeerDied, MEETING_RANK),
            Self::Unreachable { .. } => (FaultKind::TimedOut, MEETING_RANK),
            Self::Incomplete { .. } => (FaultKind::TimedOut, own),
            Self::Refused { .. } | Self::WrongSecret { .. } => (FaultKind::HandshakeMismatch, own),
            Self::Listen { .. } | Self::Io { .. } => (FaultKind::Io, own),
        };
        Fault::new(kind, rank, "rendezvous", self)
    }
}

/// The process at the other end of a Unix socket, if it is of our user or root; `None` for any
/// other user's. This is the kernel's word: of who connected, or of who called `listen`.
fn trusted_pid(fd: impl AsFd) -> io::Result<Option<Pid>> {
    let peer = rustix::net::sockopt::socket_peercred(fd)?;
    let trusted = peer.uid.is_root() || peer.uid == rustix::process::geteuid();
    Ok(trusted.then_some(peer.pid))
}

/// Ranks as text; the first sixteen.
fn list(ranks: &[Rank]) -> String {
    const SHOWN: usize = 16;
    let mut text: Vec<String> = ranks.iter().take(SHOWN).map(Rank::to_string).collect();
    if ranks.len() > SHOWN {
        text.push(format!("and {} more", ranks.len() - SHOWN));
    }
    text.join(", ")
}
