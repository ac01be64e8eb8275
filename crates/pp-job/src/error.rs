//! Why a job failed, and the exit code for it.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pp_contract::{DeviceNameError, Fault, FaultKind, PipelineError, Rank};
use pp_runtime::stage::StageError;
use pp_transport::error::lift_limit;
use rustix::io::Errno;
use signal_hook::consts::SIGINT;

use crate::signal_names;

/// Why a job, or a command of the program around it, failed. Its text is one line.
///
/// # Which error to return
/// The closures of a program return this type, and the stages that they open return [`StageError`]. The job ends with one
/// line and one exit code, whichever rank the error is of.
///
/// | what went wrong | in a closure, or in `main` | in a call of a stage | code |
/// |---|---|---|---|
/// | an argument, a variable, a combination of them | [`Error::Usage`] | [`FaultKind::Usage`] | 2 |
/// | the contents of the input | as in a stage | [`FaultKind::BadInput`] | 3 |
/// | a file | [`StageError::file`] with `?` | [`StageError::file`] | 4 |
/// | an output | [`OutputError`](crate::output::OutputError) with `?` | the same | 4 |
/// | a device or its library | as in a stage | [`FaultKind::Device`]: the rank may be started again, unless its GPU has failed under MPS | 10 |
/// | anything else | [`anyhow::Error`] with `?` | [`FaultKind::Internal`] | 1 |
///
/// *As in a stage* is [`StageError::new`] with that kind, and `?`.
///
/// # Exit codes
/// | code | meaning |
/// |---|---|
/// | 0 | done |
/// | 1 | a fault of the program itself |
/// | 2 | wrong usage |
/// | 3 | bad input |
/// | 4 | reading or writing failed, or the system refused a thread, a descriptor or memory |
/// | 5 | a kernel plugin failed or was refused |
/// | 6 | the ranks were started differently: settings, plan, kernels, devices or secret differ |
/// | 7 | a rank died or left |
/// | 8 | a rank broke the protocol |
/// | 9 | something did not happen in time, such as the ranks meeting |
/// | 10 | a device, its driver or its library failed or is not there |
/// | 11 | the ranks drifted apart: bytes are not those that were sent |
/// | 12 | a GPU failed under MPS, and with it every process on it |
/// | 130, 143, 129 | interrupted by SIGINT, SIGTERM, SIGHUP |
#[derive(Debug)]
pub enum Error {
    /// The command line or the environment asks for what cannot be.
    Usage(String),
    /// A rank's fault.
    Fault(Fault),
    /// A stage, a source or a sink of this rank failed.
    Stage(StageError),
    /// A fault of a command without ranks. Its text leaves out the rank.
    Local(Fault),
    /// A signal with this number ended the job early. What was in flight is finished, and a line has said so.
    Interrupted(u8),
    /// A signal with this number ended the job at once, and what was in flight is lost.
    Aborted(Fault, u8),
    /// The system refused what every process needs: a thread, a descriptor, memory.
    Refused(String),
    /// Anything else.
    Other(anyhow::Error),
    /// The job failed, and what its ranks recorded lies where the text says.
    Recorded(Box<Error>, String),
    /// The job failed with this exit code, and another process says why.
    Told(u8),
}

impl Error {
    /// A fault of a command that is no rank.
    pub fn local(kind: FaultKind, operation: &str, detail: impl std::fmt::Display) -> Self {
        Self::Local(Fault::new(kind, Rank::new(0), operation, detail))
    }

    /// The fault, if a rank's fault ended the job.
    #[must_use]
    pub fn as_fault(&self) -> Option<&Fault> {
        match self {
            Self::Fault(fault) | Self::Aborted(fault, _) => Some(fault),
            Self::Recorded(error, _) => error.as_fault(),
            _ => None,
        }
    }

    /// This error, of a stage of `rank` with this label that could not be opened.
    pub(crate) fn of_opening(self, rank: Rank, label: &str) -> Self {
        match self {
            Self::Stage(error) => Self::Fault(error.into_fault(rank).in_stage(label, None)),
            Self::Fault(fault) if fault.stage.is_none() => fault.in_stage(label, None).into(),
            error => error,
        }
    }

