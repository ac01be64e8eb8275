//! One job of real ranks, each a process of this same program, as a launcher starts them.

use std::process::Command;
use std::time::{Duration, Instant};

use pp_testing::process::{Output, Process};
use pp_transport::launch::LocalJob;
use rustix::process::Signal;

use crate::hook::is_strike;
use crate::trial::{Ended, left_of};

/// A job that has not ended by then never will.
const DEADLINE: Duration = Duration::from_secs(60);
/// Time between two looks at the ranks.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// How a job ended.
#[derive(Debug)]
pub(super) struct Outcome {
    /// In their order.
    pub(super) ranks: Vec<Ended>,
    /// From the fault, or the start where there is none, until all ranks were gone.
    pub(super) took: Duration,
    /// A process of the job outlived its ranks.
    pub(super) left_behind: bool,
}

/// Runs the ranks to their end. One that is stopped goes on once all others have ended.
pub(super) fn run(job: &LocalJob, commands: Vec<Command>) -> std::io::Result<Outcome> {
    let began = Instant::now();
    let ranks = commands.into_iter();
    let ranks = ranks.map(|mut rank| Process::start(&mut rank, Output::Counted));
    let ranks = ranks.collect::<Result<Vec<_>, _>>()?;
    let deadline = began + DEADLINE;
    while Instant::now() < deadline {
        let mut lives = ranks.iter().filter(|rank| rank.ended().is_none());
        match (lives.next(), lives.next()) {
            (None, _) => break,
            (Some(last), None) => last.signal(Signal::CONT),
            _ => {}
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let gone = ranks.iter().filter_map(|rank| rank.ends(deadline));
    let gone = gone.map(|(at, _)| at).max();
    let said = ranks.iter().flat_map(Process::lines);
    let strikes = said.filter(|(_, line)| is_strike(line));
    let fault_at = strikes.map(|(at, _)| at).min().unwrap_or(began);
    Ok(Outcome {
        ranks: ranks.iter().map(Ended::of).collect(),
        took: gone.map_or(DEADLINE, |gone| gone.saturating_duration_since(fault_at)),
        left_behind: !left_of(job).is_empty(),
    })
}
