//! `pp bench`: measurements of the runtime itself.

mod hop;
mod kernels;
mod link;
mod on_gpu;
mod operations;
mod plan;
mod simulate;
mod stages;
mod video;

use std::io::Write as _;
use std::time::Duration;

use pp_contract::{Manifest, with_source};
use pp_job::{Config, Error, FRONT, Finished, FrontPart, Job, PHASE_B, PhaseBPart, Profile, Ranks};
use pp_kernels::synthetic::Rate;
use pp_runtime::driver::FrontSummary;
use pp_runtime::report::{Count, Measures, View};
use pp_transport::backend::Edges;
use pp_transport::bell::Bell;
use pp_transport::host::Host;
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

pub(crate) use self::kernels::kernels;
pub(crate) use self::link::link;
use self::on_gpu::{GpuBenchFront, Stage};
use self::plan::payload;
use self::simulate::Work;
use self::stages::BenchFront;
pub(crate) use self::video::video;
use crate::args::{OverlapArgs, Simulate, TransportChoice};
use crate::backend::{self, Backend};
use crate::env::Env;
use crate::exit::print_result;
use crate::run::write_pictures;
use pp_job::output::one_file_each;

/// Chunks that warm the pipeline up and are not counted, at most.
const WARM_UP: u64 = 50;

/// The result of `pp bench overlap`. Times are medians after the warm-up unless they say else.
struct Overlap<'a> {
    args: &'a OverlapArgs,
    transport: &'static str,
    how: Simulate,
    /// Chunks that were done.
    chunks: u64,
    measures: Measures,
    /// Half a round trip of one cache line between two cores, before the run.
    core_hop_us: Option<f64>,
    /// Device memory of the front's GPU that was taken after the first tenth of the chunks.
    device_memory_grown_bytes: Option<i64>,
}

impl Overlap<'_> {
    fn simulate(&self) -> String {
        clap::ValueEnum::to_possible_value(&self.how)
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The run was ended early; the figures are those of the chunks that were done.
    fn was_interrupted(&self) -> bool {
        self.chunks < chunks(self.args)
    }

    /// The stages waited on the host's clock, and no GPU worked.
    fn is_gpu_idle(&self) -> bool {
        self.transport == "nccl" && self.how == Simulate::Sleep
    }

    /// The longer of the two times asked for: what the work of a chunk was to take.
    fn longer_ms(&self) -> f64 {
        self.args.decode_ms.max(self.args.phase_b_ms)
    }

    /// Payload bytes, both ways, over a period; none where payloads are handed over and no stage touches them.
    fn gbytes_per_s(&self, period_ms: Option<f64>) -> Option<f64> {
        // Every payload byte counts once: it was written once and read once.
        let moves = self.args.touch || self.transport != "host";
        let bytes = self.args.bytes;
        let period_ms = period_ms.filter(|ms| *ms > 0.0 && moves && bytes > 0)?;
        Some(2.0 * bytes as f64 / period_ms / 1e6)
    }
}

impl Serialize for Overlap<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (args, m) = (self.args, &self.measures);
        let asked = m.over_median(self.longer_ms());
        let asked_by_mean = m.over_mean(self.longer_ms());
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("transport", self.transport)?;
        map.serialize_entry("simulate", &self.simulate())?;
        map.serialize_entry("interrupted", &self.was_interrupted())?;
        map.serialize_entry("gpu_idle", &self.is_gpu_idle())?;
        map.serialize_entry("touch", &args.touch)?;
        map.serialize_entry("sync", &args.sync)?;
        map.serialize_entry("bytes", &args.bytes)?;
        map.serialize_entry("decode_ms", &args.decode_ms)?;
        map.serialize_entry("phase_b_ms", &args.phase_b_ms)?;
        map.serialize_entry("decode_ms_achieved", &m.stage0_ms)?;
        map.serialize_entry("phase_b_ms_achieved", &m.stage1_ms)?;
        map.serialize_entry("depth", &depth(args))?;
        map.serialize_entry("chunks", &self.chunks)?;
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
        // From the admission of a chunk to its end: the source has nothing to read.
        map.serialize_entry("latency_ms", &m.latency_ms)?;
        map.serialize_entry("latency_p99_ms", &m.latency_p99_ms)?;
        map.serialize_entry("latency_max_ms", &m.latency_max_ms)?;
        map.serialize_entry("max_in_flight", &m.max_in_flight)?;
        map.serialize_entry("phase_b_idle_ms", &m.phase_b_idle_ms)?;
        map.serialize_entry("gbytes_per_s", &self.gbytes_per_s(m.period_ms))?;
        map.serialize_entry("gbytes_per_s_by_mean", &self.gbytes_per_s(m.period_mean_ms))?;
        map.serialize_entry("core_hop_us", &self.core_hop_us)?;
        map.serialize_entry("device_memory_grown_bytes", &self.device_memory_grown_bytes)?;
        map.end()
    }
}

