//! The plan of the shipped pipeline: a few frames of video, denoised step by step.

use core::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Plan, PlanError};
use crate::dtype::DType;
use crate::manifest::Manifest;
use crate::pipeline::StageSpec;

/// The names of the stages whose tensors the plan knows.
const ENCODE: &str = "encode";
const PHASE_B: &str = "phase_b";

const MAX_SIDE: u32 = 1 << 16;
const MAX_STEPS: u32 = 1024;

/// Most gaps among the frames before a chunk that a plan tells of, so context is of at most one frame more where there are gaps.
pub const MAX_CONTEXT_GAPS: usize = 8;

/// The fields of a [`VideoPlan`], not checked yet.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct VideoPlanParts {
    /// Height of a frame in pixels, 1 to 65536.
    pub height: u32,
    /// Width of a frame in pixels, 1 to 65536.
    pub width: u32,
    /// The first frame of the chunk, counted over all frames of the stream, also those that are missing.
    pub current_start_frame: u64,
    /// Whether `phase_b` first runs over `context_frames` to rebuild its cache.
    pub do_kv_recompute: bool,
    /// Number of denoising steps, 0 to 1024; with 0 the output is the input.
    pub num_denoise_steps: u32,
    /// Must be `num_denoise_steps`, and one more with `do_kv_recompute`.
    pub expected_generator_calls: u32,
    /// Whether the cache is made afresh.
    pub init_cache: bool,
    /// Whether the cache of keys and values is emptied first.
    pub reset_kv_cache: bool,
    /// Whether the cross-attention cache is emptied first.
    pub reset_crossattn_cache: bool,
    /// Seed of everything random in the chunk.
    pub base_seed: u64,
    /// Weight of the cache against the chunk; finite.
    pub kv_cache_attention_bias: f32,
    /// Scale of the noise; finite and not negative.
    pub noise_scale: f32,
    /// Frames of the stream that are missing between the chunk before and this one; in front of the first chunk, too.
    pub skipped_frames: u32,
    /// Frames that are missing in front of each of the last frames before the chunk, the newest first. Frames before the newest
    /// cut do not count. All gaps together are at most `current_start_frame`.
    pub context_skipped: [u32; 8], // MAX_CONTEXT_GAPS: with the name in its place rustc 1.95 breaks closures that copy parts
}

impl VideoPlanParts {
    /// For the first chunk of a stream: `steps` passes, no recompute, everything fresh.
    #[must_use]
    pub const fn first(width: u32, height: u32, steps: u32) -> Self {
        Self {
            height,
            width,
            current_start_frame: 0,
            do_kv_recompute: false,
            num_denoise_steps: steps,
            expected_generator_calls: steps,
            init_cache: true,
            reset_kv_cache: false,
            reset_crossattn_cache: false,
            base_seed: 0,
            kv_cache_attention_bias: 0.0,
            noise_scale: 1.0,
            skipped_frames: 0,
            context_skipped: [0; MAX_CONTEXT_GAPS],
        }
    }

    /// For a later chunk that starts at frame `start`, with or without recompute, where no frame is missing.
    #[must_use]
    pub const fn following(self, start: u64, recompute: bool) -> Self {
        let mut plan = self;
        plan.current_start_frame = start;
        plan.do_kv_recompute = recompute;
        plan.expected_generator_calls = plan.planned_calls();
        plan.init_cache = false;
        plan.reset_kv_cache = false;
        plan.reset_crossattn_cache = false;
        plan.skipped_frames = 0;
        plan.context_skipped = [0; MAX_CONTEXT_GAPS];
        plan
    }

    /// For the chunk behind this one of `frames` frames, where `skipped` frames of the stream are missing between the two.
    #[must_use]
    pub fn behind(self, frames: u32, skipped: u32, recompute: bool) -> Self {
        let start = self.current_start_frame + u64::from(frames) + u64::from(skipped);
        let mut plan = self.following(start, recompute);
        plan.skipped_frames = skipped;
        // What lies before a cut is no context.
        if !self.init_cache && !self.reset_kv_cache {
            let gaps = [self.skipped_frames]
                .into_iter()
                .chain(self.context_skipped);
            let first = frames.saturating_sub(1) as usize;
            let places = plan.context_skipped.iter_mut().skip(first);
            places.zip(gaps).for_each(|(place, gap)| *place = gap);
        }
        plan
    }

