//! A lane over the control channel. Each message is a tag byte, the number of the edge and the number of a slot, four
//! bytes each with the least significant first, and, for a frame, the frame.
//!
//! Hazard: the peer is authenticated but may still be wrong: it may return a slot that it does not have, hand over a
//! slot twice, or send frames without end. Or it may not read, so that the thread that writes to it waits. Guarantee:
//! each violation is an error that names the peer, and the number of messages that wait to be read is bounded. One
//! thread writes for all lanes to a peer, so neither a call of the driver nor the drop of a lease waits for the peer.
//! The messages that wait to be written are bounded too, and the lanes break if the peer takes nothing for
//! [`crate::times::LANE_SEND_WITHIN`]. This rank's goodbye is sent after all messages left to that thread, because the
//! peer reads nothing behind it.

use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pp_contract::{MAX_FRAME_BYTES, Rank};

use super::words::{OutSlots, Words};
use crate::bell::Bell;
use crate::error::{TransportError, misbehaved};
use crate::shm::layout::EdgeEnd;
use pp_meet::Announced;
use pp_meet::control::{ControlSender, MAX_MESSAGE_BYTES, Message};
use pp_words::ring::NO_SLOT;
use pp_words::slots::{Producer, SlotWords, is_with_consumer, move_to_consumer, move_to_producer};

const FRAME: u8 = 1;
const CREDIT: u8 = 2;
const PREFIX_BYTES: usize = 9;
const _: () = assert!(PREFIX_BYTES + MAX_FRAME_BYTES <= MAX_MESSAGE_BYTES);

/// The most messages of an edge that may wait to be read, and to be written. An edge has at most as many frames with
/// payload, or credits, as slots, and a handful of frames without.
const MOST_WAITING: usize = 512;

/// The state that all lanes to a peer share with their leases and the receiving thread.
#[derive(Debug)]
struct Shared {
    peer: Rank,
    /// The most messages that may wait to be written.
    most_waiting: usize,
    sender: ControlSender,
    /// The queue to the thread that writes. The thread ends with the last sender of the queue.
    queue: SyncSender<Job>,
    broken: Arc<Broken>,
}

/// The reason why the lanes cannot be used any more.
type Broken = OnceLock<String>;

/// The next message of the thread that writes. A goodbye on the channel waits for it.
type Job = (Vec<u8>, Announced);

