//! The record of one chunk: every moment that the measures, the trace and the timeline need, on the clock of rank 0.
//!
//! It is a plain value with public fields because it carries no invariant: durations come from several processes, one of
//! which may be wrong, so every reader subtracts with saturation and none may panic on any content.

use std::collections::BTreeSet;

use pp_contract::pipeline::StageSpec;
use pp_contract::{ChunkIndex, Fault, Pipeline, Rank, StageReport};
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

/// Records how a stage behind the source worked on one chunk. In JSON durations are milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StageRecord {
    /// How long it worked, as its rank measured it; of a group the longest work of a member.
    #[serde(rename = "work_ms", serialize_with = "as_ms")]
    pub work_us: u64,
    /// How long it had waited for the chunk since its last work, as its rank measured it; of a group the shortest wait of a
    /// member. What the rank did meanwhile for other stages is part of it.
    #[serde(rename = "idle_ms", serialize_with = "as_ms")]
    pub idle_us: u64,
    /// When. Of a stage on another rank this is found from durations. The measures do without; the pictures do not.
    pub times: Option<StageTimes>,
    /// What each member of a group says, the leader first; empty where one rank runs the stage.
    pub members: Vec<MemberRecord>,
}

/// Records how a member of a group worked on one chunk. In JSON durations are milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemberRecord {
    /// Its rank.
    pub rank: u32,
    /// How long it worked, as it measured it.
    #[serde(rename = "work_ms", serialize_with = "as_ms")]
    pub work_us: u64,
    /// How long it had waited since its last work, as it measured it: for the chunk, and in host memory for other members.
    #[serde(rename = "idle_ms", serialize_with = "as_ms")]
    pub idle_us: u64,
}

impl StageRecord {
    /// The record of a stage that has not reported.
    pub(super) fn before(stage: &StageSpec) -> Self {
        let members = stage.ranks.iter().filter(|_| stage.is_group());
        let members = members.map(|rank| MemberRecord {
            rank: rank.get(),
            ..MemberRecord::default()
        });
        Self {
            members: members.collect(),
            ..Self::default()
        }
    }

    /// Takes in the reports of the stage, that of its leader first; none of a stage that did nothing.
    pub(crate) fn take_in(&mut self, reports: &[StageReport]) {
        for (member, report) in self.members.iter_mut().zip(reports) {
            (member.work_us, member.idle_us) = (report.work_us, report.idle_us);
        }
        let works = reports.iter().map(|report| report.work_us);
        let waits = reports.iter().map(|report| report.idle_us);
        self.work_us = works.max().unwrap_or(0);
        self.idle_us = waits.min().unwrap_or(0);
    }
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
    /// The denoising steps that the job asked for, to keep up with its source; `None` where they do not vary.
    pub steps: Option<u16>,
    /// Denoising steps fewer than the most.
    pub steps_saved: u16,
    /// Frames between the chunk before and this one that were dropped because they came too fast.
    pub skipped_frames: u32,
    /// It took longer from its first frame to its acceptance than the job may take.
    pub late: bool,
    /// How long the reader was held back before it could hand the chunk on.
    #[serde(rename = "held_back_ms", serialize_with = "ns_as_ms")]
    pub held_back_ns: u64,
    /// By how much later than the rate that the source names its first frame was built; `None` where no rate is kept.
    #[serde(rename = "behind_ms", serialize_with = "some_ns_as_ms")]
    pub behind_ns: Option<u64>,
}

impl ChunkRecord {
    /// A record with nothing in it, and places for all stages and members of this pipeline.
    pub(crate) fn before(pipeline: &Pipeline) -> Self {
        let stages = pipeline.stages()[1..].iter();
        Self {
            stages: stages.map(StageRecord::before).collect(),
            ..Self::default()
        }
    }

    /// How long a stage worked on it, by the stage's place in the pipeline.
    pub fn work_ns(&self, stage: usize) -> u64 {
        let Some(behind) = stage.checked_sub(1) else {
            return self.build_end_ns.saturating_sub(self.build_start_ns);
        };
        let record = self.stages.get(behind);
        record.map_or(0, |record| record.work_us.saturating_mul(1_000))
    }

    /// Returns the records of a stage's group, the leader first; none where one rank runs the stage.
    pub fn members(&self, stage: usize) -> &[MemberRecord] {
        let record = stage.checked_sub(1).and_then(|at| self.stages.get(at));
        record.map_or(&[], |record| &record.members)
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

    /// When the rank at this place of a stage's ranks worked on it, if that is known. All members of a group begin together.
    pub(super) fn rank_times(&self, stage: usize, place: usize) -> Option<(u64, u64)> {
        let times = self.times(stage)?;
        let end_ns = match self.members(stage).get(place) {
            None => times.end_ns,
            Some(member) => {
                let work_ns = member.work_us.saturating_mul(1_000);
                times.end_ns.min(times.start_ns.saturating_add(work_ns))
            }
        };
        Some((times.start_ns, end_ns))
    }

    /// How long the rank at this place of a stage's ranks had waited; none of the source.
    pub(super) fn rank_idle_ns(&self, stage: usize, place: usize) -> Option<u64> {
        match self.members(stage).get(place) {
            None => self.idle_ns(stage),
            Some(member) => Some(member.idle_us.saturating_mul(1_000)),
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

/// What a trace calls a stage: its label, and of a group its ranks too.
pub(super) fn named(stage: &StageSpec) -> String {
    match stage.is_group() {
        true => format!("{}, {}", stage.label(), stage.ranks_in_words()),
        false => stage.label(),
    }
}

/// The ranks that lead a stage: a group counts as its leader.
pub(super) fn leaders(pipeline: &Pipeline) -> BTreeSet<Rank> {
    pipeline.stages().iter().map(StageSpec::leader).collect()
}

pub(crate) fn as_ms<S: Serializer>(us: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(*us as f64 / 1e3)
}

fn ns_as_ms<S: Serializer>(ns: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(*ns as f64 / 1e6)
}

fn some_ns_as_ms<S: Serializer>(ns: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    ns.map(|ns| ns as f64 / 1e6).serialize(serializer)
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
    }
}
