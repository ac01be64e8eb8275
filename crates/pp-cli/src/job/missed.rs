//! When a rank that is not connected yet counts as missed.
//!
//! Ranks that are connected watch each other. Before that only their supervisor knows both: each rank gives it signs of
//! life, whatever the rank waits for or loads, and one that gives none is stopped.

use std::time::{Duration, Instant};

/// Silence of a rank that is missed.
pub(super) const MISSED_AFTER: Duration = Duration::from_secs(5);
/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What a look at the ranks shows.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// All have given a sign in time; look again then.
    Again(Instant),
    /// The supervisor itself was away: it cannot say that others were silent. Count their silence from now.
    Forgive,
    /// The rank at this place has given no sign for so long.
    Missed(usize, Duration),
}

/// Looks at the last sign of each rank that runs and is not connected. `looked` is when that was done before.
pub(super) fn look(now: Instant, looked: Instant, signs: &[Option<Instant>]) -> Look {
    if now.saturating_duration_since(looked) > 2 * LOOK_EVERY {
        return Look::Forgive;
    }
    let silences = signs.iter().enumerate().filter_map(|(place, sign)| {
        let silence = now.saturating_duration_since((*sign)?);
        (silence >= MISSED_AFTER).then_some((place, silence))
    });
    match silences.max_by_key(|(_, silence)| *silence) {
        Some((place, silence)) => Look::Missed(place, silence),
        None => Look::Again(now + LOOK_EVERY),
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
        let again = || Look::Again(at(101_000));
        let missed = |place, ms| Look::Missed(place, Duration::from_millis(ms));
        let cases = [
            (
                "both have just begun",
                1000,
                [silent(0), silent(0)],
                again(),
            ),
            (
                "a sign that is late",
                1000,
                [silent(4999), silent(0)],
                again(),
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
            ("none runs", 1000, [None, None], again()),
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
