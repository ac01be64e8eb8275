//! What is expected of a run, and what was found in it.

use std::fmt;

/// What kind of rule a run broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// Two accesses to the same bytes, at least one a write, that nothing orders.
    Race,
    /// A read of device memory that no write happens before.
    Unwritten,
    /// A slot was sent twice with nothing written in between.
    Stale,
    /// Memory was freed before its last use, or used after it was freed.
    Lifetime,
    /// A device's NCCL calls came from more than one thread.
    Issuer,
    /// The operations of a communicator do not agree on its ranks.
    Agreement,
    /// The run would wait for ever if no send ended before its receive began.
    Deadlock,
    /// A call that the steady state must not make.
    Steady,
    /// Something the fakes themselves saw: a bad address, a lost size, a dead handle.
    Fault,
}

/// One thing that is wrong.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// The lines of the recordings that show it.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.what)
    }
}

/// What must be written before it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fresh {
    /// Every byte.
    Whole,
    /// Something of what is read or sent: between tensors and frames are gaps that mean nothing.
    WithGaps,
    /// Every byte, but for payloads: a benchmark of the link alone sends what its slots hold.
    NotPayloads,
}

/// What is to be expected of a run.
#[derive(Clone, Copy, Debug)]
pub struct Expect {
    /// So many payloads of each process are warm-up; after them the steady state begins.
    pub warm_up: usize,
    /// The run ended by itself: every transfer has its other side.
    pub complete: bool,
    /// What must be written before it is read.
    pub fresh: Fresh,
    /// So many events a process may still make in the steady state: a pool that grows to its bound.
    pub late_events: usize,
}

impl Default for Expect {
    fn default() -> Self {
        Self {
            warm_up: 0,
            complete: true,
            fresh: Fresh::Whole,
            late_events: 0,
        }
    }
}

/// What was looked at, and what was found.
#[derive(Debug, Default)]
pub struct Report {
    /// What is wrong; empty for a good run.
    pub violations: Vec<Violation>,
    /// Payloads sent, and received by NCCL or from a rank without a device.
    pub transfers: usize,
    /// Accesses to memory that were compared.
    pub accesses: usize,
    /// Lines in the steady state.
    pub steady_lines: usize,
}

impl Report {
    /// Says whether a rule was broken.
    pub fn broke(&self, rule: Rule) -> bool {
        self.violations
            .iter()
            .any(|violation| violation.rule == rule)
    }

    /// Fails the test with what is wrong.
    #[track_caller]
    pub fn assert_clean(&self) {
        let few: Vec<String> = self
            .violations
            .iter()
            .take(12)
            .map(Violation::to_string)
            .collect();
        assert!(
            self.violations.is_empty(),
            "{} violations:\n{}",
            self.violations.len(),
            few.join("\n")
        );
    }
}
