//! What a finished run prints and writes.

use std::io::{IsTerminal as _, Write};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::ValueEnum as _;

use pp_runtime::driver::FrontSummary;
use pp_runtime::report::{
    Count, Measures, Recorder, Restart, View, default_warm_up, write_chrome_trace, write_json,
    write_svg, write_text,
};
use rustix::system::uname;
use serde::Serialize;
use serde_json::Value;

use super::Labels;
use super::codec::Codec;
use super::front::VideoFront;
use super::noise::Estimates;
use super::verify::Verified;
use crate::args::{RunArgs, Strength};
use crate::exit::{Failure, print};
use crate::video::OutputError;
use crate::video::place::is_stdout;
use crate::video::staged::write_file;

/// A run that came to its end.
pub(super) struct Finished {
    pub(super) summary: FrontSummary,
    /// How often another Phase B was awaited.
    pub(super) restarts: u32,
    pub(super) wall: Duration,
    /// The signal that ended it before the end of its input.
    pub(super) interrupted: Option<u8>,
}

/// What was run, for the JSON report: `docs/report.md` says what each key is.
#[derive(Serialize)]
struct About<'a> {
    pp_version: &'static str,
    command: Vec<String>,
    host: String,
    written_unix_s: Option<u64>,
    input: String,
    output: Option<String>,
    width: u32,
    height: u32,
    ranks: u32,
    transport: &'a str,
    kernels: String,
    choice: Option<&'a str>,
    denoise_steps: u32,
    strength: Value,
    noise_sigma_estimated: Option<&'a Estimates>,
    frames_per_chunk: u32,
    depth: u32,
    chunks_at_most: Option<u64>,
    recompute: bool,
    cuts: String,
    add_noise: Option<f32>,
    seed: u64,
    threads: u32,
    interrupted: bool,
    restarts: u32,
    restarts_allowed: u32,
    /// A Phase B that came and went before it was given a chunk has none of its own.
    recoveries: Vec<Recovery>,
    wall_ms: f64,
    psnr_before_db: Option<f64>,
    psnr_before_why_null: Option<&'static str>,
    psnr_after_db: Option<f64>,
    psnr_after_why_null: Option<&'static str>,
    verify: Option<Verified<'a>>,
}

/// Why a PSNR of clips that are the same is not given: it would be infinite.
const IDENTICAL: &str = "identical";
/// Why there is no PSNR at all.
const NOT_COMPARED: &str = "no frame was compared with that before --add-noise";

/// Decibels, or why there are none.
fn psnr(db: Option<f64>) -> (Option<f64>, Option<&'static str>) {
    match db {
        Some(db) if db.is_finite() => (Some(db), None),
        Some(_) => (None, Some(IDENTICAL)),
        None => (None, Some(NOT_COMPARED)),
    }
}

/// A Phase B that was lost, and what it took to go on.
#[derive(Serialize)]
struct Recovery {
    cause: String,
    lost_ns: u64,
    /// The first chunk that the new Phase B was given.
    chunk: Option<u64>,
    chunks_sent_again: u32,
    /// From the loss being noticed to that chunk being sent.
    ms_to_sent: Option<f64>,
    /// From the loss being noticed to the first result of the new Phase B.
    ms_to_served: Option<f64>,
}

impl Recovery {
    fn of(restart: &Restart) -> Self {
        let ms = |at: u64| at.saturating_sub(restart.lost_ns) as f64 / 1e6;
        Self {
            cause: restart.fault.to_string(),
            lost_ns: restart.lost_ns,
            chunk: restart.chunk.map(|chunk| chunk.get()),
            chunks_sent_again: restart.sent_again,
            ms_to_sent: restart.sent_ns.map(ms),
            ms_to_served: restart.served_ns.map(ms),
        }
    }
}

