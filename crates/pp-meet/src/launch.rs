//! Who we are among the ranks of a job, and where rank 0 is met.
//!
//! Hazard: a rank that misreads its launcher waits for a world that never comes, or joins another
//! job's. Guarantee: [`Launch::from_env`] gives a place that is whole (rank within the world,
//! address, secret) or an error that names the variable, its value and the remedy.
//!
//! Choices: the variables that torchrun, Open MPI and Slurm set are read as they are, innermost
//! launcher first (torchrun under `srun` is torchrun). The secret comes from the environment or a
//! file, never from arguments, and is printed by nothing here.

mod error;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod launchers;
mod local;
mod parse;
mod place;
mod secret;

use pp_contract::{Rank, WorldSize};

pub use error::LaunchError;
pub use local::LocalJob;
pub use place::{Address, Launcher, Via};
pub use secret::{JobSecret, random_text, read_secret};

/// A rank's place in its job: who it is, where rank 0 is met, and the secret they share.
#[derive(Debug, Clone)]
pub struct Launch {
    launcher: Launcher,
    /// It starts and ends all ranks together.
    is_all_or_none: bool,
    rank: Rank,
    world_size: WorldSize,
    local_rank: u32,
    address: Option<Address>,
    via: Via,
    job_id: String,
    pub(crate) secret: JobSecret,
}

impl Launch {
    /// A place given by hand. `address` may be absent only for [`Via::Unix`].
    ///
    /// # Errors
    /// The rank is not of the world, or an address is needed and missing.
    pub fn new(
        rank: Rank,
        world_size: WorldSize,
        local_rank: u32,
        address: Option<Address>,
        via: Via,
        job_id: impl Into<String>,
        secret: JobSecret,
    ) -> Result<Self, LaunchError> {
        if !world_size.contains(rank) {
            return Err(LaunchError::new(
                format!("rank {rank} contradicts world size {world_size}"),
                "ranks count from 0 to the world size less one",
            ));
        }
        if address.is_none() && via != Via::Unix {
            return Err(LaunchError::new(
                format!(
                    "a rendezvous over TCP (rank {rank}) is set but the address of rank 0 is not"
                ),
                "set MASTER_ADDR and MASTER_PORT, or PP_RENDEZVOUS=unix when all ranks share this host",
            ));
        }
        Ok(Self {
            launcher: Launcher::Local,
            is_all_or_none: false,
            rank,
            world_size,
            local_rank,
            address,
            via,
            job_id: job_id.into(),
            secret,
        })
    }

    /// This rank's place in a meeting of two, with a secret of its own.
    pub(crate) fn for_pair(&self, id: String, secret: JobSecret, address: Option<Address>) -> Self {
        let via = match &address {
            Some(_) => self.via,
            None => Via::Unix,
        };
        Self {
            via,
            address,
            job_id: id,
            secret,
            ..self.clone()
        }
    }

    /// What started this rank.
    #[must_use]
    pub fn launcher(&self) -> Launcher {
        self.launcher
    }

    /// Says whether what started this rank ends or restarts all ranks together, as torchrun, `srun` and `mpirun` do.
    #[must_use]
    pub fn is_all_or_none(&self) -> bool {
        self.is_all_or_none
    }

    /// This process's rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks the job has.
    #[must_use]
    pub fn world_size(&self) -> WorldSize {
        self.world_size
    }

    /// This rank's index among those of its host; by custom, the index of its device.
    #[must_use]
    pub fn local_rank(&self) -> u32 {
        self.local_rank
    }

    /// Where rank 0 is met over TCP.
    #[must_use]
    pub fn address(&self) -> Option<&Address> {
        self.address.as_ref()
    }

    /// Over which sockets the ranks meet.
    #[must_use]
    pub fn via(&self) -> Via {
        self.via
    }

    /// What tells this job from others with the same secret.
    #[must_use]
    pub fn job_id(&self) -> &str {
        &self.job_id
    }
}
