//! Memory of the device, and page-locked memory of the host that the device can reach.

use std::ffi::c_void;
use std::fmt;
use std::ops::Deref;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use crate::device::Device;
use crate::driver::{Address, Handle, call};
use crate::error::CudaError;
use crate::reclaim::{DeferredFree, Uses, Work};
use crate::stream::{Event, Stream};

/// Where bytes lie on a device. Only numbers: what hands this out says who may use them, and until
/// when.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DevicePtr {
    /// The address.
    pub address: u64,
    /// Bytes there.
    pub len: usize,
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{}", self.address, self.len)
    }
}

/// What the driver calls to free it.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Device,
    PageLocked,
}

/// Memory that any stream of a device may use: what the two kinds of buffers share.
///
/// # If dropped
/// Never waits. The reclaimer's thread frees it some time later when every use that
/// [`Allocation::used_by`] noted is over; else it is leaked, with a warning.
#[derive(Debug)]
pub struct Allocation {
    device: Device,
    kind: Kind,
    address: Address,
    len: usize,
    uses: Uses,
    /// Freed once this is done, however long that takes, and the uses are over.
    behind: Option<(Vec<Event>, Option<Stream>)>,
    /// Closed once it is freed.
    until_freed: Option<Sender<()>>,
}

impl Allocation {
    /// Takes over memory that was just allocated, or explains why there is none.
    fn new(
        device: &Device,
        kind: Kind,
        len: usize,
        allocated: Result<Address, CudaError>,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            address: allocated.map_err(|error| with_sizes(error, device, name(kind), len))?,
            device: device.clone(),
            kind,
            len,
            uses: Uses::default(),
            behind: None,
            until_freed: None,
        })
    }

    /// Where it is, as a `CUdeviceptr`; of page-locked memory the same on the host.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Says whether it holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device it lies on, or that can reach it.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Notes that what was issued to the stream so far uses this buffer.
    ///
    /// # Errors
    /// The driver refuses. The buffer then counts as used for good.
    pub fn used_by(&self, stream: &Stream) -> Result<(), CudaError> {
        self.uses.note(stream)
    }

    /// Says whether every use that was noted is over.
    ///
    /// # Errors
    /// Something issued before failed.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        self.uses.are_over()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let behind = match self.behind.take() {
            Some((events, stream)) => Work {
                uses: std::mem::take(&mut self.uses),
                events,
                streams: stream.into_iter().collect(),
            },
            None if matches!(self.uses.are_over(), Ok(true)) => Work {
                uses: std::mem::take(&mut self.uses),
                ..Work::default()
            },
            None => {
                let (kind, bytes) = (name(self.kind), self.len);
                tracing::warn!(
                    bytes,
                    "{kind} memory is leaked: work that uses it is not over"
                );
                return;
            }
        };
        let (kind, address) = (self.kind, self.address);
        let until_freed = self.until_freed.take();
        let free = move || {
            let _until_freed = until_freed;
            match kind {
                // SAFETY: allocated by `DeviceBuffer`, whose only owner gave it up here, once.
                Kind::Device => unsafe { call!(cuMemFree_v2(address)) },
                // SAFETY: likewise, by `PinnedBuffer`.
                Kind::PageLocked => unsafe { call!(cuMemFreeHost(address as Handle)) },
            }
        };
        DeferredFree::submit(&self.device, behind, free);
    }
}

/// Memory on a device, at a multiple of 256.
///
/// # If dropped
/// As [`Allocation`].
#[derive(Debug)]
pub struct DeviceBuffer(Allocation);

impl DeviceBuffer {
    /// Allocates. Not for the steady state: this may wait for the device.
    ///
    /// # Errors
    /// The device has no memory left.
    pub fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        device.bind_anew()?;
        let mut address = 0;
        // SAFETY: writes one address to a place that is ours; the context is current. The driver
        // refuses to allocate nothing, so an empty buffer has a byte that is never used.
        let allocated = unsafe { call!(cuMemAlloc_v2(&raw mut address, len.max(1))) };
        Allocation::new(device, Kind::Device, len, allocated.map(|()| address)).map(Self)
    }

    /// Where it is.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        DevicePtr {
            address: self.address(),
            len: self.len(),
        }
    }

    /// Frees it once these events are done and this stream is idle, on another thread; leaks it
    /// when the device cannot say so.
    pub fn free_behind(mut self, events: Vec<Event>, stream: Option<Stream>) {
        self.0.behind = Some((events, stream));
    }
}

impl Deref for DeviceBuffer {
    type Target = Allocation;

    fn deref(&self) -> &Allocation {
        &self.0
    }
}

/// Page-locked memory of the host. The device copies from and to it by itself; the host reads and
/// writes it at its usual speed.
///
/// # If dropped
/// As [`Allocation`].
#[derive(Debug)]
pub struct PinnedBuffer(Allocation);

impl PinnedBuffer {
    /// Allocates and zeroes. Not for the steady state: this may wait for the device.
    ///
    /// # Errors
    /// The host has no memory that can be locked.
    pub fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        device.bind_anew()?;
        let mut base: *mut c_void = std::ptr::null_mut();
        let room = len.max(1);
        // SAFETY: writes one address to a place that is ours; the context is current. Flags 0:
        // ordinary, cached memory.
        let allocated = unsafe { call!(cuMemHostAlloc(&raw mut base, room, 0)) };
        let allocated = allocated.map(|()| base as Address);
        let buffer = Self(Allocation::new(device, Kind::PageLocked, len, allocated)?);
        assert!(!base.is_null(), "a call that succeeded gave memory");
        // SAFETY: `room` bytes that were just allocated and that nothing else knows.
        unsafe { buffer.base().write_bytes(0, room) };
        Ok(buffer)
    }

    /// Frees the buffer, and waits for that at most `within`; after that it is freed later. The driver may hold up other work
    /// while it frees.
    pub fn free_within(mut self, within: Duration) {
        let (until_freed, freed) = channel();
        self.0.until_freed = Some(until_freed);
        drop(self);
        let _ = freed.recv_timeout(within);
    }

    /// Its bytes. Does not wait: what a stream still writes is not there yet.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialized bytes that this value owns. The caller that lets the device
        // write them has promised that they are not read before that is over (`Stream::download`).
        unsafe { std::slice::from_raw_parts(self.base(), self.len()) }
    }

    /// Its bytes, to be written. Does not wait: what a stream still reads must not be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and `&mut self` makes the borrow unique; the caller that lets the
        // device read them has promised not to write before that is over (`Stream::upload`).
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.len()) }
    }

    /// Where it is on the host, for copies.
    pub(crate) fn base(&self) -> *mut u8 {
        self.address() as *mut u8
    }
}

impl Deref for PinnedBuffer {
    type Target = Allocation;

    fn deref(&self) -> &Allocation {
        &self.0
    }
}

fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Device => "device",
        Kind::PageLocked => "page-locked",
    }
}

/// An allocation that failed for want of memory, with the numbers.
#[cold]
pub(crate) fn with_sizes(
    error: CudaError,
    device: &Device,
    what: &'static str,
    len: usize,
) -> CudaError {
    if !error.is_out_of_memory() {
        return error;
    }
    let left = device.memory().ok();
    CudaError::NoMemory {
        what,
        wanted: len as u64,
        left: left.map(|left| (left.free, left.total)),
        said: Box::new(error),
    }
}
