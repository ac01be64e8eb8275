//! What connects ranks: one value for each kind of edge.
//!
//! Two ranks that have met authenticate each other first; then a [`Backend`] exchanges with the other rank what all
//! edges between the two need ([`Backend::agree`]), and makes them while a watchdog already looks after both
//! ([`Backend::connect`]). A rank does that once for each peer, in an order that is the same all over the job. Groups
//! follow, in the same two steps: [`Backend::agree_on_group`] and [`Backend::connect_group`].

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
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

/// All edges between this rank and one peer. They have one life: it ends with the last of the ends, when one of them
/// hears that the peer is gone, or by `abort`.
pub struct Connected<B: Edges + ?Sized> {
    /// The ends on this rank with the numbers of their edges, in the order of those.
    pub ends: Vec<(u32, End<B>)>,
    /// What ends all of them from another thread, where a driver can be stuck in a call.
    pub abort: Option<Abort>,
}

/// The other rank, while the edges to it are made. What arrives is taken in order, and waited for as long as the other
/// rank lives.
pub trait Peer {
    /// The rank that this process has.
    fn own_rank(&self) -> Rank;

    /// The rank of the other process.
    fn rank(&self) -> Rank;

    /// Whether the two share a host, so that descriptors can be passed.
    fn shares_host(&self) -> bool;

    /// The sending half of the channel between the two.
    fn sender(&self) -> &ControlSender;

    /// Sends bytes of the backend's own; they are authenticated and secret.
    ///
    /// # Errors
    /// The other rank is lost.
    fn send(&self, body: &[u8]) -> Result<(), Fault>;

    /// The bytes that the other rank sent. `operation` is what a fault names.
    ///
    /// # Errors
    /// The other rank is lost, or sent something else.
    fn receive(&mut self, operation: &'static str) -> Result<Vec<u8>, Fault>;

    /// Passes descriptors.
    ///
    /// # Errors
    /// The other rank is lost.
    fn send_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<(), Fault>;

    /// The descriptors that the other rank passed.
    ///
    /// # Errors
    /// The other rank is lost, or sent something else.
    fn receive_fds(&mut self) -> Result<Vec<OwnedFd>, Fault>;
}

/// The other ranks, one at a time, while a group is made.
pub trait Neighbours {
    /// A rank with which this one has an edge.
    fn neighbour(&mut self, rank: Rank) -> Box<dyn Peer + '_>;
}

/// This rank's member of a group.
pub struct Joined<G> {
    /// What its stage calls.
    pub group: G,
    /// What ends the group for all members, from any thread: a call that waits is an error from then on.
    pub abort: Abort,
    /// What it waits in, where the backend knows.
    pub waits: Option<Waits>,
}

/// From any thread: the call of a group in which this member waits for another to come, and that other. Never waits.
pub type Waits = Box<dyn Fn() -> Option<(String, Rank)> + Send + Sync>;

/// What is done with a header that came over the control channel from this rank. Must not block; an error is the
/// sender's fault.
pub type OnFrame = Box<dyn FnMut(Rank, &[u8]) -> Result<(), TransportError> + Send>;

/// Ends all edges with a peer, or a group, from any thread, with the reason and a deadline: everything in flight is an
/// error from then on.
pub type Abort = Box<dyn Fn(&str, Instant) -> Result<(), TransportError> + Send + Sync>;

/// How the edges with a peer, or a group, are made.
#[derive(Clone, Copy)]
pub struct Connect<'a> {
    /// Which generation of the job's edges this is.
    pub generation: Generation,
    /// The latest time.
    pub deadline: Instant,
    /// Whether the connection is still wanted; asked every few milliseconds.
    pub is_wanted: &'a dyn Fn() -> bool,
    /// Records the operations that the backend does beside its edges.
    pub recorder: &'a FlightRecorder,
}

/// Makes edges.
pub trait Backend: Edges {
    /// What two ranks exchanged for all edges between them.
    type Agreed;
    /// What the members of a group exchanged.
    type AgreedGroup;

