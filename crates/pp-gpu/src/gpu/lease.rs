//! Leases of slots, and slots in flight.
//!
//! A lease is the right to issue work on a slot, not the memory itself. The holder names a stream. All work issued to
//! that stream is ordered before the send, or before the slot goes back.

use std::cell::RefCell;
use std::sync::Arc;

use super::part;
use super::slots::{RxPool, Slot, TxPool};
use pp_device::{CudaError, DevicePtr, Stream};
use pp_edges::edge::check_payload;
use pp_edges::error::TransportError;
use pp_edges::in_flight::{Part, Resend, Submission};

impl Slot {
    /// Copies the first `bytes` of the slot to the other device, on the edge's stream and after the work on the slot.
    /// Returns false if the edge has no remote end, or is gone.
    ///
    /// # Errors
    /// The driver refuses; if part of the copy may have been issued, the slot is never leased again.
    ///
    /// # Safety
    /// The bytes fit the slot, the receiver has returned its slot, and no work is issued on the slot before the other
    /// device has read it. `stream` is the stream of the edge.
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
        far.begin();
        self.begin_move();
        // SAFETY: the caller's promise; the stream is ordered behind what wrote the slot, which is freed behind the stream.
        let put = unsafe { far.put(part(self.ptr(), 0, bytes), stream, &self.moved) };
        // Whoever asked between the two was told of the transfer before.
        self.begin_move();
        if !matches!(put, Ok(true)) {
            self.give_up();
        }
        Ok(put?)
    }

    /// Counts a payload of so many bytes that was announced for the slot, and brings it here if the other rank does not.
    ///
    /// # Errors
    /// The driver refuses: the slot may still be written.
    ///
    /// # Safety
    /// The bytes fit the slot. Its header has come, and nothing uses or frees the slot before they have arrived.
    pub(crate) unsafe fn fetch(&self, bytes: usize) -> Result<(), CudaError> {
        let Some(far) = &self.far else {
            return Ok(());
        };
        far.begin();
        self.begin_move();
        // SAFETY: the caller's promise.
        unsafe { far.fetch(part(self.ptr(), 0, bytes), &self.moved) }?;
        self.begin_move();
        Ok(())
    }
}

/// A lease to write a slot of an edge with work on a device.
///
/// # If dropped
/// The slot is free again, and nothing was sent. The work of the next lease is ordered behind the work already issued
/// on the slot. A slot that was sent ahead is not leased again for as long as the edge lives.
#[derive(Debug)]
pub struct DeviceTx {
    pub(crate) pool: Arc<TxPool>,
    pub(crate) slot: u32,
    /// The stream that wrote last. The slot is sent only after its work.
    pub(crate) writer: Option<Stream>,
    /// The number of bytes that were sent ahead of their message, if any.
    pub(crate) ahead: Option<usize>,
    /// Set by [`Self::hold_back`]: nothing is sent ahead.
    is_held: bool,
    /// The slot was handed over, so the lease has ended.
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

