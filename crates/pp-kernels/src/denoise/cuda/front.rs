//! Encode and decode: samples between page-locked host memory and tokens on the device.
//!
//! All work goes to one stream, so the scratch frames are used again by the next call without a wait. Nothing here
//! looks at what the device computes.

use pp_contract::{DType, VideoPlanParts};

use super::frames::{DeviceFrames, download, upload};
use super::gpu::Gpu;
use super::kernels::{DenoiseKernels, HISTOGRAM_BYTES};
use crate::config::SessionConfig;
use crate::denoise::geometry::Geometry;
use crate::denoise::settings::CONTEXT_FRAMES;
use crate::denoise::tensors::{context_count, latents_dims};
use crate::error::Failure;
use crate::frame::{FrameView, FrameViewMut};
use crate::payload::{Payload, PayloadMut};

/// The state of encode and decode of one stream.
#[derive(Debug)]
pub(super) struct Front<G: Gpu> {
    pub(super) denoiser: DenoiseKernels<G>,
    geometry: Geometry,
    /// Frames of samples: the last ones of the chunks before (the newest in the last place), then those of a chunk.
    samples: G::Memory,
    /// How many of the former there are.
    history: usize,
    max_frames: u32,
    /// The noise of each plane, and what its estimate counts with.
    sigma: G::Memory,
    histogram: G::Memory,
    noise: Noise,
}

/// What `sigma` holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Noise {
    Given,
    Unknown,
    Estimated,
}

impl<G: Gpu> Front<G> {
    /// Allocates for the session's largest chunk; waits for the stream.
    pub(super) fn new(
        denoiser: DenoiseKernels<G>,
        config: &SessionConfig,
        geometry: &Geometry,
    ) -> Result<Front<G>, Failure> {
        let frames = CONTEXT_FRAMES + config.max_frames as usize;
        let given = config.noise_sigma.unwrap_or(0.0).to_le_bytes();
        let gpu = &denoiser.gpu;
        Ok(Front {
            geometry: geometry.clone(),
            samples: gpu.memory(frames * denoiser.sizes.frame_stride)?,
            history: 0,
            max_frames: config.max_frames,
            sigma: gpu.memory_with([given; 3].concat())?,
            histogram: gpu.memory_with(vec![0; HISTOGRAM_BYTES])?,
            noise: match config.noise_sigma {
                Some(_) => Noise::Given,
                None => Noise::Unknown,
            },
            denoiser,
        })
    }

    /// Where the frame of this number among `samples` lies.
    fn frame(&self, index: usize) -> u64 {
        G::address(&self.samples) + (index * self.denoiser.sizes.frame_stride) as u64
    }

    /// The chunk's frames on the device.
    pub(super) fn chunk(&self) -> DeviceFrames {
        DeviceFrames {
            address: self.frame(CONTEXT_FRAMES),
            stride: self.denoiser.sizes.frame_stride,
            planes: self.geometry.planes.len(),
        }
    }

    /// Refuses more frames than there is memory for: a caller of the C table may send any number.
    fn check_count(&self, frames: usize) -> Result<u32, Failure> {
        match u32::try_from(frames) {
            Ok(frames) if (1..=self.max_frames).contains(&frames) => Ok(frames),
            _ => Err(Failure::invalid(format!(
                "{frames} frames in a chunk, the session takes 1 to {}",
                self.max_frames
            ))),
        }
    }

    /// Enqueues an encode.
    ///
    /// # Safety
    /// The contract of a call ([`crate::RawSession`]).
    pub(super) unsafe fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        output: &PayloadMut<'_>,
    ) -> Result<(), Failure> {
        // What can be refused is refused before anything is enqueued or changed.
        let count = self.check_count(frames.len())?;
        let is_fresh = plan.init_cache || plan.reset_kv_cache;
        let history = if is_fresh { 0 } else { self.history };
        let context = context_count(plan, output.spec("context_frames"))?;
        if context as usize > history {
            return Err(Failure::invalid(format!(
                "context_frames asks for {context} frames, {history} were encoded since the last cut"
            )));
        }
        let tokens = |name, frames| {
            output.device_tensor(name, DType::Bf16, &latents_dims(&self.geometry, frames))
        };
        let latents = tokens("latents_in", count)?;
        let context_tokens = match context {
            0 => None,
            context => Some(tokens("context_frames", context)?),
        };
        let planes = self.geometry.planes.len() as u64;
        let embeds = output.device_tensor("conditioning_embeds", DType::Bf16, &[planes])?;
        let steps = plan.num_denoise_steps;
        let list = output.device_tensor("denoising_step_list", DType::I64, &[steps.into()])?;

        let estimates = match self.noise {
            Noise::Given => false,
            Noise::Unknown => true,
            Noise::Estimated => plan.init_cache || plan.reset_crossattn_cache,
        };
        let denoiser = &self.denoiser;
        // SAFETY: the addresses come from the payload, whose tensors have just been checked, and from this session's
        // memory, which is as large as its largest chunk and freed behind the stream's work; the rest is the caller's
        // duty.
        unsafe {
            upload(&denoiser.gpu, self.chunk(), frames)?;
            self.history = history;
            if estimates {
                self.noise = Noise::Unknown;
                let middle = self.frame(CONTEXT_FRAMES + frames.len() / 2);
                let (histogram, sigma) = (G::address(&self.histogram), G::address(&self.sigma));
                denoiser.estimate(middle, histogram, sigma)?;
                self.noise = Noise::Estimated;
            }
            if let Some(tokens) = context_tokens {
                let first = self.frame(CONTEXT_FRAMES - context as usize);
                denoiser.encode(first, tokens, context)?;
            }
            denoiser.encode(self.chunk().address, latents, count)?;
            denoiser.conditioning(G::address(&self.sigma), embeds, list, steps)?;
        }
        self.remember(frames.len())
    }

    /// The chunk's last frames become the history.
    fn remember(&mut self, frames: usize) -> Result<(), Failure> {
        let new = frames.min(CONTEXT_FRAMES);
        // From the oldest to the newest, so that none is overwritten before it has moved.
        for index in new..CONTEXT_FRAMES {
            self.move_frames(index, index - new, 1)?;
        }
        let newest = CONTEXT_FRAMES + frames - new;
        self.move_frames(newest, CONTEXT_FRAMES - new, new)?;
        self.history = CONTEXT_FRAMES.min(self.history + frames);
        Ok(())
    }

    /// Copies `count` of the frames of `samples` to places that none of them has.
    fn move_frames(&self, from: usize, to: usize, count: usize) -> Result<(), Failure> {
        let (from, to) = (self.frame(from), self.frame(to));
        let bytes = count * self.denoiser.sizes.frame_stride;
        // SAFETY: frames of a chunk or of the history lie within `samples`; the callers' places do not overlap.
        unsafe { self.denoiser.gpu.copy(from, to, bytes) }
    }

    /// Enqueues a decode.
    ///
    /// # Safety
    /// The contract of a call ([`crate::RawSession`]).
    pub(super) unsafe fn decode(
        &mut self,
        input: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), Failure> {
        let count = self.check_count(frames.len())?;
        let dims = latents_dims(&self.geometry, count);
        let latents = input.device_tensor("latents_out", DType::Bf16, &dims)?;
        let chunk = self.chunk();
        // SAFETY: as in `encode`; the samples of an encode are no longer needed behind it on the same stream.
        unsafe {
            self.denoiser.decode(latents, chunk.address, count)?;
            download(&self.denoiser.gpu, chunk, frames)?;
        }
        Ok(())
    }
}
