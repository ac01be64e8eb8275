//! How two ranks that share an edge get a channel of their own: rank 0 introduces them.
//!
//! Hazard: each of the two must find the other and no stranger, and either may be gone by then.
//! Guarantee: a channel exists only between two processes that rank 0 told so over their own authenticated channels;
//! every wait ends at the deadline, or when rank 0 aborts, and the error names the rank that did not come.
//!
//! Choices: rank 0 makes a secret for each pair. The lower rank opens a door for it ([`gather`]), which is closed when
//! the higher has come, and tells rank 0 the port; the higher calls there ([`join`]). So two ranks of one host take a Unix
//! socket, wherever rank 0 is, and others TCP. Rank 0 says under which address a rank called it, and the other calls
//! there; a rank of rank 0's own host is called where rank 0 is.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Instant;

use pp_contract::{Fault, FaultKind, Rank};
use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};

use super::Peers;
use super::error::{MEETING_RANK, RendezvousError};
use super::gather::{Stop, gather};
use super::join::join;
use super::listen::Listener;
use super::waiting::RendezvousOptions;
use crate::control::channel::{ControlChannel, ControlSender};
use crate::control::error::ControlError;
use crate::control::message::Message;
use crate::control::secure::JobKey;
use crate::control::socket::poll_until;
use crate::launch::{Address, JobSecret, Launch};
use crate::random::random_bytes;
use crate::times::VERDICT_LATER;

const OPERATION: &str = "introduce";

type Secret = [u8; 32];

/// What rank 0 and an introduced rank say to each other.
#[derive(Serialize, Deserialize)]
enum Words {
    /// Open a door for this rank, which holds this secret.
    Await(Rank, Secret),
    /// The door is open; on TCP at this port.
    Open(Option<u16>),
    /// Call this rank, which holds this secret, at this port; `None` for rank 0's host.
    Call(Rank, Secret, Option<IpAddr>, Option<u16>),
    /// This rank has its channels; from rank 0: all have.
    Done,
}

fn misbehaved(rank: Rank, what: impl std::fmt::Display) -> Fault {
    Fault::new(FaultKind::PeerMisbehaved, rank, OPERATION, what)
}

fn internal(own: Rank, what: impl std::fmt::Display) -> Fault {
    Fault::new(FaultKind::Internal, own, OPERATION, what)
}

fn encoded(own: Rank, words: &Words) -> Result<Vec<u8>, Fault> {
    postcard::to_allocvec(words).map_err(|error| internal(own, error))
}

/// Says words to a rank.
fn say(peers: &mut Peers, to: Rank, words: &Words, deadline: Instant) -> Result<(), Fault> {
    let body = encoded(peers.rank, words)?;
    channel(peers, to)?.tell(&Message::Introduce(&body), OPERATION, deadline)
}

/// Gives the two ranks of each pair a channel of their own, which [`Peers::take`] has afterwards. All ranks call this
/// with the same pairs, after [`agree`](crate::control::agree). Pairs with rank 0 and pairs named twice need nothing.
///
/// # Errors
/// The fault that ended it, at each rank that can still be told: a rank is gone, or did not reach the other in time.
pub fn introduce(
    peers: &mut Peers,
    launch: &Launch,
    pairs: &[(Rank, Rank)],
    deadline: Instant,
) -> Result<(), Fault> {
    let pairs = ordered(peers, pairs)?;
    if peers.rank() == MEETING_RANK {
        return preside(peers, &pairs, deadline);
    }
    let own = peers.rank();
    let count = pairs.iter().filter(|(a, b)| *a == own || *b == own).count();
    let mut inbox = Inbox::default();
    let Err(own) = attend(peers, &mut inbox, launch, count, deadline) else {
        return Ok(());
    };
    if inbox.is_over {
        return Err(own);
    }
    let soon = Instant::now() + VERDICT_LATER;
    // Rank 0 may be gone. Otherwise it says which fault was the first, perhaps that of the rank that left this one.
    let to_rank_0 = channel(peers, MEETING_RANK)?.sender();
    let _ = to_rank_0.send(&Message::Abort(own.clone()), soon);
    loop {
        match inbox.hear(peers, MEETING_RANK, soon) {
            Ok(_) => {}
            Err(first) if inbox.is_over => return Err(first),
            Err(_) => return Err(own),
        }
    }
}

/// Each pair of two other ranks once, the lower rank first.
fn ordered(peers: &Peers, pairs: &[(Rank, Rank)]) -> Result<BTreeSet<(Rank, Rank)>, Fault> {
    let pairs = pairs.iter().map(|(a, b)| (*a.min(b), *a.max(b)));
    let pairs: BTreeSet<_> = pairs
        .filter(|(a, b)| *a != MEETING_RANK && a != b)
        .collect();
    match pairs.iter().find(|(_, b)| !peers.world_size().contains(*b)) {
        None => Ok(pairs),
        Some((_, rank)) => {
            let what = format!("rank {rank} is not of a world of {}", peers.world_size());
            Err(internal(peers.rank(), what))
        }
    }
}

