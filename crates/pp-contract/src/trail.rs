//! The trail of a chunk: what each stage that worked on it says of its work.
//!
//! *Hazard.* A stage that skips a step, or works on another chunk than the plan says, makes an output that looks right.
//! *Guarantee.* Each stage reports the calls that it made and the first frame that it saw. Every rank compares the
//! reports of a message with the plan before it posts a receive for the payload.

use core::ops::Range;

use serde::{Deserialize, Serialize};

use crate::bounded::List;
use crate::ids::Rank;
use crate::pipeline::{MAX_RANKS, MAX_STAGES, Pipeline, StageSpec};
use crate::plan::Plan;
use crate::seal::Seal;

/// What a stage says of its work on a chunk. In a ring the laps are summed, and the seal is that of the last one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageReport {
    /// The calls that it made.
    pub calls: u32,
    /// The first frame of the chunk, as it saw it.
    pub start_frame: u64,
    /// How long it worked, in microseconds. Durations were measured where the work was done, so no clocks need agree.
    pub work_us: u64,
    /// How long it had waited for the chunk, in microseconds.
    pub idle_us: u64,
    /// What is said of tensors that carry digests; none where they do not.
    pub seal: Option<Seal>,
}

impl StageReport {
    /// Says whether this, which `rank` says, is what the plan asks of the stage in these of its `of` laps.
    ///
    /// # Errors
    /// [`TrailError::Calls`], [`TrailError::StartFrame`].
    pub fn check<P: Plan>(
        &self,
        plan: &P,
        (stage, rank): (&StageSpec, Rank),
        laps: Range<u16>,
        of: u16,
    ) -> Result<(), TrailError> {
        let name = || stage.name.to_string();
        let planned = plan.calls(stage, laps, of);
        if self.calls != planned {
            return Err(TrailError::Calls {
                stage: name(),
                rank,
                planned,
                observed: self.calls,
            });
        }
        if self.start_frame != plan.start_frame() {
            return Err(TrailError::StartFrame {
                stage: name(),
                rank,
                expected: plan.start_frame(),
                got: self.start_frame,
            });
        }
        Ok(())
    }

    fn add(&mut self, lap: &Self) {
        self.calls = self.calls.saturating_add(lap.calls);
        self.work_us = self.work_us.saturating_add(lap.work_us);
        self.idle_us = self.idle_us.saturating_add(lap.idle_us);
        self.start_frame = lap.start_frame;
        self.seal = lap.seal;
    }
}

/// Why a trail is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TrailError {
    /// It is in a lap that its ring does not have.
    #[error("it is in lap {got} of {laps}, counted from 0")]
    Lap {
        /// The lap, from 0.
        got: u16,
        /// How many laps there are; 1 outside of a ring.
        laps: u16,
    },
    /// A report is missing, or one of a stage that has not run yet is there.
    #[error("it has {got} reports, and {expected} were due")]
    Length {
        /// As the pipeline says.
        expected: usize,
        /// As the message says.
        got: usize,
    },
    /// A stage made another number of calls than planned.
    #[error("{stage} on rank {rank} made {observed} calls, {planned} were planned")]
    Calls {
        /// The stage.
        stage: String,
        /// The rank that says it.
        rank: Rank,
        /// As planned.
        planned: u32,
        /// As made.
        observed: u32,
    },
    /// A stage saw another chunk.
    #[error("{stage} on rank {rank} saw frame {got} first, the plan says {expected}")]
    StartFrame {
        /// The stage.
        stage: String,
        /// The rank that says it.
        rank: Rank,
        /// As the plan says.
        expected: u64,
        /// As the stage says.
        got: u64,
    },
}

/// Most reports of a trail: no rank is a member of two groups.
const MAX_REPORTS: usize = MAX_STAGES + MAX_RANKS as usize;

