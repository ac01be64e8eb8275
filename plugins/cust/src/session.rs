//! One stream of chunks: which kernels run on what, and what is remembered from chunk to chunk.
//!
//! Every call only enqueues. Memory is allocated by the first call that needs it, in the order of the stream, so a
//! session of the front has none of Phase B's.

use pp_kernels::denoise::geometry::TOKEN;
use pp_kernels::denoise::settings::{CONTEXT_FRAMES, schedule};
use pp_kernels::{
    ChunkShape, DType, Failure, FrameView, FrameViewMut, Layout, Manifest, Payload, PayloadMut,
    Session, SessionConfig, TensorSpec, VideoPlanParts,
};

use crate::gpu::{self, Memory, Rows, Stream};
use crate::kernels::{Attend, Geometry, Kernels, Noise};

/// A stream of chunks on the host's CUDA stream.
#[derive(Debug)]
pub struct CustSession {
    config: SessionConfig,
    context: u64,
    stream: Stream,
    kernels: Kernels,
    geometry: Geometry,
    /// The noise of each plane where the host has said it.
    given: [[u8; 4]; 3],
    front: Option<Front>,
    back: Option<Back>,
    decoded: Option<Memory>,
}

/// What encode remembers.
#[derive(Debug)]
struct Front {
    /// Frames of samples: the last ones of earlier chunks, then the chunk's.
    frames: Memory,
    /// How many of the earlier ones there are; they lie right in front of the chunk.
    known: usize,
    noise: Noise,
    is_noise_known: bool,
}

/// What Phase B remembers.
#[derive(Debug)]
struct Back {
    /// Scratch frames of noisy samples, a ring: earlier chunks' last frames, then the chunk's.
    values: Memory,
    /// Where the next chunk begins in it.
    position: usize,
    /// Numbers of the frames in front of that.
    context: Vec<u64>,
    /// Scratch frames of the estimate after a pass, and its tokens.
    guides: Memory,
    estimate: Memory,
    sigma: Memory,
    is_conditioned: bool,
}

impl CustSession {
    pub(crate) fn new(
        config: &SessionConfig,
        context: u64,
        stream: u64,
    ) -> Result<CustSession, Failure> {
        check_context(context)?;
        Ok(CustSession {
            config: *config,
            context,
            stream: Stream::borrow(stream),
            kernels: Kernels::of(context)?,
            geometry: Geometry::of(config),
            given: [config.noise_sigma.unwrap_or(0.0).to_le_bytes(); 3],
            front: None,
            back: None,
            decoded: None,
        })
    }

    fn max_frames(&self) -> usize {
        self.config.max_frames as usize
    }

    /// Refuses more frames than there is memory for, in whatever they come in.
    fn check_count(&self, place: &str, frames: usize) -> Result<(), Failure> {
        if frames == 0 || frames > self.max_frames() {
            return Err(Failure::invalid(format!(
                "{place} holds {frames} frames, this session takes 1 to {}",
                self.max_frames()
            )));
        }
        Ok(())
    }

    fn latents(&self, frames: usize) -> [u64; 3] {
        [frames as u64, self.geometry.tokens(), TOKEN as u64]
    }

    /// Which planes there are, and where each lies in a frame on the device.
    fn planes(&self, frame: u64) -> impl Iterator<Item = (usize, u64)> + use<> {
        let geometry = self.geometry;
        (0..geometry.planes() as usize)
            .map(move |plane| (plane, frame + geometry.plane_offset(plane)))
    }

    fn front(&mut self) -> Result<Front, Failure> {
        if let Some(front) = self.front.take() {
            return Ok(front);
        }
        let frames = CONTEXT_FRAMES + self.max_frames();
        let noise = Noise::new(&self.geometry, self.stream)?;
        if self.config.noise_sigma.is_some() {
            let given = self.given.as_flattened();
            let given = &given[..4 * self.geometry.planes() as usize];
            // SAFETY: one f32 for each plane was allocated on this stream.
            unsafe { self.stream.write(noise.sigma.address(), given) }?;
        }
        Ok(Front {
            frames: Memory::new(frames * self.geometry.frame_stride(), self.stream)?,
            known: 0,
            noise,
            is_noise_known: self.config.noise_sigma.is_some(),
        })
    }

