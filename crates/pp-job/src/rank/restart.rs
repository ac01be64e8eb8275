//! The front over as many links as it takes: when Phase B is lost, it meets the next one.
//!
//! Hazard: a front that waits for a Phase B that never comes, tries again what fails again, or ends
//! with the reason of the last attempt where the first one was the cause. Guarantee: every wait has
//! an end, there are no more attempts than restarts, and only what another process may do better is
//! tried again.
//!
//! Choices: who starts Phase B again is not decided here: a supervisor is told, a launcher sees it by
//! itself. The front waits where the ranks met the first time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pp_contract::{Fault, Generation};
use pp_runtime::driver::{Driven, FrontOptions, FrontRun};
use pp_runtime::stage::FrontStages;
use pp_transport::link::Link;

use super::connect::Ready;
use super::failover::{Failover, is_worth_a_restart};
use super::join::JoinError;
use super::parts::Finished;
use crate::PHASE_B;
use crate::context::Context;
use crate::end::{log_aside, say_aside};
use crate::error::Error;
use crate::reports::{Report, TargetProcess};

/// A front that is ready to run, and the process of Phase B that it is connected to.
pub(super) type Connected<L> = (Ready<L>, TargetProcess);

/// Runs the front to its end. `meet` connects the ranks for each generation.
pub(super) fn run<L, S>(
    context: &Arc<Context>,
    stages: &mut S,
    options: FrontOptions,
    mut meet: impl FnMut(Generation, Option<&Arc<Failover>>) -> Result<Connected<L>, JoinError>,
) -> Result<Finished, Error>
where
    L: Link,
    S: FrontStages<L::Tx, L::Rx>,
{
    let restarts = options.restarts;
    let within = context.config.restart_within;
    let is_supervised = context.is_supervised();
    let mut run = FrontRun::new(stages, options);
    let mut start = None;
    // Why each generation so far was lost.
    let mut causes: Vec<Fault> = Vec::new();
    loop {
        let generation = Generation::new(causes.len() as u32);
        let is_over = causes.len() as u64 >= u64::from(restarts);
        // Said at once: the next Phase B loads what it needs while the communicators end.
        let ask_for_another = |phase_b: &TargetProcess, fault: &Fault| {
            if !is_over {
                let report = Report::PeerLost(*phase_b, fault.clone());
                context.reporter.tell(report);
                let (why, generation) = (fault.clone(), generation.get());
                log_aside(move || {
                    tracing::warn!(fault = %why, generation, "Phase B is lost; another is awaited");
                });
                if !is_supervised {
                    say_that_it_is_awaited(fault, within);
                }
            }
        };
        let last = is_over.then(|| ending(&causes, restarts, is_supervised));
        let failover = (restarts > 0).then(|| Failover::new(within, last));
        let failover = failover.as_ref();
        let fault = match meet(generation, failover) {
            Ok(((link, switch, watch), phase_b)) => {
                context.attach(&switch);
                context.reporter.tell(Report::Connected);
                let start = *start.get_or_insert_with(Instant::now);
                let link = context.flight.record(link, PHASE_B, generation);
                let driven = run.drive(link, &switch);
                if let Some(failover) = failover {
                    failover.driver_is_back();
                }
                if let Ok(Driven::Lost(fault)) = &driven {
                    ask_for_another(&phase_b, fault);
                }
                watch.close();
                match driven.map_err(|fault| used_up(fault, &causes, restarts, is_supervised))? {
                    Driven::Finished => {
                        return Ok(Finished {
                            summary: run.finish(),
                            restarts: causes.len() as u32,
                            wall: start.elapsed(),
                            interrupted: switch.drain_signal(),
                        });
                    }
                    Driven::Lost(fault) => {
                        context.signals.await_replacement();
                        fault
                    }
                }
            }
            Err(missed) => {
                let (fault, phase_b) = again(missed, &causes, restarts, is_supervised)?;
                ask_for_another(&phase_b, &fault);
                fault
            }
        };
        if let Some(failover) = failover {
            if let Err(error) = failover.abort("Phase B is lost") {
                log_aside(move || tracing::error!(%error, "nothing else can be connected"));
                context.end_with(&used_up(fault, &causes, restarts, is_supervised));
            }
            if is_over && failover.has_left_behind() {
                // A thread is inside the backend's library, and what runs at exit would wait for it.
                context.end_with(&used_up(fault, &causes, restarts, is_supervised));
            }
        }
        // It is aborted by now: a link that is dropped with a dead peer would wait for it.
        run.drop_link();
        if is_over {
            return Err(used_up(fault, &causes, restarts, is_supervised).into());
        }
        causes.push(fault);
    }
}

/// For the launcher that started the ranks, and now has to start one again.
fn say_that_it_is_awaited(fault: &Fault, within: Duration) {
    let line = format!(
        "pp: Phase B is gone ({fault}); waiting up to {} s for rank 1 to be started again; the first \
         Ctrl-C finishes what is in flight once it is there, the second ends at once",
        within.as_secs_f64().ceil()
    );
    say_aside(line);
}

/// The fault of a meeting that another Phase B may make up for.
///
/// # Errors
/// The fault is not of that kind. If no Phase B came, the cause is why the one before was lost.
fn again(
    missed: JoinError,
    causes: &[Fault],
    restarts: u32,
    is_supervised: bool,
) -> Result<(Fault, TargetProcess), Error> {
    let nobody_came = missed.is_timeout;
    let Error::Fault(fault) = missed.error else {
        return Err(missed.error);
    };
    if !nobody_came && is_worth_a_restart(&fault) {
        return Ok((fault, missed.phase_b));
    }
    match causes.last() {
        // The process that was started for it is stopped, or does not come up: it can be ended.
        Some(cause) if nobody_came && is_supervised => Ok((cause.clone(), TargetProcess::Any)),
        Some(cause) if nobody_came => {
            let what = format!("{}; and no other came: {}", cause.detail, fault.detail);
            let operation = cause.operation.as_str();
            let cause = Fault::new(cause.kind, cause.rank, operation, what);
            Err(used_up(cause, causes, restarts, is_supervised).into())
        }
        _ => Err(used_up(fault, causes, restarts, is_supervised).into()),
    }
}

/// The fault that ends the run, and how many restarts there were before it.
fn used_up(fault: Fault, causes: &[Fault], restarts: u32, is_supervised: bool) -> Fault {
    let ending = ending(causes, restarts, is_supervised);
    if ending.is_empty() {
        return fault;
    }
    let detail = format!("{}{ending}", fault.detail);
    Fault::new(fault.kind, fault.rank, fault.operation.as_str(), detail)
}

/// How many restarts there were, if any; a supervisor says that by itself.
fn ending(causes: &[Fault], restarts: u32, is_supervised: bool) -> String {
    let used = causes.len();
    if used == 0 || is_supervised {
        return String::new();
    }
    format!("; {used} of {restarts} restarts were used")
}
