//! `pp flight`: what the recordings of a job's ranks say together.
//!
//! Hazard: each rank knows only its own half of an operation, and on a clock of its own; and a file
//! that was cut off tells a story that is not true. Guarantee: files that are damaged or of another
//! job are refused by name; an operation is held against its other half by what both ranks know of
//! it, never by its time; and what the recordings cannot show is said, not guessed.

mod clocks;
mod lives;
mod pairs;
mod picture;
mod story;
mod tell;
mod waits;

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use pp_contract::FaultKind;
use pp_transport::flight::{MAX_FILE_BYTES, Recording};
use serde::Serialize;

use self::clocks::Clock;
use self::pairs::Findings;
use self::waits::Wait;
use crate::args::FlightArgs;
use crate::exit::{Failure, print};
use crate::video::place::one_file_each;
use crate::video::staged::write_file;

/// A recording, beside all others of its job.
struct Ranked {
    file: PathBuf,
    recording: Recording,
    clock: Clock,
}

impl Ranked {
    fn rank(&self) -> u32 {
        self.recording.rank.get()
    }

    /// A time of this rank on the clock of all.
    fn at(&self, ns: u64) -> i128 {
        i128::from(ns) + self.clock.offset_ns
    }

    /// How long before the recording was written.
    fn before_ns(&self, ns: u64) -> u64 {
        self.recording.written.monotonic_ns.saturating_sub(ns)
    }
}

/// All that is said, in both forms.
#[derive(Serialize)]
struct Told {
    job: String,
    ranks: Vec<Rank>,
    /// Ranks of the job without a recording.
    missing: Vec<u32>,
    /// Files of earlier launches under the same job id.
    left_out: Vec<PathBuf>,
    #[serde(flatten)]
    findings: Findings,
    /// What one rank had not taken in yet when a job that was running was asked.
    under_way: Vec<String>,
    /// The job was asked while it ran, and nothing was wrong with it.
    running: bool,
    verdict: String,
}

/// What one recording says.
#[derive(Serialize)]
struct Rank {
    rank: u32,
    pid: u32,
    host: String,
    file: String,
    written_because: String,
    operations: usize,
    operations_ever: u64,
    /// What it was inside of when it was written.
    inside: Option<String>,
    wait: Wait,
    clock: Clock,
}

/// Reads the files, and says what they say together.
pub(crate) fn flight(args: &FlightArgs) -> Result<(), Failure> {
    let sources: Vec<_> = args
        .files
        .iter()
        .map(|file| ("FILES", Some(&**file)))
        .collect();
    one_file_each(&sources, &[("--trace", args.trace.as_deref())])?;
    let files: Result<Vec<_>, _> = args.files.iter().map(|file| read(file)).collect();
    let (ranked, left_out) = together(files?)?;
    let told = told(&ranked, left_out);
    if let Some(path) = &args.trace {
        write_file(path, |out| picture::draw(out, &ranked))
            .map_err(|error| Failure::local(FaultKind::Io, "write trace", error))?;
    }
    if args.json {
        let text = serde_json::to_string(&told).map_err(anyhow::Error::new)?;
        return print(&format!("{text}\n"));
    }
    print(&told.to_string())
}

fn refuse(file: &Path, why: impl std::fmt::Display) -> Failure {
    let text = format!("{}: {why}", file.display());
    Failure::local(FaultKind::BadInput, "read recording", text)
}

fn read(file: &Path) -> Result<(PathBuf, Recording), Failure> {
    let mut bytes = Vec::new();
    // One byte more than any has, so that one which is longer shows.
    File::open(file)
        .and_then(|open| open.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut bytes))
        .map_err(|e| {
            let text = format!("{}: {e}", file.display());
            Failure::local(FaultKind::Io, "read recording", text)
        })?;
    let recording = Recording::decode(&bytes).map_err(|e| refuse(file, e))?;
    Ok((file.to_owned(), recording))
}

/// Puts recordings of one job beside each other, in the order of their ranks.
fn together(mut files: Vec<(PathBuf, Recording)>) -> Result<(Vec<Ranked>, Vec<PathBuf>), Failure> {
    files.sort_by_key(|(_, recording)| (recording.rank, recording.written.realtime_ns));
    for pair in files.windows(2) {
        let [(first, a), (second, b)] = pair else {
            continue;
        };
        if a.job != b.job {
            let why = format!(
                "it is of job {:016x}, and {} of job {:016x}; give the files of one job",
                b.job,
                first.display(),
                a.job
            );
            return Err(refuse(second, why));
        }
        if a.world_size != b.world_size {
            let why = format!(
                "it says that the job has {} ranks, and {} says {}",
                b.world_size,
                first.display(),
                a.world_size
            );
            return Err(refuse(second, why));
        }
        if (a.rank, a.pid, &a.host) == (b.rank, b.pid, &b.host) {
            let why = format!(
                "it is of the same process as {}; give one of them",
                first.display()
            );
            return Err(refuse(second, why));
        }
    }
    let (files, left_out) = lives::of_the_newest_run(files);
    let clocks = clocks::align(files.iter().map(|(_, recording)| recording).collect());
    let ranked = files.into_iter().zip(clocks);
    let ranked = ranked.map(|((file, recording), clock)| Ranked {
        file,
        recording,
        clock,
    });
    Ok((ranked.collect(), left_out))
}

fn told(ranked: &[Ranked], left_out: Vec<PathBuf>) -> Told {
    let mut findings = pairs::find(ranked);
    let waits: Vec<Wait> = ranked.iter().map(|r| waits::of(r, ranked)).collect();
    let world = ranked
        .first()
        .map_or(0, |first| first.recording.world_size.get());
    let is_there = |rank: &u32| ranked.iter().any(|r| r.rank() == *rank);
    let missing: Vec<u32> = (0..world).filter(|rank| !is_there(rank)).collect();
    let story = story::story(ranked, &waits, &missing, &findings);
    let mut under_way = Vec::new();
    if story.is_running {
        // What was between the ranks when they wrote, one after the other, is not lost.
        let not_yet = |what: String| {
            let what = what.replace(" never took in ", " had not yet taken in ");
            what.replace(" never entered ", " had not yet entered ")
        };
        let between = std::mem::take(&mut findings.never_came);
        under_way.extend(between.into_iter().map(not_yet));
    }
    let ranks = ranked.iter().zip(waits).map(|(r, wait)| Rank {
        rank: r.rank(),
        pid: r.recording.pid,
        host: r.recording.host.to_string(),
        file: r.file.display().to_string(),
        written_because: tell::reason(&r.recording.reason),
        operations: r.recording.operations.len(),
        operations_ever: r.recording.total,
        inside: tell::activity(r),
        wait,
        clock: r.clock.clone(),
    });
    let job = ranked.first().map_or(0, |first| first.recording.job);
    Told {
        job: format!("{job:016x}"),
        ranks: ranks.collect(),
        missing,
        left_out,
        findings,
        under_way,
        running: story.is_running,
        verdict: story.verdict,
    }
}

#[cfg(test)]
mod tests;
