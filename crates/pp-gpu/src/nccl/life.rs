//! The life of one generation of communicators, and its end.
//!
//! Hazard: a communicator whose peer died never completes anything, and the calls that would end it can hang as well.
//! After an abort the device reports success for a receive that was cut short. Guarantee: from the moment of an abort
//! nothing of the generation is issued, and every operation in flight is an error, whatever the device says. All
//! communicators of a generation end together, on a thread of their own that may be left behind. The caller that ends
//! them waits no longer than its deadline. Memory that their operations may touch waits here until the communicators
//! are gone, and is then freed. If they never go, it is leaked.
//!
//! Two threads meet here. One issues (or connects) and calls NCCL with a communicator; the other ends that communicator
//! and frees it. Every call passes the gate ([`Gate`]), which the ending thread closes first, so no new call begins.
//! The ending thread then waits for the call in progress. If that call cannot hang, it waits for as long as the call
//! takes: an abort that frees the communicator during the call would be a use after free. If the call may hang, it
//! waits for [`HANGS_AFTER`] looks, because only an abort ends such a call, and NCCL allows ncclCommAbort from another
//! thread for that. Before the abort the communicator is revoked, if the library can. Revoking frees nothing and makes
//! the call return; the ending thread waits for that in the same way. Code between two calls needs no wait, since the
//! next call finds the gate closed.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nccl_sys::{NcclError, Version, ncclResult_t};

use super::calls::{AbortState, Call, Comm};
use super::issuer::{Core, SecondThread};
use crate::gpu::{EdgesLife, PendingFree, Turn, lock};
use crate::times::{LOOK_EVERY, RETURNS_WITHIN};
use pp_edges::backend::are_ends_left_to_process;
use pp_edges::error::TransportError;
use pp_words::gate::{Calling, Gate};

/// From this version on, several communicators are aborted in one group.
const GROUPS_ABORTS: Version = Version {
    major: 2,
    minor: 22,
    patch: 0,
};
/// The number of looks after which a call that may hang counts as hung. Looks are counted instead of time, so that a
/// process which was stopped meanwhile has not waited.
const HANGS_AFTER: u32 = (RETURNS_WITHIN.as_micros() / LOOK_EVERY.as_micros()) as u32;
/// Completions asked for in vain between two checks of the communicators themselves.
const LOOK_AFTER_POLLS: u32 = 1 << 14;

/// Generations of this process that a thread began to make and that have not ended.
pub(super) static AT_WORK: AtomicUsize = AtomicUsize::new(0);

/// Tells whether every generation of communicators that this process began has ended. If one has not, threads of NCCL
/// still run, and the exit handlers of libraries would destroy state that they use. Such a process exits without the
/// handlers.
#[must_use]
pub fn is_at_rest() -> bool {
    AT_WORK.load(Ordering::SeqCst) == 0
}

/// Communicators that live and end together.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) core: Arc<Core>,
    /// What the communicators are, for errors: `the connection to rank 1`.
    pub(super) what: String,
    /// Set when nothing is issued any more and no completion counts.
    dead: AtomicBool,
    why: OnceLock<String>,
    /// Closed before any communicator ends.
    gate: Gate,
    comms: Mutex<Vec<Comm>>,
    /// Held while communicators end. The value says how those that have ended did so.
    abort_state: Mutex<Result<AbortState, NcclError>>,
    end: Mutex<End>,
    ended: Condvar,
    /// Filled and emptied while `end` is held.
    pending: Mutex<Vec<PendingFree>>,
    vain_polls: AtomicU32,
}

#[derive(Debug)]
enum End {
    Alive,
    At(&'static str),
    Over(Result<AbortState, NcclError>),
}

/// How communicators end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// In order. Nothing is in flight.
    Destroy,
    /// At once.
    Abort,
}

impl EdgesLife for Life {
    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    #[cold]
    fn aborted(&self) -> TransportError {
        TransportError::Aborted {
            what: self.what.clone(),
            why: self.why.get().cloned().unwrap_or_default(),
        }
    }

    /// Counts a completion that was asked for in vain. Now and then checks whether a communicator has failed, since no
    /// completion would ever report that.
    ///
    /// # Errors
    /// A communicator has failed.
    fn poll(&self) -> Result<(), TransportError> {
        if self.vain_polls.fetch_add(1, Ordering::Relaxed) % LOOK_AFTER_POLLS
            != LOOK_AFTER_POLLS - 1
        {
            return Ok(());
        }
        // A payload may outlive its edge. A thread that polls it then must not bind itself to the issuer.
        if lock(&self.comms).is_empty() {
            return Ok(());
        }
        // Only the thread that issues can check.
        let Ok(_turn) = self.enter() else {
            return Ok(());
        };
        let comms = lock(&self.comms).clone();
        for comm in comms {
            // SAFETY: it was made, the call passes the gate, and this is the turn of the thread that
            // issues.
            let state = self.call(|call| unsafe { call.asynchronous(comm) });
            if state == ncclResult_t::ncclInProgress {
                continue;
            }
            if let Err(source) = self.core.nccl.check("ncclCommGetAsyncError", state) {
                let doing = format!("{} failed by itself", self.what);
                let error = TransportError::Nccl { doing, source };
                self.kill(&error.to_string());
                return Err(error);
            }
        }
        Ok(())
    }

