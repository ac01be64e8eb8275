//! torchrun, or whatever sets RANK and WORLD_SIZE.

use super::rules::{Rules, Unknown};
use crate::launch::place::Launcher;

/// Set by torchrun's agents, and by nothing else.
const RUN_ID: &str = "TORCHELASTIC_RUN_ID";

pub(super) const RULES: Rules = Rules {
    launcher: Launcher::Torchrun,
    shows: &["RANK", "WORLD_SIZE"],
    no_rank_without: &[],
    rank: "RANK",
    size: &["WORLD_SIZE"],
    local_rank: "LOCAL_RANK",
    local_size: Some("LOCAL_WORLD_SIZE"),
    // Its restart count is left out on purpose: its agents do not agree on it.
    job_id: &[RUN_ID, "MASTER_PORT"],
    // RANK and WORLD_SIZE alone may come from a program that starts one rank again.
    is_all_or_none: |env| env.get(RUN_ID).is_some(),
    listens: Some("TORCHELASTIC_USE_AGENT_STORE"),
    port_from: &[],
    hosts: &[],
    host: |_, _| {
        Err(Unknown::Missing(
            "torchrun sets it; by hand, set it to the host of rank 0 on every rank, or PP_RENDEZVOUS=unix when all ranks \
             share this host",
        ))
    },
    how: "torchrun sets both; start all ranks with it, or unset both to let pp start its own",
    passes: "",
};
