//! The host backend: ranks are processes of one machine, and slots lie in memory that they share.
//!
//! A send hands over a slot. The frame goes through a ring, and the payload stays where the stage wrote it, so 22 MB
//! cost the same as 22 B. The receiver reads the slot in place, and dropping its lease returns the credit. This is also
//! the simplest example of what every backend must do.
//!
//! The lower of the two ranks makes the region and passes it, with the bells, over their authenticated control channel.
//! The kernel frees it with the last process, however that process ends.

mod backend;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub(crate) mod group;
pub mod nt;

use std::convert::Infallible;
use std::sync::Arc;

use pp_contract::{Matched, Prepared, Sequencer, Stamp};

pub use self::backend::{Host, check_host};
pub use self::group::{GroupAbort, GroupMemory, HostGroup};
use crate::edge::{EdgeLocal, EdgeRx, EdgeTx, Sent, check_payload};
use crate::error::TransportError;
use crate::in_flight::{InFlight, Part, Rejected, Resend, Submission};
use crate::lane::shared::{NAME, SharedEnd};
use crate::lane::{self, InSlots, LaneRx, LaneTx, OutSlots};
use crate::shm::layout::{Direction, Holds, Layout};
pub use crate::shm::layout::{EdgeShape, MAX_SLOTS};
pub use crate::shm::memory;
use crate::shm::parts::in_parts;
use crate::shm::region::Region;

/// Bytes of a payload that is sent again that are worth a thread that copies them.
const COPIED_EACH: usize = 4 << 20;

/// The state of an edge that a lease needs, at either end: the owners of its slots, and the memory of their bytes.
#[derive(Debug)]
struct Edge<S> {
    slots: Arc<S>,
    region: Arc<Region>,
    place: Direction,
}

impl<S> Edge<S> {
    fn new(slots: Arc<S>, region: Arc<Region>, place: Direction) -> Arc<Self> {
        Arc::new(Self {
            slots,
            region,
            place,
        })
    }

    fn bytes(&self, slot: u32, len: usize) -> std::ptr::NonNull<u8> {
        assert!(len <= self.place.slot_bytes);
        self.region.bytes_at(self.place.slot_at(slot), len)
    }
}

/// Keeps the memory of the slots of an edge mapped, longer than a lease or the edge does. It gives no right to touch a slot.
#[derive(Clone, Debug)]
pub struct Mapping(Arc<Region>);

impl Mapping {
    /// Says whether both keep the same memory. The slots of another generation lie in another one.
    #[must_use]
    pub fn is_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A lease to write a slot of an edge in place.
///
/// # If dropped
/// The slot is free again; nothing was sent.
#[derive(Debug)]
pub struct TxLease {
    edge: Arc<Edge<OutSlots>>,
    slot: u32,
}

impl TxLease {
    fn of(edge: &Arc<Edge<OutSlots>>) -> Option<Self> {
        let slot = edge.slots.lease()?;
        let edge = Arc::clone(edge);
        Some(Self { edge, slot })
    }

    /// Returns the whole slot. It holds the bytes that an earlier chunk left there.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.capacity();
        let at = self.edge.bytes(self.slot, len);
        // SAFETY: the slot is in state LEASED for as long as this lease exists, so neither the
        // peer nor another lease of this process touches its bytes; they lie in the region,
        // which the lease keeps mapped; `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) }
    }

    /// Returns the size of the slot in bytes.
    pub fn capacity(&self) -> usize {
        self.edge.place.slot_bytes
    }

    /// Returns what keeps the slot mapped.
    pub fn mapping(&self) -> Mapping {
        Mapping(Arc::clone(&self.edge.region))
    }
}

impl Drop for TxLease {
    fn drop(&mut self) {
        self.edge.slots.give_up(self.slot);
    }
}

/// A slot that was handed over and has not come back.
#[derive(Debug)]
pub struct Sending {
    edge: Arc<Edge<OutSlots>>,
    slot: u32,
}

impl Submission for Sending {
    type Buffer = TxLease;

