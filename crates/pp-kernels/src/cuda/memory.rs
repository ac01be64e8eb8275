//! Memory of the device and of the host, as long as it is needed.
//!
//! Device memory is allocated and freed in the order of a stream. So a free needs no wait (`cuMemFree` waits for the whole
//! device, for ever behind a stream that hangs), and what a hung stream may still touch is never given away.

use std::ptr;
use std::time::Duration;

use super::driver::Stream;
use super::error::CudaError;
use super::functions::call;

/// The longest that set-up waits for the device.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the frees at the end of a measurement may take. A copy that takes longer was waited for before.
const GRACE: Duration = Duration::from_secs(1);

/// Device memory that comes and goes in the order of one stream: it may be used by work of that stream only.
#[derive(Debug)]
pub(crate) struct Memory {
    address: u64,
    bytes: usize,
    stream: Stream,
}

impl Memory {
    /// Allocates in the current context. The address is a multiple of 256.
    pub(crate) fn new(stream: Stream, bytes: usize) -> Result<Memory, CudaError> {
        let bytes = bytes.max(1);
        let mut address = 0;
        // SAFETY: the pointer is to a local; the stream is alive, as its maker promised.
        unsafe {
            call!(
                stream.driver(),
                cuMemAllocAsync(&raw mut address, bytes, stream.raw())
            )
        }?;
        Ok(Memory {
            address,
            bytes,
            stream,
        })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Fills its beginning, and waits for that.
    pub(crate) fn fill(&self, bytes: &[u8]) -> Result<(), CudaError> {
        let bytes = bytes[..bytes.len().min(self.bytes)].to_vec();
        // SAFETY: the range lies within the memory; the bytes live until the wait is over, or are leaked.
        let sent = unsafe {
            self.stream
                .upload(self.address, bytes.as_ptr(), bytes.len())
        };
        let waited = self.stream.wait(PATIENCE);
        if waited.is_err() {
            std::mem::forget(bytes);
        }
        sent.and(waited)
    }

    /// What it holds when the stream has passed all that was enqueued; waits for that, at most so long.
    pub(crate) fn read(&self, limit: Duration) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0; self.bytes];
        // SAFETY: both ranges are as long; the bytes live until the wait is over, or are leaked.
        let sent = unsafe {
            self.stream
                .download(bytes.as_mut_ptr(), self.address, bytes.len())
        };
        match sent.and(self.stream.wait(limit)) {
            Ok(()) => Ok(bytes),
            Err(error) => {
                std::mem::forget(bytes);
                Err(error)
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // A failure has nobody to hear it, and leaks.
        // SAFETY: allocated once, freed once, behind all that the stream still does with it.
        let _ = unsafe {
            call!(
                self.stream.driver(),
                cuMemFreeAsync(self.address, self.stream.raw())
            )
        };
    }
}

/// Page-locked host memory, filled with zeros, for copies on one stream.
///
/// # If dropped
/// Waits until the stream is done, at most a second, and then frees it; leaks it behind a stream that hangs or failed,
/// where the driver would wait for ever. For set-up and measurements only, because the driver may wait for other streams
/// of the device, too.
#[derive(Debug)]
pub(crate) struct Pinned {
    data: *mut u8,
    bytes: usize,
    stream: Stream,
}

impl Pinned {
    /// Allocates in the current context, for copies on this stream alone.
    pub(crate) fn new(stream: Stream, bytes: usize) -> Result<Pinned, CudaError> {
        let mut data = ptr::null_mut();
        // SAFETY: the pointer is to a local. Flags 0: ordinary, cached memory.
        unsafe {
            call!(
                stream.driver(),
                cuMemHostAlloc(&raw mut data, bytes.max(1), 0)
            )
        }?;
        let data = data.cast::<u8>();
        // SAFETY: so many bytes were allocated.
        unsafe { data.write_bytes(0, bytes) };
        Ok(Pinned {
            data,
            bytes,
            stream,
        })
    }

    /// For copies by the device.
    pub(crate) fn data(&self) -> *mut u8 {
        self.data
    }

    /// To be looked at when the device does not write to it.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: allocated and filled in `new`.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    /// To be looked at and written when the device does neither.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.stream.wait(GRACE).is_err() {
            return;
        }
        // SAFETY: allocated once, freed once, and the stream has passed every copy. A failure has nobody to hear it.
        let _ = unsafe { call!(self.stream.driver(), cuMemFreeHost(self.data.cast())) };
    }
}

/// Fills memory with bf16 numbers between −1 and 1, because work on zeros takes less power and so less time; waits.
pub(crate) fn fill_with_noise(stream: Stream, memory: &Memory, seed: u64) -> Result<(), CudaError> {
    let mut state = seed;
    let mut block = Vec::with_capacity(memory.bytes().min(4 << 20));
    while block.len() < block.capacity() {
        // SplitMix64, its upper 53 bits as a number in 0..2.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        let number = (bits >> 11) as f64 * 2f64.powi(-52);
        block.extend(half::bf16::from_f64(number - 1.0).to_le_bytes());
    }
    let sent = (0..memory.bytes())
        .step_by(block.len())
        .try_for_each(|start| {
            let bytes = block.len().min(memory.bytes() - start);
            // SAFETY: the range lies within the memory; the block lives until the wait below is over, or is leaked.
            unsafe { stream.upload(memory.address() + start as u64, block.as_ptr(), bytes) }
        });
    let waited = stream.wait(PATIENCE);
    if waited.is_err() {
        std::mem::forget(block);
    }
    sent.and(waited)
}
