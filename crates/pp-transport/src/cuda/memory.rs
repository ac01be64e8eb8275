//! Memory of the device, and page-locked memory of the host that the device can reach.
//!
//! Freeing device memory or page-locked memory waits until the device is idle, and whoever calls
//! the driver meanwhile waits behind it. Behind a kernel that never ends that is for ever. So
//! whoever drops a buffer leaves it to a thread of its own, which frees nothing on a device whose
//! kernels may hang (a communicator that was given up and has not ended yet); later, when they
//! have ended, or never.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::device::Device;
use super::driver::{Address, Handle, call};
use super::error::CudaError;
use super::stream::{Event, Stream};

/// Time between two looks at a device in trouble.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Where bytes lie on a device. Only numbers: who may use them, and until when, is said by
/// whoever hands this out.
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

/// Which streams use a buffer, and up to where.
#[derive(Debug, Default)]
struct Uses(Mutex<Noted>);

#[derive(Debug, Default)]
struct Noted {
    /// Each stream has an event of its own: the use on one is not forgotten over that on another.
    uses: Vec<(Stream, Event)>,
    /// A use could not be noted, so nobody can tell when it ends.
    is_incomplete: bool,
}

impl Uses {
    fn note(&self, stream: &Stream) -> Result<(), CudaError> {
        let mut noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let result = noted.note(stream);
        noted.is_incomplete |= result.is_err();
        result
    }

    /// Whether every use is over.
    fn are_over(&self) -> Result<bool, CudaError> {
        let noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, event) in &noted.uses {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(!noted.is_incomplete)
    }
}

impl Noted {
    fn note(&mut self, stream: &Stream) -> Result<(), CudaError> {
        if let Some((_, event)) = self.uses.iter().find(|(other, _)| other.is_same(stream)) {
            return event.record(stream);
        }
        let event = Event::new(stream.device())?;
        event.record(stream)?;
        self.uses.push((stream.clone(), event));
        Ok(())
    }
}

/// Memory on a device.
///
/// # If dropped
/// Never waits. Freed some time later by a thread of its own when every use that
/// [`DeviceBuffer::used_by`] noted is over; else leaked, and said so.
pub struct DeviceBuffer {
    device: Device,
    address: u64,
    len: usize,
    uses: Uses,
}

impl DeviceBuffer {
    /// Allocates. Not for the steady state: this may wait for the device.
    ///
    /// # Errors
    /// The device has no memory left.
    pub fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        device.bind_anew()?;
        let mut address = 0;
        // SAFETY: writes one address to a place that is ours; the context is current. The driver
        // refuses to allocate nothing, so an empty buffer has a byte that nobody sees.
        unsafe { call!(device.driver(), cuMemAlloc_v2(&raw mut address, len.max(1))) }
            .map_err(|error| with_sizes(error, device, "device", len))?;
        Ok(Self {
            device: device.clone(),
            address,
            len,
            uses: Uses::default(),
        })
    }

    /// Where it is.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        DevicePtr {
            address: self.address,
            len: self.len,
        }
    }

    /// Where it is, as a `CUdeviceptr`; a multiple of 256.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device it lies on.
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

    /// Whether every use that was noted is over.
    ///
    /// # Errors
    /// Something issued before failed.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        self.uses.are_over()
    }
}

