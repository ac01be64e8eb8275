//! The catalogue: every rule of the protocol, and what breaks it on purpose.

use pp_contract::FaultKind;
use pp_contract::FaultKind::{
    Device, Drift, HandshakeMismatch, Internal, PeerDied, PeerMisbehaved, Plugin, TimedOut,
};
use serde::Serialize;

/// What carries the payloads of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Transport {
    /// Memory that both ranks share.
    Host,
    /// GPU memory over NCCL: two GPUs, or their fakes.
    Nccl,
}

const BOTH: &[Transport] = &[Transport::Host, Transport::Nccl];
const HOST: &[Transport] = &[Transport::Host];
const NCCL: &[Transport] = &[Transport::Nccl];

/// How a rank has to end.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    /// With success, and without an error.
    Done,
    /// By SIGKILL.
    Killed,
    /// With one line: this kind, this rank, this operation.
    Fault(FaultKind, u32, &'static str),
}

/// What is done to break the rule.
#[derive(Clone, Copy, Debug)]
pub(super) enum How {
    /// PP_FAULT on both ranks.
    Hook(&'static str),
    /// A variable of one rank alone.
    Variable(u32, &'static str, &'static str),
    /// Arguments of one rank alone.
    Arguments(u32, &'static [&'static str]),
    /// Nothing.
    Nothing,
}

/// One way to break one rule.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) id: &'static str,
    /// The rule.
    pub(super) rule: &'static str,
    /// What is broken.
    pub(super) breaks: &'static str,
    pub(super) how: How,
    pub(super) transports: &'static [Transport],
    /// Where real GPUs cannot be made to do it.
    pub(super) needs_fakes: bool,
    /// Arguments and variables of both ranks.
    pub(super) args: &'static [&'static str],
    pub(super) env: &'static [(&'static str, &'static str)],
    pub(super) ends: [End; 2],
    /// What some rank must say.
    pub(super) words: &'static [&'static str],
    /// An output is there when the job is done.
    pub(super) writes: bool,
    /// The log is looked at.
    pub(super) logs: bool,
}

impl Entry {
    const fn new(
        id: &'static str,
        rule: &'static str,
        breaks: &'static str,
        how: How,
        ends: [End; 2],
    ) -> Self {
        Self {
            id,
            rule,
            breaks,
            how,
            transports: BOTH,
            needs_fakes: false,
            args: &[],
            env: &[],
            ends,
            words: &[],
            writes: true,
            logs: false,
        }
    }

    const fn on(mut self, transports: &'static [Transport]) -> Self {
        self.transports = transports;
        self
    }

    const fn with(mut self, args: &'static [&'static str]) -> Self {
        self.args = args;
        self
    }

    const fn env(mut self, env: &'static [(&'static str, &'static str)]) -> Self {
        self.env = env;
        self
    }

    const fn says(mut self, words: &'static [&'static str]) -> Self {
        self.words = words;
        self
    }

    pub(super) fn is_hooked(&self) -> bool {
        matches!(self.how, How::Hook(_))
    }

    /// The rank on which something is broken, where it is one.
    pub(super) fn rank(&self) -> Option<u32> {
        match self.how {
            How::Hook(hook) => crate::fault::rank_of(hook),
            How::Variable(rank, ..) | How::Arguments(rank, _) => Some(rank),
            How::Nothing => None,
        }
    }
}

/// Both ranks say the same.
const fn both(kind: FaultKind, rank: u32, operation: &'static str) -> [End; 2] {
    [End::Fault(kind, rank, operation); 2]
}

