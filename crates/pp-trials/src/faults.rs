//! `pp-trials faults`: break each rule of the protocol in a real job, and see what its ranks do.
//!
//! Each entry of the catalogue runs the ranks of a pipeline, each a process of this program, on a small clip, in a folder
//! of its own. It behaved when every rank ended with one line that names kind, rank and operation, when
//! nothing was computed or decoded behind the fault, and when no process, no output and no other
//! file is left. Whether it ended within its bound is a verdict of its own.

mod catalogue;
mod clip;
mod entries;
mod job;
mod judge;
mod log;
mod role;

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use pp_command::print;
use pp_contract::Pipeline;
use pp_job::Error;

use self::catalogue::{HEARTBEAT, How, OnPipeline};
use self::job::Outcome;
use crate::hook::{VARIABLE, hooks};
use crate::trial::{Ground, TWO, Time, TrialArgs, join, new_job, program_of, run_in};

/// Variables that would change what a rank does.
const OWN: [&str; 4] = ["PP_LOG", "PP_STUCK_MS", "PP_REPORT_FD", "PP_FLIGHT_OPS"];

/// The arguments of `pp-trials faults`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct FaultsArgs {
    /// Name the hooks of PP_FAULT, and what each needs.
    #[arg(long)]
    hooks: bool,
    /// The pipeline of the jobs: encode on rank 0, then phase_b, then decode.
    #[arg(long, value_name = "STAGES", default_value = TWO)]
    pipeline: Pipeline,
    #[command(flatten)]
    trials: TrialArgs,
}

/// Runs entries of the catalogue.
pub(crate) fn faults(args: &FaultsArgs) -> Result<(), Error> {
    if args.hooks {
        return print_hooks();
    }
    let ground = args.trials.ground();
    let pipeline = &args.pipeline;
    role::check(pipeline)?;
    let entries = entries::all().map(|entry| OnPipeline { entry, pipeline });
    let entries: Vec<_> = entries.collect();
    args.trials.run(
        "faults",
        ground.fewest_gpus(pipeline, false),
        entries,
        |trial, folder, told| match play(trial, ground, folder) {
            Err(error) => told.wrong.push(format!("no job: {error}")),
            Ok(outcome) => {
                told.wrong = judge::judge(trial, &outcome, folder);
                let ranks = (0..).zip(&outcome.ranks);
                told.ended = ranks.map(|(n, rank)| format!("rank {n} {rank}")).collect();
                let time = Time::new("all gone", outcome.took, trial.entry.bound());
                told.times.push(time);
            }
        },
    )
}

fn play(trial: &OnPipeline<'_>, ground: Ground, folder: &Path) -> io::Result<Outcome> {
    let OnPipeline { entry, pipeline } = *trial;
    let job = new_job(pipeline);
    let command = |rank| {
        let mut command = program_of(rank, None, ground, pipeline)?;
        run_in(folder, ground, pipeline, &mut command)?;
        join(&job, rank, &mut command);
        for name in OWN {
            command.env_remove(name);
        }
        command.arg("--input").arg(folder.join(clip::NAME));
        command.arg("--output").arg(folder.join("out.y4m"));
        command.args(["--frames-per-chunk", clip::FRAMES_PER_CHUNK]);
        command.args(["--denoise-steps", "1"]).args(entry.args);
        command.env("PP_HEARTBEAT_MS", HEARTBEAT.as_millis().to_string());
        command.envs(entry.env.iter().copied());
        if let Some(fault) = entry.how.fault(pipeline) {
            command.env(VARIABLE, fault);
        }
        match entry.how {
            How::Variable(on, name, value) if on.rank(pipeline) == rank => {
                command.env(name, value);
            }
            How::Arguments(on, args) if on.rank(pipeline) == rank => drop(command.args(args)),
            _ => {}
        }
        Ok::<_, io::Error>(command)
    };
    let commands = pipeline.world_size().ranks().map(command);
    let commands = commands.collect::<io::Result<_>>()?;
    clip::write(folder)?;
    job::run(&job, commands)
}

/// Prints the hooks of `PP_FAULT`.
fn print_hooks() -> Result<(), Error> {
    let mut text = "PP_FAULT=NAME[@RANK][:chunk=N][:ms=T][:times=N]\n".to_owned();
    for (name, about, needs) in hooks() {
        let needs = needs.map_or(String::new(), |needs| format!("; needs {needs}"));
        let _ = writeln!(text, "{name:20} {about}{needs}");
    }
    print(&text)
}
