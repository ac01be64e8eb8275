//! Edges by copy engine between two ranks, made and tried out, so that both ranks know whether they work before any
//! edge is used.
//!
//! Hazard: memory of another process may map and still be unreachable, or show the receiver other bytes than were sent.
//! Guarantee: each slot has gone from its sender to its receiver as a payload does, with a pattern at both ends, and
//! its credit has come back. Otherwise both ranks know the reason.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use pp_contract::Fault;
use pp_device::{Device, PinnedBuffer, Registered, SharedMemory, Stream};

use super::life::{CopyEngine, CopyLife};
use super::numbers::{self, FarSlot, Page, Side};
use crate::gpu::patterns::{self, Failed};
use crate::gpu::{DeviceSlots, EdgesLife, Far as _, Lone, Mover, Slot, part};
use pp_edges::backend::{EdgeEnd, Peer, exchange, receive_fds, share_memory};
use pp_edges::bell::Bell;
use pp_edges::error::TransportError;
use pp_edges::lane::LaneEnd;
use pp_edges::shm::layout::Holds;
use pp_edges::shm::region::Region;
use pp_edges::trial;

/// The alignment of slots, in bytes.
const ALIGN: usize = 4096;
/// The name of the page in the kernel's tables.
const PAGE: &str = "pp-numbers";

/// The reason why two ranks cannot use the copy engine, and the rank that found it.
pub(crate) type Why = String;

/// Edges that were tried out, in the order of their numbers.
#[derive(Debug)]
pub(crate) struct Tried {
    pub(crate) life: Arc<dyn EdgesLife>,
    pub(crate) edges: Vec<Lone>,
}

/// The slots of an edge on this rank, and their remote ends.
struct Path {
    slots: Arc<DeviceSlots>,
    far: Vec<Arc<FarSlot>>,
    /// The memory of the receiver's slots.
    there: Arc<SharedMemory>,
}

impl Path {
    fn payloads(self) -> (Arc<DeviceSlots>, Box<dyn Mover>) {
        (self.slots, Box::new(CopyEngine { _there: self.there }))
    }
}

/// Yields the value if both ranks succeeded; otherwise returns the reason from the calling function.
macro_rules! both {
    ($peer:expr, $own:expr) => {
        match exchange($peer, trial::WHAT, $own)? {
            Ok(value) => value,
            Err(why) => return Ok(Err(why)),
        }
    };
}

/// Makes the edges between two ranks, and tries out those that have payloads.
///
/// # Errors
/// The other rank is lost, or sent something unexpected.
pub(crate) fn make(
    peer: &mut dyn Peer,
    device: &Device,
    edges: &[EdgeEnd],
    bell: &Bell,
) -> Result<Result<Tried, Why>, Fault> {
    let with_payloads: Vec<_> = edges
        .iter()
        .filter(|end| end.shape.has_payloads())
        .collect();
    let begun = begin(device, &with_payloads, peer.own_rank() < peer.rank());
    let (begun, region) = both!(peer, begun);
    let (streams, own): (Vec<_>, Vec<_>) = begun.into_iter().unzip();
    if let Some(region) = &region {
        peer.send_fds(&[region.fd()])?;
    }
    for (_, fd) in own.iter().flatten() {
        peer.send_fds(&[fd.as_fd()])?;
    }
    let mut fds = Vec::new();
    let expected = own.iter().filter(|own| own.is_none()).count() + usize::from(region.is_none());
    for _ in 0..expected {
        let [fd] = receive_fds(peer)?;
        fds.push(fd);
    }
    let what = format!("the edges with rank {}", peer.rank());
    let life: Arc<dyn EdgesLife> = Arc::new(CopyLife::new(what));
    let paths = open(device, &life, &with_payloads, (streams, own), region, fds);
    let paths = both!(peer, paths);
    let ends = || with_payloads.iter().zip(&paths);
    let outgoing = || ends().filter(|(end, _)| end.is_sender);
    let sent = outgoing().map(|(end, path)| patterns::send(device, end, &path.slots));
    let sent: Vec<PinnedBuffer> = both!(peer, sent.collect());
    let incoming = || ends().filter(|(end, _)| !end.is_sender);
    let came = incoming().try_for_each(|(end, path)| {
        let passed = patterns::compare(device, end, &path.slots)?;
        let mut slots = path.far.iter();
        Ok(slots.try_for_each(|far| far.give_back(Some(&passed)).map(drop))?)
    });
    both!(peer, came as Result<(), Failed>);
    let credits = outgoing().try_for_each(|(_, path)| patterns::wait(&path.slots));
    both!(peer, credits);
    sent.into_iter().for_each(patterns::free);
    let shared = share_memory(peer, edges, Holds::Rings, bell)?;
    let mut paths = paths.into_iter();
    let whole = edges.iter().zip(&shared).map(|(end, shared)| {
        let lane = LaneEnd::over_memory(shared, end.is_sender);
        let path = end.shape.has_payloads().then(|| paths.next()).flatten();
        (end.edge, lane, path.map(Path::payloads))
    });
    let edges = whole.collect();
    Ok(Ok(Tried { life, edges }))
}

