//! The denoiser on the CPU.

mod attention;
mod denoise;
mod group;
mod noise;
mod plane;
mod tokens;

use std::sync::Arc;

use half::bf16;

pub(crate) use denoise::MIN_H2;
pub(crate) use noise::StreamNoise;
pub use noise::{add_gaussian, estimate_sigma};
pub(crate) use plane::mirrored;

use pp_contract::{DType, VideoPlanParts};

use crate::config::{ChunkShape, Layout, SessionConfig, Space};
use crate::denoise::geometry::{Geometry, TOKEN};
use crate::denoise::passes::Share;
use crate::denoise::rows::RowShares;
use crate::denoise::settings::{self, CONTEXT_FRAMES};
use crate::denoise::tensors::{
    self, HANDED_ON, check_place, context_count, frame_count, latents, latents_dims,
};
use crate::error::Failure;
use crate::export::{Kernels, Session, no_args};
use crate::frame::{FrameView, FrameViewMut};
use crate::group::Collectives;
use crate::payload::{Payload, PayloadMut};
use crate::stage::{Description, FrameGeometry, StageInfo, StageKind};
use denoise::{Denoiser, Output};
use group::CpuTeam;

/// The built-in kernels.
#[derive(Debug)]
pub enum Cpu {}

/// One stage of one stream through the built-in kernels.
#[derive(Debug)]
pub struct CpuSession {
    kind: StageKind,
    config: SessionConfig,
    geometry: Geometry,
    /// Who has which rows, in a group.
    cut: Option<Arc<RowShares>>,
    /// Encode: the last frames seen, packed, oldest first; and the noise of the stream.
    history: Vec<Vec<u8>>,
    noise: StreamNoise,
    /// `phase_b`: one for each lap.
    denoisers: Vec<Denoiser>,
    strengths: Vec<f32>,
}

impl Kernels for Cpu {
    type Session = CpuSession;

    fn describe() -> Description {
        settings::description("cpu", false, settings::DIGEST)
    }

    fn create(
        stage: &StageInfo,
        config: &SessionConfig,
        args: &[(&str, &str)],
    ) -> Result<CpuSession, Failure> {
        no_args(args)?;
        if config.space != Space::Host {
            return Err(Failure::unsupported(
                "the cpu kernels work on host memory only",
            ));
        }
        let threads = match config.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads as usize,
        };
        let geometry = Geometry::of(config);
        let cut = (config.members > 1)
            .then(|| Arc::new(RowShares::new(&geometry, config.members, config.member, 1)));
        let held = (cut.as_ref()).map_or(&geometry, |cut| &cut.own().geometry);
        let most = config.max_frames as usize;
        let about = (config.bits, most, threads);
        let denoiser = || Denoiser::new(held.clone(), cut.as_deref(), about);
        let laps = match stage.kind {
            StageKind::Middle => config.laps as usize,
            StageKind::Source | StageKind::Sink => 0,
        };
        Ok(CpuSession {
            kind: stage.kind,
            config: *config,
            history: Vec::with_capacity(CONTEXT_FRAMES),
            noise: StreamNoise::new(config),
            denoisers: std::iter::repeat_with(denoiser).take(laps).collect(),
            geometry,
            cut,
            strengths: Vec::new(),
        })
    }
}

