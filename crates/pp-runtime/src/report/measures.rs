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
//! ```
//!
//! A chunk is measured when it and the one before it were emitted, and it is past the warm-up. A dropped chunk emits
//! nothing, so the distance between its neighbours is not a period of the pipeline.

use serde::Serialize;

use super::{ChunkRecord, Recorder};

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
    /// Median distance of two emitted chunks.
    pub period_ms: f64,
    /// Mean distance. Where it is far from the median, chunks come in bursts and no ratio of medians can be trusted.
    pub period_mean_ms: f64,
    /// Tenth percentile of it.
    pub period_p10_ms: f64,
    /// Ninetieth percentile of it.
    pub period_p90_ms: f64,
    /// The largest.
    pub period_max_ms: f64,
    /// Median of stage A.
    pub build_ms: f64,
    /// Median of stage C.
    pub decode_ms: f64,
    /// Median of the front's whole work on a chunk.
    pub stage0_ms: f64,
    /// Median of phase B.
    pub stage1_ms: f64,
    /// Median of the time that was hidden.
    pub hidden_ms: f64,
    /// 1 when the shorter stage disappears behind the longer; 0 when they take turns. None when a stage takes no time.
    pub overlap_score: Option<f64>,
    /// 1 when the slower stage never waits. None when nothing was measured.
    pub efficiency: Option<f64>,
    /// Median time that phase B waited for a chunk.
    pub phase_b_idle_ms: f64,
    /// Share of the measured time that phase B waited, from 0 to 1.
    pub phase_b_idle_share: f64,
    /// Most chunks in flight at once.
    pub max_in_flight: u32,
    /// Mean length of the source queue.
    pub source_queue_mean: f64,
    /// Longest source queue.
    pub source_queue_max: u32,
    /// Mean length of the sink queue.
    pub sink_queue_mean: f64,
    /// Longest sink queue.
    pub sink_queue_max: u32,
    /// Median payload sent to phase B, per chunk.
    pub forward_bytes: u64,
    /// Median payload received from it, per chunk.
    pub back_bytes: u64,
}

impl Measures {
    /// Measures what the ring of `recorder` holds, leaving out the first `warm_up` chunks of the run.
    ///
    /// Allocates a few vectors of the ring's length: call it at the end or for a status line, not per chunk.
    pub fn of(recorder: &Recorder, warm_up: u64) -> Self {
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

        let period = columns(|p| p.period_ns());
        let stage0 = columns(|p| p.now.stage0_ns());
        let stage1 = columns(|p| p.now.stage1_ns());
        let wall_ns = totals.last_emit_ns.saturating_sub(totals.first_build_ns);
        let idle_ns: f64 = measured.iter().map(|p| p.idle_ns() as f64).sum();
        let period_ns: f64 = measured.iter().map(|p| p.period_ns() as f64).sum();
        let mean = |f: fn(&ChunkRecord) -> u32| {
            let sum: u64 = measured.iter().map(|p| u64::from(f(p.now))).sum();
            sum as f64 / (measured.len().max(1)) as f64
        };
        let max = |f: fn(&ChunkRecord) -> u32| measured.iter().map(|p| f(p.now)).max().unwrap_or(0);

        Self {
            chunks: totals.chunks,
            dropped: totals.dropped,
            frames: totals.frames,
            measured: measured.len() as u64,
            warm_up: warm_up.min(totals.chunks),
            wall_ms: ms(wall_ns as f64),
            frames_per_second: ratio(totals.frames as f64 * 1e9, wall_ns as f64).unwrap_or(0.0),
            period_ms: ms(period.median()),
            period_mean_ms: ms(period_ns / measured.len().max(1) as f64),
            period_p10_ms: ms(period.quantile(0.1)),
            period_p90_ms: ms(period.quantile(0.9)),
            period_max_ms: ms(period.quantile(1.0)),
            build_ms: ms(columns(|p| p.now.build_ns()).median()),
            decode_ms: ms(columns(|p| p.now.decode_ns()).median()),
            stage0_ms: ms(stage0.median()),
            stage1_ms: ms(stage1.median()),
            hidden_ms: ms(columns(|p| p.hidden_ns()).median()),
            overlap_score: overlap_score(&measured),
            efficiency: ratio(stage0.median().max(stage1.median()), period.median()),
            phase_b_idle_ms: ms(columns(|p| p.idle_ns()).median()),
            phase_b_idle_share: ratio(idle_ns, period_ns).unwrap_or(0.0),
            max_in_flight: totals.max_in_flight,
            source_queue_mean: mean(|r| r.source_queue),
            source_queue_max: max(|r| r.source_queue),
            sink_queue_mean: mean(|r| r.sink_queue),
            sink_queue_max: max(|r| r.sink_queue),
            forward_bytes: columns(|p| p.now.forward_bytes).median() as u64,
            back_bytes: columns(|p| p.now.back_bytes).median() as u64,
        }
    }

    /// Whether the times bear the mark of a scheduling fault: phase B waits as long as a decode takes, little is hidden
    /// and both queues are near empty. Then each envelope was sent only after the decode of the chunk before.
    pub fn looks_serial(&self) -> bool {
        let waits_for_decode =
            (self.phase_b_idle_ms - self.decode_ms).abs() <= 0.2 * self.decode_ms;
        self.decode_ms > 0.0
            && waits_for_decode
            && self.overlap_score.is_some_and(|score| score < 0.3)
            && self.source_queue_mean < 1.0
            && self.sink_queue_mean < 1.0
    }
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

    /// Mean of the two middle values; 0 when empty.
    fn median(&self) -> f64 {
        let n = self.0.len();
        if n == 0 {
            return 0.0;
        }
        (self.0[(n - 1) / 2] as f64 + self.0[n / 2] as f64) / 2.0
    }

    /// The smallest value that at least the share `q` does not exceed; 0 when empty.
    fn quantile(&self, q: f64) -> f64 {
        let rank = (q * self.0.len() as f64).ceil() as usize;
        self.0
            .get(rank.max(1) - 1)
            .map_or(0.0, |value| *value as f64)
    }
}

fn ms(ns: f64) -> f64 {
    ns / 1e6
}

fn ratio(numerator: f64, denominator: f64) -> Option<f64> {
    (denominator > 0.0).then(|| numerator / denominator)
}

#[cfg(test)]
mod tests;
