//! The lane beside an edge: header frames, and who owns which slot.
//!
//! Hazard: a payload whose header never came, a slot with two owners. Guarantee: a frame arrives
//! whole, in order, and with the number of the slot it hands over; a credit comes back once for
//! each slot that was handed over. What moves the payload is the backend's own: the lane never
//! sees a byte of it.
//!
//! Two ways to carry it, behind one type: ranks of one host share the rings and the slot words in
//! a memfd region (the host backend's own); ranks of different hosts use the authenticated
//! control channel, where a tag byte says whether a message is a frame or a credit.

mod channel;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod fuzz;
mod words;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use pp_contract::{MAX_FRAME_BYTES, Matched, Rank};

pub use self::channel::Inlet;
use self::channel::{ChannelFrames, Credits};
pub(crate) use self::words::{OutSlots, Words};
use crate::bell::Bell;
use crate::control::ControlSender;
use crate::error::{TransportError, misbehaved};
use crate::host::layout::{Direction, EdgeShape, Layout};
use crate::host::region::{BytesAt, WordsAt};
use crate::host::ring::{NO_SLOT, RingReceiver, RingSender};
use crate::host::shared::SharedEnd;
use crate::host::slots::{Consumer, Nonsense, NotOurs, Producer};

/// The slots of the incoming edge, and how the peer learns that it has one back.
#[derive(Debug)]
pub(crate) struct InSlots {
    pub(crate) slots: Consumer<Words>,
    /// Slots that were taken and not given back.
    taken: AtomicU32,
    credits: Credits,
}

impl InSlots {
    fn new(words: Words, credits: Credits) -> Self {
        Self {
            slots: Consumer::new(words),
            taken: AtomicU32::new(0),
            credits,
        }
    }

    fn take(&self, slot: u32) -> Result<(), NotOurs> {
        self.slots.take(slot)?;
        self.taken.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Whether the peer handed over a slot that this side has not taken: its payload is on its way,
    /// or waits to be received.
    pub(crate) fn has_untaken(&self) -> bool {
        let here = (0..self.slots.depth()).filter(|&slot| self.slots.is_here(slot));
        here.count() as u32 > self.taken.load(Ordering::Relaxed)
    }

    /// Gives the slot back to the peer, who may write it at once. From any thread.
    pub(crate) fn give_back(&self, slot: u32) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
        self.slots.give_back(slot);
        self.credits.tell(slot);
    }
}

/// Frames and slot credits between this rank and one peer. In the hands of one thread; what
/// leases need of it is shared.
///
/// # If dropped
/// Nothing more is sent or received. Leases stay valid and give their slots back as before.
#[derive(Debug)]
pub struct Lane {
    peer: Rank,
    bell: Bell,
    pub(crate) out: Arc<OutSlots>,
    pub(crate) incoming: Arc<InSlots>,
    frames: Frames,
    /// The slot that the frame polled last names.
    announced: u32,
}

/// How frames travel.
#[derive(Debug)]
enum Frames {
    Ring {
        tx: RingSender<WordsAt, BytesAt>,
        rx: RingReceiver<WordsAt, BytesAt>,
        peer_bell: Bell,
    },
    Channel(ChannelFrames),
}

impl Lane {
    /// Both ends in one process. The driver of the lower end sleeps on `low`.
    ///
    /// # Errors
    /// A depth is 0 or too large, or the kernel has no memory.
    pub fn pair(up_depth: u32, down_depth: u32, low: Bell) -> Result<(Self, Self), TransportError> {
        let (lower, higher) = SharedEnd::pair(bare(up_depth), bare(down_depth), low)?;
        Ok((Self::over_memory(&lower), Self::over_memory(&higher)))
    }

    /// A lane to a rank on another host: frames and credits go over the control channel. The
    /// [`Inlet`] is for the thread that receives there: it hands in every
    /// [`Message::Frame`](crate::control::Message::Frame).
    ///
    /// # Errors
    /// A depth is 0 or too large, or there is no thread for the lane.
    pub fn over_channel(
        sender: ControlSender,
        bell: Bell,
        out_depth: u32,
        in_depth: u32,
    ) -> Result<(Self, Inlet), TransportError> {
        // The layout knows what depths there can be.
        Layout::new(bare(out_depth), bare(in_depth))?;
        let peer = sender.peer();
        let out = Arc::new(Producer::new(Words::own(out_depth), peer));
        let (frames, inlet, credits) =
            ChannelFrames::new(sender, bell.clone(), Arc::clone(&out), in_depth)?;
        let incoming = Arc::new(InSlots::new(inlet.incoming.clone(), credits));
        let lane = Self {
            peer,
            bell,
            out,
            incoming,
            frames: Frames::Channel(frames),
            announced: NO_SLOT,
        };
        Ok((lane, inlet))
    }

