//! The overlap measures, computed from records.
//!
//! For chunk k, with all times the front's own and phase B's duration as it reported it:
//!
//! ```text
//! period_k      = emitted_k - emitted_(k-1)
//! stage0_k      = build_k + decode_k
//! stage1_k      = phase_b_us_k
//! hidden_k      = max(0, stage0_k + stage1_k - period_k)
//! overlap_score = median over k of hidden_k / min(stage0_k, stage1_k)
//! efficiency    = max(median stage0, median stage1) / median period
//! latency_k     = emitted_k - first frame of k read
//! ```
//!
//! A chunk is measured when it and the one before it were emitted, and it is past the warm-up. A dropped chunk emits
//! nothing, so the distance between its neighbours is not a period of the pipeline. Latency needs no chunk before.
//! Figures of which there are none, and ratios that mean nothing (see [`super::ratio`]), are null.

use std::fmt;

use serde::{Serialize, Serializer};

use super::far::FAR;
use super::{ChunkRecord, Recorder, Restart};

/// Chunks left out at the start of a long run: the first ones pay for cold caches and an empty pipeline.
pub const DEFAULT_WARM_UP: u64 = 16;

/// The warm-up for a run of `chunks`: [`DEFAULT_WARM_UP`], but never more than a quarter of the run.
pub fn default_warm_up(chunks: u64) -> u64 {
    DEFAULT_WARM_UP.min(chunks / 4)
}

/// How well a run overlapped. Keys are stable: they are what `--report` and `pp bench` print.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Measures {
    /// Chunks of the whole run.
    pub chunks: u64,
    /// Chunks dropped because their epoch had passed.
    pub dropped: u64,
    /// Frames emitted in the whole run.
    pub frames: u64,
    /// Chunks that the medians below are taken over.
    pub measured: u64,
    /// Chunks left out at the start.
    pub warm_up: u64,
    /// From the first build to the last emitted chunk.
    pub wall_ms: f64,
    /// Frames emitted over that time.
    pub frames_per_second: f64,
    /// Phase B was lost and started again between the first measured chunk and the last.
    pub spans_restart: bool,
    /// Median distance of two emitted chunks.
    pub period_ms: Option<f64>,
    /// Mean distance. Where it is far from the median, chunks come in bursts and no ratio of medians can be trusted.
    pub period_mean_ms: Option<f64>,
    /// Tenth percentile of it.
    pub period_p10_ms: Option<f64>,
    /// Ninetieth percentile of it.
    pub period_p90_ms: Option<f64>,
    /// The largest.
    pub period_max_ms: Option<f64>,
    /// Median of stage A.
    pub build_ms: Option<f64>,
    /// Median of stage C.
    pub decode_ms: Option<f64>,
    /// Median of the front's whole work on a chunk.
    pub stage0_ms: Option<f64>,
    /// Median of phase B.
    pub stage1_ms: Option<f64>,
    /// Median of the time that was hidden; none where there is no overlap score.
    pub hidden_ms: Option<f64>,
    /// 1 when the shorter stage disappears behind the longer; 0 when they take turns.
    pub overlap_score: Option<f64>,
    /// Why there is none.
    pub overlap_score_why_null: Option<WhyNull>,
    /// 1 when the slower stage never waits.
    pub efficiency: Option<f64>,
    /// Why there is none.
    pub efficiency_why_null: Option<WhyNull>,
    /// The efficiency over the mean period instead of the median.
    pub efficiency_by_mean: Option<f64>,
    /// Why there is none.
    pub efficiency_by_mean_why_null: Option<WhyNull>,
    /// Median time from when the first frame of a chunk had been read until the chunk was handed to the sink.
    pub latency_ms: Option<f64>,
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
    /// Median time that phase B waited for a chunk.
    pub phase_b_idle_ms: Option<f64>,
    /// Share of the measured time that phase B waited, from 0 to 1.
    pub phase_b_idle_share: Option<f64>,
    /// Most chunks in flight at once, each from its admission until the end of its decode.
    pub max_in_flight: u32,
    /// Mean length of the source queue.
    pub source_queue_mean: Option<f64>,
    /// Longest source queue.
    pub source_queue_max: Option<u32>,
    /// Mean length of the sink queue.
    pub sink_queue_mean: Option<f64>,
    /// Longest sink queue.
    pub sink_queue_max: Option<u32>,
    /// Median payload sent to phase B, per chunk.
    pub forward_bytes: Option<u64>,
    /// Median payload received from it, per chunk.
    pub back_bytes: Option<u64>,
}

