//! What the session does with a GPU, through cust: modules, launches, copies and memory on a raw stream.
//!
//! cust has no type for somebody else's stream, so whatever goes onto the host's stream is a call of [`crate::driver`];
//! modules and their functions are cust's own. Nothing here waits.
//!
//! Hazard: loading a module and finding its functions goes through cust, whose result codes are a Rust enum of CUDA
//! 11.4. A code that a newer driver returned from one of these two would be none of its values, and undefined behaviour.
//! It happens only while a session is made, and it is what using cust with a newer driver means.

use std::ffi::{CStr, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;

use cust::error::{CudaError, CudaResult};
use cust::module::Module;
use cust::sys;
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
pub(crate) fn named<T>(function: &str, result: CudaResult<T>) -> Result<T, Failure> {
    let is_memory = |error| error == CudaError::OutOfMemory;
    result.map_err(|error| failure(function, &error.to_string(), is_memory(error)))
}

fn failure(function: &str, words: &str, is_memory: bool) -> Failure {
    Failure {
        status: if is_memory {
            Status::OutOfMemory
        } else {
            Status::Error
        },
        message: format!("{function} failed: {words}"),
    }
}

/// The context that is current on this thread, 0 for none.
pub(crate) fn current_context() -> Result<u64, Failure> {
    let mut context = ptr::null_mut();
    // SAFETY: writes one handle to a local.
    judge("cuCtxGetCurrent", unsafe {
        driver::cuCtxGetCurrent(&raw mut context)
    })?;
    Ok(context as u64)
}

/// An attribute of the device of the current context.
fn attribute(which: sys::CUdevice_attribute) -> Result<i32, Failure> {
    let (mut device, mut value) = (0, 0);
    // SAFETY: both write one number to a local.
    unsafe {
        judge("cuCtxGetDevice", driver::cuCtxGetDevice(&raw mut device))?;
        let code = driver::cuDeviceGetAttribute(&raw mut value, which, device);
        judge("cuDeviceGetAttribute", code)?;
    }
    Ok(value)
}

/// Compute capability of the device of the current context.
pub(crate) fn capability() -> Result<(i32, i32), Failure> {
    use sys::CUdevice_attribute as A;
    Ok((
        attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}

/// Most shared memory that a block can have on the device of the current context, in bytes.
pub(crate) fn most_shared() -> Result<u32, Failure> {
    use sys::CUdevice_attribute as A;
    let most = attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    Ok(u32::try_from(most).unwrap_or(0))
}

/// Blocks, threads in a block, and bytes of dynamic shared memory of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: u32,
    pub(crate) shared: u32,
}

/// A kernel. Its module is never unloaded: that would wait for the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function(sys::CUfunction);

// SAFETY: a handle of the driver, whose functions may be called from any thread.
unsafe impl Send for Function {}

impl Function {
    /// Lets blocks of the kernel have so much dynamic shared memory, of which the device has `most`.
    pub(crate) fn with_shared(self, bytes: u32, most: u32) -> Result<Function, Failure> {
        if bytes > most {
            return Err(Failure::unsupported(format!(
                "the kernels need {bytes} bytes of shared memory in a block, this GPU has {most}; run on a data-centre \
                 GPU (A100 or newer), or on the CPU with --kernels cpu"
            )));
        }
        let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the kernel's module is never unloaded.
        judge("cuFuncSetAttribute", unsafe {
            driver::cuFuncSetAttribute(self.0, limit, bytes as i32)
        })?;
        Ok(self)
    }
}

/// Compiles PTX for the device of the current context. The module stays loaded for as long as the context lives.
pub(crate) fn load(ptx: &str) -> Result<ManuallyDrop<Module>, Failure> {
    named("cuModuleLoadDataEx", Module::from_ptx(ptx, &[])).map(ManuallyDrop::new)
}

/// A kernel of a module.
pub(crate) fn function(module: &Module, name: &str) -> Result<Function, Failure> {
    let function = named(name, module.get_function(name))?;
    Ok(Function(function.to_raw()))
}

/// Pointers to the arguments of a launch, each a variable of the type that the kernel has.
macro_rules! arguments {
    ($($value:ident),* $(,)?) => { [$((&raw const $value).cast_mut().cast::<std::ffi::c_void>()),*] };
}
pub(crate) use arguments;

/// The host's stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream(sys::CUstream);

// SAFETY: a handle of the driver, whose functions may be called from any thread.
unsafe impl Send for Stream {}

impl Stream {
    /// A live `CUstream`, as a number.
    pub(crate) fn borrow(raw: u64) -> Stream {
        Stream(ptr::without_provenance_mut(raw as usize))
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// `arguments` point to values of the types of the kernel's parameters, in their order; what the kernel reads and
    /// writes through them stays allocated until the stream has passed it.
    pub(crate) unsafe fn launch(
        self,
        function: Function,
        shape: Shape,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Failure> {
        let [x, y, z] = shape.grid;
        // SAFETY: the caller's duty; the driver copies the arguments before it returns.
        judge("cuLaunchKernel", unsafe {
            driver::cuLaunchKernel(
                function.0,
                x,
                y,
                z,
                shape.block,
                1,
                1,
                shape.shared,
                self.0,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }

    /// Enqueues writing a few bytes, of which the driver takes a copy before this returns: they are not page-locked.
    ///
    /// # Safety
    /// So many bytes are allocated there until the stream has passed.
    pub(crate) unsafe fn write(self, to: u64, bytes: &[u8]) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        judge("cuMemcpyHtoDAsync", unsafe {
            driver::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.0)
        })
    }

    /// Enqueues a copy within the device.
    ///
    /// # Safety
    /// Both ranges stay allocated until the stream has passed the copy, and do not overlap.
    pub(crate) unsafe fn copy(self, to: u64, from: u64, bytes: usize) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        judge("cuMemcpyDtoDAsync", unsafe {
            driver::cuMemcpyDtoDAsync_v2(to, from, bytes, self.0)
        })
    }

    /// Enqueues a copy of rows; on the device they lie without gaps.
    ///
    /// # Safety
    /// Both sides stay allocated until the stream has passed the copy.
    pub(crate) unsafe fn copy_rows(self, rows: Rows) -> Result<(), Failure> {
        use sys::CUmemorytype_enum::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
        let (from, to) = if rows.is_upload {
            (CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE)
        } else {
            (CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST)
        };
        let pitch = |kind| match kind {
            CU_MEMORYTYPE_HOST => rows.stride,
            _ => rows.width,
        };
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: from,
            srcHost: rows.host.cast(),
            srcDevice: rows.device,
            srcArray: ptr::null_mut(),
            srcPitch: pitch(from),
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: to,
            dstHost: rows.host.cast(),
            dstDevice: rows.device,
            dstArray: ptr::null_mut(),
            dstPitch: pitch(to),
            WidthInBytes: rows.width,
            Height: rows.count,
        };
        // SAFETY: the caller's duty; the driver copies the description before it returns.
        judge("cuMemcpy2DAsync", unsafe {
            driver::cuMemcpy2DAsync_v2(&raw const copy, self.0)
        })
    }
}

/// One plane between host and device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) is_upload: bool,
    pub(crate) host: *mut u8,
    /// Bytes from row to row on the host.
    pub(crate) stride: usize,
    pub(crate) device: u64,
    /// Bytes of a row.
    pub(crate) width: usize,
    pub(crate) count: usize,
}

/// Device memory, allocated and freed in the order of the stream, so that neither waits.
#[derive(Debug)]
pub(crate) struct Memory {
    address: u64,
    stream: Stream,
}

impl Memory {
    /// So many bytes of anything.
    pub(crate) fn new(bytes: usize, stream: Stream) -> Result<Memory, Failure> {
        let mut address = 0;
        // SAFETY: writes one address to a local.
        judge("cuMemAllocAsync", unsafe {
            driver::cuMemAllocAsync(&raw mut address, bytes.max(1), stream.0)
        })?;
        Ok(Memory { address, stream })
    }

    /// So many bytes, set to zero.
    pub(crate) fn zeroed(bytes: usize, stream: Stream) -> Result<Memory, Failure> {
        let memory = Memory::new(bytes, stream)?;
        // SAFETY: so many bytes were allocated before this on the same stream.
        judge("cuMemsetD8Async", unsafe {
            driver::cuMemsetD8Async(memory.address, 0, bytes, stream.0)
        })?;
        Ok(memory)
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once, behind all work of the stream that uses it. An error has no one to go to:
        // the device is lost then, and the memory with it.
        let _ = unsafe { driver::cuMemFreeAsync(self.address, self.stream.0) };
    }
}
