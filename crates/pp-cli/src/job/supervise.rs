//! `pp` without a launcher: start the ranks on this machine, watch them, end together.
//!
//! Hazard: a rank is killed and the others, or this process, live on; or three processes print
//! three different reasons. Guarantee: when one rank ends badly the others have [`PATIENCE`] to
//! end by themselves and are killed then; when this process dies the kernel kills them; and one
//! line says why, the root cause where it is known.

use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::Context;
use pp_contract::{Fault, FaultKind, Rank, WorldSize};
use pp_transport::launch::LocalJob;
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::{FRONT, WORLD};
use crate::exit::{Failure, code_of};

/// Time the other ranks have to end by themselves after one ended badly.
const PATIENCE: Duration = Duration::from_millis(240);
/// Time the other ranks have after the front ended well.
const GOODBYE: Duration = Duration::from_secs(5);
/// The pipe a supervised rank reports its fault on.
const REPORT_FD: &str = "PP_REPORT_FD";
/// The process that supervises this rank.
const SUPERVISOR: &str = "PP_SUPERVISOR_PID";

/// Whether this process is a rank that a supervisor of ours started.
pub(crate) fn is_supervised() -> bool {
    std::env::var_os(SUPERVISOR).is_some()
}

enum Event {
    /// `None` where the kernel does not say how: whoever started us ignores its children.
    Ended(usize, Option<ExitStatus>),
    Signal,
}

/// Runs this same command line once per rank, and ends as they end.
pub(crate) fn supervise() -> Result<(), Failure> {
    let (report, write_end) = rustix::pipe::pipe().context("no pipe")?;
    let ranks = start(&write_end)?;
    drop(write_end);
    let pids: Vec<Pid> = ranks.iter().map(Child::pid).collect();
    let (events, happened) = mpsc::channel();
    for (index, mut child) in ranks.into_iter().enumerate() {
        let events = events.clone();
        std::thread::spawn(move || {
            let _ = events.send(Event::Ended(index, child.wait().ok()));
        });
    }
    forward_signals(events)?;
    let (ends, interrupted) = wait(&happened, &pids);
    let reports = read_reports(report);
    verdict(&ends, reports, interrupted)
}

trait ChildPid {
    fn pid(&self) -> Pid;
}

impl ChildPid for Child {
    fn pid(&self) -> Pid {
        Pid::from_child(self)
    }
}

fn start(report: &OwnedFd) -> Result<Vec<Child>, Failure> {
    // The ranks inherit the write end under its number.
    rustix::io::fcntl_setfd(report, rustix::io::FdFlags::empty()).context("no pipe")?;
    let world = WorldSize::new(WORLD).context("a world of two ranks")?;
    let job = LocalJob::new(world);
    let program = std::env::current_exe().context("this program has no path")?;
    let mut children: Vec<Child> = Vec::new();
    for rank in 0..WORLD {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1));
        for name in LocalJob::LAUNCHER_VARIABLES {
            command.env_remove(name);
        }
        command
            .envs(job.env(Rank::new(rank)))
            .env(REPORT_FD, report.as_raw_fd().to_string())
            .env(SUPERVISOR, std::process::id().to_string())
            // A terminal's Ctrl-C must reach the ranks once, through here.
            .process_group(0);
        if rank != FRONT.get() {
            // The front's alone: what a plugin prints elsewhere must not get into the video.
            command.stdin(Stdio::null()).stdout(std::io::stderr());
        }
        match command.spawn() {
            Ok(child) => children.push(child),
            Err(error) => {
                for child in &mut children {
                    let _ = child.kill();
                }
                let error = anyhow::Error::new(error);
                return Err(error.context(format!("cannot start rank {rank}")).into());
            }
        }
    }
    Ok(children)
}

