//! What breaks the rules OM-01 to OM-13.

use std::time::Duration;

use pp_contract::FaultKind::{
    BadInput, Drift, HandshakeMismatch, Internal, PeerDied, PeerMisbehaved, TimedOut, Usage,
};

use crate::faults::catalogue::{End, Ends, Entry, How, NCCL, SILENCE, SinkAt, all};
use crate::faults::role::Role::{self, Member, Sink, Source, Stage};

const BEFORE: &str = "Everything that can fail happens before the header leaves.";
const PLAN: &str = "The plan decides, and every rank checks the calls that stages made.";
const ALIKE: &str = "Settings that steer communication are compared before the first transfer.";
const MANIFEST: &str = "Tensors travel through the manifest only.";
const WHOLE: &str = "A message is validated whole before a receive is posted or a stage runs.";
const GROUP: &str = "An operation on the wrong group fails before the backend sees it.";
const CONTEXT: &str = "Recompute without context is refused, and stale context is never used.";
const OUTLIVE: &str = "No rank outlives another by more than the watchdog's time.";
const DRIFT: &str = "Digests of tensors and of kernels catch ranks that drift apart.";
const VERIFY: &[&str] = &["--verify", "every=1"];
const RECOMPUTE: &[&str] = &["--recompute"];
/// How long a stage may take in the entry of one that does not come back.
const STUCK: Duration = Duration::from_secs(3);
const STUCK_MS: &str = "3000";

const MESSAGE: &str = "decode message";
/// A chunk that is built when all ranks have worked on one: those of the default depth are fewer.
const LATER: u64 = 8;

/// The rank of this role is told apart at the handshake.
const fn differs(role: Role) -> Ends {
    all(HandshakeMismatch, role, "handshake")
}

/// The stage hears from the source what no source sends.
const fn heard(id: &'static str, rule: &'static str, hook: &'static str) -> Entry {
    let ends = all(PeerMisbehaved, Source, MESSAGE);
    Entry::new(id, rule, How::Hook(hook, Stage), ends)
}

/// The sink hears from the stage what no stage sends.
const fn heard_by_sink(id: &'static str, rule: &'static str, hook: &'static str) -> Entry {
    let ends = all(PeerMisbehaved, Stage, MESSAGE);
    Entry::new(id, rule, How::Hook(hook, Sink), ends)
}

/// The source makes what no message can be made of.
const fn made(id: &'static str, rule: &'static str, hook: &'static str) -> Entry {
    let ends = all(BadInput, Source, "encode");
    Entry::new(id, rule, How::Hook(hook, Source), ends)
}

/// The rank of this role dies, which all others notice.
const fn dies(id: &'static str, hook: &'static str, role: Role, end: End) -> Entry {
    let ends = all(PeerDied, role, "watch").but(role, end);
    Entry::new(id, OUTLIVE, How::HookAt(hook, role, LATER), ends)
}

/// The rank of this role says nothing any more.
const fn stops(id: &'static str, role: Role) -> Entry {
    let ends = all(TimedOut, role, "heartbeat");
    Entry::new(id, OUTLIVE, How::HookAt("stop", role, LATER), ends).noticed_after(SILENCE)
}

/// The stage of this role does not come back.
const fn stalls(id: &'static str, role: Role) -> Entry {
    let ends = all(TimedOut, role, "phase_b");
    Entry::new(id, OUTLIVE, How::Hook("stall", role), ends)
        .env(&[("PP_STUCK_MS", STUCK_MS)])
        .noticed_after(STUCK)
}

