//! The host backend: ranks are processes of one machine, slots lie in memory they share.
//!
//! A send hands over a slot: the frame goes through a ring, the payload stays where the stage
//! wrote it, and 22 MB cost what 22 B cost. The receiver reads the slot in place, and dropping
//! its lease returns the credit. This is also the plain statement of what every backend must do.
//!
//! The region is made by the lower of the two ranks and passed, with the bells, over their
//! authenticated control channel. The kernel frees it with the last process, however that ends.

pub(crate) mod layout;
pub mod memory;
pub mod nt;
pub(crate) mod region;
pub(crate) mod ring;
pub(crate) mod slots;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use pp_contract::{MAX_FRAME_BYTES, Matched, Prepared, Rank, Sequencer, Stamp};

use self::layout::{Direction, Layout};
pub use self::layout::{EdgeShape, MAX_DEPTH};
use self::region::{BytesAt, Region, WordsAt};
use self::ring::{NO_SLOT, RingReceiver, RingSender, RingWords};
use self::slots::{Consumer, NotOurs, Producer, SlotWord, SlotWords};
use crate::bell::Bell;
use crate::error::TransportError;
use crate::in_flight::{InFlight, Rejected, Submission};
use crate::link::{Capabilities, Link, Sent};

/// The slots of one direction, in the region.
#[derive(Debug)]
struct Slots {
    region: Arc<Region>,
    place: Direction,
}

impl SlotWords for Slots {
    fn depth(&self) -> u32 {
        self.place.depth
    }

    fn word(&self, slot: u32) -> &SlotWord {
        assert!(slot < self.place.depth);
        let offset = self.place.slot_words + slot as usize * size_of::<SlotWord>();
        self.region.words(offset)
    }
}

impl Slots {
    fn new(region: &Arc<Region>, place: Direction) -> Self {
        Self {
            region: Arc::clone(region),
            place,
        }
    }

    fn bytes(&self, slot: u32, len: usize) -> std::ptr::NonNull<u8> {
        assert!(slot < self.place.depth && len <= self.place.slot_bytes);
        let offset = self.place.slots + slot as usize * self.place.stride;
        self.region.bytes_at(offset, len)
    }
}

/// What a lease needs of its edge, in either direction.
#[derive(Debug)]
struct Edge<S> {
    slots: S,
    /// Rung when the peer is given something: a frame or a credit.
    peer_bell: Bell,
}

/// A slot of the outgoing edge, to be written in place.
///
/// # If dropped
/// The slot is free again; nothing was sent.
#[derive(Debug)]
pub struct TxLease {
    edge: Arc<Edge<Producer<Slots>>>,
    slot: u32,
}

impl TxLease {
    /// The slot, whole. It holds what an earlier chunk left in it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let slots = self.edge.slots.words();
        let len = slots.place.slot_bytes;
        let at = slots.bytes(self.slot, len);
        // SAFETY: the slot is in state LEASED for as long as this lease exists, so neither the
        // peer nor another lease of this process touches its bytes; they lie in the region,
        // which the lease keeps mapped; `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) }
    }

    /// Bytes that fit the slot.
    pub fn capacity(&self) -> usize {
        self.edge.slots.words().place.slot_bytes
    }

    /// Ends the lease without freeing the slot: it is in flight now.
    fn into_parts(self) -> (Arc<Edge<Producer<Slots>>>, u32) {
        let lease = std::mem::ManuallyDrop::new(self);
        // SAFETY: `lease` is never dropped and not used again, so the `Arc` is moved out once.
        (unsafe { std::ptr::read(&raw const lease.edge) }, lease.slot)
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
    edge: Arc<Edge<Producer<Slots>>>,
    slot: u32,
}

impl Submission for Sending {
    type Buffer = TxLease;

