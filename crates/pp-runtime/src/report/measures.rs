//! The overlap measures, computed from records.
//!
//! For chunk k, with all moments those of rank 0 and the work of a stage as its rank measured it:
//!
//! ```text
//! period_k      = accepted_k - accepted_(k-1)
//! work_k(rank)  = sum of the works of the rank's stages on k
//! hidden_k      = max(0, sum of work_k over all ranks - period_k)
//! overlap_score = median over k of hidden_k / (sum of work_k over all ranks - largest work_k)
//! efficiency    = largest median work of a rank / median period
//! latency_k     = accepted_k - first frame of k read
//! ```
//!
//! A chunk is measured when it and the one before it were accepted, and it is past the warm-up. The sink takes nothing of a
//! dropped chunk, so the distance between its neighbours is not a period of the pipeline. Latency needs no chunk before.
//! Figures of which there are none, and ratios that mean nothing (see [`super::ratio`]), are null.

use std::fmt;

use pp_contract::{Pipeline, Rank, StageSpec};
use serde::{Serialize, Serializer};

use super::far::FAR;
use super::record::leaders;
use super::{ChunkRecord, Recorder, Restart};

/// Chunks left out at the start of a long run: the first ones pay for cold caches and an empty pipeline.
pub const DEFAULT_WARM_UP: u64 = 16;

/// The warm-up for a run of `chunks`: [`DEFAULT_WARM_UP`], but never more than a quarter of the run.
pub fn default_warm_up(chunks: u64) -> u64 {
    DEFAULT_WARM_UP.min(chunks / 4)
}

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
}

/// Why a ratio is not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WhyNull {
    /// No distance of two chunks was measured.
    NothingMeasured,
    /// A rank was lost and started again between the first measured chunk and the last.
    SpansRestart,
    /// One rank leads all stages.
    OneRank,
    /// Ranks had no work: there was nothing to hide, or nothing to keep busy.
    NoWork,
    /// The median of the period is far from its mean.
    Bursts,
    /// What could be hidden is below the scatter of the periods.
    Scatter,
    /// The ratio is above 1 by more than the error of measurement.
    AboveOne,
}

impl fmt::Display for WhyNull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NothingMeasured => f.write_str("too few chunks were measured"),
            Self::SpansRestart => f.write_str("the measured chunks span a restart"),
            Self::OneRank => f.write_str("one rank leads all stages"),
            Self::NoWork => f.write_str("a rank had no work"),
            Self::Bursts => write!(
                f,
                "chunks came in bursts: median and mean of the period differ by more than {:.0} %",
                100.0 * FAR
            ),
            Self::Scatter => {
                f.write_str("what could be hidden is below the scatter of the periods")
            }
            Self::AboveOne => f.write_str(
                "it is above 1: results had piled up and left faster than they are made",
            ),
        }
    }
}