impl CpuSession {
    /// Remembers the chunk's last frames, for the next chunk's `context_frames`.
    fn remember(&mut self, frames: &[FrameView<'_>]) {
        let bytes = FrameGeometry::of(&self.config).frame_bytes();
        let sample_bytes = self.config.bits.bytes();
        for frame in &frames[frames.len().saturating_sub(CONTEXT_FRAMES)..] {
            if self.history.len() < CONTEXT_FRAMES {
                self.history.push(vec![0; bytes]);
            } else {
                self.history.rotate_left(1);
            }
            let mut packed = self.history.last_mut().map_or(&mut [][..], |last| last);
            for (index, plane) in self.geometry.planes.iter().enumerate() {
                for y in 0..plane.height {
                    let (row, rest) = packed.split_at_mut(plane.width * sample_bytes);
                    row.copy_from_slice(frame.plane(index).row(y));
                    packed = rest;
                }
            }
        }
    }

    fn encode_frame(&self, frame: &FrameView<'_>, out: &mut [u8]) {
        for (index, plane) in self.geometry.planes.iter().enumerate() {
            let tokens = &mut out[plane.first_token * TOKEN * 2..][..plane.tokens() * TOKEN * 2];
            tokens::encode_plane(frame.plane(index), plane, tokens);
        }
    }
}

impl Session for CpuSession {
    fn layout(&self, shape: ChunkShape, lap: u32) -> Result<Layout, Failure> {
        let stage = (self.kind, &self.config, &self.geometry);
        tensors::layout(stage, shape, lap, DType::F32)
    }

    fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        output: &mut PayloadMut<'_>,
    ) -> Result<(), Failure> {
        let bytes = self.geometry.frame_bytes();
        if plan.init_cache || plan.reset_kv_cache {
            self.history.clear();
        }
        let context = context_count(plan, output.spec("context_frames"))?;
        if context as usize > self.history.len() {
            return Err(Failure::invalid(format!(
                "context_frames asks for {context} frames, {} were encoded since the last cut",
                self.history.len()
            )));
        }
        if context > 0 {
            let dims = latents_dims(&self.geometry, context);
            let tokens = output.tensor_mut("context_frames", latents(self.config.bits), &dims)?;
            let history = &self.history[self.history.len() - context as usize..];
            for (packed, out) in history.iter().zip(tokens.chunks_exact_mut(bytes)) {
                let frame = FrameView::packed(packed, &FrameGeometry::of(&self.config))
                    .ok_or_else(|| Failure::error("a remembered frame has another size"))?;
                self.encode_frame(&frame, out);
            }
        }

        let dims = latents_dims(&self.geometry, frames.len() as u32);
        let tokens = output.tensor_mut("latents_in", latents(self.config.bits), &dims)?;
        for (frame, out) in frames.iter().zip(tokens.chunks_exact_mut(bytes)) {
            self.encode_frame(frame, out);
        }
        let sigma = self.noise.of_chunk(frames, plan);
        let planes = sigma.len() as u64;
        let conditioning = output.tensor_mut("conditioning_embeds", DType::Bf16, &[planes])?;
        for (sigma, out) in sigma.iter().zip(conditioning.chunks_exact_mut(2)) {
            out.copy_from_slice(&bf16::from_f32(*sigma).to_le_bytes());
        }
        let steps = plan.num_denoise_steps;
        let list = output.tensor_mut("denoising_step_list", DType::I64, &[steps.into()])?;
        for (step, out) in settings::schedule(steps).zip(list.chunks_exact_mut(8)) {
            out.copy_from_slice(&step.to_le_bytes());
        }
        self.remember(frames);
        Ok(())
    }

    fn run(
        &mut self,
        plan: &VideoPlanParts,
        lap: u32,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
        group: Option<&mut dyn Collectives>,
    ) -> Result<u32, Failure> {
        let Some(group) = group else {
            return self.compute(plan, lap, input, output, None);
        };
        let cut = self.cut.clone();
        let cut = cut.ok_or_else(|| Failure::invalid("the session has no group"))?;
        let share = Share::of(&self.config, plan.num_denoise_steps, lap)?;
        let shape = ChunkShape {
            frames: frame_count(input.spec("latents_in"), self.config.max_frames)?,
            steps: plan.num_denoise_steps,
            context_frames: context_count(plan, input.spec("context_frames"))?,
        };
        let (config, payloads) = (self.config, (input, output));
        group::run(
            &cut,
            &config,
            (shape, share),
            payloads,
            group,
            |input, output, group| self.compute(plan, lap, input, output, Some(group)),
        )
    }

