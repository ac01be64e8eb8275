//! Memory is freed by a thread of its own.
//!
//! Freeing device memory or page-locked memory waits until the device is idle, and every other call
//! of the driver waits behind it. Behind a kernel that never ends that is for ever. So a buffer that
//! is dropped is left to this thread. It frees nothing on a device whose kernels may never end (a
//! communicator that was given up and has not ended yet): only later, when they have ended, or never.

use std::ffi::c_int;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::error::CudaError;
use crate::stream::{Event, Stream};

/// The thread that frees, of which the process has one; `None` where it could not be started.
static RECLAIMER: OnceLock<Option<Sender<DeferredFree>>> = OnceLock::new();
/// Held while the thread calls the driver; true once the process ends.
static IS_OVER: Mutex<bool> = Mutex::new(false);
/// The end of the process waits no longer for a call that has begun.
const ENDED_WITHIN: Duration = Duration::from_secs(1);
/// Time between two looks at memory that may still be in use.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Which streams use a buffer, and up to where.
#[derive(Debug, Default)]
pub(crate) struct Uses(Mutex<Noted>);

#[derive(Debug, Default)]
struct Noted {
    /// Each stream has an event of its own: the use on one is not forgotten over that on another.
    uses: Vec<(Stream, Event)>,
    /// A use could not be noted, so nothing tells when it ends.
    is_incomplete: bool,
}

impl Uses {
    pub(crate) fn note(&self, stream: &Stream) -> Result<(), CudaError> {
        let mut noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let result = noted.note(stream);
        noted.is_incomplete |= result.is_err();
        result
    }

    /// Says whether a use is not known, so that it is never known when all are over.
    fn are_incomplete(&self) -> bool {
        let noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        noted.is_incomplete
    }

    /// Says whether every use is over.
    pub(crate) fn are_over(&self) -> Result<bool, CudaError> {
        let noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, event) in &noted.uses {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(!noted.is_incomplete)
    }
}

impl Noted {
    fn note(&mut self, stream: &Stream) -> Result<(), CudaError> {
        if let Some((_, event)) = self.uses.iter().find(|(other, _)| other.is_same(stream)) {
            return event.record(stream);
        }
        let event = Event::new(stream.device())?;
        event.record(stream)?;
        self.uses.push((stream.clone(), event));
        Ok(())
    }
}

/// Work that may use memory: what was noted, what these events mark, and what these streams have.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) uses: Uses,
    pub(crate) events: Vec<Event>,
    pub(crate) streams: Vec<Stream>,
}

/// Memory without an owner, to be freed once no work uses it.
pub(crate) struct DeferredFree {
    device: Device,
    behind: Work,
    free: Box<dyn FnOnce() -> Result<(), CudaError> + Send>,
}

impl DeferredFree {
    /// Hands over what `free` frees, with the device bound; leaks it when there is no thread that frees.
    pub(crate) fn submit(
        device: &Device,
        behind: Work,
        free: impl FnOnce() -> Result<(), CudaError> + Send + 'static,
    ) {
        let reclaimer = RECLAIMER.get_or_init(|| {
            let (sender, submitted) = channel();
            // SAFETY: the handler takes and returns nothing, and does not unwind.
            unsafe { atexit(stop) };
            std::thread::Builder::new()
                .name("pp-cuda-free".into())
                .spawn(move || reclaim(&submitted))
                .ok()
                .map(|_| sender)
        });
        if let Some(reclaimer) = reclaimer {
            let (device, free) = (device.clone(), Box::new(free));
            // The thread never ends while a sender exists.
            let _ = reclaimer.send(DeferredFree {
                device,
                behind,
                free,
            });
        }
    }

    /// Says whether no work uses it any more.
    fn is_unused(&self) -> Result<bool, CudaError> {
        for event in &self.behind.events {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        for stream in &self.behind.streams {
            if !stream.is_idle()? {
                return Ok(false);
            }
        }
        self.behind.uses.are_over()
    }

    fn free(self) {
        let Self {
            device,
            behind,
            free,
        } = self;
        drop(behind);
        let freed = device.bind().and_then(|()| free());
        if let Err(error) = freed {
            tracing::warn!(%error, "memory was not freed");
        }
    }
}

unsafe extern "C" {
    /// POSIX: calls the handler when the process ends, before those that were given earlier.
    fn atexit(handler: extern "C" fn()) -> c_int;
}

/// Lets no call of the driver go on into its end: the process ends, and the driver, which was loaded before, goes with it.
extern "C" fn stop() {
    let deadline = Instant::now() + ENDED_WITHIN;
    while Instant::now() < deadline {
        if let Ok(mut is_over) = IS_OVER.try_lock() {
            *is_over = true;
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn reclaim(submitted: &Receiver<DeferredFree>) {
    let mut kept: Vec<DeferredFree> = Vec::new();
    loop {
        let next = if kept.is_empty() {
            submitted.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            submitted.recv_timeout(LOOK_EVERY)
        };
        match next {
            Ok(memory) => kept.push(memory),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let is_over = IS_OVER.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_over {
            // Their events are the driver's, too.
            std::mem::forget(kept);
            return;
        }
        for memory in std::mem::take(&mut kept) {
            if memory.device.may_hang() {
                kept.push(memory);
                continue;
            }
            match memory.is_unused() {
                Ok(true) => memory.free(),
                Ok(false) if memory.behind.uses.are_incomplete() => {
                    tracing::warn!("memory is leaked: a use of it could not be noted");
                    std::mem::forget(memory);
                }
                Ok(false) => kept.push(memory),
                Err(error) => {
                    tracing::warn!(%error, "memory is leaked: work that used it failed");
                    std::mem::forget(memory);
                }
            }
        }
    }
}
