//! Payloads between this rank's GPU and a rank of this host whose payloads lie in host memory.
//!
//! Hazard: a header that is read before its payload has left the device, a slot that is filled again while the device still
//! copies it, pages that are unlocked under a copy. Guarantee: the header of a payload leaves only when the host has seen
//! the copy done. The credit of a payload that came here returns when the last reader of the device's copy is done. Pages
//! are unlocked behind the streams that copy from and to them.
//!
//! Choices: the other rank works as with any rank in host memory: its edges, its memory, its bell. This rank page-locks the
//! memory that both share, for one generation, and pairs each slot with a slot on the device. A slot of the device is filled
//! and read by copies on the stream of its edge. So no thread waits for the device, and nothing is locked or allocated for a
//! chunk.

use std::sync::{Arc, Weak};

use pp_contract::{Fault, FaultKind};
use pp_device::{CudaError, Device, DevicePtr, Event, Registered, Stream};

use super::p2p::life::{CopyEngine, CopyLife};
use super::p2p::trial::Tried;
use super::patterns::{self, Failed};
use super::{DeviceSlots, EdgesLife, Far, Mover, Slot};
use pp_edges::backend::{EdgeEnd, Peer, exchange, share_memory};
use pp_edges::bell::Bell;
use pp_edges::error::TransportError;
use pp_edges::lane::LaneEnd;
use pp_edges::lane::shared::SharedEnd;
use pp_edges::shm::layout::Holds;
use pp_edges::shm::region::Region;
use pp_edges::trial::WHAT;

/// The memory that two ranks share, page-locked.
type Pages = Registered<Arc<Region>>;

/// The slot in host memory that a slot of the device is paired with.
#[derive(Debug)]
struct HostSlot {
    side: HostSide,
    /// Its offset in the memory.
    at: usize,
}

#[derive(Debug)]
enum HostSide {
    /// This rank sends. A payload that outlives its edge does not keep the memory locked.
    Out(Weak<Pages>),
    /// This rank receives, on this stream.
    In(Arc<Pages>, Stream),
}

impl Far for HostSlot {
    fn has_moved(&self, moved: &Event) -> Result<bool, CudaError> {
        moved.is_done()
    }

    /// The other rank takes a payload to be there when its header is.
    fn is_announced_last(&self) -> bool {
        true
    }

    fn give_back(&self, behind: Option<&Event>) -> Result<bool, CudaError> {
        behind.map_or(Ok(true), Event::is_done)
    }

    fn begin(&self) {}

    unsafe fn put(
        &self,
        from: DevicePtr,
        stream: &Stream,
        moved: &Event,
    ) -> Result<bool, CudaError> {
        let HostSide::Out(pages) = &self.side else {
            unreachable!("nothing is sent from a slot of the receiver");
        };
        let Some(pages) = pages.upgrade() else {
            return Ok(false);
        };
        let to = pages.bytes_at(self.at, from.len);
        // SAFETY: the bytes lie in the memory (checked), which is unmapped behind the stream. The slot is this rank's until
        // the header has left, so nothing touches it; the rest is the caller's promise.
        unsafe { stream.download_to(to.as_ptr(), from) }?;
        moved.record(stream)?;
        Ok(true)
    }

    unsafe fn fetch(&self, into: DevicePtr, moved: &Event) -> Result<(), CudaError> {
        let HostSide::In(pages, stream) = &self.side else {
            unreachable!("nothing is received into a slot of the sender");
        };
        let from = pages.bytes_at(self.at, into.len);
        // SAFETY: the bytes lie in the memory (checked), which is unmapped behind the stream. The other rank has handed the
        // slot over, and writes it only once it has the credit; the rest is the caller's promise.
        unsafe { stream.upload_from(from.as_ptr(), into.len, into.address) }?;
        moved.record(stream)
    }

    fn used_until(&self, _: Vec<Event>) {
        unreachable!("the slots of the device are its own");
    }
}

/// Page-locks `bytes` of shared memory and unlocks it, to see whether a GPU can stand beside a CPU here.
///
/// # Errors
/// The host has no such memory, or the driver refuses to lock it.
pub fn try_to_lock(device: &Device, bytes: usize) -> Result<(), TransportError> {
    let region = Region::create("pp-locked", bytes)?;
    let pages = region.pages();
    // SAFETY: the region keeps its whole pages mapped wherever it is, and is registered here alone.
    unsafe { Registered::new(region, pages, Vec::new(), device) }?;
    Ok(())
}

