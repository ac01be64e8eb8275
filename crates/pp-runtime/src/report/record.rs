//! The record of one chunk: every moment that the measures, the trace and the timeline need, on the clock of rank 0.
//!
//! It is a plain value with public fields because it carries no invariant: durations come from several processes, one of
//! which may be wrong, so every reader subtracts with saturation and none may panic on any content.

use std::collections::BTreeSet;

use pp_contract::pipeline::StageSpec;
use pp_contract::{ChunkIndex, Fault, Pipeline, Rank};
use serde::{Serialize, Serializer};

/// Times of one chunk at a stage, in nanoseconds of the clock of rank 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StageTimes {
    /// The chunk was there.
    pub arrived_ns: u64,
    /// The stage began.
    pub start_ns: u64,
    /// The stage ended.
    pub end_ns: u64,
}

/// What a stage behind the source says of one chunk. In JSON durations are milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StageRecord {
    /// How long it worked, as its rank measured it.
    #[serde(rename = "work_ms", serialize_with = "as_ms")]
    pub work_us: u64,
    /// How long it had waited for the chunk since its last work, as its rank measured it. What the rank did meanwhile for
    /// other stages is part of it.
    #[serde(rename = "idle_ms", serialize_with = "as_ms")]
    pub idle_us: u64,
    /// When. Of a stage on another rank this is found from durations. The measures do without; the pictures do not.
    pub times: Option<StageTimes>,
}

/// Everything measured about one chunk. Times are nanoseconds of the monotonic clock of rank 0. In JSON durations are
/// milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ChunkRecord {
    /// Place of the chunk in the output order.
    pub chunk_index: u64,
    /// Id of the call that carried it.
    pub call_id: u64,
    /// Epoch it was sent in.
    pub cache_epoch: u64,
    /// Video frames in the chunk; a hard cut makes a chunk shorter.
    pub frames: u32,

    /// The first frame of the chunk had been read. Where the source reads nothing, its build began.
    pub first_read_ns: u64,
    /// The last frame of the chunk had been read. Where the source reads nothing, its build began.
    pub last_read_ns: u64,
    /// The source began to build it.
    pub build_start_ns: u64,
    /// The source had built it.
    pub build_end_ns: u64,
    /// It had left the source.
    pub sent_ns: u64,
    /// Rank 0 knew that the sink has it, or that a hard cut overtook it.
    pub accepted_ns: u64,
    /// The stages behind the source, in the order of the pipeline; the last is the sink.
    pub stages: Vec<StageRecord>,

    /// Payload bytes that the source sent.
    pub source_bytes: u64,
    /// Chunks waiting in the source's queue when this one was taken from it.
    pub source_queue: u32,
    /// Chunks waiting in the sink's queue when this one was put into it; 0 where the sink is on another rank.
    pub sink_queue: u32,
    /// Chunks in flight, this one included, when it was sent. A chunk is in flight from its admission until the sink has
    /// it.
    pub in_flight: u32,
    /// A hard cut overtook it: the sink did not take it.
    pub dropped: bool,
}

impl ChunkRecord {
    /// How long the source worked on it.
    pub fn build_ns(&self) -> u64 {
        self.build_end_ns.saturating_sub(self.build_start_ns)
    }

    /// How long a stage worked on it, by the stage's place in the pipeline.
    pub fn work_ns(&self, stage: usize) -> u64 {
        let Some(behind) = stage.checked_sub(1) else {
            return self.build_ns();
        };
        let record = self.stages.get(behind);
        record.map_or(0, |record| record.work_us.saturating_mul(1_000))
    }

    /// How long a stage had waited for it; none of the source.
    pub fn idle_ns(&self, stage: usize) -> Option<u64> {
        let record = self.stages.get(stage.checked_sub(1)?)?;
        Some(record.idle_us.saturating_mul(1_000))
    }

    /// How long the stages that `rank` leads worked on it.
    pub fn rank_work_ns(&self, pipeline: &Pipeline, rank: Rank) -> u64 {
        let stages = pipeline.stages().iter().enumerate();
        let led = stages.filter(|(_, stage)| stage.leader() == rank);
        led.map(|(at, _)| self.work_ns(at))
            .fold(0, u64::saturating_add)
    }

