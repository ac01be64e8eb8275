//! How fast kernels are on a device, and how fast the device is: times between events, for `pp bench kernels`.
//!
//! Set-up only: everything here waits. Times are of the device, from an event in front of the work to one behind it.

use std::time::Duration;

use crate::config::{Chroma, ChunkShape, SessionConfig};
use crate::cpu::geometry::Geometry;
use crate::cpu::settings::RADIUS;
use crate::cuda::CudaError;
use crate::cuda::driver::{Driver, Event, Memory, Pinned, Stream};
use crate::error::{Failure, KernelError};
use crate::frame::{FrameView, FrameViewMut};
use crate::payload::{Payload, PayloadMut};
use crate::plan::Plan;
use crate::plugin::KernelSet;
use crate::synthetic::{Kind, Rate, Work, fill_with_noise};

/// The longest that one measurement waits.
const PATIENCE: Duration = Duration::from_secs(20);
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
    /// Passes of Phase B.
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

/// A stream whose work is timed.
struct Clock {
    stream: Stream,
    start: Event,
    end: Event,
}

impl Clock {
    fn new(driver: Driver, stream: Stream) -> Result<Clock, CudaError> {
        Ok(Clock {
            stream,
            start: Event::new(driver)?,
            end: Event::new(driver)?,
        })
    }