/// Prints the summary and writes the files that were asked for.
pub(super) fn publish<C: Codec>(
    args: &RunArgs,
    front: &VideoFront<C>,
    finished: &Finished,
    written: Option<u64>,
    labels: &Labels,
) -> Result<(), Failure> {
    let recorder = &finished.summary.recorder;
    let chunks = recorder.totals().chunks;
    let restarts = &finished.summary.restarts;
    let measures = Measures::of(recorder, default_warm_up(chunks), restarts);
    let quality = front.quality();
    let (psnr_before_db, psnr_before_why_null) = psnr(quality.and_then(|q| q.before.db()));
    let (psnr_after_db, psnr_after_why_null) = psnr(quality.and_then(|q| q.after.db()));
    let noise = Some(front.noise()).filter(|noise| !noise.are_unknown());
    let command = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned());
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let about = About {
        pp_version: env!("CARGO_PKG_VERSION"),
        command: command.collect(),
        host: uname().nodename().to_string_lossy().into_owned(),
        written_unix_s: now.ok().map(|now| now.as_secs()),
        input: args.input.display().to_string(),
        output: args.output.as_ref().map(|p| p.display().to_string()),
        width: front.header().width(),
        height: front.header().height(),
        ranks: args.ranks,
        transport: &labels.transport,
        kernels: labels.kernels.clone(),
        choice: labels.choice.as_deref(),
        denoise_steps: args.denoise_steps,
        strength: match args.strength {
            Strength::Auto => "auto".into(),
            Strength::Sigma(sigma) => sigma.into(),
        },
        noise_sigma_estimated: noise.filter(|_| args.strength == Strength::Auto),
        frames_per_chunk: args.frames_per_chunk,
        depth: args.depth,
        chunks_at_most: args.chunks,
        recompute: args.recompute,
        cuts: args
            .cuts
            .to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned()),
        add_noise: args.add_noise,
        seed: args.seed,
        threads: args.threads,
        interrupted: finished.interrupted.is_some(),
        restarts: finished.restarts,
        restarts_allowed: args.restarts,
        recoveries: restarts.iter().map(Recovery::of).collect(),
        wall_ms: finished.wall.as_secs_f64() * 1e3,
        psnr_before_db,
        psnr_before_why_null,
        psnr_after_db,
        psnr_after_why_null,
        verify: front.verified(),
    };
    let view = View {
        title: format!(
            "pp run {}x{}, {} frames a chunk, depth {}",
            about.width, about.height, about.frames_per_chunk, about.depth
        ),
        phase_b_rank: args.ranks - 1,
        restarts: restarts.clone(),
        ..View::default()
    };
    let write_report =
        |path: &Path| write_file(path, |out| write_json(out, &about, &measures, recorder));
    let report = args.report.as_deref().map_or(Ok(()), write_report);
    let (trace, timeline) = (args.trace.as_deref(), args.timeline.as_deref());
    let stored = report.and_then(|()| write_pictures(trace, timeline, recorder, &measures, &view));
    // Without them the video is there all the same, and the summary says so.
    let text = summary(args, &about, &measures, written, stored.is_ok())?;
    // The result may go to standard output; the summary must not get into it.
    let files = [&args.output, &args.report, &args.trace, &args.timeline];
    if files.into_iter().flatten().any(|path| is_stdout(path)) {
        // Without a standard error nobody wants to read it.
        let _ = std::io::stderr().write_all(text.as_bytes());
    } else {
        print(&text)?;
    }
    Ok(stored?)
}

/// Writes the trace and the timeline, where asked for.
pub(crate) fn write_pictures(
    trace: Option<&Path>,
    timeline: Option<&Path>,
    recorder: &Recorder,
    measures: &Measures,
    view: &View,
) -> Result<(), OutputError> {
    if let Some(path) = trace {
        write_file(path, |out| write_chrome_trace(out, recorder, view))?;
    }
    if let Some(path) = timeline {
        write_file(path, |out| write_svg(out, recorder, measures, view))?;
    }
    Ok(())
}

