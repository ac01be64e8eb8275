//! The lane of an edge: the header frames beside its payloads, and the owner of each slot.
//!
//! Hazard: a payload whose header never came, or a slot with two owners. Guarantee: a frame arrives whole, in order,
//! and with the number of the slot that it hands over. Each slot that was handed over comes back as one credit. The
//! backend moves the payload; the lane never sees a byte of it.
//!
//! One type covers two implementations. Ranks of one host share the rings and the slot words in a memfd region. Ranks
//! of different hosts use the authenticated control channel, where each message names the edge and says whether it is a
//! frame or a credit.

mod channel;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
#[doc(hidden)]
pub mod shared;
mod words;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pp_contract::{MAX_FRAME_BYTES, Matched, Rank};

pub use self::channel::Inlet;
use self::channel::{ChannelRx, ChannelTx, Side};
#[doc(hidden)]
pub use self::words::{OutSlots, Words};
use crate::bell::Bell;
use crate::error::{TransportError, misbehaved};
use crate::lane::shared::SharedEnd;
use crate::shm::layout::{EdgeEnd, EdgeShape, Holds};
use crate::shm::region::{BytesAt, WordsAt};
use pp_meet::control::ControlSender;
use pp_words::ring::{NO_SLOT, RingReceiver, RingSender, record_bytes};
use pp_words::slots::{BadSlot, Consumer, InvalidWord, Producer};

/// How the sender of an edge learns that it owns a slot again.
#[derive(Debug)]
enum Credits {
    /// The sender reads the slot's word, and the bell tells it when.
    Bell(Bell),
    /// The sender reads the word by itself, since it is on the reader's own rank.
    None,
    /// A message tells the sender.
    Channel(ChannelTx),
}

/// The slots of an edge at its receiver, and how its sender learns that one came back.
#[derive(Debug)]
#[doc(hidden)]
pub struct InSlots {
    pub slots: Consumer<Words>,
    /// Slots that this side has taken and not returned.
    taken: AtomicU32,
    credits: Credits,
}

/// Returns the two sides of an edge within this rank: the slots of its sender and of its receiver.
#[doc(hidden)]
pub fn local(shape: EdgeShape) -> (Arc<OutSlots>, Arc<InSlots>) {
    let words = Words::own(shape.slots());
    // Faults in these words can only come from a peer, and this edge has none.
    let nobody = Rank::new(u32::MAX);
    let out = Producer::new(words.clone(), nobody);
    (Arc::new(out), Arc::new(InSlots::new(words, Credits::None)))
}

impl InSlots {
    fn new(words: Words, credits: Credits) -> Self {
        Self {
            slots: Consumer::new(words),
            taken: AtomicU32::new(0),
            credits,
        }
    }

    pub fn take(&self, slot: u32) -> Result<(), BadSlot> {
        self.slots.take(slot)?;
        self.taken.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Tells whether the peer has handed over a slot that this side has not taken. The payload of such a slot is on its
    /// way, or waits to be received.
    pub fn has_untaken(&self) -> bool {
        let here = (0..self.slots.depth()).filter(|&slot| self.slots.is_here(slot));
        here.count() as u32 > self.taken.load(Ordering::Relaxed)
    }

    /// Returns the slot to the peer, which may write it at once. Any thread may call this.
    pub fn give_back(&self, slot: u32) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
        self.slots.give_back(slot);
        match &self.credits {
            Credits::Bell(bell) => bell.ring(),
            Credits::None => {}
            Credits::Channel(channel) => channel.tell(slot),
        }
    }
}

/// The sending end of a lane. One thread at a time uses it. The state that leases need is shared.
///
/// # If dropped
/// Sends nothing more. Leases stay valid, and their slots come back as before.
#[derive(Debug)]
pub struct LaneTx {
    peer: Rank,
    /// The owner of each slot.
    pub slots: Arc<OutSlots>,
    frames: FramesTx,
}

/// How frames are sent.
#[derive(Debug)]
enum FramesTx {
    Ring {
        ring: RingSender<WordsAt, BytesAt>,
        peer_bell: Bell,
    },
    Channel(ChannelTx),
}