/// Runs the whole job, or this process's rank of it.
pub(crate) fn overlap(args: &OverlapArgs, env: &Env) -> Result<(), Error> {
    let (trace, timeline) = (args.trace.as_deref(), args.timeline.as_deref());
    one_file_each(&[], &[("--trace", trace), ("--timeline", timeline)])?;
    check(args)?;
    let edges = Edges::new(depth(args), args.bytes, args.bytes);
    Job::new(&Config::from_env(env.lookup())?).run(|rank| {
        let manifest = manifest(args)?;
        let (backend, choice) = backend::choose_transport(args.transport, rank, env)
            .map_err(|error| rank.decline(error))?;
        if rank.rank() == FRONT {
            backend::say(choice.as_deref());
        }
        // What the stages do with their time on this backend.
        let how = args.simulate.unwrap_or(match backend {
            Backend::Host => Simulate::Sleep,
            Backend::Nccl(_) => Simulate::GpuSpin,
        });
        let mut profile = Profile::new()
            .set("bytes", args.bytes)
            .set("depth", depth(args))
            .set("touch", args.touch)
            .set("phase_b_ms", args.phase_b_ms)
            .set("simulate", format_args!("{how:?}"));
        profile.chunks = Some(chunks(args));
        profile.choice = choice;
        let time = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        let (decode, phase_b) = (time(args.decode_ms), time(args.phase_b_ms));
        let core_hop_us = (rank.rank() == FRONT).then(hop::core_hop_us).flatten();
        match backend {
            Backend::Host => {
                simulate::sharpen_timers();
                let ranks = Ranks {
                    front: |_: Bell| {
                        let work = Work::new(how, decode);
                        let stages = BenchFront::new(manifest, chunks(args), work, args.touch);
                        Ok(FrontPart::new(stages, edges))
                    },
                    phase_b: |()| {
                        let stages = stages::phase_b(Work::new(how, phase_b), args.touch);
                        Ok(PhaseBPart { stages, edges })
                    },
                    finish: |_, finished: Finished| {
                        publish(args, how, &finished.summary, core_hop_us, None)
                    },
                };
                rank.run(Host, profile, ranks)
            }
            Backend::Nccl(nccl) => {
                let on = nccl.device.clone();
                let open = |rank, time| {
                    let stage = Stage::open(&on, how, time, depth(args));
                    let stage = stage.map_err(|error| Error::from(error.into_fault(rank)))?;
                    tell_load(&format!("rank {rank}"), &stage);
                    Ok::<_, Error>(stage)
                };
                let ranks = Ranks {
                    front: |_: Bell| {
                        let stage = open(FRONT, decode)?;
                        let stages = GpuBenchFront::new(manifest, chunks(args), stage);
                        Ok(FrontPart::new(stages, edges))
                    },
                    phase_b: |()| {
                        let stages = open(PHASE_B, phase_b)?;
                        Ok(PhaseBPart { stages, edges })
                    },
                    finish: |front: GpuBenchFront, finished: Finished| {
                        let grown = front.memory_grown();
                        publish(args, how, &finished.summary, core_hop_us, grown)
                    },
                };
                rank.run(*nccl, profile, ranks)
            }
        }
    })
}

fn depth(args: &OverlapArgs) -> u32 {
    if args.sync { 1 } else { args.depth }
}

/// Enough chunks for about two seconds, within reason.
fn chunks(args: &OverlapArgs) -> u64 {
    args.chunks.unwrap_or_else(|| {
        let touched = if args.touch {
            args.bytes as f64 / 8e6
        } else {
            0.0
        };
        let period_ms = args.decode_ms.max(args.phase_b_ms).max(touched).max(0.02);
        ((2000.0 / period_ms) as u64).clamp(60, 20_000)
    })
}

