//! The stages of a model, as the report of a training has them.

use std::path::{Path, PathBuf};

use pp_contract::FaultKind;
use pp_job::Error;
use pp_runtime::report::{StageCosts, TrainingMeasures};
use pp_runtime::schedule::{Action, Cost, Message, Op, PerStage, Schedule, Step, TICKS};
use serde::Deserialize;

/// What is read of a report.
#[derive(Deserialize)]
struct Report {
    measures: Measures,
}

#[derive(Deserialize)]
struct Measures {
    training: Option<TrainingMeasures>,
}

/// A model that was trained, and what its stages took.
pub(super) struct Model {
    path: PathBuf,
    pub(super) trained: TrainingMeasures,
    stages: Vec<StageTicks>,
}

/// What a stage takes of a microbatch, in ticks of a millisecond.
#[derive(Clone, Copy, Default)]
struct StageTicks {
    forward: u64,
    /// I and W, where they were measured.
    parts: Option<[u64; 2]>,
    /// B, where it was measured.
    whole: Option<u64>,
}

impl StageTicks {
    /// `None` where it was not measured.
    fn of(costs: &StageCosts) -> Option<Self> {
        // To the microsecond.
        let ticks = |ms: f64| (ms.clamp(0.0, 1e8) * 1e3).round() as u64 * (TICKS / 1000);
        let parts = costs.input_ms.zip(costs.weight_ms);
        let whole = costs.backward_ms.map(ticks);
        parts.map(|_| ()).or(whole.map(|_| ()))?;
        Some(Self {
            forward: ticks(costs.forward_ms?),
            parts: parts.map(|(input, weight)| [input, weight].map(ticks)),
            whole,
        })
    }

    fn backward(&self) -> u64 {
        let sum = || self.parts.map_or(0, |[input, weight]| input + weight);
        self.whole.unwrap_or_else(sum)
    }
}

/// What the stages of a schedule take of a model.
pub(super) struct Shared {
    stages: Vec<StageTicks>,
    transfer: PerStage,
    /// What was not measured: `split`, `I and W`, `B`.
    pub(super) estimated: Vec<&'static str>,
}

impl Model {
    /// Reads a report.
    pub(super) fn read(path: &Path) -> Result<Self, Error> {
        let refused = |kind, why: String| {
            let text = format!("{}: {why}", path.display());
            Error::local(kind, "read report", text)
        };
        let bytes =
            std::fs::read(path).map_err(|error| refused(FaultKind::Io, error.to_string()))?;
        let report: Report = serde_json::from_slice(&bytes)
            .map_err(|error| refused(FaultKind::BadInput, format!("it is no report: {error}")))?;
        let bad = |why: &str| refused(FaultKind::BadInput, why.into());
        let trained = report.measures.training.ok_or_else(|| {
            bad("the job did not train; give the report of a Trainer(..., report=FILE, timing=True)")
        })?;
        let stages = trained.stages.iter().map(StageTicks::of);
        let stages: Option<Vec<_>> = stages.collect();
        let stages = stages.filter(|stages| !stages.is_empty()).ok_or_else(|| {
            bad("the times of the actions were not measured; train with Trainer(..., report=FILE, timing=True)")
        })?;
        Ok(Self {
            path: path.into(),
            trained,
            stages,
        })
    }

    /// The stages on each rank, where they were as many.
    pub(super) fn stages_per_rank(&self) -> Option<u32> {
        let (stages, ranks) = (self.stages.len() as u32, self.trained.ranks);
        (ranks > 0 && stages.is_multiple_of(ranks)).then(|| stages / ranks)
    }

    /// Where it comes from, for a line of text.
    pub(super) fn about(&self) -> String {
        let (path, trained) = (self.path.display(), &self.trained);
        let (stages, ranks) = (self.stages.len(), trained.ranks);
        format!(
            "{path}: {stages} stages on {ranks} ranks by {}",
            trained.schedule
        )
    }

    /// What the stages of a schedule take. Where they are more or fewer than were measured, the model is cut anew, as if a
    /// stage did the same everywhere within.
    pub(super) fn share(&self, schedule: &Schedule, transfer: PerStage) -> Shared {
        let count = schedule.stages() as usize;
        let actions = || schedule.ranks().iter().flatten().flat_map(Step::actions);
        let has = |op: Op, is_known: fn(&StageTicks) -> bool| {
            let mut of_op = actions().filter(|action| action.op == op);
            of_op.any(|action| !self.stages.get(action.stage as usize).is_some_and(is_known))
        };
        let estimated: &[_] = match count == self.stages.len() {
            false => &[(true, "split")],
            true => &[
                (has(Op::BackwardWeight, |of| of.parts.is_some()), "I and W"),
                (has(Op::Backward, |of| of.whole.is_some()), "B"),
            ],
        };
        let estimated = estimated.iter().filter(|(is_it, _)| *is_it);
        Shared {
            stages: (0..count).map(|stage| self.cut(stage, count)).collect(),
            transfer,
            estimated: estimated.map(|(_, what)| *what).collect(),
        }
    }

    /// A stage of so many.
    fn cut(&self, stage: usize, count: usize) -> StageTicks {
        let known = self.stages.len();
        // The first stage does all at W.
        let halved = |of: &StageTicks| if stage > 0 { of.backward() / 2 } else { 0 };
        if count == known {
            let of = self.stages[stage];
            let parts = [halved(&of), of.backward() - halved(&of)];
            return StageTicks {
                parts: of.parts.or(Some(parts)),
                ..of
            };
        }
        let (mut forward, mut input, mut whole) = (0, 0, 0);
        for (at, of) in self.stages.iter().enumerate() {
            // Both in parts of which a stage of the model has `count`.
            let from = (stage * known).max(at * count);
            let to = ((stage + 1) * known).min((at + 1) * count);
            let part = |ticks: u64| ticks * to.saturating_sub(from) as u64 / count as u64;
            forward += part(of.forward);
            whole += part(of.backward());
            input += part(match of.parts {
                Some([input, _]) if at > 0 && stage > 0 => input,
                _ => halved(of),
            });
        }
        StageTicks {
            forward,
            parts: Some([input, whole.saturating_sub(input)]),
            whole: Some(whole),
        }
    }
}

impl Cost for Shared {
    fn action(&self, _: u32, action: Action) -> u64 {
        let of = self.stages[action.stage as usize];
        let [input, weight] = of.parts.unwrap_or_default();
        match action.op {
            Op::Forward => of.forward,
            Op::BackwardInput => input,
            Op::BackwardWeight => weight,
            Op::Backward => of.backward(),
            _ => 0,
        }
    }

    fn transfer(&self, message: Message) -> u64 {
        self.transfer.of(message.from, message.microbatch)
    }
}