/// The entries.
pub(super) const ALL: &[Entry] = &[
    made("OM-01.dtype", BEFORE, "unsupported-dtype"),
    Entry::new(
        "OM-01.oversize",
        BEFORE,
        How::Hook("oversize-tensor", Source),
        all(Usage, Source, "encode"),
    ),
    made("OM-02.note", BEFORE, "huge-note"),
    Entry::new(
        "OM-03.recompute",
        PLAN,
        How::Hook("skipped-recompute", Stage),
        all(Usage, Stage, "phase_b"),
    )
    .with(RECOMPUTE)
    // Of a group the collectives differ before the calls are counted.
    .says(&["calls"]),
    heard("OM-03.calls", PLAN, "wrong-calls"),
    heard_by_sink("OM-03.report", PLAN, "wrong-report").says(&["were planned"]),
    Entry::new(
        "OM-03.report-accepted",
        PLAN,
        How::Hook("wrong-report", Source),
        all(PeerMisbehaved, Sink, MESSAGE),
    )
    .where_sink_is(SinkAt::Apart)
    .says(&["were planned"]),
    Entry::new(
        "OM-04.setting",
        ALIKE,
        How::Variable(Stage, "PP_HEARTBEAT_MS", "777"),
        differs(Stage),
    )
    .says(&["heartbeat_ms", "777"]),
    Entry::new(
        "OM-04.hook",
        ALIKE,
        How::Variable(Stage, "PP_FAULT", "kill@1"),
        differs(Stage),
    )
    .says(&["settings.fault", "not set"]),
    Entry::new(
        "OM-05.depth",
        ALIKE,
        How::Arguments(Stage, &["--depth", "3"]),
        differs(Stage),
    )
    .says(&["settings.depth differs: rank 0 has", "rank 1 has \"3\""]),
    Entry::new(
        "OM-05.verify",
        ALIKE,
        How::Arguments(Stage, &["--verify", "every=2"]),
        differs(Stage),
    )
    .says(&["settings.verify"]),
    Entry::new(
        "OM-05.nccl",
        ALIKE,
        How::Variable(Source, "NCCL_ALGO", "Ring"),
        differs(Stage),
    )
    .on(NCCL)
    .says(&["settings.NCCL_ALGO"]),
    Entry::new(
        "OM-06.side",
        MANIFEST,
        How::Hook("side-transfer", Source),
        all(Internal, Source, "send"),
    ),
    heard("OM-06.extra", MANIFEST, "extra-tensor"),
    heard_by_sink("OM-06.extra-result", MANIFEST, "extra-tensor"),
    Entry::new(
        "OM-07.version",
        WHOLE,
        How::Hook("wrong-version", Stage),
        all(PeerMisbehaved, Source, "receive header"),
    ),
    heard("OM-07.tensor", WHOLE, "missing-tensor"),
    heard("OM-07.trail", WHOLE, "extra-report"),
    heard_by_sink("OM-07.trail-result", WHOLE, "extra-report"),
    // A member hears from its leader what no leader sends.
    Entry::new(
        "OM-07.member",
        WHOLE,
        How::Hook("missing-tensor", Member),
        all(PeerMisbehaved, Stage, MESSAGE),
    ),
    // Of a payload larger than the leader can have.
    Entry::new(
        "OM-07.member-payload",
        WHOLE,
        How::Hook("altered-manifest", Member),
        all(PeerMisbehaved, Stage, MESSAGE),
    ),
    Entry::new(
        "OM-08.edge",
        GROUP,
        How::Hook("foreign-slot", Source),
        all(Internal, Source, "send"),
    )
    .says(&["another edge"]),
    Entry::new(
        "OM-08.member",
        GROUP,
        How::Hook("stranger", Member),
        all(Internal, Member, "issue work"),
    )
    .says(&["there is no member"]),
    Entry::new(
        "OM-09",
        "A late result of an old epoch is dropped and not decoded; its receive is never skipped.",
        How::HookAt("late-result", Source, 5),
        Ends::DONE,
    )
    .where_sink_is(SinkAt::Source)
    .with(&["--cuts", "hard"])
    .env(&[("PP_LOG", "debug")])
    .says(&["a chunk that a hard cut overtook is dropped chunk_index=5"]),
    made("OM-10.missing", CONTEXT, "missing-context").with(RECOMPUTE),
    heard("OM-10.lost", CONTEXT, "lost-context").with(RECOMPUTE),
    heard("OM-10.stale", CONTEXT, "stale-context").with(RECOMPUTE),
    Entry::new(
        "OM-11.input",
        DRIFT,
        How::Hook("changed-tensor", Source),
        all(Drift, Source, "verify"),
    )
    .with(VERIFY)
    .says(&["tensor latents_in", "chunk 3"]),
    Entry::new(
        "OM-11.output",
        DRIFT,
        How::Hook("changed-tensor", Stage),
        all(Drift, Stage, "verify"),
    )
    .with(VERIFY)
    .says(&["tensor latents_out", "chunk 3"]),
    Entry::new(
        "OM-12.weights",
        DRIFT,
        How::Hook("changed-weights", Stage),
        differs(Stage),
    )
    .says(&["kernels_digest differs"]),
    dies("OM-13.kill-source", "kill", Source, End::Killed),
    dies("OM-13.kill-stage", "kill", Stage, End::Killed),
    dies("OM-13.kill-member", "kill", Member, End::Killed),
    dies("OM-13.kill-sink", "kill", Sink, End::Killed).where_sink_is(SinkAt::Apart),
    dies("OM-13.leave", "leave", Stage, End::Done),
    stops("OM-13.stop-source", Source),
    stops("OM-13.stop-stage", Stage),
    stops("OM-13.stop-member", Member),
    stops("OM-13.stop-sink", Sink).where_sink_is(SinkAt::Apart),
    stalls("OM-13.stuck", Stage),
    stalls("OM-13.stuck-member", Member),
];
