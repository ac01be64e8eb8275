//! The faults that can be made in a run, by name, and how far each may be felt.

use clap::ValueEnum;
use pp_contract::{Pipeline, Rank};

/// A fault that a hook makes.
///
/// A correct sender cannot make most of what an edge may get: the frame is altered by the rank that
/// receives it, as if it had been sent so, and its checksums are made right again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Break {
    /// The rank kills itself, in a stage.
    Kill,
    /// The rank stops itself, in a stage.
    Stop,
    /// Its stage panics.
    Panic,
    /// The process ends with success in its stage, without a word.
    Leave,
    /// The process ends with success while it waits for work, without a word.
    LeaveIdle,
    /// Its stage sleeps.
    Stall,
    /// A note over its bound.
    HugeNote,
    /// A tensor of a type that the plan does not call for.
    UnsupportedDtype,
    /// A tensor that no slot holds.
    OversizeTensor,
    /// A plan with recompute, and no context.
    MissingContext,
    /// The stage leaves out the recompute that the plan calls for.
    SkippedRecompute,
    /// A byte of a payload changes behind its digest.
    ChangedTensor,
    /// The rank says that it has other kernels.
    ChangedWeights,
    /// A payload that no manifest describes.
    SideTransfer,
    /// A slot of another edge.
    ForeignSlot,
    /// A collective of the group of a stage, from a member that there is not.
    Stranger,
    /// A second thread that calls the one issuer.
    SecondThread,
    /// Received: another version.
    WrongVersion,
    /// Received: a lap that the edge does not have.
    WrongLap,
    /// Received: a frame of the attempt before, behind one of a newer attempt.
    FallingAttempt,
    /// Received: a body whose checksum is wrong.
    DamagedBody,
    /// Received: a header that announces another body than follows.
    LyingBody,
    /// Received: a header that announces another payload than the manifest describes.
    LyingPayload,
    /// Received: the first half of a frame.
    TruncatedFrame,
    /// Received: the same frame twice.
    Duplicated,
    /// Received: nothing, where a frame was sent.
    Skipped,
    /// Received: two frames in the wrong order.
    Swapped,
    /// Received: a plan that counts its calls wrongly.
    WrongCalls,
    /// Received: a report of another number of calls than planned.
    WrongReport,
    /// Received: a report more than stages have worked.
    ExtraReport,
    /// Received: a note over its bound.
    LongNote,
    /// Received: tensors in a message that a hard cut overtook.
    StaleTensors,
    /// Received: a manifest with another shape.
    AlteredManifest,
    /// Received: a tensor more.
    ExtraTensor,
    /// Received: a tensor less.
    MissingTensor,
    /// Received: recompute asked for, and no context.
    LostContext,
    /// Received: context, and no recompute asked for.
    StaleContext,
    /// Results are kept back until a hard cut has passed them.
    LateResult,
}

/// What a run must be for a fault to happen in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Nccl,
    Recompute,
    HardCuts,
}

impl Need {
    /// As the command line has it.
    pub(crate) fn option(self) -> &'static str {
        match self {
            Self::Nccl => "--transport nccl",
            Self::Recompute => "--recompute",
            Self::HardCuts => "--cuts hard",
        }
    }
}

/// Where a fault is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// At no message: a process, or what is in order.
    Beside,
    /// By the source, in what it makes.
    Built,
    /// By a stage behind the source.
    Worked,
    /// By the rank that sends.
    Sent,
    /// In what a rank hears.
    Heard,
}

impl Break {
    pub(crate) fn named(id: &str) -> Option<Self> {
        Self::from_str(id, false).ok()
    }

    pub(crate) fn id(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// What it does, in words.
    pub(crate) fn about(self) -> String {
        let value = self.to_possible_value();
        let help = value.and_then(|value| value.get_help().cloned());
        help.map_or_else(String::new, |help| help.to_string())
    }

    /// The rank on which it happens if no other is named.
    pub(crate) fn usual_rank(self, pipeline: &Pipeline) -> Rank {
        match self.place() {
            Place::Built | Place::Sent => Rank::new(0),
            _ if self == Self::LateResult => Rank::new(0),
            _ => pipeline.stages()[1].leader(),
        }
    }

    /// Says whether the rank runs a stage together with others.
    fn is_member(rank: Rank, pipeline: &Pipeline) -> bool {
        let mut stages = pipeline.stages_at(rank);
        stages.any(|(_, stage)| stage.ranks.len() > 1)
    }

    /// Why it cannot happen on this rank.
    pub(crate) fn cannot_be_on(self, rank: Rank, pipeline: &Pipeline) -> Option<&'static str> {
        let mut stages = pipeline.stages_at(rank);
        let is_source = rank.get() == 0;
        if rank.get() >= pipeline.world_size().get() {
            return Some("there is no such rank");
        }
        match self.place() {
            Place::Built if !is_source => Some("only the source can do it"),
            Place::Worked if !stages.any(|(at, _)| at > 0) => Some("it has the source alone"),
            _ if self == Self::Stranger && !Self::is_member(rank, pipeline) => {
                Some("it has no stage of a group")
            }
            _ if self == Self::LateResult && (!is_source || pipeline.sink() != rank) => {
                Some("it takes source and sink on one rank")
            }
            _ => None,
        }
    }

    /// What a run must be, or it never strikes.
    pub(crate) fn need(self) -> Option<Need> {
        match self {
            Self::SecondThread => Some(Need::Nccl),
            Self::MissingContext
            | Self::SkippedRecompute
            | Self::LostContext
            | Self::StaleContext => Some(Need::Recompute),
            Self::LateResult => Some(Need::HardCuts),
            _ => None,
        }
    }

    /// Says whether it alters what a rank hears.
    pub(super) fn is_heard(self) -> bool {
        self.place() == Place::Heard
    }

    fn place(self) -> Place {
        match self {
            Self::Kill
            | Self::Stop
            | Self::Panic
            | Self::Leave
            | Self::LeaveIdle
            | Self::Stall
            | Self::ChangedWeights
            | Self::LateResult => Place::Beside,
            Self::Stranger => Place::Worked,
            Self::HugeNote
            | Self::UnsupportedDtype
            | Self::OversizeTensor
            | Self::MissingContext => Place::Built,
            Self::SkippedRecompute => Place::Worked,
            Self::ChangedTensor | Self::SideTransfer | Self::ForeignSlot | Self::SecondThread => {
                Place::Sent
            }
            _ => Place::Heard,
        }
    }

    /// The first stage that must not work on the chunk of a fault on this rank, nor on one behind it; and how many chunks
    /// behind it that begins. `None` where nothing is said of it.
    pub(super) fn felt(self, rank: Rank, pipeline: &Pipeline) -> Option<(usize, u64)> {
        let mut own = pipeline.stages_at(rank).map(|(at, _)| at);
        match self.place() {
            // A rank that is started again computes what its forerunner did not.
            Place::Beside => None,
            Place::Built => Some((1, 0)),
            Place::Worked => own.find(|at| *at > 0).map(|at| (at + 1, 0)),
            // A device may have been given work on it before its digests are compared.
            Place::Sent if self == Self::ChangedTensor => own.next().map(|at| (at + 2, 0)),
            Place::Sent => own.next().map(|at| (at + 1, 0)),
            // What was in order before the copy came may be used.
            Place::Heard => {
                let first = own.find(|at| *at > 0)?;
                Some((first, u64::from(self == Self::Duplicated)))
            }
        }
    }
}
