//! What a finished run prints and writes.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use pp_command::{print, write_pictures};
use pp_contract::Pipeline;
use pp_video::estimates::Estimates;

use pp_runtime::report::{Count, Measures, Restart, View, default_warm_up, write_json, write_text};
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::kernels::Kernels;
use super::source::VideoSource;
use crate::args::{RunArgs, Strength, name_of};
use pp_job::command_line::{arguments, host_name, is_quiet};
use pp_job::output::{is_stdout, write_file};
use pp_job::{Error, Finished};

/// What was run, and what the report calls its parts.
pub(super) struct Labels<'a> {
    pub(super) args: &'a RunArgs,
    pub(super) pipeline: &'a Pipeline,
    pub(super) depth: u32,
    pub(super) transport: String,
    pub(super) kernels: String,
    /// What was found and chosen, where that was left to us.
    pub(super) choice: Option<&'a str>,
}

/// What was run, for the JSON report.
struct About<'a, E: Kernels> {
    job: &'a Labels<'a>,
    source: &'a VideoSource<'a, E>,
    finished: &'a Finished,
    noise: Option<&'a Estimates>,
    /// A rank that came and went before it was given a chunk has none of its own.
    recoveries: Vec<Recovery>,
    psnr_before: Psnr,
    psnr_after: Psnr,
}

/// `docs/report.md` says what each key is.
impl<E: Kernels> Serialize for About<'_, E> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (job, source, finished) = (self.job, self.source, self.finished);
        let args = job.args;
        let command = arguments().into_iter();
        let command = command.map(|arg| arg.to_string_lossy().into_owned());
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let strength: Value = match args.strength {
            Strength::Auto => "auto".into(),
            Strength::Sigma(sigma) => sigma.into(),
        };
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("pp_version", env!("CARGO_PKG_VERSION"))?;
        map.serialize_entry("command", &command.collect::<Vec<_>>())?;
        map.serialize_entry("host", &host_name())?;
        map.serialize_entry("written_unix_s", &now.ok().map(|now| now.as_secs()))?;
        map.serialize_entry("input", &args.input.display().to_string())?;
        let output = args.output.as_ref().map(|p| p.display().to_string());
        map.serialize_entry("output", &output)?;
        map.serialize_entry("width", &source.header.width())?;
        map.serialize_entry("height", &source.header.height())?;
        let made = Some(&source.made).filter(|made| made.frames > 0);
        map.serialize_entry("output_width", &made.map(|made| made.width))?;
        map.serialize_entry("output_height", &made.map(|made| made.height))?;
        map.serialize_entry("output_frames", &source.made.frames)?;
        map.serialize_entry("pipeline", &job.pipeline.to_string())?;
        map.serialize_entry("ranks", &job.pipeline.world_size().get())?;
        map.serialize_entry("transport", &job.transport)?;
        map.serialize_entry("shared_devices", &finished.shared_devices)?;
        map.serialize_entry("kernels", &job.kernels)?;
        map.serialize_entry("choice", &job.choice)?;
        map.serialize_entry("denoise_steps", &args.denoise_steps)?;
        map.serialize_entry("strength", &strength)?;
        map.serialize_entry("noise_sigma_estimated", &self.noise)?;
        let plugin_args = args.plugin_args.iter().map(|(key, value)| (key, value));
        map.serialize_entry("plugin_args", &plugin_args.collect::<BTreeMap<_, _>>())?;
        map.serialize_entry("frames_per_chunk", &args.frames_per_chunk)?;
        map.serialize_entry("depth", &job.depth)?;
        map.serialize_entry("chunks_at_most", &args.chunks)?;
        map.serialize_entry("recompute", &args.recompute)?;
        map.serialize_entry("cuts", &name_of(&args.cuts))?;
        map.serialize_entry("add_noise", &args.add_noise)?;
        map.serialize_entry("late", &args.live.late)?;
        map.serialize_entry("fill", &name_of(&args.live.fill.unwrap_or_default()))?;
        let max_latency = args.live.max_latency;
        map.serialize_entry(
            "max_latency_ms",
            &max_latency.map(|t| t.as_secs_f64() * 1e3),
        )?;
        map.serialize_entry("min_steps", &args.live.min_steps)?;
        map.serialize_entry("pace", &args.live.pace)?;
        map.serialize_entry("played", &source.live.played)?;
        map.serialize_entry("origin", &source.live.origin)?;
        map.serialize_entry("seed", &args.seed)?;
        map.serialize_entry("threads", &args.threads)?;
        map.serialize_entry("interrupted", &finished.interrupted.is_some())?;
        map.serialize_entry("restarts", &finished.restarts)?;
        map.serialize_entry("restarts_allowed", &args.restarts)?;
        map.serialize_entry("recoveries", &self.recoveries)?;
        map.serialize_entry("wall_ms", &(finished.wall.as_secs_f64() * 1e3))?;
        map.serialize_entry("psnr_before_db", &self.psnr_before.ok())?;
        map.serialize_entry("psnr_before_why_null", &self.psnr_before.err())?;
        map.serialize_entry("psnr_after_db", &self.psnr_after.ok())?;
        map.serialize_entry("psnr_after_why_null", &self.psnr_after.err())?;
        map.serialize_entry("verify", &source.settings.log.verified())?;
        map.end()
    }
}

