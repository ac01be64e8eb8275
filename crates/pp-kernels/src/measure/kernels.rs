//! The figures of kernels: the calls of a set as a pipeline makes them, and the built-in kernels one by one.

use std::time::Duration;

use pp_contract::{DType, Manifest, VideoPlanParts};
use pp_device::{CudaError, Stream, StreamBuffer};

use super::{Case, Figure, MeasureError, times};
use crate::config::{ChunkShape, Layout};
use crate::cuda::{Clock, DeviceDigests, DeviceTensor, PATIENCE, Pinned, borrow};
use crate::denoise::cuda::{Ptx, Single};
use crate::denoise::geometry::Geometry;
use crate::denoise::settings::{CONTEXT_FRAMES, RADIUS};
use crate::error::Failure;
use crate::export::{Kernels, Session};
use crate::payload::TensorsIn;
use crate::plugin::{KernelSet, RawSession};

/// A payload in device memory of its own.
struct Slot<'a> {
    list: &'a Manifest,
    memory: StreamBuffer,
}

impl<'a> Slot<'a> {
    fn new(stream: &Stream, list: &'a Manifest) -> Result<Self, CudaError> {
        let memory = StreamBuffer::new(stream, list.payload_bytes() as usize)?;
        Ok(Slot { list, memory })
    }

    fn payload<H>(&self) -> Result<TensorsIn<H>, Failure> {
        let bytes = self.list.payload_bytes() as usize;
        TensorsIn::on_device(self.list, self.memory.address(), bytes)
    }
}

/// One stream of chunks through a session, each following the one before.
struct Chunks<'a> {
    clock: &'a Clock,
    case: &'a Case,
    sessions: &'a mut [RawSession; 3],
    samples: &'a mut Pinned,
    /// Plan of the chunk before; its seen frames are the next one's start.
    plan: VideoPlanParts,
    input: Slot<'a>,
    output: Slot<'a>,
}

impl Chunks<'_> {
    /// The plan of the next chunk.
    fn next(&mut self, recompute: bool) -> VideoPlanParts {
        let start = self.plan.current_start_frame + u64::from(self.case.frames);
        self.plan = self.plan.following(start, recompute);
        self.plan
    }

    fn encode(&mut self, plan: &VideoPlanParts) -> Result<(), MeasureError> {
        let views = self.case.views(self.samples);
        let mut input = self.input.payload()?;
        // SAFETY: the caller of the measurement has promised the context and the stream; slots are freed behind the
        // stream's work, and the samples when the stream is done, or never.
        Ok(unsafe { self.sessions[0].encode(&views, plan, &mut input) }?)
    }

    fn phase_b(&mut self, plan: &VideoPlanParts) -> Result<u32, MeasureError> {
        let (input, mut output) = (self.input.payload()?, self.output.payload()?);
        // SAFETY: as above.
        Ok(unsafe { self.sessions[1].run(plan, 0, &input, &mut output, None) }?)
    }

    fn decode(&mut self, plan: &VideoPlanParts) -> Result<(), MeasureError> {
        let mut views = self.case.views_mut(self.samples);
        let output = self.output.payload()?;
        // SAFETY: as above.
        Ok(unsafe { self.sessions[2].decode(plan, &output, &mut views) }?)
    }

    /// Times `encode`, `phase_b` and `decode` over so many chunks.
    fn time(&mut self, recompute: bool) -> Result<[Vec<Duration>; 3], MeasureError> {
        let (clock, runs) = (self.clock, self.case.runs);
        let mut plan = self.next(recompute);
        let encode = times(clock, runs, || self.encode(&plan))?;
        let phase_b = times(clock, runs, || {
            self.phase_b(&plan)?;
            // The frames just seen are the context of the next ones.
            plan = self.next(recompute);
            Ok::<_, MeasureError>(())
        })?;
        let decode = times(clock, runs, || self.decode(&plan))?;
        Ok([encode, phase_b, decode])
    }
}

