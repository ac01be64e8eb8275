//! The slots of an edge on a device, and the work on each.
//!
//! Each slot has two events, made once. `work` stands behind the work of stages, which writes an outgoing slot or reads
//! an incoming one. `moved` stands behind the transfer. A slot of an edge within this rank needs `work` alone: each
//! stream that works on the slot waits for the one before. Once the device has said that a transfer is done, it is not
//! asked again. Where another device moves the payload ([`Far`]), that device reports the transfer itself, and `moved`
//! is not recorded. `moved` also stands behind a copy from or to host memory.
//!
//! A process that lives through many generations must not keep the slots of each. If a transfer was given up, its slot
//! is freed after the abort of its communicator has ended and the stream of the transfer is idle. Before that the
//! device's answer means nothing. A slot that work without an event may touch is leaked for good.

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

/// The memory of a slot.
#[derive(Debug)]
enum Place {
    /// A buffer of its own.
    Own(DeviceBuffer),
    /// A range of the memory that `far` keeps mapped.
    Shared(DevicePtr),
}

/// One slot: its memory, its events and its state.
#[derive(Debug)]
pub(crate) struct Slot {
    place: Place,
    /// The remote end, if a copy engine moves the payload.
    pub(super) far: Option<Arc<dyn Far>>,
    /// Work was issued on the slot since it was last given back.
    has_work: AtomicBool,
    /// Recorded behind the work of stages: what writes an outgoing slot, or reads an incoming one.
    pub(crate) work: Event,
    /// Recorded behind the transfer.
    pub(crate) moved: Event,
    /// A transfer is under way, or the device was not asked since.
    moving: AtomicBool,
    /// Work without an event may touch the slot: it is never used again and never freed.
    lost: AtomicBool,
    /// The transfer was given up: the slot is never used again, and not freed before the communicators are gone.
    given_up: AtomicBool,
    /// The stream that worked on the slot last, while no lease holds the slot.
    worker: Mutex<Option<Stream>>,
}

impl Slot {
    /// Makes a slot with a buffer of its own.
    pub(crate) fn new(
        device: &Device,
        bytes: usize,
        far: Option<Arc<dyn Far>>,
    ) -> Result<Self, CudaError> {
        Self::at(device, Place::Own(DeviceBuffer::new(device, bytes)?), far)
    }

    /// Makes a slot in memory that another rank has mapped too.
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

    /// Tells whether the transfer is done.
    #[inline]
    pub(crate) fn has_moved(&self) -> Result<bool, CudaError> {
        if !self.moving.load(Ordering::Acquire) {
            return Ok(true);
        }
        let done = match &self.far {
            Some(far) => far.has_moved(&self.moved)?,
            None => self.moved.is_done()?,
        };
        if done {
            self.moving.store(false, Ordering::Release);
        }
        Ok(done)
    }

