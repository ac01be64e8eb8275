//! One device, and its context on the thread that calls.

use std::cell::Cell;
use std::ffi::{c_char, c_int};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::driver::{Driver, Handle, call};
use super::error::{CudaError, NO_DEVICE, NOT_INITIALIZED};

const MULTIPROCESSOR_COUNT: c_int = 16;
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;

/// What there is to know of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// Its number in this process, which `CUDA_VISIBLE_DEVICES` steers.
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// The same in every process and on no other device.
    pub uuid: [u8; 16],
    /// Bytes of memory.
    pub total_bytes: u64,
    /// Major number of the compute capability.
    pub compute_major: u32,
    /// Minor number of the compute capability.
    pub compute_minor: u32,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// The newest CUDA that the driver knows, as 1000 × major + 10 × minor.
    pub driver_version: u32,
}

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Not taken by anybody.
    pub free: u64,
    /// All there is.
    pub total: u64,
}

/// A device and its primary context. Clones are the same device.
///
/// # If dropped
/// The context stays for the life of the process: others use it too.
#[derive(Clone)]
pub struct Device(Arc<Opened>);

struct Opened {
    driver: &'static Driver,
    context: usize,
    about: About,
    /// How many reasons there are to believe that kernels on it wait for what never comes.
    troubles: AtomicUsize,
}

thread_local! {
    /// The context that this thread made current last, so that an issuing thread binds once.
    /// Libraries that change it (NCCL, kernels) should put it back, and not all do: a stream, an
    /// event or memory that exists is right all the same, but what is made must not rely on it.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

impl Device {
    /// How many devices this process can see.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::OldDriver`], [`CudaError::MissingSymbol`].
    pub fn count() -> Result<u32, CudaError> {
        let driver = Driver::get()?;
        let mut count = 0;
        // SAFETY: writes one number to an address that is ours.
        match unsafe { call!(driver, cuDeviceGetCount(&raw mut count)) } {
            Ok(()) => Ok(u32::try_from(count).unwrap_or(0)),
            // A driver that found no device does not even initialize.
            Err(CudaError::Call { code, .. }) if code == NO_DEVICE || code == NOT_INITIALIZED => {
                Ok(0)
            }
            Err(error) => Err(error),
        }
    }

    /// The device with this number.
    ///
    /// # Errors
    /// As [`Device::count`]; [`CudaError::NoDevice`]; the driver cannot make a context, for
    /// example because another process holds the device for itself.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        static OPENED: Mutex<Vec<Device>> = Mutex::new(Vec::new());
        let count = Self::count()?;
        let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let Some(number) = number else {
            return Err(CudaError::NoDevice { ordinal, count });
        };
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = opened.iter().find(|d| d.about().ordinal == ordinal) {
            return Ok(device.clone());
        }
        let device = Self::retain(number, ordinal)?;
        opened.push(device.clone());
        Ok(device)
    }

    fn retain(number: c_int, ordinal: u32) -> Result<Self, CudaError> {
        let driver = Driver::get()?;
        let mut device = 0;
        // SAFETY: writes one number to an address that is ours.
        unsafe { call!(driver, cuDeviceGet(&raw mut device, number)) }?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: as above, of a device that exists.
            unsafe { call!(driver, cuDeviceGetAttribute(&raw mut value, which, device)) }?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        let mut name = [0_u8; 256];
        let (mut uuid, mut total) = ([0; 16], 0_usize);
        let room = c_int::try_from(name.len()).expect("a small number");
        // SAFETY: each writes to an address that is ours, no more than it is told there is room.
        unsafe {
            let text = name.as_mut_ptr().cast::<c_char>();
            call!(driver, cuDeviceGetName(text, room, device))?;
            call!(driver, cuDeviceGetUuid_v2(&raw mut uuid, device))?;
            call!(driver, cuDeviceTotalMem_v2(&raw mut total, device))?;
        }
        let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
        let about = About {
            ordinal,
            name: String::from_utf8_lossy(&name[..end]).into_owned(),
            uuid,
            total_bytes: total as u64,
            compute_major: attribute(COMPUTE_CAPABILITY_MAJOR)?,
            compute_minor: attribute(COMPUTE_CAPABILITY_MINOR)?,
            multiprocessors: attribute(MULTIPROCESSOR_COUNT)?,
            driver_version: driver.version()?,
        };
        let mut context: Handle = std::ptr::null_mut();
        // SAFETY: writes one handle to an address that is ours. It is never released, so it is
        // good for as long as the process.
        unsafe { call!(driver, cuDevicePrimaryCtxRetain(&raw mut context, device)) }?;
        Ok(Self(Arc::new(Opened {
            driver,
            context: context as usize,
            about,
            troubles: AtomicUsize::new(0),
        })))
    }

    /// What device this is.
    #[must_use]
    pub fn about(&self) -> &About {
        &self.0.about
    }

    /// Makes the device's context current on the calling thread; a comparison when it is.
    ///
    /// # Errors
    /// The driver refuses.
    #[inline]
    pub fn bind(&self) -> Result<(), CudaError> {
        if CURRENT.get() == self.0.context {
            return Ok(());
        }
        self.bind_anew()
    }

    /// The same for calls that make something in whatever context is current: does not trust that
    /// nobody else has changed it on this thread.
    pub(super) fn bind_anew(&self) -> Result<(), CudaError> {
        let context = self.0.context as Handle;
        // SAFETY: a context that is never released.
        unsafe { call!(self.driver(), cuCtxSetCurrent(context)) }?;
        CURRENT.set(self.0.context);
        Ok(())
    }

    /// The `CUcontext`, for other libraries. It lives as long as the process.
    #[must_use]
    pub fn raw_context(&self) -> u64 {
        self.0.context as u64
    }

    /// How much memory the device has left.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn memory(&self) -> Result<Memory, CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: writes two numbers to addresses that are ours.
        unsafe {
            call!(
                self.driver(),
                cuMemGetInfo_v2(&raw mut free, &raw mut total)
            )
        }?;
        Ok(Memory {
            free: free as u64,
            total: total as u64,
        })
    }

    /// From now on kernels may wait for what never comes: whatever waits for the device would hang,
    /// and everybody else who calls the driver behind it.
    pub(crate) fn begin_trouble(&self) {
        self.0.troubles.fetch_add(1, Ordering::AcqRel);
    }

    /// Those kernels have ended.
    pub(crate) fn end_trouble(&self) {
        self.0.troubles.fetch_sub(1, Ordering::AcqRel);
    }

    pub(super) fn is_troubled(&self) -> bool {
        self.0.troubles.load(Ordering::Acquire) > 0
    }

    pub(super) fn driver(&self) -> &'static Driver {
        self.0.driver
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.0.context == other.0.context
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}: {})", self.about().ordinal, self.about().name)
    }
}
