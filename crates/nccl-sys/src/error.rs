//! Why a library cannot be used, and why a call failed.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use crate::bindings::ncclResult_t;
use crate::library::{LIBRARY_VARIABLE, MINIMUM, Origin, Version};

/// No usable NCCL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The library that the user named cannot be used. Nothing else was tried.
    #[error("{LIBRARY_VARIABLE} is set, but {0}; correct it, or unset it to let NCCL be found")]
    Named(Rejected),
    /// A library that the caller named cannot be used.
    #[error("{0}")]
    Rejected(Rejected),
    /// None of the places has a usable library.
    #[error(
        "no usable NCCL was found: {}; install one (for example `pip install nvidia-nccl-cu13`) or name the file in \
         {LIBRARY_VARIABLE}",
        list(.0)
    )]
    NotFound(Vec<Rejected>),
}

fn list(tried: &[Rejected]) -> String {
    let tried: Vec<String> = tried.iter().map(ToString::to_string).collect();
    tried.join("; ")
}

/// One library that was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// What was opened: a path, or a name that the dynamic linker looks for. Empty when there was nothing to open.
    pub library: PathBuf,
    /// Where it was looked for.
    pub origin: Origin,
    /// What is wrong with it.
    pub reason: Reason,
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.library.as_os_str().is_empty() {
            return write!(f, "{}: {}", self.origin, self.reason);
        }
        write!(f, "{}: {}", self.library.display(), self.reason)
    }
}

/// What is wrong with one library.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// The dynamic linker cannot load it; its own words.
    #[error("it cannot be loaded: {0}")]
    NotLoaded(String),
    /// It lacks a function that every NCCL of a supported version has.
    #[error("it has no function {symbol}, so it is not an NCCL of version {MINIMUM} or newer")]
    NoSymbol {
        /// The function.
        symbol: &'static str,
    },
    /// It does not say its version.
    #[error("ncclGetVersion failed with {0}")]
    NoVersion(ncclResult_t),
    /// Its major version is another one, so its functions may be others behind the same names.
    #[error("it is version {0}; this program speaks the interface of version 2")]
    OtherMajor(Version),
    /// It is older than what was tested.
    #[error("it is version {0}, older than {MINIMUM}")]
    TooOld(Version),
    /// There is no Python with an NCCL package.
    #[error("{0}")]
    NoPackage(String),
}

/// A call into NCCL that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NcclError {
    /// The function.
    pub call: &'static str,
    /// What it returned.
    pub result: ncclResult_t,
    /// The library's words for this result, if any.
    pub text: String,
    /// The library's words for what last went wrong in this process; empty if it has none.
    pub last: String,
}

impl fmt::Display for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {}", self.call, self.result)?;
        if !self.text.is_empty() {
            write!(f, ": {}", self.text)?;
        }
        if !self.last.is_empty() {
            write!(f, " ({})", self.last)?;
        }
        Ok(())
    }
}

impl Error for NcclError {}
