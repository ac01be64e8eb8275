//! Payloads in the memory of a GPU: slots, and the leases of them that stages hold.
//!
//! Each slot belongs to one edge. What moves its payload, NCCL, the copy engine or a stage of the same rank, is the backend's own.

mod edge;
mod far;
mod lease;
mod local;
pub(crate) mod p2p;
mod slots;

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub use self::edge::{DeviceIn, DeviceOut};
pub(crate) use self::edge::{Lone, Mover, Turn, join};
pub(crate) use self::far::Far;
pub use self::lease::{DeviceRx, DeviceTx, Receiving, Sending};
pub use self::local::DeviceLocal;
pub(crate) use self::slots::{DeviceSlots, Slot};
use pp_device::{DeviceBuffer, DevicePtr, Event, Stream};
use pp_edges::error::TransportError;

/// What all edges with one peer have in common, as their slots see it: they live and end together.
pub(crate) trait EdgesLife: Debug + Send + Sync {
    /// An error once they are dead: nothing in flight is believed any more.
    #[inline]
    fn check(&self) -> Result<(), TransportError> {
        if self.is_dead() {
            return Err(self.aborted());
        }
        Ok(())
    }

    fn is_dead(&self) -> bool;

    /// That they are dead, and why.
    fn aborted(&self) -> TransportError;

    /// A completion was asked for in vain.
    ///
    /// # Errors
    /// It will never come.
    fn poll(&self) -> Result<(), TransportError>;

    /// Makes everything in flight an error, whatever the device says; nothing is issued any more. The first reason stays.
    fn kill(&self, why: &str);

    /// Ends them, in order if nothing is in flight. Waits for the end until the deadline.
    ///
    /// # Errors
    /// They did not end by then, or not as they should.
    fn end(self: Arc<Self>, is_clean: bool, deadline: Instant) -> Result<(), TransportError>;

    /// Frees memory once nothing of this life can touch it any more.
    fn free_later(&self, pending: PendingFree);
}

/// Memory that operations of a generation may touch until it is gone, and that other work may touch
/// until these events are done and this stream is idle.
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

/// So many bytes of the memory, from this one on.
pub(crate) fn part(of: DevicePtr, at: usize, len: usize) -> DevicePtr {
    let address = of.address + at as u64;
    DevicePtr { address, len }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves a whole value behind if its holder panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