    /// The numbers of the frames before the chunk that are not missing, the newest first. Those before the oldest gap that the
    /// plan tells of follow each other, down to frame 0.
    pub fn frames_before(&self) -> impl Iterator<Item = u64> {
        let gaps = core::iter::once(self.skipped_frames).chain(self.context_skipped);
        let mut gaps = gaps.chain(core::iter::repeat(0));
        core::iter::successors(Some(self.current_start_frame), move |frame| {
            let gap = gaps.next().unwrap_or(0);
            frame.checked_sub(1 + u64::from(gap))
        })
        .skip(1)
    }

    /// What `expected_generator_calls` must be.
    #[must_use]
    pub const fn planned_calls(&self) -> u32 {
        self.num_denoise_steps
            .saturating_add(self.do_kv_recompute as u32)
    }
}

/// What is asked of the stages for one chunk of video.
///
/// `encode` makes `latents_in` bf16, `conditioning_embeds` bf16, `denoising_step_list` i64 of length
/// `num_denoise_steps`, and `context_frames` bf16 exactly when `do_kv_recompute`. A part of `phase_b` that is not the
/// last hands the same on, and behind the others its `guide`, f32 or bf16; so does the last part in all laps but the last
/// one. Then it makes `latents_out` bf16. Frames whose samples have 10 bits are f16 in place of bf16.
///
/// Every stage between source and sink runs its share of the passes, and rebuilds its cache once a lap with
/// `do_kv_recompute`: each is a call. The sink makes one call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VideoPlan(VideoPlanParts);

impl VideoPlan {
    /// The plan made of these parts.
    ///
    /// # Errors
    /// [`PlanError::Field`] names the field, its value and the rule.
    pub fn new(parts: VideoPlanParts) -> Result<Self, PlanError> {
        for (field, side) in [("height", parts.height), ("width", parts.width)] {
            if !(1..=MAX_SIDE).contains(&side) {
                return Err(PlanError::field(field, side, format!("1 to {MAX_SIDE}")));
            }
        }
        let steps = parts.num_denoise_steps;
        if steps > MAX_STEPS {
            let rule = format!("at most {MAX_STEPS}");
            return Err(PlanError::field("num_denoise_steps", steps, rule));
        }
        let calls = parts.expected_generator_calls;
        if calls != parts.planned_calls() {
            let rule = format!(
                "{steps} steps {} recompute take {}",
                if parts.do_kv_recompute {
                    "with"
                } else {
                    "without"
                },
                parts.planned_calls()
            );
            return Err(PlanError::field("expected_generator_calls", calls, rule));
        }
        let gaps = parts.context_skipped.iter().map(|gap| u64::from(*gap));
        let gaps = gaps.sum::<u64>() + u64::from(parts.skipped_frames);
        if gaps > parts.current_start_frame {
            let rule = format!(
                "with the gaps of context_skipped at most current_start_frame, {}",
                parts.current_start_frame
            );
            let skipped = parts.skipped_frames;
            return Err(PlanError::field("skipped_frames", skipped, rule));
        }
        let bias = parts.kv_cache_attention_bias;
        if !bias.is_finite() {
            return Err(PlanError::field("kv_cache_attention_bias", bias, "finite"));
        }
        let scale = parts.noise_scale;
        if !scale.is_finite() || scale < 0.0 {
            return Err(PlanError::field(
                "noise_scale",
                scale,
                "finite and not negative",
            ));
        }
        Ok(Self(parts))
    }
}

impl Plan for VideoPlan {
    const NAME: &'static str = "video";
    const VERSION: u16 = 2;
    type Parts = VideoPlanParts;

    fn from_parts(parts: VideoPlanParts) -> Result<Self, PlanError> {
        Self::new(parts)
    }

    fn parts(&self) -> &VideoPlanParts {
        &self.0
    }

    fn calls(&self, stage: &StageSpec, laps: Range<u16>, of: u16) -> u32 {
        let count = laps.len() as u32;
        if stage.is_sink {
            return count;
        }
        // As many as `pass_range` has in each lap: lap k of part i of n is part kn + i.
        let (steps, shares) = (self.0.num_denoise_steps, stage.parts * usize::from(of));
        let (each, longer) = (steps as usize / shares, steps as usize % shares);
        let longer_laps = longer.saturating_sub(stage.part).div_ceil(stage.parts);
        let passes_before = |lap: u16| each * usize::from(lap) + longer_laps.min(lap.into());
        let passes = passes_before(laps.end) - passes_before(laps.start);
        passes as u32 + count * u32::from(self.0.do_kv_recompute)
    }

