//! A session of `phase_b`: the parts of a package that are its share, one after the other.
//!
//! A chunk goes through the whole package once, however many steps its plan has: the steps are the model's, which may read their
//! list. With zero steps the chunk is copied. Of a package of `n` parts, the part `i` of `m` of the stage runs those that
//! `pass_range` gives it. What one part makes, the next one gets as `guide`.

use std::mem;
use std::path::Path;
use std::time::Duration;

use pp_device::{Device, Stream};
use pp_kernels::denoise::cuda::Gpu;
use pp_kernels::denoise::geometry::{Geometry, TOKEN};
use pp_kernels::{
    ChunkShape, Collectives, DType, Failure, Layout, Manifest, Payload, PayloadMut, Session,
    SessionConfig, Space, Status, TensorSpec, VideoPlanParts, pass_range,
};

use crate::model::{self, Model};
use crate::package::{About, Package, Part, Sizes, Tensor};
use crate::torch::{Place, Tensor as Memory, Torch};

/// How long the end of a session may wait for its stream.
const PATIENCE: Duration = Duration::from_secs(2);
/// What goes from part to part.
const GUIDE: &str = "guide";
const LATENTS: &str = "latents_in";
const RESULT: &str = "latents_out";

/// A session.
pub(crate) struct Stage {
    config: SessionConfig,
    geometry: Geometry,
    /// The file, for messages.
    path: String,
    /// Of a device.
    stream: Option<Stream>,
    models: Vec<Model>,
    /// What each model but the last makes, and its address.
    between: Vec<(Memory, u64)>,
    /// The guide that the session gets.
    guide: Option<Tensor>,
    /// Says whether its last part is that of the package.
    ends: bool,
}

impl Stage {
    /// Opens the share of a session, and computes its example.
    ///
    /// # Errors
    /// The package does not fit the session, this machine or this PyTorch, or is damaged.
    pub(crate) fn open(path: &Path, config: &SessionConfig) -> Result<Stage, Failure> {
        let package = Package::open(path)?;
        let about = package.about()?;
        let (stream, place, capability) = match config.space {
            Space::Host => (None, Place::Host, [0; 2]),
            Space::Cuda { context, stream } => {
                // SAFETY: the caller of the C table promises both handles for the life of the session.
                let stream = unsafe { Stream::borrow(&Device::of_context(context)?, stream) };
                let device = stream.device().about();
                let capability = [device.compute_major, device.compute_minor];
                let place = Place::Cuda(device.ordinal);
                (Some(stream), place, capability)
            }
        };
        let path_text = path.display().to_string();
        let geometry = Geometry::of(config);
        fits(&path_text, &about, config, &geometry)?;
        model::check(path, &about, place, capability)?;
        let count = about.parts.len();
        let share = pass_range(count as u32, config.part as usize, config.parts as usize);
        let (first, end) = (share.start as usize, share.end as usize);
        let raw = stream.as_ref().map_or(0, Stream::raw);
        let largest = most(config, about.example);
        let (mut models, mut between) = (Vec::new(), Vec::new());
        for number in first..end {
            let part = (about.parts[number].clone(), [about.example, largest]);
            let model = Model::open((path, &package), number, part, (place, raw))?;
            if number + 1 < end {
                let made = about.parts[number].output.spec(largest)?;
                let made = Torch::get()?.empty((made.dtype(), made.shape().dims()), place)?;
                let address = made.address()?;
                between.push((made, address));
            }
            models.push(model);
        }
        Ok(Stage {
            config: *config,
            geometry,
            path: path_text,
            stream,
            models,
            between,
            guide: (first > 0).then(|| about.parts[first - 1].output.clone()),
            ends: end == count,
        })
    }

    /// What every part of the stage gets.
    fn base(&self, sizes: Sizes) -> Result<Vec<TensorSpec>, Failure> {
        let names = [LATENTS, "conditioning_embeds", "denoising_step_list"];
        let specs = names.map(|name| of_chunk(name, sizes, &self.geometry).transpose());
        specs.into_iter().flatten().collect()
    }

    /// Gives the next part what this one got.
    fn hand_on(
        &self,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
        sizes: Sizes,
    ) -> Result<(), Failure> {
        for spec in self.base(sizes)? {
            self.copy(input, &spec, output, spec.name())?;
        }
        Ok(())
    }

