//! `pp-trials kills`: how long a rank is away that is killed and started again, beside the start of a bare rank.
//!
//! A job denoises a film of small frames while its rank of `phase_b` is killed again and again, each time only when the
//! output goes on. With `--large` the frames are large, and the rank is killed every 600 ms. The output must be that of an
//! undisturbed job. Before and after it a process of this program does what a rank must do in any case (`start`): it opens
//! the driver and a context, and loads the kernels. What a restart takes longer than the median of these is ours. Between
//! the kills the memory of the GPUs must stay what it is, and rank 0 must not grow.

mod start;

use std::fmt;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pp_command::{TransportChoice, whole};
use pp_contract::DeviceName;
use pp_device::Device;
use pp_job::Error;
use pp_testing::process::{Footprint, Held, Output, Process, Strike, is_alive, run};
use pp_testing::{Folder, video, words};
use serde::Serialize;
use serde_json::Value;

pub(crate) use self::start::{StartArgs, start};
use crate::hook::VARIABLE;
use crate::soak::ended_well;
use crate::soak::film::{FRAME_BYTES, Film};
use crate::trial::{TWO, shared_gpus};

/// Frames that come out between two kills: more than a job writes ahead into a pipe that is not read.
const FRAMES: u64 = 600;
/// Frames of a large film for each kill: more than a CPU encodes in [`LARGE_PAUSE`].
const LARGE_FRAMES: usize = 240;
/// Time between two kills of a job whose film is large: the rank is back by then. A pipe would hold such a film up.
const LARGE_PAUSE: Duration = Duration::from_millis(600);
/// Kills of a job whose film is large: each takes 1 GB of disk.
const MOST_LARGE: usize = 20;
/// By then a job has made all that it makes once.
const WARM_UP: usize = 10;
/// What rank 0 may grow by after that: noise of the allocator, and one generation that is there at one moment alone.
const GROWS_KIB: u64 = 16 * 1024;
const GROWS: [usize; 3] = [6, 12, 60];
/// A process that is not ready after so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// The rank that is killed.
const VICTIM: u32 = 1;

/// The arguments of `pp-trials kills`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct KillsArgs {
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "host")]
    transport: TransportChoice,
    /// The devices of the two ranks; by default the GPUs that there are, if the transport is between GPUs.
    #[arg(
        long,
        value_name = "cpu|cuda|cuda:N,...",
        value_delimiter = ',',
        conflicts_with = "transport"
    )]
    devices: Vec<DeviceName>,
    /// How often the rank is killed, 1 to 100000.
    #[arg(long, value_name = "N", default_value_t = 130, value_parser = whole(1..=100_000_usize))]
    kills: usize,
    /// How often a bare rank is started, for comparison, 2 to 100000.
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = whole(2..=100_000_usize))]
    starts: usize,
    /// Kill a rank on a GPU that has eight slots of 22,118,400 bytes: a film of 1280x720 in place of small frames. It takes 1
    /// GB in the folder for temporary files (TMPDIR) for each kill, of which there are at most 20 then.
    #[arg(long, requires = "devices")]
    large: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// Times in milliseconds.
#[derive(Serialize)]
struct Times {
    count: usize,
    median_ms: f64,
    worst_ms: f64,
}

impl Times {
    fn of(mut ms: Vec<f64>) -> Self {
        ms.sort_unstable_by(f64::total_cmp);
        Self {
            count: ms.len(),
            median_ms: ms.get(ms.len() / 2).copied().unwrap_or_default(),
            worst_ms: ms.last().copied().unwrap_or_default(),
        }
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            count,
            median_ms,
            worst_ms,
        } = self;
        write!(
            f,
            "{median_ms:.1} ms median, {worst_ms:.1} worst of {count}"
        )
    }
}

#[derive(Serialize)]
struct KillsReport<'a> {
    /// The rank had eight slots of 22,118,400 bytes.
    large: bool,
    transport: &'a str,
    /// As they were named.
    devices: String,
    /// From the loss to the next result.
    back_in_service: Times,
    /// From the start of the process to kernels that can be called.
    bare_start: Times,
    over_median_ms: f64,
    /// The longest restart less the median bare start.
    over_worst_ms: f64,
    /// Bytes of each GPU: free before the job, taken between the tenth kill and the last one, and free after the job.
    free_before: Vec<u64>,
    grown: Vec<i64>,
    free_after: Vec<u64>,
    seconds: f64,
}

