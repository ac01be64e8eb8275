//! What a job may leave behind: processes, shared memory, memory of GPUs.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::{Duration, Instant};

/// What of the machine's memory has a name that ranks could have given it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Machine {
    /// Files in `/dev/shm`.
    shared: BTreeSet<String>,
    /// MiB in use on each GPU, as the driver says; none where nobody can be asked.
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
fn mapped() -> Vec<String> {
    let own = std::process::id();
    let mut found = Vec::new();
    for pid in processes() {
        let file = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
        let is_ours = || environment(pid).contains(&format!("PP_SUPERVISOR_PID={own}\0"));
        if file("maps").is_ok_and(|maps| maps.contains("memfd:pp-")) && is_ours() {
            found.push(format!("memory mapped by process {pid}"));
        }
    }
    found
}

/// The processes of a job that are still there.
pub(super) fn processes_of(job: &str) -> Vec<u32> {
    let entry = format!("PP_JOB_ID={job}\0");
    let of_job = |pid: &u32| !has_ended(*pid) && environment(*pid).contains(&entry);
    processes().into_iter().filter(of_job).collect()
}

/// The processes that this one has started, in order of rank, once both are there.
pub(super) fn ranks_of(supervisor: u32) -> Option<[u32; 2]> {
    let entry = format!("PP_SUPERVISOR_PID={supervisor}\0");
    let mut found = [None; 2];
    for pid in processes() {
        let environment = environment(pid);
        if !environment.contains(&entry) {
            continue;
        }
        for (rank, place) in found.iter_mut().enumerate() {
            if environment.contains(&format!("\0RANK={rank}\0")) {
                *place = Some(pid);
            }
        }
    }
    Some([found[0]?, found[1]?])
}

/// True for one that nobody has waited for yet, too.
pub(super) fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().unwrap_or_default().trim_start();
    state.is_empty() || state.starts_with(['Z', 'X'])
}

/// The names of a process's threads.
pub(super) fn threads(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let tasks = tasks.into_iter().flatten().filter_map(Result::ok);
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.map(|name| name.trim().to_owned()).collect()
}

fn processes() -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter_map(|name| name.parse().ok()).collect()
}

/// With a zero before the first and after each.
fn environment(pid: u32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    format!("\0{}", String::from_utf8_lossy(&bytes))
}
