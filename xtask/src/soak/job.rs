//! One job: fed, read, watched, and ended when it hangs.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::film::Film;
use super::ranks::{self, Rank};

/// A job that says nothing for so long hangs.
const HANG: Duration = Duration::from_secs(60);
/// Time for the last process to go once the first line of the job's end was seen.
const GONE_WITHIN: Duration = Duration::from_secs(5);

/// How a job ended.
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    /// What it wrote.
    pub(super) film: Vec<u8>,
    /// What it said.
    pub(super) said: String,
}

/// A job under way.
pub(super) struct Job {
    child: Child,
    written: Arc<AtomicU64>,
    film: JoinHandle<Vec<u8>>,
    said: JoinHandle<String>,
    seen: Vec<Rank>,
    progress: (u64, Instant),
}

impl Job {
    /// Starts `pp run` from pipe to pipe.
    pub(super) fn start(
        pp: &Path,
        args: &[String],
        env: &[(&str, String)],
        film: Film,
    ) -> Result<Self> {
        let mut child = Command::new(pp)
            .args([
                "run",
                "--input",
                "-",
                "--output",
                "-",
                "--transport",
                "host",
            ])
            .args(args)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", pp.display()))?;
        let input = child.stdin.take().context("no pipe")?;
        let mut output = child.stdout.take().context("no pipe")?;
        let mut errors = child.stderr.take().context("no pipe")?;
        // A job that ends early leaves the rest unread.
        thread::spawn(move || film.write(input));
        let written = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&written);
        let film = thread::spawn(move || {
            let mut bytes = Vec::new();
            let mut piece = vec![0; 1 << 16];
            while let Ok(read @ 1..) = output.read(&mut piece) {
                bytes.extend_from_slice(&piece[..read]);
                count.store(bytes.len() as u64, Ordering::Relaxed);
            }
            bytes
        });
        let said = thread::spawn(move || {
            let mut said = Vec::new();
            let _ = errors.read_to_end(&mut said);
            String::from_utf8_lossy(&said).into_owned()
        });
        Ok(Self {
            child,
            written,
            film,
            said,
            seen: Vec::new(),
            progress: (0, Instant::now()),
        })
    }

    /// Bytes of its output so far.
    pub(super) fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// The supervisor's process.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The process of a rank that lives.
    pub(super) fn rank(&mut self, rank: u32) -> Option<u32> {
        let found = ranks::of(self.pid());
        for rank in &found {
            if !self.seen.contains(rank) {
                self.seen.push(*rank);
            }
        }
        found.iter().find(|r| r.rank == rank).map(|r| r.pid)
    }

    /// Whether it goes on; an error when it hangs.
    pub(super) fn goes_on(&mut self) -> Result<bool> {
        if self.child.try_wait()?.is_some() {
            return Ok(false);
        }
        let written = self.written();
        if written != self.progress.0 {
            self.progress = (written, Instant::now());
        }
        if self.progress.1.elapsed() > HANG {
            self.kill();
            bail!("the job hangs: {written} bytes written, and none for {HANG:?}");
        }
        Ok(true)
    }

    /// Waits for the end, and that nothing of it is left.
    pub(super) fn end(mut self) -> Result<Ended> {
        self.rank(0);
        while self.goes_on()? {
            thread::sleep(Duration::from_millis(5));
        }
        let status = self.child.wait()?;
        let deadline = Instant::now() + GONE_WITHIN;
        while let Some(left) = self.seen.iter().find(|rank| ranks::lives(rank.pid)) {
            ensure!(
                Instant::now() < deadline,
                "rank {} (process {}) outlives its job",
                left.rank,
                left.pid
            );
            thread::sleep(Duration::from_millis(5));
        }
        let join = "a thread of ours panicked";
        Ok(Ended {
            status,
            film: self.film.join().ok().context(join)?,
            said: self.said.join().ok().context(join)?,
        })
    }

    fn kill(&mut self) {
        self.rank(0);
        for rank in &self.seen {
            ranks::signal(rank.pid, "KILL");
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
