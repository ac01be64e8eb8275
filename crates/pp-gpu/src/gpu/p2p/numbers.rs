//! The numbers that say how far a slot is.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use pp_device::{CudaError, DevicePtr, Event, Registered, SharedMemory, Stream};

use crate::gpu::Far;
use pp_edges::shm::region::{Region, SharedWords};

/// The numbers of one slot, each on a cache line of its own.
#[derive(Debug)]
#[repr(C, align(64))]
struct Numbers {
    /// The number of the payload that is there: the sender's device writes it.
    arrived: AtomicU32,
    _apart: [AtomicU32; 15],
    /// The number of the payload that was read: the receiver's device writes it, or its host.
    read: AtomicU32,
}

// SAFETY: atomics and padding; every bit pattern is valid.
unsafe impl SharedWords for Numbers {}

/// The numbers of all edges with a peer. The streams of their copies and credits write them.
pub(super) type Page = Registered<Region>;

/// Bytes of the numbers of so many slots.
pub(super) fn bytes(slots: usize) -> usize {
    let all = slots * size_of::<Numbers>();
    all.max(1).next_multiple_of(rustix::param::page_size())
}

/// The number before the first, so that numbers wrap in every run.
const BEFORE: u32 = u32::MAX - 1;

/// What this rank does with a slot.
#[derive(Debug)]
pub(super) enum Side {
    /// Its stream copies there, into memory of the receiver. A payload that is kept longer than its edge does not keep that.
    Out {
        to: DevicePtr,
        memory: Weak<SharedMemory>,
    },
    /// It lies in this memory, and this stream gives it back.
    In(Arc<SharedMemory>, Stream),
}

/// A slot, as this rank sees what the device of the other one does with it.
#[derive(Debug)]
pub(super) struct FarSlot {
    page: Arc<Page>,
    at: usize,
    /// The number that the other device writes when it is done: that of the payload which was copied or announced last.
    /// Both ranks count the payloads of the slot.
    due: AtomicU32,
    side: Side,
}

impl FarSlot {
    /// The slot whose numbers are the `index`th of the page.
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
    fn has_moved(&self) -> bool {
        let numbers = self.numbers();
        let number = match self.side {
            Side::In(..) => &numbers.arrived,
            Side::Out { .. } => &numbers.read,
        };
        number.load(Ordering::Acquire) == self.due.load(Ordering::Acquire)
    }

    fn give_back(&self, behind: Option<&Event>) -> Result<(), CudaError> {
        let number = self.due.load(Ordering::Acquire);
        let (Some(work), Side::In(_, credits)) = (behind, &self.side) else {
            self.numbers().read.store(number, Ordering::Release);
            return Ok(());
        };
        let word = self.at + std::mem::offset_of!(Numbers, read);
        credits.wait(work)?;
        // SAFETY: an atomic of the registered page, which stays until the stream has passed the write.
        unsafe { credits.write_value(self.page.address() + word as u64, number) }
    }

    fn next(&self) -> u32 {
        self.due.fetch_add(1, Ordering::AcqRel).wrapping_add(1)
    }

    unsafe fn put(&self, from: DevicePtr, number: u32, stream: &Stream) -> Result<bool, CudaError> {
        let Side::Out { to, memory } = &self.side else {
            unreachable!("nothing is sent from a slot of the receiver");
        };
        let Some(_mapped) = memory.upgrade() else {
            return Ok(false);
        };
        let word = self.at + std::mem::offset_of!(Numbers, arrived);
        // SAFETY: the caller's promise. The memory there and the page are unmapped when the edge's stream has passed.
        unsafe {
            stream.copy(from, *to)?;
            stream.write_value(self.page.address() + word as u64, number)?;
        }
        Ok(true)
    }

    fn used_until(&self, events: Vec<Event>) {
        if let Side::In(memory, _) = &self.side {
            memory.used_until(events, Vec::new());
        }
    }
}
