//! The ranks of a cell: how they are started, brought into a state, and seen to end.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pp_contract::{Pipeline, Rank};
use pp_testing::net::Net;
use pp_testing::process::{Output, Process, children, is_alive, rank_of, signal, threads};
use pp_transport::launch::LocalJob;
use rustix::process::Signal;

use super::launch::{AT_GATE, GATE, over_tcp, prepare};
use super::scene::{Picture, Scene, Sign};
use crate::trial::{Ground, join, left_of, new_job, program_of, run_in};

/// Time for a state to be reached: programs are loaded, GPUs found and connected.
pub(super) const REACHED_WITHIN: Duration = Duration::from_secs(60);
/// A rank that has not ended after this does not end.
pub(super) const ENDS_WITHIN: Duration = Duration::from_secs(45);
/// From a sign to the moment after it: the last record is written before the thing is done.
pub(super) const SETTLES: Duration = Duration::from_millis(30);
/// For the last words of ranks that did not come into their state.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The processes of a cell. They are killed when this is dropped.
pub(super) struct Ranks {
    /// The secret is there as long as this is.
    job: LocalJob,
    /// In order of rank, or the supervisor alone.
    processes: Vec<Process>,
    /// Of the ranks, in order.
    pids: Vec<u32>,
    is_supervised: bool,
    sink: usize,
    folder: PathBuf,
    picture: Picture,
}

impl Ranks {
    /// Starts the ranks of the pipeline, or a supervisor that does; with a network between them, where there is one.
    pub(super) fn start(
        scene: &Scene,
        (pipeline, is_supervised): (&Pipeline, bool),
        net: Option<&Net>,
        ground: Ground,
        folder: &Path,
    ) -> Result<Self, String> {
        let job = new_job(pipeline);
        let broken = |what: &str, error: std::io::Error| format!("cannot {what}: {error}");
        let mut processes = Vec::new();
        let count = pipeline.world_size().get() as usize;
        for rank in 0..if is_supervised { 1 } else { count } {
            let program = program_of(Rank::new(rank as u32), net, ground, pipeline);
            let mut command = program.map_err(|e| broken("find this program", e))?;
            run_in(folder, ground, pipeline, &mut command)
                .map_err(|e| broken("make a folder", e))?;
            prepare(&mut command, scene, ground, folder);
            // A supervisor starts the ranks itself, as from a terminal.
            if !is_supervised {
                join(&job, Rank::new(rank as u32), &mut command);
            }
            if let Some(Some(faults)) = scene.fakes.get(rank) {
                command.env("PP_FAKE_FAULTS", faults);
            }
            if net.is_some() {
                over_tcp(&mut command, ground);
            }
            if scene.signs.contains(&Sign::AtGate) && rank == 0 {
                let made = std::fs::write(folder.join(GATE), []);
                made.map_err(|e| broken("make a gate", e))?;
            }
            let process = Process::start(&mut command, Output::Counted);
            processes.push(process.map_err(|e| broken("start a rank", e))?);
        }
        let pids = match is_supervised {
            true => started_by(&processes[0], count)?,
            false => processes.iter().map(Process::id).collect(),
        };
        Ok(Self {
            job,
            processes,
            pids,
            is_supervised,
            sink: pipeline.sink().get() as usize,
            folder: folder.to_owned(),
            picture: scene.picture,
        })
    }

    /// Who says what this rank says: itself, or the supervisor of all.
    pub(super) fn voice(&self, rank: usize) -> &Process {
        self.processes.get(rank).unwrap_or(&self.processes[0])
    }

    pub(super) fn count(&self) -> usize {
        self.pids.len()
    }

    pub(super) fn signal(&self, rank: usize, number: Signal) {
        match self.processes.get(rank) {
            Some(process) if !self.is_supervised => process.signal(number),
            _ => drop(signal(self.pids[rank], number)),
        }
    }