    fn is_done(&self) -> Result<bool, TransportError> {
        Ok(self.edge.slots.has_come_back(self.slot)?)
    }

    fn into_buffer(self) -> TxLease {
        self.edge.slots.redeem(self.slot);
        TxLease {
            edge: self.edge,
            slot: self.slot,
        }
    }

    fn orphan(self) {
        self.edge.slots.orphan(self.slot);
    }

    fn quarantine(self) {
        self.edge.slots.quarantine(self.slot);
    }
}

impl Resend for Sending {
    fn copy_into(&self, parts: &[Part], slot: &mut TxLease) -> Result<(), TransportError> {
        for part in parts {
            let (from, to, len) = part.within(self.edge.place.slot_bytes, slot.capacity())?;
            let (sent, into) = (&self.edge, &slot.edge);
            let sent_at = sent.place.slot_at(self.slot) + from;
            let into_at = into.place.slot_at(slot.slot) + to;
            // A rank that is back waits for this copy.
            let copied = in_parts(len, (COPIED_EACH, 1 << 12), |at, len| {
                let from = sent.region.bytes_at(sent_at + at, len);
                let into = into.region.bytes_at(into_at + at, len);
                // SAFETY: both ranges were just checked. `sent` lies in the region that this
                // submission keeps mapped, whether its generation lives or not, and its slot is IN
                // FLIGHT for as long as the submission exists: no lease of this process writes it,
                // and the peer only reads. A peer that breaks this changes bytes that it is sent once
                // more, and nothing here refers to them. `into` is borrowed uniquely, of a slot that
                // is LEASED, so it is another one, and the two do not overlap; neither do the parts.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.as_ptr(), len) };
                Ok::<_, Infallible>(())
            });
            let Ok(()) = copied;
        }
        Ok(())
    }

    fn unsent(buffer: TxLease) -> Self {
        // The lease ends without freeing the slot, which is in flight now.
        let lease = std::mem::ManuallyDrop::new(buffer);
        // SAFETY: `lease` is never dropped and not used again, so the `Arc` is moved out once.
        let edge = unsafe { std::ptr::read(&raw const lease.edge) };
        edge.slots.submit(lease.slot);
        Self {
            edge,
            slot: lease.slot,
        }
    }
}

/// A lease to read a slot of an edge in place.
///
/// # If dropped
/// The slot goes back to the sender as the credit for its next send.
#[derive(Debug)]
pub struct RxLease {
    edge: Arc<Edge<InSlots>>,
    slot: u32,
    len: usize,
}

impl RxLease {
    /// Returns the payload, exactly as many bytes as its header states.
    pub fn bytes(&self) -> &[u8] {
        let at = self.edge.bytes(self.slot, self.len);
        // SAFETY: the sender handed the slot over (an acquire load saw it) and does not write it
        // until this lease is dropped; the lease keeps the region mapped.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), self.len) }
    }

    /// Returns what keeps the slot mapped.
    pub fn mapping(&self) -> Mapping {
        Mapping(Arc::clone(&self.edge.region))
    }
}

impl Drop for RxLease {
    fn drop(&mut self) {
        self.edge.slots.give_back(self.slot);
    }
}

/// A receive. On this backend the payload has arrived before its header.
#[derive(Debug)]
pub struct Receiving(RxLease);

impl Submission for Receiving {
    type Buffer = RxLease;

    fn is_done(&self) -> Result<bool, TransportError> {
        Ok(true)
    }

    fn into_buffer(self) -> RxLease {
        self.0
    }

    fn orphan(self) {}

    fn quarantine(self) {
        // The slot stays out of use when the lease ends. It does not keep the edge alive.
        self.0.edge.slots.slots.quarantine(self.0.slot);
    }
}

/// The sending end of an edge to a rank on the same machine.
#[derive(Debug)]
pub struct HostTx {
    lane: LaneTx,
    edge: Arc<Edge<OutSlots>>,
    sequencer: Sequencer,
}

impl HostTx {
    fn new(end: SharedEnd) -> Self {
        let lane = LaneTx::over_memory(&end);
        Self {
            edge: Edge::new(Arc::clone(&lane.slots), end.region, end.place),
            lane,
            sequencer: Sequencer::new(),
        }
    }
}

