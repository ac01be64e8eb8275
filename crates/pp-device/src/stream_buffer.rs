//! Device memory that is allocated and freed in the order of a stream.

use std::time::Duration;

use crate::driver::{Handle, call};
use crate::error::CudaError;
use crate::memory::{DevicePtr, with_sizes};
use crate::stream::Stream;

/// The longest that set-up waits for the device.
const PATIENCE: Duration = Duration::from_secs(20);

/// Device memory that comes and goes in the order of one stream: it may be used by work of that
/// stream only.
///
/// # If dropped
/// Freed behind what was issued to the stream: nothing waits, and what a stream that hangs may still
/// touch is never given away.
#[derive(Debug)]
pub struct StreamBuffer {
    memory: DevicePtr,
    stream: Stream,
}

impl StreamBuffer {
    /// Allocates. The address is a multiple of 256.
    ///
    /// # Errors
    /// The device has no memory left.
    pub fn new(stream: &Stream, len: usize) -> Result<Self, CudaError> {
        let device = stream.device();
        device.bind_anew()?;
        let (mut address, len) = (0, len.max(1));
        // SAFETY: writes one address to a local; a live stream, whose context is current.
        unsafe { call!(cuMemAllocAsync(&raw mut address, len, stream.handle())) }
            .map_err(|error| with_sizes(error, device, "device", len))?;
        Ok(Self {
            memory: DevicePtr { address, len },
            stream: stream.clone(),
        })
    }

    /// Where it is.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.memory
    }

    /// Where it is, as a `CUdeviceptr`.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.address
    }

    /// Bytes in it, at least one.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.memory.len
    }

    /// Fills it with this block again and again, and waits for that, at most 20 s.
    ///
    /// # Errors
    /// The driver refuses, or the stream is not done in time.
    pub fn fill_with(&self, block: Vec<u8>) -> Result<(), CudaError> {
        let sent = (0..self.len())
            .step_by(block.len().max(1))
            .try_for_each(|start| {
                let bytes = block.len().min(self.len() - start);
                // SAFETY: the range lies within the memory, which only this stream uses; the block
                // lives until the wait is over, or is leaked.
                unsafe {
                    self.stream
                        .upload_from(block.as_ptr(), bytes, self.address() + start as u64)
                }
            });
        self.settle(sent, PATIENCE, block).map(drop)
    }

    /// What it holds when the stream has passed all that was issued; waits for that, at most so long.
    ///
    /// # Errors
    /// The driver refuses, or the stream is not done in time.
    pub fn read(&self, limit: Duration) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0; self.len()];
        // SAFETY: both ranges are as long, and the memory is this stream's alone; the bytes live
        // until the wait is over, or are leaked.
        let sent = unsafe { self.stream.download_to(bytes.as_mut_ptr(), self.ptr()) };
        self.settle(sent, limit, bytes)
    }

    /// Waits for a copy of host memory, which is leaked where the copy may still be under way.
    fn settle(
        &self,
        sent: Result<(), CudaError>,
        limit: Duration,
        host: Vec<u8>,
    ) -> Result<Vec<u8>, CudaError> {
        match self.stream.wait_until_idle(limit) {
            Ok(()) => sent.map(|()| host),
            Err(error) => {
                std::mem::forget(host);
                Err(sent.err().unwrap_or(error))
            }
        }
    }
}

impl Drop for StreamBuffer {
    fn drop(&mut self) {
        let stream: Handle = self.stream.handle();
        // SAFETY: allocated once, freed once, behind all that the stream still does with it.
        let freed = unsafe { call!(cuMemFreeAsync(self.address(), stream)) };
        if let Err(error) = freed {
            tracing::debug!(%error, "memory of a stream was not freed");
        }
    }
}