    /// What all have said, after their last words.
    pub(super) fn logs(&self) -> String {
        let soon = Instant::now() + LAST_WORDS;
        for process in &self.processes {
            process.ends(soon);
        }
        let logs = self.processes.iter().map(Process::log);
        logs.fold(String::new(), |all, log| all + "\n--- " + &log)
    }

    /// Gives the source's input so many chunks, and half of the next; and ends it.
    pub(super) fn give(&self, chunks: usize, and_half: bool, with_header: bool, and_ends: bool) {
        let picture = self.picture;
        self.processes[0].give(and_ends, move |input| {
            let frame = picture.frame();
            if with_header {
                input.write_all(&picture.header())?;
            }
            for _ in 0..chunks * picture.frames_per_chunk {
                input.write_all(&frame)?;
            }
            if and_half {
                input.write_all(&frame[..frame.len() / 2])?;
            }
            input.flush()
        });
    }

    pub(super) fn await_sign(&self, sign: &Sign, deadline: Instant) -> Result<(), String> {
        match sign {
            Sign::Says(rank, words) => {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                let found = self.voice(*rank).says(&words, deadline);
                let missing = || format!("rank {rank} never said {words:?}");
                found.map(drop).ok_or_else(missing)
            }
            Sign::Frames(count) => {
                let frame = self.picture.frame().len() as u64;
                let wanted = self.picture.header().len() as u64 + count * frame - 1;
                self.poll(deadline, "no frames came out", || {
                    self.voice(self.sink).output_bytes() >= wanted
                })
            }
            Sign::AtGate => {
                let reached = self.folder.join(AT_GATE);
                self.poll(deadline, "no call came to the gate", || reached.exists())
            }
            Sign::Thread(rank, name) => {
                let pid = self.pids[*rank];
                self.poll(deadline, "no thread connects", || {
                    threads(pid).iter().any(|thread| thread == name)
                })
            }
        }
    }

    fn poll(&self, deadline: Instant, what: &str, is_so: impl Fn() -> bool) -> Result<(), String> {
        while !is_so() {
            let has_ended = self.processes.iter().any(|p| p.ended().is_some());
            if has_ended || Instant::now() > deadline {
                return Err(what.to_owned());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    pub(super) fn until_all_gone(&self, deadline: Instant) -> Option<Instant> {
        while self.pids.iter().any(|pid| is_alive(*pid)) {
            if Instant::now() > deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Some(Instant::now())
    }

    /// Each process says why it ends in one line.
    pub(super) fn say_twice(&self) -> impl Iterator<Item = String> {
        let twice = |process: &&Process| process.log().matches("pp: error: ").count() > 1;
        let processes = self.processes.iter().filter(twice);
        processes.map(|process| format!("process {} says twice why it ends", process.id()))
    }

    /// The processes of the job that are left.
    pub(super) fn left(&self) -> Vec<String> {
        let alive = left_of(&self.job).into_iter();
        alive.map(|pid| format!("process {pid}")).collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        if self.is_supervised {
            // A rank that was stopped goes with its supervisor; this is for one that did not.
            for pid in self.pids.iter().filter(|pid| is_alive(**pid)) {
                signal(*pid, Signal::KILL);
            }
        }
        self.processes.clear();
    }
}

/// The ranks that a supervisor has started, once all are there.
fn started_by(supervisor: &Process, count: usize) -> Result<Vec<u32>, String> {
    let deadline = Instant::now() + REACHED_WITHIN;
    while Instant::now() < deadline && supervisor.ended().is_none() {
        let found = children(supervisor.id()).into_iter();
        let mut ranks: Vec<_> = found.filter_map(|pid| Some((rank_of(pid)?, pid))).collect();
        ranks.sort_unstable();
        if ranks.len() == count {
            return Ok(ranks.into_iter().map(|(_, pid)| pid).collect());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let log = supervisor.log();
    Err(format!("the supervisor started no ranks: {log}"))
}
