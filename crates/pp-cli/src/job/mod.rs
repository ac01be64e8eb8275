//! A job: how its ranks are started, meet, and end together.

pub(crate) mod edges;
mod missed;
pub(crate) mod reports;
pub(crate) mod seat;
mod set_up;
pub(crate) mod signals;
pub(crate) mod supervise;
pub(crate) mod survival;
mod verdict;

use std::time::Duration;

use anyhow::Context;
use pp_contract::{Fault, FaultKind, Rank};
use pp_runtime::progress::Limits;
use pp_transport::launch::Launch;

use crate::exit::Failure;
use crate::flight;

/// Ranks of the shipped pipeline: the front, and Phase B.
pub(crate) const WORLD: u32 = 2;
/// The rank that reads, encodes, decodes and writes.
pub(crate) const FRONT: Rank = Rank::new(0);
/// The rank that runs Phase B.
pub(crate) const PHASE_B: Rank = Rank::new(1);

/// Time for a call of the transport, which issues work and returns.
const ISSUED_WITHIN: Duration = Duration::from_secs(10);
/// Time a driver has to end after a fault before its process is ended under it.
pub(crate) const GRACE: Duration = Duration::from_millis(200);

/// The place of this process in a job that somebody else started, if any.
pub(crate) fn launched() -> Result<Option<Launch>, Failure> {
    let launch = Launch::from_env(|name| std::env::var(name).ok()).map_err(|error| {
        let error: &dyn std::error::Error = &error;
        Failure::Fault(Fault::new(
            FaultKind::HandshakeMismatch,
            FRONT,
            "read launcher's environment",
            pp_runtime::driver::with_source(error),
        ))
    })?;
    if let Some(launch) = &launch
        && launch.world_size().get() != WORLD
    {
        return Err(Failure::Usage(format!(
            "the launcher started {} ranks, the pipeline encode@0 → phase_b@1 → decode@0 has {WORLD}; \
             start {WORLD}",
            launch.world_size()
        )));
    }
    Ok(launch)
}

/// Runs the job: as its supervisor when nobody else started the ranks, else as the rank that this
/// process is.
pub(crate) fn run(
    front: impl FnOnce(&Launch) -> Result<(), Failure>,
    phase_b: impl FnOnce(&Launch) -> Result<(), Failure>,
) -> Result<(), Failure> {
    run_with_restarts(0, front, phase_b)
}

/// The same, for a front that can do with another Phase B so many times.
pub(crate) fn run_with_restarts(
    restarts: u32,
    front: impl FnOnce(&Launch) -> Result<(), Failure>,
    phase_b: impl FnOnce(&Launch) -> Result<(), Failure>,
) -> Result<(), Failure> {
    // First, so that a rank whose supervisor is gone says nothing.
    supervise::bind_to_supervisor()?;
    // Before there are two ranks that would say the same.
    heartbeat()?;
    limits()?;
    flight::operations()?;
    let within = restart_within()?;
    let Some(launch) = launched()? else {
        return supervise::supervise(restarts, within);
    };
    reports::prepare_out_of_memory(launch.rank());
    reports::live()?;
    flight::open(&launch)?;
    signals::start().context("cannot handle signals")?;
    reports::hears();
    let done = if launch.rank() == FRONT {
        front(&launch)
    } else {
        phase_b(&launch)
    };
    done.and_then(unless_interrupted)
}

/// The end of a rank that has done its work, or as much of it as a signal allowed.
///
/// # Errors
/// [`Failure::Interrupted`] where a signal ended the job early, at whichever rank it came.
pub(crate) fn unless_interrupted((): ()) -> Result<(), Failure> {
    match signals::interrupted_by() {
        Some(signal) => Err(Failure::Interrupted(signal)),
        None => Ok(()),
    }
}

/// The time between heartbeats, from `PP_HEARTBEAT_MS`; 0 switches them off.
pub(crate) fn heartbeat() -> Result<Option<Duration>, Failure> {
    milliseconds("PP_HEARTBEAT_MS", 250, 20, true)
}

/// How long the front waits for a Phase B that was started again, from `PP_RESTART_WITHIN_MS`.
pub(crate) fn restart_within() -> Result<Duration, Failure> {
    // Nothing is waited for without end.
    let within = milliseconds("PP_RESTART_WITHIN_MS", 60_000, 100, false)?;
    Ok(within.expect("more than none"))
}

/// How long one operation of a driver may last, from `PP_STUCK_MS`; 0 is for ever.
pub(crate) fn limits() -> Result<Option<Limits>, Failure> {
    let stage = milliseconds("PP_STUCK_MS", 120_000, 1000, true)?;
    Ok(stage.map(|stage| Limits {
        stage,
        transport: stage.min(ISSUED_WITHIN),
    }))
}

fn milliseconds(
    name: &str,
    default: u64,
    least: u64,
    takes_none: bool,
) -> Result<Option<Duration>, Failure> {
    let none = if takes_none { ", or 0 for none" } else { "" };
    let ms = match std::env::var(name) {
        Err(_) => default,
        Ok(text) => text
            .parse::<u64>()
            .ok()
            .filter(|ms| (takes_none && *ms == 0) || (least..=3_600_000).contains(ms))
            .ok_or_else(|| {
                Failure::Usage(format!(
                    "{name} is {text:?}; it takes milliseconds from {least} to 3600000{none}"
                ))
            })?,
    };
    Ok((ms > 0).then(|| Duration::from_millis(ms)))
}
