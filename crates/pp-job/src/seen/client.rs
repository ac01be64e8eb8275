//! The other end of a job's socket.

use std::io::{self, BufRead as _, BufReader, ErrorKind, Read as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Snapshot, folders, parse};
use crate::config::Config;
use crate::own_folder;

/// The longest line that is read: a snapshot of the largest pipeline is shorter.
const LINE_BYTES: u64 = 1 << 20;
/// A job that sends nothing for so long is stopped.
const SILENCE: Duration = Duration::from_secs(10);

/// A job of this user on this machine that can be looked at.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FoundJob {
    /// The process of its rank 0.
    pub pid: u32,
    /// Its number in the program.
    pub number: u32,
    path: PathBuf,
}

/// Lists the jobs of this user whose rank 0 runs on this machine, by process and number. Removes what is left of jobs that
/// were killed.
#[must_use]
pub fn jobs(config: &Config) -> Vec<FoundJob> {
    let folders = folders(config.runtime_folder.as_deref()).into_iter();
    let own = folders.filter(|folder| own_folder::check(folder).is_ok());
    let mut jobs: Vec<FoundJob> = own.flat_map(|folder| in_folder(&folder)).collect();
    jobs.sort();
    jobs.dedup();
    jobs
}

fn in_folder(folder: &Path) -> Vec<FoundJob> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let jobs = entries.filter_map(|entry| {
        let (pid, number) = parse(entry.file_name().to_str()?)?;
        let path = entry.path();
        // A process that this one does not see may run in another container.
        if !Path::new(&format!("/proc/{pid}")).exists()
            && UnixStream::connect(&path).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused)
        {
            // Another program may have removed it.
            let _ = std::fs::remove_file(path);
            return None;
        }
        Some(FoundJob { pid, number, path })
    });
    jobs.collect()
}

/// Looks at a job over its socket.
#[derive(Debug)]
pub struct Client(BufReader<UnixStream>);

impl Client {
    /// Connects. The job is watched as long as the value lives; a drop closes the connection.
    ///
    /// # Errors
    /// The job has ended.
    pub fn connect(job: &FoundJob) -> io::Result<Self> {
        let stream = UnixStream::connect(&job.path)?;
        stream.set_read_timeout(Some(SILENCE))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// The next snapshot: the first comes at once, the others once a second, and the last says how the job ended. `None`
    /// where nothing follows: the job has ended, or four other programs look at it.
    ///
    /// # Errors
    /// Nothing came for ten seconds ([`ErrorKind::WouldBlock`]), or what came is no snapshot of this version.
    pub fn next_snapshot(&mut self) -> io::Result<Option<Snapshot>> {
        let mut line = Vec::new();
        let mut bounded = self.0.by_ref().take(LINE_BYTES);
        bounded.read_until(b'\n', &mut line)?;
        match line.last() {
            None => Ok(None),
            Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
            // Cut off by a kill, or too long.
            Some(_) if (line.len() as u64) < LINE_BYTES => Ok(None),
            Some(_) => Err(io::Error::other("a line that is too long")),
        }
    }
}
