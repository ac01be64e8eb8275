//! What `pp plan` prints: the proposal, and what it was compared with.

use std::fmt;

use pp_contract::Pipeline;
use serde::Serialize;

use super::subject::{Candidate, Failed, Seen};

/// A measured and a predicted period that differ by more than this share are worth a note.
const FAR: f64 = 0.2;

/// The result of `pp plan`. Times are for one chunk, and medians of the rounds.
#[derive(Serialize)]
pub(super) struct PlanReport {
    pub(super) most_ranks: u32,
    pub(super) rounds: u32,
    pub(super) cores: u32,
    /// The GPUs, where there are fewer than ranks, so that some are on CPUs.
    pub(super) gpus: Option<u32>,
    /// Payloads lie in host memory, and the ranks share its cores.
    pub(super) on_host: bool,
    /// Cores that the stage with the most threads keeps busy.
    pub(super) cores_of_a_stage: u32,
    /// The payload of the source.
    pub(super) bytes: u64,
    /// What an edge costs each of its ranks.
    pub(super) edge_us: f64,
    /// How long a payload is on its way over an edge.
    pub(super) link_us: f64,
    /// The stages on one rank, for each number of parts.
    pub(super) on_one_rank: Vec<Alone>,
    /// That of `chain_and_groups` with the shortest measured period.
    pub(super) proposal: Outcome,
    /// The measured period of the proposal over the predicted one, less 1.
    pub(super) over_predicted: Option<f64>,
    /// The chain with the shortest predicted period, those with CPUs where there are few GPUs, then the groups that were run.
    pub(super) chain_and_groups: Vec<Outcome>,
    /// Pipelines that could not be run, and why.
    pub(super) left_out: Vec<LeftOut>,
    /// The measured period of the proposal over that of the best placement, less 1; only with `--all`.
    pub(super) over_best: Option<f64>,
    /// All placements, the shortest measured period first; only with `--all`.
    pub(super) placements: Vec<Outcome>,
}

/// All stages on one rank.
#[derive(Serialize)]
pub(super) struct Alone {
    pub(super) pipeline: String,
    pub(super) measured_ms: f64,
    pub(super) stages: Vec<StageWork>,
}

#[derive(Serialize)]
pub(super) struct StageWork {
    pub(super) stage: String,
    pub(super) work_ms: f64,
}

/// A placement that was run.
#[derive(Clone, Serialize)]
pub(super) struct Outcome {
    #[serde(flatten)]
    pub(super) candidate: Candidate,
    pub(super) measured_ms: f64,
}

/// A placement that could not be run.
#[derive(Serialize)]
pub(super) struct LeftOut {
    #[serde(flatten)]
    pub(super) candidate: Candidate,
    pub(super) why: String,
}

impl LeftOut {
    pub(super) fn of(candidate: Candidate, failed: &Failed) -> Self {
        let why = failed.why();
        Self { candidate, why }
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.candidate, self.why)
    }
}

impl Outcome {
    pub(super) fn over_predicted(&self) -> Option<f64> {
        let over = |predicted_ms| self.measured_ms / predicted_ms - 1.0;
        self.candidate.predicted_ms.map(over)
    }

    /// What is said of a prediction that is far off.
    pub(super) fn note(&self) -> Option<String> {
        let over = self.over_predicted().filter(|over| over.abs() > FAR)?;
        Some(format!(
            "pp: note: the period of {} was measured {:+.0} % off the prediction (notes begin at {:.0} %): other programs \
             ran, or the stages slow each other down; raise --rounds or --chunks, or give --all",
            self.candidate.pipeline,
            100.0 * over,
            100.0 * FAR
        ))
    }
}

