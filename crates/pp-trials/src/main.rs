//! The program `pp-trials`: what `pp` does when something goes wrong.
//!
//! It has the commands of `pp`, and its `run` makes the fault that PP_FAULT names. `faults` breaks each rule of the
//! protocol in such runs, `shutdown` ends them in every state, `placements` runs them on any ranks, `soak` breaks long
//! ones again and again, and each judges what the ranks did. `words` looks at each word of messages on their way,
//! `schedules` at when a training step does what, and `kills` at how long a rank is away. Faults are made from outside: this crate decorates the parts that `pp_cli` and
//! `pp_job` take, and nothing in them knows of it.

mod faults;
mod hook;
mod kills;
mod placements;
mod run;
mod schedules;
mod shutdown;
mod soak;
mod trial;
mod words;

use std::process::ExitCode;

use pp_cli::args::Command as Pp;
use pp_command::env::Env;
use pp_job::Error;

#[derive(Debug, clap::Parser)]
#[command(name = "pp-trials", version, propagate_version = true, about, after_help = HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const HELP: &str = "\
Environment:
  PP_FAULT  fault that `run` or `words` is to make; `pp-trials faults --hooks` lists the names [default: none]
  Those of pp; `pp --help` lists them.";

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Break each rule of the protocol in a real job, and see what its ranks do.
    Faults(faults::FaultsArgs),
    /// End real jobs in every state, and see what their ranks do.
    Shutdown(trial::TrialArgs),
    /// Run the job on every placement of its stages, and see whether each gives the bytes of one process.
    Placements(placements::PlacementsArgs),
    /// Run long jobs whose ranks are killed and stopped all the time: no frame may be lost or changed.
    Soak(soak::SoakArgs),
    /// Kill the rank of phase_b again and again, and say how long it is away, beside the start of a bare rank: a process that
    /// only opens the GPU and loads the kernels.
    Kills(kills::KillsArgs),
    /// Start as a bare rank does, and end.
    #[command(hide = true)]
    Start(kills::StartArgs),
    /// Run a toy job of each training schedule, and compare it with its simulation.
    Schedules(schedules::SchedulesArgs),
    /// Run a toy job of the schedule in a file.
    #[command(hide = true)]
    ScheduleJob(schedules::JobArgs),
    /// Send messages of all sizes to and fro, and compare each word that is read with the word that was sent.
    Words(words::WordsArgs),
    #[command(flatten)]
    Pp(Box<Pp>),
}

fn main() -> ExitCode {
    pp_cli::program(|cli: Cli, env| perform(&cli.command, env))
}

fn perform(command: &Command, mut env: Env) -> Result<(), Error> {
    let fault = env.take(hook::VARIABLE);
    match (command, fault) {
        (Command::Faults(args), _) => faults::faults(args),
        (Command::Shutdown(args), _) => shutdown::shutdown(args, &env),
        (Command::Placements(args), _) => placements::placements(args),
        (Command::Soak(args), _) => soak::soak(args),
        (Command::Kills(args), _) => kills::kills(args),
        (Command::Start(args), _) => kills::start(args),
        (Command::Schedules(args), _) => schedules::schedules(args),
        (Command::ScheduleJob(args), _) => schedules::job(args, &env),
        (Command::Words(args), fault) => words::words(args, &env, fault),
        (Command::Pp(command), fault) => match (&**command, fault) {
            (Pp::Run(args), Some(fault)) => {
                pp_cli::prepare(command, &env)?;
                run::run(args, &env, fault)
            }
            (command, _) => pp_cli::perform(command, &env),
        },
    }
}
