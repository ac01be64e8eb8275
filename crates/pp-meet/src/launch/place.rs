//! What a place is made of, launcher, sockets and address, and the environment that it is read from.

use std::fmt;

/// What started this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// RANK and WORLD_SIZE: torchrun, or whatever sets the same variables.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// Slurm's `srun`.
    Slurm,
    /// Our own supervisor, or a program that made the [`super::Launch`] itself.
    Local,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Slurm => "Slurm",
            Self::Local => "pp",
        })
    }
}

/// Over which sockets the ranks meet (`PP_RENDEZVOUS`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Via {
    /// Unix socket where the ranks share a host, TCP otherwise.
    #[default]
    Auto,
    /// Unix socket only: no port is opened.
    Unix,
    /// TCP only.
    Tcp,
}

/// Where rank 0 listens for TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Name or address of the host, without brackets.
    pub host: String,
    /// TCP port, never 0.
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// The environment as a function, with an empty variable read as an absent one.
pub(super) struct Env<'a>(&'a dyn Fn(&str) -> Option<String>);

impl<'a> Env<'a> {
    pub(super) fn new(lookup: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self(lookup)
    }

    pub(super) fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.trim().is_empty())
    }

    pub(super) fn first<'n>(&self, names: &[&'n str]) -> Option<(&'n str, String)> {
        names
            .iter()
            .find_map(|name| self.get(name).map(|value| (*name, value)))
    }
}
