//! What each rank waited for when its recording was written.

use std::collections::BTreeMap;

use crate::RANK_0;
use pp_transport::flight::{Kind, Message, Operation, State};
use serde::Serialize;

use super::pairs::group_of;
use super::ranked::Ranked;

/// What a rank waited for when its recording was written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Wait {
    pub(super) what: String,
    /// The ranks it waited for; none when it was at work itself.
    pub(super) on: Vec<u32>,
    /// For how long, when the recording was written.
    pub(super) for_ns: Option<u64>,
    /// Nothing was begun that is not over.
    pub(super) is_idle: bool,
}

/// What this rank waited for.
pub(super) fn of(own: &Ranked, all: &[Ranked]) -> Wait {
    in_a_group_inside_a_stage(own, all)
        .or_else(|| inside_a_stage(own))
        .or_else(|| in_a_call(own))
        .or_else(|| in_a_group(own, all))
        .or_else(|| for_a_payload(own))
        .or_else(|| for_an_answer(own, all))
        .or_else(|| for_a_device(own))
        .unwrap_or_else(|| for_a_message(own))
}

fn wait(own: &Ranked, what: String, on: Vec<u32>, since_ns: Option<u64>) -> Option<Wait> {
    Some(Wait {
        what,
        on,
        for_ns: since_ns.map(|ns| own.before_ns(ns)),
        is_idle: false,
    })
}

fn operations(own: &Ranked) -> impl DoubleEndedIterator<Item = &Operation> {
    own.recording.operations.iter()
}

/// What a message is about, for people.
fn about(operation: &Operation) -> String {
    let chunk = operation.chunk_index.map(|c| format!("chunk {c}"));
    let call = operation.call_id.map(|c| format!("call {c}"));
    match (chunk, call) {
        (Some(chunk), Some(call)) => format!("{chunk} ({call})"),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => "a message".into(),
    }
}

fn peer(operation: &Operation) -> Vec<u32> {
    operation.peer.iter().map(|peer| peer.get()).collect()
}

/// The driver is inside a stage.
fn inside_a_stage(own: &Ranked) -> Option<Wait> {
    let activity = own.recording.activity.as_ref()?;
    let name = activity.operation.to_string();
    if !activity.is_stage || name == "ask the source" {
        return None;
    }
    let what = match unanswered(own) {
        Some(call) => format!("it was inside {name}, with {} unanswered", about(call)),
        None => format!("it was inside {name}"),
    };
    wait(own, what, Vec::new(), activity.since_ns)
}

/// The driver is inside a call that hands something to the backend.
fn in_a_call(own: &Ranked) -> Option<Wait> {
    let is_inside = |o: &&Operation| match o.kind {
        Kind::Send => o.state == State::Prepared,
        _ => o.state == State::Committed,
    };
    let activity = own.recording.activity.as_ref()?;
    let name = activity.operation.as_str();
    let inside = operations(own).rfind(is_inside);
    let what = match inside {
        Some(o) if o.kind == Kind::Send && name == "send" => {
            format!("it was inside the call that sends {}", about(o))
        }
        Some(o) if o.kind == Kind::Receive && name == "receive" => {
            format!("it was inside the call that receives {}", about(o))
        }
        Some(o) if o.kind.is_of_group() => {
            format!("it was inside the call that begins {}", in_group(own, o))
        }
        _ => return None,
    };
    // A call into a library says no more than that it has not come back.
    wait(own, what, Vec::new(), inside.map(Operation::since_ns))
}

fn in_group(own: &Ranked, o: &Operation) -> String {
    let group = group_of(&own.recording, o);
    let group = group.map_or("?".to_owned(), |group| group.name.to_string());
    let number = o.number.map_or("?".to_owned(), |n| n.to_string());
    let dtype = o.dtype.map_or("?".to_owned(), |d| d.to_string());
    format!(
        "{} {number} of group {group} ({} bytes of {dtype})",
        o.kind, o.bytes
    )
}

/// The driver is inside a stage, and there in an operation of a group to which another member has not come.
fn in_a_group_inside_a_stage(own: &Ranked, all: &[Ranked]) -> Option<Wait> {
    let activity = own.recording.activity.as_ref()?;
    let since = activity.since_ns.filter(|_| activity.is_stage)?;
    let last = operations(own).rfind(|o| o.kind.is_of_group())?;
    let is_open = !last.is_over() && last.prepared_ns >= since;
    let wait = is_open.then(|| of_group(own, last, all)).flatten()?;
    (!wait.on.is_empty()).then_some(wait)
}

/// An operation of a group goes on.
fn in_a_group(own: &Ranked, all: &[Ranked]) -> Option<Wait> {
    let open = operations(own).find(|o| o.kind.is_of_group() && o.state == State::Started)?;
    of_group(own, open, all)
}

