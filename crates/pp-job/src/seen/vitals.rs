//! The vital signs of this rank, sent while the job is watched.
//!
//! Hazard: a driver of a device holds up what asks, and a message that waits holds up the heartbeats behind it. Guarantee: a
//! thread of its own asks; it is woken by a flag, and no other thread waits for it. The watchdog sends, and only what the
//! channel takes at once.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;

use pp_runtime::switch::Switch;
use pp_transport::backend::MemoryProbe;
use pp_transport::control::Vitals;

use crate::times::SEEN_EVERY;

/// Takes the vital signs.
pub(crate) type Towards = Arc<dyn Fn(Vitals) + Send + Sync>;

/// The vital signs of this rank. Clones are of the same rank.
#[derive(Clone, Default)]
pub(crate) struct Signs(Arc<Asked>);

#[derive(Default)]
struct Asked {
    is_on: AtomicBool,
    is_over: AtomicBool,
    thread: OnceLock<Thread>,
    /// The driver that runs now, and who is told. Held for assignments alone.
    of: Mutex<Option<(Switch, Towards)>>,
}

impl Signs {
    /// Starts the thread, which sleeps until it is asked. Without a thread there are no vital signs.
    pub(crate) fn start(&self, probe: Option<MemoryProbe>) {
        let asked = Arc::clone(&self.0);
        let thread = std::thread::Builder::new().name("pp-vitals".into());
        match thread.spawn(move || asked.tell(probe.as_deref())) {
            Ok(thread) => _ = self.0.thread.set(thread.thread().clone()),
            Err(error) => tracing::debug!(%error, "no thread for vital signs"),
        }
    }

    /// From now on they are those of this driver. They are not asked for yet.
    pub(crate) fn attach(&self, switch: &Switch, towards: Towards) {
        self.0.is_on.store(false, Ordering::Release);
        *lock(&self.0.of) = Some((switch.clone(), towards));
    }

    /// They are asked for, once a second, or no more. Never waits.
    pub(crate) fn ask(&self, is_on: bool) {
        self.0.is_on.store(is_on, Ordering::Release);
        self.wake();
    }

    /// The rank has ended, and the thread ends.
    pub(crate) fn end(&self) {
        self.0.is_over.store(true, Ordering::Release);
        // A viewer lives as long as somebody has it.
        *lock(&self.0.of) = None;
        self.wake();
    }

    fn wake(&self) {
        if let Some(thread) = self.0.thread.get() {
            thread.unpark();
        }
    }
}

impl Asked {
    fn tell(&self, probe: Option<&(dyn Fn() -> Option<[u64; 2]> + Send)>) {
        super::at_low_priority();
        while !self.is_over.load(Ordering::Acquire) {
            if !self.is_on.load(Ordering::Acquire) {
                std::thread::park();
                continue;
            }
            let of = lock(&self.of).clone();
            if let Some((switch, towards)) = of {
                let vitals = Vitals {
                    resident_bytes: resident_bytes().unwrap_or(0),
                    queued: switch.queued(),
                    device_bytes: probe.and_then(|probe| probe()).unwrap_or_default(),
                };
                towards(vitals);
            }
            std::thread::park_timeout(SEEN_EVERY);
        }
    }
}

/// The memory of this process, as the kernel counts it.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

impl fmt::Debug for Signs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Signs").field(&self.0.is_on).finish()
    }
}

/// Takes a lock whose value is whole whenever it is free.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