    fn back(&mut self) -> Result<Back, Failure> {
        if let Some(back) = self.back.take() {
            return Ok(back);
        }
        let (frames, scratch) = (self.max_frames(), self.geometry.scratch_bytes());
        let memory = |bytes| Memory::new(bytes, self.stream);
        Ok(Back {
            values: memory((CONTEXT_FRAMES + frames) * scratch)?,
            position: 0,
            context: Vec::with_capacity(2 * CONTEXT_FRAMES),
            guides: memory(frames * scratch)?,
            estimate: memory(frames * self.geometry.token_bytes())?,
            sigma: memory(self.geometry.planes() as usize * 4)?,
            is_conditioned: false,
        })
    }

    fn encode_with(
        &self,
        front: &mut Front,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        input: &PayloadMut<'_>,
    ) -> Result<(), Failure> {
        let planes = self.geometry.planes();
        let latents =
            input.device_tensor("latents_in", DType::Bf16, &self.latents(frames.len()))?;
        let embeds = input.device_tensor("conditioning_embeds", DType::Bf16, &[planes.into()])?;
        let steps = u64::from(plan.num_denoise_steps);
        let list = input.device_tensor("denoising_step_list", DType::I64, &[steps])?;
        let context = context_frames(plan, input.spec("context_frames"))?;
        if plan.init_cache || plan.reset_kv_cache {
            front.known = 0;
        }
        if context > front.known {
            return Err(Failure::invalid(format!(
                "context_frames asks for {context} frames, {} were encoded since the last cut",
                front.known
            )));
        }
        let stride = self.geometry.frame_stride();
        let at = |index: usize| front.frames.address() + (index * stride) as u64;
        let chunk = at(CONTEXT_FRAMES);

        for (index, frame) in frames.iter().enumerate() {
            for (plane, device) in self.planes(at(CONTEXT_FRAMES + index)) {
                let from = frame.plane(plane);
                let rows = Rows {
                    is_upload: true,
                    host: from.row(0).as_ptr().cast_mut(),
                    stride: from.stride(),
                    device,
                    width: from.width(),
                    count: from.height(),
                };
                // SAFETY: the host keeps the frames until the stream has passed; the device's are ours.
                unsafe { self.stream.copy_rows(rows) }?;
            }
        }
        let is_fresh = plan.init_cache || plan.reset_crossattn_cache || !front.is_noise_known;
        if is_fresh && self.config.noise_sigma.is_none() {
            let middle = at(CONTEXT_FRAMES + frames.len() / 2);
            // SAFETY: the frame was uploaded on this stream.
            unsafe {
                self.kernels
                    .estimate(self.stream, self.geometry, middle, &front.noise)
            }?;
            front.is_noise_known = true;
        }
        let [first, rest] = [1, 2].map(|steps| schedule(steps).last().unwrap_or_default());
        let numbers = [steps as i64, first, rest];
        let (stream, geometry) = (self.stream, self.geometry);
        // SAFETY: the tensors are the caller's and stay until the stream has passed; the frames are ours.
        unsafe {
            if context > 0 {
                let tokens = self.latents(context);
                let tensor = input.device_tensor("context_frames", DType::Bf16, &tokens)?;
                let earlier = at(CONTEXT_FRAMES - context);
                self.kernels
                    .encode(stream, geometry, earlier, tensor, context)?;
            }
            self.kernels
                .encode(stream, geometry, chunk, latents, frames.len())?;
            self.kernels
                .conditioning(stream, planes, &front.noise, [embeds, list], numbers)?;
        }

        // The last frames of all move in front of the next chunk, in an order in which none is lost.
        for index in 0..CONTEXT_FRAMES {
            let from = at(index + frames.len());
            // SAFETY: both are ours, and no shorter than a frame away from each other.
            unsafe { self.stream.copy(at(index), from, stride) }?;
        }
        front.known = CONTEXT_FRAMES.min(front.known + frames.len());
        Ok(())
    }

