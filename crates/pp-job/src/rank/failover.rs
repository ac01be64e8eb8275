//! A rank that survives the loss of another.
//!
//! Hazard: the driver is inside a stage, or in a call of the backend that only an abort ends, when a peer
//! dies; the watchdog would end the process, and with it everything that could be sent again.
//! Guarantee: where another process may take its place, the watchdog aborts the edges instead, and ends
//! the process only when the driver does not come back within the time for a restart. Once no restart
//! is left it ends the process as it does where there never was one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pp_contract::{Fault, Rank};
use pp_transport::backend::Abort;
use pp_transport::error::TransportError;

use crate::context::Context;
use crate::job::ThisRank;
use crate::seen::vitals::lock;
use crate::times;

/// What ends the edges and groups of one generation, once there are some.
#[derive(Default)]
pub(crate) struct Aborts(Mutex<Vec<Abort>>);

impl Aborts {
    pub(super) fn hold(&self, abort: Abort) {
        lock(&self.0).push(abort);
    }

    /// Aborts all at once, since each takes its time, and waits until that is done.
    ///
    /// # Errors
    /// It is not done in time: nothing else can be connected on this device.
    pub(crate) fn abort(&self, why: &str) -> Result<(), TransportError> {
        let deadline = Instant::now() + times::EDGES_ABORTED_WITHIN;
        let aborts = lock(&self.0);
        std::thread::scope(|scope| {
            let begun: Vec<_> = aborts
                .iter()
                .map(|abort| scope.spawn(move || abort(why, deadline)))
                .collect();
            let ended = begun
                .into_iter()
                .map(|thread| thread.join().unwrap_or(Ok(())));
            ended.fold(Ok(()), Result::and)
        })
    }
}

/// What the watchdog of one generation and the thread that drives it share.
pub(crate) struct Failover {
    /// Time for the driver to come back.
    within: Duration,
    pub(super) aborts: Arc<Aborts>,
    /// The ranks of which another process may take the place.
    may_restart: Vec<Rank>,
    /// The thread that drives, or connects, has come back.
    is_back: AtomicBool,
    /// A thread may be inside the backend's library for good.
    left_behind: AtomicBool,
    /// The end of the fault's text when no restart is left; `None` while one is.
    last: Option<String>,
}

impl Failover {
    pub(crate) fn new(this: &ThisRank<'_>, last: Option<String>) -> Arc<Self> {
        Arc::new(Self {
            within: this.context.config.restart_within,
            last,
            may_restart: this.job.pipeline.restartable().collect(),
            aborts: Arc::default(),
            is_back: AtomicBool::new(false),
            left_behind: AtomicBool::new(false),
        })
    }

    pub(super) fn leave_behind(&self) {
        self.left_behind.store(true, Ordering::Release);
    }

    /// Says whether a thread of this generation may be inside the backend's library for good.
    pub(crate) fn has_left_behind(&self) -> bool {
        self.left_behind.load(Ordering::Acquire)
    }

    /// The driver has come back: the watchdog has nothing to end any more.
    pub(crate) fn driver_is_back(&self) {
        self.is_back.store(true, Ordering::Release);
    }

    /// Aborts the edges and groups, and waits until that is done.
    ///
    /// # Errors
    /// It is not done in time: nothing else can be connected on this device.
    pub(crate) fn abort(&self, why: &str) -> Result<(), TransportError> {
        let aborted = self.aborts.abort(why);
        aborted.inspect_err(|_| self.leave_behind())
    }

    /// What the watchdog does when the driver has not come back within its grace.
    pub(super) fn on_stuck_driver(&self, context: &Arc<Context>, fault: &Fault) {
        if let Some(ending) = &self.last {
            let detail = format!("{}{ending}", fault.detail);
            let last = fault.clone().with_detail(detail);
            context.end_with(&last);
        }
        if !self.may_restart.contains(&fault.rank) || !fault.kind.is_worth_a_restart() {
            context.end_with(fault);
        }
        // A failure is remembered, and the thread that drives tells it. Not here: this is the watchdog, and
        // the thread that is stuck may hold standard error.
        let _ = self.abort("a rank is lost");
        let deadline = Instant::now() + self.within;
        while !self.is_back.load(Ordering::Acquire) {
            if Instant::now() > deadline {
                context.end_with(fault);
            }
            std::thread::sleep(times::LOOK_EVERY);
        }
    }
}
