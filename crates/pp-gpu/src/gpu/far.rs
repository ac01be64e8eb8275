//! The remote end of a slot.

use std::fmt::Debug;

use pp_device::{CudaError, DevicePtr, Event, Stream};

/// The remote end of a slot that a copy engine fills or reads: on another device, or in host memory.
pub(crate) trait Far: Debug + Send + Sync {
    /// Tells whether the transfer that was begun last is done: the announced payload is here, or the sent one was read.
    /// `moved` is the event of the slot behind its transfer.
    ///
    /// # Errors
    /// The device has failed.
    fn has_moved(&self, moved: &Event) -> Result<bool, CudaError>;

    /// Tells whether the header of a payload may leave only once the payload has moved.
    fn is_announced_last(&self) -> bool;

    /// Returns the slot to its sender, after the event `behind` if there is one. Returns false if the slot cannot be
    /// returned yet.
    ///
    /// # Errors
    /// The driver refuses.
    fn give_back(&self, behind: Option<&Event>) -> Result<bool, CudaError>;

    /// Counts the next payload of the slot. Only the holder of the slot calls this.
    fn begin(&self);

    /// Issues the copy of a payload into the slot of the other rank, and what tells that it has arrived. Returns false if
    /// the edge is gone.
    ///
    /// # Errors
    /// The driver refuses; part of the work may have been issued.
    ///
    /// # Safety
    /// The payload was counted. The slot of the other rank has room for the bytes, and the other rank has returned it.
    /// `stream` is the stream of the edge, and is ordered behind everything that writes the bytes. Nothing writes or frees
    /// the bytes before the transfer is done or the stream has passed the copy. `moved` is the event of the slot.
    unsafe fn put(
        &self,
        from: DevicePtr,
        stream: &Stream,
        moved: &Event,
    ) -> Result<bool, CudaError>;

    /// Brings the announced payload into the slot, if the other rank does not.
    ///
    /// # Errors
    /// The driver refuses; part of the work may have been issued.
    ///
    /// # Safety
    /// The payload was counted, and its header has come. `into` is the part of the slot that the payload takes up. Nothing
    /// uses or frees it before the payload is there. `moved` is the event of the slot.
    unsafe fn fetch(&self, into: DevicePtr, moved: &Event) -> Result<(), CudaError>;

    /// Keeps memory that the other rank has mapped until these events are done.
    fn used_until(&self, events: Vec<Event>);
}
