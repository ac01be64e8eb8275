//! What a viewer of a running job sees, as plain values.
//!
//! Keys are those of the report (docs/report.md) where the report has the figure. Every list is bounded: by the stages and
//! ranks of the pipeline, by [`Snapshot::CHUNKS`] or by [`Snapshot::RESTARTS`].

use pp_runtime::report::Training;
use serde::{Deserialize, Serialize};

/// What a job looked like at one moment. Moments that end in `_ns` are of the monotonic clock of rank 0; a figure that is
/// unknown is null.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// What is run.
    pub job: AboutJob,
    /// Where it is in its life.
    pub state: JobState,
    /// How it ended; none before.
    pub ended: Option<HowEnded>,
    /// When this was looked at.
    pub now_ns: u64,
    /// Seconds since the job started.
    pub elapsed_s: f64,
    /// Sums over the whole run.
    pub totals: RunTotals,
    /// Figures of the latest chunks.
    pub recent: RecentFigures,
    /// All stages, in the order of the pipeline.
    pub stages: Vec<StageView>,
    /// All ranks, by number.
    pub ranks: Vec<RankView>,
    /// Every loss of a rank after which the run went on, the latest [`Snapshot::RESTARTS`].
    pub restarts: Vec<RestartView>,
    /// What ended the job, or the latest loss while a rank is awaited.
    pub fault: Option<FaultView>,
    /// The latest chunks, oldest first, at most [`Snapshot::CHUNKS`].
    pub timeline: Vec<ChunkView>,
    /// Says whether there are pictures to ask for: before the pipeline, and after it.
    pub thumbnails: [bool; 2],
    /// How far the training is; none in a job that does not train.
    pub training: Option<TrainingView>,
}

impl Snapshot {
    /// The most chunks of a timeline.
    pub const CHUNKS: usize = 48;
    /// The most losses that are listed.
    pub const RESTARTS: usize = 32;
}

/// What is run, and where. It does not change while a job runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AboutJob {
    /// The process of rank 0.
    pub pid: u32,
    /// Which job of its program it is ([`crate::Job::number`]).
    pub number: u32,
    /// The name of the program.
    pub program: String,
    /// The machine of rank 0.
    pub host: String,
    /// The text of the pipeline.
    pub pipeline: String,
    /// The most chunks in flight.
    pub depth: u32,
    /// How often ranks may be started again.
    pub restarts_allowed: u32,
    /// When it started, in seconds since 1970 (UTC).
    pub started_unix_s: u64,
    /// The version of the library.
    pub pp_version: String,
}

/// Where a job is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// Its ranks start, meet and connect.
    #[default]
    Starting,
    /// Chunks go through.
    Running,
    /// A rank was lost, and another one is awaited.
    Restarting,
    /// It takes in nothing more.
    Draining,
    /// It has ended.
    Ended,
}

impl JobState {
    /// The word that JSON has for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Restarting => "restarting",
            Self::Draining => "draining",
            Self::Ended => "ended",
        }
    }
}

/// How a job ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HowEnded {
    /// The exit code that belongs to it; 0 where all is well.
    pub code: u8,
    /// Why, in one line; empty with a code of 0.
    pub sentence: String,
}

/// Sums over the whole run, without the records that were lost on their way to the viewer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunTotals {
    /// Chunks that are done.
    pub chunks: u64,
    /// Frames that the sink took.
    pub frames: u64,
    /// Chunks that a hard cut overtook.
    pub dropped: u64,
    /// Chunks that came later than the latency that was asked for.
    pub late: u64,
    /// Frames that were dropped because the pipeline could not keep up.
    pub skipped_frames: u64,
    /// Denoising steps that were left out to keep up.
    pub steps_saved: u64,
    /// How long the reader was held back.
    pub held_back_ms: f64,
    /// Payload bytes that the source sent.
    pub source_bytes: u64,
    /// Ranks that were lost while chunks were left.
    pub restarts: u64,
    /// Chunks that no figure here speaks of, because the viewer did not keep up.
    pub lost_records: u64,
}

