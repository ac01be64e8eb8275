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

use super::report::Finished;
use crate::exit::{Failure, is_worth_a_restart, log_aside, say_aside};
use crate::job::edges::Ready;
use crate::job::reports::{self, Meant};
use crate::job::seat::{Unmet, end_with};
use crate::job::survival::Survival;
use crate::job::{signals, supervise};

/// Two ranks that are connected.
pub(super) struct Met<L> {
    pub(super) ready: Ready<L>,
    pub(super) phase_b: Meant,
}

/// Two ranks that did not come to be connected.
pub(super) struct Missed {
    pub(super) unmet: Unmet,
    pub(super) phase_b: Meant,
}

impl From<Unmet> for Missed {
    fn from(unmet: Unmet) -> Self {
        Self {
            unmet,
            phase_b: Meant::Unknown,
        }
    }
}

/// Runs the front to its end. `meet` connects the ranks for each generation, `dress` puts around
/// the link what belongs around it.
pub(super) fn run<L, D, S>(
    stages: &mut S,
    options: FrontOptions,
    within: Duration,
    mut meet: impl FnMut(Generation, Option<&Arc<Survival>>) -> Result<Met<L>, Missed>,
    dress: impl Fn(L, Generation) -> D,
) -> Result<Finished, Failure>
where
    D: Link,
    S: FrontStages<D::Tx, D::Rx>,
{
    let restarts = options.restarts;
    let mut run = FrontRun::new(stages, options);
    let mut start = None;
    // Why each generation so far was lost.
    let mut causes: Vec<Fault> = Vec::new();
    loop {
        let generation = Generation::new(causes.len() as u32);
        let is_over = causes.len() as u64 >= u64::from(restarts);
        // Said at once: the next Phase B loads what it needs while the communicators end.
        let ask_for_another = |phase_b: &Meant, fault: &Fault| {
            if !is_over {
                reports::lost(*phase_b, fault);
                let (why, generation) = (fault.clone(), generation.get());
                log_aside(move || {
                    tracing::warn!(fault = %why, generation, "Phase B is lost; another is awaited");
                });
                if !supervise::is_supervised() {
                    say_that_it_is_awaited(fault, within);
                }
            }
        };
        let last = is_over.then(|| ending(&causes, restarts));
        let survival = (restarts > 0).then(|| Survival::new(within, last));
        let survival = survival.as_ref();
        let fault = match meet(generation, survival) {
            Ok(Met { ready, phase_b }) => {
                let Ready {
                    link,
                    switch,
                    watch,
                } = ready;
                signals::attach(&switch);
                reports::met();
                let start = *start.get_or_insert_with(Instant::now);
                let driven = run.drive(dress(link, generation), &switch);
                if let Some(survival) = survival {
                    survival.driver_is_back();
                }
                if let Ok(Driven::Lost(fault)) = &driven {
                    ask_for_another(&phase_b, fault);
                }
                watch.close();
                match driven.map_err(|fault| used_up(fault, &causes, restarts))? {
                    Driven::Finished => {
                        return Ok(Finished {
                            summary: run.finish(),
                            restarts: causes.len() as u32,
                            wall: start.elapsed(),
                            interrupted: switch.drain_signal(),
                        });
                    }
                    Driven::Lost(fault) => {
                        signals::between();
                        fault
                    }
                }
            }
            Err(missed) => {
                let (fault, phase_b) = again(missed, &causes, restarts)?;
                ask_for_another(&phase_b, &fault);
                fault
            }
        };
        if let Some(survival) = survival {
            if let Err(error) = survival.abort("Phase B is lost") {
                log_aside(move || tracing::error!(%error, "nothing else can be connected"));
                end_with(&used_up(fault, &causes, restarts));
            }
            if is_over && survival.has_left_behind() {
                // A thread is inside NCCL, and what runs at exit would wait for it.
                end_with(&used_up(fault, &causes, restarts));
            }
        }
        // Its communicators are gone by now: a link that is dropped with a dead peer would wait for it.
        run.drop_link();
        if is_over {
            return Err(used_up(fault, &causes, restarts).into());
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
/// It is none of those. If nobody came, the cause is why the one before was lost.
fn again(missed: Missed, causes: &[Fault], restarts: u32) -> Result<(Fault, Meant), Failure> {
    let Missed { unmet, phase_b } = missed;
    let nobody_came = unmet.is_timeout;
    let Failure::Fault(fault) = unmet.failure else {
        return Err(unmet.failure);
    };
    if !nobody_came && is_worth_a_restart(&fault) {
        return Ok((fault, phase_b));
    }
    match causes.last() {
        // Whoever was started for it is stopped, or does not come up: that can be ended.
        Some(cause) if nobody_came && supervise::is_supervised() => Ok((cause.clone(), Meant::Any)),
        Some(cause) if nobody_came => {
            let what = format!("{}; and no other came: {}", cause.detail, fault.detail);
            let operation = cause.operation.as_str();
            let cause = Fault::new(cause.kind, cause.rank, operation, what);
            Err(used_up(cause, causes, restarts).into())
        }
        _ => Err(used_up(fault, causes, restarts).into()),
    }
}

/// The fault that ends the run, and how many restarts there were before it.
fn used_up(fault: Fault, causes: &[Fault], restarts: u32) -> Fault {
    let ending = ending(causes, restarts);
    if ending.is_empty() {
        return fault;
    }
    let detail = format!("{}{ending}", fault.detail);
    Fault::new(fault.kind, fault.rank, fault.operation.as_str(), detail)
}

/// How many restarts there were, if any; a supervisor says that by itself.
fn ending(causes: &[Fault], restarts: u32) -> String {
    let used = causes.len();
    if used == 0 || supervise::is_supervised() {
        return String::new();
    }
    format!("; {used} of {restarts} restarts were used")
}
