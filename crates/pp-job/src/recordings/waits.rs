//! What each rank waited for when its recording was written.

use std::collections::BTreeMap;

use pp_contract::{Generation, Rank};
use pp_transport::flight::{Kind, Message, Operation, State};
use serde::Serialize;

use super::pairs::group_of;
use super::ranked::Ranked;
use crate::RANK_0;

/// What a rank waited for when its recording was written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Wait {
    pub(super) what: String,
    /// The same with the name of the rank.
    #[serde(skip)]
    pub(super) named: String,
    /// The ranks it waited for; none when it was at work itself.
    pub(super) on: Vec<u32>,
    /// For how long, when the recording was written.
    pub(super) for_ns: Option<u64>,
    /// Nothing was begun that is not over.
    pub(super) is_idle: bool,
}

/// A wait that began then; `what` is said of the rank.
fn wait(own: &Ranked, what: &str, on: Vec<u32>, since_ns: Option<u64>) -> Wait {
    Wait {
        what: format!("it {what}"),
        named: format!("rank {} {what}", own.rank()),
        on,
        for_ns: since_ns.map(|ns| own.before_ns(ns)),
        is_idle: false,
    }
}

/// A wait of which a sentence of its own is said.
fn told(own: &Ranked, what: String, on: Vec<u32>, since_ns: Option<u64>) -> Wait {
    Wait {
        named: format!("rank {}: {what}", own.rank()),
        what,
        ..wait(own, "", on, since_ns)
    }
}

/// What this rank waited for.
pub(super) fn of(own: &Ranked, all: &[Ranked]) -> Wait {
    in_a_stage(own, all)
        .or_else(|| in_a_call(own))
        .or_else(|| in_a_group(own, all))
        .or_else(|| for_a_payload(own))
        .or_else(|| for_an_answer(own, all))
        .or_else(|| for_a_device(own))
        .unwrap_or_else(|| for_a_message(own))
}

/// What a message is about, for people.
fn about(operation: &Operation) -> String {
    match (operation.chunk_index, operation.call_id) {
        (Some(chunk), Some(call)) => format!("chunk {chunk} (call {call})"),
        (Some(chunk), None) => format!("chunk {chunk}"),
        (None, Some(call)) => format!("call {call}"),
        (None, None) => "a message".into(),
    }
}

fn peer(operation: &Operation) -> Vec<u32> {
    operation.peer.iter().map(|peer| peer.get()).collect()
}

/// The driver is inside a stage, and perhaps there in an operation of a group to which another member has not come.
fn in_a_stage(own: &Ranked, all: &[Ranked]) -> Option<Wait> {
    let activity = own.recording.activity.as_ref()?;
    let activity = Some(activity).filter(|activity| activity.is_stage)?;
    let is_inside = |o: &&Operation| activity.since_ns.is_some_and(|ns| o.prepared_ns >= ns);
    let last = own.operations().rfind(|o| o.kind.is_of_group());
    let open = last.filter(|o| !o.is_over()).filter(is_inside);
    let of_group = open.and_then(|open| of_group(own, open, all));
    if let Some(wait) = of_group.filter(|wait| !wait.on.is_empty()) {
        return Some(wait);
    }
    let name = activity.operation.as_str();
    let with = unanswered(own).map(|call| format!(", with {} unanswered", about(call)));
    let what = format!("was inside {name}{}", with.unwrap_or_default());
    (name != "ask the source").then(|| wait(own, &what, Vec::new(), activity.since_ns))
}

/// The driver is inside a call that hands something to the backend.
fn in_a_call(own: &Ranked) -> Option<Wait> {
    let name = own.recording.activity.as_ref()?.operation.as_str();
    let inside = own.operations().rfind(|o| match o.kind {
        Kind::Send => o.state == State::Prepared,
        _ => o.state == State::Committed,
    })?;
    let call = match inside.kind {
        Kind::Send if name == "send" => format!("sends {}", about(inside)),
        Kind::Receive if name == "receive" => format!("receives {}", about(inside)),
        kind if kind.is_of_group() => format!("begins {}", in_words(own, inside)),
        _ => return None,
    };
    let what = format!("was inside the call that {call}");
    // A call into a library says no more than that it has not come back.
    Some(wait(own, &what, Vec::new(), Some(inside.since_ns())))
}

/// An operation of a group.
fn in_words(own: &Ranked, o: &Operation) -> String {
    let or = |text: Option<String>| text.unwrap_or("?".into());
    let group = or(group_of(&own.recording, o).map(|group| group.name.to_string()));
    let number = or(o.number.map(|n| n.to_string()));
    let dtype = or(o.dtype.map(|d| d.to_string()));
    format!(
        "{} {number} of group {group} ({} bytes of {dtype})",
        o.kind, o.bytes
    )
}

/// An operation of a group goes on.
fn in_a_group(own: &Ranked, all: &[Ranked]) -> Option<Wait> {
    let mut open = own.operations().filter(|o| o.state == State::Started);
    of_group(own, open.find(|o| o.kind.is_of_group())?, all)
}

