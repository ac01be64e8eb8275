//! A job that this process starts itself, on this host.
//!
//! Hazard: an environment is inherited by everything that a rank starts in turn, and is shown by
//! every tool that lists processes. Guarantee: the secret is in neither the environment nor the
//! arguments of a rank. It lies in memory of the process that made the job, which its ranks open
//! by way of `/proc`: for that the kernel asks for the same user.

use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use pp_contract::{Rank, WorldSize};
use rustix::fs::{MemfdFlags, Mode, SealFlags};
use rustix::process::DumpableBehavior;

use super::secret::hex;
use super::{JobSecret, Launch, Via, launchers};
use crate::random::random_bytes;

/// A job of ranks on this host, met over a Unix socket: no port is opened, and its random id and
/// secret keep it apart from every other.
#[derive(Debug, Clone)]
pub struct LocalJob {
    world_size: WorldSize,
    id: String,
    secret: JobSecret,
    /// The secret as a file without a name; absent where the kernel makes none.
    file: Option<Arc<OwnedFd>>,
}

impl LocalJob {
    /// How the id of such a job begins.
    pub(crate) const ID_PREFIX: &str = "local/";

    /// Every variable that [`Launch::from_env`] reads. Remove them from a child's environment
    /// before setting [`LocalJob::env`], so that an outer launcher does not shine through.
    pub fn launcher_variables() -> impl Iterator<Item = &'static str> {
        let ours = [
            "MASTER_ADDR",
            "MASTER_PORT",
            "PP_JOB_ID",
            "PP_JOB_SECRET",
            "PP_JOB_SECRET_FILE",
            "PP_PORT",
            "PP_RENDEZVOUS",
        ];
        let theirs = launchers::ALL.into_iter();
        theirs
            .flat_map(|rules| rules.variables().collect::<Vec<_>>())
            .chain(ours)
    }

    /// A new job.
    #[must_use]
    pub fn new(world_size: WorldSize) -> Self {
        let secret = JobSecret::random();
        Self {
            world_size,
            id: format!("{}{}", Self::ID_PREFIX, hex(&random_bytes::<8>())),
            file: in_memory(&secret).ok().map(Arc::new),
            secret,
        }
    }

    /// The variables that make a child process this rank of the job. They name the file that holds
    /// the secret, which is there for as long as this value is. Only where the kernel would not
    /// make or show that file is the secret itself among them.
    #[must_use]
    pub fn env(&self, rank: Rank) -> Vec<(&'static str, String)> {
        let secret = match &self.file {
            Some(file) => (
                "PP_JOB_SECRET_FILE",
                format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()),
            ),
            None => (
                "PP_JOB_SECRET",
                String::from_utf8_lossy(self.secret.bytes()).into(),
            ),
        };
        vec![
            secret,
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("PP_JOB_ID", self.id.clone()),
            ("PP_RENDEZVOUS", "unix".into()),
        ]
    }

    /// The launch of this rank within this process, without variables.
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

/// A file without a name that holds the secret: closed on exec, for this user alone, and as it is
/// for good.
fn in_memory(secret: &JobSecret) -> std::io::Result<OwnedFd> {
    // A process whose program this user cannot read shows its descriptors to no other process.
    if rustix::process::dumpable_behavior()? != DumpableBehavior::Dumpable {
        return Err(std::io::ErrorKind::PermissionDenied.into());
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("pp-secret", flags)?;
    rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    let mut file = std::fs::File::from(fd);
    file.write_all(secret.bytes())?;
    let fd = OwnedFd::from(file);
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals)?;
    Ok(fd)
}
