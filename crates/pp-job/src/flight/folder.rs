//! Where recordings lie.
//!
//! The default folder is below one that everybody can write: it is used only if it is this user's
//! own and closed to others, so that no other user can put a link there to have a file written
//! elsewhere. It keeps the recordings of the last jobs; a folder that the user named keeps all of
//! them.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use pp_contract::Rank;

use crate::own_folder;

/// What all recordings end with.
const SUFFIX: &str = ".flight";
/// What stands between the job and the rank in the name of a recording.
const RANK: &str = "-rank";
/// Jobs whose recordings the default folder keeps.
const KEPT: usize = 20;

/// The folder for the recordings of a job.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// The user named none.
    is_default: bool,
}

impl Folder {
    /// The folder that the user named, or the default one.
    pub(super) fn new(named: Option<&Path>) -> Self {
        Self {
            path: named.map_or_else(|| own_folder::in_temp("pp-flight"), Path::to_path_buf),
            is_default: named.is_none(),
        }
    }

    /// Writes a recording; from the default folder, those of the oldest jobs go.
    pub(super) fn keep(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        make(&self.path, self.is_default)?;
        write(path, bytes)?;
        if self.is_default {
            remove_old(&self.path, KEPT, |pid| {
                Path::new(&format!("/proc/{pid}")).exists()
            });
        }
        Ok(())
    }

    /// A pattern for the recordings of a job, if there is one.
    pub(super) fn of_job(&self, job: u64) -> Option<PathBuf> {
        of_job(&self.path, job)
    }
}

/// The name of a recording.
pub(super) fn name(job: u64, rank: Rank, pid: u32) -> String {
    format!("{}{rank}-{pid}{SUFFIX}", of_ranks(job))
}

fn of_ranks(job: u64) -> String {
    format!("{job:016x}{RANK}")
}

/// The job and the process of the recording with this name; `None` where another file has it.
fn parse(name: &str) -> Option<(u64, u32)> {
    let (job, rest) = name.strip_suffix(SUFFIX)?.split_once(RANK)?;
    let (rank, pid) = rest.split_once('-')?;
    let job = u64::from_str_radix(job, 16).ok()?;
    let (rank, pid) = (Rank::new(rank.parse().ok()?), pid.parse().ok()?);
    (self::name(job, rank, pid) == name).then_some((job, pid))
}

/// Removes the recordings of the oldest jobs but for so many, and but for jobs with a process that runs.
fn remove_old(folder: &Path, kept: usize, runs: impl Fn(u32) -> bool) {
    #[derive(Default)]
    struct RecordedJob {
        written: Option<SystemTime>,
        files: Vec<PathBuf>,
        runs: bool,
    }
    let mut jobs: HashMap<u64, RecordedJob> = HashMap::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if let Some((job, pid)) = entry.file_name().to_str().and_then(parse)
            && let Ok(about) = entry.metadata()
            && about.is_file()
        {
            let job = jobs.entry(job).or_default();
            job.written = job.written.max(about.modified().ok());
            job.files.push(entry.path());
            job.runs |= runs(pid);
        }
    }
    let mut jobs: Vec<RecordedJob> = jobs.into_values().collect();
    jobs.sort_by_key(|job| Reverse(job.written));
    for file in jobs
        .iter()
        .skip(kept)
        .filter(|job| !job.runs)
        .flat_map(|job| &job.files)
    {
        // Another rank may have removed it.
        let _ = std::fs::remove_file(file);
    }
}

fn of_job(folder: &Path, job: u64) -> Option<PathBuf> {
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

/// Writes a file that is there whole or not at all.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
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

fn make(folder: &Path, is_default: bool) -> io::Result<()> {
    if !is_default {
        let mut named = DirBuilder::new();
        return named.recursive(true).mode(0o700).create(folder);
    }
    own_folder::make(folder).map_err(|error| match error.kind() {
        io::ErrorKind::Other => {
            io::Error::other(format!("{error}; name another one in PP_FLIGHT_DIR"))
        }
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_folder_with_blanks_is_quoted_and_the_pattern_is_not() {
        let shown = |path: &str| for_a_shell(Path::new(path));
        assert_eq!(shown("/tmp/a-1/x-rank*.flight"), "/tmp/a-1/x-rank*.flight");
        assert_eq!(shown("/tmp/my job/x*.f"), "'/tmp/my job'/x*.f");
        assert_eq!(shown("/tmp/it's/x*.f"), "'/tmp/it'\\''s'/x*.f");
    }

    #[test]
    fn a_recording_replaces_the_one_before_and_leaves_nothing_beside_it() {
        let folder = std::env::temp_dir().join(format!("pp-folder-test-{}", std::process::id()));
        let path = folder.join(name(7, Rank::new(1), 42));
        assert_eq!(of_job(&folder, 7), None);
        make(&folder, true).unwrap();
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

    #[test]
    fn the_oldest_jobs_go_but_for_those_that_run_and_other_files() {
        let folder = std::env::temp_dir().join(format!("pp-folder-old-{}", std::process::id()));
        make(&folder, true).unwrap();
        let put = |name: String, age: u64| {
            let file = std::fs::File::create(folder.join(&name)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 - age))
                .unwrap();
            name
        };
        let recording = |job, rank, pid, age| put(name(job, Rank::new(rank), pid), age);
        // Job 1 is the oldest, but its other rank wrote last of all; a process of job 2 runs.
        let kept = [
            recording(1, 0, 10, 100),
            recording(1, 1, 11, 0),
            recording(2, 0, 12, 90),
            recording(2, 1, 13, 95),
            recording(3, 0, 14, 10),
            put("0000000000000004-rank0-x.flight".into(), 200),
            put("4-rank0-15.flight".into(), 200),
            put("0000000000000004-rank0-15.flight.txt".into(), 200),
            put("notes".into(), 200),
        ];
        recording(5, 0, 16, 20);
        recording(5, 1, 17, 80);
        recording(6, 0, 18, 30);
        remove_old(&folder, 2, |pid| pid == 13);
        let entries = std::fs::read_dir(&folder).unwrap();
        let left = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let left: BTreeSet<String> = left.collect();
        assert_eq!(left, kept.into_iter().collect());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
