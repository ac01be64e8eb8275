//! When a rank that is not connected yet counts as missed.
//!
//! Ranks that are connected watch each other. Before that only their supervisor knows both: each rank gives it signs of
//! life, whatever the rank waits for or loads, and one that gives none is stopped.

use std::time::{Duration, Instant};

use pp_contract::Rank;

use crate::{WORLD, times};

/// The watch over ranks that are not connected.
#[derive(Clone, Debug)]
pub(super) struct Vigil {
    /// The job has heartbeats.
    is_on: bool,
    /// By rank: the last sign of life of the process that runs.
    signs: [Option<Instant>; WORLD as usize],
    looked: Instant,
    /// When to look again; `None` while the ranks are connected.
    due: Option<Instant>,
}

impl Vigil {
    /// A vigil over ranks that have not begun.
    pub(super) fn new(is_on: bool, now: Instant) -> Self {
        Self {
            is_on,
            signs: [None; WORLD as usize],
            looked: now,
            due: is_on.then_some(now),
        }
    }

    /// A rank has begun, or has given a sign of life.
    pub(super) fn heard(&mut self, rank: Rank, now: Instant) {
        if let Some(sign) = self.signs.get_mut(rank.get() as usize) {
            *sign = Some(now);
        }
    }

    /// A rank does not run any more.
    pub(super) fn ended(&mut self, rank: Rank) {
        self.signs[rank.get() as usize] = None;
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

    /// The rank that is missed now, and for how long it was silent.
    pub(super) fn look(&mut self, now: Instant) -> Option<(Rank, Duration)> {
        if self.due.is_none_or(|due| now < due) {
            return None;
        }
        let looked = std::mem::replace(&mut self.looked, now);
        self.due = Some(now + times::BEAT_EVERY);
        match look(now, looked, &self.signs) {
            Look::AllWell => None,
            Look::Forgive => {
                self.forgive(now);
                None
            }
            Look::Missed(place, silence) => Some((Rank::new(place as u32), silence)),
        }
    }

    /// Counts the silence of each rank from now.
    fn forgive(&mut self, now: Instant) {
        for sign in self.signs.iter_mut().flatten() {
            *sign = now;
        }
    }
}

/// What a look at the ranks shows.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    AllWell,
    /// The supervisor itself was away: it cannot say that others were silent.
    Forgive,
    /// The rank at this place has given no sign for so long.
    Missed(usize, Duration),
}

/// Looks at the last sign of each rank that runs. `looked` is when that was done before.
fn look(now: Instant, looked: Instant, signs: &[Option<Instant>]) -> Look {
    if now.saturating_duration_since(looked) > 2 * times::BEAT_EVERY {
        return Look::Forgive;
    }
    let silences = signs.iter().enumerate().filter_map(|(place, sign)| {
        let silence = now.saturating_duration_since((*sign)?);
        (silence >= times::MISSED_AFTER).then_some((place, silence))
    });
    match silences.max_by_key(|(_, silence)| *silence) {
        Some((place, silence)) => Look::Missed(place, silence),
        None => Look::AllWell,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_missed_after_five_seconds_and_not_while_the_supervisor_was_away() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let now = at(100_000);
        let ago = |ms: u64| at(100_000 - ms);
        let silent = |ms: u64| Some(ago(ms));
        let missed = |place, ms| Look::Missed(place, Duration::from_millis(ms));
        let cases = [
            (
                "both have just begun",
                1000,
                [silent(0), silent(0)],
                Look::AllWell,
            ),
            (
                "a sign that is late",
                1000,
                [silent(4999), silent(0)],
                Look::AllWell,
            ),
            ("no sign", 1000, [silent(5000), silent(0)], missed(0, 5000)),
            (
                "neither",
                1000,
                [silent(5000), silent(6000)],
                missed(1, 6000),
            ),
            (
                "one that does not run",
                1000,
                [None, silent(9000)],
                missed(1, 9000),
            ),
            ("none runs", 1000, [None, None], Look::AllWell),
            (
                "a look that is late",
                2000,
                [silent(5000), silent(0)],
                missed(0, 5000),
            ),
            (
                "the supervisor was stopped",
                2001,
                [silent(60_000), silent(0)],
                Look::Forgive,
            ),
        ];
        for (name, ms_ago, signs, expected) in cases {
            assert_eq!(look(now, ago(ms_ago), &signs), expected, "{name}");
        }
    }
}