    fn copy(
        &self,
        input: &Payload<'_>,
        spec: &TensorSpec,
        output: &mut PayloadMut<'_>,
        to: &str,
    ) -> Result<(), Failure> {
        let (dtype, dims) = (spec.dtype(), spec.shape().dims());
        let Some(stream) = &self.stream else {
            let from = input.tensor(spec.name(), dtype, dims)?;
            output.tensor_mut(to, dtype, dims)?.copy_from_slice(from);
            return Ok(());
        };
        let from = input.device_tensor(spec.name(), dtype, dims)?;
        let to = output.device_tensor(to, dtype, dims)?;
        // SAFETY: two tensors of so many bytes in payloads of this call, which the host keeps until the stream has passed it.
        unsafe { Gpu::copy(stream, from, to, spec.bytes() as usize) }
    }

    /// Runs the parts.
    fn compute(
        &mut self,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
        sizes: Sizes,
    ) -> Result<(), Failure> {
        let is_on_device = self.stream.is_some();
        let raw = self.stream.as_ref().map_or(0, Stream::raw);
        if !is_on_device {
            Torch::get()?.use_threads(self.config.threads);
        }
        let last = self.models.len() - 1;
        let mut addresses = Vec::new();
        for (at, model) in self.models.iter_mut().enumerate() {
            addresses.clear();
            let specs = model.specs(sizes)?;
            let (made, taken) = specs
                .split_last()
                .ok_or_else(|| Failure::error("a part without tensors"))?;
            for spec in taken {
                let (name, dtype, dims) = (spec.name(), spec.dtype(), spec.shape().dims());
                addresses.push(match is_on_device {
                    _ if name == GUIDE && at > 0 => self.between[at - 1].1,
                    true => input.device_tensor(name, dtype, dims)?,
                    false => input
                        .tensor(name, dtype, dims)?
                        .as_ptr()
                        .expose_provenance() as u64,
                });
            }
            let (name, dtype, dims) = (made.name(), made.dtype(), made.shape().dims());
            addresses.push(match is_on_device {
                _ if at < last => self.between[at].1,
                true => output.device_tensor(name, dtype, dims)?,
                false => output
                    .tensor_mut(name, dtype, dims)?
                    .as_mut_ptr()
                    .expose_provenance() as u64,
            });
            // SAFETY: tensors of these types and shapes, of payloads that the host keeps until the stream has passed the call,
            // and memory of this session, which is freed behind the stream. Only the last is written.
            unsafe { model.run(&addresses, sizes, raw) }?;
        }
        Ok(())
    }
}

impl Session for Stage {
    fn layout(&self, shape: ChunkShape, _: u32) -> Result<Layout, Failure> {
        if shape.context_frames > 0 {
            return Err(Failure::invalid("a package looks at no context frames"));
        }
        let sizes = Sizes {
            frames: shape.frames,
            steps: shape.steps,
        };
        for model in &self.models {
            check_part(&self.path, &model.part, sizes, &self.geometry)?;
        }
        let mut inputs = self.base(sizes)?;
        let mut outputs = match self.ends {
            true => Vec::new(),
            false => inputs.clone(),
        };
        if let Some(guide) = &self.guide {
            inputs.push(guide.spec(sizes)?);
        }
        if let Some(model) = self.models.last() {
            outputs.push(model.part.output.spec(sizes)?);
        }
        Ok(Layout {
            inputs: Manifest::new(&inputs)?,
            outputs: Manifest::new(&outputs)?,
        })
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
            .spec(LATENTS)
            .and_then(|spec| spec.shape().dims().first().copied());
        let frames = frames
            .and_then(|frames| u32::try_from(frames).ok())
            .unwrap_or(0);
        if !(1..=self.config.max_frames).contains(&frames) {
            let most = self.config.max_frames;
            return Err(Failure::invalid(format!(
                "{LATENTS} holds {frames} frames, this session takes 1 to {most}"
            )));
        }
        let sizes = Sizes {
            frames,
            steps: plan.num_denoise_steps,
        };
        match (sizes.steps, self.ends && self.guide.is_none()) {
            (0, true) => {
                let latents = of_chunk(LATENTS, sizes, &self.geometry)?;
                let latents = latents.ok_or_else(|| Failure::error("a chunk without latents"))?;
                self.copy(input, &latents, output, RESULT)?;
            }
            (0, false) => {
                return Err(Failure::invalid(
                    "zero steps have no parts; put the stage on one rank",
                ));
            }
            _ => {
                if !self.ends {
                    self.hand_on(input, output, sizes)?;
                }
                self.compute(input, output, sizes)?;
            }
        }
        let passes = pass_range(
            sizes.steps,
            self.config.part as usize,
            self.config.parts as usize,
        );
        Ok(passes.len() as u32 + u32::from(plan.do_kv_recompute))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let is_idle = |stream: &Stream| stream.wait_until_idle(PATIENCE).is_ok();
        if !self.stream.as_ref().is_none_or(is_idle) {
            // A stream that hangs may still use them.
            mem::forget((mem::take(&mut self.models), mem::take(&mut self.between)));
        }
    }
}

