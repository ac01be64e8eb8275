//! `pp-trials faults`: break each rule of the protocol in a real job, and see what its ranks do.
//!
//! Each entry of the catalogue runs two ranks of this program on a small clip, in a folder of its
//! own. It behaved when every rank ended with one line that names kind, rank and operation, when
//! nothing was computed or decoded behind the fault, and when no process, no output and no other
//! file is left. Whether it ended within its bound is a verdict of its own.

mod catalogue;
mod clip;
mod entries;
mod job;
mod judge;
mod log;

use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::process::Command;

use pp_cli::print;
use pp_job::Error;

use self::catalogue::{Entry, HEARTBEAT, How};
use self::job::Outcome;
use crate::hook::{VARIABLE, hooks};
use crate::trial::{Ground, Time, TrialArgs, join, new_job, run_in};

/// Variables that would change what a rank does.
const OWN: [&str; 4] = ["PP_LOG", "PP_STUCK_MS", "PP_REPORT_FD", "PP_FLIGHT_OPS"];

/// The arguments of `pp-trials faults`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct FaultsArgs {
    /// Name the hooks of PP_FAULT, with their ranks and what each needs.
    #[arg(long)]
    hooks: bool,
    #[command(flatten)]
    trials: TrialArgs,
}

/// Runs entries of the catalogue.
pub(crate) fn faults(args: &FaultsArgs) -> Result<(), Error> {
    if args.hooks {
        return print_hooks();
    }
    let ground = args.trials.ground();
    let entries = entries::all().collect();
    args.trials.run("faults", entries, |entry, folder, told| {
        match play(entry, ground, folder) {
            Err(error) => told.wrong.push(format!("no job: {error}")),
            Ok(outcome) => {
                told.wrong = judge::judge(entry, &outcome, folder);
                let ranks = (0..).zip(&outcome.ranks);
                told.ended = ranks.map(|(n, rank)| format!("rank {n} {rank}")).collect();
                let time = Time::new("all gone", outcome.took, entry.bound());
                told.times.push(time);
            }
        }
    })
}

fn play(entry: &Entry, ground: Ground, folder: &Path) -> io::Result<Outcome> {
    let job = new_job();
    let command = |rank| {
        let mut command = Command::new(std::env::current_exe()?);
        run_in(folder, ground, &mut command)?;
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
        match entry.how {
            How::Hook(hook) => drop(command.env(VARIABLE, hook)),
            How::Variable(on, name, value) if on == rank => drop(command.env(name, value)),
            How::Arguments(on, args) if on == rank => drop(command.args(args)),
            _ => {}
        }
        Ok::<_, io::Error>(command)
    };
    let commands = [command(0)?, command(1)?];
    clip::write(folder)?;
    job::run(&job, commands)
}

/// Prints the hooks of `PP_FAULT`.
fn print_hooks() -> Result<(), Error> {
    let mut text = "PP_FAULT=NAME[@RANK][:chunk=N][:ms=T][:times=N]\n".to_owned();
    for (name, ranks, needs) in hooks() {
        let ranks: Vec<_> = ranks.iter().map(ToString::to_string).collect();
        let needs = needs.map_or(String::new(), |needs| format!(", needs {needs}"));
        let _ = writeln!(text, "{name:26} rank {}{needs}", ranks.join(" or "));
    }
    print(&text)
}
