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

use pp_contract::{Generation, Manifest, Settings, with_source};
use pp_kernels::synthetic::Rate;
use pp_runtime::driver::{FrontOptions, FrontSummary, run_front, run_phase_b};
use pp_runtime::report::{Count, Measures, View, WhyNull, are_far_apart};
use pp_runtime::stage::{FrontStages, PhaseBStages};
use pp_transport::bell::Bell;
use pp_transport::launch::Launch;
use pp_transport::link::Link;
use serde::Serialize;

pub(crate) use self::kernels::kernels;
pub(crate) use self::link::link;
use self::on_gpu::{GpuBenchFront, GpuBenchPhaseB, Stage};
use self::plan::{BenchPlan, payload};
use self::simulate::Work;
use self::stages::{BenchFront, BenchPhaseB};
pub(crate) use self::video::video;
use crate::args::{OverlapArgs, Simulate, TransportChoice};
use crate::backend::{self, Backend};
use crate::exit::{Failure, print};
use crate::flight;
use crate::job::edges::{Edges, Ready};
use crate::job::seat::{Profile, Seat};
use crate::job::{self, FRONT, PHASE_B, heartbeat, reports, signals};
use crate::run::write_pictures;
use crate::video::place::one_file_each;

/// Chunks that warm the pipeline up and are not counted, at most.
const WARM_UP: u64 = 50;

/// The result of `pp bench overlap`. Times are medians after the warm-up unless they say else.
#[derive(Serialize)]
struct Overlap {
    transport: &'static str,
    simulate: String,
    /// The run was ended early; the figures are those of the chunks that were done.
    interrupted: bool,
    /// The stages waited on the host's clock, and no GPU worked.
    gpu_idle: bool,
    touch: bool,
    sync: bool,
    bytes: u64,
    decode_ms: f64,
    phase_b_ms: f64,
    decode_ms_achieved: Option<f64>,
    phase_b_ms_achieved: Option<f64>,
    depth: u32,
    chunks: u64,
    period_ms: Option<f64>,
    period_mean_ms: Option<f64>,
    efficiency: Option<f64>,
    efficiency_why_null: Option<WhyNull>,
    /// The same over the mean period.
    efficiency_by_mean: Option<f64>,
    efficiency_by_mean_why_null: Option<WhyNull>,
    /// The longer of the two times asked for over the period: what the work was to take.
    efficiency_asked: Option<f64>,
    efficiency_asked_why_null: Option<WhyNull>,
    efficiency_asked_by_mean: Option<f64>,
    efficiency_asked_by_mean_why_null: Option<WhyNull>,
    overlap_score: Option<f64>,
    overlap_score_why_null: Option<WhyNull>,
    /// From the admission of a chunk to its end: the source has nothing to read.
    latency_ms: Option<f64>,
    latency_p99_ms: Option<f64>,
    latency_max_ms: Option<f64>,
    max_in_flight: u32,
    phase_b_idle_ms: Option<f64>,
    /// Payload bytes, both ways, over the median period; none where payloads are handed over and nobody touches them.
    gbytes_per_s: Option<f64>,
    /// The same over the mean period.
    gbytes_per_s_by_mean: Option<f64>,
    /// Which ratios are null, and why, for the text.
    #[serde(skip)]
    missing: Vec<String>,
    /// Half a round trip of one cache line between two cores, before the run.
    core_hop_us: Option<f64>,
    /// Device memory of the front's GPU that was taken after the first tenth of the chunks.
    device_memory_grown_bytes: Option<i64>,
}

