//! The log of a job that ended well: one record for each point of no return.

use std::collections::BTreeMap;

use super::clip::CHUNKS;
use super::job::Ended;
use crate::job::WORLD;

/// What each record says beside its message.
const FIELDS: [&str; 6] = [
    "call_id",
    "chunk_index",
    "cache_epoch",
    "group",
    "peer",
    "bytes",
];
/// The points of no return of each rank, and how many a job has.
const POINTS: [(usize, &str, u64); 6] = [
    (0, "envelope sent", CHUNKS),
    (0, "receive posted", CHUNKS),
    (0, "shutdown sent", 1),
    (1, "receive posted", CHUNKS),
    (1, "result sent", CHUNKS),
    (1, "shutdown answered", 1),
];
/// Where the driver of both ranks logs.
const TARGET: &str = "pp_runtime::driver: ";

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
    let lines = ended.lines.iter().filter(|line| line.contains(TARGET));
    lines.filter_map(|line| record(line, point)).collect()
}

/// What is wrong with the records of both ranks.
pub(super) fn check(ranks: &[Ended; WORLD as usize]) -> Vec<String> {
    let mut wrong = Vec::new();
    for (rank, point, wanted) in POINTS {
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
        (0, "envelope sent", 1, "receive posted"),
        (1, "result sent", 0, "receive posted"),
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
