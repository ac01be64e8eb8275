//! All that `pp flight` says, as JSON and in plain words.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use super::pairs::Findings;
use super::ranked::{By, Clock};
use super::tell::{duration, lasting, ranks};
use super::waits::Wait;

/// All that is said, in both forms.
#[derive(Serialize)]
pub(super) struct Told {
    pub(super) job: String,
    pub(super) ranks: Vec<Rank>,
    /// Ranks of the job without a recording.
    pub(super) missing: Vec<u32>,
    /// Files of earlier launches under the same job id.
    pub(super) left_out: Vec<PathBuf>,
    #[serde(flatten)]
    pub(super) findings: Findings,
    /// What one rank had not taken in yet when a job that was running was asked.
    pub(super) under_way: Vec<String>,
    /// The job was asked while it ran, and nothing was wrong with it.
    pub(super) running: bool,
    pub(super) verdict: String,
}

/// What one recording says.
#[derive(Serialize)]
pub(super) struct Rank {
    pub(super) rank: u32,
    pub(super) pid: u32,
    pub(super) host: String,
    pub(super) file: String,
    pub(super) written_because: String,
    pub(super) operations: usize,
    pub(super) operations_ever: u64,
    /// What it was inside of when it was written.
    pub(super) inside: Option<String>,
    pub(super) wait: Wait,
    pub(super) clock: Clock,
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "job {}: {}", self.job, self.verdict)?;
        for file in &self.left_out {
            let file = file.display();
            writeln!(
                f,
                "left out: {file}: of an earlier launch under the same job id"
            )?;
        }
        for rank in &self.ranks {
            writeln!(
                f,
                "\nrank {} (process {} on {})",
                rank.rank, rank.pid, rank.host
            )?;
            writeln!(f, "  written    {}", rank.written_because)?;
            writeln!(
                f,
                "  kept       the last {} of {} operations",
                rank.operations, rank.operations_ever
            )?;
            if let Some(inside) = &rank.inside {
                writeln!(f, "  inside     {inside}")?;
            }
            let wait = &rank.wait;
            writeln!(f, "  wait       {}{}", wait.what, lasting(wait.for_ns))?;
            if !wait.on.is_empty() && !wait.is_idle {
                writeln!(f, "  on         {}", ranks(&wait.on))?;
            }
            let within = rank.clock.within_ns.unwrap_or(0);
            match rank.clock.by {
                By::SameClock => {}
                By::Messages => writeln!(
                    f,
                    "  clock      placed by messages both ways, right to {}",
                    duration(within)
                )?,
                By::OneWay => writeln!(f, "  clock      placed by messages one way: a guess")?,
                By::WallClock => {
                    writeln!(
                        f,
                        "  clock      placed by the wall clocks: may be seconds off"
                    )?;
                }
            }
        }
        writeln!(f)?;
        if !self.missing.is_empty() {
            writeln!(f, "no recording of {}", ranks(&self.missing))?;
        }
        for what in &self.findings.never_came {
            writeln!(f, "never came: {what}")?;
        }
        for what in &self.under_way {
            writeln!(f, "under way: {what}")?;
        }
        match &self.findings.disagreement {
            Some(what) => writeln!(f, "first disagreement: {what}"),
            None => writeln!(
                f,
                "no disagreement on the {} operations of which two ranks have their half",
                self.findings.matched
            ),
        }
    }
}
