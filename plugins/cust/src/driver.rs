//! The driver's functions that cust has no safe form of, with result codes as the numbers that they are.
//!
//! `cust::sys` declares the same functions, but gives their codes as a Rust enum of CUDA 11.4. Any of them may return a
//! code of work that failed before, and a code that a newer driver invents is none of that enum's values: undefined
//! behaviour once it is returned. The types of handles and attributes are cust's.

use std::ffi::{c_char, c_int, c_uint, c_void};

use cust::sys;

// Types as in cuda.h. The library is linked with libcuda.so.1 (see build.rs).
unsafe extern "C" {
    pub(crate) fn cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int;
    pub(crate) fn cuDriverGetVersion(version: *mut c_int) -> c_int;
    pub(crate) fn cuCtxGetCurrent(context: *mut sys::CUcontext) -> c_int;
    pub(crate) fn cuCtxGetId(context: sys::CUcontext, id: *mut u64) -> c_int;
    pub(crate) fn cuDeviceGetAttribute(
        value: *mut c_int,
        which: sys::CUdevice_attribute,
        device: sys::CUdevice,
    ) -> c_int;
    pub(crate) fn cuFuncSetAttribute(
        function: sys::CUfunction,
        which: sys::CUfunction_attribute,
        value: c_int,
    ) -> c_int;
    pub(crate) fn cuLaunchKernel(
        function: sys::CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: sys::CUstream,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;
    pub(crate) fn cuMemcpyHtoDAsync_v2(
        to: u64,
        from: *const c_void,
        bytes: usize,
        stream: sys::CUstream,
    ) -> c_int;
    pub(crate) fn cuMemcpyDtoDAsync_v2(
        to: u64,
        from: u64,
        bytes: usize,
        stream: sys::CUstream,
    ) -> c_int;
    pub(crate) fn cuMemcpy2DAsync_v2(
        copy: *const sys::CUDA_MEMCPY2D,
        stream: sys::CUstream,
    ) -> c_int;
    pub(crate) fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: sys::CUstream) -> c_int;
    pub(crate) fn cuMemFreeAsync(address: u64, stream: sys::CUstream) -> c_int;
}