    /// Returns the size of the slot in bytes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.pool.capacity
    }

    /// Runs `issue`, which issues work that writes the slot to `stream`. The send is ordered behind this work, and so
    /// is work issued later with another stream.
    ///
    /// `issue` gets the whole slot, with the bytes that an earlier chunk left there. The address is valid only for work
    /// that `issue` issues to `stream`.
    ///
    /// # Errors
    /// The error of `issue`; the driver refuses; the slot was sent ahead; or the slot came back from a failed send and
    /// NCCL may still read it. In the last case the slot can only be sent again, from a copy.
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

    /// Lets the first `bytes` of the slot move once the work issued on it is done, before their message leaves. The
    /// payload is then already on its way when the driver sees that the work is done. No more work may be issued on the
    /// slot, and it must be sent with a message of exactly these bytes. Does nothing if the edge cannot send ahead
    /// (over NCCL, and within a rank), or is dead; the send then reports that it is dead.
    ///
    /// # Errors
    /// The bytes do not fit the slot; the slot was already sent ahead; the driver refuses.
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

    /// Tells whether a message may leave before the work on the slot is done. Over NCCL it should not: the receive, which is
    /// issued when the message comes, takes multiprocessors of the receiver until the send runs.
    #[must_use]
    pub fn may_lead(&self) -> bool {
        self.pool.life.is_none() || self.pool.slot(self.slot).is_copied()
    }

    /// Turns [`Self::send_ahead`] into a no-op, for a payload that is still to be changed, as by an injected fault.
    pub const fn hold_back(&mut self) {
        self.is_held = true;
    }

    /// Issues the copy of the first `bytes` to the other device. The caller has checked that they fit. Returns false if
    /// the edge has no remote end, or is gone.
    pub(crate) fn put(&mut self, bytes: usize) -> Result<bool, TransportError> {
        let slot = self.pool.slot(self.slot);
        // SAFETY: the callers have checked that there is room. A slot is leased only when the receiver has returned it; this
        // lease issues no work on it any more, and no other gets it before it was read.
        let put = unsafe { slot.put(bytes, self.writer.as_ref(), &self.pool.stream) }?;
        self.ahead = put.then_some(bytes);
        Ok(put)
    }

    /// Orders `stream` behind the work issued on the slot.
    pub(crate) fn follow_on(&self, stream: &Stream) -> Result<(), CudaError> {
        self.pool
            .slot(self.slot)
            .follow(self.writer.as_ref(), stream)
    }

    /// Ends the lease and keeps the slot in flight.
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

/// A slot in flight. The device sends it, and then the peer holds it. On an edge within this rank the next stage holds
/// it, and no device sends it.
///
/// The send is done when the device has sent the slot *and* the peer has returned it. The peer's answer alone does not
/// show that this device has stopped reading the memory. The device's answer alone says nothing of the peer: a send of
/// less than 64 MiB completes without a receiver.
#[derive(Debug)]
pub struct Sending {
    pool: Arc<TxPool>,
    pub(crate) slot: u32,
}

impl Sending {
    /// Forbids further writes into the slot, because the sent payload may still be read.
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
        // Gives up the memory too: after a transfer was cut short the device reports it as done.
        self.pool.slot(self.slot).give_up();
        self.pool.lane.quarantine(self.slot);
    }
}

impl Resend for Sending {
    fn copy_into(&self, parts: &[Part], slot: &mut DeviceTx) -> Result<(), TransportError> {
        let (sent, into) = (self.pool.capacity, slot.capacity());
        // All parts are checked before anything is issued.
        let parts = parts.iter().map(|part| part.within(sent, into));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        // This uses the stream that sends the slot, so the send waits for nothing else.
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
        // The work event stands behind the write of the buffer, as it does for a slot that was sent.
        buffer.into_sending()
    }
}

/// A lease to read a slot of an edge whose payload has arrived, with work on a device.
///
/// # If dropped
/// The slot goes back to the sender when the work that reads it is done: at once, or in a later call of an edge with
/// the same peer. If all edges with the peer are gone by then, the peer never gets the slot.
#[derive(Debug)]
pub struct DeviceRx {
    pool: Arc<RxPool>,
    slot: u32,
    len: usize,
    /// The stream that read last.
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

    /// Returns the size of the payload in bytes, as its header states it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tells whether the payload is empty. It never is: a message without payload has no lease.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Runs `issue`, which issues work that reads the payload to `stream`. A payload from another rank has arrived
    /// already. A payload from this rank may still be written, and `stream` waits for that. Any number of streams may
    /// read the payload. The slot goes back when all of them are done.
    ///
    /// The address is valid only for work that `issue` issues to `stream`.
    ///
    /// # Errors
    /// The error of `issue`; the driver refuses.
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

/// A slot that a receive is filling.
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
            // After an abort the device reports receives as done that it did not complete. The abort sets its mark
            // before it tells the device, so the mark is read after the device was asked.
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
