//! The settings of a job's processes, read once.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use pp_contract::{DeviceName, Rank, WorldSize, with_source};
use pp_runtime::progress::StuckLimits;
use pp_transport::flight::{DEFAULT_OPERATIONS, MAX_OPERATIONS};
use pp_transport::launch::{Launch, LaunchError, LocalJob};

use crate::error::Error;

/// The rank where the others meet. It has the source, and decides whether a rank that is lost is started again.
pub const RANK_0: Rank = Rank::new(0);

/// The variable that gives a rank the number of its supervisor's process.
pub const SUPERVISOR: &str = "PP_SUPERVISOR_PID";
/// The variable that gives a rank the pipe for its reports.
pub const REPORT_FD: &str = "PP_REPORT_FD";
/// The variable that gives rank 0 the pipe on which its supervisor tells of losses.
pub const LOSSES_FD: &str = "PP_LOSSES_FD";
/// The variable that gives a rank the number of its job ([`crate::Job::number`]).
pub const JOB: &str = "PP_JOB_NUMBER";
/// The devices of all ranks, as the supervisor has them.
pub const DEVICES: &str = "PP_RANK_DEVICES";
/// The longest time that a setting may name, in milliseconds: no wait is without end.
const LONGEST_MS: u64 = 3_600_000;
/// How long the ranks wait for each other, and rank 0 for a rank that is started again, in milliseconds.
const WAIT_MS: u64 = pp_transport::times::MEET_WITHIN.as_millis() as u64;

/// Holds the settings of a job from the environment. A program reads them once, in `main`, and hands
/// them to [`crate::Job`].
#[derive(Clone, Debug)]
pub struct Config {
    /// This process's place among the ranks that a launcher or a supervisor started; `None` where this process is to
    /// start the ranks itself.
    pub launch: Option<Launch>,
    /// The time between heartbeats; `None` for none.
    pub heartbeat: Option<Duration>,
    /// How long one operation of a driver may last; `None` for no limit.
    pub limits: Option<StuckLimits>,
    /// How long the ranks wait for each other.
    pub meet_within: Duration,
    /// How long rank 0 waits for a rank that is started again.
    pub rejoin_within: Duration,
    /// Time for what a restart takes besides the start of the other rank.
    pub restart_within: Duration,
    /// Operations that a rank keeps for its flight recording; 0 records nothing.
    pub flight_operations: usize,
    /// The folder for flight recordings; `None` for one of this user's alone.
    pub flight_folder: Option<PathBuf>,
    /// The runtime folder of this user, in which the socket of a job lies; `None` for one in the folder for temporary files.
    pub runtime_folder: Option<PathBuf>,
    /// The devices that the supervisor of this rank gave to the ranks; none where it has none, and without a supervisor.
    pub devices: Vec<DeviceName>,
    /// The supervisor that started this process, if one did.
    pub(crate) supervisor: Option<Supervisor>,
}

/// The supervisor that started this process.
#[derive(Clone, Debug)]
pub(crate) struct Supervisor {
    pub(crate) pid: String,
    /// Which job of the program this rank is of.
    pub(crate) job: u32,
    /// The pipe that takes reports.
    pub(crate) report_fd: Option<String>,
    /// The pipe on which rank 0 is told of losses.
    pub(crate) losses_fd: Option<String>,
}

impl Supervisor {
    /// Says whether this process is the supervisor.
    pub(crate) fn is_here(&self) -> bool {
        self.pid == std::process::id().to_string()
    }
}

impl Config {
    /// Reads the settings; `env` looks a variable up: `|name| std::env::var_os(name)` in a program.
    ///
    /// # Errors
    /// [`Error::Usage`] names the variable that cannot be read and what it takes.
    pub fn from_env(env: impl Fn(&str) -> Option<OsString>) -> Result<Self, Error> {
        let text = |name: &str| env(name).and_then(|value| value.into_string().ok());
        Ok(Self {
            launch: launched(&text)?,
            ..Self::alone(&env)?
        })
    }