/// Makes the edges between this rank and a rank in host memory, and tries those that have payloads.
///
/// # Errors
/// The other rank is lost, sent something unexpected, or is on another host. The driver refuses to lock the memory. A
/// payload came as another one.
pub(crate) fn make(
    peer: &mut dyn Peer,
    device: &Device,
    edges: &[EdgeEnd],
    bell: &Bell,
) -> Result<Tried, Fault> {
    let own = peer.own_rank();
    let failed = |why| Fault::new(FaultKind::Device, own, WHAT, why);
    let shared = share_memory(peer, edges, Holds::All, bell)?;
    let with_payloads = || {
        let all = edges.iter().zip(&shared);
        all.filter(|(end, _)| end.shape.has_payloads())
    };
    let what = format!("the edges with rank {}", peer.rank());
    let life: Arc<dyn EdgesLife> = Arc::new(CopyLife::new(what));
    let mut slots = Vec::new();
    if with_payloads().next().is_some() {
        let made = lock(device, &life, with_payloads());
        let written = made.and_then(|(made, pages)| {
            let mut ends = with_payloads().zip(&made);
            ends.try_for_each(|((end, _), slots)| match end.is_sender {
                true => write(device, end, slots),
                false => Ok(()),
            })?;
            Ok((made, pages))
        });
        let (made, pages) = exchange(peer, WHAT, written)?.map_err(failed)?;
        let mut ends = with_payloads().zip(&made);
        let came = ends.try_for_each(|((end, _), slots)| match end.is_sender {
            true => Ok(()),
            false => patterns::compare(device, end, slots).map(drop),
        });
        exchange(peer, WHAT, came)?.map_err(failed)?;
        slots.extend(made.into_iter().map(|made| (made, Arc::clone(&pages))));
    }
    let mut slots = slots.into_iter();
    let whole = edges.iter().zip(&shared).map(|(end, shared)| {
        let lane = LaneEnd::over_memory(shared, end.is_sender);
        let own = end.shape.has_payloads().then(|| slots.next()).flatten();
        let payloads = own.map(|(slots, pages)| {
            let mover: Box<dyn Mover> = Box::new(CopyEngine { _there: pages });
            (slots, mover)
        });
        (end.edge, lane, payloads)
    });
    let edges = whole.collect();
    Ok(Tried { life, edges })
}

/// Locks the memory, and makes the slots of the device.
fn lock<'a>(
    device: &Device,
    life: &Arc<dyn EdgesLife>,
    edges: impl Iterator<Item = (&'a EdgeEnd, &'a SharedEnd)> + Clone,
) -> Result<(Vec<Arc<DeviceSlots>>, Arc<Pages>), Failed> {
    let streams = edges.clone().map(|_| Stream::urgent(device));
    let streams = streams.collect::<Result<Vec<_>, _>>()?;
    let region = edges.clone().map(|(_, shared)| Arc::clone(&shared.region));
    let region = region.last().expect("an edge with payloads");
    let pages = region.pages();
    // SAFETY: the region keeps its whole pages mapped wherever it is, and is registered here alone.
    let locked = unsafe { Registered::new(region, pages, streams.clone(), device) };
    let (_, bytes) = pages;
    let pages = Arc::new(locked.map_err(|source| Failed::Unlocked { bytes, source })?);
    let slots = edges.zip(streams).map(|((end, shared), stream)| {
        let capacity = end.shape.capacity()?;
        let slot = |number| {
            let side = match end.is_sender {
                true => HostSide::Out(Arc::downgrade(&pages)),
                false => HostSide::In(Arc::clone(&pages), stream.clone()),
            };
            let at = shared.slot_at(number);
            Slot::new(device, capacity, Some(Arc::new(HostSlot { side, at })))
        };
        let slots = (0..end.shape.slots()).map(slot).collect::<Result<_, _>>()?;
        let life = Arc::clone(life);
        let slots = DeviceSlots::of(slots, capacity, Some(life), stream);
        Ok::<_, TransportError>(Arc::new(slots))
    });
    let slots = slots.collect::<Result<_, _>>()?;
    Ok((slots, pages))
}

/// Writes the patterns that the other rank compares, and waits until they are there.
fn write(device: &Device, end: &EdgeEnd, slots: &DeviceSlots) -> Result<(), Failed> {
    let staging = patterns::send(device, end, slots)?;
    patterns::wait(slots)?;
    patterns::free(staging);
    Ok(())
}