    /// Marks the slot as given up: no handle waits for its transfer, or the event behind the transfer is missing.
    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    /// Tells whether the slot must not be used again.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire) || self.given_up.load(Ordering::Acquire)
    }

    /// Takes out the stream that worked on the slot last.
    pub(crate) fn take_worker(&self) -> Option<Stream> {
        lock(&self.worker).take()
    }

    pub(crate) fn leave_worker(&self, stream: Option<Stream>) {
        *lock(&self.worker) = stream;
    }

    /// Runs `issue`, which issues work that writes the slot to `stream`. Orders that work behind the stream that wrote
    /// last, and records the slot's work event behind it.
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

    /// Runs `issue`, which issues work that reads the slot to `stream`. Several streams may read at once. Only the work
    /// event is ordered behind all of them, so that it covers every reader.
    pub(crate) fn read_on<R, E: From<TransportError>>(
        &self,
        last: &RefCell<Option<Stream>>,
        stream: &Stream,
        issue: impl FnOnce() -> Result<R, E>,
    ) -> Result<R, E> {
        // This reads `last` after `issue` has run, because `issue` may itself have let another stream read.
        let wait = || self.follow(last.borrow().as_ref(), stream);
        let issued = self.recorded(stream, issue, wait)?;
        note(&mut last.borrow_mut(), stream);
        issued
    }

    /// Orders `stream` behind the stream that worked on the slot last, if that is another one.
    pub(super) fn follow(&self, last: Option<&Stream>, stream: &Stream) -> Result<(), CudaError> {
        match last {
            Some(last) if !last.is_same(stream) => stream.wait(&self.work),
            _ => Ok(()),
        }
    }

    /// Runs `issue`, then `wait`, and records the work event behind both. The slot is lost if the event is not
    /// recorded, because `wait` or recording fails or `issue` panics. An error of `issue` loses no slot, and may leave
    /// work issued: the event covers that work.
    fn recorded<R, E: From<TransportError>>(
        &self,
        stream: &Stream,
        issue: impl FnOnce() -> Result<R, E>,
        wait: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Result<R, E>, E> {
        let unrecorded = Unrecorded(self);
        self.has_work.store(true, Ordering::Release);
        let issued = issue();
        if let Err(error) = wait().and_then(|()| self.work.record(stream)) {
            // A context that has failed refuses all that follows. What failed first is the reason.
            return Err(issued
                .err()
                .unwrap_or_else(|| TransportError::from(error).into()));
        }
        std::mem::forget(unrecorded);
        Ok(issued)
    }

    /// Runs `issue`, which issues work to `stream` that reads the sent payload again. The work is ordered behind the
    /// last write or read of the slot, and before any later use, since the next lease takes over from `stream`. A
    /// transfer that was given up does no harm here, because it only reads the slot.
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
        // This takes the worker after `issue` has run, because `issue` may itself have let another stream read.
        let wait = || self.follow(lock(&self.worker).as_ref(), stream);
        let issued = self.recorded(stream, || issue(self.ptr()), wait)?;
        self.leave_worker(Some(stream.clone()));
        issued
    }

    /// Returns an error for a slot that must not be used again.
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        if self.is_lost() {
            return Err(TransportError::Unrecorded);
        }
        Ok(())
    }

    /// Tells whether the device says that no work on the slot is left.
    fn is_quiet(&self) -> bool {
        let quiet = |done: Result<bool, CudaError>| matches!(done, Ok(true));
        !self.is_lost() && quiet(self.has_moved()) && quiet(self.work.is_done())
    }

    /// Tells whether the copy engine moves payloads of this slot to another device.
    pub(crate) fn is_copied(&self) -> bool {
        self.far.is_some()
    }

    /// Tells whether the header of a payload in this slot must still wait for the transfer of the payload.
    ///
    /// # Errors
    /// The device has failed.
    pub(crate) fn holds_header(&self) -> Result<bool, CudaError> {
        match &self.far {
            Some(far) if far.is_announced_last() => Ok(!self.has_moved()?),
            _ => Ok(false),
        }
    }

    /// Tells whether the peer may have the slot back. Where the copy engine of another device fills the slot, this issues
    /// the write that returns it, behind the work that still reads it. Elsewhere no work may be left.
    fn try_give_back(&self) -> bool {
        let has_arrived = || !self.is_lost() && matches!(self.has_moved(), Ok(true));
        let Some(far) = &self.far else {
            return self.is_quiet();
        };
        if !has_arrived() {
            return false;
        }
        let has_work = self.has_work.load(Ordering::Acquire);
        match far.give_back(has_work.then_some(&self.work)) {
            Ok(false) => false,
            Ok(true) => {
                self.has_work.store(false, Ordering::Release);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "a slot cannot be given back, and is used no more");
                self.give_up();
                false
            }
        }
    }
}

/// Records the stream that worked on a slot last.
fn note(last: &mut Option<Stream>, stream: &Stream) {
    if last.as_ref().is_none_or(|last| !last.is_same(stream)) {
        *last = Some(stream.clone());
    }
}

/// Guards work that may have been issued without an event behind it. The drop marks the slot as lost.
struct Unrecorded<'a>(&'a Slot);

impl Drop for Unrecorded<'_> {
    fn drop(&mut self) {
        self.0.lost.store(true, Ordering::Release);
    }
}

/// The slots of one edge, and their states.
#[derive(Debug)]
pub(crate) struct Pool<S> {
    pub(crate) lane: Arc<S>,
    /// Both ends of an edge within this rank share these.
    pub(crate) slots: Arc<DeviceSlots>,
}

/// Slots that this rank writes and sends.
pub(crate) type TxPool = Pool<OutSlots>;

impl<S> Deref for Pool<S> {
    type Target = DeviceSlots;

    fn deref(&self) -> &DeviceSlots {
        &self.slots
    }
}

