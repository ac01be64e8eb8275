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
use pp_contract::{Rank, WorldSize, with_source};
use pp_runtime::progress::Limits;
use pp_runtime::report::Count;
use pp_transport::launch::{Launch, LaunchError};

use crate::exit::{Failure, log_aside};
use crate::flight;

/// Ranks of the shipped pipeline: the front, and Phase B.
pub(crate) const WORLD: u32 = 2;
/// The rank that reads, encodes, decodes and writes.
pub(crate) const FRONT: Rank = Rank::new(0);
/// The rank that runs Phase B.
pub(crate) const PHASE_B: Rank = Rank::new(1);

/// The longest time that a setting may name, in milliseconds: nothing is waited for without end.
const LONGEST_MS: u64 = 3_600_000;
/// Time for a call of the transport, which issues work and returns.
const ISSUED_WITHIN: Duration = Duration::from_secs(10);
/// Time a driver has to end after a fault before its process is ended under it.
pub(crate) const GRACE: Duration = Duration::from_millis(200);

/// The place of this process in a job that somebody else started, if any.
pub(crate) fn launched() -> Result<Option<Launch>, Failure> {
    // First, since what else is missing does not matter in a world of another size.
    if let Some(world) = world()?.filter(|world| *world != WORLD) {
        return Err(Failure::Usage(format!(
            "the launcher started {}, and the pipeline encode@0 → phase_b@1 → decode@0 has {WORLD}; start \
             {WORLD}, or unset RANK and WORLD_SIZE (SLURM_PROCID, OMPI_COMM_WORLD_RANK) to let pp start its own ranks",
            Count(world.into(), "rank")
        )));
    }
    Launch::from_env(|name| std::env::var(name).ok()).map_err(refused)
}

/// The number of ranks that somebody else started, if any.
pub(crate) fn world() -> Result<Option<u32>, Failure> {
    let world = Launch::world_from_env(|name| std::env::var(name).ok()).map_err(refused)?;
    Ok(world.map(WorldSize::get))
}

/// Names no rank: which one this is may be what is wrong.
fn refused(error: LaunchError) -> Failure {
    let why = with_source(&error);
    Failure::Usage(format!("the launcher's environment: {why}"))
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
    meet_within()?;
    let Some(launch) = launched()? else {
        let done = supervise::supervise(restarts, within);
        log_aside(|| tracing::info!("the job ends"));
        return done;
    };
    log_aside(|| tracing::info!(pid = std::process::id(), "the rank starts"));
    reports::prepare_out_of_memory(launch.rank());
    reports::live()?;
    flight::open(&launch)?;
    signals::start().context("cannot handle signals")?;
    reports::hears();
    let done = if launch.rank() == FRONT {
        front(&launch).inspect(|()| reports::finished())
    } else {
        phase_b(&launch)
    };
    log_aside(|| tracing::info!("the rank ends"));
    done.and_then(unless_interrupted)
}

/// Starts a thread and waits until it works. A thread takes a lock of the C library's loader when it begins: without the
/// wait one that comes to run late would stand still while a library is loaded, however long that takes.
fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let (begins, begun) = crossbeam_channel::bounded(1);
    let thread = std::thread::Builder::new().name(name.into());
    thread.spawn(move || {
        let _ = begins.send(());
        work();
    })?;
    // An error is a thread that has ended already.
    let _ = begun.recv();
    Ok(())
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

/// How long the ranks of a launcher wait for each other, from `PP_MEET_WITHIN_MS`.
pub(crate) fn meet_within() -> Result<Duration, Failure> {
    within("PP_MEET_WITHIN_MS")
}

/// How long the front waits for a Phase B that was started again, from `PP_RESTART_WITHIN_MS`.
pub(crate) fn rejoin_within() -> Result<Duration, Failure> {
    within("PP_RESTART_WITHIN_MS")
}

/// Time for what a restart takes besides the start of the other rank, from `PP_RESTART_WITHIN_MS`.
pub(crate) fn restart_within() -> Result<Duration, Failure> {
    let within = milliseconds("PP_RESTART_WITHIN_MS", 60_000, 100, false)?;
    Ok(within.expect("more than none"))
}

/// How long a rank waits for another. A supervisor misses ranks that give it no sign of life, so that those it started
/// are waited for while they load, unless the variable says otherwise.
fn within(name: &str) -> Result<Duration, Failure> {
    let is_watched = supervise::is_supervised() && heartbeat()?.is_some();
    let default = if is_watched { LONGEST_MS } else { 60_000 };
    let within = milliseconds(name, default, 100, false)?;
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
            .filter(|ms| (takes_none && *ms == 0) || (least..=LONGEST_MS).contains(ms))
            .ok_or_else(|| {
                Failure::Usage(format!(
                    "{name} is {text:?}; it takes milliseconds from {least} to {LONGEST_MS}{none}"
                ))
            })?,
    };
    Ok((ms > 0).then(|| Duration::from_millis(ms)))
}