    fn decode(
        &mut self,
        _plan: &VideoPlanParts,
        input: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), Failure> {
        let dims = latents_dims(&self.geometry, frames.len() as u32);
        let all = input.tensor("latents_out", latents(self.config.bits), &dims)?;
        for (frame, tokens) in frames
            .iter_mut()
            .zip(all.chunks_exact(self.geometry.frame_bytes()))
        {
            for (index, plane) in self.geometry.planes.iter().enumerate() {
                let tokens = &tokens[plane.first_token * TOKEN * 2..][..plane.tokens() * TOKEN * 2];
                tokens::decode_plane(tokens, plane, frame.plane_mut(index));
            }
        }
        Ok(())
    }
}

impl CpuSession {
    /// Runs `phase_b` on the rows that this session holds, which are those of the payloads.
    fn compute(
        &mut self,
        plan: &VideoPlanParts,
        lap: u32,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
        group: Option<&mut dyn Collectives>,
    ) -> Result<u32, Failure> {
        // Everything that can fail without the group comes before the first change of state.
        let frames = frame_count(input.spec("latents_in"), self.config.max_frames)?;
        let held = (self.cut.as_ref()).map_or(&self.geometry, |cut| &cut.own().geometry);
        let dims = latents_dims(held, frames);
        let dtype = latents(self.config.bits);
        let latents_in = input.tensor("latents_in", dtype, &dims)?;
        let share = Share::of(&self.config, plan.num_denoise_steps, lap)?;
        let guide = match share.has_guide() {
            true => Some(input.tensor("guide", DType::F32, &dims)?),
            false => None,
        };
        let sigma = input.tensor(
            "conditioning_embeds",
            DType::Bf16,
            &[self.geometry.planes.len() as u64],
        )?;
        let sigma = || {
            sigma
                .chunks_exact(2)
                .map(|two| bf16::from_le_bytes([two[0], two[1]]).to_f32())
        };
        if let Some(bad) = sigma().find(|sigma| !(0.0..=255.0).contains(sigma)) {
            return Err(Failure::invalid(format!(
                "conditioning_embeds holds a noise of {bad}, must lie within 0 and 255"
            )));
        }
        let list = input.tensor(
            "denoising_step_list",
            DType::I64,
            &[plan.num_denoise_steps.into()],
        )?;
        self.strengths.clear();
        for step in list.chunks_exact(8) {
            let step = i64::from_le_bytes(step.try_into().unwrap_or_default());
            self.strengths.push(settings::strength(step)?);
        }
        let context = context_count(plan, input.spec("context_frames"))?;
        let numbers = check_place(plan, frames, context)?;
        let context = match context {
            0 => None,
            count => {
                let dims = latents_dims(held, count);
                let tokens = input.tensor("context_frames", dtype, &dims)?;
                Some((tokens, numbers))
            }
        };
        // What the leader of a group hands on is the whole.
        if !share.ends() && self.config.member == 0 {
            for spec in HANDED_ON.into_iter().filter_map(|name| input.spec(name)) {
                let (name, dims) = (spec.name(), spec.shape().dims());
                let from = input.tensor(name, spec.dtype(), dims)?;
                let to = output.tensor_mut(name, spec.dtype(), dims)?;
                to.copy_from_slice(from);
            }
        }
        let output = match share.ends() {
            true => Output::Latents(output.tensor_mut("latents_out", dtype, &dims)?),
            false => Output::Guide(output.tensor_mut("guide", DType::F32, &dims)?),
        };

        let denoiser = &mut self.denoisers[lap as usize];
        denoiser.begin(plan, sigma(), context);
        let strengths = &self.strengths[share.first as usize..share.end as usize];
        let team = match (&self.cut, group) {
            (Some(cut), Some(group)) => Some(CpuTeam { cut, group }),
            _ => None,
        };
        denoiser.run(plan, strengths, latents_in, guide, output, team)?;
        Ok(share.count() + u32::from(context.is_some()))
    }
}
