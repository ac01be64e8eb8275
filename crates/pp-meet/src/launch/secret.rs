//! The job secret: what lets a rank tell its own job from strangers.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::error::LaunchError;
use super::launchers::Rules;
use super::place::Env;
use crate::random::random_bytes;

/// Fewer bytes than this could be guessed.
const MIN_SECRET_BYTES: usize = 16;
/// No secret needs more; a bound for what is read from a file.
const MAX_SECRET_BYTES: usize = 4096;

/// Bytes that every rank of a job knows, and no other program. `Debug` shows none of them.
#[derive(Clone)]
pub struct JobSecret(Vec<u8>);

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobSecret(..)")
    }
}

impl JobSecret {
    /// Takes a secret of at least 16 bytes. Length is all that can be checked: use random bytes.
    ///
    /// # Errors
    /// Fewer than 16 bytes, or more than 4096.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, LaunchError> {
        let bytes = bytes.into();
        if (MIN_SECRET_BYTES..=MAX_SECRET_BYTES).contains(&bytes.len()) {
            Ok(Self(bytes))
        } else {
            Err(unfit("the job secret", bytes.len()))
        }
    }

    /// A fresh secret from the system's random numbers.
    #[must_use]
    pub fn random() -> Self {
        Self(random_text().into_bytes())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn from_env(env: &Env<'_>, rules: &Rules) -> Result<Self, LaunchError> {
        let launcher = rules.launcher;
        match (env.get("PP_JOB_SECRET"), env.get("PP_JOB_SECRET_FILE")) {
            (Some(_), Some(_)) => Err(LaunchError::new(
                "PP_JOB_SECRET contradicts PP_JOB_SECRET_FILE",
                "set one of the two",
            )),
            (Some(text), None) => {
                let bytes = text.trim().as_bytes();
                Self::new(bytes).map_err(|_| unfit("PP_JOB_SECRET", bytes.len()))
            }
            (None, Some(path)) => Self::from_file(&path),
            (None, None) => Err(LaunchError::new(
                format!(
                    "started by {launcher}, but neither PP_JOB_SECRET nor PP_JOB_SECRET_FILE is set"
                ),
                format!(
                    "before {launcher} starts the ranks: export PP_JOB_SECRET=$(openssl rand -hex 32){}",
                    rules.passes
                ),
            )),
        }
    }

    fn from_file(path: &str) -> Result<Self, LaunchError> {
        read_secret("PP_JOB_SECRET_FILE", Path::new(path)).map(Self)
    }
}

/// Random bytes of the system as 64 letters of lower-case hexadecimal, which nobody can guess.
#[must_use]
pub fn random_text() -> String {
    hex(&random_bytes::<32>())
}

/// Reads a secret of 16 to 4,096 bytes from a file, without the white space around it. `named` is what named the file: a
/// variable or an option.
///
/// # Errors
/// It is no regular file of this user or root, is open to every user, or has another length.
pub fn read_secret(named: &str, path: &Path) -> Result<Vec<u8>, LaunchError> {
    let broken = |why: String| {
        let what = format!("{named}={path:?}: {why}");
        let remedy = "name a regular file that this user can read, with 16 bytes or more";
        LaunchError::new(what, remedy)
    };
    // A pipe in its place must not keep this rank waiting.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty())
        .map(File::from)
        .map_err(|error| broken(std::io::Error::from(error).to_string()))?;
    let meta = file.metadata().map_err(|error| broken(error.to_string()))?;
    if !meta.is_file() {
        return Err(broken("not a regular file".into()));
    }
    let owner = meta.uid();
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(broken(format!("it belongs to user {owner}, who knows it")));
    }
    if meta.mode() & 0o007 != 0 {
        let mode = meta.mode() & 0o777;
        return Err(LaunchError::new(
            format!("{named}={path:?} is open to every user (mode {mode:03o})"),
            format!("chmod 600 {path:?}, and make a new secret if others may have seen it"),
        ));
    }
    if meta.mode() & 0o070 != 0 {
        tracing::warn!(
            ?path,
            "the file of a secret is open to its group; chmod 600 it"
        );
    }
    let mut bytes = Vec::new();
    file.take(MAX_SECRET_BYTES as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| broken(error.to_string()))?;
    let bytes = bytes.trim_ascii();
    match (MIN_SECRET_BYTES..=MAX_SECRET_BYTES).contains(&bytes.len()) {
        true => Ok(bytes.to_vec()),
        false => Err(unfit(&format!("{named}={path:?}"), bytes.len())),
    }
}

fn unfit(what: &str, bytes: usize) -> LaunchError {
    LaunchError::new(
        format!("{what} holds {bytes} bytes, not {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}"),
        "make one with: openssl rand -hex 32",
    )
}

/// Lower-case hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
