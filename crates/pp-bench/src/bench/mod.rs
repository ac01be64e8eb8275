//! `pp bench`: measurements of the runtime itself.

mod against;
mod hop;
mod kernels;
mod link;
mod on_gpu;
mod plan;
mod simulate;
mod stages;
mod video;

use std::io::Write as _;
use std::time::Duration;

use pp_contract::pipeline::{EdgeKind, EdgeSpec, Laps, StageSpec};
use pp_contract::{Pipeline, Rank};
use pp_device::Device;
use pp_job::{Config, Error, Finished, Job, Opened, Profile, Program};
use pp_kernels::synthetic::Rate;
use pp_runtime::report::{Count, Measures, View};
use pp_transport::host::Host;
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use self::against::{Against, Payloads, most_bytes};
pub(crate) use self::kernels::kernels;
pub(crate) use self::link::link;
use self::on_gpu::{GpuSink, GpuSource, GpuStage};
use self::plan::SOURCE;
use self::simulate::Work;
pub use self::simulate::{sharpen_timers, sleep_exactly};
use self::stages::{BenchSink, BenchSource};
pub(crate) use self::video::video;
use crate::args::{OverlapArgs, Simulate};
use pp_command::TransportChoice;
use pp_command::backend::{self, Backend, GpuBackend};
use pp_command::env::Env;
use pp_command::print_result;
use pp_command::write_pictures;
use pp_job::output::one_file_each;

/// Chunks that warm the pipeline up and are not counted, at most.
const WARM_UP: u64 = 50;

/// Where the stages stand, and how long each works on a chunk.
struct Stages {
    pipeline: Pipeline,
    /// In milliseconds, that of the source first.
    ms: Vec<f64>,
    depth: u32,
}

impl Stages {
    fn of(args: &OverlapArgs) -> Result<Self, Error> {
        // Rank 0 builds in no time.
        let pair = || vec![0.0, args.phase_b_ms, args.decode_ms];
        let ms = args.stages.clone().unwrap_or_else(pair);
        let chain = || {
            let stages = (0..ms.len()).map(|at| format!("s{at}@{at}"));
            stages.collect::<Vec<_>>().join(" -> ")
        };
        let text = match (&args.pipeline, &args.stages) {
            (Some(text), _) => text.clone(),
            (None, Some(_)) => chain(),
            (None, None) => "s0@0 -> s1@1 -> s2@0".to_owned(),
        };
        let pipeline: Pipeline = text.parse()?;
        let mut rings = pipeline.rings().iter();
        if let Some(ring) = rings.find(|ring| ring.laps == Laps::Steps) {
            let name = &pipeline.stages()[ring.first].name;
            return Err(Error::Usage(format!(
                "the pipeline {pipeline}: {name} stands in a ring of *steps, and this benchmark has no denoising steps; \
                 write the number of laps, as in *2"
            )));
        }
        if let Some(group) = pipeline.stages().iter().find(|stage| stage.ranks.len() > 1) {
            let name = &group.name;
            return Err(Error::Usage(format!(
                "the pipeline {pipeline}: no stage of this benchmark can be run by a group of ranks; give {name} one rank"
            )));
        }
        let is_there = |name: String| pipeline.stages().iter().any(|s| *s.name == *name);
        if let Some(at) = (0..ms.len()).find(|at| !is_there(format!("s{at}"))) {
            let last = ms.len() - 1;
            return Err(Error::Usage(format!(
                "the pipeline {pipeline} has no stage s{at}; there are durations for s0 to s{last}: name all of them, \
                 or give other --stages"
            )));
        }
        let depth = args.depth.unwrap_or(pipeline.default_depth());
        Ok(Self {
            depth: if args.sync { 1 } else { depth },
            pipeline,
            ms,
        })
    }

    fn ms_of(&self, stage: &StageSpec) -> f64 {
        let at = stage.name.trim_start_matches('s').parse().ok();
        at.and_then(|at: usize| self.ms.get(at))
            .copied()
            .unwrap_or_default()
    }

    fn time_of(&self, stage: &StageSpec) -> Duration {
        Duration::from_secs_f64(self.ms_of(stage) / 1e3)
    }

    /// What the stages of the busiest rank take for a chunk.
    fn longest_ms(&self) -> f64 {
        let of_rank = |rank| {
            let stages = self.pipeline.stages_at(rank);
            let times = stages.map(|(at, stage)| {
                let laps = match self.pipeline.ring_at(at).map(|ring| ring.laps) {
                    Some(Laps::Fixed(laps)) => laps,
                    _ => 1,
                };
                self.ms_of(stage) * f64::from(laps)
            });
            times.sum()
        };
        let ranks = self.pipeline.world_size().ranks();
        ranks.map(of_rank).fold(0.0, f64::max)
    }
}

