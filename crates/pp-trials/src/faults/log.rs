//! The log of a job that ended well: one record for each commitment point.

use std::collections::BTreeMap;

use pp_job::WORLD;

use super::clip::CHUNKS;
use crate::trial::Ended;

/// What each record says beside its message.
const FIELDS: [&str; 6] = [
    "call_id",
    "chunk_index",
    "cache_epoch",
    "group",
    "peer",
    "bytes",
];
/// A commitment point: the rank, what it logs, and how often.
pub(super) type Point = (usize, &'static str, u64);

/// Those of every job.
pub(super) const POINTS: &[Point] = &[
    (0, "driver: envelope sent", CHUNKS),
    (0, "driver: receive posted", CHUNKS),
    (0, "driver: shutdown sent", 1),
    (1, "driver: receive posted", CHUNKS),
    (1, "driver: result sent", CHUNKS),
    (1, "driver: shutdown answered", 1),
];
/// Those of a job with one collective of Phase B's.
pub(super) const WITH_COLLECTIVE: &[Point] = &[
    (0, "driver: envelope sent", CHUNKS),
    (0, "driver: receive posted", CHUNKS),
    (1, "driver: receive posted", CHUNKS),
    (1, "driver: result sent", CHUNKS),
    (1, "group: collective entered", 1),
];

/// The values of the fields, in their order; `None` for one that is not there.
type Record = Vec<Option<String>>;

fn record(line: &str, point: &str) -> Option<Record> {
    let (_, fields) = line.split_once(point)?;
    let values: BTreeMap<&str, &str> = fields
        .split_whitespace()
        .filter_map(|field| field.split_once('='))
        .collect();
    let value = |name: &&str| values.get(*name).map(|value| (*value).to_owned());
    Some(FIELDS.iter().map(value).collect())
}

/// The records of one point on one rank.
fn records(ended: &Ended, point: &str) -> Vec<Record> {
    let lines = ended.lines.iter();
    lines.filter_map(|line| record(line, point)).collect()
}

/// What is wrong with the records of both ranks.
pub(super) fn check(points: &[Point], ranks: &[Ended; WORLD as usize]) -> Vec<String> {
    let mut wrong = Vec::new();
    for &(rank, point, wanted) in points {
        let found = records(&ranks[rank], point);
        if found.len() as u64 != wanted {
            let count = found.len();
            wrong.push(format!(
                "rank {rank} logged {point:?} {count} times, not {wanted}"
            ));
        }
        for record in &found {
            let mut fields = FIELDS.iter().zip(record);
            if let Some((name, _)) = fields.find(|(_, value)| value.is_none()) {
                wrong.push(format!("rank {rank}: a record of {point:?} has no {name}"));
            }
        }
    }
    // What one side sends the other receives: the same call, chunk, epoch and size, in one order.
    let pairs = [
        (0, "driver: envelope sent", 1, "driver: receive posted"),
        (1, "driver: result sent", 0, "driver: receive posted"),
    ];
    for (from, sent, to, received) in pairs {
        let of = |rank: usize, point| {
            let records = records(&ranks[rank], point).into_iter();
            records
                .map(|mut record: Record| {
                    // The peers of each other.
                    record.remove(4);
                    record
                })
                .collect::<Vec<_>>()
        };
        if of(from, sent) != of(to, received) {
            wrong.push(format!(
                "{sent:?} of rank {from} and {received:?} of rank {to} differ"
            ));
        }
    }
    wrong
}