/// The largest chunk of a session.
fn most(config: &SessionConfig, example: Sizes) -> Sizes {
    Sizes {
        frames: config.max_frames,
        ..example
    }
}

/// A tensor of a chunk, which the source makes or the sink takes; `None`: there is none of this name.
fn of_chunk(name: &str, sizes: Sizes, geometry: &Geometry) -> Result<Option<TensorSpec>, Failure> {
    let tokens = [sizes.frames.into(), geometry.tokens as u64, TOKEN as u64];
    let (dtype, dims) = match name {
        LATENTS | RESULT => (DType::Bf16, &tokens[..]),
        "conditioning_embeds" => (DType::Bf16, &[geometry.planes.len() as u64][..]),
        "denoising_step_list" => (DType::I64, &[sizes.steps.into()][..]),
        _ => return Ok(None),
    };
    Ok(Some(TensorSpec::new(name, dtype, dims)?))
}

/// Refuses a package whose tensors are not those of the session.
fn fits(
    path: &str,
    about: &About,
    config: &SessionConfig,
    geometry: &Geometry,
) -> Result<(), Failure> {
    let count = about.parts.len();
    if config.parts as usize > count {
        return Err(Failure::unsupported(format!(
            "{path} has {count} parts, and phase_b stands in the pipeline {} times; export it with parts={}, or name fewer ranks",
            config.parts, config.parts
        )));
    }
    let sizes = most(config, about.example);
    for (at, part) in about.parts.iter().enumerate() {
        check_part(path, part, sizes, geometry)?;
        let is_last = at + 1 == count;
        let (made, name) = (
            part.output.spec(sizes)?,
            if is_last { RESULT } else { GUIDE },
        );
        let next = about
            .parts
            .get(at + 1)
            .map(|next| next.inputs.iter().find(|of| of.name == GUIDE));
        let next = next.flatten().map(|guide| guide.spec(sizes)).transpose()?;
        if made.name() != name || (!is_last && next.is_some_and(|next| next != made)) {
            return Err(Failure::invalid(format!(
                "{path}: part {at} makes {} where {name} is wanted; export it with output=\"{RESULT}\"",
                made.name()
            )));
        }
    }
    Ok(())
}

/// Refuses a part whose tensors are not those of a chunk of these sizes.
fn check_part(path: &str, part: &Part, sizes: Sizes, geometry: &Geometry) -> Result<(), Failure> {
    for tensor in part
        .inputs
        .iter()
        .chain([&part.output])
        .filter(|tensor| tensor.name != GUIDE)
    {
        let Some(wanted) = of_chunk(&tensor.name, sizes, geometry)? else {
            return Err(Failure::invalid(format!(
                "{path} takes a tensor {}, and phase_b gets {LATENTS}, conditioning_embeds and denoising_step_list; export it with an \
                 example of these (pp_pipeline.Video)",
                tensor.name
            )));
        };
        let has = tensor.spec(sizes)?;
        if has != wanted {
            // Of another size it is only not what is wanted here.
            let status = match has.dtype() == wanted.dtype() {
                true => Status::Unsupported,
                false => Status::InvalidArgument,
            };
            let say = |of: &TensorSpec| format!("{:?} {}", of.dtype(), of.shape());
            return Err(Failure::new(
                status,
                format!(
                    "{path} is for {} {}, and a chunk of this film has {}; export it with an example of such a chunk \
                     (pp_pipeline.Video)",
                    tensor.name,
                    say(&has),
                    say(&wanted)
                ),
            ));
        }
    }
    Ok(())
}
