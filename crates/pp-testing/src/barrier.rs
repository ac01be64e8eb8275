//! A barrier at which no thread waits for ever.

use std::sync::{Condvar, Mutex, PoisonError};

use crate::HANG;

/// Holds threads until so many have come, again and again, as `std::sync::Barrier` does. A thread that fails never comes:
/// the others fail after [`HANG`] and do not hang.
#[derive(Debug)]
pub struct Barrier {
    threads: usize,
    /// How many have come, in all rounds.
    come: Mutex<usize>,
    changed: Condvar,
}

impl Barrier {
    /// A barrier for so many threads.
    pub fn new(threads: usize) -> Self {
        Self {
            threads,
            come: Mutex::new(0),
            changed: Condvar::new(),
        }
    }

    /// Waits for the other threads. The last one to come gets true.
    ///
    /// # Panics
    ///
    /// If one has not come after [`HANG`].
    #[track_caller]
    pub fn wait(&self) -> bool {
        let mut come = self.come.lock().unwrap_or_else(PoisonError::into_inner);
        *come += 1;
        let all = come.next_multiple_of(self.threads);
        let is_last = *come == all;
        self.changed.notify_all();
        let waited = self
            .changed
            .wait_timeout_while(come, HANG, |come| *come < all);
        let (come, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        let missing = all.saturating_sub(*come);
        drop(come);
        assert!(!waited.timed_out(), "{missing} threads never came");
        is_last
    }
}
