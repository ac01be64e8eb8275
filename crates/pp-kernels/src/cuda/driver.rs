//! The driver as these kernels use it: modules, launches, copies and events on a raw context and stream.
//!
//! Everything here is made from a [`Driver`], so there is one. Nothing here waits, except where the name says so.

use std::ffi::{CString, c_int, c_void};
use std::ptr;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::error::CudaError;
use super::functions::call;

pub(crate) use super::functions::Driver;

impl Driver {
    /// The context that is current on this thread, 0 for none.
    pub(crate) fn current_context(self) -> Result<u64, CudaError> {
        let mut context = ptr::null_mut();
        // SAFETY: the driver is there (`self`); the pointer is to a local.
        unsafe { call!(self, cuCtxGetCurrent(&raw mut context)) }?;
        Ok(context as u64)
    }

    /// Refuses a call on a thread where another context, or none, is current.
    pub(crate) fn check_context(self, wanted: u64) -> Result<(), CudaError> {
        match self.current_context()? {
            found if found == wanted => Ok(()),
            found => Err(CudaError::WrongContext { wanted, found }),
        }
    }

    /// A number that no other context of the process has, or had.
    pub(crate) fn context_id(self, context: u64) -> Result<u64, CudaError> {
        let mut id = 0;
        // SAFETY: the driver is there; the context is current (checked by the callers), so it is alive.
        unsafe { call!(self, cuCtxGetId(context as sys::CUcontext, &raw mut id)) }?;
        Ok(id)
    }

    /// An attribute of the device of the current context.
    fn attribute(self, which: sys::CUdevice_attribute) -> Result<i32, CudaError> {
        let (mut device, mut value) = (0, 0);
        // SAFETY: the driver is there; the pointers are to locals.
        unsafe {
            call!(self, cuCtxGetDevice(&raw mut device))?;
            call!(self, cuDeviceGetAttribute(&raw mut value, which, device))?;
        }
        Ok(value)
    }

    /// Compute capability of the device of the current context.
    pub(crate) fn capability(self) -> Result<(i32, i32), CudaError> {
        use sys::CUdevice_attribute as A;
        Ok((
            self.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            self.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ))
    }

    /// Bytes of shared memory that a block may have at the most, on the device of the current context.
    pub(crate) fn shared_memory(self) -> Result<u32, CudaError> {
        let which = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        Ok(self.attribute(which)?.max(0) as u32)
    }

    /// Multiprocessors of the device of the current context.
    pub(crate) fn multiprocessors(self) -> Result<u32, CudaError> {
        let count =
            self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(count.max(1) as u32)
    }
}

/// A module, loaded into the context that was current then. Never unloaded: unloading waits for the device, and the
/// context takes it along.
#[derive(Debug)]
pub(crate) struct Module {
    driver: Driver,
    raw: sys::CUmodule,
}

// SAFETY: a module is a handle of the driver, whose functions may be called from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; nothing here changes a module.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles PTX for the device of the current context.
    pub(crate) fn load(driver: Driver, ptx: &str) -> Result<Module, CudaError> {
        use sys::CUjit_option as O;
        let text = CString::new(ptx).map_err(|_| CudaError::Module {
            name: "CUDA_ERROR_INVALID_PTX".into(),
            log: "it holds a NUL".into(),
            remedy: "",
        })?;
        let mut log = vec![0u8; 4096];
        let mut options = [
            O::CU_JIT_ERROR_LOG_BUFFER,
            O::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        // The driver takes small numbers in the place of pointers.
        let mut values: [*mut c_void; 2] = [
            log.as_mut_ptr().cast(),
            ptr::without_provenance_mut(log.len()),
        ];
        let mut module = ptr::null_mut();
        // SAFETY: the driver is there; text, options and the log buffer live across the call and are as long as said.
        let code = unsafe {
            (driver.0.cuModuleLoadDataEx)(
                &raw mut module,
                text.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if code == 0 {
            return Ok(Module {
                driver,
                raw: module,
            });
        }
        let end = log.iter().position(|b| *b == 0).unwrap_or(log.len());
        let mut said = String::from_utf8_lossy(&log[..end])
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        let (name, text) = driver.words(code);
        if said.is_empty() {
            said = text;
        }
        let is_old = code == sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as c_int;
        Err(CudaError::Module {
            name,
            log: said,
            remedy: if is_old {
                "; update the NVIDIA driver to 580 or newer (CUDA 13.0)"
            } else {
                ""
            },
        })
    }

    /// A kernel of the module.
    pub(crate) fn function(&self, name: &str) -> Result<Function, CudaError> {
        let name = CString::new(name).unwrap_or_default();
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded; name and result live across the call.
        unsafe {
            call!(
                self.driver,
                cuModuleGetFunction(&raw mut function, self.raw, name.as_ptr())
            )
        }?;
        Ok(Function {
            driver: self.driver,
            raw: function,
        })
    }
}

/// A kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function {
    driver: Driver,
    raw: sys::CUfunction,
}

// SAFETY: a function is a handle of the driver, whose functions may be called from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Lets launches have so much dynamic shared memory; without it they may have 48 KiB.
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a loaded module.
        unsafe {
            call!(
                self.driver,
                cuFuncSetAttribute(self.raw, attribute, bytes as i32)
            )
        }
    }

    /// Enqueues the kernel.
    ///
    /// # Safety
    /// `arguments` point to values of the types of the kernel's parameters, in their order, and what the kernel reads
    /// and writes through them stays allocated until the stream has passed it.
    pub(crate) unsafe fn launch(
        &self,
        stream: Stream,
        shape: Shape,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let ([gx, gy, gz], [bx, by, bz]) = (shape.grid, shape.block);
        // SAFETY: the caller's duty; the arguments are copied before the call returns.
        unsafe {
            call!(
                self.driver,
                cuLaunchKernel(
                    self.raw,
                    gx,
                    gy,
                    gz,
                    bx,
                    by,
                    bz,
                    shape.shared,
                    stream.raw(),
                    arguments.as_mut_ptr(),
                    ptr::null_mut(),
                )
            )
        }
    }
}

