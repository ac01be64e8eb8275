//! The ranks of a job, as the kernel shows them.

use std::fs;
use std::process::Command;

use crate::process::succeeds;

/// A process of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rank {
    pub(super) pid: u32,
    pub(super) rank: u32,
}

/// What a process holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) memory_kib: u64,
    pub(super) files: u64,
    pub(super) threads: u64,
}

/// The ranks that this supervisor has started and that live.
pub(super) fn of(supervisor: u32) -> Vec<Rank> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| parent(*pid) == Some(supervisor))
        .filter_map(|pid| {
            Some(Rank {
                pid,
                rank: rank(pid)?,
            })
        })
        .collect()
}

/// Whether this process lives; one that nobody has waited for yet does not.
pub(super) fn lives(pid: u32) -> bool {
    status(pid, "State:").is_some_and(|state| !state.starts_with(['Z', 'X']))
}

pub(super) fn held(pid: u32) -> Option<Held> {
    let number = |name| status(pid, name)?.split_whitespace().next()?.parse().ok();
    Some(Held {
        memory_kib: number("RssAnon:")?,
        threads: number("Threads:")?,
        files: fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64,
    })
}

/// Sends a signal by its name; false when the process is gone.
pub(super) fn signal(pid: u32, name: &str) -> bool {
    succeeds(
        Command::new("kill")
            .arg(format!("-{name}"))
            .arg(pid.to_string()),
    )
}

fn status(pid: u32, name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().to_owned())
}

fn parent(pid: u32) -> Option<u32> {
    status(pid, "PPid:")?.parse().ok()
}

fn rank(pid: u32) -> Option<u32> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let mut variables = environment.split(|byte| *byte == 0);
    let rank = variables.find_map(|variable| variable.strip_prefix(b"RANK="))?;
    std::str::from_utf8(rank).ok()?.parse().ok()
}
