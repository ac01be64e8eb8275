//! A rank over as many connections as it takes: when a rank is lost that may be started again, all others meet again.
//!
//! Hazard: ranks that wait for one that never comes, try again what fails again, or end with the reason of the last
//! attempt where the first one was the cause. Guarantee: every wait has an end, there are no more attempts than restarts,
//! and only what another process may do better is tried again.
//!
//! Choices: a rank that survives keeps its process, its stages and, at the source, what the sink has not accepted; all
//! edges are made anew, so that a loss looks the same to every rank, also while another is being replaced. Who starts
//! the rank again is not decided here: a supervisor is told by rank 0, a launcher sees it by itself. The ranks meet where
//! they met the first time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Generation, Pipeline, Plan, Rank};
use pp_runtime::driver::{Driven, RankRun};
use pp_runtime::stage::Source;
use pp_runtime::switch::Switch;
use pp_runtime::watch::Watch;
use pp_transport::backend::{Ahead, Backend, EdgeEnd, End, leave_ends_to_process};
use pp_transport::bell::Bell;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::connect::Ready;
use super::failover::{Aborts, Failover};
use super::join::{Briefing, JoinError, JoinedRank, Profile, join};
use crate::RANK_0;
use crate::end::{ends_with_job, log_aside, say_aside};
use crate::error::{Error, caught};
use crate::job::ThisRank;
use crate::reports::{Chunks, Report, TargetProcess};

/// What a rank needs to meet the others.
pub(super) struct Meeting<'a, T> {
    pub(super) profile: &'a Profile,
    pub(super) briefing: &'a Briefing<T>,
    pub(super) edges: &'a [(Rank, Vec<EdgeEnd>)],
    pub(super) bell: &'a Bell,
    /// The first meeting, where it went well, and which attempt to connect all ranks it was.
    pub(super) first: Option<JoinedRank>,
    pub(super) generation: u32,
    /// By rank: its payloads lie on a device.
    pub(super) on_device: Vec<bool>,
    /// What was made for the edges of the next generation.
    pub(super) ahead: Vec<(Rank, Ahead)>,
}

impl<T> Meeting<'_, T> {
    /// Begins to make the memory of the edges between host memory and another rank, as far as this rank makes it.
    fn make_ahead(&mut self, own: Rank) {
        // After a meeting that failed it is there, and before the first one nothing is known.
        if !self.ahead.is_empty() || self.on_device.is_empty() {
            return;
        }
        let is_on_device = |rank: Rank| self.on_device[rank.get() as usize];
        let makes = |(peer, _): &&(Rank, Vec<EdgeEnd>)| {
            own < *peer && !(is_on_device(own) && is_on_device(*peer))
        };
        let making = self.edges.iter().filter(makes);
        let making = making.filter_map(|(peer, ends)| Some((*peer, Ahead::begin(ends)?)));
        self.ahead = making.collect();
    }
}

/// A rank that is connected, and the processes of the others on this host.
type Met<B> = (Ready<B>, Generation, Vec<(Rank, u32)>);

/// How a rank came to its end.
pub(super) struct Ended {
    pub(super) restarts: u32,
    pub(super) wall: std::time::Duration,
    pub(super) interrupted: Option<u8>,
}

