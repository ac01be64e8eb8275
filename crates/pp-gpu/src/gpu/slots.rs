//! The slots of an edge on a device, and who works on each.
//!
//! Each slot has two events of its own, made once. Outgoing: `ready`, behind
//! whatever writes it, and `done`, behind its send. Incoming: `arrived`, behind its receive, and
//! `read`, behind whatever reads it. Of an edge within this rank, one event: behind whatever works on
//! the slot, and each of these waits for the one before. An answer of the device that something is
//! done is kept, so that it is asked no more. Where another device does the moving ([`Far`]), it says
//! so itself, and `done` and `arrived` are not recorded.
//!
//! A process that lives through many generations must not keep the slots of each. Those of a
//! transfer that was given up are freed once the abort of their communicators is over and the
//! stream that moved them has run empty; before that the device's word means nothing. Slots that
//! work without an event may touch are leaked for good.

use std::cell::RefCell;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::far::Far;
use super::{EdgesLife, PendingFree, lock};
use pp_device::{CudaError, Device, DeviceBuffer, DevicePtr, Event, Stream};
use pp_edges::error::TransportError;
use pp_edges::host::EdgeShape;
use pp_edges::lane::{InSlots, OutSlots};

/// Where a slot lies.
#[derive(Debug)]
enum Place {
    /// In memory of its own.
    Own(DeviceBuffer),
    /// In part of what its `far` keeps mapped.
    Shared(DevicePtr),
}

/// One slot.
#[derive(Debug)]
pub(crate) struct Slot {
    place: Place,
    /// The other device, where that moves the payload.
    pub(super) far: Option<Arc<dyn Far>>,
    /// Work was issued on it since it was given back last.
    has_work: AtomicBool,
    /// Behind the work of stages: what writes an outgoing slot, what reads an incoming one.
    pub(crate) work: Event,
    /// Behind the transfer.
    pub(crate) moved: Event,
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
    /// A slot in memory of its own.
    pub(crate) fn new(
        device: &Device,
        bytes: usize,
        far: Option<Arc<dyn Far>>,
    ) -> Result<Self, CudaError> {
        Self::at(device, Place::Own(DeviceBuffer::new(device, bytes)?), far)
    }

    /// A slot in memory that another rank has mapped, too.
    pub(crate) fn shared(
        device: &Device,
        place: DevicePtr,
        far: Arc<dyn Far>,
    ) -> Result<Self, CudaError> {
        Self::at(device, Place::Shared(place), Some(far))
    }

    fn at(device: &Device, place: Place, far: Option<Arc<dyn Far>>) -> Result<Self, CudaError> {
        Ok(Self {
            place,
            far,
            has_work: AtomicBool::new(false),
            work: Event::new(device)?,
            moved: Event::new(device)?,
            moving: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            worker: Mutex::new(None),
        })
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        match &self.place {
            Place::Own(buffer) => buffer.ptr(),
            Place::Shared(place) => *place,
        }
    }

    /// Notes that a transfer is about to be issued.
    pub(crate) fn begin_move(&self) {
        self.moving.store(true, Ordering::Release);
    }

    /// Whether the transfer is done.
    #[inline]
    pub(crate) fn has_moved(&self) -> Result<bool, CudaError> {
        if !self.moving.load(Ordering::Acquire) {
            return Ok(true);
        }
        let done = match &self.far {
            Some(far) => far.has_moved(),
            None => self.moved.is_done()?,
        };
        if done {
            self.moving.store(false, Ordering::Release);
        }
        Ok(done)
    }

