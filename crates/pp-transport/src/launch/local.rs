//! A job that this process starts itself, on this host.

use pp_contract::{Rank, WorldSize};

use super::{JobSecret, Launch, Via};
use crate::control::random_bytes;

/// A job of ranks on this host, met over a Unix socket: no port is opened, and its random id and
/// secret keep it apart from every other.
#[derive(Debug, Clone)]
pub struct LocalJob {
    world_size: WorldSize,
    id: String,
    secret: JobSecret,
}

impl LocalJob {
    /// Every variable that [`Launch::from_env`] reads. Remove them from a child's environment
    /// before setting [`LocalJob::env`], so that an outer launcher does not shine through.
    pub const LAUNCHER_VARIABLES: &'static [&'static str] = &[
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RUN_ID",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_STEP_NODELIST",
        "SLURM_LAUNCH_NODE_IPADDR",
        "PP_JOB_ID",
        "PP_JOB_SECRET",
        "PP_JOB_SECRET_FILE",
        "PP_PORT",
        "PP_RENDEZVOUS",
    ];

    /// A new job.
    #[must_use]
    pub fn new(world_size: WorldSize) -> Self {
        Self {
            world_size,
            id: format!("local/{}", hex(&random_bytes::<8>())),
            secret: JobSecret::random(),
        }
    }

    /// The variables that make a child process this rank of the job.
    #[must_use]
    pub fn env(&self, rank: Rank) -> Vec<(&'static str, String)> {
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("PP_JOB_ID", self.id.clone()),
            ("PP_JOB_SECRET", self.secret.as_text()),
            ("PP_RENDEZVOUS", "unix".into()),
        ]
    }

    /// The same place within this process.
    ///
    /// # Errors
    /// The rank is not of the job's world.
    pub fn launch(&self, rank: Rank) -> Result<Launch, super::LaunchError> {
        Launch::new(
            rank,
            self.world_size,
            rank.get(),
            None,
            Via::Unix,
            self.id.clone(),
            self.secret.clone(),
        )
    }
}

/// Lower-case hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