/// Measures the stages of a set that has three, copies included, in the steady state of a stream; and `encode` and
/// `phase_b` with the context rebuilt, where the kernels have one.
///
/// # Safety
/// As [`KernelSet::open_stage_on_device`].
///
/// # Errors
/// Kernels of more stages, or that do not work on the device, no memory, or a failure.
pub unsafe fn kernels(
    set: &KernelSet,
    case: &Case,
    context: u64,
    stream: u64,
) -> Result<Vec<Figure>, MeasureError> {
    // SAFETY: the caller's duty.
    let borrowed = &unsafe { borrow(context, stream) }?;
    let clock = Clock::new(borrowed)?;
    let config = case.config(context, stream);
    // SAFETY: the caller's duty.
    let open = |name| unsafe { set.open_stage_on_device(name, &config, &[]) };
    let [source, middle, sink] = set.three_stages()?;
    let mut sessions = [open(source)?, open(middle)?, open(sink)?];
    let geometry = Geometry::of(&config);
    let mut samples = Pinned::new(borrowed, case.samples())?;
    picture(&mut samples, case.width as usize);

    // A chunk that rebuilds the context follows one that had at least as many frames.
    let known = set.describe().context_frames.min(case.frames);
    let mut plan = VideoPlanParts::first(case.width, case.height, case.steps);
    let mut figures = Vec::new();
    let variants = if known > 0 { &[0, known][..] } else { &[0] };
    for &context_frames in variants {
        let recompute = context_frames > 0;
        let shape = ChunkShape {
            frames: case.frames,
            steps: case.steps,
            context_frames,
        };
        let layout = sessions[1].layout(shape, 0)?;
        let mut chunks = Chunks {
            clock: &clock,
            case,
            sessions: &mut sessions,
            samples: &mut samples,
            plan,
            input: Slot::new(borrowed, &layout.inputs)?,
            output: Slot::new(borrowed, &layout.outputs)?,
        };
        if !recompute {
            chunks.encode(&plan)?;
            chunks.phase_b(&plan)?;
            clock.stream.wait_until_idle(PATIENCE)?;
        }
        let [encode_times, phase_b_times, decode_times] = chunks.time(recompute)?;
        plan = chunks.plan;

        let tokens = |frames: u32| geometry.frame_bytes() as u64 * u64::from(frames);
        let host_bytes = case.samples() as u64;
        let sent = tokens(case.frames) + tokens(context_frames);
        let [encode, phase_b] = match recompute {
            false => ["encode", "phase_b"],
            true => ["encode with context", "phase_b with recompute"],
        };
        figures.push(Figure {
            bytes: sent + host_bytes,
            host_bytes,
            ..Figure::new(encode, &encode_times)
        });
        figures.push(Figure {
            bytes: sent + tokens(case.frames),
            flops: attention_flops(&geometry, case, set.describe().context_frames),
            ..Figure::new(phase_b, &phase_b_times)
        });
        if !recompute {
            figures.push(Figure {
                bytes: tokens(case.frames) + host_bytes,
                host_bytes,
                ..Figure::new("decode", &decode_times)
            });
        }
    }
    Ok(figures)
}

