//! What connects two ranks: one value for each kind of edge.
//!
//! Two ranks that have met authenticate each other first; then a [`Backend`] exchanges with the other rank what its
//! edges need ([`Backend::agree`]), and makes the link while a watchdog already looks after both
//! ([`Backend::connect`]).

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use pp_contract::{Fault, Generation, Rank};

use crate::bell::Bell;
use crate::control::ControlSender;
use crate::error::TransportError;
use crate::flight::FlightRecorder;
use crate::host::layout::{EdgeShape, Layout};
use crate::host::region::Region;
use crate::host::shared::{self, SharedEnd};
use crate::link::Link;

/// The edges between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edges {
    /// From the lower rank to the higher.
    pub up: EdgeShape,
    /// From the higher rank to the lower.
    pub down: EdgeShape,
}

impl Edges {
    /// Edges of the same depth, with slots of so many bytes up and down.
    #[must_use]
    pub fn new(depth: u32, up: u64, down: u64) -> Self {
        let edge = |slot_bytes| EdgeShape { depth, slot_bytes };
        Self {
            up: edge(up),
            down: edge(down),
        }
    }
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

/// What is done with a header that came over the control channel from this rank. Must not block; an error is the
/// sender's fault.
pub type OnFrame = Box<dyn FnMut(Rank, &[u8]) -> Result<(), TransportError> + Send>;

/// Ends a link from any thread, with the reason and a deadline: everything in flight is an error from then on.
pub type Abort = Box<dyn Fn(&str, Instant) -> Result<(), TransportError> + Send + Sync>;

/// How a link is made.
#[derive(Clone, Copy)]
pub struct Connect<'a> {
    /// Which link between the two ranks this is.
    pub generation: Generation,
    /// The latest time.
    pub deadline: Instant,
    /// Whether the connection is still wanted; asked every few milliseconds.
    pub is_wanted: &'a dyn Fn() -> bool,
    /// Records the operations that the backend does beside the link.
    pub recorder: &'a FlightRecorder,
}

/// Makes links between two ranks.
pub trait Backend {
    /// Both edges between two ranks.
    type Link: Link;
    /// What the two ranks exchanged.
    type Agreed;

    /// What must be the same on both ranks, by name: at least `transport`, the backend's short name.
    fn settings(&self) -> Vec<(String, String)>;

    /// The device whose memory holds the payloads, and the device that the environment named for this process, as the
    /// handshake compares them; `None` for host memory.
    fn device(&self) -> Option<(String, Option<String>)> {
        None
    }

    /// Loads ahead what the connection needs, in a rank that may have to wait for its peer. What fails here fails again
    /// in [`Backend::connect`], and is told there.
    fn load_ahead(&mut self) {}

    /// Exchanges with the other rank what the edges need. Where headers are to take the control channel, says what is
    /// done with each.
    ///
    /// # Errors
    /// The other rank is lost, or these two cannot be connected.
    fn agree(
        &mut self,
        peer: &mut dyn Peer,
        edges: Edges,
        bell: &Bell,
    ) -> Result<(Self::Agreed, Option<OnFrame>), Fault>;

    /// Makes the link. Both ranks call it at about the same time.
    ///
    /// # Errors
    /// [`TransportError::NotInTime`] or [`TransportError::LeftBehind`] when a thread may be inside the backend's
    /// library for good.
    fn connect(
        &mut self,
        agreed: Self::Agreed,
        how: Connect<'_>,
    ) -> Result<Self::Link, TransportError>;

    /// What ends the link from another thread, where a driver can be stuck in a call of it.
    fn abort(&self, _link: &Self::Link) -> Option<Abort> {
        None
    }

    /// Whether no thread is inside the backend's library, so that the process may run what the library registered for
    /// its exit.
    fn is_at_rest() -> bool {
        true
    }
}

/// A fault of this rank while it makes edges.
pub(crate) fn own_fault(rank: Rank) -> impl Fn(TransportError) -> Fault {
    move |error| {
        let text = pp_contract::with_source(&error);
        Fault::new(error.fault_kind(), rank, "map edges", text)
    }
}

/// As many descriptors as are due.
///
/// # Errors
/// The other rank is lost, or passed another number.
fn receive_fds<const N: usize>(peer: &mut dyn Peer) -> Result<[OwnedFd; N], Fault> {
    let fds = peer.receive_fds()?;
    let count = fds.len();
    fds.try_into().map_err(|_| {
        let text = format!("{count} descriptors came where {N} were due");
        let kind = pp_contract::FaultKind::PeerMisbehaved;
        Fault::new(kind, peer.rank(), "receive shared memory", text)
    })
}

/// Makes the memory of two ranks of one host, on the lower of them, maps it on both, and exchanges their bells.
pub(crate) fn share_memory(
    peer: &mut dyn Peer,
    edges: Edges,
    bell: &Bell,
) -> Result<SharedEnd, Fault> {
    let is_lower = peer.own_rank() < peer.rank();
    let own = own_fault(peer.own_rank());
    let layout = || Layout::new(edges.up, edges.down).map_err(&own);
    let (region, layout, peer_bell) = if is_lower {
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
    let Layout { up, down, .. } = layout;
    let (outgoing, incoming) = if is_lower { (up, down) } else { (down, up) };
    Ok(SharedEnd {
        region: Arc::new(region),
        outgoing,
        incoming,
        peer: peer.rank(),
        bell: bell.clone(),
        peer_bell,
    })
}
