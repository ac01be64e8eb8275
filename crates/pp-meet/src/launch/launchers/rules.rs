//! The rules that a launcher's file gives.

use pp_contract::WorldSize;

use crate::launch::error::{LaunchError, missing};
use crate::launch::place::{Env, Launcher};

/// What a launcher tells the processes that it starts, and what stands in for what it does not tell.
#[derive(Clone, Copy)]
pub(in crate::launch) struct Rules {
    pub(in crate::launch) launcher: Launcher,
    /// Any of these is set where the launcher is.
    pub(super) shows: &'static [&'static str],
    /// Where it starts no rank, a process has this variable and none of these.
    pub(super) no_rank_without: &'static [&'static str],
    pub(in crate::launch) rank: &'static str,
    /// The number of ranks: the first that is set counts.
    pub(in crate::launch) size: &'static [&'static str],
    pub(in crate::launch) local_rank: &'static str,
    /// The number of ranks on this host, where no GPU is hidden from them.
    pub(in crate::launch) local_size: Option<&'static str>,
    /// What tells its jobs apart.
    pub(in crate::launch) job_id: &'static [&'static str],
    /// Whether it ends or starts all ranks together, and never one alone.
    pub(in crate::launch) is_all_or_none: fn(&Env<'_>) -> bool,
    /// Where this variable is "true", it listens at MASTER_PORT itself.
    pub(in crate::launch) listens: Option<&'static str>,
    /// Where MASTER_PORT is not set, the port is derived from the first that is.
    pub(in crate::launch) port_from: &'static [&'static str],
    /// One of these says where rank 0 runs, where MASTER_ADDR does not.
    pub(super) hosts: &'static [&'static str],
    /// Finds the host of rank 0 where MASTER_ADDR is not set.
    pub(super) host: fn(&Env<'_>, WorldSize) -> Result<String, Unknown>,
    /// What makes the rank and the number of ranks whole.
    pub(in crate::launch) how: &'static str,
    /// What a rank needs besides `export` to have a variable.
    pub(in crate::launch) passes: &'static str,
}

/// Why the host of rank 0 is not known.
pub(super) enum Unknown {
    /// No variable tells it; what to do.
    Missing(&'static str),
    Wrong(LaunchError),
}

impl Rules {
    /// The host of rank 0.
    pub(in crate::launch) fn host(
        &self,
        env: &Env<'_>,
        world: WorldSize,
    ) -> Result<String, LaunchError> {
        if let Some(host) = env.get("MASTER_ADDR") {
            return Ok(host.trim().to_owned());
        }
        (self.host)(env, world).map_err(|unknown| match unknown {
            Unknown::Missing(remedy) => missing(env, self.rank, "MASTER_ADDR", remedy),
            Unknown::Wrong(error) => error,
        })
    }

    /// All variables that are read of this launcher; some twice.
    pub(in crate::launch) fn variables(&self) -> impl Iterator<Item = &'static str> {
        let one = [self.rank, self.local_rank].into_iter();
        let one = one.chain(self.local_size).chain(self.listens);
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
