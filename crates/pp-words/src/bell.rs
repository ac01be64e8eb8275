//! The words of a bell of a rank: who listens, who sleeps, and how often it rang.

use crate::sync::{AtomicU32, Ordering, fence};

/// What [`BellWords::listen`] saw of the counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub u32);

/// The words of a bell, wherever they lie.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct BellWords {
    /// Raised by a ring that somebody listens for; what sleepers wait on.
    pub rings: AtomicU32,
    /// How many listen: they look for work, spin or sleep.
    listeners: AtomicU32,
    /// How many of them sleep, or are about to.
    sleepers: AtomicU32,
}

impl BellWords {
    /// Begins to listen. Look for work after this, then sleep; [`BellWords::unlisten`] must follow.
    pub fn listen(&self) -> Ticket {
        self.listeners.fetch_add(1, Ordering::SeqCst);
        let ticket = Ticket(self.rings.load(Ordering::SeqCst));
        // Pairs with the first fence in `ring`: either the ringer sees the listener, or the
        // listener sees what the ringer has done before.
        fence(Ordering::SeqCst);
        ticket
    }

    /// Ends what [`BellWords::listen`] began.
    pub fn unlisten(&self) {
        self.listeners.fetch_sub(1, Ordering::SeqCst);
    }

    /// True while no ring came since the ticket was taken.
    pub fn is_silent_since(&self, ticket: Ticket) -> bool {
        self.rings.load(Ordering::Acquire) == ticket.0
    }

    /// Announces a sleeper and says whether it may sleep; [`BellWords::leave`] must follow.
    pub fn enter(&self, ticket: Ticket) -> bool {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // Pairs with the second fence in `ring`: either the ringer sees the sleeper, or the
        // sleeper sees the ring.
        fence(Ordering::SeqCst);
        self.is_silent_since(ticket)
    }

    /// Takes back what [`BellWords::enter`] announced.
    pub fn leave(&self) {
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Rings, if anybody listens; true when a sleeper must be woken.
    pub fn ring(&self) -> bool {
        fence(Ordering::SeqCst);
        if self.listeners.load(Ordering::SeqCst) == 0 {
            return false;
        }
        self.rings.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.sleepers.load(Ordering::SeqCst) != 0
    }
}
