//! A memfd that processes share: sealed, mapped once, and accessed only as atomics and raw bytes.
//!
//! Hazard: if a mapped file shrinks, the process is killed (SIGBUS), and memory that another process writes is no
//! `&[u8]`. Guarantee: the file is sealed against resizing before its descriptor leaves this process. A descriptor from
//! a peer is refused unless it is sealed in the same way and has exactly the expected size. The pages are reserved when
//! the file is mapped. The only references handed out point to atomics. Everything else is copied, or borrowed under the
//! slot protocol of [`pp_words::slots`].
//!
//! The memory has no name in the file system: the kernel frees the pages with the last process.
//!
//! Choices: much memory is made of large pages where the kernel has some. It is then made, mapped by the other rank and
//! page-locked in a fraction of the time, and a rank that is started again waits for that.

use std::ffi::c_void;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::memory::available_bytes;
use super::parts::{in_parts, round_to_pages};
use crate::error::TransportError;
use pp_words::bell::BellWords;
use pp_words::ring::{RingBytes, RingWords};
use pp_words::slots::SlotWord;

/// Bytes of a region whose pages are worth a thread that touches them.
const TOUCHED_EACH: usize = 16 << 20;
/// Bytes of a large page.
const LARGE: usize = 2 << 20;
/// Bytes of a region that are worth large pages.
const WORTH_LARGE: usize = 16 << 20;

/// Marks the types that may be referenced in memory which another process writes.
///
/// # Safety
/// 1. Every bit pattern is a value of the type.
/// 2. Every field is an atomic (or padding), so a write by the other process is no data race.
pub unsafe trait SharedWords {}

// SAFETY: atomics and padding; every bit pattern is valid.
unsafe impl SharedWords for BellWords {}
// SAFETY: atomics and padding; every bit pattern is valid.
unsafe impl SharedWords for RingWords {}
// SAFETY: one atomic and padding; every bit pattern is valid.
unsafe impl SharedWords for SlotWord {}

/// One shared mapping.
///
/// Dropping it unmaps the memory and closes the descriptor; the mappings of peers stay.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    fd: OwnedFd,
}

// SAFETY: `Region` hands out references to atomics only; its raw bytes are reached through
// `unsafe` code that states who owns them at the time. The mapping lives until drop.
unsafe impl Send for Region {}
// SAFETY: as for `Send`.
unsafe impl Sync for Region {}

impl Region {
    /// Makes and maps a sealed memfd of `len` bytes, rounded up to whole pages. The memory is zeroed. Its pages are
    /// reserved and touched, so that the steady state takes no page fault.
    ///
    /// # Errors
    /// The kernel has no memory or no descriptor left; the error names the size that was asked for.
    pub fn create(name: &str, len: usize) -> Result<Self, TransportError> {
        let fail = |source| TransportError::Shared {
            what: format!("cannot make {len} bytes of shared memory"),
            source,
        };
        let len = round_to_pages(len);
        let wanted = len as u64;
        if let Some(available) = available_bytes().filter(|available| wanted > *available) {
            return Err(TransportError::NoMemory { wanted, available });
        }
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(fail)?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(fail)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(fail)?;
        let region = Self::map(fd, len)?;
        region.touch(Advice::LinuxPopulateWrite, len >= WORTH_LARGE)?;
        Ok(region)
    }

