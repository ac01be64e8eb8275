//! The memory that the members of a group share: their words, and the staging buffer of each.
//!
//! All members compute the same offsets from the number of members. No offset is read from the region.

use std::sync::Arc;

use crate::error::TransportError;
use crate::shm::region::{Region, SharedWords};
use pp_words::group::{GroupWords, LifeWords, MemberWords, PairWords, SLOTS};

/// Bytes of a piece.
pub(super) const PIECE: usize = 64 * 1024;
const PAGE: usize = 4096;

// SAFETY: atomics and padding; every bit pattern is valid.
unsafe impl SharedWords for MemberWords {}
// SAFETY: atomics and padding; every bit pattern is valid.
unsafe impl SharedWords for PairWords {}
// SAFETY: atomics and padding; every bit pattern is valid.
unsafe impl SharedWords for LifeWords {}

/// The memory as mapped by one member.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    region: Arc<Region>,
    members: usize,
}

const MEMBERS_AT: usize = size_of::<LifeWords>();

fn pairs_at(members: usize) -> usize {
    MEMBERS_AT + members * size_of::<MemberWords>()
}

fn staging_at(members: usize) -> usize {
    (pairs_at(members) + members * members * size_of::<PairWords>()).next_multiple_of(PAGE)
}

fn bytes(members: usize) -> usize {
    staging_at(members) + members * SLOTS as usize * PIECE
}

impl Memory {
    /// Makes the memory.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub(super) fn create(members: usize) -> Result<Self, TransportError> {
        let region = Arc::new(Region::create("pp-group", bytes(members))?);
        Ok(Self { region, members })
    }

    /// Maps the memory that another member made.
    ///
    /// # Errors
    /// The descriptor belongs to something else.
    pub(super) fn open(fd: std::os::fd::OwnedFd, members: usize) -> Result<Self, TransportError> {
        let region = Arc::new(Region::open(fd, bytes(members))?);
        Ok(Self { region, members })
    }

    pub(super) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    pub(super) fn life(&self) -> &LifeWords {
        self.region.words(0)
    }

    /// Returns the offset of a member's bell, which lies at the beginning of its words.
    pub(super) fn bell_at(&self, member: usize) -> usize {
        assert!(member < self.members);
        MEMBERS_AT + member * size_of::<MemberWords>() + std::mem::offset_of!(MemberWords, bell)
    }

    fn piece(&self, member: usize, slot: u64, len: usize) -> std::ptr::NonNull<u8> {
        assert!(member < self.members && slot < SLOTS && len <= PIECE);
        let at = (member * SLOTS as usize + slot as usize) * PIECE;
        self.region.bytes_at(staging_at(self.members) + at, len)
    }

    /// Copies a piece into a slot of a member, at its beginning.
    pub(super) fn put(&self, member: usize, slot: u64, bytes: &[u8]) {
        let to = self.piece(member, slot, bytes.len());
        // SAFETY: in bounds (asserted), and nothing in this process refers to the staging but the copies here and in
        // `get`, on the one thread that has the member; `bytes` is private memory, so the two do not overlap. Every caller
        // puts into a slot of its own, which all others have consumed by their words (`Counts::may_publish`,
        // `Counts::may_move`). A member whose words lie, or that reads or writes there all the same, gets or makes wrong
        // bytes: they are copied to where no length or offset is taken from them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) }
    }

    /// Copies bytes out of a slot of a member, from this one of its bytes on.
    pub(super) fn get(&self, member: usize, slot: u64, at: usize, bytes: &mut [u8]) {
        let end = at.checked_add(bytes.len()).expect("a slot is small");
        let from = self.piece(member, slot, end);
        // SAFETY: in bounds (asserted); the member has published the slot and leaves it alone until this one says that
        // it has consumed it. A member that breaks this only changes bytes that are copied here once.
        unsafe {
            let from = from.add(at).as_ptr();
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
        }
    }
}

impl GroupWords for Memory {
    fn members(&self) -> usize {
        self.members
    }

    fn member(&self, at: usize) -> &MemberWords {
        assert!(at < self.members);
        let offset = MEMBERS_AT + at * size_of::<MemberWords>();
        self.region.words(offset)
    }

    fn pair(&self, from: usize, to: usize) -> &PairWords {
        assert!(from < self.members && to < self.members);
        let at = (from * self.members + to) * size_of::<PairWords>();
        self.region.words(pairs_at(self.members) + at)
    }
}

#[cfg(test)]
impl Memory {
    /// Bytes before the staging.
    pub(super) fn bytes_of_words(&self) -> usize {
        staging_at(self.members)
    }

    /// Writes a word as a member may that follows no rules.
    pub(super) fn scribble(&self, at: usize, value: u64) {
        use std::sync::atomic::{AtomicU64, Ordering};
        let place = self.region.bytes_at(at, 8).cast::<AtomicU64>();
        assert!(place.is_aligned());
        // SAFETY: in bounds and aligned (asserted), and among the words, which are atomics.
        unsafe { place.as_ref() }.store(value, Ordering::Relaxed);
    }
}