    fn is_done(&self) -> Result<bool, TransportError> {
        Ok(self.edge.slots.is_back(self.slot))
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

/// A slot of the incoming edge, read in place.
///
/// # If dropped
/// The slot goes back to the peer: this is its credit for the next send.
#[derive(Debug)]
pub struct RxLease {
    edge: Arc<Edge<Consumer<Slots>>>,
    slot: u32,
    len: usize,
}

impl RxLease {
    /// The payload, exactly as many bytes as its header said.
    pub fn bytes(&self) -> &[u8] {
        let at = self.edge.slots.words().bytes(self.slot, self.len);
        // SAFETY: the peer handed the slot over (an acquire load saw it) and does not write it
        // until this lease is dropped; the lease keeps the region mapped.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), self.len) }
    }
}

impl Drop for RxLease {
    fn drop(&mut self) {
        self.edge.slots.give_back(self.slot);
        self.edge.peer_bell.ring();
    }
}

/// A receive: on this backend the payload is there before its header.
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
        self.0.edge.slots.quarantine(self.0.slot);
        std::mem::forget(self.0);
    }
}

/// Both edges between this rank and a peer on the same machine.
#[derive(Debug)]
pub struct HostLink {
    peer: Rank,
    bell: Bell,
    tx: Arc<Edge<Producer<Slots>>>,
    rx: Arc<Edge<Consumer<Slots>>>,
    ring_tx: RingSender<WordsAt<RingWords>, BytesAt>,
    ring_rx: RingReceiver<WordsAt<RingWords>, BytesAt>,
    sequencer: Sequencer,
    /// The slot that the frame polled last names.
    announced: u32,
}

/// A region made by the lower rank, before the peer has mapped it.
#[derive(Debug)]
pub struct Offer {
    region: Region,
    layout: Layout,
}

impl Offer {
    /// Makes the region for a pair: `up` is the edge from the lower rank to the higher.
    ///
    /// # Errors
    /// The shape cannot be, or the kernel has no memory for it.
    pub fn new(up: EdgeShape, down: EdgeShape) -> Result<Self, TransportError> {
        let layout = Layout::new(up, down)?;
        let region = Region::create("pp-edges", layout.len)?;
        Ok(Self { region, layout })
    }

    /// The descriptor to pass to the peer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.fd()
    }

    /// The lower rank's end.
    pub fn into_link(self, peer: Rank, bell: Bell, peer_bell: Bell) -> HostLink {
        let Layout { up, down, .. } = self.layout;
        HostLink::new(self.region, up, down, peer, bell, peer_bell)
    }
}

impl HostLink {
    /// The higher rank's end, over the descriptor that the lower rank passed. A region has one
    /// such end: a second one over a duplicate of the descriptor would hand out the same slots.
    ///
    /// # Errors
    /// The descriptor is not the region that was agreed.
    pub fn open(
        fd: OwnedFd,
        up: EdgeShape,
        down: EdgeShape,
        peer: Rank,
        bell: Bell,
        peer_bell: Bell,
    ) -> Result<Self, TransportError> {
        let layout = Layout::new(up, down)?;
        let region = Region::open(fd, layout.len)?;
        let Layout { up, down, .. } = layout;
        Ok(Self::new(region, down, up, peer, bell, peer_bell))
    }

    /// Both ends in one process, for tests and for a pipeline that one process runs alone. The
    /// driver of the lower end sleeps on `low`.
    ///
    /// # Errors
    /// As [`Offer::new`] and [`HostLink::open`].
    pub fn pair(up: EdgeShape, down: EdgeShape, low: Bell) -> Result<(Self, Self), TransportError> {
        let dup = |fd: BorrowedFd<'_>| {
            fd.try_clone_to_owned()
                .map_err(|e| TransportError::BadRegion { why: e.to_string() })
        };
        let high = Bell::new()?;
        let offer = Offer::new(up, down)?;
        let fd = dup(offer.fd())?;
        let higher = Self::open(fd, up, down, Rank::new(0), high.clone(), low.clone())?;
        Ok((offer.into_link(Rank::new(1), low, high), higher))
    }

    fn new(
        region: Region,
        outgoing: Direction,
        incoming: Direction,
        peer: Rank,
        bell: Bell,
        peer_bell: Bell,
    ) -> Self {
        let region = Arc::new(region);
        let words = |d: Direction| WordsAt::new(&region, d.ring_words);
        let data = |d: Direction| BytesAt::new(&region, d.ring_data, d.ring_bytes);
        Self {
            peer,
            bell,
            tx: Arc::new(Edge {
                slots: Producer::new(Slots::new(&region, outgoing)),
                peer_bell: peer_bell.clone(),
            }),
            rx: Arc::new(Edge {
                slots: Consumer::new(Slots::new(&region, incoming)),
                peer_bell,
            }),
            ring_tx: RingSender::new(words(outgoing), data(outgoing)),
            ring_rx: RingReceiver::new(words(incoming), data(incoming), MAX_FRAME_BYTES),
            sequencer: Sequencer::new(),
            announced: NO_SLOT,
        }
    }

    fn misbehaved(&self, why: String) -> TransportError {
        TransportError::PeerMisbehaved {
            rank: self.peer,
            why,
        }
    }

    /// Why this payload cannot go with this message, if it cannot.
    fn check_payload(&self, bytes: u64, payload: Option<&TxLease>) -> Result<(), TransportError> {
        let with = match payload {
            None if bytes == 0 => return Ok(()),
            None => "a send without a slot".to_owned(),
            Some(_) if bytes == 0 => "a slot, since it needs none".to_owned(),
            Some(lease) if !Arc::ptr_eq(&lease.edge, &self.tx) => {
                "a slot of another edge".to_owned()
            }
            Some(lease) if bytes > lease.capacity() as u64 => {
                format!("a slot of {} bytes", lease.capacity())
            }
            Some(_) => return Ok(()),
        };
        Err(TransportError::PayloadMismatch {
            payload_bytes: bytes,
            with,
        })
    }
}

