//! Measurements: how well stages overlap, what the edges between two ranks carry, what the CUDA kernels reach, how fast a
//! video is read and written; and a plan, measured too, for the ranks that stages are to stand on.

mod args;
mod bench;
mod plan;

pub use crate::args::{BenchCommand, KernelsArgs, LinkArgs, OverlapArgs, PlanArgs, VideoArgs};
pub use crate::bench::{sharpen_timers, sleep_exactly};
pub use crate::plan::plan;

use pp_command::env::Env;
use pp_job::Error;

/// Performs a command of `pp bench`: measures, in a job that it starts where it needs one, and prints.
///
/// # Errors
/// The command line asks for what cannot be measured, or the job fails.
pub fn bench(command: &BenchCommand, env: &Env) -> Result<(), Error> {
    match command {
        BenchCommand::Overlap(args) => bench::overlap(args, env),
        BenchCommand::Link(args) => bench::link(args, env),
        BenchCommand::Kernels(args) => bench::kernels(args),
        BenchCommand::Video(args) => bench::video(args),
    }
}
