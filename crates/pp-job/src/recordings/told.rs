//! All that `pp flight` says, as JSON and in plain words.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use pp_transport::flight::Reason;
use serde::Serialize;

use super::pairs::{Findings, Lack};
use super::ranked::{By, Clock, Ranked};
use super::tell::{activity, duration, lasting, ranks};
use super::waits::{self, Wait};
use super::{pairs, story};

/// Tells how a job ended, from the flight recordings of its ranks.
#[derive(Serialize)]
pub struct Analysis {
    #[serde(skip)]
    pub(super) ranked: Vec<Ranked>,
    pub(super) job: String,
    pub(super) ranks: Vec<Rank>,
    /// Ranks of the job without a recording.
    pub(super) missing: Vec<u32>,
    /// Files of earlier launches under the same job id.
    pub(super) left_out: Vec<PathBuf>,
    /// Operations of which two ranks or more have their half.
    pub(super) matched: usize,
    /// The first operation on which ranks disagree.
    pub(super) disagreement: Option<String>,
    /// The ranks that never came to an operation, and to which.
    pub(super) never_came: Vec<String>,
    pub(super) absent: BTreeSet<u32>,
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

impl Rank {
    fn new(of: &Ranked, wait: Wait) -> Self {
        let recording = &of.recording;
        Self {
            rank: of.rank(),
            pid: recording.pid,
            host: recording.host.to_string(),
            file: of.file.display().to_string(),
            written_because: match &recording.reason {
                Reason::Asked => "asked for".into(),
                Reason::Fault(fault) => fault.to_string(),
                Reason::Panic(text) => format!("panic: {text}"),
                _ => "unknown".into(),
            },
            operations: recording.operations.len(),
            operations_ever: recording.total,
            inside: activity(of),
            wait,
            clock: of.clock.clone(),
        }
    }
}

impl Analysis {
    /// What the recordings of a job say together.
    pub(super) fn of(ranked: Vec<Ranked>, left_out: Vec<PathBuf>) -> Self {
        let Findings {
            matched,
            disagreement,
            lacks,
        } = pairs::find(&ranked);
        let waits: Vec<Wait> = ranked.iter().map(|r| waits::of(r, &ranked)).collect();
        let first = ranked.first().map(|first| &first.recording);
        let is_there = |rank: &u32| ranked.iter().any(|r| r.rank() == *rank);
        let world = first.map_or(0, |first| first.world_size.get());
        let missing: Vec<u32> = (0..world).filter(|rank| !is_there(rank)).collect();
        let (verdict, running) = story::story(&ranked, &waits, &missing, &lacks);
        // What was between the ranks of a running job when they wrote, one after the other, is not lost.
        let (never_came, under_way) = match running {
            true => (Vec::new(), lacks.iter().map(Lack::not_yet).collect()),
            false => (lacks.iter().map(Lack::never).collect(), Vec::new()),
        };
        let ranks = ranked.iter().zip(waits);
        Self {
            job: format!("{:016x}", first.map_or(0, |first| first.job)),
            ranks: ranks.map(|(r, wait)| Rank::new(r, wait)).collect(),
            ranked,
            missing,
            left_out,
            matched,
            disagreement,
            never_came,
            absent: lacks.iter().map(|lack| lack.rank).collect(),
            under_way,
            running,
            verdict,
        }
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wait, clock, .. } = self;
        writeln!(
            f,
            "\nrank {} (process {} on {})",
            self.rank, self.pid, self.host
        )?;
        let mut row = |name: &str, text: &str| writeln!(f, "  {name:<11}{text}");
        row("written", &self.written_because)?;
        let (kept, ever) = (self.operations, self.operations_ever);
        row("kept", &format!("the last {kept} of {ever} operations"))?;
        if let Some(inside) = &self.inside {
            row("inside", inside)?;
        }
        row("wait", &format!("{}{}", wait.what, lasting(wait.for_ns)))?;
        if !wait.on.is_empty() && !wait.is_idle {
            row("on", &ranks(&wait.on))?;
        }
        let within = duration(clock.within_ns.unwrap_or(0));
        match clock.by {
            By::SameClock => Ok(()),
            By::Messages => {
                let how = format!("placed by messages both ways, right to {within}");
                row("clock", &how)
            }
            By::OneWay => row("clock", "placed by messages one way: a guess"),
            By::WallClock => row("clock", "placed by the wall clocks: may be seconds off"),
        }
    }
}

impl fmt::Display for Analysis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "job {}: {}", self.job, self.verdict)?;
        for file in &self.left_out {
            let why = "of an earlier launch under the same job id";
            writeln!(f, "left out: {}: {why}", file.display())?;
        }
        for rank in &self.ranks {
            rank.fmt(f)?;
        }
        writeln!(f)?;
        if !self.missing.is_empty() {
            writeln!(f, "no recording of {}", ranks(&self.missing))?;
        }
        for what in &self.never_came {
            writeln!(f, "never came: {what}")?;
        }
        for what in &self.under_way {
            writeln!(f, "under way: {what}")?;
        }
        match &self.disagreement {
            Some(what) => writeln!(f, "first disagreement: {what}"),
            None => writeln!(
                f,
                "no disagreement on the {} operations of which two ranks have their half",
                self.matched
            ),
        }
    }
}
