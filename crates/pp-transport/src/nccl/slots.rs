//! The slots of an edge on a device, and who works on each.
//!
//! Each slot is one allocation with two events of its own, made once. Outgoing: `ready`, behind
//! whatever writes it, and `done`, behind its send. Incoming: `arrived`, behind its receive, and
//! `read`, behind whatever reads it. An answer of the device that something is done is kept, so
//! that it is asked no more.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::life::Life;
use crate::cuda::{CudaError, Device, DeviceBuffer, DevicePtr, Event, Stream};
use crate::error::TransportError;
use crate::host::EdgeShape;
use crate::lane::{InSlots, OutSlots};

/// One slot.
#[derive(Debug)]
pub(super) struct Slot {
    /// `None` only while it is dropped.
    buffer: Option<DeviceBuffer>,
    /// Behind the work of stages: what writes an outgoing slot, what reads an incoming one.
    pub(super) work: Event,
    /// Behind the transfer.
    pub(super) moved: Event,
    /// A transfer is under way, as far as the device was asked.
    moving: AtomicBool,
    /// Something may work on it that no event tells of: never to be used or freed.
    lost: AtomicBool,
    /// The stream that worked on it last, while no lease has it.
    worker: Mutex<Option<Stream>>,
}

impl Slot {
    fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self {
            buffer: Some(DeviceBuffer::new(device, bytes)?),
            work: Event::new(device)?,
            moved: Event::new(device)?,
            moving: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            worker: Mutex::new(None),
        })
    }

    pub(super) fn ptr(&self) -> DevicePtr {
        self.buffer.as_ref().expect("there until dropped").ptr()
    }

    /// Notes that a transfer is about to be issued.
    pub(super) fn begin_move(&self) {
        self.moving.store(true, Ordering::Release);
    }

    /// Whether the transfer is done.
    #[inline]
    pub(super) fn has_moved(&self) -> Result<bool, CudaError> {
        if !self.moving.load(Ordering::Acquire) {
            return Ok(true);
        }
        let done = self.moved.is_done()?;
        if done {
            self.moving.store(false, Ordering::Release);
        }
        Ok(done)
    }

    pub(super) fn lose(&self) {
        self.lost.store(true, Ordering::Release);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Takes over from the stream that worked on it last.
    pub(super) fn take_worker(&self) -> Option<Stream> {
        self.worker
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    pub(super) fn leave_worker(&self, stream: Option<Stream>) {
        *self.worker.lock().unwrap_or_else(PoisonError::into_inner) = stream;
    }

    /// Runs `issue`, which issues work that writes the slot to `stream`, behind that of the stream
    /// that wrote last, and records the slot's work event behind it.
    pub(super) fn write_on<R, E: From<TransportError>>(
        &self,
        last: &mut Option<Stream>,
        stream: &Stream,
        issue: impl FnOnce() -> Result<R, E>,
    ) -> Result<R, E> {
        let failed = |error: CudaError| E::from(TransportError::from(error));
        let other = is_other(last.as_ref(), stream);
        if other {
            stream.wait(&self.work).map_err(failed)?;
        }
        let unrecorded = Unrecorded(self);
        // Even where it says that it failed it may have issued some of its work.
        let issued = issue();
        self.work.record(stream).map_err(failed)?;
        std::mem::forget(unrecorded);
        if other || last.is_none() {
            *last = Some(stream.clone());
        }
        issued
    }

    /// The same for work that reads: streams may read at once, and only the work event is ordered
    /// behind all of them, so that none is forgotten.
    pub(super) fn read_on<R, E: From<TransportError>>(
        &self,
        last: &RefCell<Option<Stream>>,
        stream: &Stream,
        issue: impl FnOnce() -> Result<R, E>,
    ) -> Result<R, E> {
        let failed = |error: CudaError| E::from(TransportError::from(error));
        let unrecorded = Unrecorded(self);
        let issued = issue();
        // Looked at only now: `issue` may itself have let another stream read.
        let mut last = last.borrow_mut();
        let other = is_other(last.as_ref(), stream);
        if other {
            stream.wait(&self.work).map_err(failed)?;
        }
        self.work.record(stream).map_err(failed)?;
        std::mem::forget(unrecorded);
        if other || last.is_none() {
            *last = Some(stream.clone());
        }
        issued
    }

    /// An error for a slot that something unknown may work on.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        if self.is_lost() {
            return Err(CudaError::Unrecorded);
        }
        Ok(())
    }

    /// Whether the device says that nothing works on the slot any more.
    fn is_quiet(&self) -> bool {
        let quiet = |done: Result<bool, CudaError>| matches!(done, Ok(true));
        !self.is_lost() && quiet(self.has_moved()) && quiet(self.work.is_done())
    }
}

fn is_other(last: Option<&Stream>, stream: &Stream) -> bool {
    last.is_some_and(|last| !last.is_same(stream))
}

/// Work may have been issued behind which no event is recorded yet. If that stays so, because
/// recording fails or whoever issues panics, the slot is lost.
struct Unrecorded<'a>(&'a Slot);

