//! Which jobs of this process take its signals, and whose the signals are when none does.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::handlers::Handlers;
use crate::signal_names::heard;
use crate::threads::start_thread;
use crate::times;

/// What a job of this process does at a signal.
type Hear = Arc<dyn Fn(i32) + Send + Sync>;

/// The jobs of this process that take signals.
struct Jobs {
    /// With a number for each.
    running: Vec<(u64, Hear)>,
    /// When the last one ended.
    ended: Option<Instant>,
    /// What the program does at signals, once a job has taken them. From then on a thread calls the jobs.
    handlers: Option<Handlers>,
}

static JOBS: Mutex<Jobs> = Mutex::new(Jobs {
    running: Vec::new(),
    ended: None,
    handlers: None,
});

/// Whose a signal is when no job runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Afterwards {
    /// The program's, which goes on: it does what it did before, at once.
    Program,
    /// The job's for a moment: right after its end it was meant for the job, and does nothing by itself. Later it does what it
    /// did before. A handler of the program acts at once.
    Job,
    /// The supervisor's, which tells this rank. A handler of the program acts at once.
    Supervisor,
}

/// A job takes signals.
///
/// # If dropped
/// It takes none. [`Afterwards`] says what a signal does then, if no other job takes any.
#[derive(Debug)]
pub(crate) struct Hearing(u64, Afterwards);

/// Calls `handler` at each signal, on a thread that all jobs of this process share.
pub(crate) fn on_signals(
    afterwards: Afterwards,
    handler: impl Fn(i32) + Send + Sync + 'static,
) -> std::io::Result<Hearing> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut jobs = jobs();
    match &mut jobs.handlers {
        Some(handlers) => handlers.take(),
        None => {
            let signals = heard();
            let (handlers, mut arriving) = Handlers::first(&signals, || Signals::new(&signals))?;
            start_thread("pp-signals", move || {
                for signal in &mut arriving {
                    hear(signal, afterwards);
                }
            })?;
            jobs.handlers = Some(handlers);
        }
    }
    if let Some(handlers) = &mut jobs.handlers {
        handlers.keep_children();
    }
    jobs.running.push((number, Arc::new(handler)));
    Ok(Hearing(number, afterwards))
}

/// Tells all jobs of a signal.
fn hear(signal: i32, afterwards: Afterwards) {
    let jobs = jobs();
    let running = jobs.running.iter().map(|(_, job)| Arc::clone(job));
    let running: Vec<Hear> = running.collect();
    let since = jobs.ended.map(|ended| ended.elapsed());
    let handlers = jobs.handlers.as_ref();
    let is_the_programs = handlers.is_some_and(|handlers| handlers.is_the_programs(signal));
    drop(jobs);
    for job in &running {
        job(signal);
    }
    let was_meant = since.is_some_and(|since| since < times::MEANT_FOR_JOB_WITHIN);
    let is_ours = !was_meant && afterwards != Afterwards::Supervisor && !is_the_programs;
    if running.is_empty() && is_ours {
        let _ = emulate_default_handler(signal);
    }
}

fn jobs() -> MutexGuard<'static, Jobs> {
    JOBS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Hearing {
    fn drop(&mut self) {
        let mut jobs = jobs();
        jobs.running.retain(|(number, _)| *number != self.0);
        jobs.ended = Some(Instant::now());
        let is_last = jobs.running.is_empty();
        if let (true, Some(handlers)) = (is_last, &mut jobs.handlers) {
            handlers.give_back(self.1 == Afterwards::Program);
        }
    }
}