    pub(crate) fn over_memory(end: &SharedEnd) -> Self {
        let SharedEnd {
            region,
            outgoing,
            incoming,
            ..
        } = end;
        let ring = |d: &Direction| {
            let words = WordsAt::new(region, d.ring_words);
            (words, BytesAt::new(region, d.ring_data, d.ring_bytes))
        };
        let ((tx_words, tx_data), (rx_words, rx_data)) = (ring(outgoing), ring(incoming));
        Self {
            peer: end.peer,
            bell: end.bell.clone(),
            out: Arc::new(Producer::new(Words::shared(region, *outgoing), end.peer)),
            incoming: Arc::new(InSlots::new(
                Words::shared(region, *incoming),
                Credits::Bell(end.peer_bell.clone()),
            )),
            frames: Frames::Ring {
                tx: RingSender::new(tx_words, tx_data),
                rx: RingReceiver::new(rx_words, rx_data, MAX_FRAME_BYTES),
                peer_bell: end.peer_bell.clone(),
            },
            announced: NO_SLOT,
        }
    }

    /// The rank at the other end.
    pub fn peer(&self) -> Rank {
        self.peer
    }

    /// The bell that rings when a frame or a credit is there.
    pub fn bell(&self) -> &Bell {
        &self.bell
    }

    /// That a frame of any size can be pushed now.
    ///
    /// # Errors
    /// [`TransportError::Backpressure`]; the lane is broken.
    pub(crate) fn check_room(&mut self) -> Result<(), TransportError> {
        match &mut self.frames {
            Frames::Ring { tx, .. } => {
                if tx.has_room(MAX_FRAME_BYTES) {
                    return Ok(());
                }
                Err(TransportError::Backpressure { peer: self.peer })
            }
            Frames::Channel(frames) => frames.check(),
        }
    }

    /// Hands a frame to the peer, with the slot that goes with it, and rings. Room was checked.
    ///
    /// # Errors
    /// The lane broke: the frame may or may not have left.
    pub(crate) fn push(&mut self, slot: Option<u32>, frame: &[u8]) -> Result<(), TransportError> {
        let tag = slot.unwrap_or(NO_SLOT);
        match &mut self.frames {
            Frames::Ring { tx, peer_bell, .. } => {
                tx.push(tag, frame)
                    .expect("room was checked, and only this side fills the ring");
                peer_bell.ring();
                Ok(())
            }
            Frames::Channel(frames) => frames.push(tag, frame),
        }
    }

    /// Waits until everything that was pushed has left, the credits too, or cannot leave: nothing
    /// does any more once this rank says goodbye on the channel that carries them.
    pub(crate) fn flush(&self, deadline: Instant) {
        if let Frames::Channel(frames) = &self.frames {
            frames.flush(deadline);
        }
    }

    /// Copies the next frame into `inbox`; false when there is none.
    ///
    /// # Errors
    /// The lane is broken, or the peer wrote what cannot be.
    pub(crate) fn poll(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        let tag = match &mut self.frames {
            Frames::Ring { rx, .. } => rx.pop(inbox).map_err(|e| {
                misbehaved(
                    self.peer,
                    format!(
                        "its header ring claims {} bytes in use and a record of {}",
                        e.used, e.record
                    ),
                )
            })?,
            Frames::Channel(frames) => frames.pop(inbox)?,
        };
        self.announced = tag.unwrap_or(NO_SLOT);
        Ok(tag.is_some())
    }

    /// Takes the slot that the frame polled last hands over, for the payload that its header
    /// announces: its number, and how many bytes to expect.
    ///
    /// # Errors
    /// The peer announced what the edge cannot hold, or a slot that is not ours to read.
    pub(crate) fn take_announced(
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
        self.incoming.take(slot).map_err(|why| {
            let what = match why {
                NotOurs::NoSuchSlot => format!("it announced a payload in slot {slot}"),
                NotOurs::NotHandedOver => format!("it announced slot {slot}, which it still holds"),
            };
            misbehaved(self.peer, what)
        })?;
        Ok((slot, len))
    }
}

/// An edge whose slots lie elsewhere.
pub(crate) fn bare(depth: u32) -> EdgeShape {
    EdgeShape {
        depth,
        slot_bytes: 0,
    }
}

impl From<Nonsense> for TransportError {
    fn from(nonsense: Nonsense) -> Self {
        let Nonsense { peer, slot, word } = nonsense;
        misbehaved(
            peer,
            format!("it wrote {word} into the word of slot {slot}, which it does not have"),
        )
    }
}
