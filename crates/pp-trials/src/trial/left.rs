//! What a job may leave behind: processes, shared memory, memory of GPUs.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::{Duration, Instant};

use pp_job::command_line::SUPERVISOR;
use pp_testing::process::with_variable;

/// What of the machine's memory has a name that ranks could have given it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Machine {
    /// Files in `/dev/shm`.
    shared: BTreeSet<String>,
    /// MiB in use on each GPU, as the driver says; none without nvidia-smi.
    gpus: Vec<u64>,
}

impl Machine {
    pub(super) fn look(with_gpus: bool) -> Self {
        let names = std::fs::read_dir("/dev/shm").into_iter().flatten();
        let names = names.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        Self {
            shared: names.collect(),
            gpus: if with_gpus { gpu_memory() } else { Vec::new() },
        }
    }

    /// What is there now and was not before. Waits for it to go away, a little: the driver of a GPU
    /// takes back the memory of a process behind its end.
    pub(super) fn left_since(before: &Self, with_gpus: bool) -> Vec<String> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let left = before.compare(&Self::look(with_gpus));
            if left.is_empty() || Instant::now() > deadline {
                return left;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn compare(&self, now: &Self) -> Vec<String> {
        let shared = now.shared.difference(&self.shared);
        // Other programs come and go in there too.
        let shared = shared.filter(|name| name.starts_with("pp-") || name.starts_with("nccl-"));
        let mut left: Vec<String> = shared.map(|name| format!("/dev/shm/{name}")).collect();
        for (index, (before, now)) in self.gpus.iter().zip(&now.gpus).enumerate() {
            if now > before {
                left.push(format!("{} MiB of GPU {index}", now - before));
            }
        }
        left.extend(mapped());
        left
    }
}

/// MiB in use on each GPU.
fn gpu_memory() -> Vec<u64> {
    let mut smi = Command::new("nvidia-smi");
    smi.args(["--query-gpu=memory.used", "--format=csv,noheader,nounits"]);
    let output = smi.output().map(|output| output.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&output);
    text.lines()
        .filter_map(|line| line.trim().parse().ok())
        .collect()
}

/// Processes that have a job's memory mapped and were started by this one.
fn mapped() -> impl Iterator<Item = String> {
    let own = std::process::id().to_string();
    let has_mapped = |pid: &u32| {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"));
        maps.is_ok_and(|maps| maps.contains("memfd:pp-"))
    };
    let pids = with_variable(SUPERVISOR, &own).into_iter();
    pids.filter(has_mapped)
        .map(|pid| format!("memory mapped by process {pid}"))
}
