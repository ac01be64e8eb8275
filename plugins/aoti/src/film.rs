//! Which tensors a chunk of a film has, and whether a package takes and makes these.
//!
//! Between the stages travel the tensors of the built-in kernels. Where a package stands in place of `encode` or `decode`, the
//! latents beside it have its shape, in every chunk with steps.

use std::path::Path;

use pp_kernels::denoise::geometry::{Geometry, TOKEN};
use pp_kernels::{DType, Failure, SessionConfig, StageKind, Status, TensorSpec};

use crate::package::{About, Package, Part, Sizes, Tensor};

/// The frames as the built-in `encode` makes tokens of them, which a package in its place takes and one for `decode` makes.
pub(crate) const FRAMES: &str = "frames";
pub(crate) const LATENTS: &str = "latents_in";
pub(crate) const RESULT: &str = "latents_out";
/// What goes from part to part.
pub(crate) const GUIDE: &str = "guide";
/// What the built-in `encode` makes beside the latents.
pub(crate) const BESIDE: [&str; 2] = ["conditioning_embeds", "denoising_step_list"];

/// The stages, which are also the arguments that give their packages.
pub(crate) const STAGES: [&str; 3] = ["encode", "phase_b", "decode"];

/// What a package of a stage takes beside what is in [`BESIDE`], and makes.
fn ends_of(kind: StageKind) -> [&'static str; 2] {
    match kind {
        StageKind::Source => [FRAMES, LATENTS],
        StageKind::Middle => [LATENTS, RESULT],
        StageKind::Sink => [RESULT, FRAMES],
    }
}

/// The film of a session.
pub(crate) struct Film {
    kind: StageKind,
    geometry: Geometry,
    max_frames: u32,
    /// What a package in place of `encode` makes, and what one in place of `decode` takes.
    latents: [Option<Tensor>; 2],
}

impl Film {
    /// The film of a session of a stage; `args` name the packages of the stages.
    ///
    /// # Errors
    /// A package in place of `encode` or `decode` cannot be read, or is for another stage.
    pub(crate) fn of(
        kind: StageKind,
        config: &SessionConfig,
        args: &[(&str, &str)],
    ) -> Result<Film, Failure> {
        let about = |stage: &str| {
            let named = args.iter().find(|(key, _)| *key == stage);
            named
                .map(|(_, path)| {
                    Package::open(Path::new(path))?
                        .about()
                        .map(|of| (*path, of))
                })
                .transpose()
        };
        let takes = |part: &Part| part.inputs.iter().find(|of| of.name == RESULT).cloned();
        let made = about(STAGES[0])?.map(|(path, of)| {
            let made = of.parts.last().map(|part| part.output.clone());
            made.filter(|made| made.name == LATENTS)
                .ok_or_else(|| of_another_stage(path, StageKind::Source))
        });
        let taken = about(STAGES[2])?.map(|(path, of)| {
            let taken = of.parts.first().and_then(takes);
            taken.ok_or_else(|| of_another_stage(path, StageKind::Sink))
        });
        Ok(Film {
            kind,
            geometry: Geometry::of(config),
            max_frames: config.max_frames,
            latents: [made.transpose()?, taken.transpose()?],
        })
    }

    /// The largest chunk, of as many steps as the example, and of one where that has none.
    pub(crate) fn most(&self, example: Sizes) -> Sizes {
        Sizes {
            frames: self.max_frames,
            steps: example.steps.max(1),
        }
    }

    /// A tensor of a chunk, or the frames; `None`: there is none of this name.
    pub(crate) fn spec(&self, name: &str, sizes: Sizes) -> Result<Option<TensorSpec>, Failure> {
        let frames = u64::from(sizes.frames);
        let tokens = [frames, self.geometry.tokens as u64, TOKEN as u64];
        let packages = match name {
            LATENTS => &self.latents[0],
            RESULT => &self.latents[1],
            _ => &None,
        };
        if let Some(latents) = packages.as_ref().filter(|_| sizes.steps > 0) {
            let of = latents.spec(sizes)?;
            let rest = of.shape().dims().get(1..).unwrap_or_default();
            let dims: Vec<u64> = [frames].iter().chain(rest).copied().collect();
            return Ok(Some(TensorSpec::new(name, DType::Bf16, &dims)?));
        }
        let (dtype, dims) = match name {
            FRAMES | LATENTS | RESULT => (DType::Bf16, &tokens[..]),
            "conditioning_embeds" => (DType::Bf16, &[self.geometry.planes.len() as u64][..]),
            "denoising_step_list" => (DType::I64, &[sizes.steps.into()][..]),
            _ => return Ok(None),
        };
        Ok(Some(TensorSpec::new(name, dtype, dims)?))
    }

    /// These tensors of a chunk.
    pub(crate) fn specs(&self, names: &[&str], sizes: Sizes) -> Result<Vec<TensorSpec>, Failure> {
        let specs = names.iter().map(|name| self.spec(name, sizes).transpose());
        specs.flatten().collect()
    }

