//! A job without a launcher: start the ranks on this machine, watch them, end together; and start
//! ranks again where that was asked for.
//!
//! Hazard: a rank is killed and the others, or this process, live on; or each process prints
//! a reason of its own. Guarantee: when one rank ends badly the others have a moment to
//! end by themselves and are killed then; when this process dies the kernel kills them; and one
//! line says why, the root cause where it is known.
//!
//! Choices: whether a fault is worth a restart is for rank 0 to say, since it alone knows what was
//! lost. This process starts a rank again when rank 0 waits for it and it died; it kills it
//! first when rank 0 gave it up and it lives on, stopped or cut off. Rank 0 itself is never
//! started again: it has the input.

mod core;
mod events;
mod missed;
mod rank_state;
mod verdict;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::Context;
use pp_contract::{DeviceName, FaultKind, Rank, WorldSize};
use pp_transport::launch::LocalJob;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, set_parent_process_death_signal, waitid,
};
use signal_hook::consts::{SIGINT, SIGKILL, SIGUSR1};

use self::core::Core;
use self::events::{Action, Event, Terms};
use self::verdict::Verdict;
use crate::arguments::arguments;
use crate::caller::{Caller, Here};
use crate::config::{Config, DEVICES, JOB, LOSSES_FD, REPORT_FD, SUPERVISOR, Supervisor};
use crate::end::{log_aside, say_aside};
use crate::error::Error;
use crate::flight::Recordings;
use crate::hearing::{Afterwards, on_signals};
use crate::job::Job;
use crate::output::stdout;
use crate::signals::say_that_it_drains;
use crate::threads::spawn;
use crate::{RANK_0, reports, times};

/// What the threads beside this one notice.
pub(crate) enum Notice {
    /// This rank has ended.
    Ended(Rank, Gone),
    /// What was reported before a mark was made is read.
    Mark,
    Event(Event),
    /// The program asks for what this signal asks for.
    Asked(i32),
}

/// A rank that has ended.
pub(crate) enum Gone {
    /// A process that was not reaped: no other one has its number until it is.
    Child(Child),
    /// Rank 0 in this process.
    Here(Result<(), Error>),
    /// Rank 0 in this process, whose driver was left behind by the supervisor.
    LeftBehind,
}

impl Gone {
    fn pid(&self) -> u32 {
        match self {
            Self::Child(child) => child.id(),
            Self::Here(_) | Self::LeftBehind => std::process::id(),
        }
    }

    /// How it ended, in the terms of a process.
    fn status(&mut self) -> Option<ExitStatus> {
        match self {
            Self::Child(child) => child.wait().ok(),
            Self::Here(Ok(())) => Some(ExitStatus::from_raw(0)),
            Self::Here(Err(error)) => Some(ExitStatus::from_raw(i32::from(error.code()) << 8)),
            Self::LeftBehind => Some(ExitStatus::from_raw(Signal::KILL.as_raw())),
        }
    }
}

