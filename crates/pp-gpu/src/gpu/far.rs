//! The remote end of a slot.

use std::fmt::Debug;

use pp_device::{CudaError, DevicePtr, Event, Stream};

/// The remote end of a slot that a copy engine fills or reads. No event of this device tells what the other device has
/// done, so both devices write numbers into memory that both hosts read.
pub(crate) trait Far: Debug + Send + Sync {
    /// Tells whether the other device is done: it has written the announced payload, or has read the sent one.
    fn has_moved(&self) -> bool;

    /// Returns the slot to its sender, after the event `behind` if there is one.
    ///
    /// # Errors
    /// The driver refuses.
    fn give_back(&self, behind: Option<&Event>) -> Result<(), CudaError>;

    /// Returns the number of the next payload. The payload is there when this number has arrived. Only the holder of
    /// the slot calls this.
    fn next(&self) -> u32;

    /// Issues the copy of a payload into the slot of the other rank, and the write of its number behind the copy.
    /// Returns false if the edge is gone.
    ///
    /// # Errors
    /// The driver refuses; part of the work may have been issued.
    ///
    /// # Safety
    /// The slot of the other rank has room for the bytes, and the other rank has returned it. `stream` is the stream of
    /// the edge, and is ordered behind everything that writes the bytes. Nothing writes or frees the bytes before the
    /// number has come back or the stream has passed the copy.
    unsafe fn put(&self, from: DevicePtr, number: u32, stream: &Stream) -> Result<bool, CudaError>;

    /// Keeps memory that the other rank has mapped until these events are done.
    fn used_until(&self, events: Vec<Event>);
}