/// The reports of the stages behind the source, in the order of the pipeline; of a group one of each member, the leader
/// first. The source makes none: its rank knows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Trail(List<StageReport, MAX_REPORTS>);

impl Trail {
    /// The reports: that of the leader of stage 1 first.
    #[must_use]
    pub fn reports(&self) -> &[StageReport] {
        &self.0
    }

    /// The reports of a stage, by its place in the pipeline: that of its leader first. None where it has not reported, and
    /// of the source.
    #[must_use]
    pub fn of(&self, pipeline: &Pipeline, stage: usize) -> &[StageReport] {
        let [from, to] = [stage, stage + 1].map(|to| due(pipeline, to).min(self.0.len()));
        &self.0[from..to]
    }

    /// Adds the report of the leader of a stage: a new one, or one lap more.
    ///
    /// # Panics
    /// If a stage before it has not reported, or it is the source.
    pub(crate) fn add(&mut self, pipeline: &Pipeline, stage: usize, report: &StageReport) {
        assert!(stage > 0, "the source makes no report");
        let at = due(pipeline, stage);
        match self.0.get_mut(at) {
            Some(known) => known.add(report),
            None => {
                assert_eq!(self.0.len(), at, "stages report in their order");
                self.join(report);
            }
        }
    }

    /// Adds the report of the next member of the group that reported last.
    ///
    /// # Panics
    /// If there are more reports than any pipeline has.
    pub(crate) fn join(&mut self, report: &StageReport) {
        let added = self.0.push(*report);
        added.expect("a pipeline has no more members");
    }

    /// Says whether this is the trail of a chunk that stage `maker` hands on, and that the next stage works on in this lap.
    /// That of a stale chunk is empty. `sender` is who says what `maker` did.
    pub(crate) fn check<P: Plan>(
        &self,
        plan: &P,
        is_stale: bool,
        pipeline: &Pipeline,
        (maker, lap): (usize, u16),
        sender: Rank,
    ) -> Result<(), TrailError> {
        let laps = pipeline.laps_of(maker, plan);
        if lap >= laps {
            return Err(TrailError::Lap { got: lap, laps });
        }
        // From the last stage of a ring, lap 0 is that of a stage behind it: then the ring is done.
        let ring = pipeline.ring_at(maker);
        let open = ring.filter(|ring| maker < ring.last || lap > 0);
        let last = match open {
            Some(ring) if lap > 0 => ring.last,
            _ => maker,
        };
        let expected = match pipeline.stages()[maker].leader() == sender {
            _ if is_stale => 0,
            true => due(pipeline, last + 1),
            // A member adds its own report alone.
            false => due(pipeline, maker) + 1,
        };
        let got = self.0.len();
        if got != expected {
            return Err(TrailError::Length { expected, got });
        }
        for ((stage, rank), report) in reporters(pipeline).zip(&*self.0) {
            let spec = &pipeline.stages()[stage];
            let of = pipeline.laps_of(stage, plan);
            let done = match open {
                Some(ring) if stage >= ring.first => {
                    let has_this_one = stage <= maker && maker < ring.last;
                    lap + u16::from(has_this_one)
                }
                _ => of,
            };
            let is_own = stage == maker && rank == spec.leader();
            let rank = if is_own { sender } else { rank };
            report.check(plan, (spec, rank), 0..done, of)?;
        }
        Ok(())
    }
}

/// Who reports, in the order of the reports: a stage, by its place, and a rank that runs it.
fn reporters(pipeline: &Pipeline) -> impl Iterator<Item = (usize, Rank)> {
    let stages = pipeline.stages().iter().enumerate().skip(1);
    stages.flat_map(|(at, stage)| stage.ranks.iter().map(move |rank| (at, *rank)))
}

/// How many reports there are of the stages before this one.
fn due(pipeline: &Pipeline, stage: usize) -> usize {
    let before = pipeline.stages().iter().take(stage).skip(1);
    before.map(|stage| stage.ranks.len()).sum()
}
