//! What the denoiser asks of a CUDA library, through cust: modules, launches, copies and memory on a raw stream.
//!
//! From cust come the device of the current context, modules and their functions. The rest is calls of [`crate::driver`],
//! because cust 0.3 lacks:
//! - context: the address of the current one, to compare it with the session's;
//! - streams: a type for the stream of another library;
//! - launches, copies and memory in the order of a stream: any that take another stream than cust's own;
//! - attributes: the shared memory that a block may have when it opts in, and a function's limit of it.
//!
//! Nothing here waits.
//!
//! Hazard: what goes through cust gives its result codes as a Rust enum of CUDA 11.4. A code that a newer driver returned
//! there would be none of its values, and undefined behaviour. It happens only while a session is made, and it is what
//! using cust with a newer driver means.

use std::ffi::{CStr, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;

use cust::context::CurrentContext;
use cust::error::{CudaError, CudaResult};
use cust::module::Module;
use cust::sys;
use cust::sys::CUdevice_attribute as Attribute;
use cust::sys::CUmemorytype_enum::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
use pp_kernels::denoise::cuda::{Apart, Gpu, LaunchConfig, Limits, Rows};
use pp_kernels::{Failure, Status};

use crate::driver;

/// Turns the code of a function of the driver into a failure that names the function.
fn judge(function: &str, code: c_int) -> Result<(), Failure> {
    if code == 0 {
        return Ok(());
    }
    let mut name = ptr::null();
    // SAFETY: takes any code; gives a constant text, or null.
    let words = unsafe {
        let _ = driver::cuGetErrorName(code, &raw mut name);
        match name.is_null() {
            true => format!("code {code}"),
            false => CStr::from_ptr(name).to_string_lossy().into_owned(),
        }
    };
    let is_memory = code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int;
    Err(failure(function, &words, is_memory))
}

/// Turns cust's error into a failure that names the function.
fn named<T>(function: &str, result: CudaResult<T>) -> Result<T, Failure> {
    let is_memory = |error| error == CudaError::OutOfMemory;
    result.map_err(|error| failure(function, &error.to_string(), is_memory(error)))
}

fn failure(function: &str, words: &str, is_memory: bool) -> Failure {
    let status = match is_memory {
        true => Status::OutOfMemory,
        false => Status::Error,
    };
    Failure::new(status, format!("{function} failed: {words}"))
}

/// A kernel. Its module is never unloaded: that would wait for the device.
#[derive(Debug, Clone, Copy)]
pub struct Function(sys::CUfunction);

// SAFETY: a handle of the driver, whose functions may be called from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// The host's stream.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    context: u64,
    raw: sys::CUstream,
}

// SAFETY: a handle of the driver, whose functions may be called from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// The stream of these numbers.
    ///
    /// # Safety
    /// `context` is a live `CUcontext` and `stream` a live `CUstream` of it, or 0. Both outlive what is made with them.
    pub(crate) unsafe fn borrow(context: u64, stream: u64) -> Stream {
        Stream {
            context,
            raw: ptr::without_provenance_mut(stream as usize),
        }
    }

    /// # Safety
    /// What the description points to stays allocated until the stream has passed the copy.
    unsafe fn copy_rows(self, copy: sys::CUDA_MEMCPY2D) -> Result<(), Failure> {
        // SAFETY: the caller's duty; the driver copies the description before it returns.
        judge("cuMemcpy2DAsync", unsafe {
            driver::cuMemcpy2DAsync_v2(&raw const copy, self.raw)
        })
    }
}

// SAFETY: every function passes its arguments to the driver as they are; `memory_with` gives memory of the stream's
// context, of the size that was asked for, and `address` gives where it lies.
unsafe impl Gpu for Stream {
    type Module = ManuallyDrop<Module>;
    type Function = Function;
    type Memory = Memory;
    type Event = ();

    fn check_current(&self) -> Result<(), Failure> {
        let mut found = ptr::null_mut();
        // SAFETY: writes one handle to a local.
        judge("cuCtxGetCurrent", unsafe {
            driver::cuCtxGetCurrent(&raw mut found)
        })?;
        if found as u64 != self.context {
            return Err(Failure::error(format!(
                "the CUDA context {:#x} must be current on the calling thread, it is {:#x}",
                self.context, found as u64
            )));
        }
        Ok(())
    }

    fn context_id(&self) -> Result<u64, Failure> {
        let (context, mut id) = (ptr::without_provenance_mut(self.context as usize), 0);
        // SAFETY: the context is live (see `borrow`); writes one number to a local.
        judge("cuCtxGetId", unsafe {
            driver::cuCtxGetId(context, &raw mut id)
        })?;
        Ok(id)
    }