/// The receiving end of a lane. One thread at a time uses it. The state that leases need is shared.
///
/// # If dropped
/// Receives nothing more. Leases stay valid and return their slots as before.
#[derive(Debug)]
pub struct LaneRx {
    peer: Rank,
    /// The owner of each slot.
    pub slots: Arc<InSlots>,
    frames: FramesRx,
    /// The slot named by the last polled frame.
    announced: u32,
}

/// How frames arrive.
#[derive(Debug)]
enum FramesRx {
    Ring(RingReceiver<WordsAt, BytesAt>),
    Channel(ChannelRx),
}

/// One end of a lane.
#[derive(Debug)]
pub enum LaneEnd {
    /// This rank sends.
    Out(LaneTx),
    /// This rank receives.
    In(LaneRx),
}

/// Returns both ends of a lane in one process. Each rank brings the bell on which its driver sleeps. The slots lie
/// elsewhere.
///
/// # Errors
/// The shape is not valid, or the kernel has no memory.
pub fn pair(
    shape: EdgeShape,
    sender: (Rank, &Bell),
    receiver: (Rank, &Bell),
) -> Result<(LaneTx, LaneRx), TransportError> {
    let (tx, rx) = SharedEnd::pair(shape, Holds::Rings, sender, receiver)?;
    Ok((LaneTx::over_memory(&tx), LaneRx::over_memory(&rx)))
}

/// Makes lanes to a rank on another host, whose frames and credits use the control channel. Returns an end for each of
/// `edges`, and one [`Inlet`] for all of them. The thread that receives from the channel passes every
/// [`Message::Frame`](pp_meet::control::Message::Frame) to it. `bell` is the bell of this rank.
///
/// # Errors
/// A shape is not valid, or no thread can be started for the lanes.
pub fn over_channel(
    sender: ControlSender,
    bell: Bell,
    edges: &[EdgeEnd],
) -> Result<(Vec<LaneEnd>, Inlet), TransportError> {
    let peer = sender.peer();
    let (sides, inlet) = channel::open(sender, bell, edges)?;
    let end = |side| match side {
        Side::Out { slots, channel } => LaneEnd::Out(LaneTx {
            peer,
            slots,
            frames: FramesTx::Channel(channel),
        }),
        Side::In {
            words,
            credits,
            frames,
        } => {
            let slots = InSlots::new(words, Credits::Channel(credits));
            LaneEnd::In(LaneRx::new(peer, slots, FramesRx::Channel(frames)))
        }
    };
    Ok((sides.into_iter().map(end).collect(), inlet))
}

fn ring_at(end: &SharedEnd) -> (WordsAt, BytesAt) {
    let SharedEnd { region, place, .. } = end;
    (
        WordsAt::new(region, place.ring_words),
        BytesAt::new(region, place.ring_data, place.ring_bytes),
    )
}

impl LaneTx {
    pub(crate) fn over_memory(end: &SharedEnd) -> Self {
        let words = Words::shared(&end.region, end.place);
        let (ring_words, ring_data) = ring_at(end);
        Self {
            peer: end.peer,
            slots: Arc::new(Producer::new(words, end.peer)),
            frames: FramesTx::Ring {
                ring: RingSender::new(ring_words, ring_data),
                peer_bell: end.peer_bell.clone(),
            },
        }
    }

    /// Returns the rank at the other end.
    pub fn peer(&self) -> Rank {
        self.peer
    }

    /// Checks that a frame of any size can be pushed now, behind frames that take up `held` bytes ([`Self::room_of`]) and
    /// are still to be pushed.
    ///
    /// # Errors
    /// [`TransportError::Backpressure`]; the lane is broken.
    pub fn check_room(&mut self, held: usize) -> Result<(), TransportError> {
        match &mut self.frames {
            FramesTx::Ring { ring, .. } => {
                if ring.has_room(MAX_FRAME_BYTES + held) {
                    return Ok(());
                }
                Err(TransportError::Backpressure { peer: self.peer })
            }
            FramesTx::Channel(channel) => channel.check(),
        }
    }

    /// Returns the bytes that a frame takes up in a lane.
    #[must_use]
    pub fn room_of(frame: &[u8]) -> usize {
        record_bytes(frame.len()) as usize
    }