    /// What a program prints: the line of the error, and below it, indented, what else its fault says.
    pub(crate) fn lines(&self) -> String {
        let below = match self {
            Self::Local(fault) => fault.below(),
            Self::Stage(error) => error.clone().into_fault(Rank::new(0)).below(),
            error => error.as_fault().map(Fault::below).unwrap_or_default(),
        };
        format!("pp: error: {self}{}", indented(&below))
    }

    /// Makes the fault that the other ranks are told.
    pub fn fault(&self, rank: Rank, operation: &str) -> Fault {
        match self {
            Self::Fault(fault) | Self::Aborted(fault, _) => fault.clone(),
            Self::Local(fault) => Fault {
                rank,
                ..fault.clone()
            },
            Self::Usage(text) => Fault::new(FaultKind::Usage, rank, operation, text),
            Self::Stage(error) => error.clone().into_fault(rank),
            Self::Refused(text) => Fault::new(FaultKind::Io, rank, operation, text),
            Self::Recorded(error, _) => error.fault(rank, operation),
            Self::Interrupted(_) | Self::Other(_) | Self::Told(_) => {
                Fault::new(FaultKind::Internal, rank, operation, self)
            }
        }
    }

    /// The exit code of the process.
    #[must_use]
    pub fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => code_of(FaultKind::Usage),
            Self::Fault(fault) | Self::Local(fault) => code_of(fault.kind),
            Self::Stage(error) => code_of(error.kind),
            Self::Interrupted(signal) | Self::Aborted(_, signal) => 128 + signal,
            Self::Refused(_) => code_of(FaultKind::Io),
            Self::Other(_) => 1,
            Self::Recorded(error, _) => error.code(),
            Self::Told(code) => *code,
        }
    }

    /// Says whether a line about the error stands on standard error already, or another process writes it.
    pub(crate) fn is_told(&self) -> bool {
        matches!(self, Self::Interrupted(_) | Self::Told(_))
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Usage(text) | Self::Refused(text) => f.write_str(text),
            Self::Fault(fault) | Self::Aborted(fault, _) => write!(f, "{fault}"),
            Self::Stage(error) => {
                let fault = error.clone().into_fault(Rank::new(0));
                write!(f, "{}: {}: {}", fault.kind, fault.operation, fault.detail)
            }
            Self::Local(fault) => {
                write!(f, "{}: {}: {}", fault.kind, fault.operation, fault.detail)
            }
            Self::Interrupted(signal) => {
                write!(f, "interrupted by {}", signal_names::name(*signal))
            }
            Self::Other(error) => write!(f, "{error:#}"),
            Self::Recorded(error, recorded) => write!(f, "{error}{recorded}"),
            Self::Told(code) => write!(f, "the job ended with exit code {code}"),
        }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

/// A pipeline that was asked for.
impl From<PipelineError> for Error {
    fn from(error: PipelineError) -> Self {
        Self::Usage(error.to_string())
    }
}

impl From<DeviceNameError> for Error {
    fn from(error: DeviceNameError) -> Self {
        Self::Usage(error.to_string())
    }
}

impl From<StageError> for Error {
    fn from(error: StageError) -> Self {
        Self::Stage(error)
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::Stage(error.into())
    }
}

impl From<anyhow::Error> for Error {
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

/// What `work` gives. A panic, of `who`, is an error; it has printed itself where it was.
pub(crate) fn caught<T>(
    who: impl Display,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let why = text.unwrap_or("it does not say why");
        Err(Error::Other(anyhow::anyhow!("{who} panicked: {why}")))
    })
}

/// The lines of a text, to stand below another line.
pub(crate) fn indented(text: &str) -> String {
    text.lines().map(|line| format!("\n    {line}")).collect()
}

/// The exit code of a kind of fault.
#[must_use]
pub fn code_of(kind: FaultKind) -> u8 {
    match kind {
        FaultKind::Usage => 2,
        FaultKind::BadInput => 3,
        FaultKind::Io => 4,
        FaultKind::Plugin => 5,
        FaultKind::HandshakeMismatch => 6,
        FaultKind::PeerDied => 7,
        FaultKind::PeerMisbehaved => 8,
        FaultKind::TimedOut => 9,
        FaultKind::Device => 10,
        FaultKind::Drift => 11,
        FaultKind::SharedDevice => 12,
        FaultKind::Interrupted => 128 + SIGINT as u8,
        _ => 1,
    }
}