/// Why a PSNR of clips that are the same is not given: it would be infinite.
const IDENTICAL: &str = "identical";
/// Why there is no PSNR at all.
const NOT_COMPARED: &str = "no frame was compared with that before --add-noise";

/// Decibels, or why there are none.
type Psnr = Result<f64, &'static str>;

fn psnr(db: Option<f64>) -> Psnr {
    match db {
        Some(db) if db.is_finite() => Ok(db),
        Some(_) => Err(IDENTICAL),
        None => Err(NOT_COMPARED),
    }
}

/// A rank that was lost, and what it took to go on.
#[derive(Serialize)]
struct Recovery {
    rank: u32,
    cause: String,
    lost_ns: u64,
    /// The first chunk that the source sent after that.
    chunk: Option<u64>,
    chunks_sent_again: u32,
    /// From the loss being noticed to that chunk being sent.
    ms_to_sent: Option<f64>,
    /// From the loss being noticed to the first chunk that the sink had again.
    ms_to_served: Option<f64>,
}

impl Recovery {
    fn of(restart: &Restart) -> Self {
        let ms = |at: u64| at.saturating_sub(restart.lost_ns) as f64 / 1e6;
        Self {
            rank: restart.fault.rank.get(),
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
pub(super) fn publish<E: Kernels>(
    job: &Labels<'_>,
    source: &VideoSource<'_, E>,
    finished: &Finished,
) -> Result<(), Error> {
    let args = job.args;
    let recorder = &finished.summary.recorder;
    let chunks = recorder.totals().chunks;
    let restarts = &finished.summary.restarts;
    let measures = Measures::of(recorder, default_warm_up(chunks), restarts);
    let (quality, bits) = (source.quality.as_ref(), source.header.bits());
    let noise = Some(&source.noise).filter(|noise| **noise != Estimates::default());
    let about = About {
        job,
        source,
        finished,
        noise: noise.filter(|_| args.strength == Strength::Auto),
        recoveries: restarts.iter().map(Recovery::of).collect(),
        psnr_before: psnr(quality.and_then(|q| q.before.db(bits))),
        psnr_after: psnr(quality.and_then(|q| q.after.db(bits))),
    };
    let view = View {
        title: format!(
            "pp run {}x{}, {}, {} frames a chunk, depth {}",
            source.header.width(),
            source.header.height(),
            job.pipeline,
            args.frames_per_chunk,
            job.depth
        ),
        restarts: restarts.clone(),
        ..View::default()
    };
    let write_report =
        |path: &Path| write_file(path, |out| write_json(out, &about, &measures, recorder));
    let report = args.report.as_deref().map_or(Ok(()), write_report);
    let (trace, timeline) = (args.trace.as_deref(), args.timeline.as_deref());
    let stored = report.and_then(|()| write_pictures(trace, timeline, recorder, &measures, &view));
    // Without them the video is there all the same, and the summary says so.
    let text = summary(&about, &measures, stored.is_ok())?;
    // The result may go to standard output; the summary must not get into it.
    let files = [&args.output, &args.report, &args.trace, &args.timeline];
    if is_quiet() {
        // The files are the result.
    } else if files.into_iter().flatten().any(|path| is_stdout(path)) {
        // If standard error is closed, the summary is lost.
        let _ = std::io::stderr().write_all(text.as_bytes());
    } else {
        print(&text)?;
    }
    Ok(stored?)
}

fn summary<E: Kernels>(
    about: &About<'_, E>,
    measures: &Measures,
    has_stored: bool,
) -> Result<String, Error> {
    let (job, header, finished) = (about.job, &about.source.header, about.finished);
    let mut out = Vec::new();
    let input = match job.args.input.display().to_string() {
        input if input == "-" => "standard input".into(),
        path => path,
    };
    let write = |out: &mut Vec<u8>| -> std::io::Result<()> {
        writeln!(
            out,
            "{} {}x{}, {} in {}",
            input,
            header.width(),
            header.height(),
            Count(measures.frames, "frame"),
            Count(measures.chunks, "chunk")
        )?;
        writeln!(out, "{}", job.pipeline)?;
        // On a terminal what was found was said at the beginning.
        let found = job
            .choice
            .as_ref()
            .filter(|_| !std::io::stderr().is_terminal());
        writeln!(
            out,
            "transport {}; kernels {}{}",
            job.transport,
            job.kernels,
            found.map_or_else(String::new, |found| format!("; {found}"))
        )?;
        if finished.interrupted.is_some() {
            writeln!(out, "interrupted: what was in flight has been finished")?;
        }
        let fps = measures.frames as f64 * 1e3 / (finished.wall.as_secs_f64() * 1e3).max(1e-6);
        writeln!(
            out,
            "{fps:.1} frames per second over the whole run, which begins when the ranks are connected"
        )?;
        if let Some(noise) = about.noise {
            writeln!(out, "estimated noise of each plane: {noise}")?;
        }
        if about.psnr_after != Err(NOT_COMPARED) {
            write_psnr(out, about.psnr_before, about.psnr_after)?;
        }
        write_restarts(out, about)?;
        if let Some(verified) = about.source.settings.log.verified() {
            writeln!(out, "{verified}")?;
        }
        write_text(out, measures)?;
        write_files(out, about, has_stored)
    };
    write(&mut out).map_err(anyhow::Error::new)?;
    Ok(String::from_utf8(out).map_err(anyhow::Error::new)?)
}

/// Names the files that were written: the video, and the others if all of them were.
fn write_files<E: Kernels>(
    out: &mut Vec<u8>,
    about: &About<'_, E>,
    has_stored: bool,
) -> std::io::Result<()> {
    let (args, made, header) = (about.job.args, &about.source.made, &about.source.header);
    let size = match (made.width, made.height) == (header.width(), header.height()) {
        true => String::new(),
        false => format!(" of {}x{}", made.width, made.height),
    };
    let frames = format!(" ({}{size})", Count(made.frames, "frame"));
    let files = [
        ("video", &args.output, &*frames),
        ("report", &args.report, ""),
        ("trace", &args.trace, ""),
        ("timeline", &args.timeline, ""),
    ];
    let known = if has_stored { files.len() } else { 1 };
    for (what, path, count) in &files[..known] {
        if let Some(path) = path.as_ref().filter(|p| !is_stdout(p)) {
            writeln!(out, "{what:>9}: {}{count}", path.display())?;
        }
    }
    Ok(())
}

/// Where there are no decibels, the clip and the clean one are identical.
fn write_psnr(out: &mut Vec<u8>, before: Psnr, after: Psnr) -> std::io::Result<()> {
    let db = |db: Psnr| db.map_or_else(|_| IDENTICAL.into(), |db| format!("{db:.2} dB"));
    let gain = before.ok().zip(after.ok());
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

fn write_restarts<E: Kernels>(out: &mut Vec<u8>, about: &About<'_, E>) -> std::io::Result<()> {
    let restarts = about.finished.restarts;
    if restarts == 0 {
        return Ok(());
    }
    writeln!(
        out,
        "ranks were started again {restarts} of {} times",
        about.job.args.restarts
    )?;
    for recovery in about.recoveries.iter().take(TOLD) {
        let at = recovery.chunk;
        let at = at.map_or_else(|| "at the end".into(), |chunk| format!("at chunk {chunk}"));
        let ms = recovery.ms_to_served;
        let ms = ms.map_or_else(String::new, |ms| format!(", served again in {ms:.0} ms"));
        let again = Count(recovery.chunks_sent_again.into(), "chunk");
        writeln!(out, "{at:>12}: {again} sent again{ms}; {}", recovery.cause)?;
    }
    let more = about.recoveries.len().saturating_sub(TOLD);
    if more > 0 {
        writeln!(out, "{more:>12} more; --report has them all")?;
    }
    Ok(())
}
