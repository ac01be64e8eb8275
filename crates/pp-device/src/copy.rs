//! Copies that a stream issues.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;

use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype};

use crate::driver::call;
use crate::error::CudaError;
use crate::memory::{DevicePtr, PinnedBuffer};
use crate::stream::Stream;

/// Rows of bytes, apart on the host and without gaps on the device. A single row is copied as what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// How many.
    pub count: usize,
    /// Bytes in each.
    pub width: usize,
    /// Bytes from one to the next on the host.
    pub host_pitch: usize,
}

/// Rows of bytes on a device that lie apart on both sides of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Apart {
    /// The address of the first.
    pub from: u64,
    /// Bytes from one to the next.
    pub from_pitch: usize,
    /// Where the first is to go.
    pub to: u64,
    /// Bytes from one to the next there.
    pub to_pitch: usize,
    /// How many.
    pub count: usize,
    /// Bytes in each.
    pub width: usize,
}

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
        let source = from.base().wrapping_add(bytes.start);
        // SAFETY: the source lies in the buffer (checked), the rest is the caller's promise.
        unsafe { self.upload_from(source, bytes.len(), to.address) }
    }

    /// Issues a copy of so many bytes of host memory to an address on the device.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// Until this stream has passed the copy: both ranges are allocated, nothing else touches that
    /// of the device, and nothing writes that of the host.
    pub unsafe fn upload_from(
        &self,
        from: *const u8,
        bytes: usize,
        to: u64,
    ) -> Result<(), CudaError> {
        self.device().bind()?;
        // SAFETY: the caller's promise.
        unsafe { call!(cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.handle())) }
    }

    /// Issues a copy of rows of host memory to an address on the device.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// As [`Stream::upload_from`], for every row.
    pub unsafe fn upload_rows(
        &self,
        from: *const u8,
        rows: Rows,
        to: u64,
    ) -> Result<(), CudaError> {
        if rows.count == 1 {
            // SAFETY: the caller's promise.
            return unsafe { self.upload_from(from, rows.width, to) };
        }
        let copy = CUDA_MEMCPY2D {
            srcHost: from.cast(),
            srcPitch: rows.host_pitch,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstDevice: to,
            dstPitch: rows.width,
            ..of_host(rows.width, rows.count)
        };
        // SAFETY: the caller's promise.
        unsafe { self.copy_rows(&copy) }
    }

    /// Issues a copy from the device to page-locked memory, from byte `at` of it on.
    ///
    /// # Errors
    /// The bytes do not fit; the driver refuses.
    ///
    /// # Safety
    /// Until this stream has passed the copy: `from` is device memory that nothing writes, and `to`
    /// is neither dropped nor touched, not even read.
    pub unsafe fn download(
        &self,
        from: DevicePtr,
        to: &mut PinnedBuffer,
        at: usize,
    ) -> Result<(), CudaError> {
        let bytes = slice(to.len(), at..at.saturating_add(from.len))?;
        let target = to.base().wrapping_add(bytes.start);
        // SAFETY: the target lies in the buffer (checked), the rest is the caller's promise.
        unsafe { self.download_to(target, from) }
    }

    /// Issues a copy from the device to host memory.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// Until this stream has passed the copy: both ranges are allocated, nothing writes that of the
    /// device, and nothing touches that of the host, not even to read it.
    pub unsafe fn download_to(&self, to: *mut u8, from: DevicePtr) -> Result<(), CudaError> {
        self.device().bind()?;
        // SAFETY: the caller's promise.
        unsafe {
            call!(cuMemcpyDtoHAsync_v2(
                to.cast(),
                from.address,
                from.len,
                self.handle()
            ))
        }
    }

    /// Issues a copy from an address on the device to rows of host memory.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// As [`Stream::download_to`], for every row.
    pub unsafe fn download_rows(
        &self,
        to: *mut u8,
        rows: Rows,
        from: u64,
    ) -> Result<(), CudaError> {
        if rows.count == 1 {
            let from = DevicePtr {
                address: from,
                len: rows.width,
            };
            // SAFETY: the caller's promise.
            return unsafe { self.download_to(to, from) };
        }
        let copy = CUDA_MEMCPY2D {
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcDevice: from,
            srcPitch: rows.width,
            dstHost: to.cast::<c_void>(),
            dstPitch: rows.host_pitch,
            ..of_host(rows.width, rows.count)
        };
        // SAFETY: the caller's promise.
        unsafe { self.copy_rows(&copy) }
    }

    /// # Safety
    /// All that `copy` names is as [`Stream::upload_from`] or [`Stream::download_to`] asks for.
    unsafe fn copy_rows(&self, copy: &CUDA_MEMCPY2D) -> Result<(), CudaError> {
        self.device().bind()?;
        // SAFETY: the caller's promise.
        unsafe { call!(cuMemcpy2DAsync_v2(copy, self.handle())) }
    }

    /// Issues a copy within the device, of as many bytes as `from` has.
    ///
    /// # Errors
    /// The bytes do not fit; the driver refuses.
    ///
    /// # Safety
    /// Until this stream has passed the copy, both are device memory, nothing writes `from`, and
    /// nothing else touches `to`; they do not overlap.
    pub unsafe fn copy(&self, from: DevicePtr, to: DevicePtr) -> Result<(), CudaError> {
        slice(to.len, 0..from.len)?;
        self.device().bind()?;
        // SAFETY: the caller's promise.
        unsafe {
            call!(cuMemcpyDtoDAsync_v2(
                to.address,
                from.address,
                from.len,
                self.handle()
            ))
        }
    }

    /// Issues a copy within the device, of `rows.count` rows of `rows.width` bytes, which lie so many bytes apart on each
    /// side.
    ///
    /// # Errors
    /// Rows are wider than they lie apart; the driver refuses.
    ///
    /// # Safety
    /// As [`Stream::copy`], for every row; no bytes between rows are touched.
    pub unsafe fn copy_within(&self, rows: Apart) -> Result<(), CudaError> {
        let copy = CUDA_MEMCPY2D {
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcDevice: rows.from,
            srcPitch: rows.from_pitch,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstDevice: rows.to,
            dstPitch: rows.to_pitch,
            ..of_host(rows.width, rows.count)
        };
        // SAFETY: the caller's promise.
        unsafe { self.copy_rows(&copy) }
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
        unsafe { call!(cuMemsetD8Async(to.address, byte, to.len, self.handle())) }
    }
}

/// A copy of so many rows of this width, from nowhere to nowhere.
fn of_host(width: usize, count: usize) -> CUDA_MEMCPY2D {
    CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: ptr::null(),
        srcDevice: 0,
        srcArray: ptr::null_mut(),
        srcPitch: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
        dstHost: ptr::null_mut(),
        dstDevice: 0,
        dstArray: ptr::null_mut(),
        dstPitch: 0,
        WidthInBytes: width,
        Height: count,
    }
}

fn slice(len: usize, range: Range<usize>) -> Result<Range<usize>, CudaError> {
    let Range { start, end } = range;
    if start <= end && end <= len {
        return Ok(range);
    }
    Err(CudaError::OutOfRange { start, end, len })
}