impl Drop for Unrecorded<'_> {
    fn drop(&mut self) {
        self.0.lose();
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let quiet = self.is_quiet();
        if let Some(buffer) = self.buffer.take()
            && !quiet
        {
            tracing::warn!(
                bytes = buffer.len(),
                "a slot is leaked: the device does not say that nothing works on it"
            );
            std::mem::forget(buffer);
        }
    }
}

/// The slots of one direction, with what both kinds share.
#[derive(Debug)]
pub(super) struct Pool<S> {
    pub(super) life: Arc<Life>,
    pub(super) lane: Arc<S>,
    slots: Box<[Slot]>,
    capacity: usize,
}

/// Slots to be written and sent.
pub(super) type TxPool = Pool<OutSlots>;

impl<S> Pool<S> {
    pub(super) fn new(life: &Arc<Life>, lane: &Arc<S>, slots: DeviceSlots) -> Self {
        Self {
            life: Arc::clone(life),
            lane: Arc::clone(lane),
            capacity: slots.capacity,
            slots: slots.slots,
        }
    }

    pub(super) fn slot(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether no transfer is under way, as the device says.
    pub(super) fn is_still(&self) -> bool {
        self.slots
            .iter()
            .all(|slot| !slot.is_lost() && matches!(slot.has_moved(), Ok(true)))
    }
}

/// Slots that were allocated and belong to no edge yet.
#[derive(Debug)]
pub(super) struct DeviceSlots {
    slots: Box<[Slot]>,
    capacity: usize,
}

impl DeviceSlots {
    pub(super) fn new(device: &Device, shape: EdgeShape) -> Result<Self, CudaError> {
        // The layout of an edge has checked that it fits.
        let capacity = usize::try_from(shape.slot_bytes).unwrap_or(usize::MAX);
        let slots = (0..shape.depth)
            .map(|_| Slot::new(device, capacity))
            .collect::<Result<_, _>>()?;
        Ok(Self { slots, capacity })
    }

    /// A slot whose memory may be used to try the edge out.
    pub(super) fn first(&self) -> &Slot {
        &self.slots[0]
    }
}

/// Slots to be received into and read, and those on their way back to the peer.
#[derive(Debug)]
pub(super) struct RxPool {
    pub(super) pool: Pool<InSlots>,
    /// Slots whose last reader, or whose transfer nobody waited for, is not done. `None` once the
    /// link is gone and nobody looks any more.
    returns: Mutex<Option<Vec<u32>>>,
    /// How many there are, so that a look costs a load.
    waiting: AtomicUsize,
}

impl RxPool {
    pub(super) fn new(pool: Pool<InSlots>) -> Self {
        Self {
            returns: Mutex::new(Some(Vec::with_capacity(pool.slots.len()))),
            pool,
            waiting: AtomicUsize::new(0),
        }
    }

    pub(super) fn slot(&self, slot: u32) -> &Slot {
        self.pool.slot(slot)
    }

    /// Gives a slot back as soon as nothing works on it: now, or in a later call of the link.
    pub(super) fn give_back(&self, slot: u32) {
        if self.pool.life.is_dead() {
            // The peer is given nothing any more.
            return self.pool.lane.quarantine(slot);
        }
        if self.slot(slot).is_quiet() {
            return self.pool.lane.give_back(slot);
        }
        if self.slot(slot).is_lost() {
            return self.pool.lane.quarantine(slot);
        }
        let mut returns = self.returns.lock().unwrap_or_else(PoisonError::into_inner);
        match returns.as_mut() {
            Some(returns) => {
                returns.push(slot);
                self.waiting.store(returns.len(), Ordering::Release);
            }
            None => self.pool.lane.quarantine(slot),
        }
    }

    /// Gives back what has become quiet.
    #[inline]
    pub(super) fn sweep(&self) {
        if self.waiting.load(Ordering::Acquire) > 0 {
            self.sweep_returns();
        }
    }

    fn sweep_returns(&self) {
        let mut at = 0;
        while let Some(slot) = self.next_return(&mut at) {
            // Outside of the lock: to tell the peer may take time.
            if self.pool.life.is_dead() {
                self.pool.lane.quarantine(slot);
            } else {
                self.pool.lane.give_back(slot);
            }
        }
    }

    /// Takes the next slot, from place `at` on, that waits no more: it is quiet, or its peer is
    /// given nothing any more.
    fn next_return(&self, at: &mut usize) -> Option<u32> {
        let mut returns = self.returns.lock().unwrap_or_else(PoisonError::into_inner);
        let returns = returns.as_mut()?;
        let dead = self.pool.life.is_dead();
        while let Some(&slot) = returns.get(*at) {
            if dead || self.slot(slot).is_quiet() {
                returns.swap_remove(*at);
                self.waiting.store(returns.len(), Ordering::Release);
                return Some(slot);
            }
            *at += 1;
        }
        None
    }

    /// The link is gone: what is not back by now stays.
    pub(super) fn close(&self) {
        self.sweep();
        let mut returns = self.returns.lock().unwrap_or_else(PoisonError::into_inner);
        for slot in returns.take().unwrap_or_default() {
            self.pool.lane.quarantine(slot);
        }
        self.waiting.store(0, Ordering::Release);
    }
}
