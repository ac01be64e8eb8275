//! The bell of a rank: the one thing on which its driver sleeps.
//!
//! Hazard: a driver has many sources of work: frames of several peers, returned credits, a source thread, a sink
//! thread, a fault. A wake-up that is lost between "nothing to do" and "asleep" is a hang. Guarantee: a thread that
//! gives the driver work rings the bell. A driver that first listens and then looks for work either finds the work or
//! is woken.
//!
//! Choices: the bell is a few words in its own memfd, so peers on this host and local threads ring the same bell. A
//! busy driver does not listen, and ringing then costs a fence and a load of a cache line that no thread writes. Only a
//! listener makes the ringer move the counter, and only a sleeper makes it pay for the system call.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::thread::futex;

use crate::error::TransportError;
use crate::shm::region::Region;
use pp_words::bell::{BellWords, Ticket};

/// How long a driver spins before it sleeps. Waking a sleeper on another core costs about 20 µs, so spinning this long
/// at most doubles the wait.
const SPIN: Duration = Duration::from_micros(20);

/// A handle to a bell: the bell of this process, or of a peer on the same host.
///
/// Cloning gives another handle to the same bell. Dropping the last one unmaps it.
#[derive(Clone, Debug)]
pub struct Bell {
    region: Arc<Region>,
    /// The offset of its words in the region.
    offset: usize,
    spin: Duration,
}

impl Bell {
    /// Makes the bell of this rank.
    ///
    /// # Errors
    /// The kernel refuses the memfd or its mapping.
    pub fn new() -> Result<Self, TransportError> {
        let region = Region::create("pp-bell", size_of::<BellWords>())?;
        Ok(Self::at(&Arc::new(region), 0))
    }

    /// Maps the bell of a peer from the descriptor it passed.
    ///
    /// # Errors
    /// The descriptor is no sealed memfd of a bell's size.
    pub fn open(fd: std::os::fd::OwnedFd) -> Result<Self, TransportError> {
        let region = Region::open(fd, size_of::<BellWords>())?;
        Ok(Self::at(&Arc::new(region), 0))
    }

    /// Returns the bell whose words lie at this offset of memory that holds other things too.
    pub(crate) fn at(region: &Arc<Region>, offset: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            region: Arc::clone(region),
            offset,
            spin: if cores > 1 { SPIN } else { Duration::ZERO },
        }
    }

    /// Returns the descriptor, to be passed to a peer that will ring this bell.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.fd()
    }

    fn words(&self) -> &BellWords {
        self.region.words(self.offset)
    }

    /// Begins to listen. After this, look for work, and wait for a ring if there was none.
    pub fn listen(&self) -> Listening<'_> {
        Listening {
            ticket: self.words().listen(),
            bell: self,
        }
    }

    /// Wakes the thread that waits. Any thread may call this, at any time and any number of times.
    pub fn ring(&self) {
        if self.words().ring() {
            // A failed wake leaves the sleeper to its timeout; the caller can do nothing about it.
            let _ = futex::wake(&self.words().rings, futex::Flags::empty(), u32::MAX >> 1);
        }
    }
}

/// A listener of a bell.
///
/// # If dropped
/// Stops listening.
#[derive(Debug)]
#[must_use = "a ring is kept for as long as somebody listens"]
pub struct Listening<'a> {
    ticket: Ticket,
    bell: &'a Bell,
}

impl Listening<'_> {
    /// Tells whether the bell was rung since the listening began.
    pub fn was_rung(&self) -> bool {
        !self.bell.words().is_silent_since(self.ticket)
    }

    /// Waits until the bell was rung since the listening began, or until `deadline`. Spins a little first. May return
    /// early without a reason: look for work and listen again.
    pub fn wait(self, deadline: Instant) {
        let words = self.bell.words();
        let start = Instant::now();
        while start.elapsed() < self.bell.spin {
            for _ in 0..32 {
                if self.was_rung() {
                    return;
                }
                std::hint::spin_loop();
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if words.enter(self.ticket) {
            let timeout = futex::Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            // Every outcome (woken, changed meanwhile, timed out, interrupted) means the same to the caller: look for
            // work again.
            let _ = futex::wait(
                &words.rings,
                futex::Flags::empty(),
                self.ticket.0,
                Some(&timeout),
            );
        }
        words.leave();
    }
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        self.bell.words().unlisten();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_before_the_wait_is_not_lost() {
        let bell = Bell::new().unwrap();
        let ear = bell.listen();
        bell.ring();
        assert!(ear.was_rung());
        // Would sleep for an hour if the ring were lost.
        ear.wait(Instant::now() + Duration::from_secs(3600));
    }

    #[test]
    fn a_ring_from_another_mapping_wakes_a_sleeper() {
        let bell = Bell::new().unwrap();
        let other = Bell::open(bell.fd().try_clone_to_owned().unwrap()).unwrap();
        std::thread::scope(|scope| {
            let ear = bell.listen();
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                other.ring();
            });
            let far = Instant::now() + Duration::from_secs(3600);
            let mut ear = Some(ear);
            while let Some(listening) = ear.take() {
                if !listening.was_rung() {
                    listening.wait(far);
                    // Woken: by the ring, or for nothing, and then it still comes.
                    break;
                }
            }
        });
    }

    #[test]
    fn a_wait_nobody_rings_ends_at_its_deadline() {
        let bell = Bell::new().unwrap();
        let deadline = Instant::now() + Duration::from_millis(30);
        while Instant::now() < deadline {
            let ear = bell.listen();
            assert!(!ear.was_rung());
            ear.wait(deadline);
        }
    }

    #[test]
    fn nobody_listening_costs_no_ring() {
        let bell = Bell::new().unwrap();
        drop(bell.listen());
        bell.ring();
        assert!(!bell.words().ring());
        assert!(!bell.listen().was_rung());
    }
}
