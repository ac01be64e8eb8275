//! The numbers that say how far a slot is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pp_device::{CudaError, DevicePtr, Event, Registered, SharedMemory, Stream};

use crate::gpu::Far;
use crate::host::region::{Region, SharedWords};

/// The numbers of one slot, each on a cache line of its own.
#[derive(Debug)]
#[repr(C, align(64))]
struct Numbers {
    /// How many payloads have come into it: the sender's device writes it.
    arrived: AtomicU32,
    _apart: [AtomicU32; 15],
    /// How many of them were read: the receiver's device writes it, or its host.
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
    /// Its stream copies there, into memory of the receiver, which stays mapped.
    Out {
        to: DevicePtr,
        _memory: Arc<SharedMemory>,
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

    /// The receiver: the next payload was announced.
    pub(super) fn expect(&self) {
        self.next();
    }

    /// Counts one payload more, and gives its number.
    fn next(&self) -> u32 {
        // One thread sends, and one receives.
        self.due.fetch_add(1, Ordering::AcqRel).wrapping_add(1)
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

    unsafe fn put(&self, from: DevicePtr, stream: &Stream) -> Result<(), CudaError> {
        let Side::Out { to, .. } = self.side else {
            unreachable!("nothing is sent from a slot of the receiver");
        };
        let word = self.at + std::mem::offset_of!(Numbers, arrived);
        // SAFETY: the caller's promise. The memory there and the page are mapped until the stream has passed.
        unsafe {
            stream.copy(from, to)?;
            stream.write_value(self.page.address() + word as u64, self.next())
        }
    }

    fn used_until(&self, events: Vec<Event>) {
        if let Side::In(memory, _) = &self.side {
            memory.used_until(events, Vec::new());
        }
    }
}
