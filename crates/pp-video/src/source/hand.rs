//! How the reading thread hands chunks on: it waits for room, or makes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_channel::{Receiver, Sender, TrySendError};
use pp_runtime::clock::now_ns;

use super::super::InputError;
use super::chunk::Chunk;

/// What the reading threads say, in the order of the input. `None` is the end: without it, the thread has died.
pub(super) type Next = Result<Option<Chunk>, InputError>;

/// The driver is gone.
pub(super) struct Closed;

/// The reading thread's end of the queue.
pub(super) struct Hand<W> {
    pub(super) ready: Sender<Next>,
    /// The other end, where the oldest makes room.
    pub(super) oldest: Option<Receiver<Next>>,
    /// For chunks that were dropped.
    pub(super) spare: Sender<Chunk>,
    /// Chunks that made room. The driver has it too, as long as it is there.
    pub(super) lost: Arc<AtomicU64>,
    pub(super) wake: W,
    /// Cuts so far.
    pub(super) cuts: u64,
    /// How long it waited for room for the chunk before.
    pub(super) held_ns: u64,
}

impl<W: Fn()> Hand<W> {
    pub(super) fn give(&mut self, mut chunk: Chunk) -> Result<(), Closed> {
        self.cuts += u64::from(chunk.cut);
        chunk.cuts = self.cuts;
        chunk.held_ns = std::mem::take(&mut self.held_ns);
        let mut next = Ok(Some(chunk));
        loop {
            next = match self.ready.try_send(next) {
                Ok(()) => break,
                Err(TrySendError::Disconnected(_)) => return Err(Closed),
                Err(TrySendError::Full(next)) => next,
            };
            let Some(oldest) = &self.oldest else {
                let since = now_ns();
                self.ready.send(next).map_err(|_| Closed)?;
                self.held_ns = now_ns().saturating_sub(since);
                break;
            };
            if Arc::strong_count(&self.lost) == 1 {
                return Err(Closed);
            }
            if let Ok(Ok(Some(chunk))) = oldest.try_recv() {
                self.lost.fetch_add(1, Ordering::Release);
                let _ = self.spare.try_send(chunk);
            }
        }
        (self.wake)();
        Ok(())
    }

    /// Says how the input ended, behind all chunks.
    pub(super) fn end(self, end: Result<Result<(), InputError>, Closed>) {
        // Nothing is read any more, so that this may wait; without another receiver it ends with the driver.
        drop(self.oldest);
        if let Ok(end) = end {
            let _ = self.ready.send(end.map(|()| None));
        }
        // The end must be visible before the driver is told to look.
        drop(self.ready);
        (self.wake)();
    }
}
