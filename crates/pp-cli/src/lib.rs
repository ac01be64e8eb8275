//! The program `pp`: run a video through the pipeline, measure the runtime, look at this machine.
//!
//! This crate parses, calls the library and prints. It brings the shipped pipeline ([`VideoJob`]): the video source and
//! sink, and the stages that call kernels. How ranks start, meet and end together is `pp_job`.

pub mod args;
mod cmd;
mod exit;
mod limits;
mod log;
mod run;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory, FromArgMatches};
use pp_command::env::Env;
use pp_job::Error;

use crate::args::{Command, PluginCommand};
pub use crate::run::{Checked, Kernels, Memory, OnGpu, OnHost, Shape, VideoJob, check};

#[global_allocator]
static ALLOCATOR: limits::Allocator = limits::Allocator;

/// The program `pp`. Returns its exit code.
pub fn main() -> ExitCode {
    program(|cli: args::Cli, env| perform(&cli.command, &env))
}

/// A program with the command line `C`, which may have the commands of `pp` among its own. Returns its exit code.
pub fn program<C: CommandFactory + FromArgMatches>(
    perform: impl FnOnce(C, Env) -> Result<(), Error>,
) -> ExitCode {
    limits::take_file_size_errors();
    pp_job::main(|| {
        let kept = pp_job::output::keep_stdout(limits::is_closed(1));
        kept.context("cannot keep standard output")?;
        let (cli, loudness) = args::parse()?;
        let mut env = Env::read();
        loudness.apply(&mut env);
        exit::note_other_exits(&env);
        perform(cli, env)
    })
}

/// Begins to log, and looks at what the environment and the system allow this command.
///
/// # Errors
/// The system allows too little memory, or a variable cannot be read.
pub fn prepare(command: &Command, env: &Env) -> Result<(), Error> {
    let has_ranks = matches!(
        command,
        Command::Run(_) | Command::Bench(_) | Command::Plan(_)
    );
    if has_ranks {
        env.note_unknown();
    }
    log::start(command, env)?;
    if has_ranks {
        limits::check_address_space()?;
    }
    Ok(())
}

/// Performs a command of `pp`.
///
/// # Errors
/// What the command says.
pub fn perform(command: &Command, env: &Env) -> Result<(), Error> {
    prepare(command, env)?;
    match command {
        Command::Run(args) => run::run(args, env),
        Command::Bench(command) => pp_bench::bench(command, env),
        Command::Plan(args) => pp_bench::plan(args, env, |file| cmd::plugin::describe(file, env)),
        Command::Schedule(command) => pp_schedule::perform(command),
        Command::Flight(args) => cmd::flight::flight(args),
        Command::Top(args) => cmd::top::top(args, env),
        Command::Doctor { json } => cmd::doctor::doctor(*json, env),
        Command::Verify {
            first,
            second,
            json,
        } => cmd::verify::verify([first, second], *json),
        Command::Completions { shell } => cmd::shell::completions(*shell),
        Command::Man { folder } => cmd::shell::man(folder.as_deref()),
        Command::Plugin(PluginCommand::Check(args)) => cmd::plugin::check(args, env),
        Command::Plugin(PluginCommand::Worker { args, from }) => {
            cmd::plugin::work(args, *from, env)
        }
    }
}