    /// No handle waits for its transfer any more, or the event behind it is missing.
    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    /// Whether it must not be used again.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire) || self.given_up.load(Ordering::Acquire)
    }

    /// Takes over from the stream that worked on it last.
    pub(crate) fn take_worker(&self) -> Option<Stream> {
        lock(&self.worker).take()
    }

    pub(crate) fn leave_worker(&self, stream: Option<Stream>) {
        *lock(&self.worker) = stream;
    }

    /// Runs `issue`, which issues work that writes the slot to `stream`, behind that of the stream
    /// that wrote last, and records the slot's work event behind it.
    pub(crate) fn write_on<R, E: From<TransportError>>(
        &self,
        last: &mut Option<Stream>,
        stream: &Stream,
        issue: impl FnOnce() -> Result<R, E>,
    ) -> Result<R, E> {
        self.follow(last.as_ref(), stream)
            .map_err(TransportError::from)?;
        let issued = self.recorded(stream, issue, || Ok(()))?;
        note(last, stream);
        issued
    }

    /// Runs `issue`, which issues work that reads the slot to `stream`: streams may read at once,
    /// and only the work event is ordered behind all of them, so that none is forgotten.
    pub(crate) fn read_on<R, E: From<TransportError>>(
        &self,
        last: &RefCell<Option<Stream>>,
        stream: &Stream,
        issue: impl FnOnce() -> Result<R, E>,
    ) -> Result<R, E> {
        // Looked at only then: `issue` may itself have let another stream read.
        let wait = || self.follow(last.borrow().as_ref(), stream);
        let issued = self.recorded(stream, issue, wait)?;
        note(&mut last.borrow_mut(), stream);
        issued
    }

    /// Orders `stream` behind the work of another stream that worked on the slot last.
    pub(super) fn follow(&self, last: Option<&Stream>, stream: &Stream) -> Result<(), CudaError> {
        match last {
            Some(last) if !last.is_same(stream) => stream.wait(&self.work),
            _ => Ok(()),
        }
    }

    /// Runs `issue`, then `wait`, and records the work event behind both. If it is not recorded, because that fails or
    /// `issue` panics, the slot is lost: even where `issue` says that it failed it may have issued some of its work.
    fn recorded<R>(
        &self,
        stream: &Stream,
        issue: impl FnOnce() -> R,
        wait: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<R, TransportError> {
        let unrecorded = Unrecorded(self);
        self.has_work.store(true, Ordering::Release);
        let issued = issue();
        wait()?;
        self.work.record(stream)?;
        std::mem::forget(unrecorded);
        Ok(issued)
    }

    /// Runs `issue`, which issues work that reads to `stream` what the slot was sent with: behind
    /// the work that wrote it or read it last, and before the slot is used for anything else, since
    /// the next lease takes over from `stream`. That its transfer was given up is no harm: it only
    /// reads.
    pub(crate) fn reread_on<R, E: From<TransportError>>(
        &self,
        stream: &Stream,
        issue: impl FnOnce(DevicePtr) -> Result<R, E>,
    ) -> Result<R, E> {
        if self.lost.load(Ordering::Acquire) {
            return Err(TransportError::Unrecorded.into());
        }
        let is_same = |last: &Stream| last.is_same(stream);
        if !lock(&self.worker).as_ref().is_some_and(is_same) {
            stream.wait(&self.work).map_err(TransportError::from)?;
        }
        self.leave_worker(Some(stream.clone()));
        // Looked at only then: `issue` may itself have let another stream read.
        let wait = || self.follow(lock(&self.worker).as_ref(), stream);
        let issued = self.recorded(stream, || issue(self.ptr()), wait)?;
        self.leave_worker(Some(stream.clone()));
        issued
    }

    /// An error for a slot that something unknown may work on.
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        if self.is_lost() {
            return Err(TransportError::Unrecorded);
        }
        Ok(())
    }

    /// Whether the device says that nothing works on the slot any more.
    fn is_quiet(&self) -> bool {
        let quiet = |done: Result<bool, CudaError>| matches!(done, Ok(true));
        !self.is_lost() && quiet(self.has_moved()) && quiet(self.work.is_done())
    }

    /// Whether the peer may have it back: nothing works on it, or what does is followed by the word that says so, which this
    /// issues.
    fn try_give_back(&self) -> bool {
        let has_arrived = || !self.is_lost() && matches!(self.has_moved(), Ok(true));
        let Some(far) = &self.far else {
            return self.is_quiet();
        };
        if !has_arrived() {
            return false;
        }
        let has_work = self.has_work.swap(false, Ordering::AcqRel);
        let given = far.give_back(has_work.then_some(&self.work));
        given
            .inspect_err(|error| {
                tracing::warn!(%error, "a slot cannot be given back, and is used no more");
                self.give_up();
            })
            .is_ok()
    }
}