/// Refuses work that cannot be done where the payloads lie.
fn check(args: &OverlapArgs) -> Result<(), Error> {
    let refuse = |what: &str| Err(Error::Usage(what.into()));
    match (args.transport, args.simulate) {
        (TransportChoice::Host, Some(Simulate::GpuSpin | Simulate::Gemm | Simulate::Hbm)) => {
            refuse(
                "this work is done on GPUs; use it with --transport nccl, or --simulate sleep or spin",
            )
        }
        (TransportChoice::Nccl, Some(Simulate::Spin)) => {
            refuse("--simulate spin keeps a core busy; on GPUs use gpu-spin, gemm, hbm, or sleep")
        }
        (TransportChoice::Nccl, _) if args.touch => {
            refuse("--touch writes and reads host memory; use it with --transport host")
        }
        (TransportChoice::Auto, _) if args.touch || args.simulate.is_some() => refuse(
            "--simulate and --touch depend on where payloads lie; say --transport host or nccl",
        ),
        _ => Ok(()),
    }
}

fn manifest(args: &OverlapArgs) -> Result<Manifest, Error> {
    payload(args.bytes).map_err(|e| {
        let why = with_source(&e);
        Error::Usage(format!("--bytes {}: {why}", args.bytes))
    })
}

/// Says what one piece of simulated work takes on this GPU.
fn tell_load(who: &str, stage: &Stage) {
    if let Some(calibration) = &stage.calibration {
        // If standard error is closed, the line is lost.
        let _ = writeln!(
            std::io::stderr(),
            "pp: {who}: {:.1} µs of work asked for, {:.1} µs achieved in {} kernels{}",
            calibration.target.as_secs_f64() * 1e6,
            calibration.achieved.as_secs_f64() * 1e6,
            calibration.repetitions,
            match calibration.rate {
                Some(Rate::BytesPerSecond(rate)) => format!(" at {:.0} GB/s", rate / 1e9),
                Some(Rate::FlopsPerSecond(rate)) => format!(" at {:.0} TFLOP/s", rate / 1e12),
                None => String::new(),
            }
        );
    }
}

fn publish(
    args: &OverlapArgs,
    how: Simulate,
    summary: &FrontSummary,
    core_hop_us: Option<f64>,
    device_memory_grown_bytes: Option<i64>,
) -> Result<(), Error> {
    let recorder = &summary.recorder;
    let measured_chunks = recorder.totals().chunks;
    let warm_up = WARM_UP.min(measured_chunks / 4);
    let mut measures = Measures::of(recorder, warm_up, &[]);
    if args.decode_ms.max(args.phase_b_ms) == 0.0 {
        measures.forget_work();
    }
    let result = Overlap {
        args,
        transport: summary.transport,
        how,
        chunks: measured_chunks,
        measures,
        core_hop_us,
        device_memory_grown_bytes,
    };
    let view = View {
        title: format!(
            "pp bench overlap, {} ms | {} ms, {} bytes, depth {}",
            args.decode_ms,
            args.phase_b_ms,
            args.bytes,
            depth(args)
        ),
        ..View::default()
    };
    write_pictures(
        args.trace.as_deref(),
        args.timeline.as_deref(),
        recorder,
        &result.measures,
        &view,
    )?;
    print_result(&result, args.json)
}

impl std::fmt::Display for Overlap<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let figure = |value: Option<f64>| value.map_or("n/a".into(), |v| format!("{v:.4}"));
        let (args, m) = (self.args, &self.measures);
        let payloads = format!("{} bytes each way at depth {}", args.bytes, depth(args));
        writeln!(
            f,
            "transport {}, {payloads}, {}, stages {} ms and {} ms ({})",
            self.transport,
            Count(self.chunks, "chunk"),
            args.decode_ms,
            args.phase_b_ms,
            self.simulate()
        )?;
        writeln!(
            f,
            "period {} ms median, {} ms mean{} ({payloads}), stages achieved {} ms and {} ms",
            figure(m.period_ms),
            figure(m.period_mean_ms),
            if m.is_uneven() { ", far apart" } else { "" },
            figure(m.stage0_ms),
            figure(m.stage1_ms)
        )?;
        writeln!(
            f,
            "efficiency {} ({} by the mean), of the times asked for {} ({} by the mean), overlap score {} \
             ({payloads})",
            figure(m.efficiency),
            figure(m.efficiency_by_mean),
            figure(m.over_median(self.longer_ms()).ok()),
            figure(m.over_mean(self.longer_ms()).ok()),
            figure(m.overlap_score)
        )?;
        for missing in m.missing_ratios() {
            writeln!(f, "{missing}")?;
        }
        writeln!(
            f,
            "latency from admission to the end of the decode {} ms median, p99 {} ms, worst {} ms",
            figure(m.latency_ms),
            figure(m.latency_p99_ms),
            figure(m.latency_max_ms)
        )?;
        writeln!(
            f,
            "in flight at most {}, phase B idle {} ms a chunk",
            m.max_in_flight,
            figure(m.phase_b_idle_ms)
        )?;
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
