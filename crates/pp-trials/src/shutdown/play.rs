//! One cell from its beginning to its end: start the ranks, bring them into the state, do it, and
//! take the times.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use pp_job::NOTICED;
use pp_runtime::clock::now_ns;
use pp_testing::process::{Output, Process, is_alive, signal, threads};
use pp_transport::launch::LocalJob;
use rustix::process::Signal;

use super::cell::{Cell, Event, Side, Wish};
use super::launch::{AT_GATE, FILM, GATE, over_tcp, prepare, ranks};
use super::net::Net;
use super::scene::{Picture, Scene, Sign};
use crate::trial::{Ended, Ground, join, left_of, new_job, run_in};

/// Time for a state to be reached: programs are loaded, GPUs found and connected.
const REACHED_WITHIN: Duration = Duration::from_secs(60);
/// A rank that has not ended after this does not end.
const ENDS_WITHIN: Duration = Duration::from_secs(45);
/// For the last words of ranks that did not come into their state.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Between two interrupts of an abort.
const APART: Duration = Duration::from_millis(15);
/// From a sign to the moment after it: the last record is written before the thing is done.
const SETTLES: Duration = Duration::from_millis(30);

/// What was seen of a cell.
#[derive(Clone, Debug, Default)]
pub(super) struct Played {
    /// How we and the peer ended; the supervisor alone where there is one.
    pub(super) ended: Vec<Ended>,
    pub(super) times: Seen,
    /// What was left of the job.
    pub(super) left: Vec<String>,
}

/// The times of a cell.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// From the event to the moment at which we knew of a fault.
    pub(super) noticed: Option<Duration>,
    /// From the event to our end.
    pub(super) gone: Option<Duration>,
    /// From the event to the end of the last rank that can end.
    pub(super) all_gone: Option<Duration>,
    /// From the moment at which a peer that was stopped goes on to its end.
    pub(super) resumed: Option<Duration>,
}

/// Why there is nothing to tell of a cell.
#[derive(Clone, Debug)]
pub(super) enum Unplayed {
    /// It cannot be here.
    NotHere(String),
    /// It should have been, and the state was not reached.
    NotReached(String),
}

/// Plays one cell.
pub(super) fn play(
    cell: Cell,
    ground: Ground,
    folder: &Path,
    no_networks: &OnceLock<String>,
) -> Result<Played, Unplayed> {
    let may_fail = cell.event == Event::Cut && ground == Ground::Gpus;
    if let Some(why) = no_networks.get().filter(|_| may_fail) {
        return Err(Unplayed::NotHere(why.clone()));
    }
    let scene = Scene::of(cell, ground);
    let mut stage = Stage::set(cell, &scene, ground, folder)?;
    let played = stage.reach(&scene).map(|()| stage.act(&scene));
    played.map_err(|why| {
        // A rank that is about to end says why.
        let soon = Instant::now() + LAST_WORDS;
        for process in &stage.processes {
            process.ends(soon);
        }
        if may_fail {
            // NCCL's own ways between two networks of one machine are not for us to mend.
            let said = Ended::of(stage.us());
            let why = format!("NCCL did not connect two networks of this machine: {why}; {said}");
            return Unplayed::NotHere(no_networks.get_or_init(|| why).clone());
        }
        Unplayed::NotReached(why + &stage.logs())
    })
}

/// The processes of a cell.
struct Stage {
    cell: Cell,
    /// The secret is there as long as this is.
    job: LocalJob,
    /// In order of rank, or the supervisor alone.
    processes: Vec<Process>,
    /// Of the ranks, in order.
    pids: [u32; 2],
    net: Option<Net>,
    folder: PathBuf,
    picture: Picture,
    /// The peer was stopped to come into the state.
    held_since: Option<Instant>,
}

