//! One job of two real ranks, each a process of this same program, as a launcher starts them.

use std::process::Command;
use std::time::{Duration, Instant};

use pp_job::WORLD;
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
    pub(super) ranks: [Ended; WORLD as usize],
    /// From the fault, or the start where there is none, until both ranks were gone.
    pub(super) took: Duration,
    /// A process of the job outlived its ranks.
    pub(super) left_behind: bool,
}

/// Runs both ranks to their end. A rank that is stopped goes on once the other has ended.
pub(super) fn run(job: &LocalJob, commands: [Command; 2]) -> std::io::Result<Outcome> {
    let began = Instant::now();
    let [front, phase_b] = commands.map(|mut rank| Process::start(&mut rank, Output::Counted));
    let ranks = [front?, phase_b?];
    let [front, phase_b] = &ranks;
    let deadline = began + DEADLINE;
    while Instant::now() < deadline {
        match (front.ended(), phase_b.ended()) {
            (None, None) => {}
            (None, Some(_)) => front.signal(Signal::CONT),
            (Some(_), None) => phase_b.signal(Signal::CONT),
            (Some(_), Some(_)) => break,
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let gone = [front, phase_b].map(|rank| rank.ends(deadline));
    let gone = gone.iter().flatten().map(|(at, _)| *at).max();
    let said = ranks.iter().flat_map(Process::lines);
    let strikes = said.filter(|(_, line)| is_strike(line));
    let fault_at = strikes.map(|(at, _)| at).min().unwrap_or(began);
    Ok(Outcome {
        ranks: ranks.each_ref().map(Ended::of),
        took: gone.map_or(DEADLINE, |gone| gone.saturating_duration_since(fault_at)),
        left_behind: !left_of(job).is_empty(),
    })
}
