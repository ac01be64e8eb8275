//! `pp` without a launcher: start the ranks on this machine, watch them, end together; and start
//! Phase B again where that was asked for.
//!
//! Hazard: a rank is killed and the others, or this process, live on; or three processes print
//! three different reasons. Guarantee: when one rank ends badly the others have [`PATIENCE`] to
//! end by themselves and are killed then; when this process dies the kernel kills them; and one
//! line says why, the root cause where it is known.
//!
//! Choices: whether a fault is worth a restart is the front's to say, since it alone knows what was
//! lost. This process starts Phase B again when the front waits for it and it died; it kills it
//! first when the front gave it up and it lives on, stopped or cut off. The front itself is never
//! started again: it has the input.

mod asking;

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::Context;
use pp_contract::{Fault, FaultKind, Rank, WorldSize};
use pp_transport::launch::LocalJob;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, set_parent_process_death_signal, waitid,
};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;

use super::missed::Vigil;
use super::reports::{self, Meant, REPORT_FD, Report, Word};
pub(crate) use super::reports::{report, report_own};
use super::signals::heard;
use super::verdict::{End, Ends, verdict};
use super::{FRONT, PHASE_B, WORLD, heartbeat};
use crate::exit::{Failure, log_aside, say_aside};
use crate::flight;

/// Time the other ranks have to end by themselves after one ended badly.
const PATIENCE: Duration = Duration::from_millis(240);
/// Time the other ranks have after the front ended well.
const GOODBYE: Duration = Duration::from_secs(5);
/// Time for the last reports, which were written before the ranks ended.
const REPORTS_WITHIN: Duration = Duration::from_secs(1);
/// Time a process that was killed has to end.
const KILLED_WITHIN: Duration = Duration::from_secs(10);
/// Time the ranks have to end by themselves after a second interrupt.
const ABORTED_WITHIN: Duration = Duration::from_secs(1);
/// Time the front has to say that it is there after all, where Phase B ended because of it or before the ranks met.
const CONTRADICTED_WITHIN: Duration = Duration::from_secs(1);
/// The process that supervises this rank.
pub(crate) const SUPERVISOR: &str = "PP_SUPERVISOR_PID";

/// Whether this process is a rank that a supervisor of ours started.
pub(crate) fn is_supervised() -> bool {
    std::env::var_os(SUPERVISOR).is_some()
}

enum Event {
    /// This rank has ended, and was not reaped: nobody else has its number until it is.
    Ended(Rank, Child),
    Reported(Report),
    /// Nobody reports any more.
    ReportsOver,
    Signal(i32),
    /// Somebody wants to know what the ranks do.
    Asked,
}

/// Runs this same command line once per rank, and ends as they end. Phase B is started again up to
/// `restarts` times.
pub(crate) fn supervise(restarts: u32, within: Duration) -> Result<(), Failure> {
    let (report, write_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).context("no pipe")?;
    // The ranks inherit the write end under its number, and that end alone.
    rustix::io::fcntl_setfd(&write_end, rustix::io::FdFlags::empty()).context("no pipe")?;
    let (events, happened) = mpsc::channel();
    let mut job = Job::new(write_end, events.clone(), restarts, within)?;
    let own = job.local.launch(FRONT).map_err(anyhow::Error::new)?;
    flight::supervise(own.job_id());
    // Before there is a rank that would live on without us.
    forward_signals(events.clone())?;
    for rank in 0..WORLD {
        if let Err(failure) = job.start(Rank::new(rank)) {
            job.kill_all();
            return Err(failure);
        }
    }
    let read = move || {
        reports::read(report, |report| {
            let _ = events.send(Event::Reported(report));
        });
        let _ = events.send(Event::ReportsOver);
    };
    let outcome = aside(read).and_then(|()| job.run(&happened));
    if outcome.is_err() {
        job.kill_all();
    }
    outcome?;
    reports::end(&job.report);
    job.hear_the_rest(&happened);
    verdict(&job.over())
}

