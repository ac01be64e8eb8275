//! The faults that can be made in a run, by name, and how far each may be felt.

use clap::ValueEnum;

/// A fault that a hook makes.
///
/// A correct sender cannot make most of what a link may get: the frame is altered by the rank that
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
    /// Phase B sleeps in its stage.
    StallCompute,
    /// A plan that refuses to be serialized.
    UnserializablePlan,
    /// A plan over the bound of a body.
    HugePlan,
    /// A tensor of a type that the plan does not call for.
    UnsupportedDtype,
    /// A tensor that no slot holds.
    OversizeTensor,
    /// A plan with recompute, and no context.
    MissingContext,
    /// Phase B leaves out the recompute that the plan calls for.
    SkippedRecompute,
    /// A byte of a payload changes behind its digest.
    ChangedTensor,
    /// The rank says that it has other kernels.
    ChangedWeights,
    /// A payload that no manifest describes.
    SideTransfer,
    /// A slot of another link.
    ForeignSlot,
    /// An operation with a rank that is no member of the group.
    WrongGroup,
    /// A collective of a group of its own, in order.
    LoneCollective,
    /// A second thread that calls the one issuer.
    SecondThread,
    /// Received: another version.
    WrongVersion,
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
    Host,
    Nccl,
    Recompute,
    HardCuts,
}

impl Need {
    /// As the command line has it.
    pub(crate) fn option(self) -> &'static str {
        match self {
            Self::Host => "--transport host",
            Self::Nccl => "--transport nccl",
            Self::Recompute => "--recompute",
            Self::HardCuts => "--cuts hard",
        }
    }
}

/// Where a fault is made.
enum Place {
    /// At no message: a process, or what is in order.
    Beside,
    /// By the rank that sends.
    Sent,
    /// In what a rank hears.
    Heard,
}

/// From which chunk on a stage must not see anything, counted from the chunk of the hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Felt {
    /// Nothing is said of it.
    Anywhere,
    /// No stage computes these chunks, so none decodes them.
    NotComputed,
    /// No stage computes the chunks behind the one of the hook, so none decodes them.
    NextNotComputed,
    /// No stage decodes these chunks.
    NotDecoded,
    /// No stage decodes the chunks behind the one of the hook.
    NextNotDecoded,
    /// Its result is not decoded; the run goes on.
    Dropped,
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

    /// The ranks on which it can happen, the usual one first.
    pub(crate) fn ranks(self) -> &'static [u32] {
        match self {
            Self::UnserializablePlan
            | Self::HugePlan
            | Self::UnsupportedDtype
            | Self::OversizeTensor
            | Self::MissingContext
            | Self::LateResult => &[0],
            Self::Leave
            | Self::LeaveIdle
            | Self::StallCompute
            | Self::SkippedRecompute
            | Self::LoneCollective
            | Self::WrongCalls
            | Self::MissingTensor
            | Self::LostContext
            | Self::StaleContext => &[1],
            Self::ChangedTensor | Self::SideTransfer | Self::ForeignSlot | Self::SecondThread => {
                &[0, 1]
            }
            _ => &[1, 0],
        }
    }

    /// What a run must be, or it never strikes.
    pub(crate) fn need(self) -> Option<Need> {
        match self {
            Self::WrongGroup | Self::LoneCollective | Self::SecondThread => Some(Need::Nccl),
            Self::ForeignSlot => Some(Need::Host),
            Self::MissingContext
            | Self::SkippedRecompute
            | Self::LostContext
            | Self::StaleContext => Some(Need::Recompute),
            Self::LateResult => Some(Need::HardCuts),
            _ => None,
        }
    }

    /// Where it is made.
    fn place(self) -> Place {
        match self {
            Self::Kill
            | Self::Stop
            | Self::Panic
            | Self::Leave
            | Self::LeaveIdle
            | Self::StallCompute
            | Self::LoneCollective
            | Self::LateResult => Place::Beside,
            Self::UnserializablePlan
            | Self::HugePlan
            | Self::UnsupportedDtype
            | Self::OversizeTensor
            | Self::MissingContext
            | Self::SkippedRecompute
            | Self::ChangedTensor
            | Self::ChangedWeights
            | Self::SideTransfer
            | Self::ForeignSlot
            | Self::WrongGroup
            | Self::SecondThread => Place::Sent,
            _ => Place::Heard,
        }
    }

    /// How far it may be felt when it happens on this rank.
    pub(crate) fn felt(self, rank: u32) -> Felt {
        match (self, self.place(), rank) {
            (Self::LateResult, ..) => Felt::Dropped,
            // A rank that is started again computes what its forerunner did not.
            (_, Place::Beside, _) => Felt::Anywhere,
            // A device may have been given work on it before its digests are compared.
            (Self::ChangedTensor, _, 1) => Felt::Anywhere,
            (Self::ChangedTensor, ..) => Felt::NotDecoded,
            // What was in order before the copy came may be used.
            (Self::Duplicated, _, 1) => Felt::NextNotComputed,
            (Self::Duplicated, ..) => Felt::NextNotDecoded,
            // The front builds, and Phase B hears from it.
            (_, Place::Sent, 0) | (_, Place::Heard, 1) => Felt::NotComputed,
            // Phase B has computed, or does, and the front hears from it.
            _ => Felt::NotDecoded,
        }
    }
}