/// As text.
impl Serialize for WhyNull {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Measures {
    /// Measures what the ring of `recorder` holds, leaving out the first `warm_up` chunks of the run. `restarts` are
    /// those of the run.
    ///
    /// Allocates a few vectors of the ring's length: call it at the end or for a status line, not per chunk.
    pub fn of(recorder: &Recorder, warm_up: u64, restarts: &[Restart]) -> Self {
        let (totals, pipeline) = (recorder.totals(), recorder.pipeline());
        let forgotten = totals.chunks - recorder.len() as u64;
        let measured: Vec<Pair<'_>> = recorder
            .records()
            .zip(recorder.records().skip(1))
            .zip(forgotten + 1..)
            .filter(|((before, now), ordinal)| {
                *ordinal >= warm_up && !before.dropped && !now.dropped
            })
            .map(|((before, now), _)| Pair { before, now })
            .collect();
        let warm = || {
            let numbered = recorder.records().zip(forgotten..);
            numbered.filter_map(|(record, ordinal)| (ordinal >= warm_up).then_some(record))
        };
        let latency = Sorted::new(warm().filter_map(ChunkRecord::latency_ns));
        let added_latency = Sorted::new(warm().filter_map(ChunkRecord::added_latency_ns));

        let period = Sorted::new(measured.iter().map(Pair::period_ns));
        let wall_ns = totals
            .last_accepted_ns
            .saturating_sub(totals.first_build_ns);
        let mean = |f: fn(&ChunkRecord) -> u32| {
            let sum: u64 = measured.iter().map(|p| u64::from(f(p.now))).sum();
            ratio(sum as f64, measured.len() as f64)
        };
        let max = |f: fn(&ChunkRecord) -> u32| measured.iter().map(|p| f(p.now)).max();
        let bytes = Sorted::new(measured.iter().map(|p| p.now.source_bytes));

        let mut m = Self {
            chunks: totals.chunks,
            dropped: totals.dropped,
            frames: totals.frames,
            measured: measured.len() as u64,
            warm_up: warm_up.min(totals.chunks),
            wall_ms: wall_ns as f64 / 1e6,
            frames_per_second: ratio(totals.frames as f64 * 1e9, wall_ns as f64).unwrap_or(0.0),
            spans_restart: restarts.iter().any(|restart| spans(&measured, restart)),
            period_ms: ms(period.median()),
            period_mean_ms: ms(period.mean()),
            period_p10_ms: ms(period.quantile(0.1)),
            period_p90_ms: ms(period.quantile(0.9)),
            period_max_ms: ms(period.quantile(1.0)),
            stages: stages(&measured, pipeline, period.mean()),
            ranks: ranks(&measured, pipeline),
            latency_ms: ms(latency.median()),
            latency_mean_ms: ms(latency.mean()),
            latency_p99_ms: ms(latency.quantile(0.99)),
            latency_max_ms: ms(latency.quantile(1.0)),
            added_latency_ms: ms(added_latency.median()),
            added_latency_p99_ms: ms(added_latency.quantile(0.99)),
            added_latency_max_ms: ms(added_latency.quantile(1.0)),
            max_in_flight: totals.max_in_flight,
            source_queue_mean: mean(|r| r.source_queue),
            source_queue_max: max(|r| r.source_queue),
            sink_queue_mean: mean(|r| r.sink_queue),
            sink_queue_max: max(|r| r.sink_queue),
            source_bytes: bytes.median().map(|b| b as u64),
            ..Self::default()
        };
        m.add_ratios(&measured, pipeline);
        m
    }