/// The result of `pp bench overlap`. Times are medians after the warm-up unless they say else.
struct Overlap<'a> {
    args: &'a OverlapArgs,
    stages: &'a Stages,
    transport: &'static str,
    how: Simulate,
    /// Chunks that were done.
    chunks: u64,
    measures: Measures,
    against: Option<Against>,
    /// Half a round trip of one cache line between two cores, before the run.
    core_hop_us: Option<f64>,
    /// Device memory of the GPU of rank 0 that was taken after the first tenth of the chunks.
    device_memory_grown_bytes: Option<i64>,
}

impl Overlap<'_> {
    fn simulate(&self) -> String {
        clap::ValueEnum::to_possible_value(&self.how)
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// `5, 5, 0`.
    fn asked_ms(&self) -> String {
        let times: Vec<String> = self.stages.ms.iter().map(f64::to_string).collect();
        times.join(", ")
    }

    /// The run was ended early; the figures are those of the chunks that were done.
    fn was_interrupted(&self) -> bool {
        self.chunks < chunks(self.args, self.stages)
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

/// Runs the whole job, or this process's rank of it.
pub(crate) fn overlap(args: &OverlapArgs, env: &Env) -> Result<(), Error> {
    let (trace, timeline) = (args.trace.as_deref(), args.timeline.as_deref());
    one_file_each(&[], &[("--trace", trace), ("--timeline", timeline)])?;
    check(args)?;
    let stages = &Stages::of(args)?;
    let config = Config::from_env(env.lookup())?;
    let job = Job::new(&config, &stages.pipeline).depth(stages.depth);
    job.run(|rank| {
        let payloads = Payloads::of(args)?;
        let (backend, choice) = backend::choose_transport(args.transport, rank, env)?;
        let is_first = rank.rank() == Rank::new(0);
        if is_first {
            backend::say(choice.as_deref());
        }
        // What the stages do with their time on this backend.
        let how = args.simulate.unwrap_or(match backend {
            Backend::Host => Simulate::Sleep,
            Backend::Gpu(_) => Simulate::GpuSpin,
        });
        let mut profile = Profile::new()
            .set("bytes", args.bytes)
            .set("against", format_args!("{:?}", args.against))
            .set("touch", args.touch)
            .set("simulate", format_args!("{how:?}"));
        // A setting has a bound, and there may be many stages.
        for (at, ms) in stages.ms.chunks(8).enumerate() {
            profile = profile.set(&format!("stages_ms {at}"), format_args!("{ms:?}"));
        }
        profile.chunks = Some(chunks(args, stages));
        profile.choice = choice;
        let core_hop_us = is_first.then(hop::core_hop_us).flatten();
        let run = Run {
            args,
            stages,
            how,
            core_hop_us,
        };
        match backend {
            Backend::Host => {
                simulate::sharpen_timers();
                rank.run(Host, profile, run.on_host(payloads))
            }
            Backend::Gpu(gpu) => {
                let program = run.on_gpus(payloads, gpu.device.clone(), rank.rank());
                rank.run(*gpu, profile, program)
            }
        }
    })
}

/// What the programs on the host and on GPUs have in common.
#[derive(Clone, Copy)]
struct Run<'a> {
    args: &'a OverlapArgs,
    stages: &'a Stages,
    how: Simulate,
    core_hop_us: Option<f64>,
}

impl<'a> Run<'a> {
    /// The names of the stages behind the source; the last is the sink.
    fn names(self) -> (Vec<String>, String) {
        let last = self.stages.ms.len() - 1;
        let names = (1..last).map(|at| format!("s{at}"));
        (names.collect(), format!("s{last}"))
    }

    fn first_and_last(self) -> [&'a StageSpec; 2] {
        let stages = self.stages.pipeline.stages();
        [&stages[0], &stages[stages.len() - 1]]
    }

    fn on_host(self, payloads: Payloads) -> Program<'a, Host, BenchSource, ()> {
        let (args, stages) = (self.args, self.stages);
        let work = move |stage: &StageSpec| Work::new(self.how, stages.time_of(stage));
        let [first, last] = self.first_and_last();
        let (names, sink) = self.names();
        let program = Program::new(SOURCE, move |_| {
            Ok(Opened::new(BenchSource {
                payloads,
                left: chunks(args, stages),
                work: work(first),
                touch: args.touch,
            }))
        });
        let mut program = program.payloads(move |_, ()| most_bytes(args));
        for name in &names {
            program = program.stage(name, move |stage, ()| {
                Ok(stages::between(work(stage), args.touch))
            });
        }
        let open = move |(): &(), _| Ok(BenchSink::new(work(last), args.touch));
        let program = program.sink(&sink, open);
        program.finish(move |_, finished| self.publish(&finished, None))
    }

    fn on_gpus(
        self,
        payloads: Payloads,
        on: Device,
        rank: Rank,
    ) -> Program<'a, GpuBackend, GpuSource, ()> {
        let (args, stages) = (self.args, self.stages);
        let open = move |stage: &StageSpec| {
            let time = stages.time_of(stage);
            let opened = GpuStage::open(&on, self.how, time, stages.depth);
            let opened = opened.map_err(|error| Error::from(error.into_fault(rank)))?;
            tell_load(&format!("{} on rank {rank}", stage.name), &opened);
            Ok::<_, Error>(opened)
        };
        let [first, last] = self.first_and_last();
        let (names, sink) = self.names();
        let source = open.clone();
        let program = Program::new(SOURCE, move |_| {
            let chunks = chunks(args, stages);
            Ok(Opened::new(GpuSource::new(
                payloads,
                chunks,
                source(first)?,
            )))
        });
        let mut program = program.payloads(move |_, ()| most_bytes(args));
        for name in &names {
            let open = open.clone();
            program = program.stage(name, move |stage, ()| open(stage));
        }
        let program = program.sink(&sink, move |(), _| Ok(GpuSink(open(last)?)));
        program.finish(move |source: GpuSource, finished| {
            self.publish(&finished, source.memory_grown())
        })
    }
}

