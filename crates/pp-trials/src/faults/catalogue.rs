//! What the catalogue says of one way to break one rule.

use std::time::Duration;

use pp_contract::FaultKind;
use pp_runtime::times::MISSED_HEARTBEATS;
use serde::Serialize;

use super::log::Point;
use crate::trial::ENDS_WITHIN;

/// Time between heartbeats: a rank that gets no core for a while is not silent.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);
/// When a rank that says nothing is noticed.
pub(super) const SILENCE: Duration = HEARTBEAT.saturating_mul(MISSED_HEARTBEATS);

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
pub(super) const HOST: &[Transport] = &[Transport::Host];
pub(super) const NCCL: &[Transport] = &[Transport::Nccl];

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
    /// When the fault is noticed, counted from the moment at which it was made.
    pub(super) noticed_after: Duration,
    /// What some rank must say.
    pub(super) words: &'static [&'static str],
    /// An output is there when the job is done.
    pub(super) writes: bool,
    /// What has to stand in the log, where that is looked at.
    pub(super) logs: &'static [Point],
}

impl Entry {
    pub(super) const fn new(
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
            noticed_after: Duration::ZERO,
            words: &[],
            writes: true,
            logs: &[],
        }
    }

    pub(super) const fn on(mut self, transports: &'static [Transport]) -> Self {
        self.transports = transports;
        self
    }

    pub(super) const fn with(mut self, args: &'static [&'static str]) -> Self {
        self.args = args;
        self
    }

    pub(super) const fn env(mut self, env: &'static [(&'static str, &'static str)]) -> Self {
        self.env = env;
        self
    }

    pub(super) const fn noticed_after(mut self, time: Duration) -> Self {
        self.noticed_after = time;
        self
    }

    pub(super) const fn says(mut self, words: &'static [&'static str]) -> Self {
        self.words = words;
        self
    }

    pub(super) fn is_hooked(&self) -> bool {
        matches!(self.how, How::Hook(_))
    }

    /// How long after the fault the last rank may end. Without a hook the moment of the fault is not known; a job that
    /// goes on has no bound.
    pub(super) fn bound(&self) -> Option<Duration> {
        let goes_on = self.ends.iter().all(|end| matches!(end, End::Done));
        (self.is_hooked() && !goes_on).then(|| self.noticed_after + ENDS_WITHIN)
    }

    /// The rank on which something is broken, where it is one.
    pub(super) fn rank(&self) -> Option<u32> {
        match self.how {
            How::Hook(hook) => crate::hook::rank_of(hook),
            How::Variable(rank, ..) | How::Arguments(rank, _) => Some(rank),
            How::Nothing => None,
        }
    }
}

/// Both ranks say the same.
pub(super) const fn both(kind: FaultKind, rank: u32, operation: &'static str) -> [End; 2] {
    [End::Fault(kind, rank, operation); 2]
}
