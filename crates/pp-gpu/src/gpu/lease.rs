//! Slots in the hands of stages, and slots that move.
//!
//! A lease is not the memory but the right to issue work on it: its holder names a stream, and
//! whatever is issued there is ordered before the send, or before the slot goes back.

use std::cell::RefCell;
use std::sync::Arc;

use super::part;
use super::slots::{RxPool, Slot, TxPool};
use pp_device::{CudaError, DevicePtr, Stream};
use pp_edges::edge::check_payload;
use pp_edges::error::TransportError;
use pp_edges::in_flight::{Part, Resend, Submission};

impl Slot {
    /// Copies the first `bytes` of the slot to the other device, on the edge's stream and after the work on the slot. False if the
    /// edge has no remote end, or is gone.
    ///
    /// # Errors
    /// The driver refuses; if part of the copy may have been issued, the slot is never leased again.
    ///
    /// # Safety
    /// The slot has room for the bytes, the receiver has returned its slot, and no work is issued on the slot before the other
    /// device has read it. `stream` is that of the edge.
    pub(crate) unsafe fn put(
        &self,
        bytes: usize,
        writer: Option<&Stream>,
        stream: &Stream,
    ) -> Result<bool, TransportError> {
        let Some(far) = &self.far else {
            return Ok(false);
        };
        self.check()?;
        self.follow(writer, stream)?;
        let number = far.next();
        self.begin_move();
        let from = DevicePtr {
            len: bytes,
            ..self.ptr()
        };
        // SAFETY: the caller's promise; the stream is ordered behind what wrote the slot, which is freed behind the stream.
        let put = unsafe { far.put(from, number, stream) };
        if !matches!(put, Ok(true)) {
            self.give_up();
        }
        Ok(put?)
    }

    /// Notes that a payload comes from the other device.
    pub(crate) fn expect(&self) {
        if let Some(far) = &self.far {
            far.next();
        }
        self.begin_move();
    }
}

/// A slot of an edge, to be written by work on a device.
///
/// # If dropped
/// The slot is free again; nothing was sent. The work of its next lease is ordered behind the work
/// that was issued on it. A slot that was sent ahead is lost to the pool for as long as the edge
/// lives.
#[derive(Debug)]
pub struct DeviceTx {
    pub(crate) pool: Arc<TxPool>,
    pub(crate) slot: u32,
    /// The stream that wrote last, whose work has to be waited for before the slot is sent.
    pub(crate) writer: Option<Stream>,
    /// So many bytes are on their way, or there, before their message.
    pub(crate) ahead: Option<usize>,
    /// Nothing moves before its message.
    is_held: bool,
    /// The slot was handed over: the lease has ended.
    is_over: bool,
}

impl DeviceTx {
    pub(crate) fn new(pool: &Arc<TxPool>, slot: u32) -> Self {
        Self {
            pool: Arc::clone(pool),
            slot,
            writer: pool.slot(slot).take_worker(),
            ahead: None,
            is_held: false,
            is_over: false,
        }
    }

