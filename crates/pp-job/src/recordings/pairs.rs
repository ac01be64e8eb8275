//! Operations and their other halves.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use pp_contract::Rank;
use pp_transport::flight::{Group, Kind, Message, Operation, Recording};

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
    let (own, peer) = (recording.rank.get(), operation.peer.map(Rank::get));
    let ranks = match operation.kind {
        Kind::Send | Kind::GroupSend => Some((own, peer?)),
        Kind::Receive | Kind::GroupReceive => Some((peer?, own)),
        _ => None,
    };
    let (group, number, payload, message) = match operation.kind.is_of_group() {
        true => {
            let group = group_of(recording, operation)?.name.to_string();
            (Some(group), operation.number?, None, None)
        }
        false => {
            let call = operation.call_id?.get();
            (None, call, operation.number, Some(operation.message?))
        }
    };
    Some(Key {
        series: Series {
            group,
            generation: operation.generation.get(),
            ranks,
            edge: operation.edge,
        },
        number,
        payload,
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
    /// The place of its recording.
    pub(super) at: usize,
    pub(super) of: &'a Ranked,
    pub(super) operation: &'a Operation,
}

/// All halves that have a number, by what they are halves of.
pub(super) fn halves(ranked: &[Ranked]) -> BTreeMap<Key, Vec<Half<'_>>> {
    let mut all: BTreeMap<Key, Vec<Half<'_>>> = BTreeMap::new();
    for (at, of) in ranked.iter().enumerate() {
        for operation in of.operations() {
            if let Some(key) = key(&of.recording, operation) {
                let half = Half { at, of, operation };
                all.entry(key).or_default().push(half);
            }
        }
    }
    all
}

/// An operation of which a rank has no half.
pub(super) struct Lack {
    pub(super) rank: u32,
    /// What it did not do: `took in`, after `never`, and `taken in`, after `had not yet`.
    verb: [&'static str; 2],
    key: Key,
}

impl Lack {
    pub(super) fn never(&self) -> String {
        format!("rank {} never {} {}", self.rank, self.verb[0], self.key)
    }

    pub(super) fn not_yet(&self) -> String {
        let Self { rank, verb, key } = self;
        format!("rank {rank} had not yet {} {key}", verb[1])
    }
}

/// What the halves say together.
pub(super) struct Findings {
    /// Operations of which two ranks or more have their half.
    pub(super) matched: usize,
    /// The first operation on which ranks disagree.
    pub(super) disagreement: Option<String>,
    /// The first operation of each edge and group that a rank lacks: what follows waits behind it.
    pub(super) lacks: Vec<Lack>,
}

/// Holds the halves against each other.
pub(super) fn find(ranked: &[Ranked]) -> Findings {
    let halves = halves(ranked);
    let mut disagreements = Vec::new();
    let mut lacks = Vec::new();
    let mut first_of = BTreeSet::new();
    for (key, halves) in &halves {
        let begun = halves.iter().map(|h| h.of.at(h.operation.prepared_ns));
        let begun = begun.min().unwrap_or(0);
        if let Some(what) = differs(key, halves) {
            disagreements.push((begun, what));
            continue;
        }
        let Operation { kind, group, .. } = *halves[0].operation;
        for rank in lacking(key, halves) {
            let Some(of) = who_would_know(key, rank, begun, ranked) else {
                continue;
            };
            // A send that is under way and has no number yet may be any.
            let is_unnumbered = |o: &Operation| o.kind == Kind::Send && o.call_id.is_none();
            let verb = match kind {
                Kind::Send => ["took in", "taken in"],
                Kind::GroupSend => ["received"; 2],
                Kind::GroupReceive => ["sent"; 2],
                Kind::Receive if of.operations().any(is_unnumbered) => continue,
                Kind::Receive => {
                    disagreements.push((begun, format!("{key}: rank {rank} did not send it")));
                    continue;
                }
                _ => ["entered"; 2],
            };
            if first_of.insert((rank, kind, group)) {
                let key = key.clone();
                lacks.push(Lack { rank, verb, key });
            }
        }
    }
    disagreements.sort();
    Findings {
        matched: halves.values().filter(|halves| halves.len() > 1).count(),
        disagreement: disagreements.into_iter().next().map(|(_, what)| what),
        lacks,
    }
}

/// Ranks that have no half of this, and should.
fn lacking(key: &Key, halves: &[Half<'_>]) -> Vec<u32> {
    let members = match key.series.ranks {
        Some((from, to)) => vec![from, to],
        None => {
            let group = group_of(&halves[0].of.recording, halves[0].operation);
            let members = group.into_iter().flat_map(|g| g.members.iter());
            members.map(|m| m.get()).collect()
        }
    };
    let has = |rank: &u32| halves.iter().any(|half| half.of.rank() == *rank);
    members.into_iter().filter(|rank| !has(rank)).collect()
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
    let is_then = |o: &Operation| o.generation.get() == key.series.generation;
    let is_earlier = |k: Key| k.series == key.series && k.number < key.number;
    of_rank().find(|r| {
        let was_there = is_alone || r.operations().any(is_then);
        let has_all = r.recording.total == r.recording.operations.len() as u64;
        let mut keys = r.operations().filter_map(|o| self::key(&r.recording, o));
        let later = r.at(r.recording.written.monotonic_ns) > begun;
        was_there && later && (has_all || keys.any(is_earlier))
    })
}

/// What two halves say differently, if they do.
fn differs(key: &Key, halves: &[Half<'_>]) -> Option<String> {
    let (first, rest) = halves.split_first()?;
    rest.iter().find_map(|other| {
        let both = said(first.operation).into_iter().zip(said(other.operation));
        let mut differ = both.filter(|((_, a), (_, b))| a != b);
        let ((what, a), (_, b)) = differ.next()?;
        let (ra, rb) = (first.of.rank(), other.of.rank());
        Some(format!("{key}: {what} {a} at rank {ra}, {b} at rank {rb}"))
    })
}

/// What all halves of an operation must say alike.
fn said(operation: &Operation) -> Vec<(&'static str, String)> {
    let number = |n: Option<u64>| n.map_or("none".to_owned(), |n| n.to_string());
    let mut said = Vec::new();
    if operation.kind.is_collective() {
        said.push(("it is", operation.kind.to_string()));
        let root = operation.peer.map(|rank| rank.get().into());
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
