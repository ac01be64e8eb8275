//! The overlap measures. [`super::measuring`] computes them.

use serde::{Serialize, Serializer};

use super::far::FAR;
use super::trained::TrainingMeasures;

/// A stage of the pipeline.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StageMeasures {
    /// Its name, and its part where it has several.
    pub stage: String,
    /// The rank that leads it.
    pub rank: u32,
    /// The ranks of the group that runs it, the leader first, each with its own work on it; empty where one rank does.
    pub members: Vec<RankMeasures>,
    /// Median of its work on a chunk; of a group the longest work of a member.
    pub work_ms: Option<f64>,
    /// Median time from the end of its last work to a chunk, also where its rank worked for other stages meanwhile; none of
    /// the source.
    pub idle_ms: Option<f64>,
    /// Its share of the measured time, from 0 to 1; none of the source, and none above 1: the first wait of a short run
    /// begins before the measured time.
    pub idle_share: Option<f64>,
}

/// A rank that leads stages, or one that is a member of a group.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RankMeasures {
    /// Its number.
    pub rank: u32,
    /// Median of the work of its stages on a chunk; of a member, its work for the group.
    pub work_ms: Option<f64>,
    /// The mean.
    pub work_mean_ms: Option<f64>,
    /// The longest.
    pub work_max_ms: Option<f64>,
}

/// How well a run overlapped. Keys are stable: they are what `--report` and `pp bench` print.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Measures {
    /// Chunks of the whole run.
    pub chunks: u64,
    /// Chunks dropped because their epoch had passed.
    pub dropped: u64,
    /// Frames that the sink took in the whole run.
    pub frames: u64,
    /// Chunks that the medians below are taken over.
    pub measured: u64,
    /// Chunks left out at the start.
    pub warm_up: u64,
    /// From the first build to the last accepted chunk.
    pub wall_ms: f64,
    /// Frames that the sink took, over that time.
    pub frames_per_second: f64,
    /// A rank was lost and started again between the first measured chunk and the last.
    pub spans_restart: bool,
    /// Median distance of two accepted chunks.
    pub period_ms: Option<f64>,
    /// Mean distance. Where it is far from the median, chunks come in bursts and no ratio of medians can be trusted.
    pub period_mean_ms: Option<f64>,
    /// Tenth percentile of it.
    pub period_p10_ms: Option<f64>,
    /// Ninetieth percentile of it.
    pub period_p90_ms: Option<f64>,
    /// The largest.
    pub period_max_ms: Option<f64>,
    /// All stages, in the order of the pipeline.
    pub stages: Vec<StageMeasures>,
    /// The ranks that lead stages. The longest is the one with the largest median.
    pub ranks: Vec<RankMeasures>,
    /// Median of the time that was hidden; none where there is no overlap score.
    pub hidden_ms: Option<f64>,
    /// 1 when all other ranks' work disappears behind the longest rank's; 0 when they take turns.
    pub overlap_score: Option<f64>,
    /// Why there is none.
    pub overlap_score_why_null: Option<WhyNull>,
    /// 1 when the longest rank never waits.
    pub efficiency: Option<f64>,
    /// Why there is none.
    pub efficiency_why_null: Option<WhyNull>,
    /// The efficiency over the mean period instead of the median.
    pub efficiency_by_mean: Option<f64>,
    /// Why there is none.
    pub efficiency_by_mean_why_null: Option<WhyNull>,
    /// Median time from when the first frame of a chunk had been read until the chunk was accepted.
    pub latency_ms: Option<f64>,
    /// The mean.
    pub latency_mean_ms: Option<f64>,
    /// Its 99th percentile.
    pub latency_p99_ms: Option<f64>,
    /// The longest.
    pub latency_max_ms: Option<f64>,
    /// Median of the part of it after the last frame of the chunk had been read.
    pub added_latency_ms: Option<f64>,
    /// Its 99th percentile.
    pub added_latency_p99_ms: Option<f64>,
    /// The longest.
    pub added_latency_max_ms: Option<f64>,
    /// Chunks of the whole run that took longer than the job may take.
    pub late: u64,
    /// Frames of the whole run that were dropped because they came too fast.
    pub skipped_frames: u64,
    /// Denoising steps of the whole run that were saved to keep up.
    pub steps_saved: u64,
    /// How long the reader was held back in the whole run before it could hand chunks on.
    pub held_back_ms: f64,
    /// By how much the last chunk was later than the rate that the source names.
    pub behind_ms: f64,
    /// The most of it in the whole run.
    pub behind_max_ms: f64,
    /// Most chunks in flight at once, each from its admission until it was accepted.
    pub max_in_flight: u32,
    /// Mean length of the source queue.
    pub source_queue_mean: Option<f64>,
    /// Longest source queue.
    pub source_queue_max: Option<u32>,
    /// Mean length of the sink queue.
    pub sink_queue_mean: Option<f64>,
    /// Longest sink queue.
    pub sink_queue_max: Option<u32>,
    /// Median payload that the source sent, per chunk.
    pub source_bytes: Option<u64>,
    /// How the job trained, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub training: Option<TrainingMeasures>,
}

/// Why a ratio is not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WhyNull {
    /// No distance of two chunks was measured.
    #[error("too few chunks were measured")]
    NothingMeasured,
    /// A rank was lost and started again between the first measured chunk and the last.
    #[error("the measured chunks span a restart")]
    SpansRestart,
    /// One rank leads all stages.
    #[error("one rank leads all stages")]
    OneRank,
    /// Ranks had no work: there was nothing to hide, or nothing to keep busy.
    #[error("a rank had no work")]
    NoWork,
    /// The median of the period is far from its mean.
    #[error("chunks came in bursts: median and mean of the period differ by more than {:.0} %", 100.0 * FAR)]
    Bursts,
    /// What could be hidden is below the scatter of the periods.
    #[error("what could be hidden is below the scatter of the periods")]
    Scatter,
    /// The ratio is above 1 by more than the error of measurement.
    #[error("it is above 1: results had piled up and left faster than they are made")]
    AboveOne,
}

/// As text.
impl Serialize for WhyNull {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Measures {
    /// Says whether the times bear the mark of a scheduling fault: a stage of another rank waits as long as the sink works on
    /// rank 0, little is hidden and both queues are near empty. Then each chunk was sent only after the sink had taken the
    /// one before.
    pub fn looks_serial(&self) -> bool {
        let sink = self.stages.last().filter(|sink| sink.rank == 0);
        let Some(sink_ms) = sink.and_then(|sink| sink.work_ms) else {
            return false;
        };
        let waits_for_sink = self.stages.iter().any(|stage| {
            let idle_ms = stage.idle_ms.filter(|_| stage.rank != 0);
            idle_ms.is_some_and(|idle_ms| (idle_ms - sink_ms).abs() <= 0.2 * sink_ms)
        });
        sink_ms > 0.0
            && waits_for_sink
            && self.overlap_score.is_some_and(|score| score < 0.3)
            && self.source_queue_mean < Some(1.0)
            && self.sink_queue_mean < Some(1.0)
    }
}
