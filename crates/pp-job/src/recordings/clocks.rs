//! One clock for all ranks.
//!
//! Ranks that were on one machine, started once, read the same monotonic clock. Others are placed by
//! what cannot have been otherwise: no message was taken in before it was handed over to be sent.
//! Messages both ways leave an interval; its middle is taken and its half said.

use std::collections::BTreeMap;

use pp_transport::flight::{Kind, Recording};

use super::pairs::{Key, key};
use super::ranked::{By, Clock, Files, Ranked};

/// Places the clocks of all recordings against the first.
pub(super) fn align(files: Files) -> Vec<Ranked> {
    let mut clocks: Vec<Option<Clock>> = vec![None; files.len()];
    // Each round places those that have met one which is placed.
    for _ in 0..files.len() {
        for at in 0..files.len() {
            if clocks[at].is_none() {
                clocks[at] = place(at, &files, &clocks);
            }
        }
    }
    let wall =
        |r: &Recording| i128::from(r.written.realtime_ns) - i128::from(r.written.monotonic_ns);
    let first = files.first().map_or(0, |(_, first)| wall(first));
    let placed = files.into_iter().zip(clocks);
    let ranked = placed.map(|((file, recording), clock)| Ranked {
        clock: clock.unwrap_or_else(|| Clock {
            offset_ns: wall(&recording) - first,
            by: By::WallClock,
            within_ns: None,
        }),
        file,
        recording,
    });
    ranked.collect()
}

fn place(at: usize, files: &Files, clocks: &[Option<Clock>]) -> Option<Clock> {
    let own = &files[at].1;
    let known = || {
        let placed = files.iter().zip(clocks);
        placed.filter_map(|((_, other), clock)| Some((other, clock.as_ref()?)))
    };
    let is_same = |other: &Recording| !own.boot.is_empty() && other.boot == own.boot;
    if let Some((_, clock)) = known().find(|(other, _)| is_same(other)) {
        return Some(clock.clone());
    }
    // Not before what it has received was sent; not after what it has sent was received.
    let earliest = known().flat_map(|(other, clock)| {
        let apart = |(sent, received)| sent + clock.offset_ns - received;
        messages(other, own).into_iter().map(apart)
    });
    let latest = known().flat_map(|(other, clock)| {
        let apart = |(sent, received)| received + clock.offset_ns - sent;
        messages(own, other).into_iter().map(apart)
    });
    let (offset_ns, by, within_ns) = match (earliest.max(), latest.min()) {
        _ if at == 0 => (0, By::SameClock, Some(0)),
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
fn messages(from: &Recording, to: &Recording) -> Vec<(i128, i128)> {
    let of = |recording: &Recording, kind: Kind| -> BTreeMap<Key, i128> {
        let operations = recording.operations.iter().filter(|o| o.kind == kind);
        operations
            .filter_map(|o| Some((key(recording, o)?, o.prepared_ns.into())))
            .collect()
    };
    let taken_in = of(to, Kind::Receive);
    let sent = of(from, Kind::Send).into_iter();
    sent.filter_map(|(key, sent)| Some((sent, *taken_in.get(&key)?)))
        .collect()
}
