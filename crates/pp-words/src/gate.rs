//! Whether communicators may be called, and whether a call is under way.
//!
//! Hazard: one thread calls NCCL with a communicator, another frees it. A thread that looks at a
//! flag and then calls may lose its processor in between for as long as the system likes, so no
//! time that the other thread waits makes the look safe. Guarantee: a caller announces its call
//! first and looks second; the thread that ends communicators closes the gate first and looks
//! second. A fence stands between the two steps on both sides, so at least one of the two threads
//! sees the other: either the caller does not call, or the other thread sees the call and knows
//! that it has to wait. What the call did is then ordered before what the other thread does.

use crate::sync::{AtomicU32, Ordering, fence};

// A gate begins open and idle, with both words zero.
const OPEN: u32 = 0;
const CLOSED: u32 = 1;

const IDLE: u32 = 0;

/// A call into NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calling {
    /// It waits for nothing, so it returns as soon as its thread has run for some microseconds.
    Prompt = 1,
    /// It may wait for a peer that never comes: only an abort from another thread ends it.
    MayHang = 2,
}

/// The gate of communicators that end together. One thread at a time calls.
#[derive(Debug, Default)]
pub struct Gate {
    state: AtomicU32,
    call: AtomicU32,
}

impl Gate {
    /// Announces a call, which ends with the drop of the pass. `None` when the gate is closed: the
    /// communicators may be gone, and must not be used.
    #[inline]
    pub fn enter(&self, calling: Calling) -> Option<Pass<'_>> {
        self.announce(calling);
        let pass = Pass(self);
        // Pairs with the fence in `close`.
        fence(Ordering::SeqCst);
        self.is_open().then_some(pass)
    }

    fn announce(&self, calling: Calling) {
        self.call.store(calling as u32, Ordering::Release);
    }

    /// No call begins any more. One that has begun is seen by [`Gate::call`] from now on.
    pub fn close(&self) {
        self.state.store(CLOSED, Ordering::Release);
        // Pairs with the fence in `enter`.
        fence(Ordering::SeqCst);
    }

    pub fn is_open(&self) -> bool {
        self.state.load(Ordering::Acquire) == OPEN
    }

    /// The call that is under way. `None`, once the gate is closed: what calls did is done.
    pub fn call(&self) -> Option<Calling> {
        match self.call.load(Ordering::Acquire) {
            IDLE => None,
            call if call == Calling::Prompt as u32 => Some(Calling::Prompt),
            _ => Some(Calling::MayHang),
        }
    }
}

/// A call under way.
#[derive(Debug)]
pub struct Pass<'a>(&'a Gate);

impl Pass<'_> {
    /// What comes next may hang.
    pub fn may_hang(&self) {
        self.0.announce(Calling::MayHang);
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.call.store(IDLE, Ordering::Release);
    }
}