/// Notes the stream that worked on a slot last.
fn note(last: &mut Option<Stream>, stream: &Stream) {
    if last.as_ref().is_none_or(|last| !last.is_same(stream)) {
        *last = Some(stream.clone());
    }
}

/// Work may have been issued behind which no event is recorded yet: dropped, the slot is lost.
struct Unrecorded<'a>(&'a Slot);

impl Drop for Unrecorded<'_> {
    fn drop(&mut self) {
        self.0.lost.store(true, Ordering::Release);
    }
}

/// The slots of one edge, and who owns each.
#[derive(Debug)]
pub(crate) struct Pool<S> {
    pub(crate) lane: Arc<S>,
    /// Of an edge within this rank both its ends have the same.
    pub(crate) slots: Arc<DeviceSlots>,
}

/// Slots to be written and sent.
pub(crate) type TxPool = Pool<OutSlots>;

impl<S> Deref for Pool<S> {
    type Target = DeviceSlots;

    fn deref(&self) -> &DeviceSlots {
        &self.slots
    }
}

/// Slots that were allocated, and the stream that moves their payloads, or copies into them.
///
/// # If dropped
/// Never waits. Each is freed some time later when the device says that nothing works on it, and
/// where their communicators were given up, when those have ended too; else leaked, and said so.
#[derive(Debug)]
pub(crate) struct DeviceSlots {
    slots: Vec<Slot>,
    pub(crate) capacity: usize,
    /// That of their communicator; none of an edge within this rank.
    pub(crate) life: Option<Arc<dyn EdgesLife>>,
    pub(crate) stream: Stream,
}

impl DeviceSlots {
    pub(crate) fn new(
        device: &Device,
        life: Option<Arc<dyn EdgesLife>>,
        shape: EdgeShape,
    ) -> Result<Self, CudaError> {
        // The layout of an edge has checked that it fits.
        let capacity = usize::try_from(shape.slot_bytes).unwrap_or(usize::MAX);
        let slots = (0..shape.slots()).map(|_| Slot::new(device, capacity, None));
        let slots = slots.collect::<Result<_, _>>()?;
        Ok(Self::of(slots, capacity, life, Stream::urgent(device)?))
    }

    /// These, whose payloads a stream moves.
    pub(crate) fn of(
        slots: Vec<Slot>,
        capacity: usize,
        life: Option<Arc<dyn EdgesLife>>,
        stream: Stream,
    ) -> Self {
        Self {
            slots,
            capacity,
            life,
            stream,
        }
    }

    /// An error once their communicator is dead.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        self.life.as_ref().map_or(Ok(()), |life| life.check())
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.life.as_ref().is_some_and(|life| life.is_dead())
    }

    /// A completion was asked for in vain.
    #[inline]
    pub(crate) fn poll(&self) -> Result<(), TransportError> {
        self.life.as_ref().map_or(Ok(()), |life| life.poll())
    }

    pub(crate) fn slot(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    /// Whether no transfer is under way, as the device says.
    pub(crate) fn is_still(&self) -> bool {
        let mut slots = self.slots.iter();
        slots.all(|slot| !slot.is_lost() && matches!(slot.has_moved(), Ok(true)))
    }
}