/// Runs this on a thread of its own.
fn aside(act: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let thread = std::thread::Builder::new().name("pp-supervise".into());
    thread.spawn(act).context("cannot start a thread")?;
    Ok(())
}

/// A job under supervision.
struct Job {
    local: LocalJob,
    /// The write end of the pipe that the ranks report on.
    report: OwnedFd,
    events: Sender<Event>,
    restarts: u32,
    /// How long the front may take to say what it makes of Phase B's end.
    within: Duration,
    used: u32,
    /// By rank.
    running: [Option<Pid>; WORLD as usize],
    /// By rank: the process that runs has said that it takes signals.
    hears: [bool; WORLD as usize],
    /// By rank: it is to say what it does, as soon as it takes signals.
    is_asked: [bool; WORLD as usize],
    /// The process of Phase B that was killed here because the front gave it up.
    replaced: Option<Pid>,
    /// Why Phase B was given up, by the front or here.
    given_up: Option<Fault>,
    /// How ranks ended for good.
    ends: Vec<End>,
    /// Phase B ended, and the front has not said yet whether it wants another.
    gone: Option<(End, Instant)>,
    /// What the ranks reported, in that order, of their ends.
    reports: Vec<Report>,
    /// The front is not connected, and takes any Phase B that comes.
    front_waits: bool,
    /// The ranks were connected once.
    has_met: bool,
    /// The front has everything of Phase B, which may end as it likes.
    is_served: bool,
    /// The front has done its work.
    is_finished: bool,
    /// Over ranks that are not connected.
    vigil: Vigil,
    /// What is said of a rank that was missed and is not replaced.
    missed: Option<Fault>,
    signals: u32,
    /// The first signal, until it was said what it does.
    drains: Option<u8>,
    /// How many reports there were when a second interrupt came.
    aborted_after: Option<usize>,
    /// When whoever is left is killed.
    deadline: Option<Instant>,
    is_killing: bool,
}

impl Job {
    fn new(
        report: OwnedFd,
        events: Sender<Event>,
        restarts: u32,
        within: Duration,
    ) -> Result<Self, Failure> {
        Ok(Self {
            local: LocalJob::new(WorldSize::new(WORLD).context("a world of two ranks")?),
            report,
            events,
            restarts,
            within,
            used: 0,
            running: [None; WORLD as usize],
            hears: [false; WORLD as usize],
            is_asked: [false; WORLD as usize],
            replaced: None,
            given_up: None,
            ends: Vec::new(),
            gone: None,
            reports: Vec::new(),
            front_waits: true,
            has_met: false,
            is_served: false,
            is_finished: false,
            vigil: Vigil::new(heartbeat()?.is_some(), Instant::now()),
            missed: None,
            signals: 0,
            drains: None,
            aborted_after: None,
            deadline: None,
            is_killing: false,
        })
    }

    /// What is known of it when it is over.
    fn over(self) -> Ends {
        Ends {
            ends: self.ends,
            reports: self.reports,
            interrupted: self.signals > 0,
            aborted_after: self.aborted_after,
            missed: self.missed,
            is_served: self.is_served,
            is_finished: self.is_finished,
            restarts: self.restarts,
            used: self.used,
        }
    }

    /// Starts a rank, and a thread that waits for its end.
    fn start(&mut self, rank: Rank) -> Result<(), Failure> {
        let child = self.spawn(rank)?;
        let (pid, events) = (Pid::from_child(&child), self.events.clone());
        log_aside(move || tracing::info!(rank = rank.get(), pid = number(pid), "a rank starts"));
        let at = rank.get() as usize;
        self.running[at] = Some(pid);
        self.vigil.heard(rank, Instant::now());
        (self.hears[at], self.is_asked[at]) = (false, false);
        aside(move || {
            // Reaped by the thread that sends signals: none goes to somebody who got its number.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while let Err(Errno::INTR) = waitid(WaitId::Pid(pid), options) {}
            let _ = events.send(Event::Ended(rank, child));
        })
    }