/// Runs a command, or this same command line, once for each rank of the pipeline, and ends as they end. Ranks that may be
/// restarted are started again, up to `restarts` times in all; rank 0 never is.
/// Rank 0 lives in this process where it is `here`.
pub(crate) fn supervise(
    supervised: &Job,
    here: Option<Here>,
    (notices, noticed): (Sender<Notice>, Receiver<Notice>),
) -> Result<(), Error> {
    let Job {
        config,
        pipeline,
        restarts,
        ..
    } = supervised;
    let world = pipeline.world_size();
    let (report, write_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
        .context("cannot make the pipe for the reports of the ranks")?;
    // The ranks inherit the write end under its number, and that end alone.
    rustix::io::fcntl_setfd(&write_end, rustix::io::FdFlags::empty())
        .context("cannot make the pipe for the reports of the ranks")?;
    let (losses, to_rank_0) =
        rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::DIRECT | PipeFlags::NONBLOCK)
            .context("cannot make the pipe for what rank 0 is told")?;
    let terms = Terms {
        world,
        restarts: *restarts,
        may_restart: pipeline.restartable().collect(),
        within: config.restart_within,
        may_go_on: here.is_some() && supervised.schedule.is_some(),
        watches: config.heartbeat.is_some(),
        // This library begins late in a program that an interpreter loads.
        loads_within: match &supervised.command[..] {
            [] => Duration::ZERO,
            _ => times::LOADED_WITHIN,
        },
    };
    let local = LocalJob::new(world);
    let own = local.launch(RANK_0).map_err(anyhow::Error::new)?;
    let mut job = SupervisedJob {
        recordings: Recordings::new(own.job_id(), config),
        local,
        command: supervised.command.clone(),
        devices: DeviceName::list(&supervised.devices),
        number: supervised.number,
        here: None,
        is_quiet: false,
        own: None,
        sink: pipeline.sink(),
        report: write_end,
        losses: to_rank_0,
        ended: VecDeque::new(),
        marked_within: times::CONTRADICTED_WITHIN,
        killed: Vec::new(),
        notices: notices.clone(),
        core: Core::new(&terms, Instant::now()),
        is_begun: false,
        signal: None,
    };
    // Before there is a rank that would live on without us.
    let to_core = notices.clone();
    let afterwards = match here {
        Some(_) => Afterwards::Program,
        None => Afterwards::Job,
    };
    let hearing = on_signals(afterwards, move |signal| {
        let _ = to_core.send(Notice::Event(Event::of_signal(signal)));
    });
    let _hearing = hearing.context("cannot handle signals")?;
    let outcome = job
        .begin(world, (report, losses), (config, here))
        .and_then(|()| job.run(&noticed));
    if let Err(error) = outcome {
        for pid in job.core.pids().collect::<Vec<_>>() {
            job.kill(pid);
        }
        return Err(error);
    }
    let error = match job.core.verdict() {
        Verdict::Done => return Ok(()),
        Verdict::Interrupted(signal) => return Err(Error::Interrupted(signal)),
        Verdict::Told(code) => return Err(job.own.unwrap_or(Error::Told(code))),
        Verdict::Fault(fault, signal) if fault.kind == FaultKind::Interrupted => {
            let signal = job.signal.or(signal).unwrap_or(SIGINT as u8);
            Error::Aborted(fault, signal)
        }
        Verdict::Fault(fault, _) => fault.into(),
    };
    Err(match job.recordings.hint() {
        None => error,
        Some(hint) => Error::Recorded(Box::new(error), hint),
    })
}

/// A job under supervision.
struct SupervisedJob {
    local: LocalJob,
    /// Starts a rank; this process's command line does if it is empty.
    command: Vec<OsString>,
    /// The devices of the ranks, as a list.
    devices: String,
    number: u32,
    /// Rank 0 in this process.
    here: Option<Arc<Caller>>,
    /// The program asks for the end, and no user is told what happens now.
    is_quiet: bool,
    /// The error of that one, if it did not report it.
    own: Option<Error>,
    /// The rank that writes to standard output beside rank 0.
    sink: Rank,
    /// The write end of the pipe that the ranks report on.
    report: OwnedFd,
    /// The write end of the pipe on which rank 0 is told why a rank is gone that is started again.
    losses: OwnedFd,
    /// Ranks that have ended, and since when, until what they reported before is read.
    ended: VecDeque<(Rank, Gone, Instant)>,
    /// That takes less than this.
    marked_within: Duration,
    /// Processes that lived when they were killed here.
    killed: Vec<u32>,
    notices: Sender<Notice>,
    core: Core,
    /// All ranks were started once.
    is_begun: bool,
    /// The first signal that asked for an end.
    signal: Option<u8>,
    recordings: Recordings,
}

impl SupervisedJob {
    /// Starts the ranks, and a thread that reads their reports.
    fn begin(
        &mut self,
        world: WorldSize,
        (report, losses): (OwnedFd, OwnedFd),
        (config, here): (&Config, Option<Here>),
    ) -> Result<(), Error> {
        match here {
            Some(here) => self.start_here(here, config, &losses)?,
            None => self.start(RANK_0, Some(losses))?,
        }
        for rank in 1..world.get() {
            self.start(Rank::new(rank), None)?;
        }
        self.is_begun = true;
        let notices = self.notices.clone();
        spawn("pp-supervise", move || {
            reports::read(report, |report| {
                let report = report.map(|report| Notice::Event(Event::Reported(report)));
                let _ = notices.send(report.unwrap_or(Notice::Mark));
            });
            let _ = notices.send(Notice::Event(Event::ReportsOver));
        })
    }

    /// Starts a rank, and a thread that waits for its end. Rank 0 alone gets `losses`.
    fn start(&mut self, rank: Rank, losses: Option<OwnedFd>) -> Result<(), Error> {
        let child = self.spawn(rank, losses)?;
        let (pid, notices) = (Pid::from_child(&child), self.notices.clone());
        let number = child.id();
        log_aside(move || tracing::info!(rank = rank.get(), pid = number, "a rank starts"));
        self.happened(Event::Started(rank, number))?;
        spawn("pp-supervise", move || {
            // Reaped by the thread that sends signals: none goes to a process that got its number.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while let Err(Errno::INTR) = waitid(WaitId::Pid(pid), options) {}
            let _ = notices.send(Notice::Ended(rank, Gone::Child(child)));
        })
    }