    /// Hands a frame to the peer, with its slot, and rings the peer's bell. The caller has checked the room.
    ///
    /// # Errors
    /// The lane broke: the frame may or may not have left.
    pub fn push(&mut self, slot: Option<u32>, frame: &[u8]) -> Result<(), TransportError> {
        let tag = slot.unwrap_or(NO_SLOT);
        match &mut self.frames {
            FramesTx::Ring { ring, peer_bell } => {
                ring.push(tag, frame)
                    .expect("room was checked, and only this side fills the ring");
                peer_bell.ring();
                Ok(())
            }
            FramesTx::Channel(channel) => channel.push(tag, frame),
        }
    }
}

impl LaneRx {
    pub(crate) fn over_memory(end: &SharedEnd) -> Self {
        let words = Words::shared(&end.region, end.place);
        let (ring_words, ring_data) = ring_at(end);
        let ring = RingReceiver::new(ring_words, ring_data, MAX_FRAME_BYTES);
        let slots = InSlots::new(words, Credits::Bell(end.peer_bell.clone()));
        Self::new(end.peer, slots, FramesRx::Ring(ring))
    }

    fn new(peer: Rank, slots: InSlots, frames: FramesRx) -> Self {
        Self {
            peer,
            slots: Arc::new(slots),
            frames,
            announced: NO_SLOT,
        }
    }

    /// Returns the rank at the other end.
    pub fn peer(&self) -> Rank {
        self.peer
    }

    /// Copies the next frame into `inbox`. Returns false if there is none.
    ///
    /// # Errors
    /// The lane is broken, or the peer wrote an impossible value.
    pub fn poll(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        let tag = match &mut self.frames {
            FramesRx::Ring(ring) => ring.pop(inbox).map_err(|e| {
                misbehaved(
                    self.peer,
                    format!(
                        "its header ring claims {} bytes in use and a record of {}",
                        e.used, e.record
                    ),
                )
            })?,
            FramesRx::Channel(channel) => channel.pop(inbox)?,
        };
        self.announced = tag.unwrap_or(NO_SLOT);
        Ok(tag.is_some())
    }

    /// Takes the slot that the last polled frame hands over, for the payload that its header announces. Returns the
    /// number of the slot and the bytes to expect.
    ///
    /// # Errors
    /// The peer announced a payload that the edge cannot hold, or a slot that this side may not read.
    pub fn take_announced(
        &mut self,
        header: &Matched<'_>,
        capacity: usize,
    ) -> Result<(u32, usize), TransportError> {
        let slot = std::mem::replace(&mut self.announced, NO_SLOT);
        let bytes = header.header().payload_bytes();
        let len = usize::try_from(bytes).ok().filter(|len| *len <= capacity);
        let Some(len) = len else {
            return Err(misbehaved(
                self.peer,
                format!("it announced a payload of {bytes} bytes for a slot of {capacity}"),
            ));
        };
        self.slots.take(slot).map_err(|why| {
            let what = match why {
                BadSlot::NoSuchSlot => format!("it announced a payload in slot {slot}"),
                BadSlot::NotHandedOver => format!("it announced slot {slot}, which it still holds"),
            };
            misbehaved(self.peer, what)
        })?;
        Ok((slot, len))
    }
}

impl LaneEnd {
    /// Returns this end of a lane whose rings lie in a region.
    pub fn over_memory(end: &SharedEnd, is_sender: bool) -> Self {
        if is_sender {
            Self::Out(LaneTx::over_memory(end))
        } else {
            Self::In(LaneRx::over_memory(end))
        }
    }

    /// Returns the rank at the other end.
    pub fn peer(&self) -> Rank {
        match self {
            Self::Out(lane) => lane.peer,
            Self::In(lane) => lane.peer,
        }
    }
}

impl From<InvalidWord> for TransportError {
    fn from(invalid: InvalidWord) -> Self {
        let InvalidWord { peer, slot, word } = invalid;
        misbehaved(
            peer,
            format!("it wrote {word} into the word of slot {slot}, which it does not have"),
        )
    }
}
