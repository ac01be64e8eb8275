//! When a rank that is not connected yet counts as missed.
//!
//! Ranks that are connected watch each other. Before that only their supervisor knows them all: each rank gives it signs of
//! life, whatever the rank waits for or loads, and one that gives none is stopped.

use std::time::{Duration, Instant};

use pp_contract::Rank;

use super::events::Terms;
use crate::times;

/// The watch over ranks that are not connected.
#[derive(Clone, Debug)]
pub(super) struct Vigil {
    /// The job has heartbeats.
    is_on: bool,
    /// Time that a process may take before its first sign, besides that of any other.
    loads_within: Duration,
    /// By rank: the last sign of life of the process that runs. In the future for one that may still load.
    signs: Vec<Option<Instant>>,
    looked: Instant,
    /// When to look again; `None` while the ranks are connected.
    due: Option<Instant>,
}

impl Vigil {
    /// A vigil over ranks that have not begun.
    pub(super) fn new(terms: &Terms, now: Instant) -> Self {
        Self {
            is_on: terms.watches,
            loads_within: terms.loads_within,
            signs: vec![None; terms.world.get() as usize],
            looked: now,
            due: terms.watches.then_some(now),
        }
    }

    /// A process of a rank has begun.
    pub(super) fn begun(&mut self, rank: Rank, now: Instant) {
        self.heard(rank, now + self.loads_within);
    }

    /// A rank has given a sign of life.
    pub(super) fn heard(&mut self, rank: Rank, now: Instant) {
        if let Some(sign) = self.signs.get_mut(rank.get() as usize) {
            *sign = Some(now);
        }
    }

    /// A rank does not run any more.
    pub(super) fn ended(&mut self, rank: Rank) {
        if let Some(sign) = self.signs.get_mut(rank.get() as usize) {
            *sign = None;
        }
    }

    /// Ranks cannot be heard any more, so none is missed.
    pub(super) fn end(&mut self) {
        (self.is_on, self.due) = (false, None);
    }

    /// The ranks are connected: they watch each other.
    pub(super) fn pause(&mut self) {
        self.due = None;
    }

    /// The ranks are connected no more.
    pub(super) fn resume(&mut self, now: Instant) {
        self.looked = now;
        self.due = self.is_on.then_some(now);
        self.forgive(now);
    }

    /// When [`Vigil::look`] has something to do.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// The ranks that are missed now, and for how long each was silent; the longest first.
    pub(super) fn look(&mut self, now: Instant) -> Vec<(Rank, Duration)> {
        if self.due.is_none_or(|due| now < due) {
            return Vec::new();
        }
        let looked = std::mem::replace(&mut self.looked, now);
        self.due = Some(now + times::BEAT_EVERY);
        look(now, looked, &self.signs).unwrap_or_else(|| {
            self.forgive(now);
            Vec::new()
        })
    }

    /// Counts the silence of each rank from now.
    fn forgive(&mut self, now: Instant) {
        for sign in self.signs.iter_mut().flatten() {
            *sign = now.max(*sign);
        }
    }
}

/// The ranks that are missed, by the last sign of each that runs; `None` if this process itself was away, and cannot
/// say that others were silent. `looked` is when that was done before.
fn look(now: Instant, looked: Instant, signs: &[Option<Instant>]) -> Option<Vec<(Rank, Duration)>> {
    if now.saturating_duration_since(looked) > 2 * times::BEAT_EVERY {
        return None;
    }
    let silences = signs.iter().enumerate().filter_map(|(at, sign)| {
        let silence = now.saturating_duration_since((*sign)?);
        (silence >= times::MISSED_AFTER).then_some((Rank::new(at as u32), silence))
    });
    let mut missed: Vec<_> = silences.collect();
    missed.sort_by_key(|(_, silence)| std::cmp::Reverse(*silence));
    Some(missed)
}

#[cfg(test)]
mod tests {
    use pp_contract::WorldSize;

    use super::*;

    #[test]
    fn a_process_that_loads_is_missed_later_and_then_as_any_other() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let terms = Terms {
            world: WorldSize::new(1).unwrap(),
            restarts: 0,
            may_restart: Vec::new(),
            within: Duration::ZERO,
            may_go_on: false,
            watches: true,
            loads_within: Duration::from_secs(60),
        };
        let mut vigil = Vigil::new(&terms, start);
        let missed_at = |vigil: &mut Vigil, seconds| {
            (1..=seconds).find(|second| !vigil.look(at(*second)).is_empty())
        };
        vigil.begun(Rank::new(0), start);
        vigil.resume(start);
        assert_eq!(missed_at(&mut vigil.clone(), 100), Some(65));
        vigil.heard(Rank::new(0), at(20));
        assert_eq!(missed_at(&mut vigil, 100), Some(25));
    }

    #[test]
    fn a_rank_is_missed_after_five_seconds_and_not_while_the_supervisor_was_away() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let now = at(100_000);
        let ago = |ms: u64| at(100_000 - ms);
        let silent = |ms: u64| Some(ago(ms));
        let missed = |ranks: &[(u32, u64)]| {
            let missed = |(rank, ms): &(u32, u64)| (Rank::new(*rank), Duration::from_millis(*ms));
            Some(ranks.iter().map(missed).collect::<Vec<_>>())
        };
        let cases = [
            ("all have just begun", 1000, vec![silent(0); 3], missed(&[])),
            (
                "a sign that is late",
                1000,
                vec![silent(4999), silent(0)],
                missed(&[]),
            ),
            (
                "no sign",
                1000,
                vec![silent(5000), silent(0)],
                missed(&[(0, 5000)]),
            ),
            (
                "none but one",
                1000,
                vec![silent(5000), silent(0), silent(6000)],
                missed(&[(2, 6000), (0, 5000)]),
            ),
            (
                "one that does not run",
                1000,
                vec![None, silent(9000)],
                missed(&[(1, 9000)]),
            ),
            ("none runs", 1000, vec![None, None], missed(&[])),
            (
                "a look that is late",
                2000,
                vec![silent(5000), silent(0)],
                missed(&[(0, 5000)]),
            ),
            (
                "the supervisor was stopped",
                2001,
                vec![silent(60_000), silent(0)],
                None,
            ),
        ];
        for (name, ms_ago, signs, expected) in cases {
            assert_eq!(look(now, ago(ms_ago), &signs), expected, "{name}");
        }
    }
}