    fn limits(&self) -> Result<Limits, Failure> {
        let device = named("cuCtxGetDevice", CurrentContext::get_device())?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: writes one number to a local, of a device that exists.
            judge("cuDeviceGetAttribute", unsafe {
                driver::cuDeviceGetAttribute(&raw mut value, which, device.as_raw())
            })?;
            Ok::<_, Failure>(u32::try_from(value).unwrap_or(0))
        };
        let mut version = 0;
        // SAFETY: writes one number to a local.
        judge("cuDriverGetVersion", unsafe {
            driver::cuDriverGetVersion(&raw mut version)
        })?;
        Ok(Limits {
            driver_version: u32::try_from(version).unwrap_or(0),
            capability: [
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ],
            shared_bytes_per_block: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
        })
    }

    fn load(&self, ptx: &str) -> Result<ManuallyDrop<Module>, Failure> {
        named("cuModuleLoadDataEx", Module::from_ptx(ptx, &[])).map(ManuallyDrop::new)
    }

    fn function(
        &self,
        module: &ManuallyDrop<Module>,
        name: &str,
        shared: u32,
    ) -> Result<Function, Failure> {
        let function = named(name, module.get_function(name))?.to_raw();
        let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        if shared > 0 {
            // SAFETY: the kernel's module is never unloaded.
            judge("cuFuncSetAttribute", unsafe {
                driver::cuFuncSetAttribute(function, limit, shared as i32)
            })?;
        }
        Ok(Function(function))
    }

    unsafe fn launch(
        &self,
        function: Function,
        config: LaunchConfig,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Failure> {
        let ([gx, gy, gz], [bx, by, bz]) = (config.grid, config.block);
        // SAFETY: the caller's duty; the driver copies the arguments before it returns.
        judge("cuLaunchKernel", unsafe {
            driver::cuLaunchKernel(
                function.0,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                config.shared,
                self.raw,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }

    fn memory(&self, bytes: usize) -> Result<Memory, Failure> {
        let mut address = 0;
        // SAFETY: writes one address to a local.
        judge("cuMemAllocAsync", unsafe {
            driver::cuMemAllocAsync(&raw mut address, bytes.max(1), self.raw)
        })?;
        Ok(Memory {
            address,
            stream: *self,
            source: Vec::new(),
        })
    }

    fn memory_with(&self, bytes: Vec<u8>) -> Result<Memory, Failure> {
        let mut memory = self.memory(bytes.len())?;
        memory.source = bytes;
        let source = &memory.source;
        // SAFETY: so many bytes were allocated before this on the same stream; the source stays with the memory, and the
        // driver takes a copy of bytes that are not page-locked before it returns.
        judge("cuMemcpyHtoDAsync", unsafe {
            driver::cuMemcpyHtoDAsync_v2(
                memory.address,
                source.as_ptr().cast(),
                source.len(),
                self.raw,
            )
        })?;
        Ok(memory)
    }

    fn address(memory: &Memory) -> u64 {
        memory.address
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        judge("cuMemcpyDtoDAsync", unsafe {
            driver::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw)
        })
    }

    unsafe fn copy_within(&self, rows: Apart) -> Result<(), Failure> {
        let copy = sys::CUDA_MEMCPY2D {
            srcMemoryType: CU_MEMORYTYPE_DEVICE,
            srcDevice: rows.from,
            srcPitch: rows.from_pitch,
            dstMemoryType: CU_MEMORYTYPE_DEVICE,
            dstDevice: rows.to,
            dstPitch: rows.to_pitch,
            ..of_host(rows.width, rows.count)
        };
        // SAFETY: the caller's duty.
        unsafe { self.copy_rows(copy) }
    }

    // One stream for all work: this plugin shows calls of another library, not the fastest group.
    fn beside(&self) -> Result<Stream, Failure> {
        Ok(*self)
    }

    fn event(&self) -> Result<(), Failure> {
        Ok(())
    }

    fn record(&self, (): &()) -> Result<(), Failure> {
        Ok(())
    }

    fn wait(&self, (): &()) -> Result<(), Failure> {
        Ok(())
    }

    unsafe fn upload(&self, from: *const u8, rows: Rows, to: u64) -> Result<(), Failure> {
        let copy = sys::CUDA_MEMCPY2D {
            srcHost: from.cast(),
            srcPitch: rows.host_pitch,
            dstMemoryType: CU_MEMORYTYPE_DEVICE,
            dstDevice: to,
            dstPitch: rows.width,
            ..of_host(rows.width, rows.count)
        };
        // SAFETY: the caller's duty.
        unsafe { self.copy_rows(copy) }
    }

    unsafe fn download(&self, to: *mut u8, rows: Rows, from: u64) -> Result<(), Failure> {
        let copy = sys::CUDA_MEMCPY2D {
            srcMemoryType: CU_MEMORYTYPE_DEVICE,
            srcDevice: from,
            srcPitch: rows.width,
            dstHost: to.cast(),
            dstPitch: rows.host_pitch,
            ..of_host(rows.width, rows.count)
        };
        // SAFETY: the caller's duty.
        unsafe { self.copy_rows(copy) }
    }
}

/// A copy of so many rows of this width, from nowhere to nowhere.
fn of_host(width: usize, count: usize) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: CU_MEMORYTYPE_HOST,
        srcHost: ptr::null(),
        srcDevice: 0,
        srcArray: ptr::null_mut(),
        srcPitch: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CU_MEMORYTYPE_HOST,
        dstHost: ptr::null_mut(),
        dstDevice: 0,
        dstArray: ptr::null_mut(),
        dstPitch: 0,
        WidthInBytes: width,
        Height: count,
    }
}

/// Device memory, allocated and freed in the order of the stream, so that neither waits.
#[derive(Debug)]
pub struct Memory {
    address: u64,
    stream: Stream,
    /// What it was filled from.
    source: Vec<u8>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once, behind all work of the stream that uses it. An error has no one to go to:
        // the device is lost then, and the memory with it.
        let _ = unsafe { driver::cuMemFreeAsync(self.address, self.stream.raw) };
    }
}
