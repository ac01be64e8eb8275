//! The copy engine as the mover of payloads, to another device or to host memory, and the life of its edges.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::gpu::{DeviceTx, EdgesLife, Mover, PendingFree, Slot, Turn};
use pp_edges::error::TransportError;

/// The life of all edges with one peer.
#[derive(Debug)]
pub(in crate::gpu) struct CopyLife {
    /// What the edges are, for errors: `the edges with rank 1`.
    what: String,
    dead: AtomicBool,
    why: OnceLock<String>,
}

impl CopyLife {
    pub(in crate::gpu) fn new(what: String) -> Self {
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

/// Moves payloads with a copy engine.
#[derive(Debug)]
pub(in crate::gpu) struct CopyEngine<M> {
    /// The memory of the slots at the other end. If the peer is dead, it is kept no longer than the edge.
    pub(in crate::gpu) _there: Arc<M>,
}

impl<M: std::fmt::Debug + Send + Sync> Mover for CopyEngine<M> {
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

    unsafe fn receive(&self, slot: &Slot, bytes: usize) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        Ok(unsafe { slot.fetch(bytes) }?)
    }
}