/// Rank 0's part.
fn preside(
    peers: &mut Peers,
    pairs: &BTreeSet<(Rank, Rank)>,
    deadline: Instant,
) -> Result<(), Fault> {
    let mut inbox = Inbox::default();
    let mut all = || {
        for (door, caller) in pairs {
            let secret = random_bytes();
            let place = place(channel(peers, *door)?.sender());
            say(peers, *door, &Words::Await(*caller, secret), deadline)?;
            let Words::Open(port) = inbox.hear(peers, *door, deadline)? else {
                return Err(misbehaved(*door, "it was to open a door"));
            };
            let call = Words::Call(*door, secret, place, port);
            say(peers, *caller, &call, deadline)?;
        }
        let ranks: Vec<Rank> = peers.iter().map(ControlChannel::peer).collect();
        for rank in &ranks {
            // A rank that waited in vain says for whom.
            let Words::Done = inbox.hear(peers, *rank, deadline + VERDICT_LATER)? else {
                return Err(misbehaved(*rank, "it was to have its channels"));
            };
        }
        let soon = Instant::now() + VERDICT_LATER;
        let mut ranks = ranks.into_iter();
        ranks.try_for_each(|rank| say(peers, rank, &Words::Done, soon))
    };
    let result = all();
    if let Err(fault) = &result {
        peers.tell(fault);
    }
    result
}

fn channel(peers: &mut Peers, to: Rank) -> Result<&mut ControlChannel, Fault> {
    let missing = internal(peers.rank, format!("no channel to rank {to}"));
    peers.get_mut(to).ok_or(missing)
}

/// The address of a rank, unless it is of rank 0's host.
fn place(to: &ControlSender) -> Option<IpAddr> {
    let [own, peer] = to.addresses()?;
    (own != peer && !peer.is_loopback()).then_some(peer)
}

/// The part of any other rank, which is in `count` pairs.
fn attend(
    peers: &mut Peers,
    inbox: &mut Inbox,
    launch: &Launch,
    count: usize,
    deadline: Instant,
) -> Result<(), Fault> {
    let to_rank_0 = channel(peers, MEETING_RANK)?.sender().clone();
    for _ in 0..count {
        let words = inbox.hear(peers, MEETING_RANK, deadline + VERDICT_LATER)?;
        // Rank 0 says why nothing comes of it, if it knows.
        let mut stop = || inbox.listen(peers);
        let met = meet_neighbour(launch, words, &to_rank_0, deadline, &mut stop)?;
        peers.channels.insert(met.peer(), met);
    }
    say(peers, MEETING_RANK, &Words::Done, deadline)?;
    match inbox.hear(peers, MEETING_RANK, deadline + 3 * VERDICT_LATER)? {
        Words::Done => Ok(()),
        _ => Err(misbehaved(MEETING_RANK, "an introduction too many")),
    }
}

/// Meets the rank that rank 0 names in `words`. `stop` is asked every few milliseconds, but not while one call lasts
/// (5 s at most).
fn meet_neighbour(
    launch: &Launch,
    words: Words,
    to_rank_0: &ControlSender,
    deadline: Instant,
    stop: Stop<'_>,
) -> Result<ControlChannel, Fault> {
    let own = launch.rank();
    let started = Instant::now();
    let options = RendezvousOptions {
        timeout: deadline.saturating_duration_since(started),
        ..RendezvousOptions::default()
    };
    let pair = |low: Rank, high: Rank, secret: Secret, address| {
        let secret = JobSecret::new(secret).map_err(|error| misbehaved(MEETING_RANK, error))?;
        let id = format!("ranks {low} and {high} of {}", launch.job_id());
        let launch = launch.for_pair(id, secret, address);
        let key = JobKey::derive(&launch);
        Ok::<_, Fault>((launch, key))
    };
    match words {
        Words::Await(caller, secret) if caller > own => {
            let host = match to_rank_0.addresses() {
                Some([here, _]) => Some(here.to_string()),
                None => launch.address().map(|address| address.host.clone()),
            };
            let address = host.map(|host| Address { host, port: 0 });
            let (pair, key) = pair(own, caller, secret, address)?;
            let failed = |error: RendezvousError| told(error, own);
            let listeners = Listener::open_all(&pair, &key).map_err(failed)?;
            let port = listeners.iter().find_map(|listener| listener.port);
            let open = encoded(own, &Words::Open(port))?;
            let told = to_rank_0.send(&Message::Introduce(&open), deadline);
            told.map_err(|error| error.fault(OPERATION))?;
            let ranks = BTreeSet::from([caller]);
            let met = gather(&pair, &key, listeners, ranks, &options, started, Some(stop));
            let mut met = met.map_err(failed)?;
            met.channels
                .remove(&caller)
                .ok_or_else(|| misbehaved(caller, "it did not come"))
        }
        Words::Call(door, secret, host, port) if door < own => {
            let host = match host {
                Some(ip) => Some(ip.to_string()),
                None => launch.address().map(|address| address.host.clone()),
            };
            let address = host.zip(port).map(|(host, port)| Address { host, port });
            let (pair, key) = pair(door, own, secret, address)?;
            let joined = join(&pair, &key, door, &options, started, Some(stop));
            joined.map_err(|error| told(error, own))
        }
        _ => Err(misbehaved(MEETING_RANK, "an introduction out of order")),
    }
}