/// Runs a rank to its end.
pub(super) fn run<B, S, T>(
    this: &ThisRank<'_>,
    run: &mut RankRun<'_, B, S>,
    backend: &mut B,
    mut meeting: Meeting<'_, T>,
) -> Result<Ended, Error>
where
    B: Backend,
    S: Source<B::Tx>,
    T: Serialize + DeserializeOwned,
{
    let (context, restarts) = (this.context, this.job.restarts);
    let is_supervised = context.is_supervised();
    let mut start = None;
    // Why each connection so far was lost.
    let mut causes: Vec<Fault> = Vec::new();
    loop {
        let is_over = causes.len() as u64 >= u64::from(restarts);
        let ask = |process: TargetProcess, fault: &Fault, chunks: Option<Chunks>| {
            if !is_over {
                ask_for_another(this, process, fault, chunks);
            }
        };
        let last = is_over.then(|| ending(&causes, restarts, is_supervised));
        let failover = (restarts > 0).then(|| Failover::new(this, last));
        let met =
            meet::<S::Plan, B, T>(this, backend, &mut meeting, causes.len(), failover.as_ref());
        let fault = match met {
            Ok((ready, generation, pids)) => {
                let is_first = start.is_none();
                let (switch, watch, aborts) =
                    begin(this, run, ready, (generation, causes.last(), is_first));
                let start = *start.get_or_insert_with(Instant::now);
                let (driven, panic) = drive(this, run, &switch, failover.as_deref());
                if let Ok(Driven::Lost(fault)) = &driven {
                    let pid = pids.iter().find(|(rank, _)| *rank == fault.rank);
                    let process =
                        pid.map_or(TargetProcess::Unknown, |(_, pid)| TargetProcess::This(*pid));
                    let chunks = run.in_flight();
                    let chunks = chunks.map(|(first, last)| (first.get(), last.get()));
                    ask(process, fault, chunks);
                }
                watch.close();
                if driven.is_err() {
                    let is_under_mps = backend.capabilities().is_under_mps;
                    abort_failed(this, &aborts, is_under_mps);
                }
                if let Some(panic) = panic {
                    return Err(panic);
                }
                match driven.map_err(|fault| used_up(fault, &causes, restarts, is_supervised))? {
                    Driven::Finished => {
                        return Ok(Ended {
                            restarts: causes.len() as u32,
                            wall: start.elapsed(),
                            interrupted: switch.drain_signal(),
                        });
                    }
                    Driven::Lost(fault) => {
                        context.signals.await_replacement();
                        context.end_if_terminated();
                        fault
                    }
                }
            }
            Err(missed) => {
                let (fault, process) = again(this, missed, &causes)?;
                ask(process, &fault, None);
                fault
            }
        };
        if let Some(failover) = &failover {
            if let Err(error) = failover.abort("a rank is lost") {
                log_aside(move || tracing::error!(%error, "nothing else can be connected"));
                context.end_with(&used_up(fault, &causes, restarts, is_supervised));
            }
            if is_over && failover.has_left_behind() {
                // A thread is inside the backend's library, and what runs at exit would wait for it.
                context.end_with(&used_up(fault, &causes, restarts, is_supervised));
            }
        }
        // They are aborted by now: an edge that is dropped with a dead peer would wait for it.
        drop::<Vec<End<B>>>(run.detach());
        if is_over {
            return Err(used_up(fault, &causes, restarts, is_supervised).into());
        }
        meeting.make_ahead(this.rank());
        if let Some(viewer) = &context.viewer {
            viewer.lost(&fault);
        }
        causes.push(fault);
    }
}

/// Aborts edges and groups because the job failed, and waits until they have ended, unless the process ends with the job. Under
/// MPS it waits: the work of a process that ends may harm the others on its GPU.
fn abort_failed(this: &ThisRank<'_>, aborts: &Aborts, is_under_mps: bool) {
    let has_caller = this.context.caller.is_some();
    leave_ends_to_process(ends_with_job() && !has_caller && !is_under_mps);
    // Whether one failed, where that was waited for, is told by its drop.
    if let Err(error) = aborts.abort("the job failed") {
        log_aside(move || tracing::debug!(%error, "the job failed"));
    }
}

/// Asks for another process of a rank that is lost. That is said at once: the next process loads what it needs while the
/// communicators end.
fn ask_for_another(
    this: &ThisRank<'_>,
    process: TargetProcess,
    fault: &Fault,
    chunks: Option<Chunks>,
) {
    let why = fault.clone();
    log_aside(move || tracing::warn!(fault = %why, "a rank is lost; another is awaited"));
    if this.rank() != RANK_0 {
        return;
    }
    let report = Report::PeerLost(fault.rank, process, fault.clone(), chunks);
    this.context.reporter.tell(report);
    if !this.is_supervised() {
        say_that_it_is_awaited(fault, this.context.config.restart_within);
    }
}

/// Gives a run the edges and groups of a generation. `lost` is the loss that it makes up for.
fn begin<B: Backend, S: Source<B::Tx>>(
    this: &ThisRank<'_>,
    run: &mut RankRun<'_, B, S>,
    ready: Ready<B>,
    (generation, lost, is_first): (Generation, Option<&Fault>, bool),
) -> (Switch, Watch, Arc<Aborts>) {
    let context = this.context;
    if let Some(why) = lost.and_then(|lost| context.reporter.why_lost(lost.rank)) {
        if let Some(viewer) = &context.viewer {
            viewer.explain(&why);
        }
        run.explain(why);
    }
    context.attach(&ready.switch);
    if this.rank() == RANK_0 {
        context.reporter.tell(Report::Connected);
        if this.job.restarts > 0 && is_first {
            say_which_may_restart(&this.job.pipeline, this.job.restarts);
        }
    }
    run.begin_attempt(generation.get() as u16);
    for (number, end) in ready.ends {
        run.attach(number as usize, end);
    }
    for (at, group) in ready.groups {
        run.attach_group(at, group);
    }
    (ready.switch, ready.watch, ready.aborts)
}

