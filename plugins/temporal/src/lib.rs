//! Example plugin in Rust: a motion-adaptive average over time.
//!
//! Each sample becomes the weighted mean of itself and of the samples at its place in the frame before and the one
//! after. A neighbour weighs `1 - |difference| / limit` (0 beyond it), with `limit = 3 σ · noise_scale`: what moves
//! differs by more than noise does, and is left alone. A frame that is missing has no weight. Each further step starts
//! from the result of the one before.
//!
//! Latents are the samples themselves, plane after plane without padding, as bf16 `[frames, samples]`. The cache is
//! one frame. It shows all that a plugin needs: its stages, two traits, and one line for the export.

use half::bf16;
use pp_kernels::{
    Bits, Chroma, ChunkShape, Collectives, DType, Description, Failure, FrameView, FrameViewMut,
    Kernels, Layout, Manifest, Payload, PayloadMut, Session, SessionConfig, Space, StageInfo,
    StageKind, TensorSpec, VideoPlanParts, denoise::cpu, export::no_args,
};

/// The kernels of this plugin.
#[derive(Debug)]
pub enum Temporal {}

pp_kernels::export_kernels!(Temporal);

/// One stage of one stream.
#[derive(Debug)]
pub struct Stream {
    stage: StageKind,
    config: SessionConfig,
    /// Samples of a frame.
    samples: usize,
    sigma: f32,
    /// The last frame that encode sent, as tokens.
    sent: Vec<u8>,
    /// The last frame that was averaged, and its noise.
    cache: Option<Vec<f32>>,
    limit_sigma: f32,
}

impl Kernels for Temporal {
    type Session = Stream;

    fn describe() -> Description {
        let stage = |name, kind| StageInfo {
            in_gaps: true,
            any_steps: true,
            ..StageInfo::new(name, kind)
        };
        Description {
            name: "temporal".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            host: true,
            cuda: false,
            chroma: Chroma::ALL.into(),
            bits: Bits::Eight,
            context_frames: 1,
            digest: 0x7465_6d70_0000_0001,
            stages: vec![
                stage("encode", StageKind::Source),
                stage("average", StageKind::Middle),
                stage("decode", StageKind::Sink),
            ],
        }
    }

    fn create(
        stage: &StageInfo,
        config: &SessionConfig,
        args: &[(&str, &str)],
    ) -> Result<Stream, Failure> {
        no_args(args)?;
        if config.space != Space::Host {
            return Err(Failure::unsupported("temporal works on host memory only"));
        }
        Ok(Stream {
            stage: stage.kind,
            config: *config,
            samples: config.chroma.frame_samples(config.width, config.height),
            sigma: 0.0,
            sent: Vec::new(),
            cache: None,
            limit_sigma: 0.0,
        })
    }

    fn self_test() -> Result<(), Failure> {
        let mean = average(100.0, [Some(104.0), Some(300.0)], 8.0);
        if (mean - 101.333_336).abs() > 1e-4 {
            return Err(Failure::error(format!(
                "the mean of 100, 104 and 300 is {mean}"
            )));
        }
        Ok(())
    }
}

impl Session for Stream {
    fn layout(&self, shape: ChunkShape, _: u32) -> Result<Layout, Failure> {
        if shape.context_frames > 1 {
            return Err(Failure::invalid("temporal looks at one context frame"));
        }
        let latents = |name, frames: u32| {
            TensorSpec::new(name, DType::Bf16, &[frames.into(), self.samples as u64])
        };
        let mut sent = vec![
            latents("latents_in", shape.frames)?,
            TensorSpec::new("conditioning_embeds", DType::Bf16, &[1])?,
            TensorSpec::new("denoising_step_list", DType::I64, &[shape.steps.into()])?,
        ];
        if shape.context_frames > 0 {
            sent.push(latents("context_frames", 1)?);
        }
        let sent = Manifest::new(&sent)?;
        let back = Manifest::new(&[latents("latents_out", shape.frames)?])?;
        let (inputs, outputs) = match self.stage {
            StageKind::Source => (Manifest::empty(), sent),
            StageKind::Middle => (sent, back),
            StageKind::Sink => (back, Manifest::empty()),
        };
        Ok(Layout { inputs, outputs })
    }

    fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        output: &mut PayloadMut<'_>,
    ) -> Result<(), Failure> {
        if plan.init_cache || plan.reset_kv_cache {
            self.sent.clear();
        }
        if plan.init_cache || plan.reset_crossattn_cache {
            let estimate = || cpu::estimate_sigma(frames[0].plane(0));
            self.sigma = self.config.noise_sigma.unwrap_or_else(estimate);
        }
        if plan.do_kv_recompute {
            let context =
                output.tensor_mut("context_frames", DType::Bf16, &[1, self.samples as u64])?;
            if self.sent.is_empty() {
                return Err(Failure::invalid("no frame was encoded since the last cut"));
            }
            context.copy_from_slice(&self.sent);
        }
        let dims = [frames.len() as u64, self.samples as u64];
        let latents = output.tensor_mut("latents_in", DType::Bf16, &dims)?;
        for (frame, out) in frames
            .iter()
            .zip(latents.chunks_exact_mut(2 * self.samples))
        {
            let planes = (0..self.config.chroma.planes()).map(|index| frame.plane(index));
            let samples =
                planes.flat_map(|plane| (0..plane.height()).flat_map(move |y| plane.row(y)));
            for (sample, two) in samples.zip(out.chunks_exact_mut(2)) {
                two.copy_from_slice(&bf16::from_f32((*sample).into()).to_le_bytes());
            }
        }
        self.sent.clear();
        self.sent
            .extend_from_slice(&latents[latents.len() - 2 * self.samples..]);
        let conditioning = output.tensor_mut("conditioning_embeds", DType::Bf16, &[1])?;
        conditioning.copy_from_slice(&bf16::from_f32(self.sigma).to_le_bytes());
        let steps = output.tensor_mut(
            "denoising_step_list",
            DType::I64,
            &[plan.num_denoise_steps.into()],
        )?;
        for (number, step) in steps.chunks_exact_mut(8).enumerate() {
            step.copy_from_slice(&(number as i64 + 1).to_le_bytes());
        }
        Ok(())
    }

    fn run(
        &mut self,
        plan: &VideoPlanParts,
        _: u32,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
        _: Option<&mut dyn Collectives>,
    ) -> Result<u32, Failure> {
        let frames = input
            .spec("latents_in")
            .and_then(|spec| spec.shape().dims().first().copied())
            .unwrap_or(0);
        let dims = [frames, self.samples as u64];
        let latents = input.tensor("latents_in", DType::Bf16, &dims)?;
        let out = output.tensor_mut("latents_out", DType::Bf16, &dims)?;
        let conditioning = input.tensor("conditioning_embeds", DType::Bf16, &[1])?;
        let context = match plan.do_kv_recompute {
            true => Some(input.tensor("context_frames", DType::Bf16, &[1, self.samples as u64])?),
            false => None,
        };
        if plan.init_cache || plan.reset_crossattn_cache {
            self.limit_sigma = floats(conditioning)[0];
        }
        if plan.init_cache || plan.reset_kv_cache {
            self.cache = None;
        }
        if let Some(context) = context {
            self.cache = Some(floats(context));
        }
        if plan.skipped_frames > 0 {
            self.cache = None;
        }
        let mut state: Vec<Vec<f32>> = latents.chunks_exact(2 * self.samples).map(floats).collect();
        let last = state.last().cloned();
        let limit = 3.0 * self.limit_sigma * plan.noise_scale;
        for _ in 0..plan.num_denoise_steps {
            let old = state.clone();
            for (t, frame) in state.iter_mut().enumerate() {
                let before = if t == 0 {
                    self.cache.as_ref()
                } else {
                    old.get(t - 1)
                };
                for (i, sample) in frame.iter_mut().enumerate() {
                    *sample = average(
                        *sample,
                        [before, old.get(t + 1)].map(|f| f.map(|f| f[i])),
                        limit,
                    );
                }
            }
        }
        for (sample, two) in state.iter().flatten().zip(out.chunks_exact_mut(2)) {
            two.copy_from_slice(&bf16::from_f32(*sample).to_le_bytes());
        }
        self.cache = last;
        Ok(plan.expected_generator_calls)
    }

    fn decode(
        &mut self,
        _plan: &VideoPlanParts,
        input: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), Failure> {
        let dims = [frames.len() as u64, self.samples as u64];
        let latents = input.tensor("latents_out", DType::Bf16, &dims)?;
        for (frame, tokens) in frames
            .iter_mut()
            .zip(latents.chunks_exact(2 * self.samples))
        {
            let mut samples = floats(tokens).into_iter();
            for index in 0..self.config.chroma.planes() {
                let plane = frame.plane_mut(index);
                for y in 0..plane.height() {
                    for (sample, value) in plane.row_mut(y).iter_mut().zip(&mut samples) {
                        *sample = value.round().clamp(0.0, 255.0) as u8;
                    }
                }
            }
        }
        Ok(())
    }
}

fn floats(tokens: &[u8]) -> Vec<f32> {
    tokens
        .chunks_exact(2)
        .map(|two| bf16::from_le_bytes([two[0], two[1]]).to_f32())
        .collect()
}

/// The weighted mean of a sample and its neighbours in time.
fn average(sample: f32, neighbours: [Option<f32>; 2], limit: f32) -> f32 {
    let (mut sum, mut weights) = (sample, 1.0);
    for neighbour in neighbours.into_iter().flatten() {
        let weight = (1.0 - (neighbour - sample).abs() / limit.max(1e-6)).max(0.0);
        sum += weight * neighbour;
        weights += weight;
    }
    sum / weights
}
