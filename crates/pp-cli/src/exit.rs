//! How `pp` ends: one line that names what went wrong, and an exit code by kind.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | a fault of `pp` itself |
//! | 2 | wrong usage |
//! | 3 | bad input |
//! | 4 | reading or writing failed, or the system refused a thread, a descriptor or memory |
//! | 5 | a kernel plugin failed or was refused |
//! | 6 | the ranks could not meet, or were started differently |
//! | 7 | a rank died |
//! | 8 | a rank broke the protocol |
//! | 9 | something did not happen in time |
//! | 10 | a GPU, its driver or NCCL failed or is not there |
//! | 11 | the ranks drifted apart: bytes are not those that were sent |
//! | 130, 143, 129 | interrupted by SIGINT, SIGTERM, SIGHUP |

use std::any::Any;
use std::fs::File;
use std::io::{ErrorKind, IsTerminal as _, Write};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};
use pp_transport::error::lift_limit;
use rustix::io::Errno;

use crate::job::{PHASE_B, signals};
use crate::patient::Patient;
use crate::video::{InputError, OutputError, staged};

/// Why `pp` ends with an error.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line asks for what cannot be.
    Usage(String),
    /// A rank's fault.
    Fault(Fault),
    /// The same of a command that is no rank: which one the fault names says nothing.
    Local(Fault),
    /// A signal with this number ended the job early: what was in flight is done, and said.
    Interrupted(u8),
    /// The system refused what every process needs: a thread, a descriptor, memory.
    Refused(String),
    /// Anything else.
    Other(anyhow::Error),
}

impl Failure {
    /// A fault of a command that is no rank.
    pub(crate) fn local(kind: FaultKind, operation: &str, detail: impl std::fmt::Display) -> Self {
        Self::Local(Fault::new(kind, Rank::new(0), operation, detail))
    }

    /// What the other ranks are told of it.
    pub(crate) fn fault(&self, rank: Rank, operation: &str) -> Fault {
        match self {
            Self::Fault(fault) | Self::Local(fault) => fault.clone(),
            Self::Refused(text) => Fault::new(FaultKind::Io, rank, operation, text),
            Self::Usage(_) | Self::Interrupted(_) | Self::Other(_) => {
                Fault::new(FaultKind::Internal, rank, operation, self)
            }
        }
    }

    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Fault(fault) | Self::Local(fault) => code_of(fault.kind),
            Self::Interrupted(signal) => 128 + signal,
            Self::Refused(_) => code_of(FaultKind::Io),
            Self::Other(_) => 1,
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Usage(text) => f.write_str(text),
            Self::Fault(fault) => write!(f, "{fault}"),
            Self::Local(fault) => {
                write!(f, "{}: {}: {}", fault.kind, fault.operation, fault.detail)
            }
            Self::Interrupted(signal) => write!(f, "interrupted by {}", signals::name(*signal)),
            Self::Refused(text) => f.write_str(text),
            Self::Other(error) => write!(f, "{error:#}"),
        }
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        let errno = |cause: &(dyn std::error::Error + 'static)| {
            let io = cause.downcast_ref::<std::io::Error>();
            let errno = io.and_then(Errno::from_io_error);
            errno.or_else(|| cause.downcast_ref::<Errno>().copied())
        };
        match error.chain().find_map(errno).and_then(lift_limit) {
            Some(remedy) => {
                let text = format!("{error:#}");
                // Some errors name the remedy themselves.
                let is_named = text.contains(remedy);
                Self::Refused(if is_named {
                    text
                } else {
                    format!("{text}; {remedy}")
                })
            }
            None => Self::Other(error),
        }
    }
}

impl From<InputError> for Failure {
    fn from(error: InputError) -> Self {
        Self::Fault(input_fault(&error))
    }
}

impl From<OutputError> for Failure {
    fn from(error: OutputError) -> Self {
        Self::Fault(output_fault(&error))
    }
}

/// What a panic says of itself; where it was stands in the message that the panic printed.
pub(crate) fn panicked(panic: &(dyn Any + Send)) -> Failure {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let what = text.unwrap_or("it does not say why");
    Failure::Other(anyhow::anyhow!("the rank panicked: {what}"))
}

/// An input error is always the front's: it alone reads.
pub(crate) fn input_fault(error: &InputError) -> Fault {
    Fault::new(error.kind(), Rank::new(0), "read input", error)
}

/// An output error is always the front's: it alone writes.
pub(crate) fn output_fault(error: &OutputError) -> Fault {
    Fault::new(FaultKind::Io, Rank::new(0), "write output", error)
}

/// Prints what a command found on standard output. Whoever closed the pipe does not want to read
/// it; a full disk is a failure.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let copy = std::io::stdout().as_fd().try_clone_to_owned();
    let written = copy.and_then(|out| Patient(File::from(out)).write_all(text.as_bytes()));
    match written {
        Err(source) if source.kind() != ErrorKind::BrokenPipe => Err(OutputError::Write {
            path: Path::new("-").into(),
            bytes: 0,
            source,
        }
        .into()),
        _ => Ok(()),
    }
}