impl Shared {
    /// Queues a message for the thread that writes.
    fn send(&self, body: Vec<u8>) -> Result<(), TransportError> {
        self.check()?;
        if self.queue.try_send((body, self.sender.announce())).is_err() {
            let _ = self
                .broken
                .set(format!("{} messages wait to be sent", self.most_waiting));
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

/// Writes the messages in their order until one fails.
fn write(queue: &Receiver<Job>, sender: &ControlSender, broken: &Broken, bell: &Bell) {
    for (body, announced) in queue {
        if broken.get().is_some() {
            continue;
        }
        let deadline = Instant::now() + crate::times::LANE_SEND_WITHIN;
        if let Err(error) = sender.send(&Message::Frame(&body), deadline) {
            let _ = broken.set(error.to_string());
            bell.ring();
        }
        drop(announced);
    }
}

/// The sending half of a lane. It marks each message with the number of its edge.
#[derive(Debug)]
pub(super) struct ChannelTx {
    shared: Arc<Shared>,
    edge: u32,
}

impl ChannelTx {
    pub(super) fn check(&self) -> Result<(), TransportError> {
        self.shared.check()
    }

    pub(super) fn push(&self, slot: u32, frame: &[u8]) -> Result<(), TransportError> {
        self.shared.send(self.message(FRAME, slot, frame))
    }

    /// Tells the peer that it has the slot back.
    pub(super) fn tell(&self, slot: u32) {
        // The lane reports an error at its next call. A lease that is dropped cannot report one.
        let _ = self.shared.send(self.message(CREDIT, slot, &[]));
    }

    fn message(&self, tag: u8, slot: u32, frame: &[u8]) -> Vec<u8> {
        let mut body = Vec::with_capacity(PREFIX_BYTES + frame.len());
        body.push(tag);
        body.extend_from_slice(&self.edge.to_le_bytes());
        body.extend_from_slice(&slot.to_le_bytes());
        body.extend_from_slice(frame);
        body
    }
}

/// The receiving half of a lane, which holds the frames that have arrived.
#[derive(Debug)]
pub(super) struct ChannelRx {
    shared: Arc<Shared>,
    waiting: Receiver<(u32, Vec<u8>)>,
}

impl ChannelRx {
    pub(super) fn pop(&self, inbox: &mut Vec<u8>) -> Result<Option<u32>, TransportError> {
        match self.waiting.try_recv() {
            Ok((slot, body)) => {
                inbox.clear();
                inbox.extend_from_slice(&body[PREFIX_BYTES..]);
                Ok(Some(slot))
            }
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => {
                self.shared.check().map(|()| None)
            }
        }
    }
}

/// The parts of a lane's end.
pub(super) enum Side {
    Out {
        slots: Arc<OutSlots>,
        channel: ChannelTx,
    },
    In {
        words: Words,
        credits: ChannelTx,
        frames: ChannelRx,
    },
}

/// Starts the thread that writes, and returns the parts for each of `edges`, in their order.
pub(super) fn open(
    sender: ControlSender,
    bell: Bell,
    edges: &[EdgeEnd],
) -> Result<(Vec<Side>, Inlet), TransportError> {
    let peer = sender.peer();
    let most_waiting = MOST_WAITING * edges.len();
    let (queue, jobs) = sync_channel(most_waiting);
    let broken = Arc::new(Broken::new());
    let shared = Arc::new(Shared {
        peer,
        most_waiting,
        sender: sender.clone(),
        queue,
        broken: Arc::clone(&broken),
    });
    let (mut sides, mut ports) = (Vec::new(), Vec::new());
    for end in edges {
        end.shape.capacity()?;
        let words = Words::own(end.shape.slots());
        let channel = ChannelTx {
            shared: Arc::clone(&shared),
            edge: end.edge,
        };
        let port = if end.is_sender {
            let slots = Arc::new(Producer::new(words, peer));
            sides.push(Side::Out {
                slots: Arc::clone(&slots),
                channel,
            });
            Port::Credits(slots)
        } else {
            let (queue, waiting) = sync_channel(MOST_WAITING);
            sides.push(Side::In {
                words: words.clone(),
                credits: channel,
                frames: ChannelRx {
                    shared: Arc::clone(&shared),
                    waiting,
                },
            });
            Port::Frames { words, queue }
        };
        ports.push((end.edge, port));
    }
    let inlet = Inlet {
        shared,
        ports: ports.into(),
        bell: bell.clone(),
    };
    std::thread::Builder::new()
        .name("pp-lane".into())
        .spawn(move || write(&jobs, &sender, &broken, &bell))
        .map_err(|error| TransportError::Lane {
            peer,
            why: format!("no thread for it: {error}"),
        })?;
    Ok((sides, inlet))
}

/// What the peer may send for an edge.
#[derive(Debug)]
enum Port {
    /// This rank sends, and the peer returns its slots.
    Credits(Arc<OutSlots>),
    /// This rank receives frames.
    Frames {
        words: Words,
        queue: SyncSender<(u32, Vec<u8>)>,
    },
}

/// The inlet of the lanes to a peer. The thread that receives from the control channel passes the body of each
/// [`Message::Frame`] to it. Cloning gives another handle to the same lanes.
#[derive(Clone, Debug)]
pub struct Inlet {
    shared: Arc<Shared>,
    ports: Arc<[(u32, Port)]>,
    bell: Bell,
}

impl Inlet {
    /// Handles the body of one message and rings the bell of this rank.
    ///
    /// # Errors
    /// The peer broke the rules of the lanes. No part of the message was used.
    pub fn deliver(&self, body: &[u8]) -> Result<(), TransportError> {
        let wrong = |why: String| misbehaved(self.shared.peer, why);
        let Some((prefix, frame)) = body.split_first_chunk::<PREFIX_BYTES>() else {
            return Err(wrong(format!("a lane message of {} bytes", body.len())));
        };
        let [tag, e0, e1, e2, e3, slot @ ..] = *prefix;
        let edge = u32::from_le_bytes([e0, e1, e2, e3]);
        let slot = u32::from_le_bytes(slot);
        let port = self.ports.iter().find(|(number, _)| *number == edge);
        let Some((_, port)) = port else {
            return Err(wrong(format!(
                "a lane message for edge {edge}, which is not between the two"
            )));
        };
        match (tag, port) {
            (FRAME, Port::Frames { words, queue }) => {
                take_frame(words, queue, slot, body).map_err(wrong)?;
            }
            (CREDIT, Port::Credits(slots)) if frame.is_empty() => {
                take_credit(slots.words(), slot).map_err(wrong)?;
            }
            (FRAME, _) => {
                return Err(wrong(format!(
                    "a frame on edge {edge}, on which it receives"
                )));
            }
            (CREDIT, Port::Credits(_)) => return Err(wrong("a credit with more behind it".into())),
            (CREDIT, _) => {
                return Err(wrong(format!("a credit on edge {edge}, on which it sends")));
            }
            _ => return Err(wrong(format!("a lane message with tag {tag}"))),
        }
        self.bell.ring();
        Ok(())
    }
}

fn take_frame(
    words: &Words,
    queue: &SyncSender<(u32, Vec<u8>)>,
    slot: u32,
    body: &[u8],
) -> Result<(), String> {
    let frame = body.len() - PREFIX_BYTES;
    if frame > MAX_FRAME_BYTES {
        return Err(format!(
            "a frame of {frame} bytes; {MAX_FRAME_BYTES} are allowed"
        ));
    }
    if slot != NO_SLOT {
        if slot >= words.depth() {
            return Err(format!("a frame with slot {slot}, which does not exist"));
        }
        if is_with_consumer(words.word(slot)) {
            return Err(format!("slot {slot} handed over twice"));
        }
        // The word moves first, so that the thread that reads the frame finds the slot handed over.
        move_to_consumer(words.word(slot));
    }
    match queue.try_send((slot, body.to_vec())) {
        Ok(()) => Ok(()),
        Err(TrySendError::Full(_)) => Err(format!("{MOST_WAITING} frames wait to be read")),
        // The end was dropped, so no thread reads. The peer learns the reason on its channel.
        Err(TrySendError::Disconnected(_)) => Ok(()),
    }
}

fn take_credit(words: &Words, slot: u32) -> Result<(), String> {
    if slot >= words.depth() {
        return Err(format!("a credit for slot {slot}, which does not exist"));
    }
    if !is_with_consumer(words.word(slot)) {
        return Err(format!("a credit for slot {slot}, which it does not have"));
    }
    move_to_producer(words.word(slot));
    Ok(())
}
