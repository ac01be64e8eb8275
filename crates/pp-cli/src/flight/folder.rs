//! Where recordings lie.
//!
//! The default folder is below one that everybody can write: it is used only if it is this user's
//! own and closed to others, so that nobody can put a link there to have a file written elsewhere.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use pp_contract::Rank;

/// What all recordings end with.
const SUFFIX: &str = ".flight";

/// The folder for the recordings of this process.
pub(super) fn path() -> PathBuf {
    given().unwrap_or_else(default)
}

fn given() -> Option<PathBuf> {
    let folder = std::env::var_os("PP_FLIGHT_DIR").filter(|folder| !folder.is_empty())?;
    Some(folder.into())
}

fn default() -> PathBuf {
    let user = rustix::process::getuid().as_raw();
    std::env::temp_dir().join(format!("pp-flight-{user}"))
}

/// The name of a recording.
pub(super) fn name(job: u64, rank: Rank, pid: u32) -> String {
    format!("{}{rank}-{pid}{SUFFIX}", of_ranks(job))
}

fn of_ranks(job: u64) -> String {
    format!("{job:016x}-rank")
}

/// A pattern for the recordings of a job, if there is one.
pub(super) fn of_job(folder: &Path, job: u64) -> Option<PathBuf> {
    let ranks = of_ranks(job);
    let is_one = |name: &str| name.starts_with(&ranks) && name.ends_with(SUFFIX);
    let mut entries = std::fs::read_dir(folder).ok()?.flatten();
    entries
        .any(|entry| entry.file_name().to_str().is_some_and(is_one))
        .then(|| folder.join(format!("{ranks}*{SUFFIX}")))
}

/// Writes a file that is there whole or not at all.
pub(super) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    make(folder)?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(path.file_name().unwrap_or_default());
    let hidden = folder.join(hidden);
    // What is left of a process with this number that was killed while it wrote.
    let _ = std::fs::remove_file(&hidden);
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&hidden)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| std::fs::rename(&hidden, path));
    written.inspect_err(|_| {
        let _ = std::fs::remove_file(&hidden);
    })
}

fn make(folder: &Path) -> io::Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made?;
    if given().is_some() {
        return Ok(());
    }
    let about = std::fs::symlink_metadata(folder)?;
    let is_own = about.uid() == rustix::process::getuid().as_raw();
    if about.is_dir() && is_own && about.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::other(
        "the folder is not this user's alone; name another one in PP_FLIGHT_DIR",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_replaces_the_one_before_and_leaves_nothing_beside_it() {
        let folder = std::env::temp_dir().join(format!("pp-folder-test-{}", std::process::id()));
        let path = folder.join(name(7, Rank::new(1), 42));
        assert_eq!(of_job(&folder, 7), None);
        write(&path, b"first").unwrap();
        // As if a process had been killed in the middle of it.
        std::fs::write(folder.join(".0000000000000007-rank1-42.flight"), b"half").unwrap();
        write(&path, b"second").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        let names: Vec<_> = std::fs::read_dir(&folder).unwrap().flatten().collect();
        assert_eq!(names.len(), 1, "{names:?}");
        let pattern = folder.join("0000000000000007-rank*.flight");
        assert_eq!(of_job(&folder, 7), Some(pattern));
        assert_eq!(of_job(&folder, 8), None);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
