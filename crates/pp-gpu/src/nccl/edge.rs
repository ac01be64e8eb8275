//! The parts of edges with a peer over NCCL, and NCCL as the mover of their payloads.

use std::sync::Arc;
use std::time::Instant;

use pp_contract::Rank;

use super::connect::{self, Edge, Stop};
use super::id::UniqueId;
use super::issuer::{ConnectWait, Issuer, IssuerUser};
use super::life::Life;
use crate::gpu::{DeviceIn, DeviceOut, DeviceTx, EdgesLife, Mover, Slot, Turn, join};
use pp_edges::backend::{Connect, Connected};
use pp_edges::edge::Edges;
use pp_edges::error::TransportError;
use pp_edges::host::EdgeShape;
use pp_edges::lane::LaneEnd;
use pp_words::slots::SlotWords;

/// Holds the values that two ranks exchange before NCCL connects them.
#[derive(Debug)]
pub struct Agreed {
    /// Whether this rank is the lower of the two.
    pub(super) is_lower: bool,
    /// The edges in the order of their numbers.
    pub(super) edges: Vec<NcclEdge>,
}

/// Configures one edge.
#[derive(Debug)]
pub(super) struct NcclEdge {
    /// Its number.
    pub(super) number: u32,
    /// Its lane, with as many slots as its shape says.
    pub(super) lane: LaneEnd,
    /// Its shape, and the id of its communicator, which one rank made for both. `None` if the edge carries headers
    /// alone.
    pub(super) payloads: Option<(EdgeShape, UniqueId)>,
}

/// Moves payloads by NCCL, over one communicator.
#[derive(Debug)]
struct ByNccl {
    edge: Edge,
    life: Arc<Life>,
    peer: Rank,
    /// Makes it `!Sync`.
    _user: IssuerUser,
}

impl ByNccl {
    /// Issues the transfer of a slot.
    ///
    /// # Safety
    /// As [`Edge::issue`].
    unsafe fn issue(&self, what: &str, slot: &Slot, bytes: usize) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        let issued = unsafe { self.edge.issue(&self.life, slot, bytes) };
        issued.map_err(|stop| match stop {
            Stop::Cuda(error) => error.into(),
            Stop::GivenUp => self.life.aborted(),
            Stop::Nccl(source) => self.life.explain(TransportError::Nccl {
                doing: format!("{what} rank {}", self.peer),
                source,
            }),
        })
    }
}

impl Mover for ByNccl {
    #[inline]
    fn enter(&self) -> Result<Turn<'_>, TransportError> {
        self.life.enter()
    }

    fn prepare(&self, lease: &mut DeviceTx, _: usize) -> Result<(), TransportError> {
        Ok(lease.follow_on(&self.edge.stream)?)
    }

    unsafe fn send(&self, slot: &Slot, bytes: usize) -> Result<(), TransportError> {
        // SAFETY: the caller's promise; the turn is that of the thread that issues.
        unsafe { self.issue("send to", slot, bytes) }
    }

    unsafe fn receive(&self, slot: &Slot, bytes: usize) -> Result<(), TransportError> {
        // SAFETY: as above.
        unsafe { self.issue("receive from", slot, bytes) }
    }
}

/// Makes all edges with a peer, and moves a byte over each that has payloads. The peer does the same at the same time.
/// Checks every few milliseconds whether the edges are still wanted. So a caller that learns that the peer is gone need
/// not wait until the deadline.
///
/// A blocking communicator cannot be given up while it is created, since NCCL has given no handle to abort. If the peer
/// does not join, the thread that waits for it stays behind, and no other edge of this device can be made.
///
/// # Errors
/// [`TransportError::NotInTime`] if the peer did not do its part by the deadline, or the edges are not wanted any more;
/// a thread that waits inside NCCL is then left behind. The device has no memory for the slots; NCCL refuses; a lane
/// has another number of slots than its shape.
pub(super) fn connect<E>(
    issuer: &Issuer,
    agreed: Agreed,
    blocking: bool,
    how: Connect<'_>,
) -> Result<Connected<E>, TransportError>
where
    E: Edges<Out = DeviceOut, In = DeviceIn> + ?Sized,
{
    let Agreed { is_lower, edges } = agreed;
    let (mut ends, mut ids) = (Vec::new(), Vec::new());
    for NcclEdge { lane, payloads, .. } in &edges {
        let (slots, is_sender) = match lane {
            LaneEnd::Out(lane) => (lane.slots.words().depth(), true),
            LaneEnd::In(lane) => (lane.slots.slots.depth(), false),
        };
        let edge = payloads.map_or(0, |(shape, _)| shape.slots());
        if slots != edge {
            return Err(TransportError::OtherDepth { lane: slots, edge });
        }
        if let Some((shape, id)) = payloads {
            shape.capacity()?;
            ends.push((*shape, is_sender));
            ids.push(*id);
        }
    }
    check_queues();
    // Held until the ends themselves count as users, so that the thread that issues stays the same.
    let user = IssuerUser::new(issuer);
    let wait = ConnectWait::of(how);
    let started = Instant::now();
    let peer = edges.first().map(|edge| edge.lane.peer());
    let peer = peer.unwrap_or(Rank::new(0));
    let what = format!("the connection to rank {peer}");
    let made = connect::by(issuer, what, &wait, move |life, progress| {
        connect::edges(life, progress, is_lower, &ends, &ids, blocking)
    });
    let (life, halves) = made?;
    tracing::debug!(
        peer = peer.get(),
        generation = how.generation.get(),
        blocking,
        edges = halves.len(),
        ms = started.elapsed().as_millis() as u64,
        "NCCL edges connected"
    );
    let mut halves = halves.into_iter();
    let lone = edges.into_iter().map(|made| {
        let half = made.payloads.and_then(|_| halves.next());
        let payloads = half.map(|(edge, slots)| {
            let mover: Box<dyn Mover> = Box::new(ByNccl {
                edge,
                life: Arc::clone(&life),
                peer,
                _user: IssuerUser::new(issuer),
            });
            (slots, mover)
        });
        (made.number, made.lane, payloads)
    });
    let of_all: Arc<dyn EdgesLife> = Arc::<Life>::clone(&life);
    let connected = join(lone, Some(of_all));
    drop(user);
    Ok(connected)
}

/// Warns if all streams share one hardware queue, because such streams wait for each other.
pub(super) fn check_queues() {
    if std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|value| value.trim() == "1") {
        tracing::warn!(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams of a device into one queue: a large \
             payload in one direction may wait for ever for one in the other, or for a group; unset it, or set 8"
        );
    }
}