const BEFORE: &str = "Everything that can fail happens before the header leaves.";
const PLAN: &str = "The plan decides, and both sides check expected_generator_calls.";
const ALIKE: &str = "Settings that steer communication are compared before the first transfer.";
const MANIFEST: &str = "Tensors travel through the manifest only.";
const WHOLE: &str = "An envelope is validated whole before a receive is posted or a stage runs.";
const GROUP: &str = "An operation on the wrong group fails before the backend sees it.";
const CONTEXT: &str = "Recompute without context is refused, and stale context is never used.";
const OUTLIVE: &str = "No rank outlives another by more than the watchdog's time.";
const SIZE: &str = "Size, type and number of a transfer agree before its receive is posted.";
const ORDER: &str = "Messages are heard once each, in the order in which they were sent.";
const ISSUER: &str = "One thread for each device makes every call of all its communicators.";
const DEVICES: &str = "Each rank is on a device of its own, the one that it was given.";

const DRIFT: &str = "Digests of tensors and of kernels catch ranks that drift apart.";

const VERIFY: &[&str] = &["--verify", "every=1"];
const RECOMPUTE: &[&str] = &["--recompute"];
/// Three heartbeats missed end a job; where silence is the fault they come faster.
const SILENCE: &[(&str, &str)] = &[("PP_HEARTBEAT_MS", "300")];