    fn spawn(&self, rank: Rank) -> Result<Child, Failure> {
        let path = std::env::current_exe().context("this program has no path")?;
        // What lies at its path by the time of a restart may be another program, which the ranks
        // that run would refuse.
        let program = if self.used > 0 {
            Path::new("/proc/self/exe")
        } else {
            &path
        };
        let mut command = Command::new(program);
        command.arg0(&path).args(std::env::args_os().skip(1));
        for name in LocalJob::LAUNCHER_VARIABLES {
            command.env_remove(name);
        }
        command
            .envs(self.local.env(rank))
            .env(REPORT_FD, self.report.as_raw_fd().to_string())
            .env(SUPERVISOR, std::process::id().to_string())
            // A terminal's Ctrl-C must reach the ranks once, through here.
            .process_group(0);
        if rank != FRONT {
            // The front's alone: what a plugin prints elsewhere must not get into the video.
            command.stdin(Stdio::null()).stdout(std::io::stderr());
        }
        let spawned = command
            .spawn()
            .with_context(|| format!("cannot start rank {rank}"));
        Ok(spawned?)
    }

    /// Waits until all ranks have ended for good.
    fn run(&mut self, happened: &Receiver<Event>) -> Result<(), Failure> {
        while self.ends.len() < WORLD as usize {
            let waits = self.gone.as_ref().map(|(_, until)| *until);
            let deadline = self
                .deadline
                .into_iter()
                .chain(waits)
                .chain(self.vigil.due())
                .min();
            let event = match deadline {
                None => happened.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => happened.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            match event {
                Ok(Event::Ended(rank, child)) => self.ended(rank, child)?,
                Ok(Event::Reported(report)) => self.reported(report)?,
                Ok(Event::ReportsOver) => {
                    // Something else wrote into the pipe: no rank is heard any more, and the front's exit code
                    // alone says whether it has done its work.
                    self.vigil.end();
                    self.is_finished = true;
                }
                Ok(Event::Signal(signal)) => self.signalled(signal),
                Ok(Event::Asked) => self.asked(),
                Err(RecvTimeoutError::Timeout) => self.late()?,
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(())
    }

    /// Takes in what the ranks wrote before they ended.
    fn hear_the_rest(&mut self, happened: &Receiver<Event>) {
        let until = Instant::now() + REPORTS_WITHIN;
        loop {
            match happened.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Event::Reported(report)) => self.note(report),
                Ok(Event::ReportsOver) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    fn note(&mut self, report: Report) {
        match report.word {
            Word::Ends(_) => self.reports.push(report),
            Word::NotRecorded(why) => flight::not_recorded(why.detail.to_string()),
            Word::Served => self.is_served = true,
            Word::Finished => self.is_finished = true,
            _ => {}
        }
    }

    /// Whether Phase B would be started again.
    fn may_restart(&self) -> bool {
        let front_runs = self.running[FRONT.get() as usize].is_some();
        front_runs && self.used < self.restarts && self.signals < 2 && !self.is_killing
    }

    /// Starts another process in the place of this one of Phase B.
    fn restart(&mut self, lost: &End) -> Result<(), Failure> {
        self.used += 1;
        self.replaced = None;
        self.gone = None;
        let (used, of) = (self.used, self.restarts);
        let why = lost.why(&self.reports, self.given_up.take());
        say_aside(format!(
            "pp: Phase B (rank {PHASE_B}) is gone: {why}; restart {used} of {of}"
        ));
        log_aside(move || tracing::warn!(used, of, "Phase B starts again"));
        self.start(PHASE_B)
    }

    fn ended(&mut self, rank: Rank, mut child: Child) -> Result<(), Failure> {
        self.running[rank.get() as usize] = None;
        self.vigil.ended(rank);
        let pid = Pid::from_child(&child);
        let was_replaced = self.replaced == Some(pid);
        let mut end = End {
            rank,
            pid,
            status: child.wait().ok(),
            by_us: false,
        };
        end.by_us = (self.is_killing || was_replaced) && end.was_killed();
        let is_worth_it = was_replaced || end.is_worth_a_restart();
        let may_be_missed = is_worth_it || end.is_silent();
        if rank == PHASE_B && self.may_restart() && may_be_missed && !self.is_served {
            if self.front_waits && (is_worth_it || self.has_met) {
                return self.restart(&end);
            }
            let is_blamed = self.reports.iter().any(|report| blames_front(report, pid));
            // That the ranks have met is read by another thread, which may be behind.
            let is_unheard = self.front_waits && !end.is_good();
            let within = if is_blamed || is_unheard {
                CONTRADICTED_WITHIN.min(self.within)
            } else {
                self.within
            };
            self.gone = Some((end, Instant::now() + within));
            return Ok(());
        }
        self.settle(end);
        Ok(())
    }

    /// A rank ended, and is not started again.
    fn settle(&mut self, end: End) {
        // Phase B may be done long before the front has written everything.
        let has_failed = self
            .reports
            .iter()
            .any(|report| report.pid == number(end.pid));
        let is_harmless = match end.rank {
            FRONT => end.is_good() && !has_failed,
            _ => self.is_served || (end.is_good() && !has_failed),
        };
        let patience = match (is_harmless, end.rank == FRONT) {
            (false, _) => Some(PATIENCE),
            (true, true) => Some(GOODBYE),
            (true, false) => None,
        };
        let is_front = end.rank == FRONT;
        self.ends.push(end);
        if let Some(patience) = patience {
            self.end_within(patience);
        }
        if is_front && let Some((gone, _)) = self.gone.take() {
            self.settle(gone);
        }
    }

    fn end_within(&mut self, patience: Duration) {
        if self.is_killing {
            // Ranks that were killed have their own time.
            return;
        }
        let at = Instant::now() + patience;
        self.deadline = Some(self.deadline.map_or(at, |earlier| earlier.min(at)));
    }

    fn reported(&mut self, report: Report) -> Result<(), Failure> {
        let at = report.rank.get() as usize;
        let is_of = |pid: Pid| number(pid) == report.pid;
        if self.running.get(at).copied().flatten().is_some_and(is_of) {
            self.vigil.heard(report.rank, Instant::now());
        }
        match report.word {
            Word::Ends(_) => {
                // The front is stopped or cut off, and would not say for a minute what it makes of it.
                if let Some((end, until)) = &mut self.gone
                    && blames_front(&report, end.pid)
                {
                    *until = (*until).min(Instant::now() + CONTRADICTED_WITHIN);
                }
                self.note(report);
            }
            Word::Hears => self.hears(report.rank, report.pid),
            Word::NotRecorded(_) | Word::Finished => self.note(report),
            Word::Lives => {}
            Word::Served => {
                self.note(report);
                // Phase B ended badly, and that this does no harm was read late.
                let is_harmless = self.ends.iter().all(|end| end.rank == PHASE_B);
                if is_harmless && self.signals < 2 && !self.is_killing {
                    self.deadline = None;
                }
            }
            Word::Met => {
                (self.front_waits, self.has_met) = (false, true);
                self.vigil.pause();
                self.say_that_it_drains();
            }
            Word::Lost(meant, fault) => {
                let why = fault.clone();
                log_aside(
                    move || tracing::warn!(fault = %why, ?meant, "the front gave Phase B up"),
                );
                self.front_waits = true;
                self.given_up = Some(fault);
                self.vigil.resume(Instant::now());
                return self.replace(meant, report.pid);
            }
        }
        Ok(())
    }

    /// The front wants another process than this one of Phase B.
    fn replace(&mut self, meant: Meant, front: u32) -> Result<(), Failure> {
        let is_meant = |pid: Pid| match meant {
            Meant::Unknown => false,
            Meant::This(meant) => number(pid) == meant,
            Meant::Any => true,
        };
        if let Some((end, _)) = self.gone.take() {
            if self.may_restart() {
                return self.restart(&end);
            }
            self.settle(end);
        }
        match self.running[PHASE_B.get() as usize].filter(|pid| is_meant(*pid)) {
            Some(pid) if self.may_restart() => {
                // It may be stopped, or cut off: nothing else ends it.
                self.replaced = Some(pid);
                let _ = kill_process(pid, Signal::KILL);
            }
            // The front waits in vain.
            Some(_) => self.end_in_vain(front),
            // It ended for good, and none comes in its place: the same.
            None if self.ends.iter().any(|end| end.rank == PHASE_B) => self.end_in_vain(front),
            // It was replaced already.
            None => {}
        }
        Ok(())
    }

    /// No Phase B comes to this process of the front any more: what it lost the last one to ends the job.
    fn end_in_vain(&mut self, front: u32) {
        self.reports
            .extend(self.given_up.take().map(|fault| Report {
                pid: front,
                rank: FRONT,
                word: Word::Ends(fault),
            }));
        self.end_within(PATIENCE);
    }

    /// Ends a rank that gives no sign of life; another takes the place of Phase B, where there may be one.
    fn miss(&mut self, rank: Rank, silence: Duration) {
        self.vigil.ended(rank);
        let Some(pid) = self.running[rank.get() as usize] else {
            return;
        };
        let what = format!(
            "no sign of life for {:.1} s before the ranks were connected; is its process stopped?",
            silence.as_secs_f64()
        );
        let fault = Fault::new(FaultKind::TimedOut, rank, "start", what);
        let why = fault.clone();
        log_aside(move || tracing::warn!(fault = %why, "a rank is missed"));
        if rank != PHASE_B || !self.may_restart() {
            self.missed.get_or_insert(fault);
        } else {
            self.given_up = Some(fault);
        }
        self.replaced = Some(pid);
        let _ = kill_process(pid, Signal::KILL);
    }

    /// A deadline has passed.
    fn late(&mut self) -> Result<(), Failure> {
        let now = Instant::now();
        if let Some((rank, silence)) = self.vigil.look(now) {
            self.miss(rank, silence);
        }
        if let Some((end, _)) = self.gone.take_if(|(_, until)| now >= *until) {
            self.settle(end);
        }
        if self.deadline.is_some_and(|at| now >= at) {
            let left = self.running.iter().position(Option::is_some);
            if let Some(rank) = left.filter(|_| self.is_killing) {
                let what = "its process was killed and does not end; the kernel waits for a disk or a device in it";
                let fault = Fault::new(FaultKind::TimedOut, Rank::new(rank as u32), "end", what);
                return Err(fault.into());
            }
            self.deadline = Some(now + KILLED_WITHIN);
            self.is_killing = true;
            self.kill_all();
        }
        Ok(())
    }

    fn kill_all(&self) {
        for pid in self.running.into_iter().flatten() {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Whether this process of Phase B ended because of the front.
fn blames_front(report: &Report, phase_b: Pid) -> bool {
    let is_blamed = |word: &Word| matches!(word, Word::Ends(fault) if fault.rank == FRONT);
    report.pid == number(phase_b) && is_blamed(&report.word)
}

fn number(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().cast_unsigned()
}

fn forward_signals(events: Sender<Event>) -> Result<(), Failure> {
    let mut signals = Signals::new(heard()).context("cannot handle signals")?;
    aside(move || {
        for signal in &mut signals {
            let event = match signal {
                SIGUSR1 => Event::Asked,
                signal => Event::Signal(signal),
            };
            if events.send(event).is_err() {
                return;
            }
        }
    })
}

/// Ties this rank to its supervisor, if it has one: it dies with it.
pub(crate) fn bind_to_supervisor() -> Result<(), Failure> {
    let Some(supervisor) = std::env::var(SUPERVISOR).ok() else {
        return Ok(());
    };
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot follow the supervisor")?;
    // It may have died before the line above.
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().to_string());
    if parent.as_deref() != Some(supervisor.as_str()) {
        std::process::exit(1);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
