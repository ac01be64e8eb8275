//! How a driver waits when it found nothing to do.
//!
//! On the bell, where everything that can happen rings it. A device rings nothing: while it has
//! work, the driver looks again and again, at first without pause, so that a stage of 0.2 ms is not
//! kept waiting, then every 20 µs. It keeps its core busy meanwhile, where the machine has several: the
//! bell spins for as long, and a sleep of 20 µs takes 100.

use std::time::{Duration, Instant};

use pp_transport::bell::{Bell, Listening};

use crate::times::LONGEST_SLEEP;

/// Looking without a pause goes on for this long after the last thing that was found.
const EAGER: Duration = Duration::from_millis(1);
/// The time between two looks after that.
const NAP: Duration = Duration::from_micros(20);

/// The waiting of one driver.
#[derive(Debug)]
pub(super) struct IdleWait<'a> {
    bell: &'a Bell,
    completions_ring: bool,
    /// Listens only once nothing was found, and looks again before it sleeps: a driver that is
    /// busy costs its peer no ring.
    listener: Option<Listening<'a>>,
    idle_since: Option<Instant>,
}

impl<'a> IdleWait<'a> {
    pub(super) fn new(bell: &'a Bell, completions_ring: bool) -> Self {
        Self {
            bell,
            completions_ring,
            listener: None,
            idle_since: None,
        }
    }

    /// Something was found.
    pub(super) fn over(&mut self) {
        self.listener = None;
        self.idle_since = None;
    }

    /// Nothing was found. Returns after some time, or at once, when it is worth looking again; gives the nanoseconds that it
    /// waited. `computing`: a stage works on; `in_flight`: a transfer, or a stage, is not done.
    pub(super) fn take(&mut self, computing: bool, in_flight: bool) -> u64 {
        let silent = computing || (in_flight && !self.completions_ring);
        if silent || !self.completions_ring {
            let idle = self.idle_since.get_or_insert_with(Instant::now).elapsed();
            if idle < EAGER {
                std::hint::spin_loop();
                return 0;
            }
        }
        let Some(listener) = self.listener.take() else {
            self.listener = Some(self.bell.listen());
            return 0;
        };
        let nap = if silent { NAP } else { LONGEST_SLEEP };
        let start = Instant::now();
        listener.wait(start + nap);
        start.elapsed().as_nanos() as u64
    }
}