/// Why a ratio is not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WhyNull {
    /// No distance of two chunks was measured.
    NothingMeasured,
    /// Phase B was lost and started again between the first measured chunk and the last.
    SpansRestart,
    /// A stage had no work: there was nothing to hide, or nothing to keep busy.
    NoWork,
    /// The median of the period is far from its mean.
    Bursts,
    /// The shorter stage is below the scatter of the periods.
    Scatter,
    /// The ratio is above 1 by more than the error of measurement.
    AboveOne,
}

impl fmt::Display for WhyNull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NothingMeasured => f.write_str("too few chunks were measured"),
            Self::SpansRestart => f.write_str("the measured chunks span a restart of Phase B"),
            Self::NoWork => f.write_str("a stage had no work"),
            Self::Bursts => write!(
                f,
                "chunks came in bursts: median and mean of the period differ by more than {:.0} %",
                100.0 * FAR
            ),
            Self::Scatter => f.write_str("the shorter stage is below the scatter of the periods"),
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
        let totals = recorder.totals();
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
        let columns = |f: fn(&Pair<'_>) -> u64| Sorted::new(measured.iter().map(f));
        let warm = || {
            let numbered = recorder.records().zip(forgotten..);
            numbered.filter_map(|(record, ordinal)| (ordinal >= warm_up).then_some(record))
        };
        let latency = Sorted::new(warm().filter_map(ChunkRecord::latency_ns));
        let added_latency = Sorted::new(warm().filter_map(ChunkRecord::added_latency_ns));

        let period = columns(|p| p.period_ns());
        let stage0 = columns(|p| p.now.stage0_ns());
        let stage1 = columns(|p| p.now.stage1_ns());
        let wall_ns = totals.last_emit_ns.saturating_sub(totals.first_build_ns);
        let idle_ns: f64 = measured.iter().map(|p| p.idle_ns() as f64).sum();
        let period_ns: f64 = measured.iter().map(|p| p.period_ns() as f64).sum();
        let mean = |f: fn(&ChunkRecord) -> u32| {
            let sum: u64 = measured.iter().map(|p| u64::from(f(p.now))).sum();
            ratio(sum as f64, measured.len() as f64)
        };
        let max = |f: fn(&ChunkRecord) -> u32| measured.iter().map(|p| f(p.now)).max();

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
            period_mean_ms: ms(ratio(period_ns, measured.len() as f64)),
            period_p10_ms: ms(period.quantile(0.1)),
            period_p90_ms: ms(period.quantile(0.9)),
            period_max_ms: ms(period.quantile(1.0)),
            build_ms: ms(columns(|p| p.now.build_ns()).median()),
            decode_ms: ms(columns(|p| p.now.decode_ns()).median()),
            stage0_ms: ms(stage0.median()),
            stage1_ms: ms(stage1.median()),
            hidden_ms: ms(columns(|p| p.hidden_ns()).median()),
            latency_ms: ms(latency.median()),
            latency_p99_ms: ms(latency.quantile(0.99)),
            latency_max_ms: ms(latency.quantile(1.0)),
            added_latency_ms: ms(added_latency.median()),
            added_latency_p99_ms: ms(added_latency.quantile(0.99)),
            added_latency_max_ms: ms(added_latency.quantile(1.0)),
            phase_b_idle_ms: ms(columns(|p| p.idle_ns()).median()),
            phase_b_idle_share: ratio(idle_ns, period_ns),
            max_in_flight: totals.max_in_flight,
            source_queue_mean: mean(|r| r.source_queue),
            source_queue_max: max(|r| r.source_queue),
            sink_queue_mean: mean(|r| r.sink_queue),
            sink_queue_max: max(|r| r.sink_queue),
            forward_bytes: columns(|p| p.now.forward_bytes).median().map(|b| b as u64),
            back_bytes: columns(|p| p.now.back_bytes).median().map(|b| b as u64),
            ..Self::default()
        };
        m.add_ratios(overlap_score(&measured));
        m
    }

    fn add_ratios(&mut self, score: Option<f64>) {
        let of = |value: Option<f64>| value.unwrap_or(0.0);
        let (stage0, stage1) = (of(self.stage0_ms), of(self.stage1_ms));
        let scatter = of(self.period_p90_ms) - of(self.period_p10_ms);
        let score = self.score(score, stage0.min(stage1), scatter);
        let efficiency = self.over_median(stage0.max(stage1));
        let by_mean = self.over_mean(stage0.max(stage1));
        (self.overlap_score, self.overlap_score_why_null) = (score.ok(), score.err());
        self.hidden_ms = self.hidden_ms.filter(|_| score.is_ok());
        (self.efficiency, self.efficiency_why_null) = (efficiency.ok(), efficiency.err());
        (self.efficiency_by_mean, self.efficiency_by_mean_why_null) = (by_mean.ok(), by_mean.err());
    }

    /// Whether the times bear the mark of a scheduling fault: phase B waits as long as a decode takes, little is hidden
    /// and both queues are near empty. Then each envelope was sent only after the decode of the chunk before.
    pub fn looks_serial(&self) -> bool {
        let (Some(idle_ms), Some(decode_ms)) = (self.phase_b_idle_ms, self.decode_ms) else {
            return false;
        };
        let waits_for_decode = (idle_ms - decode_ms).abs() <= 0.2 * decode_ms;
        decode_ms > 0.0
            && waits_for_decode
            && self.overlap_score.is_some_and(|score| score < 0.3)
            && self.source_queue_mean < Some(1.0)
            && self.sink_queue_mean < Some(1.0)
    }
}