/// The fault of a meeting of two.
fn told(error: RendezvousError, own: Rank) -> Fault {
    const REMEDY: &str = "is that process stopped, or can their hosts not reach each other?";
    let what = match &error {
        RendezvousError::MissingRanks {
            missing,
            after,
            listening,
            turned_away,
            ..
        } => {
            let rank = missing.first().copied().unwrap_or(own);
            format!(
                "rank {rank} did not come to rank {own} within {after:.1?} at {listening}{turned_away}; {REMEDY}"
            )
        }
        RendezvousError::Unreachable {
            whom,
            at,
            after,
            last,
            ..
        } => format!(
            "rank {own} did not reach rank {whom} at {at} within {after:.1?}: {last}; {REMEDY}"
        ),
        RendezvousError::Ended(_) => return error.fault(own),
        error => error.to_string(),
    };
    let fault = error.fault(own);
    Fault::new(fault.kind, fault.rank, OPERATION, what)
}

/// Keeps the messages that come to a rank while others are introduced.
#[derive(Default)]
struct Inbox {
    /// Words that came before they were asked for, the oldest first.
    words: Vec<(Rank, Words)>,
    /// A rank has said why it ends.
    is_over: bool,
}

impl Inbox {
    /// The next words of a rank.
    fn hear(&mut self, peers: &mut Peers, rank: Rank, deadline: Instant) -> Result<Words, Fault> {
        let started = Instant::now();
        loop {
            if let Some(at) = self.words.iter().position(|(from, _)| *from == rank) {
                return Ok(self.words.remove(at).1);
            }
            let heard = peers.iter().filter(|channel| is_heard(peers.rank, channel));
            let mut fds: Vec<_> = heard.map(|c| PollFd::new(c, PollFlags::IN)).collect();
            let late = |after| ControlError::TimedOut {
                what: "waiting for an introduction with",
                rank,
                after,
            };
            match poll_until(&mut fds, deadline) {
                Ok(0) => return Err(late(started.elapsed()).fault(OPERATION)),
                Ok(_) => self.listen(peers)?,
                Err(error) => return Err(ControlError::socket(rank, error).fault(OPERATION)),
            }
        }
    }

    /// Takes in the next message of each rank that this one hears, if it is there: so one that is slow does not hide
    /// one that is gone. What comes behind the last words of an introduction is for somebody else.
    fn listen(&mut self, peers: &mut Peers) -> Result<(), Fault> {
        let own = peers.rank;
        let heard = peers.iter().filter(|channel| is_heard(own, channel));
        for rank in heard.map(ControlChannel::peer).collect::<Vec<_>>() {
            let Some(channel) = peers.get_mut(rank) else {
                continue;
            };
            let message = channel.receiver().try_recv();
            match message.map_err(|error| error.fault(OPERATION))? {
                None => {}
                Some(Message::Introduce(words)) => {
                    let unread = |e| misbehaved(rank, format!("an unreadable introduction: {e}"));
                    let words = postcard::from_bytes(words).map_err(unread)?;
                    self.words.push((rank, words));
                }
                Some(Message::Abort(fault)) => {
                    self.is_over = true;
                    // A rank that was left by another cannot know why.
                    let left = peers.get_mut(fault.rank);
                    let reason = left.and_then(|left| left.receiver().reason());
                    return Err(reason.unwrap_or(fault));
                }
                Some(other) => {
                    let what = format!("{} in place of an introduction", other.name());
                    return Err(misbehaved(rank, what));
                }
            }
        }
        Ok(())
    }
}

/// Rank 0 hears all, and each other rank hears rank 0.
fn is_heard(own: Rank, channel: &ControlChannel) -> bool {
    own == MEETING_RANK || channel.peer() == MEETING_RANK
}