    /// Maps a memfd that a peer made with [`Region::create`].
    ///
    /// # Errors
    /// The descriptor is not sealed against resizing, or its size is not the expected one.
    pub fn open(fd: OwnedFd, len: usize) -> Result<Self, TransportError> {
        let refuse = |why: String| TransportError::BadRegion { why };
        let len = round_to_pages(len);
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(|e| refuse(format!("it is no memfd ({e})")))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(refuse("it is not sealed against resizing".into()));
        }
        let size = rustix::fs::fstat(&fd)
            .map_err(|e| refuse(format!("it has no size ({e})")))?
            .st_size;
        if u64::try_from(size) != Ok(len as u64) {
            return Err(refuse(format!(
                "it has {size} bytes where {len} were agreed"
            )));
        }
        // A read maps up to 16 neighbours as writable pages, and a write would map one. A page that the peer left out is made.
        let region = Self::map(fd, len)?;
        region.touch(Advice::LinuxPopulateRead, false)?;
        Ok(region)
    }

    /// Maps a region.
    fn map(fd: OwnedFd, len: usize) -> Result<Self, TransportError> {
        // SAFETY: a fresh mapping at an address of the kernel's choice, which takes the wish for one only where nothing lies,
        // aliases nothing of ours; `fd` is sealed, so the pages behind it stay for as long as the mapping does.
        let base = unsafe {
            rustix::mm::mmap(
                place_for(len),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        }
        .map_err(|source| no_room(len, source))?;
        let base = NonNull::new(base.cast()).expect("mmap gives a non-null address or an error");
        Ok(Self { base, len, fd })
    }

    /// Reserves and maps all pages, and first asks for large ones if that is wanted. The kernel zeroes a page when it is first
    /// touched, so several threads share them. Running out of memory later would be a SIGBUS in the middle of a copy.
    fn touch(&self, advice: Advice, makes_large: bool) -> Result<(), TransportError> {
        let touched = in_parts(self.len, (TOUCHED_EACH, LARGE), |at, len| {
            if makes_large {
                self.make_large(at, len);
            }
            let base = self.bytes_at(at, len);
            // SAFETY: whole pages of this mapping. It changes no byte.
            unsafe { madvise(base.as_ptr().cast(), len, advice) }
        });
        let touched = match touched {
            Err(Errno::INVAL) => self.touch_on_old_linux(),
            // It says so where a touch would be a SIGBUS: there is no page left.
            Err(Errno::FAULT) => Err(Errno::NOMEM),
            touched => touched,
        };
        touched.map_err(|source| no_room(self.len, source))
    }

    /// Asks for large pages in memory that is not touched yet. Where there are none, all stays as it is.
    fn make_large(&self, at: usize, len: usize) {
        let page = round_to_pages(1);
        // The kernel makes a large page where there is a small one.
        for first in (at..at + len).step_by(LARGE) {
            let first = self.bytes_at(first, page).as_ptr().cast();
            // SAFETY: a whole page of this mapping. It changes no byte.
            if unsafe { madvise(first, page, Advice::LinuxPopulateWrite) }.is_err() {
                return;
            }
        }
        let base = self.bytes_at(at, len).as_ptr().cast();
        // SAFETY: whole pages of this mapping. It changes no byte.
        let _ = unsafe { libc::madvise(base, len, libc::MADV_COLLAPSE) };
    }

    /// Linux before 5.14 touches pages while it maps them, on one thread.
    fn touch_on_old_linux(&self) -> rustix::io::Result<()> {
        let len = self.len as u64;
        rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), 0, len)?;
        let flags = MapFlags::SHARED | MapFlags::POPULATE | MapFlags::FIXED;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: it replaces this mapping by another one of the same bytes; nothing was lent from it yet.
        unsafe {
            rustix::mm::mmap(
                self.base.as_ptr().cast(),
                self.len,
                access,
                flags,
                &self.fd,
                0,
            )
        }?;
        Ok(())
    }

    /// Returns the descriptor, to be passed to a peer on this host.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the atomics at `offset`.
    ///
    /// # Panics
    /// If they do not lie, aligned, inside the region. Offsets come from this program's own layout, never from a peer.
    pub fn words<T: SharedWords>(&self, offset: usize) -> &T {
        assert!(offset + size_of::<T>() <= self.len && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: in bounds and aligned (just asserted; the base is page aligned and the mapping
        // lives as long as `self`); `T: SharedWords` makes any content and any concurrent write
        // by the peer fine.
        unsafe { self.base.add(offset).cast::<T>().as_ref() }
    }

    /// Returns the address of the whole region, and its bytes, which are whole pages.
    pub fn pages(&self) -> (NonNull<u8>, usize) {
        (self.base, self.len)
    }

    /// Returns the address of `len` raw bytes at `offset`. The caller must prove who may touch them.
    ///
    /// # Panics
    /// If they do not lie inside the region.
    pub fn bytes_at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: the range was just checked to lie inside the mapping.
        unsafe { self.base.add(offset) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are what `mmap` gave; everything lent from the region holds
        // an `Arc` of it or borrows it, so nothing refers to it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn no_room(len: usize, source: Errno) -> TransportError {
    TransportError::Shared {
        what: format!("cannot reserve and map {len} bytes of shared memory"),
        source,
    }
}

/// Returns an address where so many bytes can be mapped and large pages begin, as a wish to the kernel; null for few bytes.
fn place_for(len: usize) -> *mut c_void {
    if len < WORTH_LARGE {
        return ptr::null_mut();
    }
    let (room, flags) = (len + LARGE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a fresh mapping at an address of the kernel's choice, without access to it.
    let free = unsafe { mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), flags) };
    free.map_or(ptr::null_mut(), |base| {
        // SAFETY: it was just mapped, and nothing knows it. Should another thread take the place, the wish is in vain.
        let _ = unsafe { munmap(base, room) };
        ptr::without_provenance_mut(base.addr().next_multiple_of(LARGE))
    })
}

/// The words of a ring at an offset of a region. They keep the region mapped.
#[derive(Debug)]
pub(crate) struct WordsAt {
    region: Arc<Region>,
    offset: usize,
}

impl WordsAt {
    pub(crate) fn new(region: &Arc<Region>, offset: usize) -> Self {
        let _in_bounds: &RingWords = region.words(offset);
        Self {
            region: Arc::clone(region),
            offset,
        }
    }
}

impl Deref for WordsAt {
    type Target = RingWords;

    fn deref(&self) -> &RingWords {
        self.region.words(self.offset)
    }
}

/// The data area of a ring that lies in a region.
#[derive(Debug)]
pub(crate) struct BytesAt {
    region: Arc<Region>,
    offset: usize,
    len: usize,
}

impl BytesAt {
    pub(crate) fn new(region: &Arc<Region>, offset: usize, len: usize) -> Self {
        let _in_bounds = region.bytes_at(offset, len);
        Self {
            region: Arc::clone(region),
            offset,
            len,
        }
    }
}

impl RingBytes for BytesAt {
    fn len(&self) -> usize {
        self.len
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        let to = self.region.bytes_at(self.offset + at, bytes.len());
        // SAFETY: in bounds (asserted); the ring's words give this side the range until it
        // publishes the head, and `bytes` is private memory, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) }
    }

    fn get(&self, at: usize, bytes: &mut [u8]) {
        assert!(at + bytes.len() <= self.len);
        let from = self.region.bytes_at(self.offset + at, bytes.len());
        // SAFETY: in bounds (asserted); the range was published by the peer and stays untouched
        // until this side moves the tail. A peer that breaks this only changes bytes that are
        // copied here once and then decoded as hostile.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) }
    }
}

#[cfg(test)]
mod tests {
    use pp_words::slots::{is_with_consumer, move_to_consumer};

    use super::*;

    #[test]
    fn a_region_of_another_size_is_refused() {
        let region = Region::create("pp-test", 8192).unwrap();
        let fd = region.fd().try_clone_to_owned().unwrap();
        let error = Region::open(fd, 4096).unwrap_err().to_string();
        assert!(error.contains("8192 bytes where 4096"), "{error}");
    }

    #[test]
    fn more_than_the_machine_has_is_refused_before_it_is_asked_for() {
        let error = Region::create("pp-test", 1 << 50).unwrap_err();
        assert!(matches!(error, TransportError::NoMemory { .. }), "{error}");
    }

    #[test]
    fn the_pages_of_a_peer_that_reserved_none_are_reserved() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("pp-test", flags).unwrap();
        let len = 64 * round_to_pages(1);
        rustix::fs::ftruncate(&fd, len as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let region = Region::open(fd, len).unwrap();
        let blocks = rustix::fs::fstat(region.fd()).unwrap().st_blocks;
        assert_eq!(blocks * 512, len as i64);
    }

    /// With large pages or without: the kernel may have none.
    #[test]
    fn much_memory_is_zeroed_and_reserved_and_both_mappings_see_it() {
        let len = WORTH_LARGE + LARGE + round_to_pages(1);
        let ours = Region::create("pp-test", len).unwrap();
        let theirs = Region::open(ours.fd().try_clone_to_owned().unwrap(), len).unwrap();
        let blocks = rustix::fs::fstat(ours.fd()).unwrap().st_blocks;
        assert_eq!(blocks * 512, len as i64);
        for at in (0..len).step_by(round_to_pages(1)) {
            let (ours, theirs) = (ours.words(at), theirs.words(at));
            assert!(!is_with_consumer(theirs));
            move_to_consumer(ours);
            assert!(is_with_consumer(theirs));
        }
    }

    #[test]
    fn an_unsealed_memfd_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("pp-test", flags).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        let error = Region::open(fd, 4096).unwrap_err().to_string();
        assert!(error.contains("not sealed"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_memfd_is_refused() {
        let fd = std::fs::File::open("/dev/null").unwrap().into();
        let error = Region::open(fd, 4096).unwrap_err().to_string();
        assert!(error.contains("no memfd"), "{error}");
    }

    #[test]
    fn both_mappings_see_the_same_words() {
        let ours = Region::create("pp-test", 4096).unwrap();
        let theirs = Region::open(ours.fd().try_clone_to_owned().unwrap(), 4096).unwrap();
        let (ours, theirs) = (ours.words::<BellWords>(0), theirs.words::<BellWords>(0));
        let ticket = theirs.listen();
        ours.ring();
        assert!(!theirs.is_silent_since(ticket));
    }
}
