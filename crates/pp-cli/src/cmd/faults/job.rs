//! One job of two real ranks, each a process of this same program, as a launcher starts them.
//!
//! Hazard: a test of dying ranks leaves ranks behind. Guarantee: each rank has a process group of
//! its own, which is killed at the deadline and again at the end; and the kernel kills the ranks
//! when this process dies.

use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use pp_contract::{Rank, WorldSize};
use pp_transport::launch::LocalJob;
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

use crate::fault::VARIABLE;
use crate::job::{WORLD, supervise};

/// A job that has not ended by then never will.
const DEADLINE: Duration = Duration::from_secs(60);
/// Time between two looks at the ranks.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Variables of this program that would change what a rank does.
const OWN: [&str; 6] = [
    VARIABLE,
    "PP_LOG",
    "PP_HEARTBEAT_MS",
    "PP_STUCK_MS",
    "PP_REPORT_FD",
    "PP_FLIGHT_OPS",
];

/// What one rank is started with.
#[derive(Clone, Debug, Default)]
pub(super) struct Start {
    pub(super) args: Vec<String>,
    pub(super) env: Vec<(String, String)>,
}

/// How one rank ended, and what it said.
#[derive(Debug, Default)]
pub(super) struct Ended {
    pub(super) status: Option<ExitStatus>,
    /// Each line of its standard error.
    pub(super) lines: Vec<String>,
    /// Killed here, at the deadline.
    pub(super) by_us: bool,
}

impl Ended {
    /// The exit code, or the signal.
    pub(super) fn how(&self) -> String {
        let Some(status) = self.status else {
            return "unknown".into();
        };
        match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit {code}"),
            (None, Some(signal)) => format!("signal {signal}"),
            (None, None) => "unknown".into(),
        }
    }
}

/// How a job ended.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) ranks: [Ended; WORLD as usize],
    /// From the fault, or the start where there is none, until both ranks were gone.
    pub(super) took: Duration,
    /// A process of one of the ranks' groups outlived it.
    pub(super) left_behind: bool,
}

/// A line that a rank wrote, and when it came.
type Line = (usize, Instant, String);

/// A rank that runs, with whatever it starts; all of it is killed when this is dropped.
struct Running {
    child: Child,
    group: Pid,
    reader: Option<JoinHandle<()>>,
    status: Option<ExitStatus>,
    by_us: bool,
}

impl Running {
    fn start(
        rank: u32,
        job: &LocalJob,
        start: &Start,
        lines: Sender<Line>,
    ) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("this program has no path")?;
        let mut command = Command::new(program);
        for name in LocalJob::LAUNCHER_VARIABLES.iter().chain(&OWN) {
            command.env_remove(name);
        }
        let mut child = command
            .args(&start.args)
            .envs(job.env(Rank::new(rank)))
            .env(supervise::SUPERVISOR, std::process::id().to_string())
            .envs(start.env.iter().map(|(name, value)| (name, value)))
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start rank {rank}"))?;
        let pipe = child.stderr.take().expect("just piped");
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                let _ = lines.send((rank as usize, Instant::now(), line));
            }
        });
        Ok(Self {
            group: Pid::from_child(&child),
            child,
            reader: Some(reader),
            status: None,
            by_us: false,
        })
    }

    /// Whether it has ended.
    fn has_ended(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status.is_some()
    }

    fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.group, signal);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        if self.status.is_none() {
            let _ = self.child.wait();
        }
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// Runs both ranks to their end. A rank that is stopped goes on once the other has ended.
pub(super) fn run(starts: &[Start; WORLD as usize], folder: &Path) -> anyhow::Result<Outcome> {
    let job = LocalJob::new(WorldSize::new(WORLD).context("a world of two ranks")?);
    let (lines, heard) = mpsc::channel();
    let began = Instant::now();
    let mut ranks = Vec::new();
    for (rank, start) in starts.iter().enumerate() {
        let mut start = start.clone();
        own_folders(&mut start, folder)?;
        ranks.push(Running::start(rank as u32, &job, &start, lines.clone())?);
    }
    drop(lines);
    let gone = wait(&mut ranks, began);
    let left_behind = ranks
        .iter()
        .any(|rank| test_kill_process_group(rank.group).is_ok());
    let ends: Vec<_> = ranks.iter().map(|rank| (rank.status, rank.by_us)).collect();
    drop(ranks);
    let (said, fault_at) = collect(&heard);
    let [first, second] = said;
    let [front, phase_b] = ends[..] else {
        anyhow::bail!("as many ends as ranks");
    };
    let ended = |(status, by_us), lines| Ended {
        status,
        lines,
        by_us,
    };
    Ok(Outcome {
        ranks: [ended(front, first), ended(phase_b, second)],
        took: gone.saturating_duration_since(fault_at.unwrap_or(began)),
        left_behind,
    })
}

/// Folders of a job that are no part of its result.
pub(super) const ASIDE: [&str; 2] = ["flight", "meet"];

/// What the ranks did last is written within the folder, and fakes of a driver meet there.
fn own_folders(start: &mut Start, folder: &Path) -> anyhow::Result<()> {
    for (name, variable) in ASIDE.iter().zip(["PP_FLIGHT_DIR", "PP_FAKE_NCCL_DIR"]) {
        let own = folder.join(name);
        std::fs::create_dir_all(&own).context("no folder within the folder of a job")?;
        let own = own.to_string_lossy().into_owned();
        start.env.push((variable.into(), own));
    }
    Ok(())
}

/// Waits until both ranks are gone; when that was.
fn wait(ranks: &mut [Running], began: Instant) -> Instant {
    let deadline = began + DEADLINE;
    loop {
        let ended: Vec<bool> = ranks.iter_mut().map(Running::has_ended).collect();
        let now = Instant::now();
        if ended.iter().all(|ended| *ended) {
            return now;
        }
        if ended.contains(&true) {
            for (rank, ended) in ranks.iter().zip(&ended) {
                if !ended {
                    rank.signal(Signal::CONT);
                }
            }
        }
        if now > deadline {
            for (rank, ended) in ranks.iter_mut().zip(&ended) {
                rank.by_us = !ended;
                rank.signal(Signal::KILL);
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The lines of each rank, and when the fault was made, if a hook made it.
fn collect(heard: &Receiver<Line>) -> ([Vec<String>; WORLD as usize], Option<Instant>) {
    let mut said = [Vec::new(), Vec::new()];
    let mut fault_at = None;
    for (rank, at, line) in heard.iter() {
        if crate::fault::is_strike(&line) && fault_at.is_none() {
            fault_at = Some(at);
        }
        said[rank].push(line);
    }
    (said, fault_at)
}