    /// When a stage worked on it, if that is known.
    pub fn times(&self, stage: usize) -> Option<StageTimes> {
        match stage.checked_sub(1) {
            None => Some(StageTimes {
                arrived_ns: self.last_read_ns,
                start_ns: self.build_start_ns,
                end_ns: self.build_end_ns,
            }),
            Some(behind) => self.stages.get(behind)?.times,
        }
    }

    /// Its way to a stage from the one before: when it left that one, when it arrived, and when the stage began.
    pub(super) fn transfer_ns(&self, to: usize) -> Option<[u64; 3]> {
        let times = self.times(to)?;
        let left_ns = match to {
            1 => self.sent_ns,
            _ => self.times(to.checked_sub(1)?)?.end_ns,
        };
        Some([left_ns, times.arrived_ns, times.start_ns])
    }

    /// From the moment when the first frame of the chunk had been read until rank 0 knew that the sink has the chunk.
    /// None for a dropped chunk.
    pub fn latency_ns(&self) -> Option<u64> {
        (!self.dropped).then(|| self.accepted_ns.saturating_sub(self.first_read_ns))
    }

    /// The part of it after the last frame of the chunk had been read: what the pipeline adds to gathering the frames.
    pub fn added_latency_ns(&self) -> Option<u64> {
        (!self.dropped).then(|| self.accepted_ns.saturating_sub(self.last_read_ns))
    }
}

/// What the reports call a stage: its name, and which of its parts it is, counted from 1, where it has several.
pub(super) fn label(stage: &StageSpec) -> String {
    match stage.parts {
        1 => stage.name.to_string(),
        parts => format!("{} {}/{parts}", stage.name, stage.part + 1),
    }
}

/// The ranks that lead a stage. The other members of a group have no figures of their own.
pub(super) fn leaders(pipeline: &Pipeline) -> BTreeSet<Rank> {
    pipeline.stages().iter().map(StageSpec::leader).collect()
}

pub(crate) fn as_ms<S: Serializer>(us: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(*us as f64 / 1e3)
}

/// A rank that was lost, and the process that took its place. Times are of the clock of rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restart {
    /// Which rank, and why it was given up.
    pub fault: Fault,
    /// When.
    pub lost_ns: u64,
    /// The first chunk that the source sent after that; `None` if there was none left.
    pub chunk: Option<ChunkIndex>,
    /// When that chunk was sent.
    pub sent_ns: Option<u64>,
    /// When the sink had the first chunk again.
    pub served_ns: Option<u64>,
    /// Chunks that were sent a second time.
    pub sent_again: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_of_nonsense_times_are_zero() {
        let record = ChunkRecord {
            build_start_ns: 9,
            build_end_ns: 3,
            stages: vec![StageRecord {
                work_us: u64::MAX,
                ..StageRecord::default()
            }],
            ..ChunkRecord::default()
        };
        assert_eq!([0, 1, 2].map(|at| record.work_ns(at)), [0, u64::MAX, 0]);
        assert_eq!((record.times(2), record.transfer_ns(0)), (None, None));
    }

    #[test]
    fn a_rank_works_as_long_as_the_stages_that_it_leads() {
        let pipeline = "encode@0 -> a@1 -> b@2+3 -> a@1 -> decode@0"
            .parse()
            .unwrap();
        let stage = |work_us| StageRecord {
            work_us,
            ..StageRecord::default()
        };
        let record = ChunkRecord {
            build_end_ns: 5_000,
            stages: [10, 20, 40, 80].map(stage).to_vec(),
            ..ChunkRecord::default()
        };
        let work = |rank| record.rank_work_ns(&pipeline, Rank::new(rank));
        assert_eq!([0, 1, 2, 3].map(work), [85_000, 50_000, 20_000, 0]);
        let leaders = leaders(&pipeline).into_iter().map(Rank::get);
        assert_eq!(leaders.collect::<Vec<_>>(), [0, 1, 2]);
        let labels: Vec<_> = pipeline.stages().iter().map(label).collect();
        assert_eq!(labels, ["encode", "a 1/2", "b", "a 2/2", "decode"]);
    }
}
