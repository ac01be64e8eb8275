//! The copy engine as the mover of payloads, and the life of its edges.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pp_device::SharedMemory;

use crate::gpu::{DeviceTx, EdgesLife, Mover, PendingFree, Slot, Turn};
use pp_edges::error::TransportError;

/// The life of all edges with one peer.
#[derive(Debug)]
pub(super) struct CopyLife {
    /// What the edges are, for errors: `the edges with rank 1`.
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

    /// Does nothing: a device that fails reports that to the next caller that issues, and other code notices a lost
    /// peer.
    fn poll(&self) -> Result<(), TransportError> {
        Ok(())
    }

    fn kill(&self, why: &str) {
        let _ = self.why.set(why.to_owned());
        self.dead.store(true, Ordering::Release);
    }

    /// Does nothing: a copy completes whatever the peer does.
    fn end(self: Arc<Self>, _: bool, _: Instant) -> Result<(), TransportError> {
        Ok(())
    }

    fn free_later(&self, pending: PendingFree) {
        pending.free();
    }
}

/// Moves payloads with the copy engine of the sender.
#[derive(Debug)]
pub(super) struct CopyEngine {
    /// The memory of the receiver's slots. If the peer is dead, it is kept no longer than the edge.
    pub(super) _there: Arc<SharedMemory>,
}

impl Mover for CopyEngine {
    /// Lets any thread issue.
    fn enter(&self) -> Result<Turn<'_>, TransportError> {
        Ok(Turn(None))
    }

    /// Issues the copy already here, so that it runs while the receiver handles the header.
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