impl Alone {
    pub(super) fn of(text: &str, seen: &Seen) -> Self {
        let pipeline: Pipeline = text.parse().expect("it has run");
        let stages = pipeline.stages().iter().zip(&seen.work_ms);
        Self {
            pipeline: text.to_owned(),
            measured_ms: seen.period_ms,
            stages: stages
                .map(|(stage, ms)| StageWork {
                    stage: stage.label(),
                    work_ms: *ms,
                })
                .collect(),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.candidate.predicted_ms {
            Some(ms) => write!(f, "period predicted {ms:.3} ms, ")?,
            None => f.write_str("period not predicted, ")?,
        }
        write!(f, "measured {:.3} ms: {}", self.measured_ms, self.candidate)
    }
}

impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "on one rank, medians of {} rounds:", self.rounds)?;
        for alone in &self.on_one_rank {
            let works: Vec<String> = alone
                .stages
                .iter()
                .map(|work| format!("{} {:.3} ms", work.stage, work.work_ms))
                .collect();
            writeln!(
                f,
                "  {}; period {:.3} ms",
                works.join(", "),
                alone.measured_ms
            )?;
        }
        if self.most_ranks > 1 {
            writeln!(
                f,
                "an edge with {} bytes takes {:.2} µs of each of its ranks, and a payload is on its way {:.2} µs",
                self.bytes, self.edge_us, self.link_us
            )?;
        }
        match (self.on_host, self.gpus) {
            (true, _) => writeln!(
                f,
                "assumed: the ranks share the {} cores of this machine, and a stage keeps up to {} of them busy",
                self.cores, self.cores_of_a_stage
            )?,
            (false, Some(gpus)) => writeln!(
                f,
                "assumed: {gpus} ranks have a GPU each, and the others are on CPUs"
            )?,
            (false, None) => writeln!(f, "assumed: each rank has a GPU of its own")?,
        }
        if let (Some(over), Some(best)) = (self.over_best, self.placements.first()) {
            for placement in &self.placements {
                writeln!(f, "  {placement}")?;
            }
            writeln!(
                f,
                "the proposal takes {:.1} % longer than the best of {} placements, {}",
                100.0 * over,
                self.placements.len(),
                best.candidate
            )?;
        }
        if let [_, _, ..] = self.chain_and_groups[..] {
            writeln!(f, "the best chains, and groups, which are not predicted:")?;
            for outcome in &self.chain_and_groups {
                writeln!(f, "  {outcome}")?;
            }
        }
        for left_out in &self.left_out {
            writeln!(f, "left out, since it cannot run: {left_out}")?;
        }
        writeln!(f, "proposal for {} ranks at most:", self.most_ranks)?;
        let proposal = &self.proposal.candidate;
        match &proposal.devices {
            Some(devices) => writeln!(
                f,
                "  --devices {devices} --pipeline \"{}\"",
                proposal.pipeline
            )?,
            None => writeln!(f, "  --pipeline \"{}\"", proposal.pipeline)?,
        }
        match (proposal.predicted_ms, self.over_predicted) {
            (Some(predicted_ms), Some(over)) => writeln!(
                f,
                "  period predicted {predicted_ms:.3} ms, measured {:.3} ms ({:+.1} %)",
                self.proposal.measured_ms,
                100.0 * over
            ),
            _ => writeln!(f, "  period measured {:.3} ms", self.proposal.measured_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prediction_that_is_far_off_is_noted() {
        let note = |predicted_ms, measured_ms| {
            let pipeline = "a@0 -> b@1".to_owned();
            let outcome = Outcome {
                candidate: Candidate {
                    predicted_ms,
                    ..Candidate::of(pipeline)
                },
                measured_ms,
            };
            outcome.note()
        };
        assert_eq!(note(Some(10.0), 11.9), None);
        assert_eq!(note(Some(10.0), 8.1), None);
        assert_eq!(note(None, 8.1), None);
        for (measured_ms, words) in [(12.1, "+21 % off"), (7.0, "-30 % off")] {
            let said = note(Some(10.0), measured_ms).unwrap();
            assert!(
                said.contains("a@0 -> b@1") && said.contains(words),
                "{said}"
            );
        }
    }
}