fn summary(
    args: &RunArgs,
    about: &About<'_>,
    measures: &Measures,
    written: Option<u64>,
    has_stored: bool,
) -> Result<String, Failure> {
    let mut out = Vec::new();
    let input = match about.input.as_str() {
        "-" => "standard input",
        path => path,
    };
    let write = |out: &mut Vec<u8>| -> std::io::Result<()> {
        writeln!(
            out,
            "{} {}x{}, {} in {}",
            input,
            about.width,
            about.height,
            Count(measures.frames, "frame"),
            Count(measures.chunks, "chunk")
        )?;
        // On a terminal what was found was said at the beginning.
        let found = about.choice.filter(|_| !std::io::stderr().is_terminal());
        writeln!(
            out,
            "transport {}; kernels {}{}",
            about.transport,
            about.kernels,
            found.map_or_else(String::new, |found| format!("; {found}"))
        )?;
        if about.interrupted {
            writeln!(out, "interrupted: what was in flight has been finished")?;
        }
        let fps = measures.frames as f64 * 1e3 / about.wall_ms.max(1e-6);
        writeln!(
            out,
            "{fps:.1} frames per second over the whole run, which begins when the ranks are connected"
        )?;
        if let Some(noise) = about.noise_sigma_estimated {
            writeln!(out, "estimated noise of each plane: {noise}")?;
        }
        if about.psnr_after_why_null != Some(NOT_COMPARED) {
            write_psnr(out, about.psnr_before_db, about.psnr_after_db)?;
        }
        write_restarts(out, about)?;
        if let Some(verified) = &about.verify {
            writeln!(out, "{verified}")?;
        }
        write_text(out, measures)?;
        let files = [
            ("video", &args.output),
            ("report", &args.report),
            ("trace", &args.trace),
            ("timeline", &args.timeline),
        ];
        for (what, path) in files
            .into_iter()
            .filter(|(what, _)| has_stored || *what == "video")
        {
            if let Some(path) = path.as_ref().filter(|p| !is_stdout(p)) {
                let frames = written.filter(|_| what == "video");
                let count =
                    frames.map_or_else(String::new, |n| format!(" ({})", Count(n, "frame")));
                writeln!(out, "{what:>9}: {}{count}", path.display())?;
            }
        }
        Ok(())
    };
    write(&mut out).map_err(anyhow::Error::new)?;
    Ok(String::from_utf8(out).map_err(anyhow::Error::new)?)
}

/// Where there are no decibels, the clip and the clean one are identical.
fn write_psnr(out: &mut Vec<u8>, before: Option<f64>, after: Option<f64>) -> std::io::Result<()> {
    let db = |db: Option<f64>| db.map_or_else(|| IDENTICAL.into(), |db| format!("{db:.2} dB"));
    let gain = before.zip(after);
    let gain = gain.map_or_else(String::new, |(b, a)| format!(" ({:+.2} dB)", a - b));
    writeln!(
        out,
        "luma PSNR {} before, {} after{gain}",
        db(before),
        db(after)
    )
}

/// The most recoveries that are told one by one; the report has them all.
const TOLD: usize = 8;

fn write_restarts(out: &mut Vec<u8>, about: &About<'_>) -> std::io::Result<()> {
    if about.restarts == 0 {
        return Ok(());
    }
    writeln!(
        out,
        "Phase B was started again {} of {} times",
        about.restarts, about.restarts_allowed
    )?;
    for recovery in about.recoveries.iter().take(TOLD) {
        let Recovery {
            cause,
            chunk,
            chunks_sent_again: again,
            ms_to_served,
            ..
        } = recovery;
        let at = chunk.map_or_else(|| "at the end".into(), |chunk| format!("at chunk {chunk}"));
        let ms =
            ms_to_served.map_or_else(String::new, |ms| format!(", served again in {ms:.0} ms"));
        let again = Count((*again).into(), "chunk");
        writeln!(out, "{at:>12}: {again} sent again{ms}; {cause}")?;
    }
    let more = about.recoveries.len().saturating_sub(TOLD);
    if more > 0 {
        writeln!(out, "{more:>12} more; --report has them all")?;
    }
    Ok(())
}
