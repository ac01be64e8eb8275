//! How long a rank waits for the others, and what it says meanwhile.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pp_contract::{Fault, Rank};

use crate::control::channel::ControlSender;

/// How long to wait, and for how many.
#[derive(Debug, Clone)]
pub struct RendezvousOptions {
    /// Until all ranks have joined.
    pub timeout: Duration,
    /// For a caller to prove that it is of the job.
    pub stranger_timeout: Duration,
    /// Callers that have not yet done so, per kind of socket; one more drops the oldest.
    pub max_pending: usize,
    /// Told again and again while the ranks have not met: for whom this rank waits, and who was turned away.
    pub tell: Option<Tell>,
    /// Given what sends to each rank that this one has met, before all have: for a reason, if this rank ends.
    pub on_met: Option<OnMet>,
    /// Why this rank takes no part: it comes only to say so.
    pub declines: Option<Fault>,
}

/// Is called with the sender to each rank that was met.
#[derive(Clone)]
pub struct OnMet(pub Arc<dyn Fn(&ControlSender) + Send + Sync>);

impl fmt::Debug for OnMet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnMet")
    }
}

impl RendezvousOptions {
    /// This rank has met another.
    pub(super) fn has_met(&self, sender: &ControlSender) {
        if let Some(OnMet(take)) = &self.on_met {
            take(sender);
        }
    }
}

/// Who is told what a waiting rank waits for, and how often.
#[derive(Debug, Clone, Copy)]
pub struct Tell {
    /// Time between two lines.
    pub every: Duration,
    /// Takes a line; must not block for long, since callers wait meanwhile.
    pub take: fn(String),
}

/// Tells what a rank waits for, when it is time.
pub(super) struct Waiting {
    tell: Option<Tell>,
    started: Instant,
    timeout: Duration,
    /// When [`Waiting::look`] has something to tell.
    pub(super) next: Option<Instant>,
}

impl Waiting {
    pub(super) fn new(options: &RendezvousOptions, started: Instant) -> Self {
        Self {
            tell: options.tell,
            started,
            timeout: options.timeout,
            next: options.tell.map(|tell| started + tell.every),
        }
    }

    /// `what` says which rank is awaited and where, and why it is not there yet.
    pub(super) fn look(&mut self, rank: Rank, what: impl FnOnce() -> String) {
        let now = Instant::now();
        if let (Some(tell), Some(next)) = (self.tell, self.next)
            && now >= next
        {
            self.next = Some(now + tell.every);
            let (waited, of) = (now - self.started, self.timeout);
            (tell.take)(format!(
                "rank {rank} has waited {:.0} s of {:.0} s for {}",
                waited.as_secs_f64(),
                of.as_secs_f64(),
                what()
            ));
        }
    }
}

impl Default for RendezvousOptions {
    fn default() -> Self {
        Self {
            timeout: crate::times::MEET_WITHIN,
            stranger_timeout: crate::times::STRANGER_WITHIN,
            max_pending: 64,
            tell: None,
            on_met: None,
            declines: None,
        }
    }
}
