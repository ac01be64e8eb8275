//! A lane over the control channel: each message is a tag byte, a slot number in four bytes,
//! least significant first, and for a frame the frame.
//!
//! Hazard: the peer is authenticated but may still be wrong: a credit for a slot it does not
//! have, a slot handed over twice, frames without end. Or it does not read, and the thread that
//! writes to it waits. Guarantee: each of the first is an error that names the peer, and what waits
//! to be read is bounded. A thread of the lane's own writes, so no call of the driver waits for the
//! peer, nor does the drop of a lease; what waits to be written is bounded, and the lane is broken
//! when the peer takes nothing for [`crate::times::LANE_SEND_WITHIN`].

use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pp_contract::{MAX_FRAME_BYTES, Rank};

use super::words::{OutSlots, Words};
use crate::bell::Bell;
use crate::control::{ControlSender, MAX_MESSAGE_BYTES, Message};
use crate::error::{TransportError, misbehaved};
use crate::host::ring::NO_SLOT;
use crate::host::slots::{SlotWords, is_with_consumer, move_to_consumer, move_to_producer};

const FRAME: u8 = 1;
const CREDIT: u8 = 2;
const PREFIX_BYTES: usize = 5;
const _: () = assert!(PREFIX_BYTES + MAX_FRAME_BYTES <= MAX_MESSAGE_BYTES);

/// Messages that may wait to be read, and to be written. There are at most as many frames with a
/// payload, and as many credits, as slots, and a handful of frames without.
const MOST_WAITING: usize = 256;

/// What both directions of the lane share with leases and the receiving thread.
#[derive(Debug)]
pub(super) struct Shared {
    peer: Rank,
    /// To the thread that writes, which ends with the last of these.
    queue: SyncSender<Job>,
    broken: Arc<Broken>,
}

/// Why the lane cannot be used any more.
type Broken = OnceLock<String>;

/// What the thread that writes does next.
#[derive(Debug)]
enum Job {
    Send(Vec<u8>),
    /// Say that all before this was done.
    Answer(SyncSender<()>),
}

impl Shared {
    /// Leaves a message to the thread that writes.
    fn send(&self, body: Vec<u8>) -> Result<(), TransportError> {
        self.check()?;
        if self.queue.try_send(Job::Send(body)).is_err() {
            let _ = self
                .broken
                .set(format!("{MOST_WAITING} messages wait to be sent"));
        }
        self.check()
    }

    fn check(&self) -> Result<(), TransportError> {
        self.broken.get().map_or(Ok(()), |why| {
            Err(TransportError::Lane {
                peer: self.peer,
                why: why.clone(),
            })
        })
    }
}

/// Writes messages in their order, until one fails.
fn write(queue: &Receiver<Job>, sender: &ControlSender, broken: &Broken, bell: &Bell) {
    for job in queue {
        match job {
            Job::Send(_) if broken.get().is_some() => {}
            Job::Send(body) => {
                let deadline = Instant::now() + crate::times::LANE_SEND_WITHIN;
                if let Err(error) = sender.send(&Message::Frame(&body), deadline) {
                    let _ = broken.set(error.to_string());
                    bell.ring();
                }
            }
            Job::Answer(to) => drop(to.send(())),
        }
    }
}

fn message(tag: u8, slot: u32, frame: &[u8]) -> Vec<u8> {
    let mut body = Vec::with_capacity(PREFIX_BYTES + frame.len());
    body.push(tag);
    body.extend_from_slice(&slot.to_le_bytes());
    body.extend_from_slice(frame);
    body
}

/// How the peer learns that a slot is its own again.
#[derive(Debug)]
pub(super) enum Credits {
    /// It sees the slot's word; the bell says when to look.
    Bell(Bell),
    /// It is told.
    Channel(Arc<Shared>),
}

impl Credits {
    pub(super) fn tell(&self, slot: u32) {
        match self {
            Self::Bell(bell) => bell.ring(),
            Self::Channel(shared) => {
                // The lane says what is wrong at its next call; a lease that is dropped cannot.
                let _ = shared.send(message(CREDIT, slot, &[]));
            }
        }
    }
}

/// The frames of a lane over the control channel.
#[derive(Debug)]
pub(super) struct ChannelFrames {
    shared: Arc<Shared>,
    waiting: Receiver<(u32, Vec<u8>)>,
}

