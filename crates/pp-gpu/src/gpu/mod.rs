//! Payloads in GPU memory: the slots, and the leases through which stages use them.
//!
//! Each slot belongs to one edge. Payloads are moved by NCCL, by the copy engine, or by a stage on the same rank.

mod edge;
mod far;
pub(crate) mod host;
mod lease;
mod local;
pub(crate) mod p2p;
mod patterns;
mod slots;

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub use self::edge::{DeviceIn, DeviceOut};
pub(crate) use self::edge::{Lone, Mover, Turn, join};
pub(crate) use self::far::Far;
pub use self::host::try_to_lock;
pub use self::lease::{DeviceRx, DeviceTx, Receiving, Sending};
pub use self::local::DeviceLocal;
pub(crate) use self::slots::{DeviceSlots, Slot};
use pp_device::{DeviceBuffer, DevicePtr, Event, Stream};
use pp_edges::backend::Abort;
use pp_edges::error::TransportError;

/// The state that all edges with one peer share, as seen by their slots: the edges live and end together.
pub(crate) trait EdgesLife: Debug + Send + Sync {
    /// Returns an error once the edges are dead. From then on no completion of an operation in flight counts.
    #[inline]
    fn check(&self) -> Result<(), TransportError> {
        if self.is_dead() {
            return Err(self.aborted());
        }
        Ok(())
    }

    fn is_dead(&self) -> bool;

    /// Returns the error which says that the edges are dead, and why.
    fn aborted(&self) -> TransportError;

    /// Counts a completion that was asked for and has not come. Now and then checks whether it still can.
    ///
    /// # Errors
    /// The completion will never come.
    fn poll(&self) -> Result<(), TransportError>;

    /// Makes every operation in flight an error, whatever the device says. Nothing is issued after that. The first
    /// reason is kept.
    fn kill(&self, why: &str);

    /// Ends the edges, in order if nothing is in flight. Waits for the end until the deadline.
    ///
    /// # Errors
    /// The edges did not end by the deadline, or NCCL reported an error.
    fn end(self: Arc<Self>, is_clean: bool, deadline: Instant) -> Result<(), TransportError>;

    /// Frees memory once no operation of this life can touch it.
    fn free_later(&self, pending: PendingFree);
}

/// Returns what gives up these edges, from any thread and at any moment: nothing in flight counts from then on, and the edges
/// end with an abort.
pub(crate) fn abort_of(life: Arc<dyn EdgesLife>) -> Abort {
    Box::new(move |why, deadline| {
        life.kill(why);
        Arc::clone(&life).end(false, deadline)
    })
}

/// Memory that may not be freed yet: operations of a generation may touch it until the generation is gone, and other
/// work may touch it until these events are done and this stream is idle.
#[derive(Debug)]
pub(crate) struct PendingFree {
    pub(crate) buffer: DeviceBuffer,
    pub(crate) events: Vec<Event>,
    pub(crate) stream: Option<Stream>,
}

impl PendingFree {
    pub(crate) fn free(self) {
        self.buffer.free_behind(self.events, self.stream);
    }
}

/// Returns the range of `len` bytes that begins `at` bytes into the memory.
pub(crate) fn part(of: DevicePtr, at: usize, len: usize) -> DevicePtr {
    let address = of.address + at as u64;
    DevicePtr { address, len }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves a consistent value behind if its holder panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
