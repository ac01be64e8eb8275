//! The remote end of a slot.

use std::fmt::Debug;

use pp_device::{CudaError, DevicePtr, Event, Stream};

/// The remote end of a slot that a copy engine fills or reads. No event of this device tells how far the other device is; both
/// devices write numbers into memory that both hosts read.
pub(crate) trait Far: Debug + Send + Sync {
    /// Whether the other device is done: it has written what was announced, or has read what was sent.
    fn has_moved(&self) -> bool;

    /// Returns the slot to its sender once `behind` is done, or at once.
    ///
    /// # Errors
    /// The driver refuses.
    fn give_back(&self, behind: Option<&Event>) -> Result<(), CudaError>;

    /// The number of the next payload, which is there when this number has arrived. Only the holder of the slot calls this.
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

    /// Keeps the slot's memory until these events are done, where the other rank has mapped it.
    fn used_until(&self, events: Vec<Event>);
}