fn forward_signals(events: mpsc::Sender<Event>) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot handle signals")?;
    std::thread::spawn(move || {
        for _ in &mut signals {
            if events.send(Event::Signal).is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// How a rank ended.
struct End {
    rank: Rank,
    status: Option<ExitStatus>,
    /// It had to be killed here.
    by_us: bool,
}

impl End {
    fn is_good(&self) -> bool {
        self.status.is_some_and(|s| s.success())
    }

    fn signal(&self) -> Option<i32> {
        self.status.and_then(|s| s.signal())
    }

    fn code(&self) -> Option<i32> {
        self.status.and_then(|s| s.code())
    }
}

/// Waits until all ranks have ended, and gives them in that order; true when a signal came meanwhile.
fn wait(happened: &mpsc::Receiver<Event>, pids: &[Pid]) -> (Vec<End>, bool) {
    let mut ends: Vec<End> = Vec::new();
    let mut interrupted = false;
    let mut deadline: Option<Instant> = None;
    let mut killed = false;
    while ends.len() < pids.len() {
        let event = match deadline {
            None => happened.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => happened.recv_timeout(at.saturating_duration_since(Instant::now())),
        };
        let has_ended = |index: usize| ends.iter().any(|end| end.rank.get() as usize == index);
        match event {
            Ok(Event::Ended(index, status)) => {
                let mut end = End {
                    rank: Rank::new(index as u32),
                    status,
                    by_us: false,
                };
                end.by_us = killed && end.signal() == Some(Signal::KILL.as_raw());
                // Phase B may be done long before the front has written everything.
                let patience = match (end.is_good(), end.rank == FRONT) {
                    (false, _) => Some(PATIENCE),
                    (true, true) => Some(GOODBYE),
                    (true, false) => None,
                };
                ends.push(end);
                let Some(patience) = patience else {
                    continue;
                };
                let at = Instant::now() + patience;
                deadline = Some(deadline.map_or(at, |earlier| earlier.min(at)));
            }
            Ok(Event::Signal) => {
                interrupted = true;
                // The front drains and tells the others; all must hear of an abort.
                for (index, pid) in pids.iter().enumerate() {
                    if !has_ended(index) {
                        let _ = kill_process(*pid, Signal::INT);
                    }
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                killed = true;
                deadline = None;
                for (index, pid) in pids.iter().enumerate() {
                    if !has_ended(index) {
                        let _ = kill_process(*pid, Signal::KILL);
                    }
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    (ends, interrupted)
}

/// One reason for all ranks: the root cause, where it is known.
fn verdict(ends: &[End], reports: Vec<(Rank, Fault)>, interrupted: bool) -> Result<(), Failure> {
    if ends.iter().all(End::is_good) {
        return Ok(());
    }
    // A rank that was not yet ready to drain ends at once, and its peer reports that it is gone.
    let at_once = |end: &End| {
        end.code() == Some(i32::from(code_of(FaultKind::Interrupted)))
            || end.signal() == Some(SIGINT)
    };
    let is_reported = reports
        .iter()
        .any(|(_, fault)| fault.kind == FaultKind::Interrupted);
    if interrupted && !is_reported && ends.iter().any(at_once) {
        let what = "interrupted before the ranks were ready";
        return Err(Fault::new(FaultKind::Interrupted, FRONT, "set up", what).into());
    }
    // A rank that somebody killed is the cause of whatever the others report; one that said why it
    // ends, and crashed on its way out, is not.
    let has_reported = |rank: Rank| reports.iter().any(|(reporter, _)| *reporter == rank);
    let killed = ends
        .iter()
        .filter(|end| !end.by_us && !has_reported(end.rank));
    if let Some((rank, signal)) = killed
        .filter_map(|end| Some((end.rank, end.signal()?)))
        .next()
    {
        let name = signal_name(signal);
        let what = format!(
            "the process was ended by {name}; if nobody sent it, look for the kernel's \
             out-of-memory killer or a crash in a kernel plugin"
        );
        return Err(Fault::new(FaultKind::PeerDied, rank, "run", what).into());
    }
    if let Some((_, fault)) = reports.into_iter().next() {
        return Err(fault.into());
    }
    // A rank that failed before it could report has printed its own line.
    if let Some(code) = ends.iter().filter_map(End::code).find(|code| *code != 0) {
        std::process::exit(code);
    }
    let stuck = ends.iter().find(|end| !end.is_good());
    let rank = stuck.map_or(FRONT, |end| end.rank);
    let what = "the process did not end in good order after the others had";
    Err(Fault::new(FaultKind::TimedOut, rank, "end", what).into())
}

fn signal_name(signal: i32) -> String {
    let name = signal_hook::low_level::signal_name(signal);
    name.map_or_else(
        || format!("signal {signal}"),
        |name| format!("signal {signal} ({name})"),
    )
}

/// What the ranks have reported, in that order, each with the rank that did.
fn read_reports(pipe: OwnedFd) -> Vec<(Rank, Fault)> {
    let mut bytes = Vec::new();
    // All ranks have ended, so all that they said is there, and something that a plugin started
    // may hold the other end for as long as it likes. A report that cannot be read was not made.
    let _ = rustix::io::ioctl_fionbio(&pipe, true);
    let _ = std::fs::File::from(pipe)
        .take(1 << 20)
        .read_to_end(&mut bytes);
    let mut reports = Vec::new();
    let mut rest = &bytes[..];
    while let Some((rank, tail)) = rest.split_first_chunk()
        && let Some((len, tail)) = tail.split_first_chunk()
        && let Some((report, tail)) = tail.split_at_checked(u32::from_le_bytes(*len) as usize)
    {
        let rank = Rank::new(u32::from_le_bytes(*rank));
        reports.extend(Fault::decode(report).map(|fault| (rank, fault)));
        rest = tail;
    }
    reports
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

/// [`report`] for what no fault was made of.
pub(crate) fn report_internal(error: &anyhow::Error) -> bool {
    let rank = std::env::var("RANK")
        .ok()
        .and_then(|rank| rank.parse().ok());
    let rank = Rank::new(rank.unwrap_or(0));
    let fault = Fault::new(FaultKind::Internal, rank, "run", format_args!("{error:#}"));
    report(&fault)
}

/// Gives this rank's fault to the supervisor, who prints one line for all ranks; false when there
/// is none to give it to.
pub(crate) fn report(fault: &Fault) -> bool {
    let variable = |name: &str| std::env::var(name).ok();
    let (Some(fd), Some(rank)) = (variable(REPORT_FD), variable("RANK")) else {
        return false;
    };
    let (Ok(rank), Ok(body)) = (rank.parse::<u32>(), fault.encode()) else {
        return false;
    };
    let mut message = rank.to_le_bytes().to_vec();
    message.extend_from_slice(&(body.len() as u32).to_le_bytes());
    message.extend_from_slice(&body);
    // One write of less than a page: reports of several ranks do not mix.
    std::fs::OpenOptions::new()
        .append(true)
        .open(format!("/proc/self/fd/{fd}"))
        .and_then(|mut pipe| std::io::Write::write_all(&mut pipe, &message))
        .is_ok()
}