    fn phase_b_with(
        &self,
        back: &mut Back,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        output: &PayloadMut<'_>,
    ) -> Result<u32, Failure> {
        let (stream, geometry) = (self.stream, self.geometry);
        let planes = geometry.planes();
        // Everything that can be refused is refused before the first change of state.
        let first = input
            .spec("latents_in")
            .and_then(|spec| spec.shape().dims().first());
        let frames = first.map_or(0, |frames| usize::try_from(*frames).unwrap_or(usize::MAX));
        self.check_count("latents_in", frames)?;
        let latents_in = input.device_tensor("latents_in", DType::Bf16, &self.latents(frames))?;
        let latents_out =
            output.device_tensor("latents_out", DType::Bf16, &self.latents(frames))?;
        let embeds = input.device_tensor("conditioning_embeds", DType::Bf16, &[planes.into()])?;
        let steps = u64::from(plan.num_denoise_steps);
        let list = input.device_tensor("denoising_step_list", DType::I64, &[steps])?;
        let context = context_frames(plan, input.spec("context_frames"))?;
        let start = plan.current_start_frame;
        if context as u64 > start || start.checked_add(frames as u64).is_none() {
            return Err(Failure::invalid(format!(
                "{context} context frames and {frames} more do not fit around frame {start}"
            )));
        }
        let earlier = match context {
            0 => 0,
            _ => input.device_tensor("context_frames", DType::Bf16, &self.latents(context))?,
        };

        let slots = CONTEXT_FRAMES + self.max_frames();
        let position = back.position;
        if plan.init_cache || plan.reset_kv_cache {
            back.context.clear();
        }
        // SAFETY: the tensors are the caller's and stay until the stream has passed; everything else is ours.
        unsafe {
            if plan.init_cache || plan.reset_crossattn_cache || !back.is_conditioned {
                self.kernels
                    .condition(stream, planes, embeds, &back.sigma)?;
                back.is_conditioned = true;
            }
            if context > 0 {
                let place = (&back.values, (position + slots - context) % slots, slots);
                self.kernels
                    .unfold(stream, geometry, false, earlier, context, place)?;
                back.context.clear();
                back.context.extend(start - context as u64..start);
            }
            if steps == 0 {
                stream.copy(latents_out, latents_in, frames * geometry.token_bytes())?;
                let kept = CONTEXT_FRAMES.min(frames);
                let tokens = latents_in + ((frames - kept) * geometry.token_bytes()) as u64;
                let place = (&back.values, (position + frames - kept) % slots, slots);
                self.kernels
                    .unfold(stream, geometry, false, tokens, kept, place)?;
            } else {
                let place = (&back.values, position, slots);
                self.kernels
                    .unfold(stream, geometry, false, latents_in, frames, place)?;
            }
            for step in 0..steps {
                if step > 0 {
                    let (tokens, place) = (
                        back.estimate.address(),
                        (&back.guides, 0, self.max_frames()),
                    );
                    self.kernels
                        .unfold(stream, geometry, true, tokens, frames, place)?;
                }
                let is_last = step + 1 == steps;
                let pass = Attend {
                    values: back.values.address(),
                    guides: if step == 0 { 0 } else { back.guides.address() },
                    out: if is_last {
                        latents_out
                    } else {
                        back.estimate.address()
                    },
                    sigma: back.sigma.address(),
                    step: list + 8 * step,
                    noise_scale: plan.noise_scale,
                    bias: plan.kv_cache_attention_bias,
                    frames: frames as i32,
                    context: back.context.len() as i32,
                    context_at: places(&back.context, start),
                    slots: slots as i32,
                    first_slot: position as i32,
                    last: is_last.into(),
                    reserved: 0,
                    geometry,
                };
                self.kernels.attend(stream, step == 0, pass)?;
            }
        }
        back.position = (position + frames) % slots;
        back.context.extend(
            (start..)
                .take(frames)
                .skip(frames.saturating_sub(CONTEXT_FRAMES)),
        );
        let surplus = back.context.len().saturating_sub(CONTEXT_FRAMES);
        back.context.drain(..surplus);
        Ok(steps as u32 + u32::from(context > 0))
    }
}