    fn add_ratios(&mut self, measured: &[Pair<'_>], pipeline: &Pipeline) {
        let of = |value: Option<f64>| value.unwrap_or(0.0);
        let works = || self.ranks.iter().map(|rank| of(rank.work_ms));
        let longest = works().fold(0.0, f64::max);
        let others = works().sum::<f64>() - longest;
        let scatter = of(self.period_p90_ms) - of(self.period_p10_ms);
        let (hidden, score) = hidden(measured, pipeline);
        let score = self.score(score, others, scatter);
        let efficiency = self.over_median(longest);
        let by_mean = self.over_mean(longest);
        self.hidden_ms = hidden.filter(|_| score.is_ok());
        (self.overlap_score, self.overlap_score_why_null) = (score.ok(), score.err());
        (self.efficiency, self.efficiency_why_null) = (efficiency.ok(), efficiency.err());
        (self.efficiency_by_mean, self.efficiency_by_mean_why_null) = (by_mean.ok(), by_mean.err());
    }

    /// Whether the times bear the mark of a scheduling fault: a stage of another rank waits as long as the sink works on
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

fn stages(
    measured: &[Pair<'_>],
    pipeline: &Pipeline,
    period_ns: Option<f64>,
) -> Vec<StageMeasures> {
    let stages = pipeline.stages().iter().enumerate();
    let measures = stages.map(|(at, stage)| {
        let work = Sorted::new(measured.iter().map(|p| p.now.work_ns(at)));
        let waits = measured.iter().filter_map(|p| p.now.idle_ns(at));
        let idle = Sorted::new(waits);
        StageMeasures {
            stage: stage.label(),
            rank: stage.leader().get(),
            members: members(measured, at, stage),
            work_ms: ms(work.median()),
            idle_ms: ms(idle.median()),
            idle_share: idle
                .mean()
                .zip(period_ns)
                .and_then(|(idle, p)| ratio(idle, p))
                .filter(|share| *share <= 1.0),
        }
    });
    measures.collect()
}

fn ranks(measured: &[Pair<'_>], pipeline: &Pipeline) -> Vec<RankMeasures> {
    let measures = leaders(pipeline).into_iter().map(|rank| {
        let works = measured.iter().map(|p| p.now.rank_work_ns(pipeline, rank));
        RankMeasures::of(rank, works)
    });
    measures.collect()
}

/// The ranks of the group that runs stage `at`.
fn members(measured: &[Pair<'_>], at: usize, stage: &StageSpec) -> Vec<RankMeasures> {
    let ranks = stage.ranks.iter().filter(|_| stage.is_group());
    let measures = ranks.enumerate().map(|(place, rank)| {
        let records = measured.iter().filter_map(|p| p.now.members(at).get(place));
        let works = records.map(|member| member.work_us.saturating_mul(1_000));
        RankMeasures::of(*rank, works)
    });
    measures.collect()
}

impl RankMeasures {
    fn of(rank: Rank, works_ns: impl Iterator<Item = u64>) -> Self {
        let work = Sorted::new(works_ns);
        Self {
            rank: rank.get(),
            work_ms: ms(work.median()),
            work_mean_ms: ms(work.mean()),
            work_max_ms: ms(work.quantile(1.0)),
        }
    }
}

/// Whether a rank was lost, or not yet there again, between the first of these chunks and the last.
fn spans(measured: &[Pair<'_>], restart: &Restart) -> bool {
    let (Some(first), Some(last)) = (measured.first(), measured.last()) else {
        return false;
    };
    restart.lost_ns <= last.now.accepted_ns
        && restart
            .served_ns
            .is_none_or(|at| at >= first.before.accepted_ns)
}

/// A measured chunk and the one accepted before it.
struct Pair<'a> {
    before: &'a ChunkRecord,
    now: &'a ChunkRecord,
}

impl Pair<'_> {
    fn period_ns(&self) -> u64 {
        self.now.accepted_ns.saturating_sub(self.before.accepted_ns)
    }
}

/// The median time that was hidden, and the median share of what could be. Of chunks where only one rank took time there
/// is no share.
fn hidden(measured: &[Pair<'_>], pipeline: &Pipeline) -> (Option<f64>, Option<f64>) {
    let leaders = leaders(pipeline);
    let mut scores = Vec::new();
    let hidden = measured.iter().map(|p| {
        let works = || {
            leaders
                .iter()
                .map(|rank| p.now.rank_work_ns(pipeline, *rank))
        };
        let all_ns = works().fold(0, u64::saturating_add);
        let hidden_ns = all_ns.saturating_sub(p.period_ns());
        let others_ns = all_ns - works().max().unwrap_or(0);
        scores.extend(ratio(hidden_ns as f64, others_ns as f64));
        hidden_ns
    });
    let hidden = ms(Sorted::new(hidden).median());
    scores.sort_by(f64::total_cmp);
    (
        hidden,
        middle(&scores).map(|(low, high)| (low + high) / 2.0),
    )
}

/// A column of nanoseconds or bytes in ascending order.
struct Sorted(Vec<u64>);

impl Sorted {
    fn new(values: impl Iterator<Item = u64>) -> Self {
        let mut values: Vec<u64> = values.collect();
        values.sort_unstable();
        Self(values)
    }

    /// Mean of the two middle values.
    fn median(&self) -> Option<f64> {
        middle(&self.0).map(|(low, high)| (low as f64 + high as f64) / 2.0)
    }

    fn mean(&self) -> Option<f64> {
        let sum: f64 = self.0.iter().map(|value| *value as f64).sum();
        ratio(sum, self.0.len() as f64)
    }

    /// The smallest value that at least the share `q` does not exceed.
    fn quantile(&self, q: f64) -> Option<f64> {
        let rank = (q * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.max(1) - 1).map(|value| *value as f64)
    }
}

/// The two middle values of what is in order; one value twice where their number is odd.
fn middle<T: Copy>(sorted: &[T]) -> Option<(T, T)> {
    let n = sorted.len();
    Some((sorted[n.checked_sub(1)? / 2], sorted[n / 2]))
}

fn ms(ns: Option<f64>) -> Option<f64> {
    ns.map(|ns| ns / 1e6)
}

fn ratio(numerator: f64, denominator: f64) -> Option<f64> {
    (denominator > 0.0).then(|| numerator / denominator)
}

#[cfg(test)]
mod tests;
