//! One clock for all ranks.
//!
//! Ranks that were on one machine, started once, read the same monotonic clock. Others are placed by
//! what cannot have been otherwise: no message was taken in before it was handed over to be sent.
//! Messages both ways leave an interval; its middle is taken and its half said.

use super::pairs::{Key, key};
use super::ranked::{By, Clock};
use pp_transport::flight::{Kind, Recording};

/// Places the clocks of all recordings against the first.
pub(super) fn align(recordings: Vec<&Recording>) -> Vec<Clock> {
    let mut clocks: Vec<Option<Clock>> = vec![None; recordings.len()];
    if let Some(first) = clocks.first_mut() {
        *first = Some(Clock {
            offset_ns: 0,
            by: By::SameClock,
            within_ns: Some(0),
        });
    }
    // Each round places those that have met one which is placed.
    for _ in 0..recordings.len() {
        for at in 0..recordings.len() {
            if clocks[at].is_none() {
                clocks[at] = place(at, &recordings, &clocks);
            }
        }
    }
    let by_wall = |recording: &Recording| {
        let wall =
            |r: &Recording| i128::from(r.written.realtime_ns) - i128::from(r.written.monotonic_ns);
        Clock {
            offset_ns: wall(recording) - recordings.first().map_or(0, |first| wall(first)),
            by: By::WallClock,
            within_ns: None,
        }
    };
    let placed = clocks.into_iter().zip(&recordings);
    placed
        .map(|(clock, recording)| clock.unwrap_or_else(|| by_wall(recording)))
        .collect()
}

fn place(at: usize, recordings: &[&Recording], clocks: &[Option<Clock>]) -> Option<Clock> {
    let own = recordings[at];
    let known = || {
        let placed = recordings.iter().zip(clocks);
        placed.filter_map(|(recording, clock)| Some((*recording, clock.as_ref()?)))
    };
    let is_same = |r: &Recording| !own.boot.is_empty() && r.boot == own.boot;
    if let Some((_, clock)) = known().find(|(recording, _)| is_same(recording)) {
        return Some(clock.clone());
    }
    // Not before what it has received was sent; not after what it has sent was received.
    let (mut earliest, mut latest) = (None::<i128>, None::<i128>);
    for (other, clock) in known() {
        for (sent, received) in messages(other, own) {
            let bound = i128::from(sent) + clock.offset_ns - i128::from(received);
            earliest = Some(earliest.map_or(bound, |e| e.max(bound)));
        }
        for (sent, received) in messages(own, other) {
            let bound = i128::from(received) + clock.offset_ns - i128::from(sent);
            latest = Some(latest.map_or(bound, |l| l.min(bound)));
        }
    }
    let (offset_ns, by, within_ns) = match (earliest, latest) {
        (None, None) => return None,
        (Some(earliest), Some(latest)) => {
            let half = (latest - earliest).unsigned_abs() / 2;
            let middle = earliest.midpoint(latest);
            (middle, By::Messages, u64::try_from(half).ok())
        }
        (one, other) => (one.or(other)?, By::OneWay, None),
    };
    Some(Clock {
        offset_ns,
        by,
        within_ns,
    })
}

/// When each message that both still have was given to be sent, and taken in.
fn messages(from: &Recording, to: &Recording) -> Vec<(u64, u64)> {
    let of = |recording: &Recording, kind: Kind| -> std::collections::BTreeMap<Key, u64> {
        let operations = recording.operations.iter().filter(|o| o.kind == kind);
        operations
            .filter_map(|o| Some((key(recording, o)?, o.prepared_ns)))
            .collect()
    };
    let taken_in = of(to, Kind::Receive);
    let sent = of(from, Kind::Send);
    sent.into_iter()
        .filter_map(|(key, sent)| Some((sent, *taken_in.get(&key)?)))
        .collect()
}