/// Runs the whole job, or this process's rank of it.
pub(crate) fn overlap(args: &OverlapArgs) -> Result<(), Failure> {
    let (trace, timeline) = (args.trace.as_deref(), args.timeline.as_deref());
    one_file_each(&[], &[("--trace", trace), ("--timeline", timeline)])?;
    check(args)?;
    job::run(|launch| front(args, launch), |launch| phase_b(args, launch))
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
fn check(args: &OverlapArgs) -> Result<(), Failure> {
    let refuse = |what: &str| Err(Failure::Usage(what.into()));
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

/// What the stages do with their time on this backend.
fn simulated(args: &OverlapArgs, backend: &Backend) -> Simulate {
    args.simulate.unwrap_or(match backend {
        Backend::Host => Simulate::Sleep,
        Backend::Gpu(_) => Simulate::GpuSpin,
    })
}

fn milliseconds(ms: f64) -> Duration {
    Duration::from_secs_f64(ms / 1e3)
}

/// A rank of the benchmark that has its seat.
struct Place {
    seat: Seat,
    backend: Backend,
    how: Simulate,
    bell: Bell,
}

fn take_place(args: &OverlapArgs, launch: &Launch) -> Result<Place, Failure> {
    let (backend, said) = backend::choose_transport(args.transport, launch)
        .map_err(|failure| Seat::decline(launch, failure))?;
    if launch.rank() == FRONT {
        backend::say(said.as_deref());
    }
    let how = simulated(args, &backend);
    let mut settings = Settings::new();
    let entries = [
        ("bytes", args.bytes.to_string()),
        ("depth", depth(args).to_string()),
        ("touch", args.touch.to_string()),
        ("phase_b_ms", args.phase_b_ms.to_string()),
        ("simulate", format!("{how:?}")),
        (
            "heartbeat_ms",
            heartbeat()?.map_or(0, |d| d.as_millis()).to_string(),
        ),
    ];
    let entries = entries.map(|(key, value)| (key.to_owned(), value));
    for (key, value) in entries.into_iter().chain(backend.settings()) {
        settings.set(&key, value).map_err(anyhow::Error::new)?;
    }
    let profile = Profile {
        settings,
        chunks: Some(chunks(args)),
        kernels: "none".into(),
        kernels_digest: 0,
        device: backend.device(),
    };
    Ok(Place {
        seat: Seat::take::<BenchPlan>(launch, profile)
            .map_err(|failure| backend::explain(failure, launch, said.as_deref()))?,
        backend,
        how,
        bell: Bell::new().map_err(anyhow::Error::new)?,
    })
}

fn edges(args: &OverlapArgs) -> Edges {
    Edges {
        depth: depth(args),
        forward_depth: depth(args),
        forward_bytes: args.bytes,
        backward_bytes: args.bytes,
    }
}

fn manifest(args: &OverlapArgs) -> Result<Manifest, Failure> {
    payload(args.bytes).map_err(|e| {
        let why = with_source(&e);
        Failure::Usage(format!("--bytes {}: {why}", args.bytes))
    })
}

fn front(args: &OverlapArgs, launch: &Launch) -> Result<(), Failure> {
    let manifest = manifest(args)?;
    let Place {
        seat,
        backend,
        how,
        bell,
    } = take_place(args, launch)?;
    let core_hop_us = hop::core_hop_us();
    let time = milliseconds(args.decode_ms);
    let (chunks, edges) = (chunks(args), edges(args));
    let (summary, grown) = match backend {
        Backend::Host => {
            let ready = seat.connect_host(edges, bell, heartbeat()?)?;
            simulate::sharpen_timers();
            let work = Work::new(how, time);
            let mut stages = BenchFront::new(manifest, chunks, work, args.touch);
            (drive_front(ready, &mut stages, depth(args))?, None)
        }
        Backend::Gpu(gpu) => {
            let stage = match Stage::open(&gpu, how, time, depth(args)) {
                Ok(stage) => stage,
                Err(error) => return Err(seat.give_up(error.into_fault(FRONT).into())),
            };
            tell_load("rank 0", &stage);
            let ready = seat.connect_nccl(&gpu, edges, bell, heartbeat()?)?;
            let mut stages = GpuBenchFront::new(manifest, chunks, stage);
            let summary = drive_front(ready, &mut stages, depth(args))?;
            (summary, stages.memory_grown())
        }
    };
    publish(args, how, &summary, core_hop_us, grown)
}

/// Runs the front of a benchmark to its end.
fn drive_front<L, S>(ready: Ready<L>, stages: &mut S, depth: u32) -> Result<FrontSummary, Failure>
where
    L: Link,
    S: FrontStages<L::Tx, L::Rx>,
{
    let Ready {
        link,
        switch,
        watch,
    } = ready;
    signals::attach(&switch);
    reports::met();
    let options = FrontOptions::new(PHASE_B, depth);
    let link = flight::record(link, PHASE_B, Generation::new(0));
    let result = run_front(link, stages, &switch, options);
    watch.close();
    Ok(result?)
}

/// Runs Phase B of a benchmark to its end.
fn drive_phase_b<L, S>(ready: Ready<L>, stage: &mut S, depth: u32) -> Result<(), Failure>
where
    L: Link,
    S: PhaseBStages<L::Tx, L::Rx>,
{
    let Ready {
        link,
        switch,
        watch,
    } = ready;
    signals::attach(&switch);
    let link = flight::record(link, FRONT, Generation::new(0));
    let result = run_phase_b(link, stage, &switch, FRONT, depth);
    watch.close();
    result?;
    Ok(())
}

fn phase_b(args: &OverlapArgs, launch: &Launch) -> Result<(), Failure> {
    let Place {
        seat,
        backend,
        how,
        bell,
    } = take_place(args, launch)?;
    let time = milliseconds(args.phase_b_ms);
    match backend {
        Backend::Host => {
            let ready = seat.connect_host(edges(args), bell, heartbeat()?)?;
            simulate::sharpen_timers();
            let work = Work::new(how, time);
            drive_phase_b(ready, &mut BenchPhaseB::new(work, args.touch), depth(args))
        }
        Backend::Gpu(gpu) => {
            let stage = match Stage::open(&gpu, how, time, depth(args)) {
                Ok(stage) => stage,
                Err(error) => return Err(seat.give_up(error.into_fault(PHASE_B).into())),
            };
            tell_load("rank 1", &stage);
            let ready = seat.connect_nccl(&gpu, edges(args), bell, heartbeat()?)?;
            drive_phase_b(ready, &mut GpuBenchPhaseB::new(stage), depth(args))
        }
    }
}

/// Says what one piece of simulated work takes on this GPU.
fn tell_load(who: &str, stage: &Stage) {
    if let Some(calibration) = stage.calibration() {
        // Without a standard error nobody wants to read it.
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
) -> Result<(), Failure> {
    let recorder = &summary.recorder;
    let measured_chunks = recorder.totals().chunks;
    let warm_up = WARM_UP.min(measured_chunks / 4);
    let mut measures = Measures::of(recorder, warm_up, &[]);
    let longer_ms = args.decode_ms.max(args.phase_b_ms);
    if longer_ms == 0.0 {
        measures.forget_work();
    }
    let asked = measures.over_median(longer_ms);
    let asked_by_mean = measures.over_mean(longer_ms);
    // Every payload byte counts once: it was written once and read once.
    let moves = args.touch || summary.transport != "host";
    let rate = |period_ms: Option<f64>| {
        let period_ms = period_ms.filter(|ms| *ms > 0.0 && moves && args.bytes > 0)?;
        Some(2.0 * args.bytes as f64 / period_ms / 1e6)
    };
    let result = Overlap {
        transport: summary.transport,
        simulate: clap::ValueEnum::to_possible_value(&how)
            .map_or_else(String::new, |value| value.get_name().to_owned()),
        interrupted: measured_chunks < chunks(args),
        gpu_idle: summary.transport == "nccl" && how == Simulate::Sleep,
        touch: args.touch,
        sync: args.sync,
        bytes: args.bytes,
        decode_ms: args.decode_ms,
        phase_b_ms: args.phase_b_ms,
        decode_ms_achieved: measures.stage0_ms,
        phase_b_ms_achieved: measures.stage1_ms,
        depth: depth(args),
        chunks: measured_chunks,
        period_ms: measures.period_ms,
        period_mean_ms: measures.period_mean_ms,
        efficiency: measures.efficiency,
        efficiency_why_null: measures.efficiency_why_null,
        efficiency_by_mean: measures.efficiency_by_mean,
        efficiency_by_mean_why_null: measures.efficiency_by_mean_why_null,
        efficiency_asked: asked.ok(),
        efficiency_asked_why_null: asked.err(),
        efficiency_asked_by_mean: asked_by_mean.ok(),
        efficiency_asked_by_mean_why_null: asked_by_mean.err(),
        overlap_score: measures.overlap_score,
        overlap_score_why_null: measures.overlap_score_why_null,
        latency_ms: measures.latency_ms,
        latency_p99_ms: measures.latency_p99_ms,
        latency_max_ms: measures.latency_max_ms,
        max_in_flight: measures.max_in_flight,
        phase_b_idle_ms: measures.phase_b_idle_ms,
        gbytes_per_s: rate(measures.period_ms),
        gbytes_per_s_by_mean: rate(measures.period_mean_ms),
        missing: measures.missing_ratios(),
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
        &measures,
        &view,
    )?;
    if args.json {
        let text = serde_json::to_string(&result).map_err(anyhow::Error::new)?;
        print(&format!("{text}\n"))
    } else {
        print(&result.to_string())
    }
}

impl std::fmt::Display for Overlap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let figure = |value: Option<f64>| value.map_or("n/a".into(), |v| format!("{v:.4}"));
        let payloads = format!("{} bytes each way at depth {}", self.bytes, self.depth);
        writeln!(
            f,
            "transport {}, {payloads}, {}, stages {} ms and {} ms ({})",
            self.transport,
            Count(self.chunks, "chunk"),
            self.decode_ms,
            self.phase_b_ms,
            self.simulate
        )?;
        let period = self.period_ms.zip(self.period_mean_ms);
        let is_uneven = period.is_some_and(|(median, mean)| are_far_apart(median, mean));
        writeln!(
            f,
            "period {} ms median, {} ms mean{} ({payloads}), stages achieved {} ms and {} ms",
            figure(self.period_ms),
            figure(self.period_mean_ms),
            if is_uneven { ", far apart" } else { "" },
            figure(self.decode_ms_achieved),
            figure(self.phase_b_ms_achieved)
        )?;
        writeln!(
            f,
            "efficiency {} ({} by the mean), of the times asked for {} ({} by the mean), overlap score {} \
             ({payloads})",
            figure(self.efficiency),
            figure(self.efficiency_by_mean),
            figure(self.efficiency_asked),
            figure(self.efficiency_asked_by_mean),
            figure(self.overlap_score)
        )?;
        for missing in &self.missing {
            writeln!(f, "{missing}")?;
        }
        writeln!(
            f,
            "latency from admission to the end of the decode {} ms median, p99 {} ms, worst {} ms",
            figure(self.latency_ms),
            figure(self.latency_p99_ms),
            figure(self.latency_max_ms)
        )?;
        writeln!(
            f,
            "in flight at most {}, phase B idle {} ms a chunk",
            self.max_in_flight,
            figure(self.phase_b_idle_ms)
        )?;
        if self.interrupted {
            writeln!(f, "interrupted: figures of the chunks that were done")?;
        }
        if self.gpu_idle {
            writeln!(f, "the stages slept on the host: the GPUs were idle")?;
        }
        let rates = self.gbytes_per_s.zip(self.gbytes_per_s_by_mean);
        if let Some((rate, by_mean)) = rates.filter(|_| self.touch) {
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
