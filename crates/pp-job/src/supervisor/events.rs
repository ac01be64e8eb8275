//! What a supervisor is told, and what it is to do about it.

use std::process::ExitStatus;
use std::time::Duration;

use pp_contract::{Fault, Rank, WorldSize};
use signal_hook::consts::SIGUSR1;

use crate::reports::Reported;

/// What holds for one job.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) world: WorldSize,
    /// How often a rank may be started again, over all ranks.
    pub(super) restarts: u32,
    /// The ranks that may be; rank 0 is not among them, whatever stands here.
    pub(super) may_restart: Vec<Rank>,
    /// How long rank 0 may take to say what it makes of the end of another rank.
    pub(super) within: Duration,
    /// Each rank runs a loop of its own over the job, and goes on behind it.
    pub(super) may_go_on: bool,
    /// Ranks give signs of life.
    pub(super) watches: bool,
    /// Time that a process may take before its first sign, besides that of any other.
    pub(super) loads_within: Duration,
}

/// What has happened.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// This process of a rank runs.
    Started(Rank, u32),
    /// The process of this rank that ran has ended, and all that it reported was told before. Whether it was killed here
    /// while it lived.
    Ended(Rank, Option<ExitStatus>, bool),
    Reported(Reported),
    /// No report comes any more, and a rank still runs: something else wrote into the pipe.
    ReportsOver,
    /// A signal that asks for an end.
    Signal(u8),
    /// All ranks are to say what they do.
    Asked,
    /// Time has passed.
    Tick,
}

impl Event {
    /// This signal came.
    pub(super) fn of_signal(signal: i32) -> Self {
        match signal {
            SIGUSR1 => Self::Asked,
            signal => Self::Signal(signal as u8),
        }
    }
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Start(Rank),
    /// End this process at once.
    Kill(u32),
    /// Pass a signal that asks for an end on to this process.
    Pass(u32, u8),
    /// Have this process say what it does.
    Ask(u32),
    /// Tell rank 0 why a rank is gone that is started again.
    TellLoss(Fault),
    /// Tell the user.
    Say(String),
    /// Tell the user that the job drains because of this signal.
    SayDrain(u8),
    Log(String),
    /// A rank could not write its flight recording, because of this.
    NotRecorded(String),
}
