//! What the catalogue says of one way to break one rule.

use std::time::Duration;

use pp_contract::{FaultKind, Pipeline, Rank};
use pp_runtime::times::MISSED_HEARTBEATS;

use super::log::Point;
use super::role::Role;
use crate::hook;
use crate::trial::{ENDS_WITHIN, Ground, Trial, shared_gpus};

/// Time between heartbeats: a rank that gets no core for a while is not silent.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);
/// When a rank that says nothing is noticed.
pub(super) const SILENCE: Duration = HEARTBEAT.saturating_mul(MISSED_HEARTBEATS);

const ALL: &[Ground] = &[
    Ground::Host,
    Ground::P2pFakes,
    Ground::P2pGpus,
    Ground::Fakes,
    Ground::Gpus,
];
pub(super) const GPUS: &[Ground] = &[
    Ground::P2pFakes,
    Ground::P2pGpus,
    Ground::Fakes,
    Ground::Gpus,
];
pub(super) const NCCL: &[Ground] = &[Ground::Fakes, Ground::Gpus];
/// Where real GPUs cannot be made to do it.
pub(super) const FAKES: &[Ground] = &[Ground::P2pFakes, Ground::Fakes];

/// How a rank has to end.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    /// With success, and without an error.
    Done,
    /// By SIGKILL.
    Killed,
    /// With one line: this kind, this rank, this operation.
    Fault(FaultKind, Role, &'static str),
}

/// How all ranks have to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) all: End,
    /// But for this one.
    pub(super) but: Option<(Role, End)>,
}

impl Ends {
    pub(super) const DONE: Self = Self {
        all: End::Done,
        but: None,
    };

    /// This rank otherwise.
    pub(super) const fn but(mut self, role: Role, end: End) -> Self {
        self.but = Some((role, end));
        self
    }

    /// How this rank has to end.
    pub(super) fn of(&self, rank: Rank, pipeline: &Pipeline) -> End {
        let but = self.but.filter(|(role, _)| role.rank(pipeline) == rank);
        but.map_or(self.all, |(_, end)| end)
    }

    /// The job goes on to its end.
    pub(super) fn is_done(&self) -> bool {
        matches!((self.all, self.but), (End::Done, None))
    }
}

/// All ranks say the same.
pub(super) const fn all(kind: FaultKind, role: Role, operation: &'static str) -> Ends {
    Ends {
        all: End::Fault(kind, role, operation),
        but: None,
    }
}

/// What is done to break the rule.
#[derive(Clone, Copy, Debug)]
pub(super) enum How {
    /// PP_FAULT on all ranks: a hook on the rank of this role.
    Hook(&'static str, Role),
    /// As that, at this chunk.
    HookAt(&'static str, Role, u64),
    /// A variable of one rank alone.
    Variable(Role, &'static str, &'static str),
    /// Arguments of one rank alone.
    Arguments(Role, &'static [&'static str]),
    /// Nothing.
    Nothing,
}

impl How {
    /// Whose rank it is done on.
    fn role(self) -> Option<Role> {
        match self {
            Self::Hook(_, role) | Self::HookAt(_, role, _) => Some(role),
            Self::Variable(role, ..) | Self::Arguments(role, _) => Some(role),
            Self::Nothing => None,
        }
    }

    /// PP_FAULT of the job.
    pub(super) fn fault(self, pipeline: &Pipeline) -> Option<String> {
        match self {
            Self::Hook(name, role) => Some(format!("{name}@{}", role.rank(pipeline))),
            Self::HookAt(name, role, chunk) => {
                Some(format!("{name}@{}:chunk={chunk}", role.rank(pipeline)))
            }
            _ => None,
        }
    }
}

/// Where the sink must stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SinkAt {
    Any,
    /// On the rank of the source: no edge carries acceptances.
    Source,
    /// On another rank.
    Apart,
}

/// One way to break one rule.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) id: &'static str,
    /// The rule.
    pub(super) rule: &'static str,
    pub(super) how: How,
    pub(super) grounds: &'static [Ground],
    pub(super) sink: SinkAt,
    /// Arguments and variables of all ranks.
    pub(super) args: &'static [&'static str],
    pub(super) env: &'static [(&'static str, &'static str)],
    pub(super) ends: Ends,
    /// When the fault is noticed, counted from the moment at which it was made.
    pub(super) noticed_after: Duration,
    /// What some rank must say.
    pub(super) words: &'static [&'static str],
    /// What has to stand in the log, where that is looked at.
    pub(super) logs: &'static [Point],
}