    /// Marks the generation as dead. The first reason is kept.
    fn kill(&self, why: &str) {
        // The lock makes sure that every hang that begins also ends.
        let end = lock(&self.end);
        let _ = self.why.set(why.to_owned());
        self.gate.close();
        if !self.dead.swap(true, Ordering::SeqCst) && !matches!(*end, End::Over(_)) {
            // The kernels of this generation may wait until an abort ends them. No thread may wait for the device
            // meanwhile.
            self.core.device.begin_hang();
        }
    }

    fn end(self: Arc<Self>, is_clean: bool, deadline: Instant) -> Result<(), TransportError> {
        let how = if is_clean { How::Destroy } else { How::Abort };
        self.finish(how, deadline)
    }

    /// Frees memory once the generation has ended and the device is done with the memory.
    fn free_later(&self, pending: PendingFree) {
        let end = lock(&self.end);
        if !matches!(*end, End::Over(Ok(AbortState::Done))) {
            lock(&self.pending).push(pending);
            return;
        }
        drop(end);
        pending.free();
    }
}

impl Life {
    pub(super) fn new(core: &Arc<Core>, what: String) -> Self {
        Self {
            core: Arc::clone(core),
            what,
            dead: AtomicBool::new(false),
            why: OnceLock::new(),
            gate: Gate::default(),
            comms: Mutex::default(),
            abort_state: Mutex::new(Ok(AbortState::Done)),
            end: Mutex::new(End::Alive),
            ended: Condvar::new(),
            pending: Mutex::default(),
            vain_polls: AtomicU32::new(0),
        }
    }

    pub(super) fn add(&self, comm: Comm) {
        lock(&self.comms).push(comm);
    }

    /// Replaces an error of NCCL by the abort, if there was one: after an abort, NCCL's error is no reason.
    pub(super) fn explain(&self, error: TransportError) -> TransportError {
        self.check().err().unwrap_or(error)
    }