impl Link for HostLink {
    type Tx = TxLease;
    type Rx = RxLease;
    type Sending = Sending;
    type Receiving = Receiving;

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "host",
            payload_moves: false,
            completions_ring: true,
        }
    }

    fn bell(&self) -> &Bell {
        &self.bell
    }

    fn try_lease(&mut self) -> Result<Option<TxLease>, TransportError> {
        Ok(self.tx.slots.lease().map(|slot| TxLease {
            edge: Arc::clone(&self.tx),
            slot,
        }))
    }

    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<TxLease>,
    ) -> Result<Sent<Sending>, Rejected<TxLease>> {
        if let Err(error) = self.check_payload(message.payload_bytes(), payload.as_ref()) {
            let buffer = payload;
            return Err(Rejected { buffer, error });
        }
        if !self.ring_tx.has_room(MAX_FRAME_BYTES) {
            return Err(Rejected {
                buffer: payload,
                error: TransportError::Backpressure { peer: self.peer },
            });
        }
        // From here on nothing can fail: the header is a commitment.
        let sending = payload.map(|lease| {
            let (edge, slot) = lease.into_parts();
            edge.slots.submit(slot);
            Sending { edge, slot }
        });
        let tag = sending.as_ref().map_or(NO_SLOT, |s| s.slot);
        let committed = message.commit(&mut self.sequencer, stamp);
        self.ring_tx
            .push(tag, committed.frame())
            .expect("room was checked, and only this side fills the ring");
        self.tx.peer_bell.ring();
        Ok(Sent {
            header: *committed.header(),
            payload: sending.map(InFlight::new),
        })
    }

    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        let tag = self.ring_rx.pop(inbox).map_err(|e| {
            self.misbehaved(format!(
                "its header ring claims {} bytes in use and a record of {}",
                e.used, e.record
            ))
        })?;
        self.announced = tag.unwrap_or(NO_SLOT);
        Ok(tag.is_some())
    }

    fn receive(&mut self, header: &Matched<'_>) -> Result<InFlight<Receiving>, TransportError> {
        let slot = std::mem::replace(&mut self.announced, NO_SLOT);
        let bytes = header.header().payload_bytes();
        let capacity = self.rx.slots.words().place.slot_bytes;
        let len = usize::try_from(bytes).ok().filter(|len| *len <= capacity);
        let Some(len) = len else {
            return Err(self.misbehaved(format!(
                "it announced a payload of {bytes} bytes for a slot of {capacity}"
            )));
        };
        self.rx.slots.take(slot).map_err(|why| {
            self.misbehaved(match why {
                NotOurs::NoSuchSlot => format!("it announced a payload in slot {slot}"),
                NotOurs::NotHandedOver => format!("it announced slot {slot}, which it still holds"),
            })
        })?;
        let edge = Arc::clone(&self.rx);
        Ok(InFlight::new(Receiving(RxLease { edge, slot, len })))
    }
}
