//! Backends: each connects ranks by one kind of edge.
//!
//! Two ranks that have met authenticate each other first. A [`Backend`] then exchanges with the other rank what all
//! edges between the two need ([`Backend::agree`]), and makes the edges while a watchdog already watches both ranks
//! ([`Backend::connect`]). A rank does so once for each peer, in an order that is the same in the whole job. Groups
//! follow in the same two steps: [`Backend::agree_on_group`] and [`Backend::connect_group`].

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use pp_contract::{Fault, FaultKind, Generation, Rank};

use crate::bell::Bell;
use crate::edge::{Capabilities, Edges};
use crate::error::TransportError;
use crate::flight::FlightRecorder;
use crate::group::Members;
use crate::lane::shared::{self, SharedEnd};
pub use crate::shm::layout::EdgeEnd;
use crate::shm::layout::{EdgeShape, Holds, Layout};
use crate::shm::memory::available_bytes;
use crate::shm::region::Region;
use pp_meet::control::ControlSender;

/// One end of an edge between this rank and a peer.
#[derive(Debug)]
pub enum End<B: Edges + ?Sized> {
    /// This rank sends.
    Out(B::Out),
    /// This rank receives.
    In(B::In),
}

/// All edges between this rank and one peer. They end together: with the last of the ends, when one end learns that the
/// peer is gone, or by `abort`.
pub struct Connected<B: Edges + ?Sized> {
    /// The ends on this rank, with the numbers of their edges, in the order of these numbers.
    pub ends: Vec<(u32, End<B>)>,
    /// Ends all of them from another thread. Present where a driver can be stuck in a call.
    pub abort: Option<Abort>,
}

/// The other rank while the edges to it are made. Messages are read in order, and each read waits for as long as the
/// other rank lives.
pub trait Peer {
    /// Returns the rank of this process.
    fn own_rank(&self) -> Rank;

    /// Returns the rank of the other process.
    fn rank(&self) -> Rank;

    /// Tells whether the two share a host, so that descriptors can be passed.
    fn shares_host(&self) -> bool;

    /// Tells whether the payloads of the other rank lie on a device.
    fn is_on_device(&self) -> bool;

    /// Returns the sending half of the channel between the two.
    fn sender(&self) -> &ControlSender;

    /// Sends bytes of the backend. They are authenticated and secret.
    ///
    /// # Errors
    /// The other rank is lost.
    fn send(&self, body: &[u8]) -> Result<(), Fault>;

    /// Waits for the bytes that the other rank sent. A fault names `operation`.
    ///
    /// # Errors
    /// The other rank is lost, or sent something unexpected.
    fn receive(&mut self, operation: &'static str) -> Result<Vec<u8>, Fault>;

    /// Passes descriptors.
    ///
    /// # Errors
    /// The other rank is lost.
    fn send_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<(), Fault>;

    /// Waits for the descriptors that the other rank passed.
    ///
    /// # Errors
    /// The other rank is lost, or sent something unexpected.
    fn receive_fds(&mut self) -> Result<Vec<OwnedFd>, Fault>;

    /// Gives the memory that was made for the edges with this rank while it was awaited, if any was.
    fn ahead(&mut self) -> Option<Ahead> {
        None
    }
}

/// What is made ahead takes at most this share of the memory that is free.
const MOST_AHEAD: u64 = 16;

/// Memory that this rank will share with another one, made on a thread of its own while the other one is awaited.
///
/// # If dropped
/// The thread goes on, and frees the memory.
pub struct Ahead {
    len: usize,
    making: JoinHandle<Result<Region, TransportError>>,
}

impl Ahead {
    /// Begins to make what these edges need between two ranks of which one is in host memory. None if there is little memory, or no
    /// thread.
    pub fn begin(edges: &[EdgeEnd]) -> Option<Self> {
        let shapes = in_order(edges);
        let shapes = shapes.iter().map(|end| end.shape);
        let len = Layout::new(shapes, Holds::All).ok()?.len;
        // Other ranks may do the same, while some still hold what they shared before.
        let is_small = available_bytes().is_some_and(|free| len as u64 <= free / MOST_AHEAD);
        if !is_small {
            return None;
        }
        let thread = std::thread::Builder::new().name("pp-share".into());
        let making = thread.spawn(move || Region::create(shared::NAME, len));
        Some(Self {
            len,
            making: making.ok()?,
        })
    }

