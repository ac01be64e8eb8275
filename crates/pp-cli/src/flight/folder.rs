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

/// A path as a shell takes it; what its last part has of a pattern stays one.
pub(super) fn for_a_shell(path: &Path) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=@%:,".contains(c);
    let folder = path.parent().unwrap_or(Path::new("")).to_string_lossy();
    if folder.chars().all(is_plain) {
        return path.display().to_string();
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    format!("'{}'/{name}", folder.replace('\'', "'\\''"))
}

/// Why nothing can be written there, if so.
pub(super) fn refusal(folder: &Path) -> Option<String> {
    // Ranks make it where it is not there: whether they can shows at what is.
    let there = folder.ancestors().find(|part| part.exists())?;
    let wanted = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    let refused = rustix::fs::access(there, wanted).map_err(io::Error::from);
    let refused = refused.and_then(|()| match there == folder {
        true => try_out(folder),
        false if there.is_dir() => Ok(()),
        false => Err(io::ErrorKind::NotADirectory.into()),
    });
    let why = refused.err()?;
    Some(format!("{}: {why}", folder.display()))
}

/// Writes as much as a recording may need, and removes it.
fn try_out(folder: &Path) -> io::Result<()> {
    let file = folder.join(format!(".try-{}", std::process::id()));
    write(&file, &[0; 64 << 10])?;
    std::fs::remove_file(&file)
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
    fn a_folder_with_blanks_is_quoted_and_the_pattern_is_not() {
        let shown = |path: &str| for_a_shell(Path::new(path));
        assert_eq!(shown("/tmp/a-1/x-rank*.flight"), "/tmp/a-1/x-rank*.flight");
        assert_eq!(shown("/tmp/my job/x*.f"), "'/tmp/my job'/x*.f");
        assert_eq!(shown("/tmp/it's/x*.f"), "'/tmp/it'\\''s'/x*.f");
    }

    #[test]
    fn a_folder_that_takes_nothing_says_why() {
        let never = std::env::temp_dir().join(format!("pp-never-{}", std::process::id()));
        assert_eq!(refusal(&never), None);
        assert!(!never.exists());
        let why = refusal(Path::new("/dev/null/recordings")).unwrap();
        assert!(why.starts_with("/dev/null/recordings: "), "{why}");
    }

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