    /// Starts rank 0 in this process.
    fn start_here(&mut self, here: Here, config: &Config, losses: &OwnedFd) -> Result<(), Error> {
        let pid = std::process::id();
        let launch = self.local.launch(RANK_0).map_err(anyhow::Error::new)?;
        let config = Config {
            launch: Some(launch),
            supervisor: Some(Supervisor {
                pid: pid.to_string(),
                job: self.number,
                report_fd: Some(self.report.as_raw_fd().to_string()),
                losses_fd: Some(losses.as_raw_fd().to_string()),
            }),
            ..config.clone()
        };
        self.happened(Event::Started(RANK_0, pid))?;
        let notices = self.notices.clone();
        self.here = Some(here.start(config, move |done| {
            let _ = notices.send(Notice::Ended(RANK_0, Gone::Here(done)));
        })?);
        Ok(())
    }

    /// Ends a rank at once.
    fn kill(&mut self, pid: u32) {
        match self.is_here(pid) {
            Some(caller) if caller.leave_behind() => self.gone(RANK_0, Gone::LeftBehind),
            Some(_) => {}
            None => kill(pid, Signal::KILL),
        }
    }

    /// Rank 0 in this process, if it has this number.
    fn is_here(&self, pid: u32) -> Option<&Arc<Caller>> {
        self.here.as_ref().filter(|_| pid == std::process::id())
    }

    /// Sends a signal to a rank.
    fn signal(&self, pid: u32, signal: i32) {
        match self.is_here(pid) {
            Some(caller) => caller.signal(signal),
            None => kill(pid, Signal::from_named_raw(signal).unwrap_or(Signal::INT)),
        }
    }

    /// A rank has ended. What it reported before is read first.
    fn gone(&mut self, rank: Rank, gone: Gone) {
        reports::mark(&self.report);
        self.ended.push_back((rank, gone, Instant::now()));
    }

    fn spawn(&self, rank: Rank, losses: Option<OwnedFd>) -> Result<Child, Error> {
        let mut command = match &self.command[..] {
            [program, args @ ..] => {
                let mut command = Command::new(program);
                command.args(args);
                command
            }
            [] => self.same_command()?,
        };
        for name in LocalJob::launcher_variables() {
            command.env_remove(name);
        }
        command
            .envs(self.local.env(rank))
            .env(REPORT_FD, self.report.as_raw_fd().to_string())
            .env(SUPERVISOR, std::process::id().to_string())
            .env(DEVICES, &self.devices)
            .env(JOB, self.number.to_string())
            // A terminal's Ctrl-C must reach the ranks once, through here.
            .process_group(0);
        if rank != RANK_0 {
            command.stdin(Stdio::null());
        }
        command.env_remove(LOSSES_FD);
        if let Some(losses) = &losses {
            rustix::io::fcntl_setfd(losses, rustix::io::FdFlags::empty())
                .context("cannot pass a pipe to rank 0")?;
            command.env(LOSSES_FD, losses.as_raw_fd().to_string());
        }
        // Results come from the source's rank and from the sink's alone.
        let has_results = rank == RANK_0 || rank == self.sink;
        let out = if has_results {
            stdout()
        } else {
            rustix::stdio::stderr()
        };
        let out = out.try_clone_to_owned();
        command.stdout(out.context("cannot pass standard output on")?);
        command.spawn().map_err(|source| {
            let program = command.get_program();
            let text = format!("cannot start rank {rank} with {program:?}");
            match source.kind() {
                ErrorKind::NotFound | ErrorKind::PermissionDenied if !self.command.is_empty() => {
                    Error::Usage(format!("{text}: {source}; correct Job::command"))
                }
                _ => anyhow::Error::new(source).context(text).into(),
            }
        })
    }

    /// The command line of this process.
    fn same_command(&self) -> Result<Command, Error> {
        let path = std::env::current_exe()
            .context("cannot find the file of this program; is /proc mounted?")?;
        // What lies at its path by the time of a restart may be another program, which the ranks
        // that run would refuse.
        let program = if self.is_begun {
            Path::new("/proc/self/exe")
        } else {
            &path
        };
        let mut command = Command::new(program);
        command.arg0(&path).args(arguments().into_iter().skip(1));
        Ok(command)
    }