/// The members that have not entered this collective, or the other side of this transfer.
fn of_group(own: &Ranked, open: &Operation, all: &[Ranked]) -> Option<Wait> {
    let on = if open.kind.is_collective() {
        let group = group_of(&own.recording, open)?;
        let is_it = |r: &Ranked, o: &Operation| {
            o.kind.is_collective()
                && group_of(&r.recording, o).is_some_and(|g| g.name == group.name)
                && (o.number, o.generation) == (open.number, open.generation)
        };
        let has_entered = |rank: &u32| {
            let mut theirs = all.iter().filter(|r| r.rank() == *rank);
            theirs.any(|r| r.operations().any(|o| is_it(r, o)))
        };
        let members = group.members.iter().map(|m| m.get());
        members.filter(|rank| !has_entered(rank)).collect()
    } else {
        peer(open)
    };
    let what = format!("was in {}", in_words(own, open));
    Some(wait(own, &what, on, Some(open.since_ns())))
}

/// A header came, and its payload did not.
fn for_a_payload(own: &Ranked) -> Option<Wait> {
    let mut open = own.operations().filter(|o| o.state == State::Started);
    let open = open.find(|o| o.kind == Kind::Receive)?;
    let what = format!("waited for the payload of {}", about(open));
    Some(wait(own, &what, peer(open), Some(open.since_ns())))
}

/// The oldest chunk that rank 0 sent and that has not come back: to the sink, or as its acceptance. It waits for the rank
/// that has the chunk.
fn for_an_answer(own: &Ranked, all: &[Ranked]) -> Option<Wait> {
    // Of a call that was sent again the last sending counts, in the generation that goes on.
    let now = newest(own).filter(|_| own.recording.rank == RANK_0)?;
    let calls = own.operations().filter(|o| {
        let asks = matches!(o.message, Some(Message::Chunk | Message::Shutdown));
        o.kind == Kind::Send && asks && o.committed_ns.is_some() && o.generation == now
    });
    let mut held = calls.map(|call| (call, holder(call, all)));
    let (call, holder) = held.find(|(_, holder)| *holder != RANK_0)?;
    let what = match call.message {
        Some(Message::Shutdown) => "waited for the answer to its shutdown".to_owned(),
        _ => format!("waited for the result of {}", about(call)),
    };
    Some(wait(own, &what, vec![holder.get()], call.committed_ns))
}

/// The rank that a message of rank 0 has come to, as far as the recordings show. It may come to a rank several times.
fn holder(call: &Operation, all: &[Ranked]) -> Rank {
    let of = |rank: Rank, kind: Kind| {
        let recordings = all.iter().filter(move |r| r.recording.rank == rank);
        let operations = recordings.flat_map(Ranked::operations);
        operations.filter(move |o| {
            let which = (o.message, o.call_id, o.generation);
            o.kind == kind && which == (call.message, call.call_id, call.generation)
        })
    };
    let mut sent: BTreeMap<Rank, usize> = BTreeMap::new();
    let mut holder = RANK_0;
    loop {
        let nth = sent.entry(holder).or_default();
        let send = of(holder, Kind::Send).nth(*nth);
        let Some(next) = send.and_then(|send| send.peer) else {
            return holder;
        };
        *nth += 1;
        let came = |rank: Rank| {
            let visits = sent.get(&rank).copied().unwrap_or(0);
            // Rank 0 has the first message without a receive.
            let nth = visits - usize::from(rank == RANK_0);
            of(rank, Kind::Receive).nth(nth).is_some()
        };
        let is_known = next == RANK_0 || all.iter().any(|r| r.recording.rank == next);
        holder = match is_known {
            true if came(next) => next,
            // It is on its way.
            true => return if holder == RANK_0 { next } else { holder },
            // What is not recorded has handed it on if it came back.
            false if came(RANK_0) => RANK_0,
            false => return next,
        };
    }
}

/// The generation that goes on.
fn newest(own: &Ranked) -> Option<Generation> {
    own.operations().map(|o| o.generation).max()
}

/// The oldest chunk that this rank was given and has not handed on.
fn unanswered(own: &Ranked) -> Option<&Operation> {
    let now = newest(own).filter(|_| own.recording.rank != RANK_0)?;
    let of = |kind: Kind| {
        let chunks = own.operations().filter(move |o| o.generation == now);
        chunks.filter(move |o| (o.kind, o.message) == (kind, Some(Message::Chunk)))
    };
    // With several stages it gets a chunk several times.
    let times =
        |kind: Kind, call: &Operation| of(kind).filter(|o| o.call_id == call.call_id).count();
    of(Kind::Receive).find(|call| times(Kind::Send, call) < times(Kind::Receive, call))
}

/// Work was given to a device, and is not done.
fn for_a_device(own: &Ranked) -> Option<Wait> {
    let call = unanswered(own)?;
    let what = format!("{} was with it and not answered", about(call));
    let activity = own.recording.activity.as_ref();
    let since = activity.and_then(|a| a.waiting_since_ns).or(call.ended_ns);
    Some(told(own, what, Vec::new(), since))
}

/// Nothing is open.
fn for_a_message(own: &Ranked) -> Wait {
    let heard = own.operations().rfind(|o| !o.kind.is_of_group());
    let on = heard.map(peer).unwrap_or_default();
    let what = match on.first() {
        Some(peer) => format!("nothing was open; it waited for a message from rank {peer}"),
        None => "nothing was ever begun".to_owned(),
    };
    let since = own.operations().next_back().map(Operation::since_ns);
    Wait {
        is_idle: true,
        ..told(own, what, on, since)
    }
}