impl Session for CustSession {
    fn layout(&self, shape: ChunkShape) -> Result<Layout, Failure> {
        if shape.context_frames as usize > CONTEXT_FRAMES {
            return Err(Failure::invalid(format!(
                "{} context frames, these kernels look at {CONTEXT_FRAMES}",
                shape.context_frames
            )));
        }
        let latents =
            |name, frames: u32| TensorSpec::new(name, DType::Bf16, &self.latents(frames as usize));
        let planes = u64::from(self.geometry.planes());
        let mut inputs = vec![
            latents("latents_in", shape.frames)?,
            TensorSpec::new("conditioning_embeds", DType::Bf16, &[planes])?,
            TensorSpec::new("denoising_step_list", DType::I64, &[shape.steps.into()])?,
        ];
        if shape.context_frames > 0 {
            inputs.push(latents("context_frames", shape.context_frames)?);
        }
        Ok(Layout {
            inputs: Manifest::new(&inputs)?,
            outputs: Manifest::new(&[latents("latents_out", shape.frames)?])?,
        })
    }

    fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        input: &mut PayloadMut<'_>,
    ) -> Result<(), Failure> {
        check_context(self.context)?;
        self.check_count("the chunk", frames.len())?;
        let mut front = self.front()?;
        let result = self.encode_with(&mut front, frames, plan, input);
        self.front = Some(front);
        result
    }

    fn phase_b(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
    ) -> Result<u32, Failure> {
        check_context(self.context)?;
        let mut back = self.back()?;
        let result = self.phase_b_with(&mut back, plan, input, output);
        self.back = Some(back);
        result
    }

    fn decode(
        &mut self,
        _plan: &VideoPlanParts,
        output: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), Failure> {
        check_context(self.context)?;
        self.check_count("the chunk", frames.len())?;
        let tokens =
            output.device_tensor("latents_out", DType::Bf16, &self.latents(frames.len()))?;
        let stride = self.geometry.frame_stride();
        let decoded = match self.decoded.take() {
            Some(decoded) => decoded,
            None => Memory::new(self.max_frames() * stride, self.stream)?,
        };
        let decoded = self.decoded.insert(decoded).address();
        // SAFETY: the tokens are the caller's and stay until the stream has passed; the device's frames are ours.
        unsafe {
            self.kernels
                .decode(self.stream, self.geometry, tokens, decoded, frames.len())?;
        }
        for (index, frame) in frames.iter_mut().enumerate() {
            for (plane, device) in self.planes(decoded + (index * stride) as u64) {
                let to = frame.plane_mut(plane);
                let (width, stride, count) = (to.width(), to.stride(), to.height());
                let rows = Rows {
                    is_upload: false,
                    host: to.row_mut(0).as_mut_ptr(),
                    stride,
                    device,
                    width,
                    count,
                };
                // SAFETY: the host keeps the frames until the stream has passed; the device's are ours.
                unsafe { self.stream.copy_rows(rows) }?;
            }
        }
        Ok(())
    }
}

/// Refuses a call on a thread where another context, or none, is current.
fn check_context(wanted: u64) -> Result<(), Failure> {
    let found = gpu::current_context()?;
    if found != wanted {
        return Err(Failure::error(format!(
            "the CUDA context {wanted:#x} must be current on the calling thread, it is {found:#x}"
        )));
    }
    Ok(())
}

/// Frames in `context_frames`, which must be there exactly when the plan says so.
fn context_frames(plan: &VideoPlanParts, spec: Option<&TensorSpec>) -> Result<usize, Failure> {
    let frames = spec
        .and_then(|spec| spec.shape().dims().first().copied())
        .unwrap_or(0);
    if spec.is_some() != plan.do_kv_recompute || (spec.is_some() && frames == 0) {
        return Err(Failure::invalid(
            "context_frames must be there, and hold a frame, exactly when the plan asks for a recompute",
        ));
    }
    match usize::try_from(frames) {
        Ok(frames) if frames <= CONTEXT_FRAMES => Ok(frames),
        _ => Err(Failure::invalid(format!(
            "{frames} context frames, these kernels look at {CONTEXT_FRAMES}"
        ))),
    }
}

/// Where context frames lie in front of a chunk, the newest last; what is far away is only far away.
fn places(context: &[u64], start: u64) -> [i32; 2] {
    const FAR: i128 = 1_000_000;
    let mut places = [0; CONTEXT_FRAMES];
    for (place, frame) in places.iter_mut().rev().zip(context.iter().rev()) {
        *place = (i128::from(*frame) - i128::from(start)).clamp(-FAR, FAR) as i32;
    }
    places
}