/// Drives a rank until the run ends or a rank is lost. A panic is a fault, and is given, too.
fn drive<B: Backend, S: Source<B::Tx>>(
    this: &ThisRank<'_>,
    run: &mut RankRun<'_, B, S>,
    switch: &Switch,
    failover: Option<&Failover>,
) -> (Result<Driven, Fault>, Option<Error>) {
    let who = format_args!("rank {}", this.rank());
    let (mut driven, panic) = match caught(who, || Ok(run.drive(switch))) {
        Ok(driven) => (driven, None),
        Err(panic) => {
            // To the others this rank has died; another process may do better.
            let fault = Fault::new(FaultKind::PeerDied, this.rank(), "run", &panic);
            switch.raise(fault.clone());
            (Err(fault), Some(panic))
        }
    };
    if let Some(failover) = failover {
        failover.driver_is_back();
        // Only rank 0 knows whether all will meet again, once its driver is back.
        if this.rank() != RANK_0 && matches!(driven, Ok(Driven::Lost(_))) {
            this.context.signals.await_replacement();
            // Whether it failed is told by the caller.
            let _ = failover.abort("a rank is lost");
            if switch.is_source_done(this.context.config.restart_within) {
                driven = run.leave();
            }
        }
    }
    (driven, panic)
}

/// Meets the other ranks and connects with the neighbours.
fn meet<P, B, T>(
    this: &ThisRank<'_>,
    backend: &mut B,
    meeting: &mut Meeting<'_, T>,
    lost: usize,
    failover: Option<&Arc<Failover>>,
) -> Result<Met<B>, JoinError>
where
    P: Plan,
    B: Backend,
    T: Serialize + DeserializeOwned,
{
    let is_first = meeting.first.is_some();
    let mut joined = match meeting.first.take() {
        Some(joined) => joined,
        None => {
            let within = this.context.config.rejoin_within;
            join::<P, B>(this, backend, meeting.profile, within)?
        }
    };
    meeting.on_device = joined.devices.iter().map(Option::is_some).collect();
    joined.ahead = std::mem::take(&mut meeting.ahead);
    let pids = joined.pids.clone();
    let missed = |error: Error| JoinError::after(error, &pids);
    let generation = if this.rank() == RANK_0 {
        if let Err(error) = joined.tell_briefing(&(lost as u32, meeting.briefing)) {
            return Err(missed(joined.give_up(error)));
        }
        lost as u32
    } else if is_first {
        meeting.generation
    } else {
        match joined.hear_briefing::<(u32, Briefing<T>)>() {
            Ok((generation, _)) => generation,
            Err(error) => return Err(missed(joined.give_up(error))),
        }
    };
    let generation = Generation::new(generation);
    joined.generation = generation;
    if let Some(failover) = failover {
        joined = joined.with_failover(failover);
    }
    let ready = joined.connect(
        backend,
        (&this.job.pipeline, meeting.edges),
        meeting.bell.clone(),
    );
    Ok((ready.map_err(missed)?, generation, pids))
}

/// For the launcher that started the ranks, and now has to start one again.
fn say_which_may_restart(pipeline: &Pipeline, restarts: u32) {
    let names: Vec<String> = pipeline
        .restartable()
        .map(|rank| rank.to_string())
        .collect();
    let ranks = match &names[..] {
        [one] => format!("rank {one}"),
        names => format!("ranks {}", names.join(", ")),
    };
    say_aside(format!(
        "pp: {ranks} may be started again; restarts in all: {restarts}"
    ));
}

fn say_that_it_is_awaited(fault: &Fault, within: Duration) {
    let rank = fault.rank;
    let line = format!(
        "pp: rank {rank} is gone ({fault}); waiting up to {} s for rank {rank} to be started again; the first \
         Ctrl-C finishes what is in flight once it is there; the second, or SIGTERM, ends at once",
        within.as_secs_f64().ceil()
    );
    say_aside(line);
}

/// The fault of a meeting that another process may make up for.
///
/// # Errors
/// The fault is not of that kind. If no process came, the cause is why the one before was lost.
fn again(
    this: &ThisRank<'_>,
    missed: JoinError,
    causes: &[Fault],
) -> Result<(Fault, TargetProcess), Error> {
    let (restarts, is_supervised) = (this.job.restarts, this.is_supervised());
    let nobody_came = missed.is_timeout;
    let Error::Fault(fault) = missed.error else {
        return Err(missed.error);
    };
    if !nobody_came && this.is_worth_a_restart(&fault) {
        return Ok((fault, missed.process));
    }
    match causes.last() {
        // The process that was started for it is stopped, or does not come up: it can be ended.
        Some(cause) if nobody_came && is_supervised => {
            if this.rank() != RANK_0 || fault.rank == cause.rank {
                return Ok((cause.clone(), TargetProcess::Any));
            }
            // Another one than the one that was lost.
            match this.is_worth_a_restart(&fault) {
                true => Ok((fault, TargetProcess::Any)),
                false => Err(used_up(fault, causes, restarts, is_supervised).into()),
            }
        }
        Some(cause) if nobody_came => {
            let what = format!("{}; and no other came: {}", cause.detail, fault.detail);
            let cause = cause.clone().with_detail(what);
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
    fault.with_detail(detail)
}

/// How many restarts there were, if any; a supervisor says that by itself.
fn ending(causes: &[Fault], restarts: u32, is_supervised: bool) -> String {
    let used = causes.len();
    if used == 0 || is_supervised {
        return String::new();
    }
    format!("; {used} of {restarts} restarts were used")
}