/// The allocated slots of an edge, and the stream that moves their payloads or copies into them.
///
/// # If dropped
/// Never waits. Each slot is freed later, when the device says that no work on it is left. If its communicator was
/// given up, it is freed when that has ended too. A slot that cannot be freed is leaked, with a warning.
#[derive(Debug)]
pub(crate) struct DeviceSlots {
    slots: Vec<Slot>,
    pub(crate) capacity: usize,
    /// The life of their communicator. `None` for an edge within this rank.
    pub(crate) life: Option<Arc<dyn EdgesLife>>,
    pub(crate) stream: Stream,
}

impl DeviceSlots {
    pub(crate) fn new(
        device: &Device,
        life: Option<Arc<dyn EdgesLife>>,
        shape: EdgeShape,
    ) -> Result<Self, CudaError> {
        // The layout of the edge has checked that the size fits.
        let capacity = usize::try_from(shape.slot_bytes).unwrap_or(usize::MAX);
        let slots = (0..shape.slots()).map(|_| Slot::new(device, capacity, None));
        let slots = slots.collect::<Result<_, _>>()?;
        Ok(Self::of(slots, capacity, life, Stream::urgent(device)?))
    }

    /// Returns these slots, with the stream that moves their payloads.
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

    /// Returns an error once their communicator is dead.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        self.life.as_ref().map_or(Ok(()), |life| life.check())
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.life.as_ref().is_some_and(|life| life.is_dead())
    }

    /// Counts a completion that was asked for and has not come.
    #[inline]
    pub(crate) fn poll(&self) -> Result<(), TransportError> {
        self.life.as_ref().map_or(Ok(()), |life| life.poll())
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Slot> {
        self.slots.iter()
    }

    pub(crate) fn count(&self) -> u32 {
        self.slots.len() as u32
    }

    pub(crate) fn slot(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    /// Tells whether the device says that no transfer is under way.
    pub(crate) fn is_still(&self) -> bool {
        let mut slots = self.slots.iter();
        slots.all(|slot| !slot.is_lost() && matches!(slot.has_moved(), Ok(true)))
    }
}

impl Drop for DeviceSlots {
    fn drop(&mut self) {
        for mut slot in std::mem::take(&mut self.slots) {
            // If the peer maps the slot, the peer's word is not enough to free its memory.
            if slot.far.is_none() && slot.is_quiet() && !self.is_dead() {
                continue;
            }
            let unknown = slot.lost.load(Ordering::Acquire);
            if unknown {
                tracing::warn!(
                    bytes = slot.ptr().len,
                    "a slot is leaked: work without an event may use it"
                );
                if let Place::Own(_) = slot.place {
                    // That work uses the buffer, and what lies at the other end goes with its streams.
                    slot.far = None;
                }
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

/// Slots that this rank receives into and reads, and those that wait to go back to the sender.
#[derive(Debug)]
pub(crate) struct RxPool {
    pub(crate) pool: Pool<InSlots>,
    /// Slots that cannot go back yet: a reader is not done, or a transfer without a handle is not. `None` once the
    /// edges with the peer are gone, and no thread returns slots any more.
    returns: Mutex<Option<Vec<u32>>>,
    /// The number of waiting slots, so that a check costs one load.
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

    /// Returns a slot to its sender once no work on it is left: now, or in a later call of an edge with the same peer.
    pub(crate) fn give_back(&self, slot: u32) {
        if self.pool.is_dead() {
            // A dead peer gets no slot back.
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

    /// Returns the slots whose work is done by now.
    #[inline]
    pub(crate) fn sweep(&self) {
        if self.waiting.load(Ordering::Acquire) > 0 {
            self.sweep_returns();
        }
    }

    fn sweep_returns(&self) {
        for slot in self.ready_returns() {
            // Done without the lock, because telling the peer may take time.
            if self.pool.is_dead() {
                self.pool.lane.slots.quarantine(slot);
            } else {
                self.pool.lane.give_back(slot);
            }
        }
    }

    /// Takes out the slots that wait no longer: their work is done, or the peer is dead.
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

    /// Closes the pool when the edges are gone. A slot that has not gone back by now is never used again.
    pub(crate) fn close(&self) {
        self.sweep();
        let mut returns = lock(&self.returns);
        for slot in returns.take().unwrap_or_default() {
            self.pool.lane.slots.quarantine(slot);
        }
        self.waiting.store(0, Ordering::Release);
    }
}