/// Pointers to the arguments of a launch, each a variable of the kernel's type.
macro_rules! arguments {
    ($($value:ident),* $(,)?) => { [$((&raw const $value).cast_mut().cast::<std::ffi::c_void>()),*] };
}
pub(crate) use arguments;

/// Blocks, threads in a block, and bytes of dynamic shared memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
}

impl Shape {
    /// Blocks in one dimension.
    pub(crate) fn line(blocks: u32, threads: u32) -> Shape {
        Shape {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared: 0,
        }
    }
}

/// Somebody else's stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream {
    driver: Driver,
    raw: u64,
}

impl Stream {
    /// # Safety
    /// `raw` is a live `CUstream` (or 0) of the context that is current wherever the stream is used, and lives as long.
    pub(crate) unsafe fn borrow(driver: Driver, raw: u64) -> Stream {
        Stream { driver, raw }
    }

    pub(crate) fn driver(self) -> Driver {
        self.driver
    }

    pub(crate) fn raw(self) -> sys::CUstream {
        ptr::without_provenance_mut(self.raw as usize)
    }

    /// Enqueues a copy from host memory.
    ///
    /// # Safety
    /// Both ranges are allocated, and stay so until the stream has passed the copy.
    pub(crate) unsafe fn upload(
        self,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's duty.
        unsafe {
            call!(
                self.driver,
                cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw())
            )
        }
    }

    /// Enqueues a copy to host memory.
    ///
    /// # Safety
    /// As [`Stream::upload`].
    pub(crate) unsafe fn download(
        self,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's duty.
        unsafe {
            call!(
                self.driver,
                cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.raw())
            )
        }
    }

    /// Enqueues a copy within the device.
    ///
    /// # Safety
    /// As [`Stream::upload`]; the ranges do not overlap.
    pub(crate) unsafe fn copy(self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's duty.
        unsafe {
            call!(
                self.driver,
                cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw())
            )
        }
    }

    /// Enqueues a copy of rows.
    ///
    /// # Safety
    /// As [`Stream::upload`], for every row that `copy` names.
    pub(crate) unsafe fn copy_rows(self, copy: &sys::CUDA_MEMCPY2D) -> Result<(), CudaError> {
        // SAFETY: the caller's duty.
        unsafe { call!(self.driver, cuMemcpy2DAsync_v2(copy, self.raw())) }
    }

    /// Whether all that was enqueued is done.
    pub(crate) fn is_done(self) -> Result<bool, CudaError> {
        // SAFETY: the stream is alive, as its maker promised.
        let code = unsafe { (self.driver.0.cuStreamQuery)(self.raw()) };
        if code == sys::CUresult::CUDA_ERROR_NOT_READY as c_int {
            return Ok(false);
        }
        self.driver.judge("cuStreamQuery", code).map(|()| true)
    }

    /// Waits until all that was enqueued is done, at most so long.
    pub(crate) fn wait(self, limit: Duration) -> Result<(), CudaError> {
        let start = Instant::now();
        while !self.is_done()? {
            if start.elapsed() > limit {
                return Err(CudaError::Late(limit));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}

/// A point on a stream with a time.
#[derive(Debug)]
pub(crate) struct Event {
    driver: Driver,
    raw: sys::CUevent,
}

// SAFETY: an event is a handle of the driver, whose functions may be called from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn new(driver: Driver) -> Result<Event, CudaError> {
        let mut event = ptr::null_mut();
        // SAFETY: the driver is there; flags 0 make an event with a time.
        unsafe { call!(driver, cuEventCreate(&raw mut event, 0)) }?;
        Ok(Event { driver, raw: event })
    }

    pub(crate) fn record(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive.
        unsafe { call!(self.driver, cuEventRecord(self.raw, stream.raw())) }
    }

    /// From `start` to here; both must be done.
    pub(crate) fn since(&self, start: &Event) -> Result<Duration, CudaError> {
        let mut milliseconds = 0f32;
        // SAFETY: both are alive; the pointer is to a local.
        unsafe {
            call!(
                self.driver,
                cuEventElapsedTime_v2(&raw mut milliseconds, start.raw, self.raw)
            )
        }?;
        Ok(Duration::from_secs_f64(
            f64::from(milliseconds.max(0.0)) / 1e3,
        ))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; the driver keeps it until work that records it is done.
        let _ = unsafe { (self.driver.0.cuEventDestroy_v2)(self.raw) };
    }
}
