//! Edges by copy engine between two ranks, made and tried out, so that both ranks know whether they work before any
//! edge is used.
//!
//! Hazard: memory of another process may map and still be unreachable, or show the receiver other bytes than were sent.
//! Guarantee: each slot has gone from its sender to its receiver as a payload does, with a pattern at both ends, and
//! its credit has come back. Otherwise both ranks know the reason.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use pp_contract::{Fault, with_source};
use pp_device::{CudaError, Device, Event, PinnedBuffer, Registered, SharedMemory, Stream};

use super::life::{CopyEngine, CopyLife};
use super::numbers::{self, FarSlot, Page, Side};
use crate::gpu::{DeviceSlots, EdgesLife, Far as _, Lone, Mover, Slot, part};
use crate::times::{LOOK_EVERY, TRIED_WITHIN};
use pp_edges::backend::{EdgeEnd, Peer, receive_fds, share_memory};
use pp_edges::bell::Bell;
use pp_edges::error::TransportError;
use pp_edges::lane::LaneEnd;
use pp_edges::shm::layout::Holds;
use pp_edges::shm::region::Region;

/// The alignment of slots, in bytes.
const ALIGN: usize = 4096;
/// Bytes of the pattern at each end of a slot.
const PATTERN: usize = 4096;
/// The name of the page in the kernel's tables.
const PAGE: &str = "pp-numbers";

/// The reason why two ranks cannot use the copy engine, and the rank that found it.
pub(crate) type Why = String;

/// A failure on one rank.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("no number came through shared memory within {TRIED_WITHIN:?}")]
    Late,
    #[error("byte {at} of slot {slot} of edge {edge} is not what was sent")]
    Differs { edge: u32, slot: u32, at: usize },
}

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

/// Tells the other rank whether this one can go on, and learns whether the other can. Both ranks get the same answer.
///
/// # Errors
/// The other rank is lost, or sent something unexpected.
pub(crate) fn exchange<T, E: std::error::Error + 'static>(
    peer: &mut dyn Peer,
    own: Result<T, E>,
) -> Result<Result<T, Why>, Fault> {
    let rank = peer.own_rank();
    let own = own.map_err(|error| format!("rank {rank}: {}", with_source(&error)));
    peer.send(own.as_ref().err().map_or("", |why| why).as_bytes())?;
    let theirs = peer.receive("try the copy engine")?;
    Ok(match own {
        Ok(_) if !theirs.is_empty() => Err(String::from_utf8_lossy(&theirs).into_owned()),
        own => own,
    })
}