/// Ends this process, from the thread that did its work. What libraries do at exit is done only where none of them is at work: while
/// NCCL ends communicators on a thread that was left behind, their exit handlers would take from it
/// what it uses, and the process would end by a signal instead of with its code.
pub(crate) fn leave(code: u8) -> ! {
    discard_files();
    wait_for_unsaid();
    if pp_transport::nccl::is_at_rest() {
        std::process::exit(code.into())
    }
    end_now(code)
}

/// Time for a disk to remove the files that were not finished.
const DISCARDED_WITHIN: Duration = Duration::from_millis(200);

/// Removes files that were not finished and have a name: a thread that is left behind drops nothing.
fn discard_files() {
    if staged::has_hidden() {
        let (done, is_done) = sync_channel::<()>(1);
        // On a thread of its own: the disk may be away.
        let thread = std::thread::Builder::new().name("pp-discard".into());
        let started = thread.spawn(move || {
            staged::discard_hidden(Path::new(""));
            drop(done);
        });
        if started.is_ok() {
            let _ = is_done.recv_timeout(DISCARDED_WITHIN);
        }
    }
}

/// Time for the last line of a process, where whoever reads standard error is slow, or stuck.
const SAID_WITHIN: Duration = Duration::from_secs(2);

/// Writes a line to standard error; false when nobody takes it in time. Without a standard error nobody
/// wants to read it.
pub(crate) fn say(line: String) -> bool {
    let (say, said) = sync_channel(1);
    let again = line.clone();
    let thread = std::thread::Builder::new().name("pp-say".into());
    let started = thread.spawn(move || {
        let _ = writeln!(std::io::stderr(), "{line}");
        let _ = say.send(());
    });
    if started.is_err() {
        // No thread is to be had, and the line is worth the wait.
        let _ = writeln!(std::io::stderr(), "{again}");
        return true;
    }
    said.recv_timeout(SAID_WITHIN).is_ok()
}

/// Lines that were given to [`aside`] and are not written yet.
static UNSAID: AtomicUsize = AtomicUsize::new(0);

/// Writes a line to standard error without waiting: a program that does not read it may hold standard error.
pub(crate) fn say_aside(line: String) {
    // A progress bar may stand in the last row of a terminal.
    let clear = match std::io::stderr().is_terminal() {
        true => "\r\x1b[K",
        false => "",
    };
    aside(move || {
        // In one piece: another process may write to the same place.
        let _ = std::io::stderr().write_all(format!("{clear}{line}\n").as_bytes());
    });
}

/// Logs, without waiting, on a thread that nothing watches: a program that does not read it may hold standard error.
pub(crate) fn log_aside(log: impl FnOnce() + Send + 'static) {
    // The level and the module are those of the event, which the closure alone knows.
    if tracing::dispatcher::has_been_set() {
        aside(log);
    }
}

fn aside(write: impl FnOnce() + Send + 'static) {
    UNSAID.fetch_add(1, Ordering::Relaxed);
    let thread = std::thread::Builder::new().name("pp-say".into());
    let started = thread.spawn(move || {
        write();
        UNSAID.fetch_sub(1, Ordering::Relaxed);
    });
    if started.is_err() {
        // Without a thread to be had the line is lost, and the work goes on.
        UNSAID.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Waits for the lines of [`aside`], for a bounded time.
fn wait_for_unsaid() {
    let until = Instant::now() + SAID_WITHIN;
    while UNSAID.load(Ordering::Relaxed) > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Ends this process beside a thread that goes on: what libraries do at exit would take from it what
/// it uses.
pub(crate) fn end_now(code: u8) -> ! {
    discard_files();
    // Nobody else flushes it. Whoever closed the pipe does not want to read it.
    let _ = std::io::stdout().flush();
    signal_hook::low_level::exit(code.into())
}

/// The exit code of a kind of fault.
pub(crate) fn code_of(kind: FaultKind) -> u8 {
    match kind {
        FaultKind::BadInput => 3,
        FaultKind::Io => 4,
        FaultKind::Plugin => 5,
        FaultKind::HandshakeMismatch => 6,
        FaultKind::PeerDied => 7,
        FaultKind::PeerMisbehaved => 8,
        FaultKind::TimedOut => 9,
        FaultKind::Device => 10,
        FaultKind::Drift => 11,
        FaultKind::Interrupted => signals::interrupted_code(),
        _ => 1,
    }
}

/// Whether another Phase B may do what this one could not: it died, fell silent, or its device
/// failed. What a plugin, the input or the protocol did it would do again.
pub(crate) fn is_worth_a_restart(fault: &Fault) -> bool {
    let kinds = [FaultKind::PeerDied, FaultKind::TimedOut, FaultKind::Device];
    fault.rank == PHASE_B && kinds.contains(&fault.kind)
}