impl DeviceBuffer {
    /// Frees it once these events are done and this stream is idle, on another thread; leaks it
    /// when the device cannot say so.
    pub(crate) fn free_behind(self, events: Vec<Event>, stream: Option<Stream>) {
        free(Waste::Behind {
            buffer: self,
            events,
            stream,
        });
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if matches!(self.uses.are_over(), Ok(true)) {
            free(Waste::Device(self.device.clone(), self.address));
        } else {
            said_leaked("device", self.len);
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer({:?} on {:?})", self.ptr(), self.device)
    }
}

/// Page-locked memory of the host. The device copies from and to it by itself; the host reads and
/// writes it at its usual speed.
///
/// # If dropped
/// As [`DeviceBuffer`].
pub struct PinnedBuffer {
    device: Device,
    base: NonNull<u8>,
    len: usize,
    uses: Uses,
}

// SAFETY: the buffer owns its memory, which any thread may reach; `bytes` and `bytes_mut` borrow
// as a `Vec` does.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as for `Send`; what `used_by` changes is behind a lock.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates and zeroes. Not for the steady state: this may wait for the device.
    ///
    /// # Errors
    /// The host has no memory that can be locked.
    pub fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        device.bind_anew()?;
        let mut base: *mut c_void = std::ptr::null_mut();
        let room = len.max(1);
        // SAFETY: writes one address to a place that is ours; the context is current.
        unsafe { call!(device.driver(), cuMemHostAlloc(&raw mut base, room, 0)) }
            .map_err(|error| with_sizes(error, device, "page-locked", len))?;
        let base = NonNull::new(base.cast::<u8>()).expect("a call that succeeded gave memory");
        // SAFETY: `room` bytes that were just allocated and that nobody else knows.
        unsafe { base.write_bytes(0, room) };
        Ok(Self {
            device: device.clone(),
            base,
            len,
            uses: Uses::default(),
        })
    }

    /// Its bytes. Does not wait: what a stream still writes is not there yet.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialized bytes that this value owns. Whoever lets the device write them
        // has promised that nobody looks before that is over (`Stream::download`).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// Its bytes, to be written. Does not wait: what a stream still reads must not be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and `&mut self` makes the borrow unique; whoever lets the device
        // read them has promised that nobody writes before that is over (`Stream::upload`).
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// Where it is; the same address on the host and on the device.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Bytes in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Notes that what was issued to the stream so far uses this buffer.
    ///
    /// # Errors
    /// The driver refuses. The buffer then counts as used for good.
    pub fn used_by(&self, stream: &Stream) -> Result<(), CudaError> {
        self.uses.note(stream)
    }

    /// Whether every use that was noted is over.
    ///
    /// # Errors
    /// Something issued before failed.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        self.uses.are_over()
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if matches!(self.uses.are_over(), Ok(true)) {
            let address = self.base.as_ptr() as usize;
            free(Waste::Pinned(self.device.clone(), address));
        } else {
            said_leaked("page-locked", self.len);
        }
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBuffer({} bytes)", self.len)
    }
}

/// An allocation that failed for want of memory, with the numbers.
#[cold]
fn with_sizes(error: CudaError, device: &Device, what: &'static str, len: usize) -> CudaError {
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

fn said_leaked(kind: &'static str, bytes: usize) {
    tracing::warn!(
        bytes,
        "{kind} memory is leaked: work that uses it is not over"
    );
}

/// Memory that nobody uses any more.
#[derive(Debug)]
enum Waste {
    Device(Device, Address),
    /// The address as a number: the memory belongs to nobody.
    Pinned(Device, usize),
    /// Work may use it until these events are done and this stream is idle.
    Behind {
        buffer: DeviceBuffer,
        events: Vec<Event>,
        stream: Option<Stream>,
    },
}

impl Waste {
    fn device(&self) -> &Device {
        match self {
            Self::Device(device, _) | Self::Pinned(device, _) => device,
            Self::Behind { buffer, .. } => buffer.device(),
        }
    }

    /// Whether nothing works on it any more.
    fn is_quiet(&self) -> Result<bool, CudaError> {
        let Self::Behind {
            buffer,
            events,
            stream,
        } = self
        else {
            return Ok(true);
        };
        for event in events {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(stream.as_ref().map_or(Ok(true), Stream::is_idle)? && buffer.is_idle()?)
    }

    fn free(self) {
        let device = self.device().clone();
        let driver = device.driver();
        let freed = device.bind().and_then(|()| match self {
            // SAFETY: allocated by `DeviceBuffer`, whose only owner gave it up here, once.
            Self::Device(_, address) => unsafe { call!(driver, cuMemFree_v2(address)) },
            // SAFETY: likewise, by `PinnedBuffer`.
            Self::Pinned(_, address) => unsafe { call!(driver, cuMemFreeHost(address as Handle)) },
            Self::Behind { buffer, .. } => {
                // Comes here again, as what it is.
                drop(buffer);
                Ok(())
            }
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "memory was not freed");
        }
    }
}

/// Hands memory over to be freed some time later; leaks it when there is no thread for that.
fn free(waste: Waste) {
    static JANITOR: OnceLock<Option<Sender<Waste>>> = OnceLock::new();
    let janitor = JANITOR.get_or_init(|| {
        let (sender, wastes) = channel();
        std::thread::Builder::new()
            .name("pp-cuda-free".into())
            .spawn(move || collect(&wastes))
            .ok()
            .map(|_| sender)
    });
    if let Some(janitor) = janitor {
        // The thread never ends while a sender exists.
        let _ = janitor.send(waste);
    }
}

fn collect(wastes: &Receiver<Waste>) {
    let mut kept: Vec<Waste> = Vec::new();
    loop {
        let next = if kept.is_empty() {
            wastes.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            wastes.recv_timeout(LOOK_EVERY)
        };
        match next {
            Ok(waste) => kept.push(waste),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        for waste in std::mem::take(&mut kept) {
            if waste.device().is_troubled() {
                kept.push(waste);
                continue;
            }
            match waste.is_quiet() {
                Ok(true) => waste.free(),
                Ok(false) => kept.push(waste),
                Err(error) => {
                    tracing::warn!(%error, "memory is leaked: work that used it failed");
                    std::mem::forget(waste);
                }
            }
        }
    }
}
