//! What the flight recordings of a job's ranks say together.
//!
//! Hazard: each rank knows only its own half of an operation, and on a clock of its own; and a file
//! that was cut off tells a story that is not true. Guarantee: files that are damaged or of another
//! job are refused by name; an operation is held against its other half by what both ranks know of
//! it, never by its time; and what the recordings cannot show is said, not guessed.

mod clocks;
mod lives;
mod pairs;
mod picture;
mod ranked;
mod story;
mod tell;
mod told;
mod waits;

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use pp_contract::FaultKind;
use pp_transport::flight::{MAX_FILE_BYTES, Recording};
use serde::Serialize;

use self::ranked::Ranked;
use self::told::{Rank, Told};
use self::waits::Wait;
use crate::error::Error;

/// What the flight recordings of one job say together.
#[derive(Serialize)]
#[serde(transparent)]
pub struct Analysis {
    #[serde(skip)]
    ranked: Vec<Ranked>,
    told: Told,
}

impl Analysis {
    /// Reads the recordings, one of each rank.
    ///
    /// # Errors
    /// A file cannot be read, is no recording, or is of another job.
    pub fn read(files: &[PathBuf]) -> Result<Self, Error> {
        let files: Result<Vec<_>, _> = files.iter().map(|file| read(file)).collect();
        let (ranked, left_out) = together(files?)?;
        let told = told(&ranked, left_out);
        Ok(Self { ranked, told })
    }

    /// Writes a trace for Perfetto.
    ///
    /// # Errors
    /// What `out` returns.
    pub fn write_trace(&self, out: &mut impl std::io::Write) -> std::io::Result<()> {
        picture::draw(out, &self.ranked)
    }
}

impl std::fmt::Display for Analysis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.told.fmt(f)
    }
}

fn refuse(file: &Path, why: impl std::fmt::Display) -> Error {
    let text = format!("{}: {why}", file.display());
    Error::local(FaultKind::BadInput, "read recording", text)
}

fn read(file: &Path) -> Result<(PathBuf, Recording), Error> {
    let mut bytes = Vec::new();
    // One byte more than any has, so that one which is longer shows.
    File::open(file)
        .and_then(|open| open.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut bytes))
        .map_err(|e| {
            let text = format!("{}: {e}", file.display());
            Error::local(FaultKind::Io, "read recording", text)
        })?;
    let recording = Recording::decode(&bytes).map_err(|e| refuse(file, e))?;
    Ok((file.to_owned(), recording))
}

/// Puts recordings of one job beside each other, in the order of their ranks.
fn together(mut files: Vec<(PathBuf, Recording)>) -> Result<(Vec<Ranked>, Vec<PathBuf>), Error> {
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
    let (verdict, running) = story::story(ranked, &waits, &missing, &findings);
    let mut under_way = Vec::new();
    if running {
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
        running,
        verdict,
    }
}

#[cfg(test)]
mod tests;