    /// Waits for the memory. None if it could not be made, or has another length.
    fn take(self, len: usize) -> Option<Region> {
        let made = self.making.join().ok()?.ok();
        made.filter(|_| self.len == len)
    }
}

/// The other ranks, one at a time, while a group is made.
pub trait Neighbours {
    /// Returns a rank with which this one has an edge.
    fn neighbour(&mut self, rank: Rank) -> Box<dyn Peer + '_>;
}

/// This rank's member of a group.
pub struct Joined<G> {
    /// The member, which its stage calls.
    pub group: G,
    /// Ends the group for all members, from any thread. A call that waits then returns an error.
    pub abort: Abort,
    /// Tells in which call the member waits, if the backend knows.
    pub waits: Option<Waits>,
}

/// Returns the group's call in which this member waits for another one, and that other rank. Any thread may call it.
/// Never waits.
pub type Waits = Box<dyn Fn() -> Option<(String, Rank)> + Send + Sync>;

/// Handles a header that came over the control channel from this rank. Must not block. An error is the sender's fault.
pub type OnFrame = Box<dyn FnMut(Rank, &[u8]) -> Result<(), TransportError> + Send>;

/// Ends all edges with a peer, or a group, with a reason and a deadline. Any thread may call it. Everything in flight
/// is an error from then on. It waits until they have ended, and a second call waits again. The error is
/// `TransportError::LeftBehind` if the deadline came first: then end the process soon, since kernels may still run.
/// After [`leave_ends_to_process`] it waits for nothing.
pub type Abort = Box<dyn Fn(&str, Instant) -> Result<(), TransportError> + Send + Sync>;

static ARE_ENDS_LEFT: AtomicBool = AtomicBool::new(false);

/// Says whether this process is about to end because its job has failed. Then an abort, or the drop of an edge or a group, begins the
/// end of its communicators and does not wait for it: NCCL takes half a second, and the end of the process ends them, too. The
/// process must end without the exit handlers of libraries unless [`Backend::is_at_rest`].
pub fn leave_ends_to_process(are_left: bool) {
    ARE_ENDS_LEFT.store(are_left, Ordering::Release);
}

/// Tells whether nothing waits for the end of communicators.
#[must_use]
pub fn are_ends_left_to_process() -> bool {
    ARE_ENDS_LEFT.load(Ordering::Acquire)
}

/// How the edges with a peer, or a group, are made.
#[derive(Clone, Copy)]
pub struct Connect<'a> {
    /// The generation of the job's edges.
    pub generation: Generation,
    /// The time by which the connection must be made.
    pub deadline: Instant,
    /// Tells whether the connection is still wanted. Called every few milliseconds.
    pub is_wanted: &'a dyn Fn() -> bool,
    /// Records the operations of groups.
    pub recorder: &'a FlightRecorder,
}

/// Asks a device for free and all bytes of its memory; `None` if the driver does not say. May wait for the driver.
pub type MemoryProbe = Box<dyn Fn() -> Option<[u64; 2]> + Send>;

/// Makes edges.
pub trait Backend: Edges {
    /// The values that two ranks exchanged for all edges between them.
    type Agreed;
    /// The values that the members of a group exchanged.
    type AgreedGroup;