    /// The times of `runs` runs, in rising order; each is waited for.
    fn time<E: From<CudaError>>(
        &self,
        runs: u32,
        mut enqueue: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<Duration>, E> {
        let mut times = Vec::with_capacity(runs as usize);
        for run in 0..WARM_UP + runs.max(1) {
            self.start.record(self.stream)?;
            enqueue()?;
            self.end.record(self.stream)?;
            self.stream.wait(PATIENCE)?;
            if run >= WARM_UP {
                times.push(self.end.since(&self.start)?);
            }
        }
        times.sort_unstable();
        Ok(times)
    }

    fn rate(
        &self,
        runs: u32,
        bytes: f64,
        enqueue: impl FnMut() -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        let times = self.time(runs, enqueue)?;
        Ok(bytes / times[times.len() / 2].as_secs_f64().max(1e-9))
    }
}

/// Measures what the device can do.
///
/// # Safety
/// As [`Work::new`].
///
/// # Errors
/// No driver, no memory, or a failure of the device. A missing cublasLt is told in its place.
pub unsafe fn ceilings(context: u64, stream: u64, runs: u32) -> Result<Ceilings, CudaError> {
    const COPY: usize = 1 << 30;
    const HOST: usize = 64 << 20;
    let driver = Driver::load()?;
    driver.check_context(context)?;
    // SAFETY: the caller's duty.
    let borrowed = unsafe { Stream::borrow(stream) };
    let clock = Clock::new(driver, borrowed)?;
    let (from, to) = (
        Memory::new(driver, borrowed, COPY)?,
        Memory::new(driver, borrowed, COPY)?,
    );
    fill_with_noise(borrowed, &from, 5)?;
    let host = Pinned::new(driver, HOST)?;
    let copy = clock.rate(runs, 2.0 * COPY as f64, || {
        // SAFETY: both memories are as long, and freed behind the stream's work.
        unsafe { borrowed.copy(to.address(), from.address(), COPY) }
    })?;
    let upload = clock.rate(runs, HOST as f64, || {
        // SAFETY: as above; the host memory lives until the clock has waited, or is leaked with a device that hangs.
        unsafe { borrowed.upload(to.address(), host.data(), HOST) }
    })?;
    let download = clock.rate(runs, HOST as f64, || {
        // SAFETY: as above.
        unsafe { borrowed.download(host.data(), from.address(), HOST) }
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
        Err(error @ (CudaError::NoLibrary { .. } | CudaError::Library { .. })) => {
            Err(error.to_string())
        }
        Err(error) => return Err(error),
    };
    Ok(Ceilings {
        copy_bytes_per_second: copy,
        upload_bytes_per_second: upload,
        download_bytes_per_second: download,
        gemm_flops_per_second,
    })
}

/// Measures the three calls of a set of kernels, copies included, in the steady state of a stream; and `encode` and
/// `phase_b` with the context rebuilt.
///
/// # Safety
/// As [`KernelSet::open_on_device`].
///
/// # Errors
/// Kernels that do not work on the device, no memory, or a failure.
pub unsafe fn kernels(
    set: &KernelSet,
    case: &Case,
    context: u64,
    stream: u64,
) -> Result<Vec<Figure>, MeasureError> {
    let driver = Driver::load()?;
    driver.check_context(context)?;
    // SAFETY: the caller's duty.
    let borrowed = unsafe { Stream::borrow(stream) };
    let clock = Clock::new(driver, borrowed)?;
    let config = SessionConfig {
        noise_sigma: Some(20.0),
        ..SessionConfig::cuda(
            case.width,
            case.height,
            case.chroma,
            case.frames,
            context,
            stream,
        )
    };
    // SAFETY: the caller's duty.
    let mut session = unsafe { set.open_on_device(&config) }?;
    let geometry = Geometry::of(&config);
    let frame_bytes = case.chroma.packed_frame_bytes(case.width, case.height);
    let samples = frame_bytes * case.frames as usize;
    let tokens = geometry.frame_bytes() as u64 * u64::from(case.frames);

    let mut pinned = Pinned::new(driver, samples)?;
    picture(pinned.bytes_mut(), case.width as usize);
    let first = Plan::first(case.width, case.height, case.steps);
    let mut figures = Vec::new();
    for recompute in [false, true] {
        // Two frames of context need two frames of history.
        let context_frames = set.describe().context_frames.min(2).min(case.frames);
        let layout = session.layout(ChunkShape {
            frames: case.frames,
            steps: case.steps,
            context_frames: if recompute { context_frames } else { 0 },
        })?;
        let plan = first.following(case.frames.into(), recompute && context_frames > 0);
        let (input_bytes, output_bytes) = (
            layout.inputs.payload_bytes(),
            layout.outputs.payload_bytes(),
        );
        let input = Memory::new(driver, borrowed, input_bytes)?;
        let output = Memory::new(driver, borrowed, output_bytes)?;
        let to_phase_b = || Payload::on_device(&layout.inputs, input.address(), input_bytes);

        let views = pinned
            .bytes()
            .chunks_exact(frame_bytes)
            .filter_map(|f| FrameView::packed(f, case.width, case.height, case.chroma))
            .collect::<Vec<_>>();
        if !recompute {
            let mut payload = PayloadMut::on_device(&layout.inputs, input.address(), input_bytes)?;
            // SAFETY: the context is current (checked above); the memories are freed behind the stream's work, and the
            // frames live until the clock has waited.
            unsafe {
                session.encode(&views, &first, &mut payload)?;
                let mut out =
                    PayloadMut::on_device(&layout.outputs, output.address(), output_bytes)?;
                session.phase_b(&first, &to_phase_b()?, &mut out)?;
            }
        }
        let encode = clock.time(case.runs, || -> Result<(), MeasureError> {
            let mut payload = PayloadMut::on_device(&layout.inputs, input.address(), input_bytes)?;
            // SAFETY: as above.
            Ok(unsafe { session.encode(&views, &plan, &mut payload) }?)
        })?;
        drop(views);
        let phase_b = clock.time(case.runs, || -> Result<(), MeasureError> {
            let mut payload =
                PayloadMut::on_device(&layout.outputs, output.address(), output_bytes)?;
            // SAFETY: as above.
            unsafe { session.phase_b(&plan, &to_phase_b()?, &mut payload) }?;
            Ok(())
        })?;
        let names = match recompute {
            false => ["encode", "phase_b"],
            true => ["encode with context", "phase_b with recompute"],
        };
        let context_tokens = match recompute {
            true => geometry.frame_bytes() as u64 * u64::from(context_frames),
            false => 0,
        };
        let figure = |name, times: &[Duration], bytes, host_bytes, flops| Figure {
            name,
            median: times[times.len() / 2],
            best: times[0],
            bytes,
            host_bytes,
            flops,
        };
        let sent = tokens + context_tokens;
        let host = samples as u64;
        figures.push(figure(names[0], &encode, sent + host, host, 0));
        let work = attention_flops(&geometry, case, set.describe().context_frames);
        figures.push(figure(names[1], &phase_b, sent + tokens, 0, work));
        if !recompute {
            let decode = clock.time(case.runs, || -> Result<(), MeasureError> {
                let mut views = pinned
                    .bytes_mut()
                    .chunks_exact_mut(frame_bytes)
                    .filter_map(|f| FrameViewMut::packed(f, case.width, case.height, case.chroma))
                    .collect::<Vec<_>>();
                let payload = Payload::on_device(&layout.outputs, output.address(), output_bytes)?;
                // SAFETY: as above.
                Ok(unsafe { session.decode(&plan, &payload, &mut views) }?)
            })?;
            figures.push(figure("decode", &decode, tokens + host, host, 0));
        }
    }
    Ok(figures)
}

/// A gradient with something like noise: what the samples are hardly matters for the time.
fn picture(samples: &mut [u8], width: usize) {
    for (index, sample) in samples.iter_mut().enumerate() {
        let noise = (index as u32).wrapping_mul(2_654_435_761) >> 27;
        *sample = (40 + index % width / 8 + noise as usize).min(255) as u8;
    }
}

/// Operations of all passes: for each query, each key in the window of each frame near enough.
fn attention_flops(geometry: &Geometry, case: &Case, context: u32) -> u64 {
    let queries: u64 = geometry
        .planes
        .iter()
        .map(|p| ((p.padded_width() / 4 - 1) * (p.padded_height() / 4 - 1)) as u64)
        .sum();
    let first = u64::from(context);
    let frames = first + u64::from(case.frames);
    let window = |distance: u64| {
        let radius = RADIUS.get(distance as usize);
        radius.map_or(0, |radius| (2 * *radius as u64 + 1).pow(2))
    };
    let keys: u64 = (first..frames)
        .flat_map(|t| (0..frames).map(move |s| t.abs_diff(s)))
        .map(window)
        .sum();
    256 * queries * keys * u64::from(case.steps)
}
