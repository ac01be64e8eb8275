//! The log of a job that ended well: one record for each commitment point.

use std::collections::BTreeMap;

use pp_contract::pipeline::EdgeKind;
use pp_contract::{Pipeline, Rank};

use super::clip::CHUNKS;
use super::role::Role;
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
/// The place of the peer among them.
const PEER: usize = 4;
/// A commitment point: the rank, what it logs, and how often.
pub(super) type Point = (Role, &'static str, u64);

/// What the sender of a message logs, and what its receiver does.
const SENT: &str = "driver: message sent";
const POSTED: &str = "driver: receive posted";
const CLOSED: &str = "driver: shutdown sent";

/// Those of every job.
pub(super) const POINTS: &[Point] = &[
    (Role::Source, SENT, CHUNKS),
    (Role::Source, CLOSED, 1),
    (Role::Stage, POSTED, CHUNKS),
    (Role::Stage, SENT, CHUNKS),
    (Role::Stage, CLOSED, 1),
    (Role::Sink, POSTED, CHUNKS),
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

/// What is wrong with the records of the ranks.
pub(super) fn check(points: &[Point], pipeline: &Pipeline, ranks: &[Ended]) -> Vec<String> {
    let mut wrong = Vec::new();
    let records = |rank: Rank, point| records(&ranks[rank.get() as usize], point);
    for &(role, point, mut wanted) in points {
        let rank = role.rank(pipeline);
        if (role, point) == (Role::Stage, CLOSED) {
            // To the stage behind, and to the other members of its group.
            wanted += pipeline.stages()[1].ranks.len() as u64 - 1;
        }
        let found = records(rank, point);
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
    for edge in pipeline
        .edges()
        .filter(|edge| edge.kind == EdgeKind::Onward)
    {
        let of = |rank, point, peer: Rank| {
            let all = records(rank, point).into_iter();
            let is_of_edge = |record: &Record| record[PEER] == Some(peer.to_string());
            let all = all.filter(is_of_edge).map(|mut record| {
                record.remove(PEER);
                record
            });
            all.collect::<Vec<_>>()
        };
        let (from, to) = (edge.source, edge.target);
        if of(from, SENT, to) != of(to, POSTED, from) {
            wrong.push(format!(
                "{SENT:?} of rank {from} and {POSTED:?} of rank {to} differ"
            ));
        }
    }
    wrong
}
