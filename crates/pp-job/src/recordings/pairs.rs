//! Operations and their other halves.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use pp_transport::flight::{Group, Kind, Message, Operation, Recording};
use serde::Serialize;

use super::ranked::Ranked;

/// What an operation is to all ranks that take part in it: by its numbers, which they count alike,
/// and by nothing that they could disagree on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    series: Series,
    /// The call of a message; else the number in its group.
    number: u64,
    /// The number of its payload on the edge: in a ring a call goes over an edge once for each lap.
    payload: Option<u64>,
    /// What kind of message it is, if it is one.
    message: Option<Message>,
}

/// Operations that follow each other: messages over an edge, transfers from one rank to another, or collectives of a group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Series {
    is_collective: bool,
    /// None of messages.
    group: Option<String>,
    generation: u32,
    /// From which rank to which; none of collectives.
    ranks: Option<(u32, u32)>,
    /// Of messages: two edges may lead from one rank to the same other.
    edge: Option<u32>,
}

/// Which operation this is to all ranks; `None` while it has no number.
pub(super) fn key(recording: &Recording, operation: &Operation) -> Option<Key> {
    let own = recording.rank.get();
    let peer = operation.peer.map(|peer| peer.get());
    let ranks = match operation.kind {
        Kind::Send | Kind::GroupSend => Some((own, peer?)),
        Kind::Receive | Kind::GroupReceive => Some((peer?, own)),
        _ => None,
    };
    let generation = operation.generation.get();
    let is_of_group = operation.kind.is_of_group();
    let (group, number, message) = if is_of_group {
        let group = group_of(recording, operation)?;
        (Some(group.name.to_string()), operation.number?, None)
    } else {
        let message = Some(operation.message?);
        (None, operation.call_id?.get(), message)
    };
    Some(Key {
        series: Series {
            is_collective: ranks.is_none(),
            group,
            generation,
            ranks,
            edge: operation.edge,
        },
        number,
        payload: operation.number.filter(|_| !is_of_group),
        message,
    })
}

/// The group of an operation.
pub(super) fn group_of<'a>(recording: &'a Recording, operation: &Operation) -> Option<&'a Group> {
    recording.groups.get(usize::from(operation.group?))
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.number;
        let group = self.series.group.as_deref().unwrap_or_default();
        match (&self.message, self.series.ranks) {
            (Some(message), _) => write!(f, "the {message} of call {number}")?,
            (None, Some(_)) => write!(f, "transfer {number} of group {group}")?,
            (None, None) => write!(f, "collective {number} of group {group}")?,
        }
        if let Some((from, to)) = self.series.ranks {
            write!(f, " from rank {from} to rank {to}")?;
        }
        match self.series.generation {
            0 => Ok(()),
            generation => write!(f, " (generation {generation})"),
        }
    }
}

/// One rank's half of an operation.
pub(super) struct Half<'a> {
    pub(super) of: &'a Ranked,
    pub(super) operation: &'a Operation,
}

/// All halves that have a number, by what they are halves of.
pub(super) fn halves(ranked: &[Ranked]) -> BTreeMap<Key, Vec<Half<'_>>> {
    let mut all: BTreeMap<Key, Vec<Half<'_>>> = BTreeMap::new();
    for of in ranked {
        for operation in of.recording.operations.iter() {
            if let Some(key) = key(&of.recording, operation) {
                all.entry(key).or_default().push(Half { of, operation });
            }
        }
    }
    all
}

/// What the halves say together.
#[derive(Serialize)]
pub(super) struct Findings {
    /// Operations of which two ranks or more have their half.
    pub(super) matched: usize,
    /// The first operation on which ranks disagree.
    pub(super) disagreement: Option<String>,
    /// Who never came to what.
    pub(super) never_came: Vec<String>,
    /// The ranks that never came.
    pub(super) absent: BTreeSet<u32>,
}

