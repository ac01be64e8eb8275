//! The launchers, a file for each: the variables that it sets, how its job is told apart, and where rank 0 is met.

mod open_mpi;
mod slurm;
mod torchrun;

use pp_contract::WorldSize;

use super::error::{LaunchError, missing};
use super::place::{Env, Launcher};

/// What a launcher tells the processes that it starts, and what stands in for what it does not tell.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    pub(super) launcher: Launcher,
    /// Any of these is set where the launcher is.
    shows: &'static [&'static str],
    /// Where it starts no rank, a process has this variable and none of these.
    no_rank_without: &'static [&'static str],
    pub(super) rank: &'static str,
    /// The number of ranks: the first that is set counts.
    pub(super) size: &'static [&'static str],
    pub(super) local_rank: &'static str,
    /// The number of ranks on this host, where no GPU is hidden from them.
    pub(super) local_size: Option<&'static str>,
    /// What tells its jobs apart.
    pub(super) job_id: &'static [&'static str],
    /// Where MASTER_PORT is not set, the port is derived from the first that is.
    pub(super) port_from: &'static [&'static str],
    /// One of these says where rank 0 runs, where MASTER_ADDR does not.
    hosts: &'static [&'static str],
    /// Finds the host of rank 0 where MASTER_ADDR is not set.
    host: fn(&Env<'_>, WorldSize) -> Result<String, Unknown>,
    /// What makes the rank and the number of ranks whole.
    pub(super) how: &'static str,
    /// What a rank needs besides `export` to have a variable.
    pub(super) passes: &'static str,
}

/// The launchers, the innermost first.
pub(super) const ALL: [Rules; 3] = [torchrun::RULES, open_mpi::RULES, slurm::RULES];

impl Launcher {
    /// The variable with the number of ranks on this host, where no GPU of the host is hidden from them.
    #[must_use]
    pub fn local_size_variable(self) -> Option<&'static str> {
        let rules = ALL.into_iter().find(|rules| rules.launcher == self);
        rules?.local_size
    }
}

/// Why the host of rank 0 is not known.
enum Unknown {
    /// No variable tells it; what to do.
    Missing(&'static str),
    Wrong(LaunchError),
}

impl Rules {
    /// The launcher that started this process.
    pub(super) fn of(env: &Env<'_>) -> Option<Self> {
        let is_here = |rules: &Self| {
            let starts_ranks = rules.no_rank_without;
            env.first(rules.shows).is_some()
                && (starts_ranks.is_empty() || env.first(starts_ranks).is_some())
        };
        ALL.into_iter().find(is_here)
    }

    /// The host of rank 0.
    pub(super) fn host(&self, env: &Env<'_>, world: WorldSize) -> Result<String, LaunchError> {
        if let Some(host) = env.get("MASTER_ADDR") {
            return Ok(host.trim().to_owned());
        }
        (self.host)(env, world).map_err(|unknown| match unknown {
            Unknown::Missing(remedy) => missing(env, self.rank, "MASTER_ADDR", remedy),
            Unknown::Wrong(error) => error,
        })
    }

    /// All variables that are read of this launcher; some twice.
    pub(super) fn variables(&self) -> impl Iterator<Item = &'static str> {
        let one = [self.rank, self.local_rank]
            .into_iter()
            .chain(self.local_size);
        let lists = [
            self.shows,
            self.no_rank_without,
            self.size,
            self.job_id,
            self.port_from,
            self.hosts,
        ];
        one.chain(lists.into_iter().flatten().copied())
    }
}
