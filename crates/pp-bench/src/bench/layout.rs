//! Where the stages of `pp bench overlap` stand, how long each works on a chunk, and how many chunks there are.

use std::time::Duration;

use pp_contract::Pipeline;
use pp_contract::pipeline::{Laps, StageSpec};
use pp_job::Error;

use super::against;
use crate::args::OverlapArgs;

/// Where the stages stand, and how long each works on a chunk.
pub(super) struct Stages {
    pub(super) pipeline: Pipeline,
    /// In milliseconds, that of the source first.
    pub(super) ms: Vec<f64>,
    pub(super) depth: u32,
}

impl Stages {
    pub(super) fn of(args: &OverlapArgs) -> Result<Self, Error> {
        // Rank 0 builds in no time.
        let pair = || vec![0.0, args.phase_b_ms, args.decode_ms];
        let ms = args.stages.clone().unwrap_or_else(pair);
        let chain = || {
            let stages = (0..ms.len()).map(|at| format!("s{at}@{at}"));
            stages.collect::<Vec<_>>().join(" -> ")
        };
        if let [only] = ms[..] {
            return Err(Error::Usage(format!(
                "--stages {only}: a pipeline has a source and a sink; give two lengths or more"
            )));
        }
        let text = match (&args.pipeline, &args.stages) {
            (Some(text), _) => text.clone(),
            (None, Some(_)) => chain(),
            (None, None) => "s0@0 -> s1@1 -> s2@0".to_owned(),
        };
        let pipeline: Pipeline = text.parse()?;
        let mut rings = pipeline.rings().iter();
        if let Some(ring) = rings.find(|ring| ring.laps == Laps::Steps) {
            let name = &pipeline.stages()[ring.first].name;
            return Err(Error::Usage(format!(
                "the pipeline {pipeline}: {name} stands in a ring of *steps, and this benchmark has no denoising steps; \
                 write the number of laps, as in *2"
            )));
        }
        if let Some(group) = pipeline.stages().iter().find(|stage| stage.ranks.len() > 1) {
            let name = &group.name;
            return Err(Error::Usage(format!(
                "the pipeline {pipeline}: no stage of this benchmark can be run by a group of ranks; give {name} one rank"
            )));
        }
        let is_there = |name: String| pipeline.stages().iter().any(|s| *s.name == *name);
        if let Some(at) = (0..ms.len()).find(|at| !is_there(format!("s{at}"))) {
            let last = ms.len() - 1;
            return Err(Error::Usage(format!(
                "the pipeline {pipeline} has no stage s{at}; there are durations for s0 to s{last}: name all of them, \
                 or give other --stages"
            )));
        }
        let depth = args.depth.unwrap_or(pipeline.default_depth());
        Ok(Self {
            depth: if args.sync { 1 } else { depth },
            pipeline,
            ms,
        })
    }

    fn ms_of(&self, stage: &StageSpec) -> f64 {
        let at = stage.name.trim_start_matches('s').parse().ok();
        at.and_then(|at: usize| self.ms.get(at))
            .copied()
            .unwrap_or_default()
    }

    pub(super) fn time_of(&self, stage: &StageSpec) -> Duration {
        Duration::from_secs_f64(self.ms_of(stage) / 1e3)
    }

    /// What the stages of the busiest rank take for a chunk.
    pub(super) fn longest_ms(&self) -> f64 {
        let of_rank = |rank| {
            let stages = self.pipeline.stages_at(rank);
            let times = stages.map(|(at, stage)| {
                let laps = match self.pipeline.ring_at(at).map(|ring| ring.laps) {
                    Some(Laps::Fixed(laps)) => laps,
                    _ => 1,
                };
                self.ms_of(stage) * f64::from(laps)
            });
            times.sum()
        };
        let ranks = self.pipeline.world_size().ranks();
        ranks.map(of_rank).fold(0.0, f64::max)
    }
}

/// Enough chunks for about two seconds, within reason.
pub(super) fn chunks(args: &OverlapArgs, stages: &Stages) -> u64 {
    args.chunks.unwrap_or_else(|| {
        if args.against.is_some() {
            return against::chunks();
        }
        let touched = if args.touch {
            args.bytes as f64 / 8e6
        } else {
            0.0
        };
        let period_ms = stages.longest_ms().max(touched).max(0.02);
        ((2000.0 / period_ms) as u64).clamp(60, 20_000)
    })
}