    /// Reads the settings of a job of one process, whatever a launcher says.
    ///
    /// # Errors
    /// As [`Config::from_env`].
    pub fn alone(env: impl Fn(&str) -> Option<OsString>) -> Result<Self, Error> {
        let text = |name: &str| env(name).and_then(|value| value.into_string().ok());
        let job = text(JOB).and_then(|number| number.parse().ok());
        let supervisor = text(SUPERVISOR).map(|pid| Supervisor {
            pid,
            job: job.unwrap_or(0),
            report_fd: text(REPORT_FD),
            losses_fd: text(LOSSES_FD),
        });
        let devices = text(DEVICES).filter(|text| supervisor.is_some() && !text.is_empty());
        let devices = devices.iter().flat_map(|text| text.split(','));
        let devices: Result<_, _> = devices.map(str::parse).collect();
        let heartbeat = milliseconds(&text, "PP_HEARTBEAT_MS", 250, 20, true)?;
        let stage = stuck_after(&env)?;
        // A supervisor notices ranks that give no sign of life, so a rank that it started waits for one that loads.
        let is_watched = supervisor.is_some() && heartbeat.is_some();
        let longest = if is_watched { LONGEST_MS } else { WAIT_MS };
        Ok(Self {
            heartbeat,
            limits: stage.map(|stage| StuckLimits {
                stage,
                transport: stage.min(crate::times::ISSUED_WITHIN),
                first: stage,
            }),
            meet_within: within(&text, "PP_MEET_WITHIN_MS", longest)?,
            rejoin_within: within(&text, "PP_RESTART_WITHIN_MS", longest)?,
            restart_within: within(&text, "PP_RESTART_WITHIN_MS", WAIT_MS)?,
            flight_operations: operations(&text)?,
            flight_folder: env("PP_FLIGHT_DIR")
                .filter(|folder| !folder.is_empty())
                .map(PathBuf::from),
            runtime_folder: env("XDG_RUNTIME_DIR")
                .map(PathBuf::from)
                .filter(|folder| folder.is_absolute()),
            devices: devices.map_err(|error| Error::Usage(format!("{DEVICES}: {error}")))?,
            launch: None,
            supervisor,
        })
    }

    /// Says whether a supervisor started this process.
    #[must_use]
    pub fn is_supervised(&self) -> bool {
        self.supervisor.is_some()
    }

    /// The rank of this process, where it has one.
    #[must_use]
    pub fn rank(&self) -> Option<Rank> {
        self.launch.as_ref().map(Launch::rank)
    }
}

/// How long a stage may take before it counts as stuck; `env` as in [`Config::from_env`].
///
/// # Errors
/// [`Error::Usage`]: `PP_STUCK_MS` cannot be read.
pub fn stuck_after(env: impl Fn(&str) -> Option<OsString>) -> Result<Option<Duration>, Error> {
    let text = |name: &str| env(name).and_then(|value| value.into_string().ok());
    milliseconds(&text, "PP_STUCK_MS", 120_000, 1000, true)
}

/// The number of ranks that a launcher started, if one did; `env` as in [`Config::from_env`].
///
/// # Errors
/// [`Error::Usage`]: the launcher's variables cannot be read.
pub fn world(env: impl Fn(&str) -> Option<OsString>) -> Result<Option<u32>, Error> {
    let text = |name: &str| env(name).and_then(|value| value.into_string().ok());
    let world = Launch::world_from_env(text).map_err(refused)?;
    Ok(world.map(WorldSize::get))
}

fn launched(text: &impl Fn(&str) -> Option<String>) -> Result<Option<Launch>, Error> {
    let world = Launch::world_from_env(text).map_err(refused)?;
    if let Some(one) = world.filter(|world| world.get() == 1) {
        // It meets nobody, so it needs no address and no secret; the job judges whether one rank is enough.
        let launch = LocalJob::new(one).launch(RANK_0);
        return Ok(Some(launch.map_err(anyhow::Error::new)?));
    }
    Launch::from_env(text).map_err(refused)
}

/// Names no rank: which one this is may be what is wrong.
fn refused(error: LaunchError) -> Error {
    let why = with_source(&error);
    Error::Usage(format!("the launcher's environment: {why}"))
}

fn operations(text: &impl Fn(&str) -> Option<String>) -> Result<usize, Error> {
    let Some(text) = text("PP_FLIGHT_OPS") else {
        return Ok(DEFAULT_OPERATIONS);
    };
    let number = text.parse::<usize>().ok();
    number.filter(|n| *n <= MAX_OPERATIONS).ok_or_else(|| {
        Error::Usage(format!(
            "PP_FLIGHT_OPS is {text:?}; it takes how many operations to keep, up to \
             {MAX_OPERATIONS}, or 0 for none"
        ))
    })
}

fn within(
    text: &impl Fn(&str) -> Option<String>,
    name: &str,
    default: u64,
) -> Result<Duration, Error> {
    Ok(milliseconds(text, name, default, 100, false)?.unwrap_or_default())
}

fn milliseconds(
    text: &impl Fn(&str) -> Option<String>,
    name: &str,
    default: u64,
    least: u64,
    takes_none: bool,
) -> Result<Option<Duration>, Error> {
    let none = if takes_none { ", or 0 for none" } else { "" };
    let ms = match text(name) {
        None => default,
        Some(text) => text
            .parse::<u64>()
            .ok()
            .filter(|ms| (takes_none && *ms == 0) || (least..=LONGEST_MS).contains(ms))
            .ok_or_else(|| {
                Error::Usage(format!(
                    "{name} is {text:?}; it takes milliseconds from {least} to {LONGEST_MS}{none}"
                ))
            })?,
    };
    Ok((ms > 0).then(|| Duration::from_millis(ms)))
}
/// The name of this machine.
#[must_use]
pub fn host_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}