    /// Begins a call into NCCL.
    ///
    /// # Errors
    /// The generation is dead, or another thread issues.
    #[inline]
    pub(super) fn enter(&self) -> Result<Turn<'_>, TransportError> {
        // The error that the generation is dead says more than the error that the thread ending it is in the way.
        let turn = self
            .core
            .enter()
            .or_else(|error| self.check().and(Err(error)))?;
        if self.dead.load(Ordering::SeqCst) {
            return Err(self.aborted());
        }
        Ok(turn)
    }

    /// Runs calls into NCCL. No call begins once the communicators are about to end, and calls that wait then give up.
    pub(super) fn call<R>(&self, calls: impl FnOnce(&Call<'_>) -> R) -> R {
        calls(&Call {
            nccl: &self.core.nccl,
            gate: &self.gate,
            go_on: &|| self.gate.is_open(),
        })
    }

    /// Ends the communicators on a thread of their own, or waits for an end that another caller has begun. Waits for neither
    /// where the process ends them.
    ///
    /// # Errors
    /// [`TransportError::LeftBehind`] at the deadline; what NCCL said.
    pub(super) fn finish(
        self: &Arc<Self>,
        how: How,
        deadline: Instant,
    ) -> Result<(), TransportError> {
        let started = Instant::now();
        let mut end = lock(&self.end);
        if matches!(*end, End::Alive) {
            *end = End::At("start a thread");
            let (life, second) = (Arc::clone(self), self.core.enter_to_end());
            let thread = std::thread::Builder::new().name("pp-nccl-end".into());
            // If no thread can be started, the state stays as it is, and the error below reports that. Nothing is
            // logged here: this may be the watch thread, and a stuck thread may hold standard error.
            let _ = thread.spawn(move || life.run_end(how, second));
        }
        let left = match are_ends_left_to_process() {
            true => Duration::ZERO,
            false => deadline.saturating_duration_since(started),
        };
        let (end, _) = self
            .ended
            .wait_timeout_while(end, left, |end| matches!(end, End::At(_)))
            .unwrap_or_else(PoisonError::into_inner);
        let step = match &*end {
            End::Over(Ok(AbortState::Done)) => return Ok(()),
            End::Over(Err(source)) => {
                return Err(TransportError::Nccl {
                    doing: format!("end {}", self.what),
                    source: source.clone(),
                });
            }
            End::Over(Ok(AbortState::UnderWay)) => "what goes on after ncclCommAbort",
            End::At(step) => *step,
            End::Alive => "begin",
        };
        Err(TransportError::LeftBehind {
            what: self.what.clone(),
            step,
            after: started.elapsed(),
        })
    }

    /// Ends the communicators on this thread, which may hang.
    pub(super) fn run_end(&self, how: How, second: SecondThread) {
        let result = self.end_all(how);
        if let Err(error) = &result {
            tracing::warn!(%error, "{} did not end as it should", self.what);
        }
        // Dropped before the end is announced, since a thread that learns of the end may issue.
        drop(second);
        let mut end = lock(&self.end);
        let mut pending = Vec::new();
        if result == Ok(AbortState::Done) {
            if self.is_dead() {
                self.core.device.end_hang();
            }
            AT_WORK.fetch_sub(1, Ordering::SeqCst);
            pending = std::mem::take(&mut *lock(&self.pending));
        }
        *end = End::Over(result);
        drop(end);
        self.ended.notify_all();
        pending.into_iter().for_each(PendingFree::free);
    }

    /// Ends all communicators that exist now, and returns how all of them have ended so far. The thread that answers
    /// for their end calls this last. A thread that frees another one, which hangs in these communicators, may call it
    /// before.
    pub(super) fn end_all(&self, how: How) -> Result<AbortState, NcclError> {
        let mut abort_state = lock(&self.abort_state);
        self.gate.close();
        let comms = std::mem::take(&mut *lock(&self.comms));
        let result = match how {
            _ if comms.is_empty() => Ok(AbortState::Done),
            How::Destroy => self.destroy(&comms).map(|()| AbortState::Done),
            How::Abort => self.abort(&comms),
        };
        *abort_state = later(abort_state.clone(), result);
        abort_state.clone()
    }

    fn at(&self, step: &'static str) {
        let mut end = lock(&self.end);
        if !matches!(*end, End::Over(_)) {
            *end = End::At(step);
        }
    }

    /// Waits for the call in progress, and for the turn of the thread that issues, which may call NCCL for other
    /// communicators of the device. Does not wait for a call that hangs.
    fn wait_for_calls(&self) {
        self.at("wait for the call that is under way");
        let mut looks = 0;
        loop {
            match self.gate.call() {
                None if !self.core.is_inside() => return,
                Some(Calling::Prompt) => looks = 0,
                _ if looks == HANGS_AFTER => return,
                _ => looks += 1,
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn destroy(&self, comms: &[Comm]) -> Result<(), NcclError> {
        self.wait_for_calls();
        self.at("ncclCommDestroy");
        if let Err(error) = self.core.device.bind() {
            tracing::warn!(%error, "{} ends without a context", self.what);
        }
        let call = Call {
            nccl: &self.core.nccl,
            gate: &Gate::default(),
            go_on: &|| true,
        };
        let mut result = Ok(());
        for comm in comms {
            // SAFETY: taken out of the list, so this thread alone ends it. The gate is closed. The only
            // call that can have been under way is a look of `poll`, since the thread that could issue
            // ends the communicators by this; it was waited for.
            result = result.and(unsafe { call.destroy(*comm) });
        }
        result
    }

    fn abort(&self, comms: &[Comm]) -> Result<AbortState, NcclError> {
        // No call of the driver comes before the abort: it may wait for the very kernels that only the abort ends. NCCL
        // binds the device itself.
        self.wait_for_calls();
        let nccl = &self.core.nccl;
        self.at("ncclCommRevoke");
        let until = Instant::now() + RETURNS_WITHIN;
        let call = Call {
            nccl,
            gate: &Gate::default(),
            go_on: &|| Instant::now() < until,
        };
        for comm in comms {
            // SAFETY: taken out of the list, so this thread alone ends it. The gate is closed, and the
            // call that was under way is over, or hangs.
            if let Some(Err(error)) = unsafe { call.revoke(*comm) } {
                tracing::debug!(%error, "{} was not revoked", self.what);
            }
        }
        if self.gate.call().is_some() {
            // If the library can revoke, a call that hung returns now.
            self.wait_for_calls();
        }
        self.at("ncclCommAbort");
        let grouped = nccl.version() >= GROUPS_ABORTS;
        if grouped {
            call.group_start()?;
        }
        let mut aborted = Ok(AbortState::Done);
        for comm in comms {
            // SAFETY: as above; it is not used again.
            aborted = later(aborted, unsafe { call.abort(*comm) });
        }
        if grouped {
            // SAFETY: as above; the group has aborts alone.
            aborted = later(aborted, unsafe { call.group_end_of_aborts() });
        }
        aborted
    }
}

/// Returns the first error, else the later of the two states.
fn later(
    first: Result<AbortState, NcclError>,
    second: Result<AbortState, NcclError>,
) -> Result<AbortState, NcclError> {
    Ok(first?.max(second?))
}

impl Drop for Life {
    fn drop(&mut self) {
        let left = lock(&self.comms).len();
        if left > 0 {
            tracing::warn!(
                communicators = left,
                "{} is leaked: no call ended it",
                self.what
            );
        }
        for PendingFree { buffer, stream, .. } in lock(&self.pending).drain(..) {
            tracing::warn!(
                bytes = buffer.len(),
                "memory of {} is leaked: it did not end as it should",
                self.what
            );
            std::mem::forget((buffer, stream));
        }
    }
}
