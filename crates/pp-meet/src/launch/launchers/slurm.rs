//! Slurm's `srun`.

use super::rules::{Rules, Unknown};
use crate::launch::error::bad;
use crate::launch::place::{Env, Launcher};

/// The hosts of the step, or of the allocation.
const LISTS: [&str; 2] = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
/// The node that launched the step.
const LAUNCH_NODE: &str = "SLURM_LAUNCH_NODE_IPADDR";

pub(super) const RULES: Rules = Rules {
    launcher: Launcher::Slurm,
    shows: &["SLURM_PROCID"],
    // `srun` sets the step's variables in each task; a batch script has SLURM_PROCID=0 and no step, and a program started
    // there alone is not rank 0 of the allocation.
    no_rank_without: &[
        "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NODELIST",
    ],
    rank: "SLURM_PROCID",
    size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: "SLURM_LOCALID",
    // It may show each task a GPU of its own.
    local_size: None,
    job_id: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    is_all_or_none: |_| true,
    listens: None,
    port_from: &["SLURM_JOB_ID", "SLURM_JOBID"],
    hosts: &[LISTS[0], LISTS[1], LAUNCH_NODE],
    host: |env, _| host(env),
    how: "srun sets both; start the ranks with srun",
    passes: "",
};

/// The first host of the step runs rank 0 (unless tasks are distributed otherwise). The launching node may be a login
/// node, so it is the last guess.
fn host(env: &Env<'_>) -> Result<String, Unknown> {
    let Some((name, list)) = env.first(&LISTS) else {
        let node = env.get(LAUNCH_NODE).map(|host| host.trim().to_owned());
        return node.ok_or(Unknown::Missing(
            "set MASTER_ADDR=<host of rank 0> before srun",
        ));
    };
    first_host(&list).ok_or_else(|| {
        let remedy = "set MASTER_ADDR=<host of rank 0>";
        Unknown::Wrong(bad(name, &list, "names no first host", remedy))
    })
}

/// Gives the first host of a Slurm list: `gpu[003-007,9],login1` gives `gpu003`.
fn first_host(list: &str) -> Option<String> {
    let list = list.trim();
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (prefix, rest) = list.split_at(end);
    let host = match rest.strip_prefix('[') {
        Some(ranges) => {
            let (inside, after) = ranges.split_once(']')?;
            let first = inside.split([',', '-']).next()?;
            let suffix = after.split([',', '[']).next()?;
            if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            format!("{prefix}{first}{suffix}")
        }
        None => prefix.to_owned(),
    };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    (!host.is_empty() && host.bytes().all(is_name)).then_some(host)
}
