//! The driver's functions, looked up once, and what their result codes mean.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

use super::error::CudaError;
use super::table::functions;

/// The oldest driver that takes PTX of this version (9.0), as the driver counts: 13.0.
const NEEDED: c_int = 13_000;

functions! {
    /// What every driver has, however old.
    Age {
        cuDriverGetVersion(*mut c_int);
    }
}

functions! {
    /// What is called of the driver, with the types of cuda.h 13.0.
    Functions {
        cuInit(c_uint);
        cuGetErrorName(c_int, *mut *const c_char);
        cuGetErrorString(c_int, *mut *const c_char);
        cuCtxGetCurrent(*mut sys::CUcontext);
        cuCtxGetId(sys::CUcontext, *mut u64);
        cuCtxGetDevice(*mut sys::CUdevice);
        cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, sys::CUdevice);
        cuModuleLoadDataEx(
            *mut sys::CUmodule,
            *const c_void,
            c_uint,
            *mut sys::CUjit_option,
            *mut *mut c_void,
        );
        cuModuleGetFunction(*mut sys::CUfunction, sys::CUmodule, *const c_char);
        cuFuncSetAttribute(sys::CUfunction, sys::CUfunction_attribute, c_int);
        cuLaunchKernel(
            sys::CUfunction,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            sys::CUstream,
            *mut *mut c_void,
            *mut *mut c_void,
        );
        cuMemAllocAsync(*mut u64, usize, sys::CUstream);
        cuMemFreeAsync(u64, sys::CUstream);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, sys::CUstream);
        cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, sys::CUstream);
        cuMemcpyDtoDAsync_v2(u64, u64, usize, sys::CUstream);
        cuMemcpy2DAsync_v2(*const sys::CUDA_MEMCPY2D, sys::CUstream);
        cuStreamQuery(sys::CUstream);
        cuEventCreate(*mut sys::CUevent, c_uint);
        cuEventRecord(sys::CUevent, sys::CUstream);
        cuEventElapsedTime_v2(*mut f32, sys::CUevent, sys::CUevent);
        cuEventDestroy_v2(sys::CUevent);
    }
}

/// Proof that libcuda is there and initialized, with its functions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Driver(pub(super) &'static Functions);

/// Calls a function of the driver; its name goes into the error. The caller's `unsafe` block vouches for the arguments.
macro_rules! call {
    ($driver:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let driver: $crate::cuda::driver::Driver = $driver;
        let code = (driver.0.$function)($($argument),*);
        driver.judge(stringify!($function), code)
    }};
}
pub(super) use call;

impl Driver {
    /// Finds and initializes the driver. A driver that was missing is looked for again.
    pub(crate) fn load() -> Result<Driver, CudaError> {
        static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
        let driver = match FUNCTIONS.get() {
            Some(functions) => Driver(functions),
            None => {
                let found = find()?;
                Driver(FUNCTIONS.get_or_init(|| found))
            }
        };
        // SAFETY: 0 is the only value allowed; it may be called again, from any thread.
        unsafe { call!(driver, cuInit(0)) }?;
        Ok(driver)
    }

    /// An error unless the code is success.
    pub(super) fn judge(self, function: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let (name, text) = self.words(code);
        Err(CudaError::Call {
            function,
            name,
            text,
            out_of_memory: code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int,
        })
    }

    /// The name of a code, and what it says; the number where the driver does not know it.
    pub(super) fn words(self, code: c_int) -> (String, String) {
        let ask = |say: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text = std::ptr::null();
            // SAFETY: takes any code, and writes one pointer to a local: to a constant text, or null.
            match unsafe { say(code, &raw mut text) } {
                // SAFETY: as above; the driver is never unloaded.
                0 if !text.is_null() => unsafe { CStr::from_ptr(text) }
                    .to_string_lossy()
                    .into_owned(),
                _ => format!("code {code}"),
            }
        };
        (ask(self.0.cuGetErrorName), ask(self.0.cuGetErrorString))
    }
}

fn find() -> Result<Functions, CudaError> {
    // SAFETY: loading the driver runs its constructors, which is what loading it means.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    // SAFETY: as above; it was just found, so this does not panic.
    in_library(unsafe { sys::culib() })
}

/// The functions of a driver that is new enough.
fn in_library(library: &libloading::Library) -> Result<Functions, CudaError> {
    let missing = |function| CudaError::NoFunction { function };
    // First, because the age of a driver is why it lacks a function.
    // SAFETY: this function has had this type for ever, and cudarc never unloads the driver.
    let age = unsafe { Age::look_up(library) }.map_err(missing)?;
    let mut version = 0;
    // SAFETY: writes one number to a local; needs no initialized driver. A failure leaves the 0.
    let _ = unsafe { (age.cuDriverGetVersion)(&raw mut version) };
    if version < NEEDED {
        let text = |v: c_int| format!("{}.{}", v / 1000, v % 1000 / 10);
        return Err(CudaError::OldDriver {
            found: text(version),
            needed: text(NEEDED),
        });
    }
    // SAFETY: in a driver of 13.0 or newer these names stand for these types; newer types get newer names.
    unsafe { Functions::look_up(library) }.map_err(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_is_missing_is_named() {
        let library = libloading::os::unix::Library::this().into();
        let error = in_library(&library).unwrap_err();
        let function = "cuDriverGetVersion";
        assert_eq!(error, CudaError::NoFunction { function });
        let error = error.to_string();
        assert!(
            error.starts_with("libcuda has no cuDriverGetVersion: "),
            "{error}"
        );
        // SAFETY: nothing is found, so nothing is called.
        let missing = unsafe { Functions::look_up(&library) }.unwrap_err();
        assert_eq!(missing, "cuInit");
    }
}
