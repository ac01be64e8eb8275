//! The input of a run, looked at before anything is made for it.

use std::path::PathBuf;

use pp_command::KernelChoice;
use pp_command::env::Env;
use pp_contract::{Fault, FaultKind, Pipeline};
use pp_job::command_line::say_note;
use pp_job::output::{can_be_created, kept_name, one_file_each};
use pp_job::{Config, Error};
use pp_kernels::SessionConfig;
use pp_transport::host::memory::available_bytes;
use pp_video::header::Header;
use pp_video::{QUEUE, io_threads, y4m};

use super::live;
use crate::args::RunArgs;
use crate::limits;
use pp_job::RANK_0;

/// Opens the input and reads what it says of its frames.
pub(super) fn open(args: &RunArgs, pipeline: &Pipeline, depth: u32) -> Result<y4m::Reader, Error> {
    // Found out now, not when the work is done.
    for path in [&args.report, &args.trace, &args.timeline] {
        path.as_deref().map_or(Ok(()), can_be_created)?;
    }
    let reader = y4m::Reader::open(&args.input)?;
    let header = &reader.header;
    let (width, height, least) = (header.width(), header.height(), SessionConfig::MIN_SIDE);
    if width < least || height < least {
        return Err(refuse(format_args!(
            "{}: frames of {width}x{height} are below {least}x{least}, the smallest \
             the kernels take; scale or pad them first",
            reader.name
        )));
    }
    if args.live.pace && header.due_ns(1).is_none() {
        return Err(refuse(format_args!(
            "{}: --pace reads at the rate of the header, and it has none (F25:1 is 25 frames in a second); write one, or \
             leave --pace out",
            reader.name
        )));
    }
    check_memory(args, (pipeline, depth), header, &reader.name)?;
    if header.is_interlaced() {
        say_note(format!(
            "pp: {}: interlaced; the two fields of a frame are filtered as one picture",
            reader.name
        ));
    }
    Ok(reader)
}

/// Refuses standard streams that cannot serve, results that would replace another file of the command, and an input that
/// a sink on another rank cannot read a second time.
pub(super) fn check_files(
    args: &RunArgs,
    env: &Env,
    config: &Config,
    pipeline: &Pipeline,
) -> Result<(), Error> {
    // A supervisor has checked it for its ranks, whose standard streams are others.
    if config.is_supervised() {
        return Ok(());
    }
    let plugins = args.kernels.iter().filter_map(KernelChoice::file);
    let secret = env.get("PP_JOB_SECRET_FILE").map(PathBuf::from);
    // Of a launcher's ranks each has the files of its own stages.
    let is_here = |rank| config.rank().is_none_or(|own| own == rank);
    let (has_source, has_sink) = (is_here(RANK_0), is_here(pipeline.sink()));
    if !has_source && !has_sink {
        return Ok(());
    }
    if has_source {
        check_twice(args, pipeline)?;
        live::check_input(args)?;
    }
    let mut sources = vec![
        ("--input", Some(&*args.input)),
        ("PP_JOB_SECRET_FILE", secret.as_deref()),
    ];
    sources.extend(plugins.map(|path| ("--kernels", Some(path))));
    let kept = args.output.as_deref().and_then(kept_name);
    let kept = kept.filter(|_| args.going_on.keep_partial);
    let results = [
        ("--output", args.output.as_deref()),
        ("--keep-partial", kept.as_deref()),
        ("--report", args.report.as_deref()),
        ("--trace", args.trace.as_deref()),
        ("--timeline", args.timeline.as_deref()),
    ];
    let (of_sink, of_source) = results.split_at(2);
    let input = has_source.then_some(&*args.input);
    limits::check_streams(input, if has_source { of_source } else { &[] })?;
    limits::check_streams(None, if has_sink { of_sink } else { &[] })?;
    one_file_each(&sources, &results)
}

/// With `--add-noise` a sink on another rank reads the input, too.
fn check_twice(args: &RunArgs, pipeline: &Pipeline) -> Result<(), Error> {
    let sink = &pipeline.stages()[pipeline.stages().len() - 1];
    let is_stream = || std::fs::metadata(&*args.input).is_ok_and(|about| !about.is_file());
    if args.add_noise.is_none() || sink.leader() == RANK_0 {
        return Ok(());
    }
    if args.input.as_os_str() != "-" && !is_stream() {
        return Ok(());
    }
    let (name, rank) = (&sink.name, sink.leader());
    let input = match args.input.display().to_string() {
        input if input == "-" => "standard input".into(),
        path => path,
    };
    Err(Error::Usage(format!(
        "--add-noise compares at {name}@{rank}, which reads the input a second time, and {input} can be read once; \
         name a file with --input, or put {name} on rank 0"
    )))
}

/// Refuses frames so large that the job would drive the machine out of memory: a header may claim
/// any size, and the kernel kills at random to serve it.
fn check_memory(
    args: &RunArgs,
    (pipeline, depth): (&Pipeline, u32),
    header: &Header,
    name: &str,
) -> Result<(), Error> {
    let sample = header.bits().bytes() as u64;
    let samples = header.frame_bytes() as u64 / sample;
    let frames = u64::from(args.frames_per_chunk);
    let depth = u64::from(depth);
    // Two bytes a sample in each slot between two stages; queues and chunks in flight as in the file;
    // and a few copies in four bytes for the kernels, on all ranks.
    let edges = pipeline.stages().len() as u64 - 1;
    let chunk = samples.saturating_mul(frames);
    // With restarts a few chunks more are kept, and while one goes on there are the slots of two
    // generations.
    let slots = match args.restarts {
        0 => 2 * edges * depth,
        _ => 4 * edges * (depth + 1),
    };
    let read = 2 * (QUEUE as u64 + depth) + 3 * io_threads() as u64;
    let copies = slots + sample * read + 24;
    let wanted = chunk.saturating_mul(copies);
    let Some(available) = available_bytes().filter(|available| wanted > *available) else {
        return Ok(());
    };
    Err(refuse(format_args!(
        "{name}: {frames} frames of {}x{} a chunk at depth {depth} take about {} MB, and {} MB \
         are available; lower --frames-per-chunk or --depth, or scale the video",
        header.width(),
        header.height(),
        wanted / 1_000_000,
        available / 1_000_000
    )))
}

fn refuse(why: std::fmt::Arguments<'_>) -> Error {
    Fault::new(FaultKind::BadInput, RANK_0, "read input", why).into()
}
