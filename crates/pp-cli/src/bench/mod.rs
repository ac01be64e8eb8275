//! `pp bench`: measurements of the runtime itself.

mod hop;
mod plan;
mod simulate;
mod stages;

use std::time::Duration;

use pp_contract::{Manifest, Settings};
use pp_runtime::driver::{FrontOptions, FrontSummary, run_front, run_phase_b, with_source};
use pp_runtime::report::{Measures, View};
use pp_transport::bell::Bell;
use pp_transport::launch::Launch;
use serde::Serialize;

use self::plan::{BenchPlan, payload};
use self::simulate::Work;
use self::stages::{BenchFront, BenchPhaseB};
use crate::args::OverlapArgs;
use crate::exit::{Failure, print};
use crate::job::seat::{Edges, Profile, Ready, Seat};
use crate::job::{self, FRONT, PHASE_B, heartbeat, signals};
use crate::run::{one_file_each, write_pictures};

/// Chunks that warm the pipeline up and are not counted, at most.
const WARM_UP: u64 = 50;

/// The result of `pp bench overlap`. Times are medians after the warm-up unless they say else.
#[derive(Serialize)]
struct Overlap {
    transport: &'static str,
    simulate: String,
    touch: bool,
    sync: bool,
    bytes: u64,
    decode_ms: f64,
    phase_b_ms: f64,
    decode_ms_achieved: f64,
    phase_b_ms_achieved: f64,
    depth: u32,
    chunks: u64,
    period_ms: f64,
    period_mean_ms: f64,
    efficiency: Option<f64>,
    overlap_score: Option<f64>,
    max_in_flight: u32,
    phase_b_idle_ms: f64,
    /// Payload bytes, both ways, over the median period; absent without a payload.
    gbytes_per_s: Option<f64>,
    /// Half a round trip of one cache line between two cores, before the run.
    core_hop_us: Option<f64>,
}

/// Runs the whole job, or this process's rank of it.
pub(crate) fn overlap(args: &OverlapArgs) -> Result<(), Failure> {
    let (trace, timeline) = (args.trace.as_deref(), args.timeline.as_deref());
    one_file_each(&[("--trace", trace), ("--timeline", timeline)])?;
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

fn work(args: &OverlapArgs, ms: f64) -> Work {
    Work::new(args.simulate, Duration::from_secs_f64(ms / 1e3))
}

fn take_seat(args: &OverlapArgs, launch: &Launch) -> Result<Seat, Failure> {
    let mut settings = Settings::new();
    let entries = [
        ("bytes", args.bytes.to_string()),
        ("depth", depth(args).to_string()),
        ("touch", args.touch.to_string()),
        ("phase_b_ms", args.phase_b_ms.to_string()),
        ("simulate", format!("{:?}", args.simulate)),
        (
            "heartbeat_ms",
            heartbeat()?.map_or(0, |d| d.as_millis()).to_string(),
        ),
    ];
    for (key, value) in entries {
        settings.set(key, value).map_err(anyhow::Error::new)?;
    }
    let profile = Profile {
        settings,
        chunks: Some(chunks(args)),
        kernels: "none".into(),
        kernels_digest: 0,
    };
    Seat::take::<BenchPlan>(launch, profile)
}

fn connect(args: &OverlapArgs, seat: Seat) -> Result<Ready, Failure> {
    let edges = Edges {
        depth: depth(args),
        forward_bytes: args.bytes,
        backward_bytes: args.bytes,
    };
    let bell = Bell::new().map_err(anyhow::Error::new)?;
    let ready = seat.connect(edges, bell, heartbeat()?)?;
    signals::attach(&ready.switch);
    Ok(ready)
}

fn manifest(args: &OverlapArgs) -> Result<Manifest, Failure> {
    payload(args.bytes).map_err(|e| {
        let why = with_source(&e);
        Failure::Usage(format!("--bytes {}: {why}", args.bytes))
    })
}

fn front(args: &OverlapArgs, launch: &Launch) -> Result<(), Failure> {
    let manifest = manifest(args)?;
    let seat = take_seat(args, launch)?;
    let core_hop_us = hop::core_hop_us();
    let Ready {
        link,
        switch,
        watch,
    } = connect(args, seat)?;
    simulate::sharpen_timers();
    let mut stages = BenchFront::new(
        manifest,
        chunks(args),
        work(args, args.decode_ms),
        args.touch,
    );
    let options = FrontOptions {
        peer: PHASE_B,
        depth: depth(args),
    };
    let result = run_front(link, &mut stages, &switch, options);
    watch.close();
    let summary = result?;
    publish(args, &summary, core_hop_us)
}

fn phase_b(args: &OverlapArgs, launch: &Launch) -> Result<(), Failure> {
    let seat = take_seat(args, launch)?;
    let Ready {
        link,
        switch,
        watch,
    } = connect(args, seat)?;
    simulate::sharpen_timers();
    let mut stage = BenchPhaseB::new(work(args, args.phase_b_ms), args.touch);
    let result = run_phase_b(link, &mut stage, &switch, FRONT, depth(args));
    watch.close();
    result?;
    Ok(())
}

fn publish(
    args: &OverlapArgs,
    summary: &FrontSummary,
    core_hop_us: Option<f64>,
) -> Result<(), Failure> {
    let recorder = &summary.recorder;
    let chunks = recorder.totals().chunks;
    let warm_up = WARM_UP.min(chunks / 4);
    let measures = Measures::of(recorder, warm_up);
    // Every payload byte counts once: it was written once and read once.
    let both_ways = 2.0 * args.bytes as f64;
    let result = Overlap {
        transport: summary.transport,
        simulate: format!("{:?}", args.simulate).to_lowercase(),
        touch: args.touch,
        sync: args.sync,
        bytes: args.bytes,
        decode_ms: args.decode_ms,
        phase_b_ms: args.phase_b_ms,
        decode_ms_achieved: measures.stage0_ms,
        phase_b_ms_achieved: measures.stage1_ms,
        depth: depth(args),
        chunks,
        period_ms: measures.period_ms,
        period_mean_ms: measures.period_mean_ms,
        efficiency: measures.efficiency,
        overlap_score: measures.overlap_score,
        max_in_flight: measures.max_in_flight,
        phase_b_idle_ms: measures.phase_b_idle_ms,
        gbytes_per_s: (args.bytes > 0 && measures.period_ms > 0.0)
            .then(|| both_ways / measures.period_ms / 1e6),
        core_hop_us,
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
        let ratio = |value: Option<f64>| value.map_or("-".into(), |v| format!("{v:.4}"));
        writeln!(
            f,
            "transport {}, {} bytes each way, depth {}, {} chunks, stages {} ms and {} ms ({})",
            self.transport,
            self.bytes,
            self.depth,
            self.chunks,
            self.decode_ms,
            self.phase_b_ms,
            self.simulate
        )?;
        writeln!(
            f,
            "period {:.4} ms (median), stages achieved {:.4} ms and {:.4} ms",
            self.period_ms, self.decode_ms_achieved, self.phase_b_ms_achieved
        )?;
        writeln!(
            f,
            "efficiency {}, overlap score {}, in flight at most {}, phase B idle {:.4} ms a chunk",
            ratio(self.efficiency),
            ratio(self.overlap_score),
            self.max_in_flight,
            self.phase_b_idle_ms
        )?;
        if let Some(rate) = self.gbytes_per_s.filter(|_| self.touch) {
            writeln!(f, "{rate:.1} GB/s of payload written and read")?;
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
