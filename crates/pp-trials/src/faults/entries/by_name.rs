//! What breaks the rules that have names: sizes, order, devices, counts, the log.

use pp_contract::FaultKind::{Device, HandshakeMismatch, Internal, PeerMisbehaved};

use crate::faults::catalogue::{Ends, Entry, FAKES, GPUS, How, NCCL, SinkAt, all};
use crate::faults::log::POINTS;
use crate::faults::role::Role::{self, Sink, Source, Stage};

const SIZE: &str = "Size, type and number of a transfer agree before its receive is posted.";
const ORDER: &str = "Messages are heard once each, in the order in which they were sent.";
const ISSUER: &str = "One thread for each device makes every call of all its communicators.";
const DEVICES: &str = "Each rank is on a device of its own, the one that it was given.";

const LOG: &str = "Every point of no return is one record with call_id, chunk_index, cache_epoch, group, \
     peer and bytes.";

const HEADER: &str = "receive header";
const MESSAGE: &str = "decode message";
const ACCEPT: &str = "receive acceptance";

/// The rank of this role hears from the one before it what no rank sends.
const fn heard(
    rule: &'static str,
    id: &'static str,
    hook: &'static str,
    role: Role,
    operation: &'static str,
) -> Entry {
    let sender = match role {
        Stage => Source,
        Sink => Stage,
        _ => Sink,
    };
    let ends = all(PeerMisbehaved, sender, operation);
    Entry::new(id, rule, How::Hook(hook, role), ends)
}

const fn size(id: &'static str, hook: &'static str, role: Role, seen: &'static str) -> Entry {
    heard(SIZE, id, hook, role, seen)
}

const fn order(id: &'static str, hook: &'static str, role: Role, seen: &'static str) -> Entry {
    heard(ORDER, id, hook, role, seen)
}

/// The rank of this role sends from a second thread.
const fn second_thread(id: &'static str, role: Role) -> Entry {
    let ends = all(Internal, role, "send");
    let entry = Entry::new(id, ISSUER, How::Hook("second-thread", role), ends);
    entry.on(NCCL).says(&["another thread"])
}

/// The entries.
pub(super) const ALL: &[Entry] = &[
    size("size.manifest", "altered-manifest", Stage, MESSAGE),
    size("size.manifest-result", "altered-manifest", Sink, MESSAGE),
    size("size.payload", "lying-payload", Stage, MESSAGE),
    size("size.payload-result", "lying-payload", Sink, MESSAGE),
    size("size.body", "lying-body", Stage, HEADER),
    size("size.truncated", "truncated-frame", Stage, HEADER),
    size("size.damaged", "damaged-body", Stage, HEADER),
    size("size.note", "long-note", Stage, MESSAGE),
    size("size.stale", "stale-tensors", Stage, MESSAGE),
    size("size.stale-result", "stale-tensors", Sink, MESSAGE),
    order("order.duplicated", "duplicated", Stage, HEADER),
    order("order.duplicated-result", "duplicated", Sink, HEADER),
    order("order.skipped", "skipped", Stage, HEADER),
    order("order.skipped-result", "skipped", Sink, HEADER),
    order("order.swapped", "swapped", Stage, HEADER),
    order("order.swapped-result", "swapped", Sink, HEADER),
    order("order.attempt", "falling-attempt", Stage, HEADER).says(&["it must not fall"]),
    order("order.attempt-result", "falling-attempt", Sink, HEADER).says(&["it must not fall"]),
    order("order.lap", "wrong-lap", Stage, HEADER).says(&["lap 65535"]),
    order("order.lap-result", "wrong-lap", Sink, HEADER).says(&["lap 65535"]),
    order("order.acceptance-skipped", "skipped", Source, ACCEPT).where_sink_is(SinkAt::Apart),
    order("order.acceptance-swapped", "swapped", Source, ACCEPT).where_sink_is(SinkAt::Apart),
    order("order.acceptance-duplicated", "duplicated", Source, HEADER).where_sink_is(SinkAt::Apart),
    second_thread("order.second-thread", Source),
    second_thread("order.second-thread-result", Stage),
    Entry::new(
        "devices.same-gpu",
        DEVICES,
        How::Variable(Stage, "LOCAL_RANK", "0"),
        all(HandshakeMismatch, Stage, "handshake"),
    )
    .on(GPUS)
    .says(&["are both on"]),
    Entry::new(
        "devices.hidden",
        DEVICES,
        How::Variable(Stage, "CUDA_VISIBLE_DEVICES", "0"),
        all(Device, Stage, "look for GPUs"),
    )
    .on(GPUS),
    // The driver opens another device than the variable names.
    Entry::new(
        "devices.not-as-given",
        DEVICES,
        How::Variable(
            Stage,
            "CUDA_VISIBLE_DEVICES",
            "GPU-00000000-0000-0000-0000-000000000007",
        ),
        all(HandshakeMismatch, Stage, "handshake"),
    )
    .on(FAKES)
    .env(&[("PP_FAKE_IGNORE_VISIBLE", "1")])
    .says(&["was given GPU-00000000-0000-0000-0000-000000000007 and is on"]),
    Entry::new(
        "counts",
        "Ranks that disagree on the number of chunks are stopped at the start.",
        How::Arguments(Stage, &["--chunks", "5"]),
        all(HandshakeMismatch, Stage, "handshake"),
    )
    .says(&["chunks differs"]),
    Entry::new("log", LOG, How::Nothing, Ends::DONE)
        .env(&[("PP_LOG", "debug")])
        .logs(POINTS),
];
