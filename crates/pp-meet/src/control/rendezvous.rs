//! How the ranks of a job find each other and rank 0 in the middle.
//!
//! Hazard: the place where ranks meet is open to everyone. Guarantee: a caller that does not prove
//! the job's secret within a short time is turned away, whatever it sends; how many may try at
//! once, and what each may make us hold, is bounded; a rank of the job is not kept from joining by
//! them.
//!
//! Choices: rank 0 listens on an abstract Unix socket (nothing in the file system, gone with the
//! process) and on TCP; the others try the first, then the second. One thread and `poll` serve all
//! callers. A rank counts as joined once a frame sealed with fresh keys has come from it, which no
//! recording can produce. When all have joined, the listeners close. Room at the door is shared
//! out by where callers come from, so a crowd makes room for others by losing its own. Who is told
//! that its secret is wrong believes it when it has heard nothing else for a while: anybody could
//! say so once. Two other ranks meet in the same way, once rank 0 has introduced them ([`introduce()`]).

mod error;
mod gather;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use gather::fuzz;
mod introduce;
mod join;
mod listen;
mod waiting;

use std::collections::BTreeMap;
use std::time::Instant;

use pp_contract::{Fault, Rank, WorldSize};

pub(super) use self::error::MEETING_RANK;
pub use self::error::{RendezvousError, TurnedAway};
pub use self::introduce::introduce;
use self::listen::Listener;
pub use self::waiting::{OnMet, RendezvousOptions, Tell};
use super::channel::ControlChannel;
use super::message::Message;
use super::secure::JobKey;
use crate::launch::Launch;
use crate::times::VERDICT_LATER;

/// Meets the other ranks of the job; returns when all have joined. Blocks until then, or until
/// the timeout. A world of one rank meets no other rank and opens nothing.
///
/// # Errors
/// [`RendezvousError`]; at rank 0 it names the ranks that are missing.
pub fn rendezvous(launch: &Launch, options: &RendezvousOptions) -> Result<Peers, RendezvousError> {
    let started = Instant::now();
    let mut peers = Peers {
        rank: launch.rank(),
        world_size: launch.world_size(),
        channels: BTreeMap::new(),
        turned_away: TurnedAway::default(),
    };
    if peers.world_size.get() == 1 {
        return Ok(peers);
    }
    let key = JobKey::derive(launch);
    if peers.rank == MEETING_RANK {
        let listeners = Listener::open_all(launch, &key)?;
        let others = peers.world_size.ranks().skip(1).collect();
        let met = gather::gather(launch, &key, listeners, others, options, started, None)?;
        (peers.channels, peers.turned_away) = (met.channels, met.turned_away);
    } else {
        let channel = join::join(launch, &key, MEETING_RANK, options, started, None)?;
        peers.channels.insert(MEETING_RANK, channel);
    }
    Ok(peers)
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
    /// The callers that rank 0 turned away while it waited for its ranks; none at any other rank.
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

    /// The channel to a peer.
    pub fn get_mut(&mut self, peer: Rank) -> Option<&mut ControlChannel> {
        self.channels.get_mut(&peer)
    }

    /// Tells all peers, as far as they are there, why this rank leaves them. Otherwise they would blame this rank.
    pub(super) fn tell(&self, fault: &Fault) {
        let soon = Instant::now() + VERDICT_LATER;
        for channel in self.iter() {
            let _ = channel.sender().send(&Message::Abort(fault.clone()), soon);
        }
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