    /// Refuses a package whose tensors are not those of the session.
    pub(crate) fn check(
        &self,
        path: &str,
        about: &About,
        config: &SessionConfig,
    ) -> Result<(), Failure> {
        let count = about.parts.len();
        if config.parts as usize > count {
            return Err(Failure::unsupported(format!(
                "{path} has {count} parts, and phase_b stands in the pipeline {} times; export it with parts={}, or name fewer \
                 ranks",
                config.parts, config.parts
            )));
        }
        let sizes = self.most(about.example);
        let [_, result] = ends_of(self.kind);
        for (at, part) in about.parts.iter().enumerate() {
            let is_last = at + 1 == count;
            let made = part.output.spec(sizes)?;
            if made.name() != if is_last { result } else { GUIDE } {
                return Err(of_another_stage(path, self.kind));
            }
            if !is_last && part.output.has_steps() {
                // The memory for it is made once, before any chunk.
                return Err(Failure::invalid(format!(
                    "{path}: the size of the guide that part {at} makes depends on the steps of a chunk, and may depend on its \
                     frames alone; write it again with pp_pipeline.export"
                )));
            }
            self.check_part(path, part, sizes)?;
            let next = about
                .parts
                .get(at + 1)
                .map(|next| next.inputs.iter().find(|of| of.name == GUIDE));
            let next = next.flatten().map(|guide| guide.spec(sizes)).transpose()?;
            if next.is_some_and(|next| next != made) {
                return Err(Failure::invalid(format!(
                    "{path}: part {} takes another guide than part {at} makes; write it again with pp_pipeline.export",
                    at + 1
                )));
            }
        }
        Ok(())
    }

    /// Refuses a part whose tensors are not those of a chunk of these sizes.
    pub(crate) fn check_part(&self, path: &str, part: &Part, sizes: Sizes) -> Result<(), Failure> {
        let stage = STAGES[self.kind as usize];
        let [first, result] = ends_of(self.kind);
        let gets = match self.kind {
            StageKind::Sink => &[first][..],
            _ => &[first, BESIDE[0], BESIDE[1]],
        };
        let tensors = part.inputs.iter().chain([&part.output]);
        for tensor in tensors.filter(|tensor| tensor.name != GUIDE) {
            let name = &*tensor.name;
            let wanted = self.spec(name, sizes)?;
            let Some(wanted) = wanted.filter(|_| name == result || gets.contains(&name)) else {
                return Err(Failure::invalid(format!(
                    "{path} takes a tensor {name}, and {stage} gets {}; export it with an example of these (pp_pipeline.Video)",
                    gets.join(", ")
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
                        "{path} is for {name} {}, and a chunk of this film has {}; export it with an example of such a chunk \
                         (pp_pipeline.Video)",
                        say(&has),
                        say(&wanted)
                    ),
                ));
            }
        }
        Ok(())
    }
}

fn of_another_stage(path: &str, kind: StageKind) -> Failure {
    let [takes, makes] = ends_of(kind);
    let stage = STAGES[kind as usize];
    Failure::invalid(format!(
        "{path} is no package for {stage}, which takes {takes} and makes {makes}; export it with an example whose first tensor is \
         {takes}"
    ))
}

#[cfg(test)]
mod tests {
    use pp_kernels::Chroma;

    use super::*;

    /// A package of two parts, whose guide has these dimensions.
    fn check(guide: &str) -> Result<(), Failure> {
        let config = SessionConfig::host(64, 64, Chroma::C420, 4);
        let film = Film::of(StageKind::Middle, &config, &[])?;
        let latents = film.spec(LATENTS, film.most(Sizes::default()))?.unwrap();
        let [_, tokens, width] = *latents.shape().dims() else {
            panic!("{latents}");
        };
        let tensor = |name: &str, dims: &str| {
            format!(r#"{{"name": "{name}", "dtype": "bf16", "dims": {dims}}}"#)
        };
        let dims = format!(r#"["frames", {tokens}, {width}]"#);
        let part = |input: String, output: String| {
            format!(r#"{{"inputs": [{input}], "output": {output}, "tolerance": 0.01}}"#)
        };
        let text = format!(
            r#"{{"format": 1, "torch": "2.15.0", "device": "cpu", "example": {{"frames": 2, "steps": 2}}, "parts": [{}, {}]}}"#,
            part(tensor(LATENTS, &dims), tensor(GUIDE, guide)),
            part(tensor(GUIDE, guide), tensor(RESULT, &dims)),
        );
        let about: About = serde_json::from_str(&text).unwrap();
        film.check("a.pt2", &about, &config)
    }

    #[test]
    fn a_guide_whose_size_depends_on_steps_is_refused() {
        check(r#"["frames", 8]"#).unwrap();
        let error = check(r#"["frames", "steps"]"#).unwrap_err();
        assert!(
            error
                .message
                .contains("a.pt2: the size of the guide that part 0 makes depends on the steps"),
            "{error}"
        );
    }
}
