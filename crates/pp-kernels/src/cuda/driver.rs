//! The driver as these kernels use it: modules, launches, copies and events on a raw context and stream.
//!
//! Hazard: cudarc panics when libcuda is missing, so [`Driver::load`] looks for it first, and everything else here is
//! made from a [`Driver`]. Nothing here waits, except where the name says so.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::error::{CudaError, call, judge, words};

/// The oldest driver that takes PTX of this version (9.0), as the driver counts: 13.0. It has every function that is
/// called here; a missing one would be a panic of cudarc.
const NEEDED: i32 = 13_000;

/// Proof that libcuda is there and initialized.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Driver(());

impl Driver {
    /// Finds and initializes the driver. A driver that was missing is looked for again.
    pub(crate) fn load() -> Result<Driver, CudaError> {
        static LOADED: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = LOADED.get() {
            return Ok(*driver);
        }
        // SAFETY: loading the driver runs its constructors, which is what loading it means.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        // SAFETY: the library is there; 0 is the only value allowed.
        unsafe { call!(cuInit(0)) }?;
        let mut version = 0;
        // SAFETY: the library is there; the pointer is to a local.
        unsafe { call!(cuDriverGetVersion(&raw mut version)) }?;
        if version < NEEDED {
            let text = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
            return Err(CudaError::OldDriver {
                found: text(version),
                needed: text(NEEDED),
            });
        }
        Ok(*LOADED.get_or_init(|| Driver(())))
    }

    /// The context that is current on this thread, 0 for none.
    pub(crate) fn current_context(self) -> Result<u64, CudaError> {
        let mut context = ptr::null_mut();
        // SAFETY: the driver is there (`self`); the pointer is to a local.
        unsafe { call!(cuCtxGetCurrent(&raw mut context)) }?;
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
        unsafe { call!(cuCtxGetId(context as sys::CUcontext, &raw mut id)) }?;
        Ok(id)
    }

    /// An attribute of the device of the current context.
    fn attribute(self, which: sys::CUdevice_attribute) -> Result<i32, CudaError> {
        let (mut device, mut value) = (0, 0);
        // SAFETY: the driver is there; the pointers are to locals.
        unsafe {
            call!(cuCtxGetDevice(&raw mut device))?;
            call!(cuDeviceGetAttribute(&raw mut value, which, device))?;
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

/// PTX for one architecture.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PtxText {
    pub(crate) arch: &'static str,
    pub(crate) text: &'static str,
}

/// A module, loaded into the context that was current then. Never unloaded: unloading waits for the device, and the
/// context takes it along.
#[derive(Debug)]
pub(crate) struct Module(sys::CUmodule);

// SAFETY: a module is a handle of the driver, whose functions may be called from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; nothing here changes a module.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles PTX for the device of the current context.
    pub(crate) fn load(_: Driver, ptx: PtxText) -> Result<Module, CudaError> {
        use sys::CUjit_option as O;
        let text = CString::new(ptx.text).map_err(|_| CudaError::Module {
            arch: ptx.arch,
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
        let status = unsafe {
            sys::cuModuleLoadDataEx(
                &raw mut module,
                text.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        let Err(error) = status.result() else {
            return Ok(Module(module));
        };
        let end = log.iter().position(|b| *b == 0).unwrap_or(log.len());
        let mut said = String::from_utf8_lossy(&log[..end])
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        let (name, text) = words(error);
        if said.is_empty() {
            said = text;
        }
        let is_old = status == sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
        Err(CudaError::Module {
            arch: ptx.arch,
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
            call!(cuModuleGetFunction(
                &raw mut function,
                self.0,
                name.as_ptr()
            ))
        }?;
        Ok(Function(function))
    }
}

/// A kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function(sys::CUfunction);

// SAFETY: a function is a handle of the driver, whose functions may be called from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Lets launches have so much dynamic shared memory; without it they may have 48 KiB.
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a loaded module.
        unsafe { call!(cuFuncSetAttribute(self.0, attribute, bytes as i32)) }
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
            call!(cuLaunchKernel(
                self.0,
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
            ))
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stream(u64);

impl Stream {
    /// # Safety
    /// `raw` is a live `CUstream` (or 0) of the context that is current wherever the stream is used, and lives as long.
    pub(crate) unsafe fn borrow(raw: u64) -> Stream {
        Stream(raw)
    }

    pub(crate) fn raw(self) -> sys::CUstream {
        ptr::without_provenance_mut(self.0 as usize)
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
        unsafe { call!(cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw())) }
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
        unsafe { call!(cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.raw())) }
    }

    /// Enqueues a copy within the device.
    ///
    /// # Safety
    /// As [`Stream::upload`]; the ranges do not overlap.
    pub(crate) unsafe fn copy(self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's duty.
        unsafe { call!(cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw())) }
    }

    /// Enqueues a copy of rows.
    ///
    /// # Safety
    /// As [`Stream::upload`], for every row that `copy` names.
    pub(crate) unsafe fn copy_rows(self, copy: &sys::CUDA_MEMCPY2D) -> Result<(), CudaError> {
        // SAFETY: the caller's duty.
        unsafe { call!(cuMemcpy2DAsync_v2(copy, self.raw())) }
    }

    /// Whether all that was enqueued is done.
    pub(crate) fn is_done(self) -> Result<bool, CudaError> {
        // SAFETY: the stream is alive, as its maker promised.
        match unsafe { sys::cuStreamQuery(self.raw()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => judge("cuStreamQuery", status).map(|()| true),
        }
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
pub(crate) struct Event(sys::CUevent);

// SAFETY: an event is a handle of the driver, whose functions may be called from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn new(_: Driver) -> Result<Event, CudaError> {
        let mut event = ptr::null_mut();
        // SAFETY: the driver is there; flags 0 make an event with a time.
        unsafe { call!(cuEventCreate(&raw mut event, 0)) }?;
        Ok(Event(event))
    }

    pub(crate) fn record(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive.
        unsafe { call!(cuEventRecord(self.0, stream.raw())) }
    }

    /// From `start` to here; both must be done.
    pub(crate) fn since(&self, start: &Event) -> Result<Duration, CudaError> {
        let mut milliseconds = 0f32;
        // SAFETY: both are alive; the pointer is to a local.
        unsafe {
            call!(cuEventElapsedTime_v2(
                &raw mut milliseconds,
                start.0,
                self.0
            ))
        }?;
        Ok(Duration::from_secs_f64(
            f64::from(milliseconds.max(0.0)) / 1e3,
        ))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; the driver keeps it until work that records it is done.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