/// The members that have not entered this collective, or the other side of this transfer.
fn of_group(own: &Ranked, open: &Operation, all: &[Ranked]) -> Option<Wait> {
    let on = if open.kind.is_collective() {
        let group = group_of(&own.recording, open)?;
        let members = group.members.iter().map(|m| m.get());
        let has_entered = |rank: u32| {
            let mut theirs = all.iter().filter(|r| r.rank() == rank);
            theirs.any(|r| {
                let is_it = |o: &Operation| {
                    o.kind.is_collective()
                        && group_of(&r.recording, o).is_some_and(|g| g.name == group.name)
                        && (o.number, o.generation) == (open.number, open.generation)
                };
                operations(r).any(is_it)
            })
        };
        members.filter(|rank| !has_entered(*rank)).collect()
    } else {
        peer(open)
    };
    let what = format!("it was in {}", in_group(own, open));
    wait(own, what, on, Some(open.since_ns()))
}

/// A header came, and its payload did not.
fn for_a_payload(own: &Ranked) -> Option<Wait> {
    let open = operations(own).find(|o| o.kind == Kind::Receive && o.state == State::Started)?;
    let what = format!("it waited for the payload of {}", about(open));
    wait(own, what, peer(open), Some(open.since_ns()))
}

/// The oldest chunk that rank 0 sent and that has not come back: to the sink, or as its acceptance. It waits for the rank
/// that has the chunk.
fn for_an_answer(own: &Ranked, all: &[Ranked]) -> Option<Wait> {
    if own.recording.rank != RANK_0 {
        return None;
    }
    let asks = |o: &&Operation| {
        let asks = matches!(o.message, Some(Message::Chunk | Message::Shutdown));
        o.kind == Kind::Send && asks && o.committed_ns.is_some()
    };
    // Of a call that was sent again the last sending counts, in the generation that goes on.
    let now = operations(own).map(|o| o.generation).max()?;
    let calls = operations(own).filter(asks).filter(|c| c.generation == now);
    let mut held = calls.map(|call| (call, holder(call, all)));
    let (call, holder) = held.find(|(_, holder)| *holder != RANK_0.get())?;
    let what = match call.message {
        Some(Message::Shutdown) => "it waited for the answer to its shutdown".to_owned(),
        _ => format!("it waited for the result of {}", about(call)),
    };
    wait(own, what, vec![holder], call.committed_ns)
}

/// The rank that a message of rank 0 has come to, as far as the recordings show. It may come to a rank several times.
fn holder(call: &Operation, all: &[Ranked]) -> u32 {
    let of = |rank: u32, kind: Kind| {
        let recordings = all.iter().filter(move |r| r.rank() == rank);
        let same = move |o: &&Operation| {
            let which = (o.message, o.call_id, o.generation);
            o.kind == kind && which == (call.message, call.call_id, call.generation)
        };
        recordings.flat_map(operations).filter(same)
    };
    let mut sent: BTreeMap<u32, usize> = BTreeMap::new();
    let mut holder = RANK_0.get();
    loop {
        let nth = sent.entry(holder).or_default();
        let send = of(holder, Kind::Send).nth(*nth);
        let Some(next) = send.and_then(|send| send.peer) else {
            return holder;
        };
        *nth += 1;
        // Rank 0 has the first message without a receive.
        let visits = |sent: &BTreeMap<u32, usize>, rank: u32| {
            let so_far = sent.get(&rank).copied().unwrap_or(0);
            so_far - usize::from(rank == RANK_0.get())
        };
        let came = |rank: u32| of(rank, Kind::Receive).nth(visits(&sent, rank)).is_some();
        let next = next.get();
        let is_known = all.iter().any(|r| r.rank() == next);
        holder = match is_known || next == RANK_0.get() {
            true if came(next) => next,
            // It is on its way.
            true => return if holder == RANK_0.get() { next } else { holder },
            // What is not recorded has handed it on if it came back.
            false if came(RANK_0.get()) => RANK_0.get(),
            false => return next,
        };
    }
}

/// The oldest chunk that this rank was given and has not handed on.
fn unanswered(own: &Ranked) -> Option<&Operation> {
    if own.recording.rank == RANK_0 {
        return None;
    }
    let now = operations(own).map(|o| o.generation).max()?;
    let of = |kind: Kind| {
        operations(own).filter(move |o| o.kind == kind && o.message == Some(Message::Chunk))
    };
    // With several stages it gets a chunk several times.
    let times = |kind: Kind, call: &Operation| {
        let same = of(kind).filter(|o| o.call_id == call.call_id && o.generation == now);
        same.count()
    };
    of(Kind::Receive)
        .filter(|o| o.generation == now)
        .find(|call| times(Kind::Send, call) < times(Kind::Receive, call))
}

/// Work was given to a device, and is not done.
fn for_a_device(own: &Ranked) -> Option<Wait> {
    let call = unanswered(own)?;
    let what = format!("{} was with it and not answered", about(call));
    let activity = own.recording.activity.as_ref();
    let since = activity.and_then(|a| a.waiting_since_ns).or(call.ended_ns);
    wait(own, what, Vec::new(), since)
}

/// Nothing is open.
fn for_a_message(own: &Ranked) -> Wait {
    let last = operations(own).next_back();
    let heard = operations(own).rfind(|o| !o.kind.is_of_group());
    let on: Vec<u32> = heard.map(peer).unwrap_or_default();
    let what = match on.first() {
        Some(peer) => format!("nothing was open; it waited for a message from rank {peer}"),
        None => "nothing was ever begun".to_owned(),
    };
    Wait {
        what,
        on,
        for_ns: last.map(|o| own.before_ns(o.since_ns())),
        is_idle: true,
    }
}
