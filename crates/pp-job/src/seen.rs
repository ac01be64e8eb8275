//! A running job, as others see it.
//!
//! Rank 0 of every job has a [`Viewer`] ([`ThisRank::viewer`](crate::ThisRank::viewer)), and shows it to programs of the same
//! user on a Unix socket, which [`jobs`] finds and [`Client`] reads. A program that serves the job in another way takes the
//! viewer to a thread of its own, and holds the value of [`Viewer::watch`] while it has callers.

mod client;
mod look;
mod snapshot;
pub(crate) mod socket;
mod viewer;
pub(crate) mod vitals;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

pub use self::client::{Client, FoundJob, jobs};
pub use self::snapshot::{
    AboutJob, ChunkView, FaultView, HowEnded, JobState, RankView, RecentFigures, RestartView,
    RunTotals, Snapshot, StageView, Thumb, Thumbnail, TrainingView,
};
pub use self::viewer::{Viewer, Watching};
use crate::own_folder;

/// From now on the calling thread runs where no other thread wants the processor, or nearly so.
pub fn at_low_priority() {
    const LOWEST: i32 = 19;
    // A thread that stays as it is does no harm.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), LOWEST);
}

/// What the names of all sockets end with.
const SUFFIX: &str = ".sock";

/// Where sockets may lie: in the runtime folder of the user, if there is one, or in the folder for temporary files.
fn folders(runtime_folder: Option<&Path>) -> Vec<PathBuf> {
    let runtime = runtime_folder.map(|folder| folder.join("pp"));
    let all = runtime.into_iter().chain([own_folder::in_temp("pp")]);
    all.collect()
}

/// The name of the socket of a job of a process; of another one with the same number too.
fn file_name(pid: u32, number: u32, again: u32) -> String {
    match again {
        0 => format!("{pid}-{number}{SUFFIX}"),
        _ => format!("{pid}-{number}-{again}{SUFFIX}"),
    }
}

/// The process and the number of the job whose socket has this name; `None` where another file has it.
fn parse(name: &str) -> Option<(u32, u32)> {
    let mut parts = name.strip_suffix(SUFFIX)?.split('-');
    let mut next = || parts.next()?.parse().ok();
    let (pid, number) = (next()?, next()?);
    let again = next().unwrap_or(0);
    (file_name(pid, number, again) == name).then_some((pid, number))
}
