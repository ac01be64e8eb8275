//! One device, and its context on the thread that calls.

use std::cell::Cell;
use std::ffi::{c_char, c_int};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use crate::driver::{Driver, Handle, call, has_failed};
use crate::error::{CudaError, NO_DEVICE, NOT_INITIALIZED};

/// The devices that this process opened: it has one primary context of each.
static OPENED: Mutex<Vec<Device>> = Mutex::new(Vec::new());

/// What there is to know of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// Its number in this process, which `CUDA_VISIBLE_DEVICES` steers.
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// The UUID: equal in every process, and different from that of any other device.
    pub uuid: [u8; 16],
    /// Bytes of memory.
    pub total_bytes: u64,
    /// Major number of the compute capability.
    pub compute_major: u32,
    /// Minor number of the compute capability.
    pub compute_minor: u32,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a block may have at the most.
    pub shared_bytes_per_block: u32,
    /// The newest CUDA that the driver knows, as 1000 × major + 10 × minor.
    pub driver_version: u32,
    /// NVIDIA's MPS serves this process, so its kernels run beside those of other processes. Without MPS the device serves
    /// its processes in turns. False, too, where the driver does not know.
    pub has_mps: bool,
}

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Not allocated.
    pub free: u64,
    /// All there is.
    pub total: u64,
}

/// A device and a context of it. Clones are the same device.
///
/// # If dropped
/// The context stays: others use it too.
#[derive(Clone)]
pub struct Device(Arc<Opened>);

struct Opened {
    context: usize,
    about: About,
    /// How many reasons there are to believe that kernels on it never end.
    hangs: AtomicUsize,
}

