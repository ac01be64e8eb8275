//! What can go wrong with the driver, each with its remedy.

use std::ffi::c_int;
use std::time::Duration;

use cudarc::driver::sys::CUresult;

/// An error of the CUDA driver, or the lack of one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library is not there.
    #[error(
        "there is no CUDA driver: libcuda.so.1 was not found; install the NVIDIA driver (580 or newer for \
         the built-in kernels), or in a container start it with access to the GPUs"
    )]
    NoDriver,
    /// The driver is too old.
    #[error(
        "the CUDA driver is for version {}.{}, and {}.{} or newer is needed; update the NVIDIA \
         driver, for the built-in kernels to 580 or newer", found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10
    )]
    OldDriver {
        /// What it says, as 1000 × major + 10 × minor.
        found: u32,
        /// The least that will do, in the same form.
        needed: u32,
    },
    /// The driver lacks a function.
    #[error("the CUDA driver has no function {symbol}; update the NVIDIA driver")]
    MissingSymbol {
        /// The function.
        symbol: &'static str,
    },
    /// There is no such device.
    #[error(
        "there is no CUDA device {ordinal}: {count} can be seen; check the rank's device and \
         CUDA_VISIBLE_DEVICES"
    )]
    NoDevice {
        /// The device that was asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// A call failed.
    #[error("{function} failed with {name} ({code}): {text}")]
    Call {
        /// The function of the driver.
        function: &'static str,
        /// Its result.
        code: i32,
        /// The result's name.
        name: String,
        /// The driver's words for it.
        text: String,
    },
    /// There is no memory left for a buffer.
    #[error(
        "{wanted} bytes of {what} memory could not be had{}; lower --depth or --frames-per-chunk, or \
         end what else uses the GPU: {said}",
        match left {
            Some((free, total)) => format!(" ({free} of the device's {total} bytes are free)"),
            None => String::new(),
        }
    )]
    NoMemory {
        /// Which memory.
        what: &'static str,
        /// Bytes that were asked for.
        wanted: u64,
        /// Bytes of the device that are free, and all of them, where the driver says.
        left: Option<(u64, u64)>,
        /// What the driver said to it.
        said: Box<CudaError>,
    },
    /// A range that does not lie in its buffer.
    #[error("bytes {start} to {end} do not lie in a buffer of {len} bytes")]
    OutOfRange {
        /// First byte.
        start: usize,
        /// One past the last.
        end: usize,
        /// Bytes there are.
        len: usize,
    },
    /// The context of the call is not the one the work belongs to.
    #[error(
        "the CUDA context {wanted:#x} must be current on the calling thread, it is {found:#x}; bind \
         the device first"
    )]
    WrongContext {
        /// The context of the work.
        wanted: u64,
        /// The context found, 0 for none.
        found: u64,
    },
    /// The driver does not take the PTX.
    #[error("the driver refuses the PTX ({name}): {log}{remedy}")]
    Module {
        /// The result's name.
        name: String,
        /// What its compiler said.
        log: String,
        /// What to do about it, where that is known.
        remedy: &'static str,
    },
    /// A wait that has a limit came to it.
    #[error("work on the GPU was not done within {0:?}; see whether another program uses the GPU")]
    Late(Duration),
}

/// Out of device memory.
const OUT_OF_MEMORY: i32 = CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int;
/// The driver did not start, for want of a device.
pub(crate) const NOT_INITIALIZED: i32 = CUresult::CUDA_ERROR_NOT_INITIALIZED as c_int;
/// There is a driver and no device.
pub(crate) const NO_DEVICE: i32 = CUresult::CUDA_ERROR_NO_DEVICE as c_int;
/// The answer of a query about work that is not done.
pub(crate) const NOT_READY: i32 = CUresult::CUDA_ERROR_NOT_READY as c_int;
/// The PTX is newer than the driver.
pub(crate) const UNSUPPORTED_PTX: i32 = CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as c_int;

impl CudaError {
    /// Says whether the device ran out of memory, so that smaller or fewer slots may help.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Call { code, .. } => *code == OUT_OF_MEMORY,
            Self::NoMemory { .. } => true,
            _ => false,
        }
    }
}
