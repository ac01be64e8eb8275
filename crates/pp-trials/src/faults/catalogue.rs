//! What the catalogue says of one way to break one rule.

use std::time::Duration;

use pp_contract::FaultKind;
use pp_runtime::times::MISSED_HEARTBEATS;

use super::log::Point;
use crate::hook;
use crate::trial::{ENDS_WITHIN, Ground, Trial};

/// Time between heartbeats: a rank that gets no core for a while is not silent.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);
/// When a rank that says nothing is noticed.
pub(super) const SILENCE: Duration = HEARTBEAT.saturating_mul(MISSED_HEARTBEATS);

const ALL: &[Ground] = &[Ground::Host, Ground::Fakes, Ground::Gpus];
pub(super) const HOST: &[Ground] = &[Ground::Host];
pub(super) const NCCL: &[Ground] = &[Ground::Fakes, Ground::Gpus];
/// Where real GPUs cannot be made to do it.
pub(super) const FAKES: &[Ground] = &[Ground::Fakes];

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
    pub(super) how: How,
    pub(super) grounds: &'static [Ground],
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
        how: How,
        ends: [End; 2],
    ) -> Self {
        Self {
            id,
            rule,
            how,
            grounds: ALL,
            args: &[],
            env: &[],
            ends,
            noticed_after: Duration::ZERO,
            words: &[],
            writes: true,
            logs: &[],
        }
    }

    pub(super) const fn on(mut self, grounds: &'static [Ground]) -> Self {
        self.grounds = grounds;
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
}

impl Trial for &Entry {
    fn name(&self) -> String {
        self.id.into()
    }

    fn means(&self, _: Ground) -> String {
        let how = match self.how {
            How::Hook(hook) => format!("PP_FAULT={hook}: {}", hook::about(hook)),
            How::Variable(rank, name, value) => format!("{name}={value} on rank {rank}"),
            How::Arguments(rank, args) => format!("{} on rank {rank}", args.join(" ")),
            How::Nothing => "nothing is broken".into(),
        };
        let [front, phase_b] = self.ends.map(|end| match end {
            End::Done => "done".into(),
            End::Killed => "killed".into(),
            End::Fault(kind, rank, operation) => format!("{kind}: rank {rank}: {operation}"),
        });
        format!("{} {how}. Rank 0: {front}; rank 1: {phase_b}", self.rule)
    }

    fn not_here(&self, ground: Ground) -> Option<&'static str> {
        let is_here = self.grounds.contains(&ground);
        (!is_here).then_some("not a fault of this transport, or one of the fakes alone")
    }
}

/// Both ranks say the same.
pub(super) const fn both(kind: FaultKind, rank: u32, operation: &'static str) -> [End; 2] {
    [End::Fault(kind, rank, operation); 2]
}

#[cfg(test)]
mod tests {
    use super::super::entries::all;

    #[test]
    fn the_bound_is_a_second_after_the_fault_is_noticed() {
        let bound = |id| {
            let entry = all().find(|entry| entry.id == id).unwrap();
            entry.bound().map(|bound| bound.as_secs())
        };
        assert_eq!(bound("OM-13.kill-front"), Some(1));
        assert_eq!(bound("OM-13.stop-front"), Some(3 + 1));
        assert_eq!(bound("OM-13.stuck"), Some(3 + 1));
        // Nothing says when it was made; the job goes on.
        assert_eq!(bound("OM-04.setting"), None);
        assert_eq!(bound("OM-09"), None);
    }
}
