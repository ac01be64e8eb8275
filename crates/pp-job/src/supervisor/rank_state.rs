//! What a supervisor knows of one rank, and when the same chunk has ended it twice.

use std::time::Instant;

use pp_contract::Fault;

use super::verdict::End;
use crate::reports::{Chunks, Reported};

/// A process that runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Process {
    pub(super) pid: u32,
    /// It has said that it takes signals.
    pub(super) hears: bool,
    /// Its part of the job is done.
    pub(super) has_left: bool,
    /// It is to say what it does, as soon as it takes signals.
    pub(super) is_asked: bool,
}

/// What is known of one rank.
#[derive(Clone, Debug, Default)]
pub(super) struct RankState {
    pub(super) may_restart: bool,
    pub(super) running: Option<Process>,
    /// Whether the process that ended last had said that it takes signals.
    pub(super) last: Option<(u32, bool)>,
    /// The process that rank 0 gave up, or that gave no sign of life.
    pub(super) replaced: Option<u32>,
    /// When that is killed, unless it ends before.
    pub(super) kill_at: Option<Instant>,
    /// Why a process was given up, by rank 0 or here.
    pub(super) given_up: Option<Fault>,
    /// The chunks in flight when rank 0 gave the process up.
    pub(super) in_flight: Option<Chunks>,
    /// Chunks that were in flight when the rank last ended by its own doing.
    pub(super) ended_with: Option<Chunks>,
    /// Chunks that were in flight both last times.
    pub(super) ended_twice_with: Option<Chunks>,
    /// The process ended, and rank 0 has not said yet whether it wants another.
    pub(super) gone: Option<(End, Instant)>,
    /// Rank 0 is not connected with this rank, and takes any process of it that comes.
    pub(super) is_awaited: bool,
}

impl RankState {
    /// The process to kill: its time to end by itself is over.
    pub(super) fn is_late(&mut self, now: Instant) -> Option<u32> {
        self.kill_at.take_if(|at| now >= *at).and(self.replaced)
    }

    /// The process ended for good like this. Gives why, and in words.
    pub(super) fn lose(&mut self, lost: &End, reports: &[Reported]) -> (Fault, String) {
        (self.replaced, self.gone) = (None, None);
        let is_own_doing = lost.is_own_doing(reports);
        let in_flight = self.in_flight.take().filter(|_| is_own_doing);
        let again = in_flight.and_then(|now| in_both(self.ended_with.replace(now)?, now));
        self.ended_twice_with = again;
        lost.why(reports, self.given_up.take())
    }

    /// The fault of a rank that has ended twice by its own doing while the same chunk was in flight: it would a third time.
    pub(super) fn ended_twice(&self, fault: &Fault) -> Option<Fault> {
        let chunks = match self.ended_twice_with? {
            (first, last) if first == last => format!("chunk {first}"),
            (first, last) => format!("chunks {first} to {last}"),
        };
        let why = &fault.detail;
        let detail =
            format!("it ended twice with {chunks} in flight, and is not started again: {why}");
        Some(fault.clone().with_detail(detail))
    }
}

/// The chunks that were in flight at both ends of a rank. A chunk that ends the rank each time is among them.
fn in_both(first: Chunks, second: Chunks) -> Option<Chunks> {
    let both = (first.0.max(second.0), first.1.min(second.1));
    (both.0 <= both.1).then_some(both)
}
