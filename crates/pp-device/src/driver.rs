//! The driver's functions, looked up once.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::error::{CudaError, NO_DEVICE};
use crate::functions;

/// The oldest driver that is accepted: CUDA 12.0.
const NEEDED_VERSION: u32 = 12_000;

/// A handle of the driver: context, stream, event, module, function.
pub(crate) type Handle = *mut c_void;
/// An address on a device.
pub(crate) type Address = u64;

functions! {
    /// What every driver has, however old.
    Age {
        cuDriverGetVersion(*mut c_int);
    }
}

functions! {
    /// What is called of the driver, with the types of cuda.h 13.0. The driver is never unloaded.
    Driver {
        cuInit(c_uint);
        cuGetErrorName(c_int, *mut *const c_char);
        cuGetErrorString(c_int, *mut *const c_char);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut c_int, c_int);
        cuDeviceGetName(*mut c_char, c_int, c_int);
        cuDeviceGetUuid_v2(*mut [u8; 16], c_int);
        cuDeviceTotalMem_v2(*mut usize, c_int);
        cuDeviceGetAttribute(*mut c_int, c_int, c_int);
        cuDevicePrimaryCtxRetain(*mut Handle, c_int);
        cuCtxSetCurrent(Handle);
        cuCtxGetCurrent(*mut Handle);
        cuCtxGetId(Handle, *mut u64);
        cuCtxGetDevice(*mut c_int);
        cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuStreamCreateWithPriority(*mut Handle, c_uint, c_int);
        cuStreamDestroy_v2(Handle);
        cuStreamWaitEvent(Handle, Handle, c_uint);
        cuStreamQuery(Handle);
        cuEventCreate(*mut Handle, c_uint);
        cuEventRecord(Handle, Handle);
        cuEventQuery(Handle);
        cuEventElapsedTime(*mut f32, Handle, Handle);
        cuEventDestroy_v2(Handle);
        cuMemAlloc_v2(*mut Address, usize);
        cuMemFree_v2(Address);
        cuMemAllocAsync(*mut Address, usize, Handle);
        cuMemFreeAsync(Address, Handle);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, Handle);
        cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, Handle);
        cuMemcpyDtoDAsync_v2(Address, Address, usize, Handle);
        cuMemcpy2DAsync_v2(*const sys::CUDA_MEMCPY2D, Handle);
        cuMemsetD8Async(Address, u8, usize, Handle);
        cuModuleLoadDataEx(*mut Handle, *const c_void, c_uint, *mut c_int, *mut *mut c_void);
        cuModuleGetFunction(*mut Handle, Handle, *const c_char);
        cuFuncSetAttribute(Handle, c_int, c_int);
        cuLaunchKernel(
            Handle,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            Handle,
            *mut *mut c_void,
            *mut *mut c_void,
        );
    }
}

/// The driver's functions, of which a process has one table.
static DRIVER: OnceLock<Driver> = OnceLock::new();

/// Calls a function of the driver, which was loaded before, by its name; its result code as an error.
///
/// The caller's `unsafe` block vouches for the arguments.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        let driver = $crate::driver::Driver::loaded();
        let code = (driver.$name)($($argument),*);
        driver.check(stringify!($name), code)
    }};
}
pub(crate) use call;

/// Says whether the context of this thread can do nothing any more. Never waits.
pub(crate) fn has_failed() -> bool {
    let Some(driver) = DRIVER.get() else {
        return false;
    };
    // SAFETY: the default stream of the current context; without a context the driver refuses.
    is_of_context(unsafe { (driver.cuStreamQuery)(std::ptr::null_mut()) })
}

/// Says whether this result is of the context, whatever was called: of an address, an instruction or a launch that failed on
/// the device, or of MPS (cuda.h 13.0: 700, 702, 710, 714 to 719, 805 to 810).
fn is_of_context(code: c_int) -> bool {
    matches!(code, 700 | 702 | 710 | 714..=719 | 805..=810)
}