impl Drop for DeviceSlots {
    fn drop(&mut self) {
        for slot in std::mem::take(&mut self.slots) {
            // Of a slot that the peer has a part in, the peer's word is not enough to free memory.
            if slot.far.is_none() && slot.is_quiet() && !self.is_dead() {
                continue;
            }
            let unknown = slot.lost.load(Ordering::Acquire);
            if unknown {
                tracing::warn!(
                    bytes = slot.ptr().len,
                    "a slot is leaked: work without an event may use it"
                );
                std::mem::forget(slot);
                continue;
            }
            let Slot {
                place,
                far,
                work,
                moved,
                ..
            } = slot;
            let (events, stream) = (vec![work, moved], Some(self.stream.clone()));
            let Place::Own(buffer) = place else {
                if let Some(far) = far {
                    far.used_until(events);
                }
                continue;
            };
            match &self.life {
                Some(life) => life.free_later(PendingFree {
                    buffer,
                    events,
                    stream,
                }),
                None => buffer.free_behind(events, stream),
            }
        }
    }
}

/// Slots to be received into and read, and those on their way back to the sender.
#[derive(Debug)]
pub(crate) struct RxPool {
    pub(crate) pool: Pool<InSlots>,
    /// Slots whose last reader is not done, or whose transfer is not and has no handle. `None` once
    /// the edges with the peer are gone and no thread looks any more.
    returns: Mutex<Option<Vec<u32>>>,
    /// How many there are, so that a look costs a load.
    waiting: AtomicUsize,
}

impl RxPool {
    pub(crate) fn new(pool: Pool<InSlots>) -> Self {
        Self {
            returns: Mutex::new(Some(Vec::with_capacity(pool.slots.slots.len()))),
            pool,
            waiting: AtomicUsize::new(0),
        }
    }

    /// Gives a slot back as soon as nothing works on it: now, or in a later call of an edge with the
    /// same peer.
    pub(crate) fn give_back(&self, slot: u32) {
        if self.pool.is_dead() {
            // The peer is given nothing any more.
            return self.pool.lane.slots.quarantine(slot);
        }
        if self.pool.slot(slot).try_give_back() {
            return self.pool.lane.give_back(slot);
        }
        if self.pool.slot(slot).is_lost() {
            return self.pool.lane.slots.quarantine(slot);
        }
        let mut returns = lock(&self.returns);
        match returns.as_mut() {
            Some(returns) => {
                returns.push(slot);
                self.waiting.store(returns.len(), Ordering::Release);
            }
            None => self.pool.lane.slots.quarantine(slot),
        }
    }

    /// Gives back what has become quiet.
    #[inline]
    pub(crate) fn sweep(&self) {
        if self.waiting.load(Ordering::Acquire) > 0 {
            self.sweep_returns();
        }
    }

    fn sweep_returns(&self) {
        for slot in self.ready_returns() {
            // Outside of the lock: to tell the peer may take time.
            if self.pool.is_dead() {
                self.pool.lane.slots.quarantine(slot);
            } else {
                self.pool.lane.give_back(slot);
            }
        }
    }

    /// Takes out the slots that wait no more: they are quiet, or their peer is given nothing any more.
    fn ready_returns(&self) -> Vec<u32> {
        let mut returns = lock(&self.returns);
        let Some(returns) = returns.as_mut() else {
            return Vec::new();
        };
        let dead = self.pool.is_dead();
        let is_ready = |slot: &mut u32| dead || self.pool.slot(*slot).try_give_back();
        let ready = returns.extract_if(.., is_ready).collect();
        self.waiting.store(returns.len(), Ordering::Release);
        ready
    }

    /// The edges are gone: what is not back by now stays.
    pub(crate) fn close(&self) {
        self.sweep();
        let mut returns = lock(&self.returns);
        for slot in returns.take().unwrap_or_default() {
            self.pool.lane.slots.quarantine(slot);
        }
        self.waiting.store(0, Ordering::Release);
    }
}