/// The stream of an edge. If this rank receives: also its slots, and the descriptor with which the sender maps them.
type Begun = (Stream, Option<(SharedMemory, OwnedFd)>);

/// Returns the distance between two slots of an edge, and the size of all of them, in bytes.
fn size(end: &EdgeEnd) -> Result<(usize, usize), TransportError> {
    let stride = end.shape.capacity()?.next_multiple_of(ALIGN);
    Ok((stride, stride * end.shape.slots() as usize))
}

fn count(edges: &[&EdgeEnd]) -> usize {
    edges.iter().map(|end| end.shape.slots() as usize).sum()
}

/// Makes what this rank gives to the other one: memory for incoming payloads and, on the lower rank, the page of
/// numbers.
fn begin(
    device: &Device,
    edges: &[&EdgeEnd],
    is_lower: bool,
) -> Result<(Vec<Begun>, Option<Region>), TransportError> {
    let begin = |end: &&EdgeEnd| {
        let (_, bytes) = size(end)?;
        let memory = (!end.is_sender).then(|| SharedMemory::new(device, bytes));
        Ok::<_, TransportError>((Stream::urgent(device)?, memory.transpose()?))
    };
    let begun = edges.iter().map(begin).collect::<Result<_, _>>()?;
    let region = is_lower.then(|| Region::create(PAGE, numbers::bytes(count(edges))));
    Ok((begun, region.transpose()?))
}

/// Maps what the other rank has given, and makes the slots.
fn open(
    device: &Device,
    life: &Arc<dyn EdgesLife>,
    edges: &[&EdgeEnd],
    (streams, own): (Vec<Stream>, Vec<Option<(SharedMemory, OwnedFd)>>),
    region: Option<Region>,
    fds: Vec<OwnedFd>,
) -> Result<Vec<Path>, TransportError> {
    let (len, mut fds) = (numbers::bytes(count(edges)), fds.into_iter());
    let region = match (region, fds.len()) {
        (Some(region), _) => region,
        (None, 0) => unreachable!("one was received for each"),
        (None, _) => Region::open(fds.next().expect("there is one"), len)?,
    };
    let base = region.bytes_at(0, len);
    // SAFETY: the region keeps its whole pages mapped wherever it is, and is registered here alone.
    let page = unsafe { Registered::new(region, (base, len), streams.clone(), device) }?;
    let page: Arc<Page> = Arc::new(page);
    let (mut paths, mut first) = (Vec::new(), 0);
    for ((end, stream), own) in edges.iter().zip(streams).zip(own) {
        let (stride, bytes) = size(end)?;
        let capacity = end.shape.capacity()?;
        let there = match own {
            Some((memory, _)) => memory,
            None => {
                let fd = fds.next().expect("one was received for each");
                let memory = SharedMemory::import(device, fd, bytes)?;
                memory.used_until(Vec::new(), vec![stream.clone()]);
                memory
            }
        };
        let there = Arc::new(there);
        let (mut far, mut slots) = (Vec::new(), Vec::new());
        for slot in 0..end.shape.slots() as usize {
            let place = part(there.ptr(), slot * stride, capacity);
            let side = match end.is_sender {
                true => Side::Out {
                    to: place,
                    memory: Arc::downgrade(&there),
                },
                false => Side::In(Arc::clone(&there), stream.clone()),
            };
            let other = Arc::new(FarSlot::new(&page, first + slot, side));
            far.push(Arc::clone(&other));
            slots.push(match end.is_sender {
                true => Slot::new(device, capacity, Some(other))?,
                false => Slot::shared(device, place, other)?,
            });
        }
        first += slots.len();
        let life = Arc::clone(life);
        paths.push(Path {
            slots: Arc::new(DeviceSlots::of(slots, capacity, Some(life), stream)),
            far,
            there,
        });
    }
    Ok(paths)
}
