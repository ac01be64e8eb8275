//! Streams, which order work, and events, which mark places in that order.

use std::ffi::{c_int, c_uint};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::driver::{Driver, Handle, call};
use crate::error::{CudaError, NOT_READY};

/// Does not wait for the default stream, nor it for this one.
const NON_BLOCKING: c_uint = 1;
const DISABLE_TIMING: c_uint = 2;

/// An ordered queue of work on a device. Clones are the same stream.
///
/// # If dropped
/// Does not wait: what was issued goes on, and the driver frees the stream after it. A stream that
/// was borrowed stays.
#[derive(Clone)]
pub struct Stream(Arc<Queue>);

struct Queue {
    device: Device,
    handle: usize,
    is_borrowed: bool,
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.is_borrowed {
            return;
        }
        let handle = self.handle as Handle;
        // SAFETY: made by `Stream::with_priority`; this was its last owner. The call returns at
        // once and lets issued work finish.
        let destroyed = unsafe { call!(cuStreamDestroy_v2(handle)) };
        if let Err(error) = destroyed {
            tracing::debug!(%error, "a stream was not destroyed");
        }
    }
}

impl Stream {
    /// A stream of ordinary priority, which does not wait for the default stream.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        Self::with_priority(device, |range| range.end)
    }

    /// A stream whose work the device starts first.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn urgent(device: &Device) -> Result<Self, CudaError> {
        Self::with_priority(device, |range| range.start)
    }

    /// The range given to `choose` goes from the greatest priority, the smallest number, to the
    /// least.
    fn with_priority(
        device: &Device,
        choose: impl FnOnce(Range<i32>) -> i32,
    ) -> Result<Self, CudaError> {
        device.bind_anew()?;
        let (mut least, mut greatest) = (0, 0);
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: both write to addresses that are ours; the context is current.
        unsafe {
            call!(cuCtxGetStreamPriorityRange(
                &raw mut least,
                &raw mut greatest
            ))?;
            let priority = choose(greatest..least);
            call!(cuStreamCreateWithPriority(
                &raw mut handle,
                NON_BLOCKING,
                priority
            ))?;
        }
        Ok(Self(Arc::new(Queue {
            device: device.clone(),
            handle: handle as usize,
            is_borrowed: false,
        })))
    }

    /// The stream of another library.
    ///
    /// # Safety
    /// `raw` is a `CUstream` of the device's context, or 0, and lives for as long as clones of this
    /// and what is made from them.
    #[must_use]
    pub unsafe fn borrow(device: &Device, raw: u64) -> Self {
        Self(Arc::new(Queue {
            device: device.clone(),
            handle: raw as usize,
            is_borrowed: true,
        }))
    }

    /// The device that works it off.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The `CUstream`, for other libraries, valid while a clone of this lives.
    #[must_use]
    pub fn raw(&self) -> u64 {
        self.0.handle as u64
    }

    /// Says whether the other is a clone of this.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn handle(&self) -> Handle {
        self.0.handle as Handle
    }

    /// Lets later work of this stream wait for what the event was last recorded behind.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.device().bind()?;
        // SAFETY: a live stream and a live event.
        unsafe { call!(cuStreamWaitEvent(self.handle(), event.handle(), 0)) }
    }

    /// Says whether everything issued so far is done.
    ///
    /// # Errors
    /// Something that was issued failed.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        self.device().bind()?;
        // SAFETY: a live stream.
        let code = unsafe { (Driver::loaded().cuStreamQuery)(self.handle()) };
        is_done("cuStreamQuery", code)
    }

    /// Waits until everything issued so far is done, at most so long. For set-up and measurements.
    ///
    /// # Errors
    /// [`CudaError::Late`]; something that was issued failed.
    pub fn wait_until_idle(&self, limit: Duration) -> Result<(), CudaError> {
        let start = Instant::now();
        while !self.is_idle()? {
            if start.elapsed() > limit {
                return Err(CudaError::Late(limit));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:#x} on {:?})", self.raw(), self.device())
    }
}

/// A place in the order of a stream. Made once and recorded again and again.
///
/// # If dropped
/// Does not wait; the driver frees it when it was passed.
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: usize,
}

impl Event {
    /// An event without a time, which costs less.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        Self::with_flags(device, DISABLE_TIMING)
    }

    /// An event that notes when it was passed.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn timed(device: &Device) -> Result<Self, CudaError> {
        Self::with_flags(device, 0)
    }

    fn with_flags(device: &Device, flags: c_uint) -> Result<Self, CudaError> {
        device.bind_anew()?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: writes one handle to an address that is ours; the context is current.
        unsafe { call!(cuEventCreate(&raw mut handle, flags)) }?;
        Ok(Self {
            device: device.clone(),
            handle: handle as usize,
        })
    }

    fn handle(&self) -> Handle {
        self.handle as Handle
    }

    /// Marks the place behind everything issued to the stream so far. An earlier mark is forgotten.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: a live event and a live stream.
        unsafe { call!(cuEventRecord(self.handle(), stream.handle())) }
    }

    /// Says whether the place was passed; true for an event that was never recorded.
    ///
    /// # Errors
    /// Something issued before failed: from then on every call on this device fails.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.device.bind()?;
        // SAFETY: a live event.
        let code = unsafe { (Driver::loaded().cuEventQuery)(self.handle()) };
        is_done("cuEventQuery", code)
    }

    /// Nanoseconds from when `since` was passed to when this was. Both are timed, and done.
    ///
    /// # Errors
    /// They are not.
    pub fn elapsed_ns(&self, since: &Self) -> Result<u64, CudaError> {
        self.device.bind()?;
        let mut ms = 0.0_f32;
        // SAFETY: two live events; writes one number to an address that is ours.
        unsafe {
            call!(cuEventElapsedTime(
                &raw mut ms,
                since.handle(),
                self.handle()
            ))
        }?;
        Ok((f64::from(ms) * 1e6).max(0.0) as u64)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `with_flags` and owned by this value alone.
        let destroyed = unsafe { call!(cuEventDestroy_v2(self.handle())) };
        if let Err(error) = destroyed {
            tracing::debug!(%error, "an event was not destroyed");
        }
    }
}

/// What a query said, as an answer. No error is made of work that is not done: this is asked all the time.
fn is_done(query: &'static str, code: c_int) -> Result<bool, CudaError> {
    match code {
        NOT_READY => Ok(false),
        _ => Driver::loaded().check(query, code).map(|()| true),
    }
}
