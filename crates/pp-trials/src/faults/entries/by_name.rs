//! What breaks the rules that have names: sizes, order, devices, counts, the log.

use pp_contract::FaultKind::{Device, HandshakeMismatch, Internal, PeerMisbehaved};

use crate::faults::catalogue::{Ends, Entry, FAKES, GPUS, How, NCCL, SinkAt, all};
use crate::faults::log::POINTS;
use crate::faults::role::Role::{Sink, Source, Stage};

const SIZE: &str = "Size, type and number of a transfer agree before its receive is posted.";
const ORDER: &str = "Messages are heard once each, in the order in which they were sent.";
const ISSUER: &str = "One thread for each device makes every call of all its communicators.";
const DEVICES: &str = "Each rank is on a device of its own, the one that it was given.";

const LOG: &str = "Every point of no return is one record with call_id, chunk_index, cache_epoch, group, \
     peer and bytes.";

const HEADER: &str = "receive header";
const MESSAGE: &str = "decode message";

/// The source sent it, as the next stage sees it.
const fn from_source(operation: &'static str) -> Ends {
    all(PeerMisbehaved, Source, operation)
}

/// The stage before the sink sent it, as the sink sees it.
const fn from_stage(operation: &'static str) -> Ends {
    all(PeerMisbehaved, Stage, operation)
}

/// The sink sent it, as the source sees it.
const fn from_sink(operation: &'static str) -> Ends {
    all(PeerMisbehaved, Sink, operation)
}

const fn size(id: &'static str, how: How, ends: Ends) -> Entry {
    Entry::new(id, SIZE, how, ends)
}

const fn order(id: &'static str, how: How, ends: Ends) -> Entry {
    Entry::new(id, ORDER, how, ends)
}

/// The entries.
pub(super) const ALL: &[Entry] = &[
    size(
        "size.manifest",
        How::Hook("altered-manifest", Stage),
        from_source(MESSAGE),
    ),
    size(
        "size.manifest-result",
        How::Hook("altered-manifest", Sink),
        from_stage(MESSAGE),
    ),
    size(
        "size.payload",
        How::Hook("lying-payload", Stage),
        from_source(MESSAGE),
    ),
    size(
        "size.payload-result",
        How::Hook("lying-payload", Sink),
        from_stage(MESSAGE),
    ),
    size(
        "size.body",
        How::Hook("lying-body", Stage),
        from_source(HEADER),
    ),
    size(
        "size.truncated",
        How::Hook("truncated-frame", Stage),
        from_source(HEADER),
    ),
    size(
        "size.damaged",
        How::Hook("damaged-body", Stage),
        from_source(HEADER),
    ),
    size(
        "size.note",
        How::Hook("long-note", Stage),
        from_source(MESSAGE),
    ),
    size(
        "size.stale",
        How::Hook("stale-tensors", Stage),
        from_source(MESSAGE),
    ),
    size(
        "size.stale-result",
        How::Hook("stale-tensors", Sink),
        from_stage(MESSAGE),
    ),
    order(
        "order.duplicated",
        How::Hook("duplicated", Stage),
        from_source(HEADER),
    ),
    order(
        "order.duplicated-result",
        How::Hook("duplicated", Sink),
        from_stage(HEADER),
    ),
    order(
        "order.skipped",
        How::Hook("skipped", Stage),
        from_source(HEADER),
    ),
    order(
        "order.skipped-result",
        How::Hook("skipped", Sink),
        from_stage(HEADER),
    ),
    order(
        "order.swapped",
        How::Hook("swapped", Stage),
        from_source(HEADER),
    ),
    order(
        "order.swapped-result",
        How::Hook("swapped", Sink),
        from_stage(HEADER),
    ),
    order(
        "order.attempt",
        How::Hook("falling-attempt", Stage),
        from_source(HEADER),
    )
    .says(&["it must not fall"]),
    order(
        "order.attempt-result",
        How::Hook("falling-attempt", Sink),
        from_stage(HEADER),
    )
    .says(&["it must not fall"]),
    order(
        "order.lap",
        How::Hook("wrong-lap", Stage),
        from_source(HEADER),
    )
    .says(&["lap 65535"]),
    order(
        "order.lap-result",
        How::Hook("wrong-lap", Sink),
        from_stage(HEADER),
    )
    .says(&["lap 65535"]),
    order(
        "order.acceptance-skipped",
        How::Hook("skipped", Source),
        from_sink("receive acceptance"),
    )
    .where_sink_is(SinkAt::Apart),
    order(
        "order.acceptance-swapped",
        How::Hook("swapped", Source),
        from_sink("receive acceptance"),
    )
    .where_sink_is(SinkAt::Apart),
    order(
        "order.acceptance-duplicated",
        How::Hook("duplicated", Source),
        from_sink(HEADER),
    )
    .where_sink_is(SinkAt::Apart),
    Entry::new(
        "order.second-thread",
        ISSUER,
        How::Hook("second-thread", Source),
        all(Internal, Source, "send"),
    )
    .on(NCCL)
    .says(&["another thread"]),
    Entry::new(
        "order.second-thread-result",
        ISSUER,
        How::Hook("second-thread", Stage),
        all(Internal, Stage, "send"),
    )
    .on(NCCL)
    .says(&["another thread"]),
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