    /// Waits until all ranks have ended for good.
    fn run(&mut self, noticed: &Receiver<Notice>) -> Result<(), Error> {
        while !self.core.is_over() {
            let within = self.marked_within;
            let late = self.ended.front().map(|(_, _, since)| *since + within);
            let due = self.core.due().into_iter().chain(late).min();
            let notice = match due {
                None => noticed.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => noticed.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            match notice {
                Ok(Notice::Ended(rank, gone)) => self.gone(rank, gone),
                Ok(Notice::Mark) => self.reap()?,
                Ok(Notice::Asked(signal)) => {
                    self.is_quiet = true;
                    // A drain is asked for once.
                    if signal != SIGINT || self.signal.is_none() {
                        self.happened(Event::of_signal(signal))?;
                    }
                }
                Ok(Notice::Event(event)) => {
                    if let Event::ReportsOver = event {
                        self.marked_within = Duration::ZERO;
                    }
                    self.happened(event)?;
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.happened(Event::Tick)?;
                    // Where something else than reports came through the pipe, no mark comes.
                    let is_late = |(_, _, since): &(_, _, Instant)| since.elapsed() >= within;
                    while self.ended.front().is_some_and(is_late) {
                        self.reap()?;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(())
    }

    /// All that the first of those that have ended reported is read.
    fn reap(&mut self) -> Result<(), Error> {
        let Some((rank, mut gone, _)) = self.ended.pop_front() else {
            return Ok(());
        };
        let was_killed = self.killed.contains(&gone.pid());
        let status = gone.status();
        if let Gone::Here(Err(error)) = gone {
            self.own = Some(error).filter(|error| !error.is_told());
        }
        self.happened(Event::Ended(rank, status, was_killed))
    }

    fn happened(&mut self, event: Event) -> Result<(), Error> {
        if let Event::Signal(signal) = event {
            // The exit code of this process names it.
            self.signal.get_or_insert(signal);
        }
        for action in self.core.handle(event, Instant::now()) {
            match action {
                Action::Start(rank) => self.start(rank, None)?,
                Action::Kill(pid) => {
                    let is_alive = match self.is_here(pid) {
                        Some(caller) => !caller.has_ended(),
                        None => is_alive(pid),
                    };
                    self.killed.extend(is_alive.then_some(pid));
                    self.kill(pid);
                }
                Action::TellLoss(why) => reports::tell_loss(&self.losses, &why),
                Action::Pass(pid, signal) => self.signal(pid, signal.into()),
                Action::Ask(pid) => self.signal(pid, SIGUSR1),
                Action::Say(line) => say_aside(line),
                Action::SayDrain(_) if self.is_quiet => {}
                Action::SayDrain(signal) => say_that_it_drains(signal),
                Action::Log(line) => log_aside(move || tracing::warn!("{line}")),
                Action::NotRecorded(why) => self.recordings.failed(why),
            }
        }
        Ok(())
    }
}

/// Says whether a rank, which was not reaped, has neither ended nor been killed. The kernel closes the files of a killed
/// process, and its peers see that, before it has ended: for long, where it has a GPU.
fn is_alive(pid: u32) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    let ended = Pid::from_raw(pid.cast_signed()).map(|pid| waitid(WaitId::Pid(pid), options));
    matches!(ended, Some(Ok(None))) && !is_killed(pid)
}

/// Says whether SIGKILL is on its way to a process, which was not reaped.
fn is_killed(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    // The signals of the whole process, as a mask: see proc(5).
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    let pending = pending.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    pending.is_some_and(|mask| mask & (1 << (SIGKILL - 1)) != 0)
}

/// Sends a signal to a rank, which was not reaped.
fn kill(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        let _ = kill_process(pid, signal);
    }
}

/// Ties this process to the one that started it, whose number is `pid`: it dies with it.
///
/// # Errors
/// The kernel refuses, or another process started this one.
pub fn bind_to_parent(pid: &str) -> Result<(), Error> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot follow the supervisor")?;
    // It may have died before the line above.
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().to_string());
    if parent.as_deref() != Some(pid) {
        return Err(Error::Usage(format!(
            "{SUPERVISOR} is {pid:?}, and that process has ended, or did not start this one. Where a script wraps the rank \
             (Job::command), let it exec the rank. A rank also passes its variables on to programs that it starts; in those, \
             unset {SUPERVISOR}, RANK and WORLD_SIZE"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
