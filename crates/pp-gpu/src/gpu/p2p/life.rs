//! The copy engine as the mover of payloads, and the life of the edges that it serves.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pp_device::SharedMemory;

use crate::gpu::{DeviceTx, EdgesLife, Mover, PendingFree, Slot, Turn};
use pp_edges::error::TransportError;

/// The life of all edges with one peer.
#[derive(Debug)]
pub(super) struct CopyLife {
    /// What they are, for errors: `the edges with rank 1`.
    what: String,
    dead: AtomicBool,
    why: OnceLock<String>,
}

impl CopyLife {
    pub(super) fn new(what: String) -> Self {
        Self {
            what,
            dead: AtomicBool::new(false),
            why: OnceLock::new(),
        }
    }
}

impl EdgesLife for CopyLife {
    #[inline]
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

    /// A device that fails says so to whoever issues next; a peer that is gone is noticed elsewhere.
    fn poll(&self) -> Result<(), TransportError> {
        Ok(())
    }

    fn kill(&self, why: &str) {
        let _ = self.why.set(why.to_owned());
        self.dead.store(true, Ordering::Release);
    }

    /// There is nothing to end: a copy completes whatever the peer does.
    fn end(self: Arc<Self>, _: bool, _: Instant) -> Result<(), TransportError> {
        Ok(())
    }

    fn free_later(&self, pending: PendingFree) {
        pending.free();
    }
}

/// Moves payloads by the copy engine of the sender.
#[derive(Debug)]
pub(super) struct CopyEngine {
    /// Where the slots of the receiver lie. Of a dead peer, no longer than the edge.
    pub(super) _there: Arc<SharedMemory>,
}

impl Mover for CopyEngine {
    /// Any thread may.
    fn enter(&self) -> Result<Turn<'_>, TransportError> {
        Ok(Turn(None))
    }

    /// Issues the copy, so that it runs while the receiver takes the header in.
    fn prepare(&self, lease: &mut DeviceTx, bytes: usize) -> Result<(), TransportError> {
        match lease.put(bytes)? {
            true => Ok(()),
            false => Err(TransportError::Unrecorded),
        }
    }

    unsafe fn send(&self, _: &Slot, _: usize) -> Result<(), TransportError> {
        Ok(())
    }

    unsafe fn receive(&self, slot: &Slot, _: usize) -> Result<(), TransportError> {
        slot.expect();
        Ok(())
    }
}