/// Measures each kernel of the built-in set alone, with its tensors in device memory.
///
/// # Safety
/// As [`KernelSet::open_stage_on_device`].
///
/// # Errors
/// No driver, a device that cannot run them, no memory, or a failure.
pub unsafe fn single_kernels(
    case: &Case,
    context: u64,
    stream: u64,
) -> Result<Vec<Figure>, MeasureError> {
    // SAFETY: the caller's duty.
    let borrowed = &unsafe { borrow(context, stream) }?;
    let clock = Clock::new(borrowed)?;
    let config = case.config(context, stream);
    config.validate()?;
    let [source, middle, _] = &Ptx::describe().stages[..] else {
        return Err(Failure::error("the ptx kernels have three stages").into());
    };
    let mut front = Ptx::create(source, &config, &[])?;
    let mut session = Ptx::create(middle, &config, &[])?;
    let geometry = Geometry::of(&config);

    // Two chunks of two steps: then the ring, the context, the guides and the noise are those of a stream.
    let mut pinned = Pinned::new(borrowed, case.samples())?;
    picture(&mut pinned, case.width as usize);
    let views = case.views(&pinned);
    let shape = ChunkShape {
        frames: case.frames,
        steps: 2,
        context_frames: 0,
    };
    let Layout { inputs, outputs } = session.layout(shape, 0)?;
    let input = Slot::new(borrowed, &inputs)?;
    let output = Slot::new(borrowed, &outputs)?;
    let mut plan = VideoPlanParts::first(case.width, case.height, 2);
    for chunk in 1..=2 {
        front.encode(&views, &plan, &mut input.payload()?)?;
        let (input, mut output) = (input.payload()?, output.payload()?);
        session.run(&plan, 0, &input, &mut output, None)?;
        plan = plan.following(chunk * u64::from(case.frames), false);
    }
    borrowed.wait_until_idle(PATIENCE)?;

    let strength =
        input
            .payload::<&[u8]>()?
            .device_tensor("denoising_step_list", DType::I64, &[2])?;
    let (latents_in, latents_out) = (input.memory.address(), output.memory.address());
    let pass = Case { steps: 1, ..*case };
    let flops = attention_flops(&geometry, &pass, CONTEXT_FRAMES as u32);
    let frames = u64::from(case.frames);
    let tokens = geometry.frame_bytes() as u64 * frames;
    let samples = case.samples() as u64;
    let scratch = session.scratch_bytes()? as u64;
    // Whatever is read by many blocks counts once.
    let seen = (frames + CONTEXT_FRAMES as u64) * scratch;
    let mut figures = Vec::new();
    let mut measure = |name, kernel, memory, bytes, flops| {
        let times = times(&clock, case.runs, || {
            let session = match kernel {
                Single::Encode | Single::Decode => &mut front,
                _ => &mut session,
            };
            // SAFETY: the memory is that of the session's largest chunk, and freed behind the stream's work.
            unsafe { session.only(kernel, &plan, memory, strength, case.frames) }
        })?;
        figures.push(Figure {
            bytes,
            flops,
            ..Figure::new(name, &times)
        });
        Ok::<_, Failure>(())
    };
    let bytes = samples + tokens;
    measure("encode kernel", Single::Encode, latents_in, bytes, 0)?;
    measure("decode kernel", Single::Decode, latents_out, bytes, 0)?;
    let bytes = tokens + frames * scratch;
    measure("unfold kernel", Single::Unfold, latents_in, bytes, 0)?;
    let (bytes, first) = (seen + tokens, Single::AttendFirst);
    measure(
        "attend kernel, first pass",
        first,
        latents_out,
        bytes,
        flops,
    )?;
    let (bytes, next) = (bytes + frames * scratch, Single::AttendNext);
    measure("attend kernel, later pass", next, latents_out, bytes, flops)?;
    figures.push(digest(&clock, case, context, stream, &input)?);
    Ok(figures)
}

/// The name of the figure of digests.
pub const DIGESTS: &str = "digests of the input";

/// The digests of all tensors of an input, which is read once.
fn digest(
    clock: &Clock,
    case: &Case,
    context: u64,
    stream: u64,
    input: &Slot<'_>,
) -> Result<Figure, MeasureError> {
    let bytes = input.list.payload_bytes();
    // SAFETY: the caller of the measurement has promised the context and the stream, which outlive this function.
    let digests = unsafe { DeviceDigests::new(context, stream, bytes) }?;
    let tensors: Vec<DeviceTensor> = (input.list.iter())
        .map(|(offset, spec)| DeviceTensor {
            address: input.memory.address() + offset,
            bytes: spec.bytes(),
        })
        .collect();
    let out = StreamBuffer::new(&clock.stream, 8 * tensors.len())?;
    let times = times(clock, case.runs, || {
        // SAFETY: slot and results are freed behind the stream's work.
        unsafe { digests.enqueue(&tensors, out.address()) }
    })?;
    Ok(Figure {
        bytes,
        ..Figure::new(DIGESTS, &times)
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Chroma;

    #[test]
    fn operations_of_a_chunk_are_counted_by_hand() {
        let case = Case {
            width: 16,
            height: 24,
            chroma: Chroma::Mono,
            frames: 2,
            steps: 3,
            runs: 1,
        };
        let geometry = Geometry::new(16, 24, Chroma::Mono);
        // 3x5 patches. Each frame sees itself (81 places) and the other one (25); the first also both context frames,
        // the second only the newer one.
        let keys = [81 + 25 + 2 * 25, 81 + 25 + 25];
        let expected = 256 * 15 * (keys[0] + keys[1]) * 3;
        assert_eq!(attention_flops(&geometry, &case, 2), expected);
    }
}
