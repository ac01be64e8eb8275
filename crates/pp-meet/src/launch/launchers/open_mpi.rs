//! Open MPI's `mpirun`.

use super::rules::{Rules, Unknown};
use crate::launch::place::Launcher;

/// The number of ranks on this host.
const LOCAL_SIZE: &str = "OMPI_COMM_WORLD_LOCAL_SIZE";

pub(super) const RULES: Rules = Rules {
    launcher: Launcher::OpenMpi,
    shows: &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
    no_rank_without: &[],
    rank: "OMPI_COMM_WORLD_RANK",
    size: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_size: Some(LOCAL_SIZE),
    job_id: &["PMIX_NAMESPACE"],
    is_all_or_none: |_| true,
    listens: None,
    port_from: &["PMIX_NAMESPACE"],
    hosts: &[],
    host: |env, world| match env.get(LOCAL_SIZE) == Some(world.to_string()) {
        true => Ok("127.0.0.1".into()),
        false => Err(Unknown::Missing(
            "Open MPI does not say where rank 0 runs: mpirun -x MASTER_ADDR=<host of rank 0>",
        )),
    },
    how: "mpirun sets both; start all ranks with it, or unset both to let pp start its own",
    passes: " and pass it on with mpirun -x PP_JOB_SECRET",
};
