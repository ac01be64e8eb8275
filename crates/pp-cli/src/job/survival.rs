//! A front that lives on when its peer is gone.
//!
//! Hazard: the driver is inside a stage, or in a call of NCCL that only an abort ends, when the peer
//! dies; the watchdog would end the process, and with it everything that could be sent again.
//! Guarantee: where Phase B may come back, the watchdog gives the communicators up instead, and ends
//! the process only when the driver does not come back within the time for a restart. Once no restart
//! is left it ends the process as it does where there never was one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use pp_contract::Fault;
use pp_transport::error::TransportError;
use pp_transport::nccl::AbortHandle;

use super::seat::end_process;
use crate::exit::is_worth_a_restart;

/// Time for the abort of a generation of communicators; measured: half a second.
const ABORTED_WITHIN: Duration = Duration::from_secs(5);
/// Time between two looks at whether the driver is back.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// What the watchdog of one generation and whoever drives it share.
#[derive(Debug)]
pub(crate) struct Survival {
    /// Time for the driver to come back.
    within: Duration,
    /// The communicators of this generation, once there are any.
    abort: OnceLock<AbortHandle>,
    /// The driver, or whoever connects, has come back.
    is_back: AtomicBool,
    /// A thread may be inside NCCL for good.
    left_behind: AtomicBool,
    /// In the last generation, which has nothing to live on for: how the fault's detail ends.
    last: Option<String>,
}

impl Survival {
    pub(crate) fn new(within: Duration, last: Option<String>) -> Arc<Self> {
        Arc::new(Self {
            within,
            last,
            abort: OnceLock::new(),
            is_back: AtomicBool::new(false),
            left_behind: AtomicBool::new(false),
        })
    }

    pub(super) fn hold(&self, handle: AbortHandle) {
        let _ = self.abort.set(handle);
    }

    pub(super) fn leave_behind(&self) {
        self.left_behind.store(true, Ordering::Release);
    }

    /// Whether a thread of this generation may be inside NCCL for good.
    pub(crate) fn has_left_behind(&self) -> bool {
        self.left_behind.load(Ordering::Acquire)
    }

    /// The driver has come back: the watchdog has nothing to end any more.
    pub(crate) fn driver_is_back(&self) {
        self.is_back.store(true, Ordering::Release);
    }

    /// Gives the communicators up, and waits until they are gone.
    ///
    /// # Errors
    /// They are not: nothing else can be connected on this device.
    pub(crate) fn abort(&self, why: &str) -> Result<(), TransportError> {
        let deadline = Instant::now() + ABORTED_WITHIN;
        let aborted = self
            .abort
            .get()
            .map_or(Ok(()), |handle| handle.abort(why, deadline));
        aborted.inspect_err(|_| self.leave_behind())
    }

    /// What the watchdog does when the driver has not come back within its grace.
    pub(super) fn outlive(&self, fault: &Fault) {
        if let Some(ending) = &self.last {
            let detail = format!("{}{ending}", fault.detail);
            let operation = fault.operation.as_str();
            return end_process(&Fault::new(fault.kind, fault.rank, operation, detail));
        }
        if !is_worth_a_restart(fault) {
            return end_process(fault);
        }
        // That they were not given up is remembered, and told by whoever drives. Not here: this is the
        // watch thread, and standard error may be held by who is stuck.
        let _ = self.abort("the peer is lost");
        let deadline = Instant::now() + self.within;
        while !self.is_back.load(Ordering::Acquire) {
            if Instant::now() > deadline {
                return end_process(fault);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}
