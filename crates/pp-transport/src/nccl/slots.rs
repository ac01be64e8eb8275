//! The slots of an edge on a device, and who works on each.
//!
//! Each slot is one allocation with two events of its own, made once. Outgoing: `ready`, behind
//! whatever writes it, and `done`, behind its send. Incoming: `arrived`, behind its receive, and
//! `read`, behind whatever reads it. An answer of the device that something is done is kept, so
//! that it is asked no more.
//!
//! A process that lives through many generations must not keep the slots of each. Those of a
//! transfer that was given up are freed once the abort of their communicators is over and the
//! stream that moved them has run empty; before that the device's word means nothing. Slots that
//! work without an event may touch are leaked for good.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::life::{Life, Remains};
use crate::cuda::{CudaError, Device, DeviceBuffer, DevicePtr, Event, Stream};
use crate::error::TransportError;
use crate::host::EdgeShape;
use crate::lane::{InSlots, OutSlots};

/// One slot.
#[derive(Debug)]
pub(super) struct Slot {
    buffer: DeviceBuffer,
    /// Behind the work of stages: what writes an outgoing slot, what reads an incoming one.
    pub(super) work: Event,
    /// Behind the transfer.
    pub(super) moved: Event,
    /// A transfer is under way, as far as the device was asked.
    moving: AtomicBool,
    /// Something may work on it that no event tells of: never to be used or freed.
    lost: AtomicBool,
    /// Its transfer was given up: not to be used, nor freed before the communicators are gone.
    given_up: AtomicBool,
    /// The stream that worked on it last, while no lease has it.
    worker: Mutex<Option<Stream>>,
}

impl Slot {
    fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self {
            buffer: DeviceBuffer::new(device, bytes)?,
            work: Event::new(device)?,
            moved: Event::new(device)?,
            moving: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            worker: Mutex::new(None),
        })
    }

    pub(super) fn ptr(&self) -> DevicePtr {
        self.buffer.ptr()
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

    fn lose(&self) {
        self.lost.store(true, Ordering::Release);
    }

    /// Nobody waits for its transfer any more, or the event behind it is missing.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    /// Whether it must not be used again.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire) || self.given_up.load(Ordering::Acquire)
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

    /// Runs `issue`, which issues work that reads to `stream` what the slot was sent with: behind
    /// the work that wrote it, and before the slot is used for anything else, since whoever leases
    /// it next takes over from `stream`. That its transfer was given up is no harm: it only reads.
    pub(super) fn reread_on(
        &self,
        stream: &Stream,
        issue: impl FnOnce(DevicePtr) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        if self.lost.load(Ordering::Acquire) {
            return Err(CudaError::Unrecorded.into());
        }
        stream.wait(&self.work)?;
        let unrecorded = Unrecorded(self);
        let issued = issue(self.ptr());
        self.work.record(stream)?;
        std::mem::forget(unrecorded);
        self.leave_worker(Some(stream.clone()));
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

/// The slots of one direction, with what both kinds share.
#[derive(Debug)]
pub(super) struct Pool<S> {
    pub(super) life: Arc<Life>,
    pub(super) lane: Arc<S>,
    slots: DeviceSlots,
}

/// Slots to be written and sent.
pub(super) type TxPool = Pool<OutSlots>;

impl<S> Pool<S> {
    pub(super) fn new(life: &Arc<Life>, lane: &Arc<S>, slots: DeviceSlots) -> Self {
        Self {
            life: Arc::clone(life),
            lane: Arc::clone(lane),
            slots,
        }
    }

    pub(super) fn slot(&self, slot: u32) -> &Slot {
        &self.slots.slots[slot as usize]
    }

    pub(super) fn capacity(&self) -> usize {
        self.slots.capacity
    }

    /// The stream that moves their payloads.
    pub(super) fn stream(&self) -> &Stream {
        &self.slots.stream
    }

    /// Whether no transfer is under way, as the device says.
    pub(super) fn is_still(&self) -> bool {
        let mut slots = self.slots.slots.iter();
        slots.all(|slot| !slot.is_lost() && matches!(slot.has_moved(), Ok(true)))
    }
}

/// Slots that were allocated, and the stream that moves their payloads.
///
/// # If dropped
/// Never waits. Each is freed some time later when the device says that nothing works on it, and
/// where their communicators were given up, when those have ended too; else leaked, and said so.
#[derive(Debug)]
pub(super) struct DeviceSlots {
    slots: Vec<Slot>,
    capacity: usize,
    life: Arc<Life>,
    stream: Stream,
}

impl DeviceSlots {
    pub(super) fn new(
        life: &Arc<Life>,
        stream: &Stream,
        shape: EdgeShape,
    ) -> Result<Self, CudaError> {
        // The layout of an edge has checked that it fits.
        let capacity = usize::try_from(shape.slot_bytes).unwrap_or(usize::MAX);
        let slots = (0..shape.depth)
            .map(|_| Slot::new(&life.core.device, capacity))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            slots,
            capacity,
            life: Arc::clone(life),
            stream: stream.clone(),
        })
    }

    /// A slot whose memory may be used to try the edge out.
    pub(super) fn first(&self) -> &Slot {
        &self.slots[0]
    }
}

impl Drop for DeviceSlots {
    fn drop(&mut self) {
        for slot in self.slots.drain(..) {
            if slot.is_quiet() && !self.life.is_dead() {
                continue;
            }
            let unknown = slot.lost.load(Ordering::Acquire);
            let Slot {
                buffer,
                work,
                moved,
                ..
            } = slot;
            if unknown {
                tracing::warn!(
                    bytes = buffer.len(),
                    "a slot is leaked: work without an event may use it"
                );
                std::mem::forget(buffer);
                continue;
            }
            self.life.bury(Remains {
                buffer,
                events: vec![work, moved],
                stream: Some(self.stream.clone()),
            });
        }
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
            returns: Mutex::new(Some(Vec::with_capacity(pool.slots.slots.len()))),
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
