//! How fast kernels are on a device, and how fast the device is: times between events, for `pp bench kernels`.
//!
//! Set-up only: everything here waits. Times are of the device, from an event in front of the work to one behind it.

mod kernels;

pub use kernels::{DIGESTS, kernels, single_kernels};

use std::time::Duration;

use pp_device::{CudaError, DevicePtr, StreamBuffer};

use crate::config::{Chroma, SessionConfig};
use crate::cuda::{Clock, Pinned, borrow, fill_with_noise};
use crate::error::{Failure, KernelError, Status};
use crate::frame::{FrameView, FrameViewMut};
use crate::stage::FrameGeometry;
use crate::synthetic::{Kind, Rate, Work};

/// Runs in front of those that count.
const WARM_UP: u32 = 3;

/// Why a measurement gave no figure.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeasureError {
    /// The driver or the device.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The kernels.
    #[error(transparent)]
    Kernels(#[from] KernelError),
    /// Numbers that do not fit together.
    #[error(transparent)]
    Case(#[from] Failure),
}

/// What to measure: the chunks of a stream, two frames of context behind them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// Width of luma.
    pub width: u32,
    /// Height of luma.
    pub height: u32,
    /// Chroma format.
    pub chroma: Chroma,
    /// Frames in a chunk.
    pub frames: u32,
    /// Passes of `phase_b`.
    pub steps: u32,
    /// Runs that count, at least 1.
    pub runs: u32,
}

/// How long one thing took.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// What was measured: an entry of the table, with its copies.
    pub name: &'static str,
    /// The median of the runs.
    pub median: Duration,
    /// The shortest run.
    pub best: Duration,
    /// Bytes that must be read and written in device memory, at the least.
    pub bytes: u64,
    /// Bytes that must cross to or from the host.
    pub host_bytes: u64,
    /// Operations of the attention as it is written down: 4 · 64 for each pair of a query and a key.
    pub flops: u64,
}

impl Figure {
    /// `times` in rising order, at least one.
    fn new(name: &'static str, times: &[Duration]) -> Figure {
        Figure {
            name,
            median: times[times.len() / 2],
            best: times[0],
            bytes: 0,
            host_bytes: 0,
            flops: 0,
        }
    }

    /// Bytes in device memory over the median.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.median.as_secs_f64().max(1e-9)
    }

    /// Operations over the median.
    #[must_use]
    pub fn flops_per_second(&self) -> f64 {
        self.flops as f64 / self.median.as_secs_f64().max(1e-9)
    }
}

impl Case {
    fn config(&self, context: u64, stream: u64) -> SessionConfig {
        SessionConfig {
            noise_sigma: Some(20.0),
            ..SessionConfig::cuda(
                self.width,
                self.height,
                self.chroma,
                self.frames,
                context,
                stream,
            )
        }
    }

    fn geometry(&self) -> FrameGeometry {
        FrameGeometry::of(&self.config(0, 0))
    }

    fn frame_bytes(&self) -> usize {
        self.geometry().frame_bytes()
    }

    /// Samples of a chunk.
    fn samples(&self) -> usize {
        self.frame_bytes() * self.frames as usize
    }

    fn views<'a>(&self, samples: &'a [u8]) -> Vec<FrameView<'a>> {
        let frames = samples.chunks_exact(self.frame_bytes());
        frames
            .filter_map(|frame| FrameView::packed(frame, &self.geometry()))
            .collect()
    }

    fn views_mut<'a>(&self, samples: &'a mut [u8]) -> Vec<FrameViewMut<'a>> {
        let frames = samples.chunks_exact_mut(self.frame_bytes());
        frames
            .filter_map(|frame| FrameViewMut::packed(frame, &self.geometry()))
            .collect()
    }
}

/// What the device can do.
#[derive(Debug, Clone, PartialEq)]
pub struct Ceilings {
    /// Copies of 1 GiB within the device, reads and writes counted.
    pub copy_bytes_per_second: f64,
    /// Copies of 64 MiB from page-locked memory.
    pub upload_bytes_per_second: f64,
    /// Copies of 64 MiB to page-locked memory.
    pub download_bytes_per_second: f64,
    /// Products of 8192×8192 matrices in bf16 through cublasLt, or why there is no figure.
    pub gemm_flops_per_second: Result<f64, String>,
}

/// The times of `runs` runs, in rising order; each is waited for.
fn times<E: From<CudaError>>(
    clock: &Clock,
    runs: u32,
    mut enqueue: impl FnMut() -> Result<(), E>,
) -> Result<Vec<Duration>, E> {
    for _ in 0..WARM_UP {
        clock.time(&mut enqueue)?;
    }
    let times = (0..runs.max(1)).map(|_| clock.time(&mut enqueue));
    let mut times = times.collect::<Result<Vec<_>, E>>()?;
    times.sort_unstable();
    Ok(times)
}

/// Measures what the device can do.
///
/// # Safety
/// As [`Work::new`].
///
/// # Errors
/// No driver, no memory, or a failure of the device. A missing cublasLt is told in its place.
pub unsafe fn ceilings(context: u64, stream: u64, runs: u32) -> Result<Ceilings, Failure> {
    const COPY: usize = 1 << 30;
    const HOST: usize = 64 << 20;
    // SAFETY: the caller's duty.
    let borrowed = unsafe { borrow(context, stream) }?;
    let clock = Clock::new(&borrowed)?;
    let rate = |bytes: f64, enqueue: &mut dyn FnMut() -> Result<(), CudaError>| {
        let times = times(&clock, runs, enqueue)?;
        Ok::<_, CudaError>(bytes / times[times.len() / 2].as_secs_f64().max(1e-9))
    };
    let memory = || StreamBuffer::new(&borrowed, COPY);
    let (from, to) = (memory()?, memory()?);
    fill_with_noise(&from, 5)?;
    let mut host = Pinned::new(&borrowed, HOST)?;
    let copy = rate(2.0 * COPY as f64, &mut || {
        // SAFETY: both memories are as long, and freed behind the stream's work.
        unsafe { borrowed.copy(from.ptr(), to.ptr()) }
    })?;
    let upload = rate(HOST as f64, &mut || {
        // SAFETY: as above; the host memory lives until the stream is done, and is leaked when that never happens.
        unsafe { borrowed.upload(&host.memory, 0..HOST, to.ptr()) }
    })?;
    let download = rate(HOST as f64, &mut || {
        let beginning = DevicePtr {
            len: HOST,
            ..from.ptr()
        };
        // SAFETY: as above.
        unsafe { borrowed.download(beginning, &mut host.memory, 0) }
    })?;
    drop((from, to, host));
    let kind = Kind::Gemm { size: 8192 };
    // SAFETY: the caller's duty.
    let gemm = unsafe { Work::new(kind, context, stream) }
        .and_then(|mut work| work.calibrate(Duration::from_millis(50)));
    let gemm_flops_per_second = match gemm {
        Ok(found) => match found.rate {
            Some(Rate::FlopsPerSecond(rate)) => Ok(rate),
            _ => Err("no rate".into()),
        },
        Err(failure) if failure.status == Status::Unsupported => Err(failure.message),
        Err(failure) => return Err(failure),
    };
    Ok(Ceilings {
        copy_bytes_per_second: copy,
        upload_bytes_per_second: upload,
        download_bytes_per_second: download,
        gemm_flops_per_second,
    })
}
