//! The numbers that say how far a slot is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pp_device::{CudaError, Event, Registered, SharedMemory, Stream};

use crate::gpu::Far;
use crate::host::region::{Region, SharedWords};

/// The numbers of one slot, each on a cache line of its own.
#[derive(Debug)]
#[repr(C, align(64))]
struct Numbers {
    /// The message whose payload is there: the sender's device writes it.
    arrived: AtomicU32,
    _apart: [AtomicU32; 15],
    /// The message whose payload was read: the receiver's device writes it, or its host.
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

/// A slot, as this rank sees what the device of the other one does with it.
#[derive(Debug)]
pub(super) struct FarSlot {
    page: Arc<Page>,
    at: usize,
    /// The number that the other device writes when it is done.
    due: AtomicU32,
    /// Of an incoming slot, the memory in which it lies, and the stream of its credits.
    incoming: Option<(Arc<SharedMemory>, Stream)>,
}

impl FarSlot {
    /// The slot whose numbers are the `index`th of the page.
    pub(super) fn new(
        page: &Arc<Page>,
        index: usize,
        incoming: Option<(Arc<SharedMemory>, Stream)>,
    ) -> Self {
        Self {
            page: Arc::clone(page),
            at: index * size_of::<Numbers>(),
            due: AtomicU32::new(0),
            incoming,
        }
    }

    fn numbers(&self) -> &Numbers {
        self.page.words(self.at)
    }

    /// The sender: message `number` is about to be copied there. The address of the number to write behind the copy.
    pub(super) fn send(&self, number: u32) -> u64 {
        let was = self.due.swap(number, Ordering::AcqRel);
        if was == number {
            // It is the number that is there already: of a slot that was never used, or after 2^32 messages. The receiver
            // looks once it has the header, and nothing is under way.
            self.numbers().arrived.store(!number, Ordering::Release);
            self.numbers().read.store(!number, Ordering::Release);
        }
        self.page.address() + (self.at + std::mem::offset_of!(Numbers, arrived)) as u64
    }

    /// The receiver: message `number` was announced for it.
    pub(super) fn expect(&self, number: u32) {
        self.due.store(number, Ordering::Release);
    }
}

impl Far for FarSlot {
    #[inline]
    fn has_moved(&self) -> bool {
        let numbers = self.numbers();
        let number = match self.incoming {
            Some(_) => &numbers.arrived,
            None => &numbers.read,
        };
        number.load(Ordering::Acquire) == self.due.load(Ordering::Acquire)
    }

    fn give_back(&self, behind: Option<&Event>) -> Result<(), CudaError> {
        let number = self.due.load(Ordering::Acquire);
        let (Some(work), Some((_, credits))) = (behind, &self.incoming) else {
            self.numbers().read.store(number, Ordering::Release);
            return Ok(());
        };
        let word = self.at + std::mem::offset_of!(Numbers, read);
        credits.wait(work)?;
        // SAFETY: an atomic of the registered page, which stays until the stream has passed the write.
        unsafe { credits.write_value(self.page.address() + word as u64, number) }
    }

    fn used_until(&self, events: Vec<Event>) {
        if let Some((memory, _)) = &self.incoming {
            memory.used_until(events, Vec::new());
        }
    }
}
