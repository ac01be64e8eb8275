//! The command `pp`: run a video through the pipeline, measure it, look at this machine.
//!
//! This crate joins the parts that must not know each other: kernels and transport to the
//! runtime. What it decides itself is in [`job`] (how ranks start, meet and end together).

mod args;
mod backend;
mod bench;
mod cmd;
mod env;
mod exit;
mod fault;
mod flight;
mod job;
mod limits;
mod log;
mod patient;
mod run;
mod timed;
mod video;

use std::panic::{AssertUnwindSafe, catch_unwind};

use pp_transport::launch::Launch;

use crate::args::{BenchCommand, Command, PluginCommand};
use crate::exit::Failure;

#[global_allocator]
static ALLOCATOR: limits::Allocator = limits::Allocator;

fn main() {
    limits::take_file_size_errors();
    let cli = args::parse();
    let launch = Launch::from_env(|name| std::env::var(name).ok());
    let launched_as = launch.ok().flatten().map(|launch| launch.rank());
    if let Command::Run(_) | Command::Bench(_) = cli.command {
        env::note_unknown(launched_as);
    }
    // One that panics says so where its other faults are said: its peer only sees that it died.
    let result = catch_unwind(AssertUnwindSafe(|| {
        log::start(&cli.command, launched_as)?;
        perform(&cli.command)
    }));
    let result = result.unwrap_or_else(|panic| Err(exit::panicked(&*panic)));
    let code = match result {
        Ok(()) => 0,
        Err(failure) => {
            let told = match &failure {
                Failure::Fault(fault) => job::supervise::report(fault),
                Failure::Refused(_) | Failure::Other(_) => job::supervise::report_own(&failure),
                Failure::Usage(_) | Failure::Local(_) => false,
                Failure::Interrupted(_) => true,
            };
            if !told {
                let hint = flight::hint();
                let line = format!("pp: error: {failure}{hint}");
                if !exit::say(line) {
                    // What runs at exit may wait for whoever holds standard error.
                    exit::end_now(failure.code());
                }
            }
            failure.code()
        }
    };
    exit::leave(code)
}

fn perform(command: &Command) -> Result<(), Failure> {
    if let Command::Run(_) | Command::Bench(_) = command {
        limits::check_address_space()?;
    }
    match command {
        Command::Run(args) => run::run(args),
        Command::Bench(BenchCommand::Overlap(args)) => bench::overlap(args),
        Command::Bench(BenchCommand::Link(args)) => bench::link(args),
        Command::Bench(BenchCommand::Kernels(args)) => bench::kernels(args),
        Command::Bench(BenchCommand::Video(args)) => bench::video(args),
        Command::Flight(args) => cmd::flight::flight(args),
        Command::Shutdown(args) => cmd::shutdown::shutdown(args),
        Command::Doctor => cmd::doctor::doctor(),
        Command::Verify { first, second } => cmd::verify::verify(first, second),
        Command::Plugin(PluginCommand::Check { file, worker_from }) => {
            cmd::plugin::check(file, *worker_from)
        }
        Command::Faults(args) => cmd::faults::faults(args),
    }
}
