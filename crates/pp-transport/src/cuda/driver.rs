//! The driver's functions, looked up once.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use super::error::{CudaError, NO_DEVICE};

/// The oldest driver that is accepted: CUDA 12.0.
const NEEDED_VERSION: u32 = 12_000;

/// A handle of the driver: context, stream, event.
pub(super) type Handle = *mut c_void;
/// An address on a device.
pub(super) type Address = u64;

macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*);)*) => {
        /// Pointers into the driver, which is never unloaded. Each has the type that CUDA's
        /// documentation gives the function of its name; each returns a `CUresult`.
        #[expect(non_snake_case, reason = "the names of cuda.h")]
        #[derive(Debug)]
        pub(super) struct Driver {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Driver {
            fn look_up() -> Result<Self, CudaError> {
                // SAFETY: opens libraries by the driver's names; their constructors are those of
                // whatever the system has installed as its driver.
                if !unsafe { cudarc::driver::sys::is_culib_present() } {
                    return Err(CudaError::NoDriver);
                }
                // SAFETY: as above; the library was just found, so this does not panic.
                let library = unsafe { cudarc::driver::sys::culib() };
                Ok(Self {
                    $($name: {
                        let symbol = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: a driver's function of this name has this type (checked against
                        // cuda.h 13.0, and part of the driver's stable interface).
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($arg),*) -> c_int>(symbol)
                        };
                        *found.map_err(|_| CudaError::MissingSymbol { symbol: stringify!($name) })?
                    },)*
                })
            }
        }
    };
}

functions! {
    cuInit: fn(c_uint);
    cuDriverGetVersion: fn(*mut c_int);
    cuGetErrorName: fn(c_int, *mut *const c_char);
    cuGetErrorString: fn(c_int, *mut *const c_char);
    cuDeviceGetCount: fn(*mut c_int);
    cuDeviceGet: fn(*mut c_int, c_int);
    cuDeviceGetName: fn(*mut c_char, c_int, c_int);
    cuDeviceGetUuid_v2: fn(*mut [u8; 16], c_int);
    cuDeviceTotalMem_v2: fn(*mut usize, c_int);
    cuDeviceGetAttribute: fn(*mut c_int, c_int, c_int);
    cuDevicePrimaryCtxRetain: fn(*mut Handle, c_int);
    cuCtxSetCurrent: fn(Handle);
    cuCtxGetStreamPriorityRange: fn(*mut c_int, *mut c_int);
    cuMemGetInfo_v2: fn(*mut usize, *mut usize);
    cuStreamCreateWithPriority: fn(*mut Handle, c_uint, c_int);
    cuStreamDestroy_v2: fn(Handle);
    cuStreamWaitEvent: fn(Handle, Handle, c_uint);
    cuStreamQuery: fn(Handle);
    cuEventCreate: fn(*mut Handle, c_uint);
    cuEventRecord: fn(Handle, Handle);
    cuEventQuery: fn(Handle);
    cuEventElapsedTime: fn(*mut f32, Handle, Handle);
    cuEventDestroy_v2: fn(Handle);
    cuMemAlloc_v2: fn(*mut Address, usize);
    cuMemFree_v2: fn(Address);
    cuMemHostAlloc: fn(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost: fn(*mut c_void);
    cuMemcpyHtoDAsync_v2: fn(Address, *const c_void, usize, Handle);
    cuMemcpyDtoHAsync_v2: fn(*mut c_void, Address, usize, Handle);
    cuMemcpyDtoDAsync_v2: fn(Address, Address, usize, Handle);
    cuMemsetD8Async: fn(Address, u8, usize, Handle);
}

/// Calls a function of the driver by its name; its result code as an error.
///
/// The caller's `unsafe` block vouches for the arguments.
macro_rules! call {
    ($driver:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let driver = $driver;
        let code = (driver.$name)($($arg),*);
        driver.check(stringify!($name), code)
    }};
}
pub(super) use call;

impl Driver {
    /// The driver, initialized.
    ///
    /// # Errors
    /// It is missing, too old, or does not start. A machine with a driver and no device is none
    /// of these.
    pub(super) fn get() -> Result<&'static Self, CudaError> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        let driver = Self::look_up()?;
        // SAFETY: takes a number; allowed at any time, from any thread.
        let init = unsafe { call!(&driver, cuInit(0)) };
        init.or_else(|error| match error {
            CudaError::Call {
                code: NO_DEVICE, ..
            } => Ok(()),
            other => Err(other),
        })?;
        let mut version = 0;
        // SAFETY: writes one number to an address that is ours.
        unsafe { call!(&driver, cuDriverGetVersion(&raw mut version)) }?;
        let found = u32::try_from(version).unwrap_or(0);
        if found < NEEDED_VERSION {
            let needed = NEEDED_VERSION;
            return Err(CudaError::OldDriver { found, needed });
        }
        Ok(DRIVER.get_or_init(|| driver))
    }

    /// The driver's version as 1000 × major + 10 × minor.
    pub(super) fn version(&self) -> Result<u32, CudaError> {
        let mut version = 0;
        // SAFETY: writes one number to an address that is ours.
        unsafe { call!(self, cuDriverGetVersion(&raw mut version)) }?;
        Ok(u32::try_from(version).unwrap_or(0))
    }

    /// An error unless the code is success.
    pub(super) fn check(&self, function: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        Err(self.error(function, code))
    }

    #[cold]
    fn error(&self, function: &'static str, code: c_int) -> CudaError {
        let words = |say: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text = std::ptr::null();
            // SAFETY: writes one pointer to an address that is ours; on success it is to a
            // constant string of the driver.
            match unsafe { say(code, &raw mut text) } {
                // SAFETY: as above: valid for as long as the driver is loaded, which is for good.
                0 if !text.is_null() => unsafe { CStr::from_ptr(text) }
                    .to_string_lossy()
                    .into_owned(),
                _ => "an unknown error".to_owned(),
            }
        };
        CudaError::Call {
            function,
            code,
            name: words(self.cuGetErrorName),
            text: words(self.cuGetErrorString),
        }
    }
}