/// Enough chunks for about two seconds, within reason.
fn chunks(args: &OverlapArgs, stages: &Stages) -> u64 {
    args.chunks.unwrap_or_else(|| {
        if args.against.is_some() {
            return against::chunks();
        }
        let touched = if args.touch {
            args.bytes as f64 / 8e6
        } else {
            0.0
        };
        let period_ms = stages.longest_ms().max(touched).max(0.02);
        ((2000.0 / period_ms) as u64).clamp(60, 20_000)
    })
}

/// Refuses work that cannot be done where the payloads lie.
fn check(args: &OverlapArgs) -> Result<(), Error> {
    against::check(args)?;
    let refuse = |what: &str| Err(Error::Usage(what.into()));
    let of_gpus = TransportChoice::OF_GPUS;
    match (args.transport, args.simulate) {
        (TransportChoice::Host, Some(Simulate::GpuSpin | Simulate::Gemm | Simulate::Hbm)) => {
            refuse(&format!(
                "this work is done on GPUs; use it with --transport {of_gpus}, or --simulate sleep or spin"
            ))
        }
        (gpus, Some(Simulate::Spin)) if gpus.is_on_gpus() => {
            refuse("--simulate spin keeps a core busy; on GPUs use gpu-spin, gemm, hbm, or sleep")
        }
        (gpus, _) if gpus.is_on_gpus() && args.touch => {
            refuse("--touch writes and reads host memory; use it with --transport host")
        }
        (TransportChoice::Auto, _) if args.touch || args.simulate.is_some() => refuse(&format!(
            "--simulate and --touch depend on where payloads lie; say --transport host, {of_gpus}"
        )),
        _ => Ok(()),
    }
}

/// Says what one piece of simulated work takes on this GPU.
fn tell_load(who: &str, stage: &GpuStage) {
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

impl Run<'_> {
    fn publish(
        self,
        finished: &Finished,
        device_memory_grown_bytes: Option<i64>,
    ) -> Result<(), Error> {
        let (args, stages) = (self.args, self.stages);
        let recorder = &finished.summary.recorder;
        let measured_chunks = recorder.totals().chunks;
        let warm_up = WARM_UP.min(measured_chunks / 4);
        let mut measures = Measures::of(recorder, warm_up, &[]);
        if stages.longest_ms() == 0.0 {
            measures.forget_work();
        }
        let result = Overlap {
            args,
            stages,
            transport: finished.summary.transport,
            how: self.how,
            chunks: measured_chunks,
            measures,
            against: args
                .against
                .and_then(|bytes| against::against(bytes, recorder.records())),
            core_hop_us: self.core_hop_us,
            device_memory_grown_bytes,
        };
        let view = View {
            title: format!(
                "pp bench overlap, {} of {} ms, {} bytes, depth {}",
                stages.pipeline,
                result.asked_ms(),
                args.bytes,
                stages.depth
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
}

impl std::fmt::Display for Overlap<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let figure = |value: Option<f64>| value.map_or("n/a".into(), |v| format!("{v:.4}"));
        let (args, m) = (self.args, &self.measures);
        let payloads = format!(
            "{} bytes over each edge at depth {}",
            args.bytes, self.stages.depth
        );
        writeln!(
            f,
            "transport {}, {payloads}, {}, {} of {} ms ({})",
            self.transport,
            Count(self.chunks, "chunk"),
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
            "latency from admission to acceptance {} ms median, {} ms mean, p99 {} ms, worst {} ms",
            figure(m.latency_ms),
            figure(m.latency_mean_ms),
            figure(m.latency_p99_ms),
            figure(m.latency_max_ms)
        )?;
        writeln!(f, "in flight at most {}", m.max_in_flight)?;
        for (rank, us) in self.drivers_us().into_iter().enumerate() {
            if let Some(us) = us {
                writeln!(
                    f,
                    "the driver of rank {rank} takes {us:.2} µs a chunk, without stages and waits"
                )?;
            }
        }
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
