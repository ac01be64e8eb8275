//! One job: fed, read, watched, and given up when it hangs.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pp_contract::Rank;
use pp_testing::process::{Ended, Output, Process, children, is_alive, rank_of};
use rustix::process::Signal;

use super::film::Film;
use crate::hook::VARIABLE;

/// A job that writes nothing for so long hangs.
const HANG: Duration = Duration::from_secs(60);
/// Time for the last rank to go once the supervisor has ended.
const GONE_WITHIN: Duration = Duration::from_secs(5);
/// What it is started with, beside its settings: heartbeats that a machine full of jobs can keep; no minute's wait for a
/// rank that was stopped before it had come; and one heap, since how many there are hangs on which threads meet.
const ENVIRONMENT: [(&str, &str); 3] = [
    ("PP_HEARTBEAT_MS", "1000"),
    ("PP_RESTART_WITHIN_MS", "3000"),
    ("MALLOC_ARENA_MAX", "1"),
];

/// A job under way.
pub(super) struct Job {
    process: Process,
    seen: Vec<u32>,
    progress: (u64, Instant),
}

impl Job {
    /// Starts `run` of this program from pipe to pipe.
    pub(super) fn start(args: &[String], film: Film) -> Result<Self> {
        let program = std::env::current_exe().context("this program has no path")?;
        let mut command = Command::new(program);
        command.args(["run", "--input", "-", "--output", "-"]);
        command.args(["--transport", "host"]).args(args);
        command.envs(ENVIRONMENT).env_remove(VARIABLE);
        let process = Process::start(&mut command, Output::Kept).context("cannot start a job")?;
        process.give(true, move |input| film.write(input));
        Ok(Self {
            process,
            seen: Vec::new(),
            progress: (0, Instant::now()),
        })
    }

    /// Bytes of its output so far.
    pub(super) fn written(&self) -> u64 {
        self.process.output_bytes()
    }

    /// Sends the supervisor a signal.
    pub(super) fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// The process of a rank that lives.
    pub(super) fn rank(&mut self, rank: Rank) -> Option<u32> {
        let mut found = None;
        for pid in children(self.process.id()) {
            if !self.seen.contains(&pid) {
                self.seen.push(pid);
            }
            if rank_of(pid) == Some(rank.get()) && is_alive(pid) {
                found = Some(pid);
            }
        }
        found
    }

    /// Says whether it goes on; an error when it hangs.
    pub(super) fn goes_on(&mut self) -> Result<bool> {
        if self.process.ended().is_some() {
            return Ok(false);
        }
        let written = self.written();
        if written != self.progress.0 {
            self.progress = (written, Instant::now());
        }
        if self.progress.1.elapsed() > HANG {
            bail!("the job hangs: {written} bytes written, and none for {HANG:?}");
        }
        Ok(true)
    }

    /// Waits for the end, and that nothing of it is left.
    pub(super) fn end(mut self) -> Result<Ended> {
        self.rank(Rank::new(0));
        while self.goes_on()? {
            thread::sleep(Duration::from_millis(5));
        }
        let deadline = Instant::now() + GONE_WITHIN;
        while let Some(left) = self.seen.iter().find(|pid| is_alive(**pid)) {
            ensure!(Instant::now() < deadline, "process {left} outlives its job");
            thread::sleep(Duration::from_millis(5));
        }
        Ok(Ended::of(&self.process))
    }
}
