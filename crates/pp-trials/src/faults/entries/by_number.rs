//! What breaks the rules OM-01 to OM-13.

use std::time::Duration;

use pp_contract::FaultKind::{
    Drift, HandshakeMismatch, Internal, PeerDied, PeerMisbehaved, Plugin, TimedOut,
};

use crate::faults::catalogue::{End, Entry, HOST, How, NCCL, SILENCE, both};

const BEFORE: &str = "Everything that can fail happens before the header leaves.";
const PLAN: &str = "The plan decides, and both sides check expected_generator_calls.";
const ALIKE: &str = "Settings that steer communication are compared before the first transfer.";
const MANIFEST: &str = "Tensors travel through the manifest only.";
const WHOLE: &str = "An envelope is validated whole before a receive is posted or a stage runs.";
const GROUP: &str = "An operation on the wrong group fails before the backend sees it.";
const CONTEXT: &str = "Recompute without context is refused, and stale context is never used.";
const OUTLIVE: &str = "No rank outlives another by more than the watchdog's time.";
const DRIFT: &str = "Digests of tensors and of kernels catch ranks that drift apart.";
const VERIFY: &[&str] = &["--verify", "every=1"];
const RECOMPUTE: &[&str] = &["--recompute"];
/// How long a stage may take in the entry of one that does not come back.
const STUCK: Duration = Duration::from_secs(3);
const STUCK_MS: &str = "3000";

/// The entries.
pub(super) const ALL: &[Entry] = &[
    Entry::new(
        "OM-01.dtype",
        BEFORE,
        How::Hook("unsupported-dtype"),
        both(Plugin, 0, "plan"),
    ),
    Entry::new(
        "OM-01.oversize",
        BEFORE,
        How::Hook("oversize-tensor"),
        both(Internal, 0, "send"),
    ),
    Entry::new(
        "OM-02.plan",
        BEFORE,
        How::Hook("unserializable-plan"),
        both(Internal, 0, "prepare message"),
    ),
    Entry::new(
        "OM-02.large",
        BEFORE,
        How::Hook("huge-plan"),
        both(Internal, 0, "prepare message"),
    ),
    Entry::new(
        "OM-03.recompute",
        PLAN,
        How::Hook("skipped-recompute"),
        both(PeerMisbehaved, 1, "judge result"),
    )
    .with(RECOMPUTE),
    Entry::new(
        "OM-03.calls",
        PLAN,
        How::Hook("wrong-calls"),
        both(PeerMisbehaved, 0, "decode envelope"),
    ),
    Entry::new(
        "OM-04.setting",
        ALIKE,
        How::Variable(1, "PP_HEARTBEAT_MS", "777"),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .says(&["heartbeat_ms", "777"]),
    Entry::new(
        "OM-04.hook",
        ALIKE,
        How::Variable(1, "PP_FAULT", "kill@1"),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .says(&["settings.fault", "not set"]),
    Entry::new(
        "OM-05.depth",
        ALIKE,
        How::Arguments(1, &["--depth", "3"]),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .says(&["settings.depth differs: rank 0 has \"4\", rank 1 has \"3\""]),
    Entry::new(
        "OM-05.verify",
        ALIKE,
        How::Arguments(1, &["--verify", "every=2"]),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .says(&["settings.verify"]),
    Entry::new(
        "OM-05.nccl",
        ALIKE,
        How::Variable(0, "NCCL_ALGO", "Ring"),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .on(NCCL)
    .says(&["settings.NCCL_ALGO"]),
    Entry::new(
        "OM-06.side",
        MANIFEST,
        How::Hook("side-transfer"),
        both(Internal, 0, "send"),
    ),
    Entry::new(
        "OM-06.extra",
        MANIFEST,
        How::Hook("extra-tensor"),
        both(PeerMisbehaved, 0, "decode envelope"),
    ),
    Entry::new(
        "OM-06.extra-result",
        MANIFEST,
        How::Hook("extra-tensor@0"),
        both(PeerMisbehaved, 1, "judge result"),
    ),
    Entry::new(
        "OM-07.version",
        WHOLE,
        How::Hook("wrong-version"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "OM-07.tensor",
        WHOLE,
        How::Hook("missing-tensor"),
        both(PeerMisbehaved, 0, "decode envelope"),
    ),
    Entry::new(
        "OM-08.edge",
        GROUP,
        How::Hook("foreign-slot"),
        both(Internal, 0, "send"),
    )
    .on(HOST)
    .says(&["another edge"]),
    Entry::new(
        "OM-08.group",
        GROUP,
        How::Hook("wrong-group"),
        both(Internal, 1, "send"),
    )
    .on(NCCL)
    .says(&["group mesh"]),
    Entry::new(
        "OM-09",
        "A late result of an old epoch is dropped and not decoded; its receive is never skipped.",
        How::Hook("late-result@0:chunk=5"),
        [End::Done; 2],
    )
    .with(&["--cuts", "hard"])
    .env(&[("PP_LOG", "debug")])
    .says(&["stale result dropped call_id=5 chunk_index=5"]),
    Entry::new(
        "OM-10.missing",
        CONTEXT,
        How::Hook("missing-context"),
        both(Plugin, 0, "plan"),
    )
    .with(RECOMPUTE),
    Entry::new(
        "OM-10.lost",
        CONTEXT,
        How::Hook("lost-context"),
        both(PeerMisbehaved, 0, "decode envelope"),
    )
    .with(RECOMPUTE),
    Entry::new(
        "OM-10.stale",
        CONTEXT,
        How::Hook("stale-context"),
        both(PeerMisbehaved, 0, "decode envelope"),
    )
    .with(RECOMPUTE),
    Entry::new(
        "OM-11.input",
        DRIFT,
        How::Hook("changed-tensor@0"),
        both(Drift, 0, "phase_b"),
    )
    .with(VERIFY)
    .says(&["tensor latents_in", "chunk 3"]),
    Entry::new(
        "OM-11.output",
        DRIFT,
        How::Hook("changed-tensor@1"),
        both(Drift, 1, "verify result"),
    )
    .with(VERIFY)
    .says(&["tensor latents_out", "chunk 3"]),
    Entry::new(
        "OM-12.weights",
        DRIFT,
        How::Hook("changed-weights"),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .says(&["kernels_digest differs"]),
    Entry::new(
        "OM-13.kill-front",
        OUTLIVE,
        How::Hook("kill@0"),
        [End::Killed, End::Fault(PeerDied, 0, "watch")],
    ),
    Entry::new(
        "OM-13.kill-phase-b",
        OUTLIVE,
        How::Hook("kill@1"),
        [End::Fault(PeerDied, 1, "watch"), End::Killed],
    ),
    Entry::new(
        "OM-13.leave",
        OUTLIVE,
        How::Hook("leave"),
        [End::Fault(PeerDied, 1, "watch"), End::Done],
    ),
    Entry::new(
        "OM-13.stop-front",
        OUTLIVE,
        How::Hook("stop@0"),
        both(TimedOut, 0, "heartbeat"),
    )
    .noticed_after(SILENCE),
    Entry::new(
        "OM-13.stop-phase-b",
        OUTLIVE,
        How::Hook("stop@1"),
        both(TimedOut, 1, "heartbeat"),
    )
    .noticed_after(SILENCE),
    Entry::new(
        "OM-13.stuck",
        OUTLIVE,
        How::Hook("stall-compute"),
        both(TimedOut, 1, "phase_b"),
    )
    .env(&[("PP_STUCK_MS", STUCK_MS)])
    .noticed_after(STUCK),
];