/// Runs it, and fails where the output is another one, or a rank did not come back.
pub(crate) fn kills(args: &KillsArgs) -> std::result::Result<(), Error> {
    let began = Instant::now();
    let is_on_gpu = args.devices.get(VICTIM as usize);
    let is_on_gpu = is_on_gpu.is_some_and(|device| device.is_gpu());
    if args.large && (args.kills > MOST_LARGE || !is_on_gpu) {
        return Err(Error::Usage(format!(
            "--large kills a rank on a GPU at most {MOST_LARGE} times; give --kills {MOST_LARGE} or less, and --devices cpu,cuda:0"
        )));
    }
    let has_gpus = args.devices.iter().any(|device| device.is_gpu());
    // That of the job, and what the rank that is killed has to load.
    let (transport, loads) = match (args.transport, args.devices.get(VICTIM as usize)) {
        (transport, None) => (transport, transport),
        (_, Some(victim)) if victim.is_gpu() => (TransportChoice::Auto, TransportChoice::P2p),
        (_, Some(_)) => (TransportChoice::Auto, TransportChoice::Host),
    };
    let gpus = match transport {
        TransportChoice::Host => 0,
        TransportChoice::Auto if !has_gpus => 0,
        _ => Device::count().map_err(anyhow::Error::new)?.min(2),
    };
    // Open from now on, so that no driver goes to sleep between two processes.
    let devices: std::result::Result<Vec<_>, _> = (0..gpus).map(Device::open).collect();
    let devices = devices.map_err(anyhow::Error::new)?;
    let (transport, loads) = (transport.to_string(), loads.to_string());

    let free_before = free(&devices)?;
    let mut bare = starts(&loads, args.starts / 2)?;
    let (back, grown) = away(args, &transport, &devices)?;
    bare.extend(starts(&loads, args.starts - bare.len())?);
    let (back, bare) = (Times::of(back), Times::of(bare));
    let report = KillsReport {
        large: args.large,
        transport: &transport,
        devices: DeviceName::list(&args.devices),
        over_median_ms: back.median_ms - bare.median_ms,
        over_worst_ms: back.worst_ms - bare.median_ms,
        back_in_service: back,
        bare_start: bare,
        free_before,
        grown,
        free_after: free(&devices)?,
        seconds: began.elapsed().as_secs_f64(),
    };
    let text = match args.json {
        true => serde_json::to_string(&report).map_err(anyhow::Error::new)?,
        false => report.to_string(),
    };
    pp_command::print(&format!("{text}\n"))
}

impl fmt::Display for KillsReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.devices {
            "" => write!(f, "transport {}", self.transport)?,
            devices => write!(f, "devices {devices}")?,
        }
        if self.large {
            write!(f, ", eight slots of 22,118,400 bytes")?;
        }
        writeln!(f, ", the output is right")?;
        writeln!(f, "back in service: {}", self.back_in_service)?;
        writeln!(f, "a bare rank:     {}", self.bare_start)?;
        let (median, worst) = (self.over_median_ms, self.over_worst_ms);
        write!(
            f,
            "over its median: {median:.1} ms median, {worst:.1} worst"
        )?;
        for (gpu, grown) in self.grown.iter().enumerate() {
            let (before, after) = (self.free_before[gpu], self.free_after[gpu]);
            let text =
                format!("{grown} bytes taken by the kills, {before} free before, {after} after");
            write!(f, "\nGPU {gpu}: {text}")?;
        }
        Ok(())
    }
}

/// Bytes that each GPU has left.
fn free(devices: &[Device]) -> Result<Vec<u64>> {
    let free = |device: &Device| Ok(device.memory()?.free);
    devices.iter().map(free).collect()
}

fn this_program(words: &[&str]) -> Result<Command> {
    let program = std::env::current_exe().context("this program has no path")?;
    let mut command = Command::new(program);
    command.args(words).env_remove(VARIABLE);
    Ok(command)
}

/// Milliseconds that a bare rank takes to start, so many times.
fn starts(transport: &str, count: usize) -> Result<Vec<f64>> {
    let victim = VICTIM.to_string();
    let words = ["start", "--transport", transport, "--device", &victim];
    let one = || {
        let mut command = this_program(&words)?;
        let begins = Instant::now();
        let process = Process::start(&mut command, Output::Counted)?;
        let deadline = begins + PATIENCE;
        let ready = process.says(&[start::READY], deadline);
        let is_over = process.ends_by(deadline);
        ensure!(is_over, "a bare rank hangs: {}", process.log().trim());
        let ready = ready.with_context(|| format!("a bare rank: {}", process.log().trim()))?;
        Ok(ready.duration_since(begins).as_secs_f64() * 1e3)
    };
    (0..count).map(|_| one()).collect()
}

/// The film of a job that reads a pipe. A large film is written to this file, and the pipe stays empty.
fn film(args: &KillsArgs, file: &Path) -> Result<Vec<u8>> {
    let mut film = Vec::new();
    if args.large {
        let scene = video(1280, 720, "420jpeg", LARGE_FRAMES);
        let head = scene.iter().position(|byte| *byte == b'\n');
        let head = head.context("a film without a head")? + 1;
        let mut file = File::create(file)?;
        file.write_all(&scene[..head])?;
        for _ in 0..args.kills + 2 {
            file.write_all(&scene[head..])?;
        }
    } else {
        let (frames, seed) = (FRAMES * (args.kills as u64 + 2), 1);
        Film { frames, seed }.write(&mut film)?;
    }
    Ok(film)
}

