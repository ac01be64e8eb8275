//! The calls into NCCL: the only place where a communicator's address is used.
//!
//! Each function is `unsafe` for the same reasons, which its callers answer for:
//! 1. the communicator was made by [`Call::begin_to_join`], and the thread that ends it closes the gate of
//!    this [`Call`] first and then waits for the call that is under way; or the caller is that thread.
//!    Every call passes the gate, so it finds the communicator alive, or is not made. A call that may wait
//!    for the peer and does not come back (`HANGS_AFTER`) is not waited for: NCCL's abort is what ends it;
//! 2. the thread is the one that issues on its device, or no other thread calls into NCCL for it;
//! 3. memory that is handed over stays allocated, and is touched by nothing that the stream does
//!    not order, until the stream has passed the operation.

use std::ffi::{c_int, c_void};

use nccl_sys::{
    Nccl, NcclError, cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t,
    ncclResult_t,
};

use super::id::UniqueId;
use pp_device::{DevicePtr, Stream};
use pp_words::gate::{Calling, Gate};

/// Looks without a pause before the wait sleeps: an operation settles within microseconds.
const EAGER_LOOKS: u32 = 10_000;
/// The name of the call that makes a communicator.
const JOIN: &str = "ncclCommInitRankConfig";

/// The address of a communicator, held as a number. Only functions of this module use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Comm(usize);

impl Comm {
    fn raw(self) -> ncclComm_t {
        self.0 as ncclComm_t
    }
}

/// An operation of a communicator on device memory. It names other ranks by their place in the communicator.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    Send { to: u32 },
    Recv { from: u32 },
    AllReduce(ncclRedOp_t),
    Broadcast { root: u32 },
}

/// How far an abort has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum AbortState {
    /// Everything in flight has ended.
    Done,
    /// The abort goes on, and there is no communicator left to ask: operations may still be in flight.
    UnderWay,
}

/// A call on a communicator, and the condition under which a wait for it gives up.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) nccl: &'a Nccl,
    /// Every call passes this gate.
    pub(super) gate: &'a Gate,
    /// Polled while a non-blocking communicator is in progress. False ends the wait.
    pub(super) go_on: &'a dyn Fn() -> bool,
}