/// Figures of the latest chunks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecentFigures {
    /// Frames that the sink takes, over the last ten seconds; over the last chunk where that took longer.
    pub frames_per_second: Option<f64>,
    /// Median distance of two accepted chunks.
    pub period_ms: Option<f64>,
    /// The largest median work of a stage on a chunk.
    pub slowest_stage_ms: Option<f64>,
    /// The stage that it is of.
    pub slowest_stage: Option<String>,
    /// Median time from the first frame of a chunk until it is accepted.
    pub latency_ms: Option<f64>,
    /// Its 99th percentile.
    pub latency_p99_ms: Option<f64>,
    /// The longest.
    pub latency_max_ms: Option<f64>,
    /// Median of the part of it after the last frame of the chunk.
    pub added_latency_ms: Option<f64>,
    /// Its 99th percentile.
    pub added_latency_p99_ms: Option<f64>,
    /// The longest.
    pub added_latency_max_ms: Option<f64>,
    /// Chunks that wait before the source, as the latest chunk found it.
    pub source_queue: Option<u32>,
    /// Chunks that wait behind the sink; 0 where it is on another rank.
    pub sink_queue: Option<u32>,
    /// Chunks in flight.
    pub in_flight: Option<u32>,
    /// By how much later than the rate that the source names the latest chunk was built.
    pub behind_ms: Option<f64>,
}

/// A stage of the pipeline.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageView {
    /// Its name, and its part where it has several.
    pub stage: String,
    /// The ranks that run it, the leader first.
    pub ranks: Vec<u32>,
    /// Median work on one of the latest chunks.
    pub work_ms: Option<f64>,
    /// Median wait for one.
    pub idle_ms: Option<f64>,
    /// The share of the time that it waits, from 0 to 1; none of the source.
    pub idle_share: Option<f64>,
}

/// A rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankView {
    /// Its number.
    pub rank: u32,
    /// The device that the job names for it; none where it finds one.
    pub device: Option<String>,
    /// The share of the time in which its stages have no work, from 0 to 1.
    pub idle_share: Option<f64>,
    /// Its memory on the host.
    pub resident_bytes: Option<u64>,
    /// Free memory of its device.
    pub device_free_bytes: Option<u64>,
    /// All memory of its device.
    pub device_total_bytes: Option<u64>,
    /// Chunks that wait for its stages.
    pub queued: Option<u64>,
    /// Seconds since it said these figures; they are asked for only while somebody looks.
    pub said_s: Option<f64>,
}

/// A loss of a rank after which the run went on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RestartView {
    /// The rank.
    pub rank: u32,
    /// Why it was given up.
    pub sentence: String,
    /// When.
    pub lost_ns: u64,
    /// When the sink had the first chunk again; none before.
    pub served_ns: Option<u64>,
}

/// A fault.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultView {
    /// Its kind.
    pub kind: String,
    /// The rank that it blames.
    pub rank: u32,
    /// The operation that failed.
    pub operation: String,
    /// All of it, in one line.
    pub sentence: String,
}

/// How far a training is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainingView {
    /// The name of the schedule.
    pub schedule: String,
    /// Steps that moved the weights.
    pub steps: u64,
    /// The loss of the last one.
    pub loss: Option<f64>,
    /// The share of the time of all ranks in the last one in which none of their actions was at work; none where actions are
    /// not measured.
    pub bubble: Option<f64>,
}

impl From<&Training> for TrainingView {
    fn from(training: &Training) -> Self {
        let (steps, loss) = training.progress();
        Self {
            schedule: training.name().into(),
            steps,
            loss,
            bubble: training.last_bubble(),
        }
    }
}

/// A chunk of the timeline.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkView {
    /// Its place in the output.
    pub chunk_index: u64,
    /// Frames in it.
    pub frames: u32,
    /// A hard cut overtook it.
    pub dropped: bool,
    /// Its first frame was there.
    pub first_read_ns: u64,
    /// Rank 0 knew that the sink has it.
    pub accepted_ns: u64,
    /// When each stage began and ended with it, in the order of the pipeline; null where that is not known.
    pub stages: Vec<Option<[u64; 2]>>,
}

/// Which picture of a video.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thumb {
    /// As the source reads it.
    Before,
    /// As the sink writes it.
    After,
}

/// A small picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thumbnail {
    /// Pixels in a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Three bytes for each pixel: red, green and blue, row by row.
    pub rgb: Vec<u8>,
}