impl Driver {
    /// Loads and initializes the driver. A driver that was missing is looked for again.
    ///
    /// # Errors
    /// It is missing, too old, or does not start. A machine with a driver and no device is none
    /// of these.
    pub(crate) fn load() -> Result<(), CudaError> {
        if DRIVER.get().is_some() {
            return Ok(());
        }
        // SAFETY: loading the driver runs its constructors, which is what loading it means.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        // SAFETY: as above; it was just found, so this does not panic.
        let driver = Self::in_library(unsafe { sys::culib() })?;
        // SAFETY: takes a number; allowed at any time, from any thread.
        let code = unsafe { (driver.cuInit)(0) };
        driver.check("cuInit", code).or_else(|error| match error {
            CudaError::Call {
                code: NO_DEVICE, ..
            } => Ok(()),
            other => Err(other),
        })?;
        DRIVER.get_or_init(|| driver);
        Ok(())
    }

    /// The driver that was loaded before: every device comes from it, and whatever else there is from a device.
    ///
    /// # Panics
    /// Never once [`Driver::load`] succeeded.
    #[inline]
    pub(crate) fn loaded() -> &'static Self {
        DRIVER.get().expect("a device comes from a driver")
    }

    /// The functions of a driver that is new enough.
    fn in_library(library: &libloading::Library) -> Result<Self, CudaError> {
        let missing = |symbol| CudaError::MissingSymbol { symbol };
        // First, because the age of a driver is why it lacks a function.
        // SAFETY: this function has had this type for ever, and cudarc never unloads the driver.
        let age = unsafe { Age::look_up(library) }.map_err(missing)?;
        let (found, needed) = (version(age.cuDriverGetVersion), NEEDED_VERSION);
        if found < needed {
            return Err(CudaError::OldDriver { found, needed });
        }
        // SAFETY: the names stand for these types in cuda.h 13.0 and are part of the driver's stable interface:
        // newer types get newer names.
        unsafe { Self::look_up(library) }.map_err(missing)
    }

    /// The driver's version as 1000 × major + 10 × minor.
    pub(crate) fn version(&self) -> u32 {
        version(self.cuDriverGetVersion)
    }

    /// An error unless the code is success.
    pub(crate) fn check(&self, function: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let (name, text) = self.words(code);
        Err(CudaError::Call {
            function,
            code,
            name,
            text,
        })
    }

    /// The name of a code, and what the driver says of it.
    #[cold]
    pub(crate) fn words(&self, code: c_int) -> (String, String) {
        let ask = |say: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text = std::ptr::null();
            // SAFETY: takes any code, and writes one pointer to a local; on success it is to a
            // constant string of the driver.
            match unsafe { say(code, &raw mut text) } {
                // SAFETY: as above; the driver is never unloaded.
                0 if !text.is_null() => unsafe { CStr::from_ptr(text) }
                    .to_string_lossy()
                    .into_owned(),
                _ => "an unknown error".to_owned(),
            }
        };
        (ask(self.cuGetErrorName), ask(self.cuGetErrorString))
    }
}

/// The version that a driver gives; 0 where it gives none.
fn version(get: unsafe extern "C" fn(*mut c_int) -> c_int) -> u32 {
    let mut version = 0;
    // SAFETY: writes one number to a local, if it succeeds; needs no initialized driver.
    let _ = unsafe { get(&raw mut version) };
    u32::try_from(version).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_is_missing_is_named() {
        let library = libloading::os::unix::Library::this().into();
        let error = Driver::in_library(&library).unwrap_err().to_string();
        assert!(error.contains("no function cuDriverGetVersion"), "{error}");
        // SAFETY: nothing is found, so nothing is called.
        let missing = unsafe { Driver::look_up(&library) }.unwrap_err();
        assert_eq!(missing, "cuInit");
    }
}