impl Call<'_> {
    /// Makes a call, unless the gate is closed. If it is closed, the communicator counts as in progress for good.
    fn pass(&self, calling: Calling, call: impl FnOnce() -> ncclResult_t) -> ncclResult_t {
        match self.gate.enter(calling) {
            Some(_pass) => call(),
            None => ncclResult_t::ncclInProgress,
        }
    }

    /// Waits for the final result of a call that has returned. A non-blocking communicator may settle it later.
    ///
    /// # Safety
    /// As the module says, 1 and 2.
    unsafe fn settle(
        &self,
        call: &'static str,
        comm: Comm,
        result: ncclResult_t,
    ) -> Result<(), NcclError> {
        if result.is_success() {
            return Ok(());
        }
        let (mut result, mut looks) = (result, 0_u32);
        while result == ncclResult_t::ncclInProgress && (self.go_on)() {
            looks = looks.saturating_add(1);
            if looks > EAGER_LOOKS {
                std::thread::sleep(crate::times::COMMUNICATOR_LOOK_EVERY);
            } else {
                std::hint::spin_loop();
            }
            // SAFETY: the caller's promise.
            result = unsafe { self.asynchronous(comm) };
        }
        self.nccl.check(call, result)
    }

    /// Returns the communicator's asynchronous error state.
    ///
    /// # Safety
    /// As the module says, 1 and 2.
    pub(super) unsafe fn asynchronous(&self, comm: Comm) -> ncclResult_t {
        let mut state = ncclResult_t::ncclSuccess;
        let ask = self.nccl.functions().ncclCommGetAsyncError;
        // SAFETY: a live communicator; writes one number to an address that is ours.
        let asked = self.pass(Calling::Prompt, || unsafe {
            ask(comm.raw(), &raw mut state)
        });
        if asked.is_success() { state } else { asked }
    }

    /// Begins to join the communicator that the id names. A blocking one waits here for the other ranks. A non-blocking
    /// one continues by itself until [`Call::joined`]. Returns `None` if the library has already freed what it made.
    ///
    /// # Safety
    /// As the module says, 2; the context of its device is current.
    pub(super) unsafe fn begin_to_join(
        &self,
        id: &UniqueId,
        rank: u32,
        ranks: u32,
        blocking: bool,
    ) -> Result<Option<Comm>, NcclError> {
        let number = |n: u32| c_int::try_from(n).unwrap_or(c_int::MAX);
        let mut config = ncclConfig_t {
            blocking: c_int::from(blocking),
            ..ncclConfig_t::INITIALIZER
        };
        let mut raw: ncclComm_t = std::ptr::null_mut();
        let join = self.nccl.functions().ncclCommInitRankConfig;
        // SAFETY: the id and the configuration are copied during the call; it writes one address to
        // a place that is ours.
        let result = self.pass(Calling::MayHang, || unsafe {
            join(
                &raw mut raw,
                number(ranks),
                id.raw(),
                number(rank),
                &raw mut config,
            )
        });
        let is_made = result.is_success() || result == ncclResult_t::ncclInProgress;
        if is_made && !raw.is_null() {
            return Ok(Some(Comm(raw as usize)));
        }
        // A blocking call that failed has freed what it made.
        self.nccl.check(JOIN, result)?;
        Ok(None)
    }

    /// Waits until a communicator whose join was begun is joined.
    ///
    /// # Safety
    /// As the module says, 1 and 2.
    pub(super) unsafe fn joined(&self, comm: Comm) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        unsafe {
            let state = self.asynchronous(comm);
            self.settle(JOIN, comm, state)
        }
    }

    /// Issues an operation on `count` elements at `place`. A collective works in place.
    ///
    /// # Safety
    /// As the module says.
    pub(super) unsafe fn issue(
        &self,
        comm: Comm,
        operation: Operation,
        (place, kind, count): (DevicePtr, ncclDataType_t, usize),
        stream: &Stream,
    ) -> Result<(), NcclError> {
        let functions = self.nccl.functions();
        let (raw, place) = (comm.raw(), place.address as *mut c_void);
        let stream = stream.raw() as cudaStream_t;
        let name = match operation {
            Operation::Send { .. } => "ncclSend",
            Operation::Recv { .. } => "ncclRecv",
            Operation::AllReduce(_) => "ncclAllReduce",
            Operation::Broadcast { .. } => "ncclBroadcast",
        };
        // SAFETY: the caller's promise; source and destination of a collective may be the same.
        let result = self.pass(Calling::MayHang, || unsafe {
            match operation {
                Operation::Send { to } => {
                    (functions.ncclSend)(place, count, kind, to as c_int, raw, stream)
                }
                Operation::Recv { from } => {
                    (functions.ncclRecv)(place, count, kind, from as c_int, raw, stream)
                }
                Operation::AllReduce(reduce) => {
                    (functions.ncclAllReduce)(place, place, count, kind, reduce, raw, stream)
                }
                Operation::Broadcast { root } => {
                    let root = root as c_int;
                    (functions.ncclBroadcast)(place, place, count, kind, root, raw, stream)
                }
            }
        });
        // SAFETY: the caller's promise.
        unsafe { self.settle(name, comm, result) }
    }

    /// Issues operations on a communicator as a group, and ends the group whatever happens. A group belongs to the
    /// thread, so it would also take in operations on other communicators. The group passes the gate as a whole.
    /// Nothing in it hangs or is waited for before its end. Returns `None` if the gate is closed.
    ///
    /// # Safety
    /// As the module says, of every operation in the group.
    pub(super) unsafe fn group(
        &self,
        comm: Comm,
        operations: impl FnOnce(&Call<'_>) -> Result<(), NcclError>,
    ) -> Result<Option<()>, NcclError> {
        let Some(pass) = self.gate.enter(Calling::Prompt) else {
            return Ok(None);
        };
        self.group_start()?;
        let gate = &Gate::default();
        let added = operations(&Call { gate, ..*self });
        pass.may_hang();
        // SAFETY: the caller's promise.
        let result = unsafe { (self.nccl.functions().ncclGroupEnd)() };
        drop(pass);
        // SAFETY: the caller's promise.
        let ended = unsafe { self.settle("ncclGroupEnd", comm, result) };
        added.and(ended).map(Some)
    }

    /// Begins a group of aborts.
    pub(super) fn group_start(&self) -> Result<(), NcclError> {
        // SAFETY: no arguments; the group is the thread's own.
        let result = unsafe { (self.nccl.functions().ncclGroupStart)() };
        self.nccl.check("ncclGroupStart", result)
    }

    /// Revokes the communicator. Returns `None` if the library cannot.
    ///
    /// # Safety
    /// As the module says, 1 and 2, as far as can be had: an abort must go on where the issuing
    /// thread hangs inside NCCL, which NCCL tolerates and does not promise.
    pub(super) unsafe fn revoke(&self, comm: Comm) -> Option<Result<(), NcclError>> {
        let revoke = self.nccl.functions().ncclCommRevoke?;
        // SAFETY: the caller's promise. No flags exist yet.
        let result = unsafe { revoke(comm.raw(), 0) };
        // SAFETY: the caller's promise.
        Some(unsafe { self.settle("ncclCommRevoke", comm, result) })
    }

    /// Aborts the communicator. Inside a group the abort happens at the end of the group. The communicator is gone
    /// afterwards.
    ///
    /// # Safety
    /// As [`Call::revoke`]; no thread uses the communicator any more.
    pub(super) unsafe fn abort(&self, comm: Comm) -> Result<AbortState, NcclError> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.nccl.functions().ncclCommAbort)(comm.raw()) };
        self.state("ncclCommAbort", result)
    }

    /// Ends a group that holds nothing but aborts.
    ///
    /// # Safety
    /// As [`Call::abort`], of each.
    pub(super) unsafe fn group_end_of_aborts(&self) -> Result<AbortState, NcclError> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.nccl.functions().ncclGroupEnd)() };
        self.state("ncclGroupEnd", result)
    }

    fn state(&self, call: &'static str, result: ncclResult_t) -> Result<AbortState, NcclError> {
        if result == ncclResult_t::ncclInProgress {
            return Ok(AbortState::UnderWay);
        }
        self.nccl.check(call, result).map(|()| AbortState::Done)
    }

    /// Lets the communicator finish its operations, then destroys it. The communicator is gone afterwards.
    ///
    /// # Safety
    /// As the module says, 1 and 2; no thread uses the communicator any more.
    pub(super) unsafe fn destroy(&self, comm: Comm) -> Result<(), NcclError> {
        let functions = self.nccl.functions();
        // SAFETY: the caller's promise.
        let finalized = unsafe {
            let result = (functions.ncclCommFinalize)(comm.raw());
            self.settle("ncclCommFinalize", comm, result)
        };
        // SAFETY: the caller's promise.
        let result = unsafe { (functions.ncclCommDestroy)(comm.raw()) };
        let destroyed = match result {
            ncclResult_t::ncclInProgress => Ok(()),
            other => self.nccl.check("ncclCommDestroy", other),
        };
        finalized.and(destroyed)
    }
}
