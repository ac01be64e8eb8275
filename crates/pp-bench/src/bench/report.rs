//! What `pp bench overlap` found, as JSON and as text.

use std::fmt;

use pp_contract::Rank;
use pp_contract::pipeline::{EdgeKind, EdgeSpec};
use pp_runtime::report::{Count, Measures};
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use super::against::Against;
use super::layout::{Stages, chunks};
use crate::args::{OverlapArgs, Simulate};

/// The result of `pp bench overlap`. Times are medians after the warm-up unless they say else.
pub(super) struct Overlap<'a> {
    pub(super) args: &'a OverlapArgs,
    pub(super) stages: &'a Stages,
    pub(super) transport: &'static str,
    pub(super) how: Simulate,
    pub(super) measures: Measures,
    pub(super) against: Option<Against>,
    /// Half a round trip of one cache line between two cores, before the run.
    pub(super) core_hop_us: Option<f64>,
    /// Device memory of the GPU of rank 0 that was taken after the first tenth of the chunks.
    pub(super) device_memory_grown_bytes: Option<i64>,
}

impl Overlap<'_> {
    fn simulate(&self) -> String {
        clap::ValueEnum::to_possible_value(&self.how)
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// `5, 5, 0`.
    pub(super) fn asked_ms(&self) -> String {
        let times: Vec<String> = self.stages.ms.iter().map(f64::to_string).collect();
        times.join(", ")
    }

    /// The run was ended early; the figures are those of the chunks that were done.
    fn was_interrupted(&self) -> bool {
        self.measures.chunks + self.measures.skipped_frames < chunks(self.args, self.stages)
    }

    /// The stages waited on the host's clock, and no GPU worked.
    fn is_gpu_idle(&self) -> bool {
        self.transport != "host" && self.how == Simulate::Sleep
    }

    /// What the driver of a rank takes for a chunk in microseconds, besides its stages and its waits. On GPUs, and of a rank
    /// with the source alone, it is not known.
    fn driver_us(&self, rank: Rank) -> Option<f64> {
        let m = &self.measures;
        let period_ms = m.period_mean_ms.filter(|_| self.transport == "host")?;
        let of_rank = |of: u32| of == rank.get();
        let work_ms = m.ranks.iter().find(|of| of_rank(of.rank))?.work_mean_ms?;
        // Each stage of a rank says how long their driver waited.
        let mut stages = m.stages.iter().filter(|stage| of_rank(stage.rank));
        let waited_ms = stages.find_map(|stage| stage.idle_share)? * period_ms;
        Some(((period_ms - work_ms - waited_ms) * 1e3).max(0.0))
    }

    /// That of each rank.
    fn drivers_us(&self) -> Vec<Option<f64>> {
        let ranks = self.stages.pipeline.world_size().ranks();
        ranks.map(|rank| self.driver_us(rank)).collect()
    }

    /// Payload bytes over all edges in a period; none where payloads are handed over and no stage touches them, or have two
    /// sizes.
    fn gbytes_per_s(&self, period_ms: Option<f64>) -> Option<f64> {
        // Every payload byte counts once: it was written once and read once.
        let is_of_one_size = self.args.against.is_none();
        let moves = is_of_one_size && (self.args.touch || self.transport != "host");
        let bytes = self.args.bytes;
        let period_ms = period_ms.filter(|ms| *ms > 0.0 && moves && bytes > 0)?;
        let carries = |edge: &EdgeSpec| matches!(edge.kind, EdgeKind::Onward | EdgeKind::Lap);
        let edges = self.stages.pipeline.edges().filter(carries).count();
        Some((edges as u64 * bytes) as f64 / period_ms / 1e6)
    }
}

impl Serialize for Overlap<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (args, m) = (self.args, &self.measures);
        let asked = m.over_median(self.stages.longest_ms());
        let asked_by_mean = m.over_mean(self.stages.longest_ms());
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("transport", self.transport)?;
        map.serialize_entry("simulate", &self.simulate())?;
        map.serialize_entry("interrupted", &self.was_interrupted())?;
        map.serialize_entry("gpu_idle", &self.is_gpu_idle())?;
        map.serialize_entry("touch", &args.touch)?;
        map.serialize_entry("sync", &args.sync)?;
        map.serialize_entry("bytes", &args.bytes)?;
        map.serialize_entry("against", &self.against)?;
        map.serialize_entry("pipeline", &self.stages.pipeline.to_string())?;
        map.serialize_entry("stages_ms", &self.stages.ms)?;
        map.serialize_entry("stages", &m.stages)?;
        map.serialize_entry("ranks", &m.ranks)?;
        map.serialize_entry("depth", &self.stages.depth)?;
        map.serialize_entry("chunks", &m.chunks)?;
        map.serialize_entry("period_ms", &m.period_ms)?;
        map.serialize_entry("period_mean_ms", &m.period_mean_ms)?;
        map.serialize_entry("efficiency", &m.efficiency)?;
        map.serialize_entry("efficiency_why_null", &m.efficiency_why_null)?;
        map.serialize_entry("efficiency_by_mean", &m.efficiency_by_mean)?;
        map.serialize_entry(
            "efficiency_by_mean_why_null",
            &m.efficiency_by_mean_why_null,
        )?;
        map.serialize_entry("efficiency_asked", &asked.ok())?;
        map.serialize_entry("efficiency_asked_why_null", &asked.err())?;
        map.serialize_entry("efficiency_asked_by_mean", &asked_by_mean.ok())?;
        map.serialize_entry("efficiency_asked_by_mean_why_null", &asked_by_mean.err())?;
        map.serialize_entry("overlap_score", &m.overlap_score)?;
        map.serialize_entry("overlap_score_why_null", &m.overlap_score_why_null)?;
        map.serialize_entry("per_second", &args.per_second)?;
        map.serialize_entry("max_latency_ms", &args.max_latency_ms)?;
        map.serialize_entry("chunks_skipped", &m.skipped_frames)?;
        // From the admission of a chunk to its end, where the source has nothing to read.
        map.serialize_entry("latency_ms", &m.latency_ms)?;
        map.serialize_entry("latency_mean_ms", &m.latency_mean_ms)?;
        map.serialize_entry("latency_p99_ms", &m.latency_p99_ms)?;
        map.serialize_entry("latency_max_ms", &m.latency_max_ms)?;
        map.serialize_entry("max_in_flight", &m.max_in_flight)?;
        map.serialize_entry("driver_us", &self.drivers_us())?;
        map.serialize_entry("gbytes_per_s", &self.gbytes_per_s(m.period_ms))?;
        map.serialize_entry("gbytes_per_s_by_mean", &self.gbytes_per_s(m.period_mean_ms))?;
        map.serialize_entry("core_hop_us", &self.core_hop_us)?;
        map.serialize_entry("device_memory_grown_bytes", &self.device_memory_grown_bytes)?;
        map.end()
    }
}

