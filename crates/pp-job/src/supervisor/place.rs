//! What a supervisor knows of one rank.

use std::time::Instant;

use pp_contract::Fault;

use super::verdict::End;
use crate::reports::Reported;

/// A process that runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Running {
    pub(super) pid: u32,
    /// It has said that it takes signals.
    pub(super) hears: bool,
    /// It is to say what it does, as soon as it takes signals.
    pub(super) is_asked: bool,
}

/// What is known of one rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Place {
    pub(super) may_restart: bool,
    pub(super) running: Option<Running>,
    /// Whether the process that ended last had said that it takes signals.
    pub(super) last: Option<(u32, bool)>,
    /// The process that rank 0 gave up, or that gave no sign of life.
    pub(super) replaced: Option<u32>,
    /// When that is killed, unless it ends before.
    pub(super) kill_at: Option<Instant>,
    /// Why a process was given up, by rank 0 or here.
    pub(super) given_up: Option<Fault>,
    /// The process ended, and rank 0 has not said yet whether it wants another.
    pub(super) gone: Option<(End, Instant)>,
    /// Rank 0 is not connected with this rank, and takes any process of it that comes.
    pub(super) is_awaited: bool,
}

impl Place {
    /// The process to kill: its time to end by itself is over.
    pub(super) fn is_late(&mut self, now: Instant) -> Option<u32> {
        self.kill_at.take_if(|at| now >= *at).and(self.replaced)
    }

    /// The process ended for good like this. Gives why, and in words.
    pub(super) fn lose(&mut self, lost: &End, reports: &[Reported]) -> (Fault, String) {
        (self.replaced, self.gone) = (None, None);
        lost.why(reports, self.given_up.take())
    }
}