    /// What must be the same on all ranks, by name: at least `transport`, the backend's short name.
    fn settings(&self) -> Vec<(String, String)>;

    /// The device whose memory holds the payloads, and the device that the environment named for this process, as the
    /// handshake compares them; `None` for host memory.
    fn device(&self) -> Option<(String, Option<String>)> {
        None
    }

    /// What this backend is.
    fn capabilities(&self) -> Capabilities;

    /// Loads ahead what the connection needs, in a rank that may have to wait for its peer. What fails here fails again
    /// in [`Backend::connect`], and is told there.
    fn load_ahead(&mut self) {}

    /// Exchanges with the other rank what the edges between the two need. Both give the same edges, each with the other
    /// side as its sender. Where headers are to take the control channel, says what is done with each. `bell` is that of
    /// this rank: it rings when a frame, a credit or a completion may be there.
    ///
    /// # Errors
    /// The other rank is lost, or these two cannot be connected.
    fn agree(
        &mut self,
        peer: &mut dyn Peer,
        edges: &[EdgeEnd],
        bell: &Bell,
    ) -> Result<(Self::Agreed, Option<OnFrame>), Fault>;

    /// Makes the edges. Both ranks call it at about the same time.
    ///
    /// # Errors
    /// [`TransportError::NotInTime`] or [`TransportError::LeftBehind`] when a thread may be inside the backend's
    /// library for good.
    fn connect(
        &mut self,
        agreed: Self::Agreed,
        how: Connect<'_>,
    ) -> Result<Connected<Self>, TransportError>;

    /// Exchanges with the other members what their group needs: the leader passes it to each of them. Every rank does so
    /// for its groups in the order of the pipeline, behind the edges.
    ///
    /// # Errors
    /// A member is lost, or these cannot be connected.
    fn agree_on_group(
        &mut self,
        members: &Members,
        neighbours: &mut dyn Neighbours,
    ) -> Result<Self::AgreedGroup, Fault>;

    /// Makes this rank's member of a group, which records what it does. All members call it at about the same time, behind
    /// the edges and in the order of the pipeline.
    ///
    /// # Errors
    /// As [`Backend::connect`].
    fn connect_group(
        &mut self,
        agreed: Self::AgreedGroup,
        how: Connect<'_>,
    ) -> Result<Joined<Self::Group>, TransportError>;

    /// Makes an edge between two stages of this rank. Needs no peer.
    ///
    /// # Errors
    /// The shape cannot be, or there is no memory for it.
    fn local(&mut self, shape: EdgeShape) -> Result<Self::Local, TransportError>;

    /// Whether no thread is inside the backend's library, so that the process may run what the library registered for
    /// its exit.
    fn is_at_rest() -> bool {
        true
    }
}

/// Compares lines of text with the other rank, which does so at the same time. `about` has the operation for a fault and
/// the noun for what the lines describe.
///
/// # Errors
/// The other rank is lost, or a line differs: the fault has that line of each rank, and `remedy`.
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
        // Both say the same.
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

/// A fault of this rank while it makes edges.
#[doc(hidden)]
pub fn own_fault(rank: Rank) -> impl Fn(TransportError) -> Fault {
    move |error| {
        let text = pp_contract::with_source(&error);
        Fault::new(error.fault_kind(), rank, "map edges", text)
    }
}

/// As many descriptors as are due.
///
/// # Errors
/// The other rank is lost, or passed another number.
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

/// These ends in the order of their edges, which is the same on both ranks.
#[doc(hidden)]
pub fn in_order(edges: &[EdgeEnd]) -> Vec<EdgeEnd> {
    let mut edges = edges.to_vec();
    edges.sort_unstable_by_key(|end| end.edge);
    edges
}

/// Makes the memory of all edges between two ranks of one host, on the lower of them, maps it on both, and exchanges
/// their bells. Gives an end for each of `edges`, which are in order.
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
        let region = Region::create(shared::NAME, layout.len).map_err(&own)?;
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
