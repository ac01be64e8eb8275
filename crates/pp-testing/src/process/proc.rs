//! What the kernel says of processes.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::HANG;

fn file(pid: u32, name: &str) -> Vec<u8> {
    std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default()
}

fn tasks(pid: u32) -> impl Iterator<Item = std::path::PathBuf> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let tasks = tasks.into_iter().flatten().filter_map(Result::ok);
    tasks.map(|task| task.path())
}

/// Says whether the process runs. A zombie has ended.
pub fn is_alive(pid: u32) -> bool {
    let stat = file(pid, "stat");
    let stat = String::from_utf8_lossy(&stat);
    let state = stat.rsplit_once(") ");
    state.is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}

/// Sends a signal; false where the process is gone.
pub fn signal(pid: u32, signal: Signal) -> bool {
    let pid = Pid::from_raw(pid.cast_signed());
    pid.is_some_and(|pid| kill_process(pid, signal).is_ok())
}

/// The processes that a process has started, zombies included.
pub fn children(pid: u32) -> Vec<u32> {
    let lists = tasks(pid).filter_map(|task| std::fs::read_to_string(task.join("children")).ok());
    let pids = |list: String| -> Vec<u32> {
        let words = list.split_whitespace();
        words.filter_map(|pid| pid.parse().ok()).collect()
    };
    lists.flat_map(pids).collect()
}

/// The names of a process's threads.
pub fn threads(pid: u32) -> Vec<String> {
    let names = tasks(pid).filter_map(|task| std::fs::read_to_string(task.join("comm")).ok());
    names.map(|name| name.trim().to_owned()).collect()
}

fn variable(pid: u32, name: &str) -> Option<String> {
    let environment = file(pid, "environ");
    let mut entries = environment.split(|byte| *byte == 0);
    let value =
        entries.find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    Some(String::from_utf8_lossy(value).into_owned())
}

/// The processes that live and were started with this variable.
pub fn with_variable(name: &str, value: &str) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let has = |pid: &u32| is_alive(*pid) && variable(*pid, name).as_deref() == Some(value);
    pids.filter(has).collect()
}

/// The rank that a process is, from its environment.
pub fn rank_of(pid: u32) -> Option<u32> {
    variable(pid, "RANK")?.parse().ok()
}

/// The processes of the two ranks that a supervisor has started, as far as they are there.
pub fn ranks_of(supervisor: u32) -> [Option<u32>; 2] {
    let mut found = [None; 2];
    for child in children(supervisor) {
        if let Some(rank) = rank_of(child).filter(|_| is_alive(child)) {
            found[rank as usize] = Some(child);
        }
    }
    found
}

/// Waits until both ranks run, and gives their processes in order of rank.
pub fn ranks(supervisor: u32) -> [u32; 2] {
    let deadline = Instant::now() + HANG;
    loop {
        if let [Some(zero), Some(one)] = ranks_of(supervisor) {
            return [zero, one];
        }
        assert!(Instant::now() < deadline, "the ranks never came up");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until a rank is connected and runs: its watch thread is there.
pub fn wait_until_it_runs(pid: u32) {
    let deadline = Instant::now() + HANG;
    while !threads(pid).iter().any(|name| name == "pp-watch") {
        assert!(Instant::now() < deadline, "the rank never ran");
        std::thread::sleep(Duration::from_millis(5));
    }
    // From the start of that thread to the first chunk.
    std::thread::sleep(Duration::from_millis(300));
}

/// Waits until all of these processes have ended.
#[track_caller]
pub fn all_gone(pids: &[u32]) {
    let deadline = Instant::now() + HANG;
    while pids.iter().any(|pid| is_alive(*pid)) {
        assert!(Instant::now() < deadline, "a rank lives on");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What a process holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Memory that is mapped and present.
    pub rss_kib: u64,
    /// The part of it that belongs to no file.
    pub anonymous_kib: u64,
    /// Its threads.
    pub threads: usize,
    /// Its open descriptors.
    pub descriptors: usize,
    /// Its mappings.
    pub mappings: usize,
}

impl Footprint {
    /// Of this process; `None` where it is gone.
    pub fn of(pid: u32) -> Option<Self> {
        let text = |name| String::from_utf8_lossy(&file(pid, name)).into_owned();
        let status = text("status");
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse().ok()
        };
        Some(Self {
            rss_kib: kib("VmRSS:")?,
            anonymous_kib: kib("RssAnon:")?,
            threads: tasks(pid).count(),
            descriptors: std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count(),
            mappings: text("maps").lines().count(),
        })
    }

    /// The most of each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            rss_kib: self.rss_kib.max(other.rss_kib),
            anonymous_kib: self.anonymous_kib.max(other.anonymous_kib),
            threads: self.threads.max(other.threads),
            descriptors: self.descriptors.max(other.descriptors),
            mappings: self.mappings.max(other.mappings),
        }
    }
}