    /// Bytes that fit the slot.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.pool.capacity
    }

    /// Runs `issue`, which issues work that writes the slot to `stream`. The send is ordered behind
    /// it; so is work that is issued with another stream later.
    ///
    /// `issue` gets the whole slot, which holds what an earlier chunk left there. The address is
    /// good for work issued to `stream` inside `issue`, and for nothing else.
    ///
    /// # Errors
    /// What `issue` says; the driver refuses. The slot came back from a send that failed, and NCCL
    /// may read it yet: it can only be sent again, from a copy. It was sent ahead.
    pub fn write_on<R, E: From<TransportError>>(
        &mut self,
        stream: &Stream,
        issue: impl FnOnce(DevicePtr) -> Result<R, E>,
    ) -> Result<R, E> {
        let slot = self.pool.slot(self.slot);
        slot.check()?;
        if self.ahead.is_some() {
            return Err(TransportError::SentAhead.into());
        }
        slot.write_on(&mut self.writer, stream, || issue(slot.ptr()))
    }

    /// Lets the first `bytes` of the slot move as soon as the work that was issued on it is done, before the message that
    /// tells of them leaves. So the payload is on its way when the driver sees the work done. No work may be issued on the
    /// slot after that, and a message with just these bytes must be sent with it. Does nothing where the edge cannot (over
    /// NCCL, and within a rank), or is dead: the send says so.
    ///
    /// # Errors
    /// The slot has less room, or was sent ahead; the driver refuses.
    pub fn send_ahead(&mut self, bytes: usize) -> Result<(), TransportError> {
        if bytes == 0 || self.is_held || self.pool.is_dead() {
            return Ok(());
        }
        check_payload(bytes as u64, Some((true, self.capacity())))?;
        if self.ahead.is_some() {
            return Err(TransportError::SentAhead);
        }
        self.put(bytes).map(drop)
    }

    /// Lets nothing of the slot move before its message, for a payload that is still to be changed, as by a fault that is made
    /// on purpose: [`Self::send_ahead`] does nothing.
    pub const fn hold_back(&mut self) {
        self.is_held = true;
    }

    /// Issues the copy of the first `bytes` to the other device; there is room for them. False if the edge has no remote end, or
    /// is gone.
    pub(crate) fn put(&mut self, bytes: usize) -> Result<bool, TransportError> {
        let slot = self.pool.slot(self.slot);
        // SAFETY: the callers have checked that there is room. A slot is leased only when the receiver has returned it; this
        // lease issues no work on it any more, and no other gets it before it was read.
        let put = unsafe { slot.put(bytes, self.writer.as_ref(), &self.pool.stream) }?;
        self.ahead = put.then_some(bytes);
        Ok(put)
    }

    /// Orders `stream` behind the work that was issued on the slot.
    pub(crate) fn follow_on(&self, stream: &Stream) -> Result<(), CudaError> {
        self.pool
            .slot(self.slot)
            .follow(self.writer.as_ref(), stream)
    }

    /// Ends the lease without freeing the slot: it is in flight now.
    pub(crate) fn into_sending(mut self) -> Sending {
        self.is_over = true;
        self.pool.lane.submit(self.slot);
        Sending {
            pool: Arc::clone(&self.pool),
            slot: self.slot,
        }
    }
}

impl Drop for DeviceTx {
    fn drop(&mut self) {
        if !self.is_over {
            self.pool.slot(self.slot).leave_worker(self.writer.take());
            self.pool.lane.give_up(self.slot);
        }
    }
}

/// A slot that was handed over: the device sends it, then the peer has it. Or the next stage of this
/// rank has it, and no device sends it.
///
/// Done when the device has sent it *and* the peer has given it back: the peer's word alone could
/// come before this device looks up from the memory, and the device's alone says nothing of the
/// peer (a send of less than 64 MiB ends with no receiver there).
#[derive(Debug)]
pub struct Sending {
    pool: Arc<TxPool>,
    pub(crate) slot: u32,
}

impl Sending {
    /// Its slot is written no more: what was sent may still be read.
    pub(crate) fn give_up(&self) {
        self.pool.slot(self.slot).give_up();
    }

    /// Takes the slot back after a failed send, for reading only. If NCCL may still own it, writing is
    /// refused.
    pub(crate) fn recall(self) -> DeviceTx {
        self.pool.lane.recall(self.slot);
        DeviceTx::new(&self.pool, self.slot)
    }
}

impl Submission for Sending {
    type Buffer = DeviceTx;

    fn is_done(&self) -> Result<bool, TransportError> {
        self.pool.check()?;
        let slot = self.pool.slot(self.slot);
        if self.pool.lane.has_come_back(self.slot)? && slot.has_moved()? {
            return slot.check().map(|()| true);
        }
        self.pool.poll().map(|()| false)
    }

    fn into_buffer(self) -> DeviceTx {
        self.pool.lane.redeem(self.slot);
        DeviceTx::new(&self.pool, self.slot)
    }

    fn orphan(self) {
        self.pool.lane.orphan(self.slot);
    }

    fn quarantine(self) {
        // The memory too: of a transfer that was cut short the device says that it is done.
        self.pool.slot(self.slot).give_up();
        self.pool.lane.quarantine(self.slot);
    }
}