impl EdgeTx for HostTx {
    type Tx = TxLease;
    type Sending = Sending;

    /// A header waits for nothing.
    fn advance(&mut self) -> Result<bool, TransportError> {
        Ok(true)
    }

    fn try_lease(&mut self) -> Result<Option<TxLease>, TransportError> {
        Ok(TxLease::of(&self.edge))
    }

    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<TxLease>,
    ) -> Result<Sent<Sending>, Rejected<TxLease>> {
        let lease = payload.as_ref();
        let fits = check_payload(
            message.payload_bytes(),
            lease.map(|lease| (Arc::ptr_eq(&lease.edge, &self.edge), lease.capacity())),
        );
        if let Err(error) = fits.and_then(|()| self.lane.check_room(0)) {
            let buffer = payload;
            return Err(Rejected { buffer, error });
        }
        // Nothing can fail from here on, since the header is a commitment.
        let sending = payload.map(Sending::unsent);
        let committed = message.commit(&mut self.sequencer, stamp);
        self.lane
            .push(sending.as_ref().map(|s| s.slot), committed.frame())
            .expect("a ring with room takes a frame");
        Ok(Sent {
            header: *committed.header(),
            payload: sending.map(InFlight::new),
        })
    }
}

/// The receiving end of an edge from a rank on the same machine.
#[derive(Debug)]
pub struct HostRx {
    lane: LaneRx,
    edge: Arc<Edge<InSlots>>,
}

impl HostRx {
    fn new(end: SharedEnd) -> Self {
        let lane = LaneRx::over_memory(&end);
        Self {
            edge: Edge::new(Arc::clone(&lane.slots), end.region, end.place),
            lane,
        }
    }
}

impl EdgeRx for HostRx {
    type Rx = RxLease;
    type Receiving = Receiving;

    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        self.lane.poll(inbox)
    }

    fn receive(&mut self, header: &Matched<'_>) -> Result<InFlight<Receiving>, TransportError> {
        let capacity = self.edge.place.slot_bytes;
        let (slot, len) = self.lane.take_announced(header, capacity)?;
        let edge = Arc::clone(&self.edge);
        Ok(InFlight::new(Receiving(RxLease { edge, slot, len })))
    }
}

/// An edge between two stages of this process.
#[derive(Debug)]
pub struct HostLocal {
    tx: Arc<Edge<OutSlots>>,
    rx: Arc<Edge<InSlots>>,
}

impl HostLocal {
    fn new(shape: EdgeShape) -> Result<Self, TransportError> {
        let layout = Layout::new([shape], Holds::Slots)?;
        let region = Arc::new(Region::create(NAME, layout.len)?);
        let (place, (out, incoming)) = (layout.edges[0], lane::local(shape));
        Ok(Self {
            tx: Edge::new(out, Arc::clone(&region), place),
            rx: Edge::new(incoming, region, place),
        })
    }
}

impl EdgeLocal for HostLocal {
    type Tx = TxLease;
    type Rx = RxLease;
    type Sending = Sending;

    fn try_lease(&mut self) -> Result<Option<TxLease>, TransportError> {
        Ok(TxLease::of(&self.tx))
    }

    fn hand_on(
        &mut self,
        payload: TxLease,
        bytes: u64,
    ) -> Result<(InFlight<Sending>, RxLease), Rejected<TxLease>> {
        let slot = (Arc::ptr_eq(&payload.edge, &self.tx), payload.capacity());
        if let Err(error) = check_payload(bytes, Some(slot)) {
            let buffer = Some(payload);
            return Err(Rejected { buffer, error });
        }
        let sending = Sending::unsent(payload);
        let (slot, edge) = (sending.slot, Arc::clone(&self.rx));
        edge.slots
            .take(slot)
            .expect("no other code moves a slot of this process");
        // The payload fits a slot, so its size fits the address space.
        let len = bytes as usize;
        Ok((InFlight::new(sending), RxLease { edge, slot, len }))
    }
}
