//! One job of two real ranks, each a process of this same program, as a launcher starts them.

use std::process::Command;
use std::time::{Duration, Instant};

use pp_job::WORLD;
use pp_testing::process::{Output, Process};
use pp_transport::launch::LocalJob;
use rustix::process::Signal;

use crate::hook::is_strike;
use crate::trial::left_of;

/// A job that has not ended by then never will.
const DEADLINE: Duration = Duration::from_secs(60);
/// Time between two looks at the ranks.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// How one rank ended, and what it said.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// The exit code, or a signal below zero.
    pub(super) code: Option<i32>,
    /// Each line of its standard error.
    pub(super) lines: Vec<String>,
    /// Killed here, at the deadline.
    pub(super) by_us: bool,
}

impl Ended {
    /// The exit code, or the signal.
    pub(super) fn how(&self) -> String {
        match self.code {
            Some(code @ 0..) => format!("exit {code}"),
            Some(signal) => format!("signal {}", -signal),
            None => "unknown".into(),
        }
    }
}

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
    let [mut front, mut phase_b] = commands;
    let ranks = [&mut front, &mut phase_b].map(|rank| Process::start(rank, Output::Counted));
    let [front, phase_b] = ranks;
    let ranks = [front?, phase_b?];
    let by_us = wait(&ranks, began + DEADLINE);
    let ends = [&ranks[0], &ranks[1]].map(|rank| rank.ends(Instant::now() + DEADLINE));
    let left_behind = !left_of(job).is_empty();
    let gone = ends.iter().flatten().map(|(at, _)| *at).max();
    let said = [&ranks[0], &ranks[1]].map(Process::lines);
    let strikes = said.iter().flatten().filter(|(_, line)| is_strike(line));
    let fault_at = strikes.map(|(at, _)| *at).min().unwrap_or(began);
    let mut said = said.into_iter();
    let ranks = [0, 1].map(|rank: usize| Ended {
        code: ends[rank].map(|(_, code)| code),
        lines: said
            .next()
            .into_iter()
            .flatten()
            .map(|(_, line)| line)
            .collect(),
        by_us: by_us[rank],
    });
    let took = gone.map_or(DEADLINE, |gone| gone.saturating_duration_since(fault_at));
    Ok(Outcome {
        ranks,
        took,
        left_behind,
    })
}

/// Waits until both ranks are gone; which of them were killed here.
fn wait(ranks: &[Process; 2], deadline: Instant) -> [bool; 2] {
    loop {
        let lives = [&ranks[0], &ranks[1]].map(|rank| rank.ended().is_none());
        if lives == [false; 2] {
            return lives;
        }
        for (rank, _) in ranks.iter().zip(lives).filter(|(_, lives)| *lives) {
            if Instant::now() > deadline {
                rank.signal(Signal::KILL);
            } else if lives != [true; 2] {
                rank.signal(Signal::CONT);
            }
        }
        if Instant::now() > deadline {
            return lives;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
