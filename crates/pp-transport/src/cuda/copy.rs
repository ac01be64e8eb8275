//! Copies that a stream issues.

use std::ops::Range;

use super::driver::{Handle, call};
use super::error::CudaError;
use super::memory::{DevicePtr, PinnedBuffer};
use super::stream::Stream;

impl Stream {
    /// Issues a copy of bytes `range` of page-locked memory to the device.
    ///
    /// # Errors
    /// The range does not fit the buffer or its destination; the driver refuses.
    ///
    /// # Safety
    /// Until this stream has passed the copy: `to` is device memory that nothing else touches, and
    /// `from` is neither dropped nor written.
    pub unsafe fn upload(
        &self,
        from: &PinnedBuffer,
        range: Range<usize>,
        to: DevicePtr,
    ) -> Result<(), CudaError> {
        let bytes = slice(from.len(), range)?;
        slice(to.len, 0..bytes.len())?;
        self.device().bind()?;
        let source = (from.address() as usize + bytes.start) as Handle;
        // SAFETY: the source lies in the buffer (checked), the rest is the caller's promise.
        unsafe {
            call!(
                self.device().driver(),
                cuMemcpyHtoDAsync_v2(to.address, source, bytes.len(), self.handle())
            )
        }
    }

    /// Issues a copy from the device to page-locked memory, from byte `at` of it on.
    ///
    /// # Errors
    /// The bytes do not fit; the driver refuses.
    ///
    /// # Safety
    /// Until this stream has passed the copy: `from` is device memory that nobody writes, and `to`
    /// is neither dropped nor touched, not even read.
    pub unsafe fn download(
        &self,
        from: DevicePtr,
        to: &mut PinnedBuffer,
        at: usize,
    ) -> Result<(), CudaError> {
        slice(to.len(), at..at.saturating_add(from.len))?;
        self.device().bind()?;
        let target = (to.address() as usize + at) as Handle;
        // SAFETY: the target lies in the buffer (checked), the rest is the caller's promise.
        unsafe {
            call!(
                self.device().driver(),
                cuMemcpyDtoHAsync_v2(target, from.address, from.len, self.handle())
            )
        }
    }

    /// Issues a copy within the device, of as many bytes as `from` has.
    ///
    /// # Errors
    /// The bytes do not fit; the driver refuses.
    ///
    /// # Safety
    /// Until this stream has passed the copy, both are device memory, nobody writes `from`, and
    /// nothing else touches `to`; they do not overlap.
    pub unsafe fn copy(&self, from: DevicePtr, to: DevicePtr) -> Result<(), CudaError> {
        slice(to.len, 0..from.len)?;
        self.device().bind()?;
        // SAFETY: the caller's promise.
        unsafe {
            call!(
                self.device().driver(),
                cuMemcpyDtoDAsync_v2(to.address, from.address, from.len, self.handle())
            )
        }
    }

    /// Issues the filling of device memory with one byte.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// Until this stream has passed it, `to` is device memory that nothing else touches.
    pub unsafe fn fill(&self, to: DevicePtr, byte: u8) -> Result<(), CudaError> {
        self.device().bind()?;
        // SAFETY: the caller's promise.
        unsafe {
            call!(
                self.device().driver(),
                cuMemsetD8Async(to.address, byte, to.len, self.handle())
            )
        }
    }
}

fn slice(len: usize, range: Range<usize>) -> Result<Range<usize>, CudaError> {
    let Range { start, end } = range;
    if start <= end && end <= len {
        return Ok(range);
    }
    Err(CudaError::OutOfRange { start, end, len })
}