impl fmt::Display for Overlap<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let payloads = format!(
            "{} bytes over each edge at depth {}",
            self.args.bytes, self.stages.depth
        );
        self.write_setting(f, &payloads)?;
        self.write_times(f, &payloads)?;
        self.write_notes(f, &payloads)
    }
}

/// A figure, or that there is none.
fn figure(value: Option<f64>) -> String {
    value.map_or("n/a".into(), |v| format!("{v:.4}"))
}

impl Overlap<'_> {
    /// Writes what was run, its period and its stages.
    fn write_setting(&self, f: &mut fmt::Formatter<'_>, payloads: &str) -> fmt::Result {
        let m = &self.measures;
        writeln!(
            f,
            "transport {}, {payloads}, {}, {} of {} ms ({})",
            self.transport,
            Count(m.chunks, "chunk"),
            self.stages.pipeline,
            self.asked_ms(),
            self.simulate()
        )?;
        writeln!(
            f,
            "period {} ms median, {} ms mean{} ({payloads})",
            figure(m.period_ms),
            figure(m.period_mean_ms),
            if m.is_uneven() { ", far apart" } else { "" }
        )?;
        for stage in &m.stages {
            write!(
                f,
                "{} on rank {}: {} ms a chunk",
                stage.stage,
                stage.rank,
                figure(stage.work_ms)
            )?;
            match stage.idle_ms {
                Some(idle) => writeln!(f, ", idle {idle:.4} ms before it")?,
                None => writeln!(f)?,
            }
        }
        Ok(())
    }

    /// Writes its ratios and latencies, and what the drivers took.
    fn write_times(&self, f: &mut fmt::Formatter<'_>, payloads: &str) -> fmt::Result {
        let m = &self.measures;
        writeln!(
            f,
            "efficiency {} ({} by the mean), of the times asked for {} ({} by the mean), overlap score {} \
             ({payloads})",
            figure(m.efficiency),
            figure(m.efficiency_by_mean),
            figure(m.over_median(self.stages.longest_ms()).ok()),
            figure(m.over_mean(self.stages.longest_ms()).ok()),
            figure(m.overlap_score)
        )?;
        for missing in m.missing_ratios() {
            writeln!(f, "{missing}")?;
        }
        writeln!(
            f,
            "latency from {} to acceptance {} ms median, {} ms mean, p99 {} ms, worst {} ms",
            match self.args.per_second {
                Some(_) => "arrival",
                None => "admission",
            },
            figure(m.latency_ms),
            figure(m.latency_mean_ms),
            figure(m.latency_p99_ms),
            figure(m.latency_max_ms)
        )?;
        if let Some(rate) = self.args.per_second {
            writeln!(
                f,
                "{rate} chunks/s arrived, {} of them were dropped",
                m.skipped_frames
            )?;
        }
        writeln!(f, "in flight at most {}", m.max_in_flight)?;
        for (rank, us) in self.drivers_us().into_iter().enumerate() {
            if let Some(us) = us {
                writeln!(
                    f,
                    "the driver of rank {rank} takes {us:.2} µs a chunk, without stages and waits"
                )?;
            }
        }
        Ok(())
    }

    /// Writes what else there is to know of the run.
    fn write_notes(&self, f: &mut fmt::Formatter<'_>, payloads: &str) -> fmt::Result {
        let (args, m) = (self.args, &self.measures);
        if self.was_interrupted() {
            writeln!(f, "interrupted: figures of the chunks that were done")?;
        }
        if self.is_gpu_idle() {
            writeln!(f, "the stages slept on the host: the GPUs were idle")?;
        }
        let by_mean = self.gbytes_per_s(m.period_mean_ms);
        let rates = self.gbytes_per_s(m.period_ms).zip(by_mean);
        if let Some((rate, by_mean)) = rates.filter(|_| args.touch) {
            writeln!(
                f,
                "{rate:.1} GB/s of payload written and read, {by_mean:.1} by the mean period ({payloads})"
            )?;
        }
        if let Some(against) = &self.against {
            writeln!(
                f,
                "with payloads of {} bytes the period is {against}",
                args.bytes
            )?;
        }
        if let Some(bytes) = self.device_memory_grown_bytes {
            writeln!(f, "device memory grew by {bytes} bytes after the warm-up")?;
        }
        if let Some(hop) = self.core_hop_us {
            writeln!(
                f,
                "half a round trip of a cache line between two cores: {hop:.3} µs"
            )?;
        }
        Ok(())
    }
}
