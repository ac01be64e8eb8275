//! What breaks the rules OM-01 to OM-13.

use std::time::Duration;

use pp_contract::FaultKind::{
    self, BadInput, Drift, HandshakeMismatch, Internal, PeerDied, PeerMisbehaved, TimedOut, Usage,
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

/// How a rank ends by its own fault: the kind and the operation.
type Own = (FaultKind, &'static str);
const MEET: Own = (HandshakeMismatch, "handshake");
const RUN: Own = (Usage, "phase_b");
const SEND: Own = (Internal, "send");
const ISSUE: Own = (Internal, "issue work");
const DIGEST: Own = (Drift, "verify");

/// The rank of the stage has another setting.
const fn differs(id: &'static str, how: How) -> Entry {
    Entry::new(id, ALIKE, how, all(MEET.0, Stage, MEET.1))
}

const fn variable(name: &'static str, value: &'static str) -> How {
    How::Variable(Stage, name, value)
}

const fn arguments(args: &'static [&'static str]) -> How {
    How::Arguments(Stage, args)
}

/// The rank of this role ends with a fault of its own: a kind and an operation.
const fn own(
    id: &'static str,
    rule: &'static str,
    hook: &'static str,
    role: Role,
    (kind, operation): Own,
) -> Entry {
    Entry::new(id, rule, How::Hook(hook, role), all(kind, role, operation))
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

/// A member hears from its leader what no leader sends.
const fn heard_by_member(id: &'static str, rule: &'static str, hook: &'static str) -> Entry {
    let ends = all(PeerMisbehaved, Stage, MESSAGE);
    Entry::new(id, rule, How::Hook(hook, Member), ends)
}

/// The source makes what no message can be made of.
const fn made(id: &'static str, rule: &'static str, hook: &'static str) -> Entry {
    own(id, rule, hook, Source, (BadInput, "encode"))
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
    own(
        "OM-01.oversize",
        BEFORE,
        "oversize-tensor",
        Source,
        (Usage, "encode"),
    ),
    made("OM-02.note", BEFORE, "huge-note"),
    own("OM-03.recompute", PLAN, "skipped-recompute", Stage, RUN)
        .with(RECOMPUTE)
        .says(&["calls"]),
    // The collectives differ before the calls are counted.
    Entry::new(
        "OM-03.recompute.group",
        PLAN,
        How::Hook("skipped-recompute", Stage),
        all(Internal, Stage, "phase_b"),
    )
    .with(RECOMPUTE)
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
    differs("OM-04.setting", variable("PP_HEARTBEAT_MS", "777")).says(&["heartbeat_ms", "777"]),
    differs("OM-04.hook", variable("PP_FAULT", "kill@1")).says(&["settings.fault", "not set"]),
    differs("OM-05.depth", arguments(&["--depth", "3"]))
        .says(&["settings.depth differs: rank 0 has", "rank 1 has \"3\""]),
    differs("OM-05.verify", arguments(&["--verify", "every=2"])).says(&["settings.verify"]),
    differs("OM-05.nccl", How::Variable(Source, "NCCL_ALGO", "Ring"))
        .on(NCCL)
        .says(&["settings.NCCL_ALGO"]),
    own("OM-06.side", MANIFEST, "side-transfer", Source, SEND),
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
    heard_by_member("OM-07.member", WHOLE, "missing-tensor"),
    // Of a payload larger than the leader can have.
    heard_by_member("OM-07.member-payload", WHOLE, "altered-manifest"),
    own("OM-08.edge", GROUP, "foreign-slot", Source, SEND).says(&["another edge"]),
    own("OM-08.member", GROUP, "stranger", Member, ISSUE).says(&["there is no member"]),
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
    own("OM-11.input", DRIFT, "changed-tensor", Source, DIGEST)
        .with(VERIFY)
        .says(&["tensor latents_in", "chunk 3"]),
    own("OM-11.output", DRIFT, "changed-tensor", Stage, DIGEST)
        .with(VERIFY)
        .says(&["tensor latents_out", "chunk 3"]),
    own("OM-12.weights", DRIFT, "changed-weights", Stage, MEET)
        .says(&["settings.kernels.phase_b differs"]),
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