/// Yields the value if both ranks succeeded; otherwise returns the reason from the calling function.
macro_rules! both {
    ($peer:expr, $own:expr) => {
        match exchange($peer, $own)? {
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
    let sent = outgoing().map(|(end, path)| send_pattern(device, end, path));
    let sent: Vec<PinnedBuffer> = both!(peer, sent.collect());
    let incoming = || ends().filter(|(end, _)| !end.is_sender);
    let came = incoming().try_for_each(|(end, path)| compare(device, end, path));
    both!(peer, came);
    let credits = outgoing().try_for_each(|(_, path)| await_numbers(path));
    both!(peer, credits);
    drop(sent);
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

/// Returns the byte of the test pattern at offset `at` of a slot.
fn pattern(end: &EdgeEnd, slot: u32, at: usize) -> u8 {
    let place = at as u32 ^ slot.rotate_left(20) ^ end.edge.rotate_left(26);
    (place.wrapping_mul(0x9e37_79b1) >> 24) as u8
}

/// Returns the ranges of the two ends of a slot of `capacity` bytes. They may overlap.
fn ends_of(capacity: usize) -> [std::ops::Range<usize>; 2] {
    let len = capacity.min(PATTERN);
    [0..len, capacity - len..capacity]
}

/// Lists both ends of each slot of an edge, each with its offset in the staging buffer.
fn pieces(path: &Path) -> impl Iterator<Item = (u32, std::ops::Range<usize>, usize)> + use<> {
    let (slots, ends) = (path.far.len() as u32, ends_of(path.slots.capacity));
    let len = ends[0].len();
    let all = (0..slots).flat_map(move |slot| ends.clone().map(|range| (slot, range)));
    (0..)
        .step_by(len)
        .zip(all)
        .map(|(at, (slot, range))| (slot, range, at))
}

/// Allocates the host buffer that stages the ends of all slots.
fn staging(device: &Device, path: &Path) -> Result<PinnedBuffer, CudaError> {
    let bytes = pieces(path).map(|(_, range, _)| range.len()).sum();
    PinnedBuffer::new(device, bytes)
}

/// Sends each slot of an edge once. The caller keeps the returned staging buffer until the numbers are back.
fn send_pattern(
    device: &Device,
    end: &EdgeEnd,
    path: &Path,
) -> Result<PinnedBuffer, TransportError> {
    let mut staging = staging(device, path)?;
    for (slot, range, place) in pieces(path) {
        for (byte, at) in staging.bytes_mut()[place..].iter_mut().zip(range) {
            *byte = pattern(end, slot, at);
        }
    }
    let stream = &path.slots.stream;
    let issued = pieces(path).try_for_each(|(number, range, place)| {
        let slot = path.slots.slot(number);
        let to = part(slot.ptr(), range.start, range.len());
        slot.write_on(&mut None, stream, || {
            // SAFETY: the slot has no owner yet, and is freed only behind the event that is recorded behind this; the bytes
            // are freed only behind their use, which is noted below.
            Ok::<_, TransportError>(unsafe {
                stream.upload(&staging, place..place + range.len(), to)
            }?)
        })
    });
    // This runs after a failure too, since some of the work may have been issued.
    let noted = staging.used_by(stream);
    issued?;
    noted?;
    for slot in 0..path.far.len() as u32 {
        let slot = path.slots.slot(slot);
        // SAFETY: the slot has no owner yet, and neither has that of the receiver. What wrote it is on the same stream.
        unsafe { slot.put(path.slots.capacity, Some(stream), stream) }?;
    }
    Ok(staging)
}

/// Waits until the other device is done with each slot of an edge.
fn await_numbers(path: &Path) -> Result<(), Failed> {
    let deadline = Instant::now() + TRIED_WITHIN;
    for slot in 0..path.far.len() as u32 {
        while !path.slots.slot(slot).has_moved()? {
            if Instant::now() > deadline {
                return Err(Failed::Late);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
    Ok(())
}

/// Receives each slot of an edge once, compares its bytes, and returns it in the order of the stream.
fn compare(device: &Device, end: &EdgeEnd, path: &Path) -> Result<(), Failed> {
    (0..path.far.len() as u32).for_each(|slot| path.slots.slot(slot).expect());
    await_numbers(path)?;
    let (stream, passed) = (&path.slots.stream, Event::new(device)?);
    let mut staging = staging(device, path)?;
    let issued = pieces(path).try_for_each(|(number, range, place)| {
        let slot = path.slots.slot(number);
        let from = part(slot.ptr(), range.start, range.len());
        slot.write_on(&mut None, stream, || {
            // SAFETY: the sender has written the slot, as its number says, and it stays mapped until the event that is
            // recorded behind this is done; the bytes are looked at behind the copy, and freed only behind their use.
            Ok::<_, TransportError>(unsafe { stream.download(from, &mut staging, place) }?)
        })
    });
    // This runs after a failure too, since some of the work may have been issued.
    let noted = staging.used_by(stream);
    issued?;
    noted?;
    passed.record(stream)?;
    stream.wait_until_idle(TRIED_WITHIN)?;
    for (slot, range, place) in pieces(path) {
        let mut bytes = staging.bytes()[place..].iter().zip(range);
        if let Some((_, at)) = bytes.find(|(byte, at)| **byte != pattern(end, slot, *at)) {
            let edge = end.edge;
            return Err(Failed::Differs { edge, slot, at });
        }
    }
    for far in &path.far {
        far.give_back(Some(&passed))?;
    }
    Ok(())
}
