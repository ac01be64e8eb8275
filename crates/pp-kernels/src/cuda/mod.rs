//! What the built-in kernels on CUDA devices share: the embedded PTX, what is loaded of it, and digests on a device.

mod digest;
pub(crate) mod ptx;

pub use digest::{DeviceDigests, DeviceTensor};

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pp_device::{CudaError, Device, Event, PinnedBuffer, Stream, StreamBuffer};

use crate::error::{Failure, Status};

/// The longest that one measurement waits.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// How long the end of a measurement may take. A copy that takes longer was waited for before.
const GRACE: Duration = Duration::from_secs(1);

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Failure {
        let status = match &error {
            CudaError::NoDriver | CudaError::OldDriver { .. } | CudaError::MissingSymbol { .. } => {
                return Failure::unsupported(format!(
                    "{error}; or run on the CPU with --kernels cpu"
                ));
            }
            CudaError::Module { .. } => Status::Unsupported,
            CudaError::WrongContext { .. } => Status::InvalidArgument,
            error if error.is_out_of_memory() => Status::OutOfMemory,
            _ => Status::Error,
        };
        Failure::new(status, error.to_string())
    }
}

/// The stream of a caller, whose context must be current.
///
/// # Safety
/// `context` is a live `CUcontext` and `stream` a live `CUstream` of it, or 0. Both outlive what is made with them.
pub(crate) unsafe fn borrow(context: u64, stream: u64) -> Result<Stream, CudaError> {
    // SAFETY: the caller's duty.
    unsafe { Ok(Stream::borrow(&Device::of_context(context)?, stream)) }
}

/// What has been loaded, with the number of its context.
static LOADED: Mutex<Vec<(u64, &'static (dyn Any + Send + Sync))>> = Mutex::new(Vec::new());

/// Loads the one value of a type in the context of this number, which is current.
pub(crate) fn once<T: Send + Sync + 'static>(
    context: u64,
    load: impl FnOnce() -> Result<T, Failure>,
) -> Result<&'static T, Failure> {
    // A thread that panicked here left the list as it was.
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let of_context = loaded.iter().filter(|(of, _)| *of == context);
    if let Some(found) = of_context.filter_map(|(_, any)| any.downcast_ref()).next() {
        return Ok(found);
    }
    let made: &'static T = Box::leak(Box::new(load()?));
    loaded.push((context, made));
    Ok(made)
}

/// A stream whose work is timed, from an event in front of it to one behind it.
pub(crate) struct Clock {
    pub(crate) stream: Stream,
    start: Event,
    end: Event,
}

impl Clock {
    pub(crate) fn new(stream: &Stream) -> Result<Clock, CudaError> {
        Ok(Clock {
            start: Event::timed(stream.device())?,
            end: Event::timed(stream.device())?,
            stream: stream.clone(),
        })
    }

    /// The time of what is enqueued, on the device; waits for it.
    pub(crate) fn time<E: From<CudaError>>(
        &self,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Duration, E> {
        self.start.record(&self.stream)?;
        enqueue()?;
        self.end.record(&self.stream)?;
        self.stream.wait_until_idle(PATIENCE)?;
        Ok(Duration::from_nanos(self.end.elapsed_ns(&self.start)?))
    }
}

/// Page-locked memory for copies on one stream.
///
/// # If dropped
/// Waits until the stream is done, at most a second; the memory is leaked behind a stream that hangs or failed. For
/// checks and measurements only.
#[derive(Debug)]
pub(crate) struct Pinned {
    pub(crate) memory: PinnedBuffer,
    stream: Stream,
}

impl Pinned {
    pub(crate) fn new(stream: &Stream, bytes: usize) -> Result<Pinned, CudaError> {
        Ok(Pinned {
            memory: PinnedBuffer::new(stream.device(), bytes)?,
            stream: stream.clone(),
        })
    }
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.bytes()
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.bytes_mut()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A use that cannot be noted or is not over keeps the memory.
        let _ = self.memory.used_by(&self.stream);
        let _ = self.stream.wait_until_idle(GRACE);
    }
}

/// Fills memory with bf16 numbers between −1 and 1, because work on zeros takes less power and so less time; waits.
pub(crate) fn fill_with_noise(memory: &StreamBuffer, seed: u64) -> Result<(), CudaError> {
    let mut state = seed;
    let mut block = Vec::with_capacity(memory.len().min(4 << 20));
    while block.len() < block.capacity() {
        // SplitMix64, its upper 53 bits as a number in 0..2.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        let number = (bits >> 11) as f64 * 2f64.powi(-52);
        block.extend(half::bf16::from_f64(number - 1.0).to_le_bytes());
    }
    memory.fill_with(block)
}