    /// Returns the settings that two ranks on devices must have alike, by name: at least `transport`, the backend's short
    /// name. None for host memory.
    fn device_settings(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Returns the device whose memory holds the payloads, and the device that the environment named for this process,
    /// as the handshake compares them. `None` for host memory.
    fn device(&self) -> Option<(String, Option<String>)> {
        None
    }

    /// Returns the bytes of the device that are free, of all processes on it. Returns [`u64::MAX`] for host memory, or if the
    /// driver does not say: then slots are not compared with it.
    fn free_memory(&self) -> u64;

    /// Returns what asks the device, on any thread, for the bytes of its memory that are free, and for all bytes. `None` for host
    /// memory.
    fn memory_probe(&self) -> Option<MemoryProbe> {
        None
    }

    /// Describes this backend.
    fn capabilities(&self) -> Capabilities;

    /// Loads early what the connection needs, on a rank that may have to wait for its peer. A failure here happens
    /// again in [`Backend::connect`], and is reported there.
    fn load_ahead(&mut self) {}

    /// Exchanges with the other rank what the edges between the two need. Both pass the same edges, each with its own
    /// role as sender or receiver. If headers travel over the control channel, also returns the function that handles
    /// each. `bell` is the bell of this rank. It rings when a frame, a credit or a completion may be there.
    ///
    /// # Errors
    /// The other rank is lost, or these two ranks cannot be connected.
    fn agree(
        &mut self,
        peer: &mut dyn Peer,
        edges: &[EdgeEnd],
        bell: &Bell,
    ) -> Result<(Self::Agreed, Option<OnFrame>), Fault>;

    /// Makes the edges. Both ranks call it at about the same time.
    ///
    /// # Errors
    /// [`TransportError::NotInTime`] or [`TransportError::LeftBehind`] if a thread may stay inside the backend's
    /// library for good.
    fn connect(
        &mut self,
        agreed: Self::Agreed,
        how: Connect<'_>,
    ) -> Result<Connected<Self>, TransportError>;

    /// Exchanges with the other members what their group needs. The leader passes it to each of them. Every rank does
    /// so for its groups in the order of the pipeline, after the edges.
    ///
    /// # Errors
    /// A member is lost, or these members cannot be connected.
    fn agree_on_group(
        &mut self,
        members: &Members,
        neighbours: &mut dyn Neighbours,
    ) -> Result<Self::AgreedGroup, Fault>;

    /// Makes this rank's member of a group, which records its operations. All members call it at about the same time,
    /// after the edges and in the order of the pipeline.
    ///
    /// # Errors
    /// The same as for [`Backend::connect`].
    fn connect_group(
        &mut self,
        agreed: Self::AgreedGroup,
        how: Connect<'_>,
    ) -> Result<Joined<Self::Group>, TransportError>;

    /// Makes an edge between two stages of this rank. Needs no peer.
    ///
    /// # Errors
    /// The shape is not valid, or there is no memory for it.
    fn local(&mut self, shape: EdgeShape) -> Result<Self::Local, TransportError>;

    /// Tells whether the device of this process has failed, and with it that of every process there, as under NVIDIA's MPS.
    fn has_failed_for_all() -> bool {
        false
    }

    /// Tells whether no thread is inside the backend's library. The process may then run the library's exit handlers.
    fn is_at_rest() -> bool {
        true
    }
}

/// Compares lines of text with the other rank, which does the same at the same time. `about` holds the operation for a
/// fault, and a noun for what the lines describe.
///
/// # Errors
/// The other rank is lost, or a line differs. The fault then shows that line of each rank, and `remedy`.
pub fn compare(
    peer: &mut dyn Peer,
    about: (&'static str, &str),
    own: &[String],
    remedy: &str,
) -> Result<(), Fault> {
    let (operation, what) = about;
    peer.send(own.join("\n").as_bytes())?;
    let theirs = peer.receive(operation)?;
    let theirs = String::from_utf8_lossy(&theirs);
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    let theirs: Vec<&str> = theirs.lines().collect();
    if own == theirs {
        return Ok(());
    }
    let differs = |rank: Rank, lines: &[&str], others: &[&str]| {
        let line = lines.iter().find(|line| !others.contains(line));
        format!("rank {rank} has {}", line.unwrap_or(&"(not set)"))
    };
    let [mut first, mut second] = [(peer.own_rank(), &own), (peer.rank(), &theirs)];
    if second.0 < first.0 {
        // The order is normalized, so that both ranks report the same text.
        std::mem::swap(&mut first, &mut second);
    }
    let text = format!(
        "{what} differs: {}, {}; {remedy}",
        differs(first.0, first.1, second.1),
        differs(second.0, second.1, first.1)
    );
    let kind = FaultKind::HandshakeMismatch;
    Err(Fault::new(kind, peer.own_rank(), operation, text))
}

/// Tells the other rank whether this one can go on, and learns whether the other can. Both ranks get the same answer. The
/// reason against it names the rank that found it. A fault names `operation`.
///
/// # Errors
/// The other rank is lost, or sent something unexpected.
#[doc(hidden)]
pub fn exchange<T, E: std::error::Error + 'static>(
    peer: &mut dyn Peer,
    operation: &'static str,
    own: Result<T, E>,
) -> Result<Result<T, String>, Fault> {
    let rank = peer.own_rank();
    let own = own.map_err(|error| format!("rank {rank}: {}", pp_contract::with_source(&error)));
    peer.send(own.as_ref().err().map_or("", |why| why).as_bytes())?;
    let theirs = peer.receive(operation)?;
    Ok(match own {
        Ok(_) if !theirs.is_empty() => Err(String::from_utf8_lossy(&theirs).into_owned()),
        own => own,
    })
}

/// Turns an error into a fault of this rank while it makes edges.
#[doc(hidden)]
pub fn own_fault(rank: Rank) -> impl Fn(TransportError) -> Fault {
    move |error| {
        let text = pp_contract::with_source(&error);
        Fault::new(error.fault_kind(), rank, "map edges", text)
    }
}

/// Receives exactly `N` descriptors.
///
/// # Errors
/// The other rank is lost, or passed another number of descriptors.
#[doc(hidden)]
pub fn receive_fds<const N: usize>(peer: &mut dyn Peer) -> Result<[OwnedFd; N], Fault> {
    let fds = peer.receive_fds()?;
    let count = fds.len();
    fds.try_into().map_err(|_| {
        let text = format!("{count} descriptors came where {N} were due");
        let kind = FaultKind::PeerMisbehaved;
        Fault::new(kind, peer.rank(), "receive shared memory", text)
    })
}

/// Sorts these ends by the numbers of their edges, an order that is the same on both ranks.
#[doc(hidden)]
pub fn in_order(edges: &[EdgeEnd]) -> Vec<EdgeEnd> {
    let mut edges = edges.to_vec();
    edges.sort_unstable_by_key(|end| end.edge);
    edges
}

/// Makes the memory of all edges between two ranks of one host on the lower rank, maps it on both, and exchanges their
/// bells. Returns an end for each of `edges`, which are sorted.
#[doc(hidden)]
pub fn share_memory(
    peer: &mut dyn Peer,
    edges: &[EdgeEnd],
    holds: Holds,
    bell: &Bell,
) -> Result<Vec<SharedEnd>, Fault> {
    let own = own_fault(peer.own_rank());
    let shapes = edges.iter().map(|end| end.shape);
    let layout = || Layout::new(shapes, holds).map_err(&own);
    let (region, layout, peer_bell) = if peer.own_rank() < peer.rank() {
        let layout = layout()?;
        let ahead = match holds {
            Holds::All => peer.ahead(),
            Holds::Slots | Holds::Rings => None,
        };
        let region = match ahead.and_then(|ahead| ahead.take(layout.len)) {
            Some(region) => region,
            None => Region::create(shared::NAME, layout.len).map_err(&own)?,
        };
        peer.send_fds(&[region.fd(), bell.fd()])?;
        let [peer_bell] = receive_fds(peer)?;
        (region, layout, Bell::open(peer_bell).map_err(&own)?)
    } else {
        let [region, peer_bell] = receive_fds(peer)?;
        let peer_bell = Bell::open(peer_bell).map_err(&own)?;
        let layout = layout()?;
        let region = Region::open(region, layout.len).map_err(&own)?;
        peer.send_fds(&[bell.fd()])?;
        (region, layout, peer_bell)
    };
    let region = Arc::new(region);
    let end = |place| SharedEnd {
        region: Arc::clone(&region),
        place,
        peer: peer.rank(),
        peer_bell: peer_bell.clone(),
    };
    Ok(layout.edges.into_iter().map(end).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_ahead_is_as_long_as_the_edges_need() {
        let end = |edge, is_sender, slot_bytes| EdgeEnd {
            edge,
            is_sender,
            shape: EdgeShape {
                depth: 2,
                slot_bytes,
            },
        };
        let edges = [end(3, true, 5_000), end(1, false, 100_000)];
        let shapes = in_order(&edges);
        let layout = Layout::new(shapes.iter().map(|end| end.shape), Holds::All).unwrap();
        let region = Ahead::begin(&edges).unwrap().take(layout.len);
        assert!(region.unwrap().pages().1 >= layout.len);
        let other = Ahead::begin(&edges).unwrap().take(layout.len + 1);
        assert!(other.is_none(), "memory of another length was taken");
    }
}