impl Stage {
    fn set(cell: Cell, scene: &Scene, ground: Ground, folder: &Path) -> Result<Self, Unplayed> {
        let net = match cell.event {
            Event::Cut => Some(Net::new().map_err(Unplayed::NotHere)?),
            _ => None,
        };
        let job = new_job();
        let broken = |what: &str, error: std::io::Error| {
            Unplayed::NotReached(format!("cannot {what}: {error}"))
        };
        let program = std::env::current_exe().map_err(|e| broken("find this program", e))?;
        let mut processes = Vec::new();
        for rank in if cell.supervised { 0..1 } else { 0..2 } {
            let mut command = match &net {
                Some(net) => net.command(rank, program.as_os_str()),
                None => Command::new(&program),
            };
            run_in(folder, ground, &mut command).map_err(|e| broken("make a folder", e))?;
            prepare(&mut command, scene, ground, folder);
            // A supervisor starts the ranks itself, as from a terminal.
            if !cell.supervised {
                join(&job, rank as u32, &mut command);
            }
            if let Some(faults) = scene.fakes[rank] {
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
        let pids = match &processes[..] {
            [front, back] => [front.id(), back.id()],
            _ => ranks(&processes[0], REACHED_WITHIN).map_err(Unplayed::NotReached)?,
        };
        Ok(Self {
            cell,
            job,
            processes,
            pids,
            net,
            folder: folder.to_owned(),
            picture: scene.picture,
            held_since: None,
        })
    }

    /// Us: the rank, or the supervisor of both.
    fn us(&self) -> &Process {
        let ours = self.cell.side.rank();
        self.processes.get(ours).unwrap_or(&self.processes[0])
    }

    /// Who says what this rank says.
    fn voice(&self, side: Side) -> &Process {
        let found = self.processes.get(side.rank());
        found.unwrap_or(&self.processes[0])
    }

    fn signal(&self, side: Side, number: Signal) {
        match self.processes.get(side.rank()) {
            Some(process) if !self.cell.supervised => process.signal(number),
            _ => drop(signal(self.pids[side.rank()], number)),
        }
    }

    fn logs(&self) -> String {
        let logs = self.processes.iter().map(Process::log);
        logs.fold(String::new(), |all, log| all + "\n--- " + &log)
    }

    /// Brings the ranks into the state.
    fn reach(&mut self, scene: &Scene) -> Result<(), String> {
        let deadline = Instant::now() + REACHED_WITHIN;
        if scene.chunks > 0 {
            self.give(scene.chunks, scene.and_half, true);
        }
        for (count, sign) in scene.signs.iter().enumerate() {
            self.await_sign(sign, deadline)?;
            if count == 0 && scene.later > 0 {
                self.give(scene.later, false, false);
            }
            if count == 0 && scene.holds_peer {
                self.held_since = Some(Instant::now());
                self.signal(self.cell.side.peer(), Signal::STOP);
            }
        }
        if self.cell.event == Event::Left && scene.fault.as_deref().is_some_and(is_leave) {
            return Ok(());
        }
        std::thread::sleep(SETTLES);
        Ok(())
    }

    /// Gives the front's input so many chunks.
    fn give(&self, chunks: usize, and_half: bool, with_header: bool) {
        let picture = self.picture;
        self.processes[0].give(self.cell.restarts(), move |input| {
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

    fn await_sign(&self, sign: &Sign, deadline: Instant) -> Result<(), String> {
        match sign {
            Sign::Says(side, words) => {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                let found = self.voice(*side).says(&words, deadline);
                let missing = || format!("rank {} never said {words:?}", side.rank());
                found.map(drop).ok_or_else(missing)
            }
            Sign::Frames(count) => {
                let frame = self.picture.frame().len() as u64;
                let wanted = self.picture.header().len() as u64 + count * frame - 1;
                self.poll(deadline, "no frames came out", || {
                    self.processes[0].output_bytes() >= wanted
                })
            }
            Sign::AtGate => {
                let reached = self.folder.join(AT_GATE);
                self.poll(deadline, "no call came to the gate", || reached.exists())
            }
            Sign::Thread(side, name) => {
                let pid = self.pids[side.rank()];
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

    /// The event, the wish, and what comes of them.
    fn act(&mut self, scene: &Scene) -> Played {
        let mut played = Played::default();
        let began = self.happen(scene).unwrap_or_else(|(began, error)| {
            played.left.push(error);
            began
        });
        match self.cell.wish {
            Wish::GoOn => {}
            Wish::Drain => self.drain(),
            Wish::Abort => {
                // Two that come before the process has run again are one: as a person would, again.
                while Instant::now() < began + ENDS_WITHIN {
                    self.us().signal(Signal::INT);
                    if self.us().ends_by(Instant::now() + APART) {
                        break;
                    }
                }
            }
        }
        let deadline = began + ENDS_WITHIN;
        let ours = self.us().ends(deadline);
        let since = |at: Instant| at.saturating_duration_since(began);
        played.times.gone = ours.map(|(at, _)| since(at));
        played.times.noticed = self.noticed(began);
        played.ended.push(Ended::of(self.us()));
        if scene.restarts {
            // How long it goes on is the work's affair.
            played.left.extend(self.wrong_film(scene));
        } else if self.cell.supervised {
            played.times.all_gone = self.until_all_gone(deadline).map(since);
        } else {
            self.end_of_peer(&mut played, began, deadline);
        }
        let alive = left_of(&self.job).into_iter();
        played
            .left
            .extend(alive.map(|pid| format!("process {pid}")));
        played
    }

    /// Lets the peer do its thing; since when it has.
    fn happen(&self, scene: &Scene) -> Result<Instant, (Instant, String)> {
        let peer = self.cell.side.peer();
        let began = Instant::now();
        match self.cell.event {
            Event::Computing => {}
            Event::Left if scene.fault.as_deref().is_some_and(is_leave) => {
                let deadline = began + REACHED_WITHIN;
                // It has left when its process has ended: what a driver does at exit takes time.
                let left = self.voice(peer).ends(deadline).map(|(at, _)| at);
                return left.ok_or((began, "the peer never left".into()));
            }
            Event::Left => self.signal(peer, Signal::INT),
            Event::Killed => {
                self.signal(peer, Signal::KILL);
                // For the Phase B that replaces it.
                let _ = std::fs::remove_file(self.folder.join(GATE));
            }
            Event::Stopped => {
                self.signal(peer, Signal::STOP);
                return Ok(self.held_since.unwrap_or(began));
            }
            Event::Cut => {
                let cut = self.net.as_ref().map_or(Ok(()), Net::cut);
                cut.map_err(|error| (began, error))?;
            }
        }
        if scene.holds_peer {
            self.signal(peer, Signal::CONT);
        }
        Ok(began)
    }

    /// One interrupt, as a user sends it who wants the job to end: to Phase B it means that the front
    /// is about to end the job, which it does if it can.
    fn drain(&self) {
        self.us().signal(Signal::INT);
        let peer_is_well = self.cell.event == Event::Computing && !self.cell.supervised;
        if peer_is_well && self.cell.side == Side::PhaseB {
            self.signal(Side::Front, Signal::INT);
        }
    }

    fn end_of_peer(&self, played: &mut Played, began: Instant, deadline: Instant) {
        let peer = &self.processes[self.cell.side.peer().rank()];
        if self.cell.event == Event::Stopped {
            // It cannot end, and keeps no other from it: what it does when it goes on is looked at then.
            played.times.all_gone = played.times.gone;
            let resumed = Instant::now();
            peer.signal(Signal::CONT);
            let ended = peer.ends(deadline);
            played.times.resumed = ended.map(|(at, _)| at.saturating_duration_since(resumed));
        } else {
            let ended = peer.ends(deadline);
            let at = ended.map(|(at, _)| at.saturating_duration_since(began));
            played.times.all_gone = at.zip(played.times.gone).map(|(peer, us)| peer.max(us));
        }
        played.ended.push(Ended::of(peer));
    }

    /// When we knew of a fault: our log says it.
    fn noticed(&self, began: Instant) -> Option<Duration> {
        let began_ns = now_ns().saturating_sub(began.elapsed().as_nanos() as u64);
        let log = self.us().log();
        let (_, line) = log.split_once(NOTICED)?;
        let (_, at) = line.split_once("at_ns=")?;
        let at_ns = at.split_whitespace().next()?.parse::<u64>().ok()?;
        Some(Duration::from_nanos(at_ns.saturating_sub(began_ns)))
    }

    fn until_all_gone(&self, deadline: Instant) -> Option<Instant> {
        while self.pids.iter().any(|pid| is_alive(*pid)) {
            if Instant::now() > deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Some(Instant::now())
    }

    /// The output has to be the input, since the job changes no frame.
    fn wrong_film(&self, scene: &Scene) -> Option<String> {
        let mut input = self.picture.header();
        let frames = scene.chunks * self.picture.frames_per_chunk;
        input.extend(self.picture.frame().repeat(frames));
        let film = std::fs::read(self.folder.join(FILM));
        (film.ok() != Some(input)).then(|| "another film than the input".into())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if self.cell.supervised {
            // A rank that was stopped goes with its supervisor; this is for one that did not.
            for pid in self.pids.into_iter().filter(|pid| is_alive(*pid)) {
                signal(pid, Signal::KILL);
            }
        }
        self.processes.clear();
    }
}

fn is_leave(fault: &str) -> bool {
    fault.starts_with("leave")
}