/// Milliseconds from each loss to the next result, as the report of a job has them.
fn served(report: &Path, kills: usize) -> Result<Vec<f64>> {
    let report: Value = serde_json::from_slice(&std::fs::read(report)?)?;
    let recoveries = report["run"]["recoveries"].as_array();
    let recoveries = recoveries.context("a report without recoveries")?;
    let served = recoveries.iter().filter_map(|r| r["ms_to_served"].as_f64());
    let served: Vec<f64> = served.collect();
    ensure!(
        served.len() == kills,
        "killed {kills} times, and back in service {} times",
        served.len()
    );
    Ok(served)
}

/// Compares two files, a part at a time.
fn are_equal(one: &Path, other: &Path) -> Result<bool> {
    const PART: u64 = 1 << 20;
    let mut files = [File::open(one)?, File::open(other)?];
    let mut parts = [Vec::new(), Vec::new()];
    loop {
        for (file, part) in files.iter_mut().zip(&mut parts) {
            part.clear();
            file.take(PART).read_to_end(part)?;
        }
        if parts[0] != parts[1] || parts[0].is_empty() {
            return Ok(parts[0] == parts[1]);
        }
    }
}

/// Milliseconds that the rank was away, for each kill, and by how much the memory of each GPU was less at the last one.
fn away(args: &KillsArgs, transport: &str, devices: &[Device]) -> Result<(Vec<f64>, Vec<i64>)> {
    let (kills, large) = (args.kills, args.large);
    let folder = Folder::scratch();
    let names = ["film.y4m", "undisturbed.y4m", "output.y4m"];
    let [input, undisturbed, output] = names.map(|name| folder.file(name));
    let film = film(args, &input)?;
    let job = |more: &[&Path]| {
        let mut command = this_program(&["run", "--transport", transport, "--pipeline", TWO])?;
        let (files, of_film) = match large {
            true => ([&*input, &*output], "--frames-per-chunk 8 --depth 4"),
            false => ([Path::new("-"); 2], "--frames-per-chunk 2 --threads 1"),
        };
        command.arg("--input").arg(files[0]);
        command.arg("--output").arg(files[1]);
        match &args.devices[..] {
            [] if devices.is_empty() => {}
            [] => {
                command.args(shared_gpus(2));
            }
            named => {
                command.args(["--devices", &DeviceName::list(named)]);
            }
        }
        command.args(words("--cuts off --strength 8 --denoise-steps 1"));
        command.args(words(of_film));
        command.args(more);
        Ok::<_, anyhow::Error>(command)
    };
    let wanted = ended_well(run(&mut job(&[])?, Some(film.clone())))?;
    if large {
        std::fs::rename(&output, &undisturbed)?;
    }
    let path = folder.file("report.json");
    let more = ["--restarts", "1000000", "--report"].map(Path::new);
    let mut held = Held::start(&mut job(&[&more[..], &[&path]].concat())?, film);
    let (mut early, mut late) = (None, Vec::new());
    let rank_0 = held.rank(0);
    let footprint = || Footprint::of(rank_0).context("rank 0 is gone");
    let (mut before, mut after) = (footprint()?, footprint()?);
    for kill in 0..kills {
        // Behind this the rank is back.
        let mut at = FRAMES * FRAME_BYTES * (kill as u64 + 1);
        if large {
            at = 0;
            std::thread::sleep(LARGE_PAUSE);
            ensure!(is_alive(held.id()), "the film is over before the last kill");
        }
        held.wait_for(at);
        (late, after) = (free(devices)?, footprint()?);
        if kill == WARM_UP.min(kills / 2) {
            early = Some(late.clone());
            before = after;
        }
        held.strike(Strike {
            rank: VICTIM,
            ..Strike::kill(at)
        });
    }
    let ended = held.finish();
    let written = ended_well(ended)?;
    // A job that writes a file says on standard output how it went.
    let is_right = match large {
        true => are_equal(&undisturbed, &output)?,
        false => written == wanted,
    };
    ensure!(is_right, "the output is another one");
    let counts = |of: Footprint| [of.threads, of.descriptors, of.mappings];
    let mut counts = counts(before).into_iter().zip(counts(after)).zip(GROWS);
    ensure!(
        after.rss_kib <= before.rss_kib + GROWS_KIB
            && counts.all(|((before, after), grows)| after <= before + grows),
        "rank 0 grew from {before:?} to {after:?}"
    );
    let served = served(&path, kills)?;
    let early = early.context("no kill")?;
    let grown = early.iter().zip(&late);
    let grown = grown.map(|(early, late)| early.cast_signed() - late.cast_signed());
    Ok((served, grown.collect()))
}