impl Entry {
    pub(super) const fn new(id: &'static str, rule: &'static str, how: How, ends: Ends) -> Self {
        Self {
            id,
            rule,
            how,
            grounds: ALL,
            sink: SinkAt::Any,
            args: &[],
            env: &[],
            ends,
            noticed_after: Duration::ZERO,
            words: &[],
            logs: &[],
        }
    }

    pub(super) const fn on(mut self, grounds: &'static [Ground]) -> Self {
        self.grounds = grounds;
        self
    }

    pub(super) const fn where_sink_is(mut self, sink: SinkAt) -> Self {
        self.sink = sink;
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

    pub(super) const fn logs(mut self, points: &'static [Point]) -> Self {
        self.logs = points;
        self
    }

    /// Says whether it takes a group.
    fn is_of_group(&self) -> bool {
        self.how.role() == Some(Role::Member)
    }

    pub(super) fn is_hooked(&self) -> bool {
        matches!(self.how, How::Hook(..) | How::HookAt(..))
    }

    /// How long after the fault the last rank may end. Without a hook the moment of the fault is not known; a job that
    /// goes on has no bound.
    pub(super) fn bound(&self) -> Option<Duration> {
        let is_bound = self.is_hooked() && !self.ends.is_done();
        is_bound.then(|| self.noticed_after + ENDS_WITHIN)
    }
}

/// An entry, on a pipeline.
#[derive(Clone, Copy, Debug)]
pub(super) struct OnPipeline<'a> {
    pub(super) entry: &'static Entry,
    pub(super) pipeline: &'a Pipeline,
}

impl Trial for OnPipeline<'_> {
    fn name(&self) -> String {
        self.entry.id.into()
    }

    fn features(&self) -> Vec<String> {
        let rule = self.entry.id.split('.').next();
        rule.map(str::to_owned).into_iter().collect()
    }

    fn means(&self, _: Ground) -> String {
        let Entry {
            rule, how, ends, ..
        } = self.entry;
        let rank = |role: Role| role.rank(self.pipeline);
        let how = match *how {
            How::Hook(name, _) | How::HookAt(name, ..) => {
                let fault = how.fault(self.pipeline).unwrap_or_default();
                format!("PP_FAULT={fault}: {}", hook::about(name))
            }
            How::Variable(role, name, value) => format!("{name}={value} on rank {}", rank(role)),
            How::Arguments(role, args) => format!("{} on rank {}", args.join(" "), rank(role)),
            How::Nothing => "nothing is broken".into(),
        };
        let end = |end: End| match end {
            End::Done => "done".into(),
            End::Killed => "killed".into(),
            End::Fault(kind, role, operation) => {
                format!("{kind}: rank {}: {operation}", rank(role))
            }
        };
        let but = ends.but.map_or_else(String::new, |(role, other)| {
            format!("; rank {}: {}", rank(role), end(other))
        });
        format!("{rule} {how}. All ranks: {}{but}", end(ends.all))
    }

    fn not_here(&self, ground: Ground) -> Option<&'static str> {
        let has_sink_at_source = self.pipeline.sink().get() == 0;
        let is_alone = self.pipeline.stages()[1].ranks.len() == 1;
        let skips_calls = matches!(self.entry.how, How::Hook("skipped-recompute", _));
        match self.entry.sink {
            _ if skips_calls && is_alone == self.entry.id.ends_with(".group") => {
                Some("it takes a pipeline with a group, or one without")
            }
            _ if skips_calls && !is_alone && ground != Ground::Host => Some(
                "not a fault of this transport: NCCL compares no calls, and its devices wait for ever",
            ),
            _ if is_alone && self.entry.is_of_group() => Some("it takes a pipeline with a group"),
            _ if !self.entry.grounds.contains(&ground) => {
                Some("not a fault of this transport, or one of the fakes alone")
            }
            _ if ["devices.same-gpu", "devices.hidden"].contains(&self.entry.id)
                && shared_gpus(self.pipeline.world_size().get()).is_some() =>
            {
                Some("the ranks share a GPU that is named for each of them")
            }
            SinkAt::Source if !has_sink_at_source => {
                Some("it takes a pipeline with source and sink on one rank")
            }
            SinkAt::Apart if has_sink_at_source => {
                Some("it takes a pipeline with source and sink on two ranks")
            }
            _ => None,
        }
    }
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
        assert_eq!(bound("OM-13.kill-source"), Some(1));
        assert_eq!(bound("OM-13.stop-source"), Some(3 + 1));
        assert_eq!(bound("OM-13.stuck"), Some(3 + 1));
        // Nothing says when it was made; the job goes on.
        assert_eq!(bound("OM-04.setting"), None);
        assert_eq!(bound("OM-09"), None);
    }
}