impl Resend for Sending {
    fn copy_into(&self, parts: &[Part], slot: &mut DeviceTx) -> Result<(), TransportError> {
        let (sent, into) = (self.pool.capacity, slot.capacity());
        // All of them, before anything is issued.
        let parts = parts.iter().map(|part| part.within(sent, into));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        // The stream that sends the slot, where one does: so its send waits for nothing else.
        let stream = slot.pool.stream.clone();
        self.pool.slot(self.slot).reread_on(&stream, |from| {
            slot.write_on(&stream, |to| {
                parts.iter().try_for_each(|&(source, target, len)| {
                    let (from, to) = (part(from, source, len), part(to, target, len));
                    // SAFETY: both ranges lie inside their slots (checked). The slot that was sent
                    // is IN FLIGHT for as long as this submission exists, so no lease writes it,
                    // and NCCL only reads it. Once it is leased again, the work that writes it is
                    // ordered behind `work`, since this stream is left as its worker, and its
                    // memory is freed only behind `work`, which is recorded behind this copy. The
                    // other slot is leased, so it is another one, and the stream is ordered behind
                    // all that wrote it.
                    Ok(unsafe { stream.copy(from, to) }?)
                })
            })
        })
    }

    fn unsent(buffer: DeviceTx) -> Self {
        // Its work event stands behind what wrote it, as that of a slot that was sent.
        buffer.into_sending()
    }
}

/// A slot of an edge whose payload is there, to be read by work on a device.
///
/// # If dropped
/// The slot goes back to the sender when the work that reads it is done: at once, or in one of the
/// next calls of an edge with the same peer. If all those are gone by then the peer never gets it.
#[derive(Debug)]
pub struct DeviceRx {
    pool: Arc<RxPool>,
    slot: u32,
    len: usize,
    /// The stream that reads last.
    reader: RefCell<Option<Stream>>,
}

impl DeviceRx {
    pub(crate) fn new(pool: &Arc<RxPool>, slot: u32, len: usize) -> Self {
        Self {
            pool: Arc::clone(pool),
            slot,
            len,
            reader: RefCell::new(None),
        }
    }

    /// Bytes of the payload, as its header said.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none; a payload always has some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Runs `issue`, which issues work that reads the payload to `stream`. A payload of another rank
    /// is there already; one of this rank may still be written, and `stream` waits for that. Any
    /// number of streams may read it; the slot goes back when all have.
    ///
    /// The address is good for work issued to `stream` inside `issue`, and for nothing else.
    ///
    /// # Errors
    /// What `issue` says; the driver refuses.
    pub fn read_on<R, E: From<TransportError>>(
        &self,
        stream: &Stream,
        issue: impl FnOnce(DevicePtr) -> Result<R, E>,
    ) -> Result<R, E> {
        let slot = self.pool.pool.slot(self.slot);
        let payload = DevicePtr {
            len: self.len,
            ..slot.ptr()
        };
        if self.pool.pool.life.is_none() {
            return slot.reread_on(stream, |_| issue(payload));
        }
        slot.read_on(&self.reader, stream, || issue(payload))
    }
}

impl Drop for DeviceRx {
    fn drop(&mut self) {
        self.pool.give_back(self.slot);
    }
}

/// A slot that the device fills.
#[derive(Debug)]
pub struct Receiving {
    pub(crate) pool: Arc<RxPool>,
    pub(crate) slot: u32,
    pub(crate) len: usize,
}

impl Submission for Receiving {
    type Buffer = DeviceRx;

    fn is_done(&self) -> Result<bool, TransportError> {
        let slots = &self.pool.pool.slots;
        slots.check()?;
        let slot = slots.slot(self.slot);
        if slot.has_moved()? {
            slot.check()?;
            // An abort makes the device say that it received what it did not: the mark is set
            // before the device is told, so it is looked at after the device was asked.
            return slots.check().map(|()| true);
        }
        slots.poll().map(|()| false)
    }

    fn into_buffer(self) -> DeviceRx {
        DeviceRx::new(&self.pool, self.slot, self.len)
    }

    fn orphan(self) {
        self.pool.give_back(self.slot);
    }

    fn quarantine(self) {
        self.pool.pool.slot(self.slot).give_up();
        self.pool.pool.lane.slots.quarantine(self.slot);
    }
}