    fn steps(&self) -> u16 {
        // The constructor allows no more than `MAX_STEPS`.
        self.0.num_denoise_steps as u16
    }

    fn start_frame(&self) -> u64 {
        self.0.current_start_frame
    }

    fn check(
        &self,
        stage: &StageSpec,
        is_last_lap: bool,
        tensors: &Manifest,
    ) -> Result<(), PlanError> {
        let is_last = is_last_lap && stage.part + 1 == stage.parts;
        match &*stage.name {
            PHASE_B if is_last => {
                tensors.expect_tensors(&[("latents_out", latents(tensors, "latents_out"))])
            }
            PHASE_B => self.check_between(tensors, true),
            ENCODE => self.check_between(tensors, false),
            // A stage of a plugin names its tensors as it likes, and checks what it gets.
            _ => Ok(()),
        }
    }
}

impl VideoPlan {
    /// Checks what goes into `phase_b`, or from one part of it to the next, with the guide.
    fn check_between(&self, tensors: &Manifest, has_guide: bool) -> Result<(), PlanError> {
        // As the kernels hold it: f32 on a processor, bf16 on a GPU.
        let guide = match tensors.get("guide") {
            Some((_, spec)) if spec.dtype() == DType::Bf16 => DType::Bf16,
            _ => DType::F32,
        };
        let frames = latents(tensors, "latents_in");
        let wanted = [
            Some(("latents_in", frames)),
            Some(("conditioning_embeds", DType::Bf16)),
            Some(("denoising_step_list", DType::I64)),
            (self.0.do_kv_recompute).then_some(("context_frames", frames)),
            has_guide.then_some(("guide", guide)),
        ];
        tensors.expect_each(wanted.into_iter().flatten())?;
        tensors.expect_shape("denoising_step_list", &[self.0.num_denoise_steps.into()])
    }
}

/// The type of frames: f16 holds samples of 10 bits, bf16 those of 8.
fn latents(tensors: &Manifest, name: &str) -> DType {
    match tensors.get(name) {
        Some((_, spec)) if spec.dtype() == DType::F16 => DType::F16,
        _ => DType::Bf16,
    }
}

