//! Payloads in the memory of a GPU: slots, and the leases of them that stages hold.
//!
//! Each slot belongs to one edge. What moves its payload, NCCL, the copy engine or a stage of the same rank, is the backend's own.

mod lease;
mod local;
pub mod p2p;
mod slots;

use std::fmt::Debug;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use self::lease::{DeviceRx, DeviceTx, Receiving, Sending};
pub use self::local::DeviceLocal;
pub(crate) use self::slots::{DeviceSlots, Pool, RxPool, Slot, TxPool};
use crate::error::TransportError;
use pp_device::{CudaError, DeviceBuffer, DevicePtr, Event, Stream};

/// What all edges with one peer have in common, as their slots see it: they live and end together.
pub(crate) trait EdgesLife: Debug + Send + Sync {
    /// An error once they are dead: nothing in flight is believed any more.
    fn check(&self) -> Result<(), TransportError>;

    fn is_dead(&self) -> bool;

    /// A completion was asked for in vain.
    ///
    /// # Errors
    /// It will never come.
    fn poll(&self) -> Result<(), TransportError>;

    /// Frees memory once nothing of this life can touch it any more.
    fn bury(&self, remains: Remains);
}

/// What another device does with a slot, where no event of this one tells of it. Numbers that both hosts see do.
pub(crate) trait Far: Debug + Send + Sync {
    /// Whether the other device is done: it has written what was announced, or has read what was sent.
    fn has_moved(&self) -> bool;

    /// Tells the other rank that the slot is read, behind this event where there is one.
    ///
    /// # Errors
    /// The driver refuses.
    fn give_back(&self, behind: Option<&Event>) -> Result<(), CudaError>;

    /// Counts one payload more, which is not done before its number is there. Who has the slot calls this.
    fn next(&self) -> u32;

    /// Issues the copy of a payload from here into the slot of the other rank, and its number behind that. False where the edge
    /// is gone.
    ///
    /// # Errors
    /// The driver refuses; some of it may have been issued.
    ///
    /// # Safety
    /// There is room for as many bytes. They are written by nothing that the stream is not ordered behind, and neither written
    /// nor freed before the number has come back or the stream has passed the copy. The other rank has given back the slot.
    /// The stream is that of the edge.
    unsafe fn put(&self, from: DevicePtr, number: u32, stream: &Stream) -> Result<bool, CudaError>;

    /// Where the slot lies, if the other rank has a mapping of it, too: its memory stays until these events are done.
    fn used_until(&self, events: Vec<Event>);
}

/// Memory that operations of a generation may touch until it is gone, and that other work may touch
/// until these events are done and this stream is idle.
#[derive(Debug)]
pub(crate) struct Remains {
    pub(crate) buffer: DeviceBuffer,
    pub(crate) events: Vec<Event>,
    pub(crate) stream: Option<Stream>,
}

impl Remains {
    pub(crate) fn free(self) {
        self.buffer.free_behind(self.events, self.stream);
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves a whole value behind if its holder panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
