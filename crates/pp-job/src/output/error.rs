//! What can be wrong with an output, each with the place and the remedy in one line.

use std::io;
use std::path::{Path, PathBuf};

use pp_contract::FaultKind;
use pp_runtime::stage::StageError;
use pp_transport::error::lift_limit;
use rustix::io::Errno;

use super::place::is_stdout;
use crate::error::Error;

/// Why an output cannot be written. The fault lies with the place it should go to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the message of each variant says what happened"
)]
pub enum OutputError {
    #[error("{path}: cannot be created: {source}; {}", remedy(source))]
    Create { path: Shown, source: io::Error },
    #[error(
        "{path}: cannot be created: {source}; the file system there takes no new files, choose another place"
    )]
    NoNewFiles { path: Shown, source: io::Error },
    #[error("{0}: is a directory; name a file in it")]
    IsDirectory(Shown),
    #[error("{0}: is a file that is open already; name the file, or - for standard output")]
    IsDescriptor(Shown),
    #[error("{0}: this user may not replace it; make it writable, or choose another name")]
    Protected(Shown),
    #[error("{0}: is a socket; name a file, or pipe --output - into a program that connects to it")]
    IsSocket(Shown),
    #[error("{0}: {1}")]
    Kept(Shown, String),
    #[error(
        "{path}: writing failed after {bytes} bytes: {source}; {}",
        remedy(source)
    )]
    Write {
        path: Shown,
        bytes: u64,
        source: io::Error,
    },
    #[error(
        "{path}: complete, but cannot be stored under its name: {source}; {}",
        remedy(source)
    )]
    Commit { path: Shown, source: io::Error },
}

/// A path in a message. A name of standard output reads as what it stands for.
#[derive(Clone, Debug)]
pub struct Shown(PathBuf);

impl From<&Path> for Shown {
    fn from(path: &Path) -> Self {
        Self(path.to_path_buf())
    }
}

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if is_stdout(&self.0) {
            return f.write_str("standard output");
        }
        self.0.display().fmt(f)
    }
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some space or choose another place"
        }
        io::ErrorKind::BrokenPipe => "the program that reads it has ended; look at its messages",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "choose a directory that you may write to"
        }
        io::ErrorKind::NotFound => "create its directory first",
        io::ErrorKind::FileTooLarge => {
            "lift the limit on file sizes (ulimit -f) or choose another place"
        }
        _ => match Errno::from_io_error(error) {
            Some(Errno::BADF) => "it is closed; name a file, or pipe it into a program",
            errno => errno.and_then(lift_limit).unwrap_or("choose another place"),
        },
    }
}

/// For a sink that stores a file.
impl From<OutputError> for StageError {
    fn from(error: OutputError) -> Self {
        Self::new(FaultKind::Io, "write output", error.to_string())
    }
}

impl From<OutputError> for Error {
    fn from(error: OutputError) -> Self {
        Self::Stage(error.into())
    }
}
