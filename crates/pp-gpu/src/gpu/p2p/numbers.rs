//! The numbers that say how far each slot is.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use pp_device::{CudaError, DevicePtr, Event, Registered, SharedMemory, Stream};

use crate::gpu::Far;
use pp_edges::shm::region::{Region, SharedWords};

/// The numbers of one slot, each on its own cache line.
#[derive(Debug)]
#[repr(C, align(64))]
struct Numbers {
    /// The number of the last payload that has arrived. The sender's device writes it.
    arrived: AtomicU32,
    _apart: [AtomicU32; 15],
    /// The number of the last payload that was read. The receiver's device writes it, or its host.
    read: AtomicU32,
}

// SAFETY: atomics and padding; every bit pattern is valid.
unsafe impl SharedWords for Numbers {}

/// The page with the numbers of all edges with a peer. The streams of their copies and credits write it.
pub(super) type Page = Registered<Region>;

/// Returns the bytes that the numbers of `slots` slots take, in whole pages.
pub(super) fn bytes(slots: usize) -> usize {
    let all = slots * size_of::<Numbers>();
    all.max(1).next_multiple_of(rustix::param::page_size())
}

/// The number before the first one, chosen so that numbers wrap around in every run.
const BEFORE: u32 = u32::MAX - 1;

/// The side of a slot that this rank has.
#[derive(Debug)]
pub(super) enum Side {
    /// This rank sends: its stream copies into this memory of the receiver. A payload that outlives its edge does not
    /// keep the memory mapped.
    Out {
        to: DevicePtr,
        memory: Weak<SharedMemory>,
    },
    /// This rank receives: the slot lies in this memory, and this stream returns the slot.
    In(Arc<SharedMemory>, Stream),
}

/// The remote end of a slot, as this rank sees it.
#[derive(Debug)]
pub(super) struct FarSlot {
    page: Arc<Page>,
    at: usize,
    /// The number that the other device writes when it is done: the number of the payload that was last copied or
    /// announced. Both ranks count the payloads of the slot.
    due: AtomicU32,
    side: Side,
}

impl FarSlot {
    /// Returns the slot whose numbers are the `index`th of the page.
    pub(super) fn new(page: &Arc<Page>, index: usize, side: Side) -> Self {
        Self {
            page: Arc::clone(page),
            at: index * size_of::<Numbers>(),
            due: AtomicU32::new(BEFORE),
            side,
        }
    }

    fn numbers(&self) -> &Numbers {
        self.page.words(self.at)
    }
}

impl Far for FarSlot {
    #[inline]
    fn has_moved(&self, _: &Event) -> Result<bool, CudaError> {
        let numbers = self.numbers();
        let number = match self.side {
            Side::In(..) => &numbers.arrived,
            Side::Out { .. } => &numbers.read,
        };
        Ok(number.load(Ordering::Acquire) == self.due.load(Ordering::Acquire))
    }

    /// The receiver waits for the number.
    fn is_announced_last(&self) -> bool {
        false
    }

    fn give_back(&self, behind: Option<&Event>) -> Result<bool, CudaError> {
        let number = self.due.load(Ordering::Acquire);
        let (Some(work), Side::In(_, credits)) = (behind, &self.side) else {
            self.numbers().read.store(number, Ordering::Release);
            return Ok(true);
        };
        let word = self.at + std::mem::offset_of!(Numbers, read);
        credits.wait(work)?;
        // SAFETY: an atomic of the registered page, which stays until the stream has passed the write.
        unsafe { credits.write_value(self.page.address() + word as u64, number) }?;
        Ok(true)
    }

    fn begin(&self) {
        self.due.fetch_add(1, Ordering::AcqRel);
    }

    unsafe fn put(&self, from: DevicePtr, stream: &Stream, _: &Event) -> Result<bool, CudaError> {
        let Side::Out { to, memory } = &self.side else {
            unreachable!("nothing is sent from a slot of the receiver");
        };
        let Some(_mapped) = memory.upgrade() else {
            return Ok(false);
        };
        let number = self.due.load(Ordering::Acquire);
        let word = self.at + std::mem::offset_of!(Numbers, arrived);
        // SAFETY: the caller's promise. The memory there and the page are unmapped when the edge's stream has passed.
        unsafe {
            stream.copy(from, *to)?;
            stream.write_value(self.page.address() + word as u64, number)?;
        }
        Ok(true)
    }

    unsafe fn fetch(&self, _: DevicePtr, _: &Event) -> Result<(), CudaError> {
        Ok(())
    }

    fn used_until(&self, events: Vec<Event>) {
        if let Side::In(memory, _) = &self.side {
            memory.used_until(events, Vec::new());
        }
    }
}