/// Whether Phase B was lost, or not yet there again, between the first of these chunks and the last.
fn spans(measured: &[Pair<'_>], restart: &Restart) -> bool {
    let (Some(first), Some(last)) = (measured.first(), measured.last()) else {
        return false;
    };
    restart.lost_ns <= last.now.emitted_ns
        && restart
            .served_ns
            .is_none_or(|at| at >= first.before.emitted_ns)
}

/// A measured chunk and the one emitted before it.
struct Pair<'a> {
    before: &'a ChunkRecord,
    now: &'a ChunkRecord,
}

impl Pair<'_> {
    fn period_ns(&self) -> u64 {
        self.now.emitted_ns.saturating_sub(self.before.emitted_ns)
    }

    fn idle_ns(&self) -> u64 {
        self.now.idle_us.saturating_mul(1_000)
    }

    fn hidden_ns(&self) -> u64 {
        let work = self.now.stage0_ns().saturating_add(self.now.stage1_ns());
        work.saturating_sub(self.period_ns())
    }
}

/// Median over the chunks in which both stages took time; in the others there is nothing to hide.
fn overlap_score(measured: &[Pair<'_>]) -> Option<f64> {
    let mut scores: Vec<f64> = measured
        .iter()
        .filter_map(|p| {
            let shorter = p.now.stage0_ns().min(p.now.stage1_ns());
            ratio(p.hidden_ns() as f64, shorter as f64)
        })
        .collect();
    scores.sort_by(f64::total_cmp);
    (!scores.is_empty()).then(|| (scores[(scores.len() - 1) / 2] + scores[scores.len() / 2]) / 2.0)
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
        let n = self.0.len();
        let middle = self.0.get(n.checked_sub(1)? / 2..=n / 2)?;
        Some((middle[0] as f64 + middle[middle.len() - 1] as f64) / 2.0)
    }

    /// The smallest value that at least the share `q` does not exceed.
    fn quantile(&self, q: f64) -> Option<f64> {
        let rank = (q * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.max(1) - 1).map(|value| *value as f64)
    }
}

fn ms(ns: Option<f64>) -> Option<f64> {
    ns.map(|ns| ns / 1e6)
}

fn ratio(numerator: f64, denominator: f64) -> Option<f64> {
    (denominator > 0.0).then(|| numerator / denominator)
}

#[cfg(test)]
mod tests;
