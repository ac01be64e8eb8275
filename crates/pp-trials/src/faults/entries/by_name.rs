//! What breaks the rules that have names: sizes, order, devices, counts, the log.

use pp_contract::FaultKind::{Device, HandshakeMismatch, Internal, PeerMisbehaved};

use crate::faults::catalogue::{End, Entry, FAKES, How, NCCL, both};
use crate::faults::log::{POINTS, WITH_COLLECTIVE};

const SIZE: &str = "Size, type and number of a transfer agree before its receive is posted.";
const ORDER: &str = "Messages are heard once each, in the order in which they were sent.";
const ISSUER: &str = "One thread for each device makes every call of all its communicators.";
const DEVICES: &str = "Each rank is on a device of its own, the one that it was given.";

const LOG: &str = "Every point of no return is one record with call_id, chunk_index, cache_epoch, group, \
     peer and bytes.";

/// The entries.
pub(super) const ALL: &[Entry] = &[
    Entry::new(
        "size.manifest",
        SIZE,
        How::Hook("altered-manifest"),
        both(PeerMisbehaved, 0, "decode envelope"),
    ),
    Entry::new(
        "size.manifest-result",
        SIZE,
        How::Hook("altered-manifest@0"),
        both(PeerMisbehaved, 1, "decode result"),
    ),
    Entry::new(
        "size.payload",
        SIZE,
        How::Hook("lying-payload"),
        both(PeerMisbehaved, 0, "decode envelope"),
    ),
    Entry::new(
        "size.payload-result",
        SIZE,
        How::Hook("lying-payload@0"),
        both(PeerMisbehaved, 1, "decode result"),
    ),
    Entry::new(
        "size.body",
        SIZE,
        How::Hook("lying-body"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "size.truncated",
        SIZE,
        How::Hook("truncated-frame"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "size.damaged",
        SIZE,
        How::Hook("damaged-body"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "order.duplicated",
        ORDER,
        How::Hook("duplicated"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "order.duplicated-result",
        ORDER,
        How::Hook("duplicated@0"),
        both(PeerMisbehaved, 1, "receive header"),
    ),
    Entry::new(
        "order.skipped",
        ORDER,
        How::Hook("skipped"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "order.skipped-result",
        ORDER,
        How::Hook("skipped@0"),
        both(PeerMisbehaved, 1, "receive header"),
    ),
    Entry::new(
        "order.swapped",
        ORDER,
        How::Hook("swapped"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "order.swapped-result",
        ORDER,
        How::Hook("swapped@0"),
        both(PeerMisbehaved, 1, "receive header"),
    ),
    Entry::new(
        "order.second-thread",
        ISSUER,
        How::Hook("second-thread@0"),
        both(Internal, 0, "send"),
    )
    .on(NCCL)
    .says(&["another thread"]),
    Entry::new(
        "order.second-thread-result",
        ISSUER,
        How::Hook("second-thread@1"),
        both(Internal, 1, "send"),
    )
    .on(NCCL)
    .says(&["another thread"]),
    Entry::new(
        "devices.same-gpu",
        DEVICES,
        How::Variable(1, "LOCAL_RANK", "0"),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .on(NCCL)
    .says(&["are both on"]),
    Entry::new(
        "devices.hidden",
        DEVICES,
        How::Variable(1, "CUDA_VISIBLE_DEVICES", "0"),
        both(Device, 1, "look for GPUs"),
    )
    .on(NCCL),
    // The driver opens another device than the variable names.
    Entry::new(
        "devices.not-as-given",
        DEVICES,
        How::Variable(
            1,
            "CUDA_VISIBLE_DEVICES",
            "GPU-00000000-0000-0000-0000-000000000007",
        ),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .on(FAKES)
    .env(&[("PP_FAKE_IGNORE_VISIBLE", "1")])
    .says(&["was given GPU-00000000-0000-0000-0000-000000000007 and is on"]),
    Entry::new(
        "counts",
        "Ranks that disagree on the number of chunks are stopped at the start.",
        How::Arguments(1, &["--chunks", "5"]),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .says(&["chunks differs"]),
    Entry {
        logs: POINTS,
        ..Entry::new("log", LOG, How::Nothing, [End::Done; 2]).env(&[("PP_LOG", "debug")])
    },
    Entry {
        logs: WITH_COLLECTIVE,
        ..Entry::new(
            "log.collective",
            LOG,
            How::Hook("lone-collective"),
            [End::Done; 2],
        )
        .on(NCCL)
        .env(&[("PP_LOG", "debug")])
    },
];