/// Holds the halves against each other.
pub(super) fn find(ranked: &[Ranked]) -> Findings {
    let halves = halves(ranked);
    let mut disagreements = Vec::new();
    let mut never_came = Vec::new();
    let mut absent = BTreeSet::new();
    let mut first_of = BTreeSet::new();
    for (key, halves) in &halves {
        let begun = halves.iter().map(|h| h.of.at(h.operation.prepared_ns));
        let begun = begun.min().unwrap_or(0);
        if let Some(what) = differs(key, halves) {
            disagreements.push((begun, what));
            continue;
        }
        for rank in lacking(key, halves) {
            let Some(of) = who_would_know(key, rank, begun, ranked) else {
                continue;
            };
            let half = &halves[0];
            // Of each edge and group the first is enough: what follows waits behind it.
            let place = (rank, half.operation.kind, half.operation.group);
            match verb(half.operation.kind) {
                Some(verb) if first_of.insert(place) => {
                    never_came.push(format!("rank {rank} never {verb} {key}"));
                    absent.insert(rank);
                }
                Some(_) => {}
                None if !has_unnumbered(&of.recording) => {
                    disagreements.push((begun, format!("{key}: rank {rank} did not send it")));
                }
                None => {}
            }
        }
    }
    disagreements.sort();
    Findings {
        matched: halves.values().filter(|halves| halves.len() > 1).count(),
        disagreement: disagreements.into_iter().next().map(|(_, what)| what),
        never_came,
        absent,
    }
}

/// What a rank did not do that lacks its half of this; `None` where it is the sender's.
fn verb(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Send => Some("took in"),
        Kind::GroupSend => Some("received"),
        Kind::GroupReceive => Some("sent"),
        Kind::AllReduce | Kind::Broadcast => Some("entered"),
        _ => None,
    }
}

/// Whether a send was under way that had no number yet: it may be any.
fn has_unnumbered(recording: &Recording) -> bool {
    let mut operations = recording.operations.iter();
    operations.any(|o| o.kind == Kind::Send && o.call_id.is_none())
}

/// Ranks that have no half of this, and should.
fn lacking(key: &Key, halves: &[Half<'_>]) -> Vec<u32> {
    let has = |rank: u32| halves.iter().any(|half| half.of.rank() == rank);
    let members: Vec<u32> = match key.series.ranks {
        Some((from, to)) => vec![from, to],
        None => {
            let group = group_of(&halves[0].of.recording, halves[0].operation);
            let members = group.into_iter().flat_map(|g| g.members.iter());
            members.map(|m| m.get()).collect()
        }
    };
    members.into_iter().filter(|rank| !has(*rank)).collect()
}

/// The recording of this rank, if it would have its half: it was written later, is of the process
/// that was there then, and has not forgotten.
fn who_would_know<'a>(
    key: &Key,
    rank: u32,
    begun: i128,
    ranked: &'a [Ranked],
) -> Option<&'a Ranked> {
    let of_rank = || ranked.iter().filter(|r| r.rank() == rank);
    let is_alone = of_rank().count() == 1;
    of_rank().find(|r| {
        let operations = || r.recording.operations.iter();
        let was_there =
            is_alone || operations().any(|o| o.generation.get() == key.series.generation);
        let has_all = r.recording.total == r.recording.operations.len() as u64;
        let mut keys = operations().filter_map(|o| self::key(&r.recording, o));
        let is_earlier = |k: Key| k.series == key.series && k.number < key.number;
        let remembers = has_all || keys.any(is_earlier);
        let later = r.at(r.recording.written.monotonic_ns) > begun;
        was_there && remembers && later
    })
}

/// What two halves say differently, if they do.
fn differs(key: &Key, halves: &[Half<'_>]) -> Option<String> {
    let (first, rest) = halves.split_first()?;
    for other in rest {
        let of = |half: &Half<'_>| said(half.operation);
        for ((what, a), (_, b)) in of(first).into_iter().zip(of(other)) {
            if a != b {
                let (ra, rb) = (first.of.rank(), other.of.rank());
                return Some(format!("{key}: {what} {a} at rank {ra}, {b} at rank {rb}"));
            }
        }
    }
    None
}

/// What all halves of an operation must say alike.
fn said(operation: &Operation) -> Vec<(&'static str, String)> {
    let number = |n: Option<u64>| n.map_or("none".to_owned(), |n| n.to_string());
    let mut said = Vec::new();
    if operation.kind.is_collective() {
        said.push(("it is", operation.kind.to_string()));
        let root = operation.peer.map(|rank| u64::from(rank.get()));
        said.push(("from rank", number(root)));
    }
    if operation.kind.is_of_group() {
        let dtype = operation.dtype.map(|d| d.to_string());
        said.push(("of type", dtype.unwrap_or("unknown".into())));
    } else {
        said.push(("chunk", number(operation.chunk_index.map(|c| c.get()))));
        said.push(("epoch", number(operation.cache_epoch.map(|e| e.get()))));
    }
    said.push(("bytes", operation.bytes.to_string()));
    said
}