/// The passes of one part of a stage that makes `passes` in all: as even as they can be, the longer ones first.
///
/// # Panics
/// If there are no parts.
#[must_use]
pub fn pass_range(passes: u32, part: usize, parts: usize) -> Range<u32> {
    let (passes_each, longer) = (passes as usize / parts, passes as usize % parts);
    let cut = |at: usize| (passes_each * at + at.min(longer)) as u32;
    cut(part)..cut(part + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: VideoPlanParts = VideoPlanParts {
        kv_cache_attention_bias: -1.0,
        noise_scale: 0.0,
        ..VideoPlanParts::first(16, 16, 0)
    };

    #[test]
    fn every_field_at_the_edge_of_its_bound_is_taken() {
        let mut largest = GOOD;
        (largest.height, largest.width) = (MAX_SIDE, 1);
        (largest.num_denoise_steps, largest.expected_generator_calls) = (MAX_STEPS, MAX_STEPS + 1);
        largest.do_kv_recompute = true;
        largest.noise_scale = f32::MAX;
        (largest.skipped_frames, largest.context_skipped) = (u32::MAX, [u32::MAX; _]);
        largest.current_start_frame = 9 * u64::from(u32::MAX);
        for parts in [GOOD, largest] {
            assert_eq!(VideoPlan::new(parts).unwrap().parts(), &parts);
        }
    }

    #[test]
    fn parts_share_all_passes_and_the_longer_come_first() {
        for (passes, parts, expected) in [
            (7, 5, &[2, 2, 1, 1, 1][..]),
            (4, 2, &[2, 2]),
            (1, 3, &[1, 0, 0]),
            (MAX_STEPS, 1, &[1024]),
        ] {
            let ranges: Vec<_> = (0..parts).map(|at| pass_range(passes, at, parts)).collect();
            let lengths: Vec<_> = ranges.iter().map(ExactSizeIterator::len).collect();
            assert_eq!(lengths, expected);
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!((ranges[0].start, ranges[parts - 1].end), (0, passes));
        }
    }

    #[test]
    fn laps_share_the_passes_as_so_many_parts_would() {
        for (steps, ring, laps) in [
            (7, "b@1", 3),
            (7, "b@1,b@2", 3),
            (5, "b@1,b@2,b@1", 1),
            (2, "b@1,b@2", 2),
        ] {
            let text = format!("a@0,({ring})*{laps},c@0");
            let pipeline: crate::Pipeline = text.parse().unwrap();
            let (_, [between @ .., sink]) = pipeline.stages().split_first().unwrap() else {
                unreachable!()
            };
            for recompute in [false, true] {
                let parts = VideoPlanParts::first(16, 16, steps).following(1, recompute);
                let plan = VideoPlan::new(parts).unwrap();
                assert_eq!(plan.calls(sink, 0..1, 1), 1);
                for stage in between {
                    let of_lap = |lap: u16| {
                        let share = usize::from(lap) * stage.parts + stage.part;
                        let passes = pass_range(steps, share, stage.parts * usize::from(laps));
                        passes.len() as u32 + u32::from(recompute)
                    };
                    for (from, to) in (0..=laps).flat_map(|to| (0..=to).map(move |from| (from, to)))
                    {
                        let expected: u32 = (from..to).map(of_lap).sum();
                        assert_eq!(
                            plan.calls(stage, from..to, laps),
                            expected,
                            "{text} {from}..{to}"
                        );
                    }
                }
            }
        }
    }

    /// A stream in which frames are missing is played twice: by plans, and by the numbers that are left.
    #[test]
    fn frames_before_a_chunk_are_those_that_were_not_skipped() {
        let script = [
            (3, 0),
            (1, 2),
            (1, 0),
            (2, 5),
            (4, 1),
            (1, 1),
            (1, 1),
            (1, 100_000),
        ];
        let first = VideoPlanParts::first(16, 16, 1);
        let (mut plan, mut sent) = (first, Vec::new());
        let mut frames = 2;
        sent.extend([0, 1]);
        for (at, (next, skipped)) in script.into_iter().enumerate() {
            plan = plan.behind(frames, skipped, false);
            assert_eq!(VideoPlan::new(plan).unwrap().parts(), &plan);
            let before: Vec<_> = plan.frames_before().take(1 + MAX_CONTEXT_GAPS).collect();
            let newest: Vec<_> = sent.iter().rev().copied().take(before.len()).collect();
            assert_eq!(before, newest, "chunk {at}");
            frames = next;
            sent.extend((0..u64::from(next)).map(|frame| plan.current_start_frame + frame));
        }
        let cut = VideoPlanParts {
            reset_kv_cache: true,
            ..plan
        };
        let behind = cut.behind(1, 3, true);
        assert_eq!((behind.skipped_frames, behind.context_skipped), (3, [0; _]));
    }

    #[test]
    fn field_outside_its_bound_is_named() {
        type Change = fn(&mut VideoPlanParts);
        let changes: [(&str, Change); 12] = [
            ("height", |parts| parts.height = 0),
            ("height", |parts| parts.height = MAX_SIDE + 1),
            ("width", |parts| parts.width = 0),
            ("num_denoise_steps", |parts| {
                parts.num_denoise_steps = MAX_STEPS + 1;
                parts.expected_generator_calls = MAX_STEPS + 1;
            }),
            ("expected_generator_calls", |parts| {
                parts.expected_generator_calls = 1
            }),
            ("expected_generator_calls", |parts| {
                parts.do_kv_recompute = true
            }),
            ("kv_cache_attention_bias", |parts| {
                parts.kv_cache_attention_bias = f32::NAN
            }),
            ("kv_cache_attention_bias", |parts| {
                parts.kv_cache_attention_bias = f32::INFINITY
            }),
            ("noise_scale", |parts| parts.noise_scale = f32::INFINITY),
            ("noise_scale", |parts| parts.noise_scale = -1.0),
            ("skipped_frames", |parts| parts.skipped_frames = 1),
            ("skipped_frames", |parts| {
                (parts.skipped_frames, parts.context_skipped[7]) = (2, 1);
                parts.current_start_frame = 2;
            }),
        ];
        for (name, change) in changes {
            let mut parts = GOOD;
            change(&mut parts);
            let error = VideoPlan::new(parts).unwrap_err();
            let named = matches!(error, PlanError::Field { field, .. } if field == name);
            assert!(named, "{name}: {error}");
        }
    }
}