impl ChannelFrames {
    pub(super) fn new(
        sender: ControlSender,
        bell: Bell,
        out: Arc<OutSlots>,
        in_depth: u32,
    ) -> Result<(Self, Inlet, Credits), TransportError> {
        let (queue, jobs) = sync_channel(MOST_WAITING);
        let broken = Arc::new(Broken::new());
        let shared = Arc::new(Shared {
            peer: sender.peer(),
            queue,
            broken: Arc::clone(&broken),
        });
        let (queue, waiting) = sync_channel(MOST_WAITING);
        let inlet = Inlet {
            shared: Arc::clone(&shared),
            queue,
            out,
            incoming: Words::own(in_depth),
            bell: bell.clone(),
        };
        let credits = Credits::Channel(Arc::clone(&shared));
        std::thread::Builder::new()
            .name("pp-lane".into())
            .spawn(move || write(&jobs, &sender, &broken, &bell))
            .map_err(|error| TransportError::Lane {
                peer: shared.peer,
                why: format!("no thread for it: {error}"),
            })?;
        Ok((Self { shared, waiting }, inlet, credits))
    }

    pub(super) fn check(&self) -> Result<(), TransportError> {
        self.shared.check()
    }

    pub(super) fn push(&self, tag: u32, frame: &[u8]) -> Result<(), TransportError> {
        self.shared.send(message(FRAME, tag, frame))
    }

    /// Waits until everything that was pushed and told so far was written, or cannot be.
    pub(super) fn flush(&self, deadline: Instant) {
        let (say, done) = sync_channel(1);
        if self.shared.queue.try_send(Job::Answer(say)).is_ok() {
            let left = deadline.saturating_duration_since(Instant::now());
            let _ = done.recv_timeout(left);
        }
    }

    pub(super) fn pop(&self, inbox: &mut Vec<u8>) -> Result<Option<u32>, TransportError> {
        match self.waiting.try_recv() {
            Ok((tag, body)) => {
                inbox.clear();
                inbox.extend_from_slice(&body[PREFIX_BYTES..]);
                Ok(Some(tag))
            }
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => self.check().map(|()| None),
        }
    }
}

/// Where the thread that receives from the control channel hands in what came as
/// [`Message::Frame`]. Cloning gives another handle to the same lane.
#[derive(Clone, Debug)]
pub struct Inlet {
    shared: Arc<Shared>,
    queue: SyncSender<(u32, Vec<u8>)>,
    out: Arc<OutSlots>,
    pub(super) incoming: Words,
    bell: Bell,
}

impl Inlet {
    /// Takes in the body of one message and rings the lane's bell.
    ///
    /// # Errors
    /// The peer broke the rules of the lane; nothing of the message was used.
    pub fn deliver(&self, body: &[u8]) -> Result<(), TransportError> {
        let wrong = |why: String| misbehaved(self.shared.peer, why);
        let Some((prefix, frame)) = body.split_first_chunk::<PREFIX_BYTES>() else {
            return Err(wrong(format!("a lane message of {} bytes", body.len())));
        };
        let [tag, slot @ ..] = *prefix;
        let slot = u32::from_le_bytes(slot);
        match tag {
            FRAME => self.take_frame(slot, body).map_err(wrong)?,
            CREDIT if frame.is_empty() => self.take_credit(slot).map_err(wrong)?,
            CREDIT => return Err(wrong("a credit with more behind it".into())),
            _ => return Err(wrong(format!("a lane message with tag {tag}"))),
        }
        self.bell.ring();
        Ok(())
    }

    fn take_frame(&self, slot: u32, body: &[u8]) -> Result<(), String> {
        let frame = body.len() - PREFIX_BYTES;
        if frame > MAX_FRAME_BYTES {
            return Err(format!(
                "a frame of {frame} bytes; {MAX_FRAME_BYTES} are allowed"
            ));
        }
        if slot != NO_SLOT {
            if slot >= self.incoming.depth() {
                return Err(format!("a frame with slot {slot}, which does not exist"));
            }
            if is_with_consumer(self.incoming.word(slot)) {
                return Err(format!("slot {slot} handed over twice"));
            }
        }
        // The word moves first: the thread that reads the frame finds the slot handed over.
        if slot != NO_SLOT {
            move_to_consumer(self.incoming.word(slot));
        }
        match self.queue.try_send((slot, body.to_vec())) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => Err(format!("{MOST_WAITING} frames wait to be read")),
            // The lane is gone, and no thread reads: the peer will learn why on its channel.
            Err(TrySendError::Disconnected(_)) => Ok(()),
        }
    }

    fn take_credit(&self, slot: u32) -> Result<(), String> {
        let words = self.out.words();
        if slot >= words.depth() {
            return Err(format!("a credit for slot {slot}, which does not exist"));
        }
        if !is_with_consumer(words.word(slot)) {
            return Err(format!("a credit for slot {slot}, which it does not have"));
        }
        move_to_producer(words.word(slot));
        Ok(())
    }
}
