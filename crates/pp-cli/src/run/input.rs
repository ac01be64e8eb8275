//! The input of a run, looked at before anything is made for it.

use std::path::PathBuf;

use pp_contract::{Fault, FaultKind};
use pp_job::{Config, Error, FRONT, say};
use pp_transport::host::memory::available_bytes;

use crate::args::{KernelChoice, RunArgs};
use crate::env::Env;
use crate::limits;
use crate::video::header::Header;
use crate::video::y4m;
use pp_job::output::{can_be_created, one_file_each};

/// Chunks read ahead, and decoded chunks that wait to be written.
pub(crate) const QUEUE: usize = 4;
/// The smallest frame that the kernels take.
const SMALLEST: u32 = 16;

/// Opens the input and reads what it says of its frames.
pub(super) fn open(args: &RunArgs) -> Result<y4m::Reader, Error> {
    // Found out now, not when the work is done.
    for path in [&args.report, &args.trace, &args.timeline] {
        path.as_deref().map_or(Ok(()), can_be_created)?;
    }
    let reader = y4m::Reader::open(&args.input)?;
    let header = &reader.header;
    let (width, height) = (header.width(), header.height());
    if width < SMALLEST || height < SMALLEST {
        return Err(refuse(format_args!(
            "{}: frames of {width}x{height} are below {SMALLEST}x{SMALLEST}, the smallest \
             the kernels take; scale or pad them first",
            reader.name
        )));
    }
    check_memory(args, header, &reader.name)?;
    if header.is_interlaced() {
        say(format!(
            "pp: {}: interlaced; the two fields of a frame are filtered as one picture",
            reader.name
        ));
    }
    Ok(reader)
}

/// Refuses standard streams that cannot serve, and results that would replace another file of the command.
pub(super) fn check_files(args: &RunArgs, env: &Env, config: Option<&Config>) -> Result<(), Error> {
    let plugin = match &args.kernels {
        KernelChoice::File(path) => Some(&**path),
        _ => None,
    };
    let secret = env.get("PP_JOB_SECRET_FILE").map(PathBuf::from);
    let sources = [
        ("--input", Some(&*args.input)),
        ("--kernels", plugin),
        ("PP_JOB_SECRET_FILE", secret.as_deref()),
    ];
    let results = [
        ("--output", args.output.as_deref()),
        ("--report", args.report.as_deref()),
        ("--trace", args.trace.as_deref()),
        ("--timeline", args.timeline.as_deref()),
    ];
    // A supervisor has checked it for its ranks, whose standard streams are others; and of a launcher's ranks only the
    // front reads and writes.
    let is_elsewhere = config
        .and_then(Config::rank)
        .is_some_and(|rank| rank != FRONT);
    if !config.is_some_and(Config::is_supervised) && !is_elsewhere {
        limits::check_streams(&args.input, &results)?;
        one_file_each(&sources, &results)?;
    }
    Ok(())
}

/// Refuses frames so large that the job would drive the machine out of memory: a header may claim
/// any size, and the kernel kills at random to serve it.
fn check_memory(args: &RunArgs, header: &Header, name: &str) -> Result<(), Error> {
    let frame = header.frame_bytes() as u64;
    let frames = u64::from(args.frames_per_chunk);
    let depth = u64::from(args.depth);
    // Two bytes a sample in each slot, both ways; queues and chunks in flight of one byte a
    // sample; and a few copies in four bytes for the kernels, on both ranks.
    let chunk = frame.saturating_mul(frames);
    // With restarts a few chunks more are kept, and while one goes on there are the slots of two
    // generations.
    let slots = match args.restarts {
        0 => 4 * depth,
        _ => 2 * (4 * depth + 4),
    };
    let copies = slots + 2 * (QUEUE as u64 + depth) + 3 * io_threads() as u64 + 24;
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
    Fault::new(FaultKind::BadInput, FRONT, "read input", why).into()
}

/// Threads that read, and as many that write: a few, since the other cores are the kernels'.
pub(crate) fn io_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 4).clamp(1, 8)
}
