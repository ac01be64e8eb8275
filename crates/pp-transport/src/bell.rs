//! The bell of a rank: the one thing its driver sleeps on.
//!
//! Hazard: a driver has many sources of work (frames of several peers, returned credits, a source
//! thread, a sink thread, a fault), and a wake-up lost between "nothing to do" and "asleep" is a
//! hang. Guarantee: a `ring` that happens after [`Bell::listen`] ends the [`Bell::wait`] that was
//! given that listen's ticket, or keeps it from sleeping at all.
//!
//! Choices: one futex word in a memfd of its own, so that peers on this host, local threads and
//! signal handlers ring the same bell. Ringing a bell nobody sleeps on is one atomic add and one
//! load; the system call is paid only for a sleeper.

use std::time::{Duration, Instant};

use crate::sync::{AtomicU32, Ordering, fence};

/// What [`BellWords::listen`] saw; [`BellWords::must_sleep`] compares with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u32);

/// The two words of a bell, wherever they lie.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct BellWords {
    /// Raised by every ring.
    rings: AtomicU32,
    /// How many threads sleep, or are about to.
    sleepers: AtomicU32,
}

impl Default for BellWords {
    fn default() -> Self {
        Self {
            rings: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
        }
    }
}

impl BellWords {
    /// Takes the ticket that a later sleep compares with. Look for work after this, then sleep.
    pub fn listen(&self) -> Ticket {
        Ticket(self.rings.load(Ordering::Acquire))
    }

    /// True while no ring came since the ticket was taken.
    pub fn is_silent_since(&self, ticket: Ticket) -> bool {
        self.rings.load(Ordering::Acquire) == ticket.0
    }

    /// Announces a sleeper and says whether it may sleep; [`BellWords::leave`] must follow.
    pub fn enter(&self, ticket: Ticket) -> bool {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // Pairs with the fence in `strike`: either the ringer sees the sleeper, or the sleeper
        // sees the ring.
        fence(Ordering::SeqCst);
        self.rings.load(Ordering::SeqCst) == ticket.0
    }

    /// Takes back what [`BellWords::enter`] announced.
    pub fn leave(&self) {
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Counts a ring; true when a sleeper must be woken.
    pub fn strike(&self) -> bool {
        self.rings.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.sleepers.load(Ordering::SeqCst) != 0
    }
}

#[cfg(not(loom))]
mod shared {
    use std::os::fd::BorrowedFd;
    use std::sync::Arc;

    use rustix::thread::futex;

    use super::{AtomicU32, BellWords, Duration, Instant, Ticket};
    use crate::error::TransportError;
    use crate::host::region::Region;

    /// How long a driver spins before it sleeps. A sleeper costs about 20 µs to wake on another
    /// core, so spinning for as long as that at most doubles the wait.
    const SPIN: Duration = Duration::from_micros(20);

    /// A handle to a bell: this process's own, or that of a peer on the same host.
    ///
    /// Cloning gives another handle to the same bell. Dropping the last one unmaps it.
    #[derive(Clone, Debug)]
    pub struct Bell {
        region: Arc<Region>,
        spin: Duration,
    }

    impl Bell {
        /// Makes the bell of this rank.
        ///
        /// # Errors
        /// The kernel refuses the memfd or its mapping.
        pub fn new() -> Result<Self, TransportError> {
            Ok(Self::over(Region::create(
                "pp-bell",
                size_of::<BellWords>(),
            )?))
        }

        /// Maps the bell of a peer from the descriptor it passed.
        ///
        /// # Errors
        /// The descriptor is no sealed memfd of a bell's size.
        pub fn open(fd: std::os::fd::OwnedFd) -> Result<Self, TransportError> {
            Ok(Self::over(Region::open(fd, size_of::<BellWords>())?))
        }

        fn over(region: Region) -> Self {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            Self {
                region: Arc::new(region),
                spin: if cores > 1 { SPIN } else { Duration::ZERO },
            }
        }

        /// The descriptor to pass to a peer that is to ring this bell.
        pub fn fd(&self) -> BorrowedFd<'_> {
            self.region.fd()
        }

        fn words(&self) -> &BellWords {
            self.region.bell_words()
        }

        /// See [`BellWords::listen`].
        pub fn listen(&self) -> Ticket {
            self.words().listen()
        }

        /// Wakes whoever waits. Safe to call from any thread, at any time, as often as wanted.
        pub fn ring(&self) {
            if self.words().strike() {
                // A failed wake leaves the sleeper to its timeout; there is nobody to tell.
                let _ = futex::wake(self.futex_word(), futex::Flags::empty(), u32::MAX >> 1);
            }
        }

        /// Waits until the bell was rung since `ticket`, or until `deadline`; spins a little
        /// first. Returns early for no reason now and then: look for work and wait again.
        pub fn wait(&self, ticket: Ticket, deadline: Instant) {
            let words = self.words();
            let start = Instant::now();
            while start.elapsed() < self.spin {
                for _ in 0..32 {
                    if !words.is_silent_since(ticket) {
                        return;
                    }
                    std::hint::spin_loop();
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            if words.enter(ticket) {
                let timeout = futex::Timespec {
                    tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                    tv_nsec: i64::from(left.subsec_nanos()),
                };
                // Every outcome (woken, changed meanwhile, timed out, interrupted) means the
                // same to the caller: look again.
                let _ = futex::wait(
                    self.futex_word(),
                    futex::Flags::empty(),
                    ticket.0,
                    Some(&timeout),
                );
            }
            words.leave();
        }

        fn futex_word(&self) -> &AtomicU32 {
            &self.words().rings
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_ring_before_the_wait_is_not_lost() {
            let bell = Bell::new().unwrap();
            let ticket = bell.listen();
            bell.ring();
            let far = Instant::now() + Duration::from_secs(3600);
            bell.wait(ticket, far); // would sleep for an hour if the ring were lost
            assert_ne!(bell.listen(), ticket);
        }

        #[test]
        fn a_ring_from_another_mapping_wakes_a_sleeper() {
            let bell = Bell::new().unwrap();
            let other = Bell::open(bell.fd().try_clone_to_owned().unwrap()).unwrap();
            let ticket = bell.listen();
            let sleeper = std::thread::spawn(move || {
                let far = Instant::now() + Duration::from_secs(3600);
                while bell.listen() == ticket {
                    bell.wait(ticket, far);
                }
            });
            other.ring();
            sleeper.join().unwrap();
        }

        #[test]
        fn a_wait_nobody_rings_ends_at_its_deadline() {
            let bell = Bell::new().unwrap();
            let ticket = bell.listen();
            let deadline = Instant::now() + Duration::from_millis(30);
            while Instant::now() < deadline {
                bell.wait(ticket, deadline);
            }
            assert_eq!(bell.listen(), ticket);
        }
    }
}
#[cfg(not(loom))]
pub use shared::Bell;