thread_local! {
    /// The context that this thread made current last, so that an issuing thread binds once.
    /// Libraries that change it (NCCL, kernels) should put it back, and not all do: a stream, an
    /// event or memory that exists is right all the same, but what is made must not rely on it.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Says whether a GPU of this process is under MPS and the context of this thread can do nothing any more: then every process on
/// that GPU has failed. Never waits.
#[must_use]
pub fn has_failed_for_all() -> bool {
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    opened.iter().any(|device| device.about().has_mps) && has_failed()
}

impl Device {
    /// How many devices this process can see.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::OldDriver`], [`CudaError::MissingSymbol`].
    pub fn count() -> Result<u32, CudaError> {
        Driver::load()?;
        let mut count = 0;
        // SAFETY: writes one number to an address that is ours.
        match unsafe { call!(cuDeviceGetCount(&raw mut count)) } {
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
        let number = Self::number_of(ordinal)?;
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = opened.iter().find(|d| d.about().ordinal == ordinal) {
            return Ok(device.clone());
        }
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: each writes to a local. The context is never released, so it is good for as long
        // as the process.
        unsafe {
            call!(cuDeviceGet(&raw mut device, number))?;
            call!(cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        }
        let device = Self::with_context(device, ordinal, context as usize)?;
        opened.push(device.clone());
        Ok(device)
    }

    /// The device with this context, which must be current on the calling thread: one that was
    /// opened here, or a context of another library.
    ///
    /// # Errors
    /// As [`Device::count`]; [`CudaError::WrongContext`].
    ///
    /// # Safety
    /// The context lives for as long as the device and what is made on it are used.
    pub unsafe fn of_context(context: u64) -> Result<Self, CudaError> {
        Driver::load()?;
        check_current(context)?;
        let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = opened.iter().find(|d| d.raw_context() == context) {
            return Ok(device.clone());
        }
        let mut device = 0;
        // SAFETY: writes one number to a local; a context is current.
        unsafe { call!(cuCtxGetDevice(&raw mut device)) }?;
        Self::with_context(device, device.unsigned_abs(), context as usize)
    }

    /// What the device with this number is. Makes no context.
    ///
    /// # Errors
    /// As [`Device::count`]; [`CudaError::NoDevice`].
    pub fn describe(ordinal: u32) -> Result<About, CudaError> {
        let (number, mut device) = (Self::number_of(ordinal)?, 0);
        // SAFETY: writes one number to a local.
        unsafe { call!(cuDeviceGet(&raw mut device, number)) }?;
        Self::about_it(device, ordinal)
    }

    fn number_of(ordinal: u32) -> Result<c_int, CudaError> {
        let count = Self::count()?;
        let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        number.ok_or(CudaError::NoDevice { ordinal, count })
    }

    fn with_context(device: c_int, ordinal: u32, context: usize) -> Result<Self, CudaError> {
        Ok(Self(Arc::new(Opened {
            context,
            about: Self::about_it(device, ordinal)?,
            hangs: AtomicUsize::new(0),
        })))
    }

    fn about_it(device: c_int, ordinal: u32) -> Result<About, CudaError> {
        let attribute = |which: Attribute| {
            let mut value = 0;
            // SAFETY: writes one number to a local, of a device that exists.
            unsafe { call!(cuDeviceGetAttribute(&raw mut value, which as c_int, device)) }?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        let mut name = [0_u8; 256];
        let (mut uuid, mut total) = ([0; 16], 0_usize);
        let room = c_int::try_from(name.len()).expect("a small number");
        // SAFETY: each writes to an address that is ours, no more than it is told there is room.
        unsafe {
            let text = name.as_mut_ptr().cast::<c_char>();
            call!(cuDeviceGetName(text, room, device))?;
            call!(cuDeviceGetUuid_v2(&raw mut uuid, device))?;
            call!(cuDeviceTotalMem_v2(&raw mut total, device))?;
        }
        let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
        Ok(About {
            ordinal,
            name: String::from_utf8_lossy(&name[..end]).into_owned(),
            uuid,
            total_bytes: total as u64,
            compute_major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            compute_minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_per_block: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            driver_version: Driver::loaded().version(),
            // An older driver refuses the question.
            has_mps: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED).is_ok_and(|on| on != 0),
        })
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

    /// As [`Device::bind`], for calls that make something in the current context: does not trust
    /// that no other library has changed that on this thread.
    pub(crate) fn bind_anew(&self) -> Result<(), CudaError> {
        let context = self.0.context as Handle;
        // SAFETY: a context that is never released, or that its owner keeps while this is used.
        unsafe { call!(cuCtxSetCurrent(context)) }?;
        CURRENT.set(self.0.context);
        Ok(())
    }

    /// Refuses a call on a thread where another context, or none, is current.
    ///
    /// # Errors
    /// [`CudaError::WrongContext`].
    pub fn check_current(&self) -> Result<(), CudaError> {
        check_current(self.raw_context())
    }

    /// A number that no other context of the process has, or had; of a context that is current.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn context_id(&self) -> Result<u64, CudaError> {
        self.check_current()?;
        let mut id = 0;
        // SAFETY: the context is current, so it is alive; writes one number to a local.
        unsafe { call!(cuCtxGetId(self.0.context as Handle, &raw mut id)) }?;
        Ok(id)
    }

    /// The `CUcontext`, for other libraries. Of a device that was opened here, it lives as long as
    /// the process.
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
        unsafe { call!(cuMemGetInfo_v2(&raw mut free, &raw mut total)) }?;
        Ok(Memory {
            free: free as u64,
            total: total as u64,
        })
    }

    /// From now on kernels may never end: whatever waits for the device would hang, and every
    /// other call of the driver behind it. No memory of the device is freed until [`Device::end_hang`].
    pub fn begin_hang(&self) {
        self.0.hangs.fetch_add(1, Ordering::AcqRel);
    }

    /// Those kernels have ended.
    pub fn end_hang(&self) {
        self.0.hangs.fetch_sub(1, Ordering::AcqRel);
    }

    pub(crate) fn may_hang(&self) -> bool {
        self.0.hangs.load(Ordering::Acquire) > 0
    }
}

fn check_current(wanted: u64) -> Result<(), CudaError> {
    let mut context: Handle = std::ptr::null_mut();
    // SAFETY: writes one handle to a local.
    unsafe { call!(cuCtxGetCurrent(&raw mut context)) }?;
    let found = context as u64;
    if found != wanted {
        return Err(CudaError::WrongContext { wanted, found });
    }
    CURRENT.set(context as usize);
    Ok(())
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
