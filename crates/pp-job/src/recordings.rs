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
use pp_runtime::stage::StageError;
use pp_transport::flight::{MAX_FILE_BYTES, Recording};

use self::ranked::{Files, Ranked};
pub use self::told::Analysis;
use crate::error::Error;

impl Analysis {
    /// Reads the recordings, one of each rank.
    ///
    /// # Errors
    /// A file cannot be read, is no recording, or is of another job.
    pub fn read(files: &[PathBuf]) -> Result<Self, Error> {
        let files: Result<Files, _> = files.iter().map(|file| read(file)).collect();
        let (ranked, left_out) = together(files?)?;
        Ok(Self::of(ranked, left_out))
    }

    /// Writes a trace for Perfetto.
    ///
    /// # Errors
    /// What `out` returns.
    pub fn write_trace(&self, out: &mut impl std::io::Write) -> std::io::Result<()> {
        picture::draw(out, &self.ranked)
    }
}

fn refuse(kind: FaultKind, file: &Path, why: impl std::fmt::Display) -> Error {
    let text = format!("{}: {why}", file.display());
    Error::local(kind, "read recording", text)
}

fn read(file: &Path) -> Result<(PathBuf, Recording), Error> {
    let mut bytes = Vec::new();
    // One byte more than any has, so that one which is longer shows.
    File::open(file)
        .and_then(|open| open.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut bytes))
        .map_err(|e| StageError::file("read recording", file, &e))?;
    let recording = Recording::decode(&bytes).map_err(|e| refuse(FaultKind::BadInput, file, e))?;
    Ok((file.to_owned(), recording))
}

/// Puts recordings of one job beside each other, in the order of their ranks.
fn together(mut files: Files) -> Result<(Vec<Ranked>, Vec<PathBuf>), Error> {
    files.sort_by_key(|(_, recording)| (recording.rank, recording.written.realtime_ns));
    for pair in files.windows(2) {
        let [(first, a), (second, b)] = pair else {
            continue;
        };
        let first = first.display();
        let why = if a.job != b.job {
            let (job, other) = (b.job, a.job);
            format!(
                "it is of job {job:016x}, and {first} of job {other:016x}; give the files of one job"
            )
        } else if a.world_size != b.world_size {
            let (ranks, others) = (b.world_size, a.world_size);
            format!("it says that the job has {ranks} ranks, and {first} says {others}")
        } else if (a.rank, a.pid, &a.host) == (b.rank, b.pid, &b.host) {
            format!("it is of the same process as {first}; give one of them")
        } else {
            continue;
        };
        return Err(refuse(FaultKind::BadInput, second, why));
    }
    let (files, left_out) = lives::of_the_newest_run(files);
    Ok((clocks::align(files), left_out))
}

#[cfg(test)]
mod tests;
