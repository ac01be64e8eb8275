//! `pp-trials schedules`: whether a run does what the simulator of training schedules says, and when.
//!
//! Hazard: a simulator that is right about its own rules and wrong about a run. Guarantee: for each schedule, on 2 and 4
//! ranks, a toy job runs in the schedule's own order: ranks are processes, stages sleep, and forward and backward edges are
//! those of any job. The simulator gets the lengths of the run's own actions and the transfer time of each edge: from the
//! end of an action to the start of the action that uses its result, the shortest of the edge. Then it must say when each
//! action of the run starts, within [`BOUND`] of the step.
//!
//! The first step warms the ranks up, and the second begins when nothing is left of the first.

mod job;
mod judge;
mod rendezvous;
mod stages;

use std::fmt;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use pp_command::whole;
use pp_job::Error;
use pp_runtime::schedule::{Kind, Limits, Schedule};
use pp_testing::Folder;
use serde::Serialize;

pub(crate) use self::job::{JobArgs, job};
use self::judge::{Judged, judge};
use crate::hook::VARIABLE;

/// The share of a step by which an action may begin earlier or later than the simulator says.
const BOUND: f64 = 0.02;
const RANKS: [u32; 2] = [2, 4];
const MICROBATCHES: u32 = 8;
/// Stages of a rank, where a schedule takes any number.
const STAGES: u32 = 2;

/// The arguments of `pp-trials schedules`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct SchedulesArgs {
    /// Only this schedule, by its name in `pp schedule list`.
    #[arg(long, value_name = "NAME")]
    only: Option<Kind>,
    /// Only on so many ranks, 2 to 8; by default on 2 and on 4.
    #[arg(long, value_name = "N", value_parser = whole(2..=8_u32))]
    ranks: Option<u32>,
    /// The forward of a rank, all its stages, in microseconds, 1 to 1000000. The backward for the input takes 5/4 of it and
    /// the one for the weights 3/4.
    #[arg(long, value_name = "N", default_value_t = 8_000, value_parser = whole(1..=1_000_000_u64))]
    forward_us: u64,
    /// Slots of each edge, 1 to 64; by default one more than the schedule needs, so that one is filled while another is read.
    #[arg(long, value_name = "N", value_parser = whole(1..=64_u32))]
    slots: Option<u32>,
    /// Runs of a schedule until one is as simulated, 1 to 100. If another process takes the core between two actions, no
    /// action's time shows it.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = whole(1..=100_u32))]
    tries: u32,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// The result: exit code 1 where an action began more than `bound` away from the simulation.
#[derive(Serialize)]
struct SchedulesReport {
    bound: f64,
    forward_us: u64,
    cases: Vec<ScheduleCase>,
    seconds: f64,
}

/// A schedule of a size.
#[derive(Serialize)]
struct ScheduleCase {
    schedule: &'static str,
    ranks: u32,
    stages_per_rank: u32,
    microbatches: u32,
    slots: u32,
    tries: u32,
    #[serde(flatten)]
    judged: Judged,
}

impl ScheduleCase {
    fn is_right(&self) -> bool {
        self.judged.share <= BOUND
    }
}

/// Runs all, or those that were chosen.
pub(crate) fn schedules(args: &SchedulesArgs) -> std::result::Result<(), Error> {
    let began = Instant::now();
    let mut cases = Vec::new();
    for kind in Kind::ALL
        .into_iter()
        .filter(|kind| args.only.is_none_or(|only| only == *kind))
    {
        let sizes = RANKS.into_iter().filter(|_| args.ranks.is_none());
        for ranks in sizes.chain(args.ranks) {
            let case = run(args, kind, ranks).with_context(|| format!("{kind}, {ranks} ranks"))?;
            if !args.json {
                pp_command::print(&format!("{case}\n"))?;
            }
            cases.push(case);
        }
    }
    let report = SchedulesReport {
        bound: BOUND,
        forward_us: args.forward_us,
        cases,
        seconds: began.elapsed().as_secs_f64(),
    };
    let text = match args.json {
        true => serde_json::to_string(&report).map_err(anyhow::Error::new)?,
        false => report.to_string(),
    };
    pp_command::print(&format!("{text}\n"))?;
    match report.wrong() {
        0 => Ok(()),
        wrong => Err(anyhow::anyhow!("{wrong} runs are not what the simulator says").into()),
    }
}

/// Runs one schedule of one size, again where it is not as simulated.
fn run(args: &SchedulesArgs, kind: Kind, ranks: u32) -> Result<ScheduleCase> {
    let stages_per_rank = kind.stages_per_rank().unwrap_or(STAGES);
    let schedule = Schedule::build(kind, ranks, stages_per_rank, MICROBATCHES.max(2 * ranks))?;
    let needed = schedule.check(Limits::default())?.slots_per_edge;
    let slots = args.slots.unwrap_or(needed + 1);
    schedule.check(Limits::slots(slots))?;
    let forward_us = (args.forward_us / u64::from(stages_per_rank)).max(1);
    let mut tries = 1;
    let judged = loop {
        let judged = run_once(&schedule, slots, forward_us)?;
        if judged.share <= BOUND || tries == args.tries {
            break judged;
        }
        tries += 1;
    };
    Ok(ScheduleCase {
        schedule: kind.name(),
        ranks,
        stages_per_rank,
        microbatches: schedule.microbatches(),
        slots,
        tries,
        judged,
    })
}

/// Runs a schedule, a job of processes of this program.
fn run_once(schedule: &Schedule, slots: u32, forward_us: u64) -> Result<Judged> {
    let folder = Folder::scratch();
    let file = folder.file("schedule.csv");
    std::fs::write(&file, schedule.to_csv())?;
    let mut command = Command::new(std::env::current_exe().context("this program has no path")?);
    command
        .arg("schedule-job")
        .arg(&file)
        .arg("--times")
        .arg(folder.path());
    command.args(["--forward-us", &forward_us.to_string()]);
    command.args(["--slots", &slots.to_string()]);
    let ended = command.env_remove(VARIABLE).output()?;
    if !ended.status.success() {
        bail!(
            "the job failed: {}",
            String::from_utf8_lossy(&ended.stderr).trim()
        );
    }
    judge(schedule, slots, &job::times_in(&folder)?)
}

impl SchedulesReport {
    fn wrong(&self) -> usize {
        self.cases.iter().filter(|case| !case.is_right()).count()
    }
}

impl fmt::Display for ScheduleCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Judged {
            step_ms,
            simulated_ms,
            share,
            off_ms,
            action,
            hand_over_us,
        } = &self.judged;
        let said = if self.is_right() { "ok" } else { "WRONG" };
        write!(
            f,
            "{said:5} {:14} {} ranks of {}, {} microbatches, {} slots: a step of {step_ms:.1} ms ({simulated_ms:.1} simulated), \
             transfer {hand_over_us} µs, farthest off {action} by {off_ms:.2} ms, {:.2} %, try {}",
            self.schedule,
            self.ranks,
            self.stages_per_rank,
            self.microbatches,
            self.slots,
            share * 100.0,
            self.tries,
        )
    }
}

impl fmt::Display for SchedulesReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let worst = self.cases.iter().map(|case| case.judged.share);
        write!(
            f,
            "{} runs, {} outside of {:.0} % of a step, the worst {:.2} %; {:.1} s",
            self.cases.len(),
            self.wrong(),
            self.bound * 100.0,
            worst.fold(0.0, f64::max) * 100.0,
            self.seconds,
        )
    }
}