/// All entries.
pub(super) const ALL: &[Entry] = &[
    Entry::new(
        "OM-01.dtype",
        BEFORE,
        "a tensor of a type that the plan does not call for",
        How::Hook("unsupported-dtype"),
        both(Plugin, 0, "plan"),
    ),
    Entry::new(
        "OM-01.oversize",
        BEFORE,
        "a tensor that no slot holds",
        How::Hook("oversize-tensor"),
        both(Internal, 0, "send"),
    ),
    Entry::new(
        "OM-02.plan",
        BEFORE,
        "a plan that refuses to be serialized",
        How::Hook("unserializable-plan"),
        both(Internal, 0, "prepare message"),
    ),
    Entry::new(
        "OM-02.large",
        BEFORE,
        "a plan over the bound of a body",
        How::Hook("huge-plan"),
        both(Internal, 0, "prepare message"),
    ),
    Entry::new(
        "OM-03.recompute",
        PLAN,
        "Phase B skips the recompute that the plan calls for",
        How::Hook("skipped-recompute"),
        both(PeerMisbehaved, 1, "judge result"),
    )
    .with(RECOMPUTE),
    Entry::new(
        "OM-03.calls",
        PLAN,
        "the front plans a call more than its plan takes",
        How::Hook("wrong-calls"),
        both(PeerMisbehaved, 0, "decode envelope"),
    ),
    Entry::new(
        "OM-04.setting",
        ALIKE,
        "PP_HEARTBEAT_MS is set on one rank only",
        How::Variable(1, "PP_HEARTBEAT_MS", "777"),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .says(&["heartbeat_ms", "777"]),
    Entry::new(
        "OM-04.hook",
        ALIKE,
        "PP_FAULT is set on one rank only",
        How::Variable(1, "PP_FAULT", "kill@1"),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .says(&["settings.fault", "not set"]),
    Entry::new(
        "OM-05.depth",
        ALIKE,
        "--depth differs",
        How::Arguments(1, &["--depth", "3"]),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .says(&["settings.depth"]),
    Entry::new(
        "OM-05.nccl",
        ALIKE,
        "NCCL_ALGO is set on one rank only",
        How::Variable(0, "NCCL_ALGO", "Ring"),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .on(NCCL)
    .says(&["settings.NCCL_ALGO"]),
    Entry::new(
        "OM-06.side",
        MANIFEST,
        "a payload is handed over that no manifest describes",
        How::Hook("side-transfer"),
        both(Internal, 0, "send"),
    ),
    Entry::new(
        "OM-06.extra",
        MANIFEST,
        "the front's manifest has a tensor more than the plan calls for",
        How::Hook("extra-tensor"),
        both(PeerMisbehaved, 0, "decode envelope"),
    ),
    Entry::new(
        "OM-06.extra-result",
        MANIFEST,
        "Phase B's manifest has a tensor more than was asked for",
        How::Hook("extra-tensor@0"),
        both(PeerMisbehaved, 1, "judge result"),
    ),
    Entry::new(
        "OM-07.version",
        WHOLE,
        "a header of another version",
        How::Hook("wrong-version"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "OM-07.tensor",
        WHOLE,
        "an envelope without a tensor that the plan calls for",
        How::Hook("missing-tensor"),
        both(PeerMisbehaved, 0, "decode envelope"),
    ),
    Entry::new(
        "OM-08.edge",
        GROUP,
        "a slot of another link is sent",
        How::Hook("foreign-slot"),
        both(Internal, 0, "send"),
    )
    .on(HOST)
    .says(&["another edge"]),
    Entry::new(
        "OM-08.group",
        GROUP,
        "a broadcast of the world is asked of the mesh",
        How::Hook("wrong-group"),
        both(Internal, 1, "send"),
    )
    .on(NCCL)
    .says(&["group mesh"]),
    Entry::new(
        "OM-09",
        "A late result of an old epoch is dropped and not decoded; its receive is never skipped.",
        "results are kept back until a hard cut has passed them",
        How::Hook("late-result@0:chunk=5"),
        [End::Done; 2],
    )
    .with(&["--cuts", "hard"])
    .env(&[("PP_LOG", "debug")])
    .says(&["stale result dropped call_id=5 chunk_index=5"]),
    Entry::new(
        "OM-10.missing",
        CONTEXT,
        "the front plans a recompute and sends no context_frames",
        How::Hook("missing-context"),
        both(Plugin, 0, "plan"),
    )
    .with(RECOMPUTE),
    Entry::new(
        "OM-10.lost",
        CONTEXT,
        "an envelope arrives with recompute and without context_frames",
        How::Hook("lost-context"),
        both(PeerMisbehaved, 0, "decode envelope"),
    )
    .with(RECOMPUTE),
    Entry::new(
        "OM-10.stale",
        CONTEXT,
        "an envelope arrives with context_frames and without recompute",
        How::Hook("stale-context"),
        both(PeerMisbehaved, 0, "decode envelope"),
    )
    .with(RECOMPUTE),
    Entry::new(
        "OM-11.input",
        DRIFT,
        "a byte of the front's tensors changes on its way",
        How::Hook("changed-tensor@0"),
        both(Drift, 0, "verify"),
    )
    .with(VERIFY),
    Entry::new(
        "OM-11.output",
        DRIFT,
        "a byte of Phase B's tensors changes on its way",
        How::Hook("changed-tensor@1"),
        both(Drift, 1, "verify"),
    )
    .with(VERIFY),
    Entry::new(
        "OM-12.weights",
        DRIFT,
        "one rank has other kernels",
        How::Hook("changed-weights"),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .says(&["kernels_digest differs"]),
    Entry::new(
        "OM-13.kill-front",
        OUTLIVE,
        "the front is killed",
        How::Hook("kill@0"),
        [End::Killed, End::Fault(PeerDied, 0, "watch")],
    ),
    Entry::new(
        "OM-13.kill-phase-b",
        OUTLIVE,
        "Phase B is killed",
        How::Hook("kill@1"),
        [End::Fault(PeerDied, 1, "watch"), End::Killed],
    ),
    Entry::new(
        "OM-13.leave",
        OUTLIVE,
        "Phase B ends with success in the middle of the job, without a word",
        How::Hook("leave"),
        [End::Fault(PeerDied, 1, "watch"), End::Done],
    ),
    Entry::new(
        "OM-13.stop-front",
        OUTLIVE,
        "the front is stopped, and goes on when the other has ended",
        How::Hook("stop@0"),
        both(TimedOut, 0, "heartbeat"),
    )
    .env(SILENCE),
    Entry::new(
        "OM-13.stop-phase-b",
        OUTLIVE,
        "Phase B is stopped, and goes on when the other has ended",
        How::Hook("stop@1"),
        both(TimedOut, 1, "heartbeat"),
    )
    .env(SILENCE),
    Entry::new(
        "OM-13.stuck",
        OUTLIVE,
        "Phase B's stage does not come back",
        How::Hook("stall-compute"),
        both(TimedOut, 1, "phase_b"),
    )
    .env(&[("PP_STUCK_MS", "1000"), ("PP_HEARTBEAT_MS", "500")]),
    Entry::new(
        "size.manifest",
        SIZE,
        "the manifest of an envelope describes another shape than was sent",
        How::Hook("altered-manifest"),
        both(PeerMisbehaved, 0, "decode envelope"),
    ),
    Entry::new(
        "size.manifest-result",
        SIZE,
        "the manifest of a result describes another shape than was sent",
        How::Hook("altered-manifest@0"),
        both(PeerMisbehaved, 1, "decode result"),
    ),
    Entry::new(
        "size.payload",
        SIZE,
        "a header announces half of the payload",
        How::Hook("lying-payload"),
        both(PeerMisbehaved, 0, "decode envelope"),
    ),
    Entry::new(
        "size.payload-result",
        SIZE,
        "the header of a result announces half of the payload",
        How::Hook("lying-payload@0"),
        both(PeerMisbehaved, 1, "decode result"),
    ),
    Entry::new(
        "size.body",
        SIZE,
        "a header announces a longer body than follows",
        How::Hook("lying-body"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "size.truncated",
        SIZE,
        "half of a frame arrives",
        How::Hook("truncated-frame"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "size.damaged",
        SIZE,
        "a bit of a body changes on its way",
        How::Hook("damaged-body"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "order.duplicated",
        ORDER,
        "an envelope arrives twice",
        How::Hook("duplicated"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "order.duplicated-result",
        ORDER,
        "a result arrives twice",
        How::Hook("duplicated@0"),
        both(PeerMisbehaved, 1, "receive header"),
    ),
    Entry::new(
        "order.skipped",
        ORDER,
        "an envelope does not arrive",
        How::Hook("skipped"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "order.skipped-result",
        ORDER,
        "a result does not arrive",
        How::Hook("skipped@0"),
        both(PeerMisbehaved, 1, "receive header"),
    ),
    Entry::new(
        "order.swapped",
        ORDER,
        "two envelopes arrive in the wrong order",
        How::Hook("swapped"),
        both(PeerMisbehaved, 0, "receive header"),
    ),
    Entry::new(
        "order.swapped-result",
        ORDER,
        "two results arrive in the wrong order",
        How::Hook("swapped@0"),
        both(PeerMisbehaved, 1, "receive header"),
    ),
    Entry::new(
        "order.second-thread",
        ISSUER,
        "the front sends from a second thread",
        How::Hook("second-thread@0"),
        both(Internal, 0, "send"),
    )
    .on(NCCL)
    .says(&["another thread"]),
    Entry::new(
        "order.second-thread-result",
        ISSUER,
        "Phase B sends from a second thread",
        How::Hook("second-thread@1"),
        both(Internal, 1, "send"),
    )
    .on(NCCL)
    .says(&["another thread"]),
    Entry::new(
        "devices.same-gpu",
        DEVICES,
        "LOCAL_RANK gives both ranks the same GPU",
        How::Variable(1, "LOCAL_RANK", "0"),
        both(HandshakeMismatch, 0, "handshake"),
    )
    .on(NCCL)
    .says(&["are both on"]),
    Entry::new(
        "devices.hidden",
        DEVICES,
        "CUDA_VISIBLE_DEVICES hides a GPU from one rank",
        How::Variable(1, "CUDA_VISIBLE_DEVICES", "0"),
        both(Device, 1, "look for GPUs"),
    )
    .on(NCCL),
    Entry::new(
        "counts",
        "Ranks that disagree on the number of chunks are stopped at the start.",
        "--chunks differs",
        How::Arguments(1, &["--chunks", "5"]),
        both(HandshakeMismatch, 1, "handshake"),
    )
    .says(&["chunks differs"]),
    Entry {
        logs: true,
        ..Entry::new(
            "log",
            "Every point of no return is one record with call_id, chunk_index, cache_epoch, group, peer and bytes.",
            "nothing; the log of both ranks is read",
            How::Nothing,
            [End::Done; 2],
        )
        .env(&[("PP_LOG", "debug")])
    },
];
