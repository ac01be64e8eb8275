//! A session of `phase_b`.
//!
//! A chunk goes through the whole package once, however many steps its plan has: the steps are the model's, which may read their
//! list. With zero steps the chunk is copied. Of a package of `n` parts, the part `i` of `m` of the stage runs those that
//! `pass_range` gives it. What one part makes, the next one gets as `guide`.

use std::path::Path;

use pp_kernels::{
    ChunkShape, Collectives, Failure, Layout, Manifest, Payload, PayloadMut, Session,
    SessionConfig, VideoPlanParts, pass_range,
};

use crate::film::{BESIDE, Film, LATENTS, RESULT};
use crate::package::Sizes;
use crate::parts::Parts;

/// What every part of the stage gets.
const BASE: [&str; 3] = [LATENTS, BESIDE[0], BESIDE[1]];

/// A session.
pub(crate) struct Stage {
    config: SessionConfig,
    parts: Parts,
}

impl Stage {
    /// Opens the share of a session, and computes its example.
    ///
    /// # Errors
    /// Those of [`Parts::open`].
    pub(crate) fn open(path: &Path, film: Film, config: &SessionConfig) -> Result<Stage, Failure> {
        Ok(Stage {
            config: *config,
            parts: Parts::open(path, film, config)?,
        })
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
        let film = &self.parts.film;
        let (ends, is_whole) = self.parts.are_whole();
        let mut inputs = film.specs(&BASE, sizes)?;
        if is_whole && sizes.steps == 0 {
            return Ok(Layout {
                inputs: Manifest::new(&inputs)?,
                outputs: Manifest::new(&film.specs(&[RESULT], sizes)?)?,
            });
        }
        let mut outputs = match ends {
            true => Vec::new(),
            false => inputs.clone(),
        };
        if let Some(guide) = self.parts.guide() {
            inputs.push(guide.spec(sizes)?);
        }
        outputs.extend(self.parts.made(sizes)?);
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
        let (ends, is_whole) = self.parts.are_whole();
        // What a part gets, the next one gets, too; with zero steps the chunk is the result.
        let (names, copies): (&[_], fn(&str) -> &str) = match (sizes.steps, is_whole) {
            (0, true) => (&BASE[..1], |_| RESULT),
            (0, false) => {
                return Err(Failure::invalid(
                    "zero steps have no parts; put the stage on one rank",
                ));
            }
            _ if ends => (&[], |name| name),
            _ => (&BASE, |name| name),
        };
        for spec in self.parts.film.specs(names, sizes)? {
            let to = copies(spec.name());
            self.parts.copy(input, &spec, output, to)?;
        }
        if sizes.steps > 0 {
            self.parts.compute(input, output, sizes)?;
        }
        let passes = pass_range(
            sizes.steps,
            self.config.part as usize,
            self.config.parts as usize,
        );
        Ok(passes.len() as u32 + u32::from(plan.do_kv_recompute))
    }
}
