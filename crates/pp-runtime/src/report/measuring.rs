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

use pp_contract::{Pipeline, Rank, StageSpec};

use super::measures::{Measures, RankMeasures, StageMeasures};
use super::record::leaders;
use super::{ChunkRecord, Recorder, Restart};

/// Chunks left out at the start of a long run: the first ones pay for cold caches and an empty pipeline.
pub const DEFAULT_WARM_UP: u64 = 16;

/// The warm-up for a run of `chunks`: [`DEFAULT_WARM_UP`], but never more than a quarter of the run.
pub fn default_warm_up(chunks: u64) -> u64 {
    DEFAULT_WARM_UP.min(chunks / 4)
}

impl Measures {
    /// Measures what the ring of `recorder` holds, leaving out the first `warm_up` chunks of the run. `restarts` are
    /// those of the run.
    ///
    /// Allocates a few vectors of the ring's length: call it at the end or for a status line, not per chunk.
    pub fn of(recorder: &Recorder, warm_up: u64, restarts: &[Restart]) -> Self {
        let (totals, pipeline) = (recorder.totals(), recorder.pipeline());
        let forgotten = totals.chunks - recorder.records().len() as u64;
        let measured: Vec<ChunkPair<'_>> = recorder
            .records()
            .zip(recorder.records().skip(1))
            .zip(forgotten + 1..)
            .filter(|((before, now), ordinal)| {
                *ordinal >= warm_up && !before.dropped && !now.dropped
            })
            .map(|((before, now), _)| ChunkPair { before, now })
            .collect();
        let warm = || {
            let numbered = recorder.records().zip(forgotten..);
            numbered.filter_map(|(record, ordinal)| (ordinal >= warm_up).then_some(record))
        };
        let latency = Sorted::new(warm().filter_map(ChunkRecord::latency_ns));
        let added_latency = Sorted::new(warm().filter_map(ChunkRecord::added_latency_ns));

        let period = Sorted::new(measured.iter().map(ChunkPair::period_ns));
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
            late: totals.late,
            skipped_frames: totals.skipped_frames,
            steps_saved: totals.steps_saved,
            held_back_ms: totals.held_back_ns as f64 / 1e6,
            behind_ms: totals.behind_ns as f64 / 1e6,
            behind_max_ms: totals.behind_max_ns as f64 / 1e6,
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

    fn add_ratios(&mut self, measured: &[ChunkPair<'_>], pipeline: &Pipeline) {
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
}

fn stages(
    measured: &[ChunkPair<'_>],
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

fn ranks(measured: &[ChunkPair<'_>], pipeline: &Pipeline) -> Vec<RankMeasures> {
    let measures = leaders(pipeline).into_iter().map(|rank| {
        let works = measured.iter().map(|p| p.now.rank_work_ns(pipeline, rank));
        RankMeasures::of(rank, works)
    });
    measures.collect()
}

/// The ranks of the group that runs stage `at`.
fn members(measured: &[ChunkPair<'_>], at: usize, stage: &StageSpec) -> Vec<RankMeasures> {
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

/// Says whether a rank was lost, or not yet there again, between the first of these chunks and the last.
fn spans(measured: &[ChunkPair<'_>], restart: &Restart) -> bool {
    let (Some(first), Some(last)) = (measured.first(), measured.last()) else {
        return false;
    };
    restart.lost_ns <= last.now.accepted_ns
        && restart
            .served_ns
            .is_none_or(|at| at >= first.before.accepted_ns)
}

/// A measured chunk and the one accepted before it.
struct ChunkPair<'a> {
    before: &'a ChunkRecord,
    now: &'a ChunkRecord,
}

impl ChunkPair<'_> {
    fn period_ns(&self) -> u64 {
        self.now.accepted_ns.saturating_sub(self.before.accepted_ns)
    }
}

/// The median time that was hidden, and the median share of what could be. Of chunks where only one rank took time there
/// is no share.
fn hidden(measured: &[ChunkPair<'_>], pipeline: &Pipeline) -> (Option<f64>, Option<f64>) {
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
