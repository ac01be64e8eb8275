//! What can go wrong, sorted by who can fix it: [`LoadError`] a file is not usable, [`KernelError`] a call failed,
//! [`Failure`] what a plugin author returns.

use std::path::PathBuf;

use pp_contract::{ManifestError, PlanError};

use crate::abi;

/// The status codes of the ABI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Anything that has no code of its own.
    Error,
    /// The caller's fault; the session stays usable.
    InvalidArgument,
    /// Understood, but not something these kernels do.
    Unsupported,
    /// No memory for it.
    OutOfMemory,
    /// A panic was stopped at the border.
    Panic,
    /// A code that this version of the ABI does not know.
    Unknown(u32),
}

impl Status {
    /// The status of a code other than [`abi::OK`].
    #[must_use]
    pub fn from_code(code: u32) -> Status {
        match code {
            abi::ERROR => Status::Error,
            abi::INVALID_ARGUMENT => Status::InvalidArgument,
            abi::UNSUPPORTED => Status::Unsupported,
            abi::OUT_OF_MEMORY => Status::OutOfMemory,
            abi::PANIC => Status::Panic,
            other => Status::Unknown(other),
        }
    }

    /// The code that crosses the border.
    #[must_use]
    pub fn code(self) -> u32 {
        match self {
            Status::Error => abi::ERROR,
            Status::InvalidArgument => abi::INVALID_ARGUMENT,
            Status::Unsupported => abi::UNSUPPORTED,
            Status::OutOfMemory => abi::OUT_OF_MEMORY,
            Status::Panic => abi::PANIC,
            Status::Unknown(code) => code,
        }
    }
}

/// What an implementation of [`crate::Kernels`] returns when it cannot do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The code for the caller's decisions.
    pub status: Status,
    /// What a person reads: one line, or a first line and more, 16 KiB in all.
    pub message: String,
}

impl From<ManifestError> for Failure {
    fn from(error: ManifestError) -> Failure {
        let message = match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        };
        Failure::invalid(message)
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Failure {
        Failure::invalid(error.to_string())
    }
}

impl Failure {
    /// A failure with what a person reads of it.
    #[must_use]
    pub fn new(status: Status, message: impl Into<String>) -> Failure {
        let message = message.into();
        Failure { status, message }
    }

    /// A failure that is the caller's fault.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Failure {
        Failure::new(Status::InvalidArgument, message)
    }

    /// A request that was understood but is not served.
    #[must_use]
    pub fn unsupported(message: impl Into<String>) -> Failure {
        Failure::new(Status::Unsupported, message)
    }

    /// Any other failure.
    #[must_use]
    pub fn error(message: impl Into<String>) -> Failure {
        Failure::new(Status::Error, message)
    }
}

/// Why a call of a set of kernels did not give a result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The kernels returned a status other than OK.
    #[error("kernels {kernels} failed in {operation}: {message}")]
    Failed {
        /// Name of the kernels.
        kernels: String,
        /// The entry of the table, or the stage that it ran.
        operation: String,
        /// The code they returned.
        status: Status,
        /// Their own words, or the code where they gave none.
        message: String,
    },
    /// The kernels panicked, now or in an earlier call; the session does no more work.
    #[error(
        "kernels {kernels} panicked in {operation}: {message}; the session cannot be used again"
    )]
    Panicked {
        /// Name of the kernels.
        kernels: String,
        /// The entry of the table, or the stage that it ran.
        operation: String,
        /// The text of the panic.
        message: String,
    },
    /// The kernels wrote outside the tensor they were given.
    #[error("kernels {kernels} wrote past the end of {what} in {operation}")]
    Overrun {
        /// Name of the kernels.
        kernels: String,
        /// The entry of the table, or the stage that it ran.
        operation: String,
        /// The tensor, or the payload.
        what: String,
    },
    /// The kernels returned OK and something that makes no sense.
    #[error("kernels {kernels} broke the rules of {operation}: {reason}")]
    BadAnswer {
        /// Name of the kernels.
        kernels: String,
        /// The entry of the table, or the stage that it ran.
        operation: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The kernels do not work in the memory of the session that was asked for; they were not called.
    #[error("kernels {kernels}: {reason}")]
    WrongSpace {
        /// Name of the kernels.
        kernels: String,
        /// What does not fit, and the remedy.
        reason: String,
    },
    /// The arguments do not fit the session; the kernels were not called.
    #[error("{operation}: {reason}")]
    BadCall {
        /// The entry of the table, or the stage that it ran.
        operation: String,
        /// What does not fit.
        reason: String,
    },
}

/// Why a file was refused as a plugin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file cannot be read.
    #[error("cannot read plugin {path}")]
    Unreadable {
        /// The path as given.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The file is not a shared library.
    #[error(
        "{path} is not an ELF shared library ({reason}); build it with `cc -shared -fPIC` or as a cdylib"
    )]
    NotALibrary {
        /// The path as given.
        path: PathBuf,
        /// What was found instead.
        reason: String,
    },
    /// The dynamic linker refused it, a missing symbol among the reasons.
    #[error("the dynamic linker refused {path}")]
    Linker {
        /// The path as given.
        path: PathBuf,
        /// The linker's own words.
        #[source]
        source: libloading::Error,
    },
    /// It needs another library, which this machine does not have.
    #[error("{path} needs {library}, which the dynamic linker does not find: {}", remedy_for(.library))]
    NeedsLibrary {
        /// The path as given.
        path: PathBuf,
        /// The name of the other library.
        library: String,
    },
    /// It is a library, but not a plugin.
    #[error(
        "{path} has no symbol pp_kernels_entry_v2, so it is not a plugin of ABI version 2; \
             export it: export_kernels! in Rust, or see docs/plugin-abi.md"
    )]
    NoEntry {
        /// The path as given.
        path: PathBuf,
        /// The linker's own words.
        #[source]
        source: libloading::Error,
    },
    /// It is a plugin of ABI version 1.
    #[error(
        "{path} is a plugin of ABI version 1: list its stages in describe, put encode, phase_b and decode behind `run`, \
         and export pp_kernels_entry_v2 (docs/plugin-abi.md, *From version 1*)"
    )]
    OldEntry {
        /// The path as given.
        path: PathBuf,
    },
    /// The table cannot be used.
    #[error("plugin {path} is refused: {reason}")]
    Table {
        /// The path as given.
        path: PathBuf,
        /// What is wrong with the table.
        #[source]
        reason: TableError,
    },
    /// The plugin's description makes no sense, or could not be had.
    #[error("plugin {path} does not describe itself")]
    Describe {
        /// The path as given.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: KernelError,
    },
    /// The plugin found a fault in itself.
    #[error("plugin {path} failed its own self test")]
    SelfTest {
        /// The path as given.
        path: PathBuf,
        /// Its words.
        #[source]
        source: KernelError,
    },
}

impl LoadError {
    /// Says whether the file needs the NVIDIA driver, which this machine does not have.
    #[must_use]
    pub fn lacks_driver(&self) -> bool {
        matches!(self, LoadError::NeedsLibrary { library, .. } if is_driver(library))
    }
}

fn is_driver(library: &str) -> bool {
    library.starts_with("libcuda.so")
}

/// How to come by a library that is missing.
fn remedy_for(library: &str) -> &'static str {
    if is_driver(library) {
        "it comes with the NVIDIA driver; install that (580 or newer), or run on the CPU with --kernels cpu"
    } else {
        "install it, or add its directory to LD_LIBRARY_PATH"
    }
}

/// What is wrong with a table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The entry symbol returned no table.
    #[error("pp_kernels_entry_v2 returned null")]
    Null,
    /// The address cannot be that of a table.
    #[error("the table lies at {address:#x}, which is not a multiple of {align}")]
    Misaligned {
        /// Where it lies.
        address: usize,
        /// What it must be a multiple of.
        align: usize,
    },
    /// The first eight bytes are something else.
    #[error(
        "the table starts with {found:#018x}, not with the magic {:#018x}",
        abi::MAGIC
    )]
    Magic {
        /// What was found.
        found: u64,
    },
    /// It speaks another major version.
    #[error(
        "it speaks ABI {found_major}.{found_minor}, this program speaks {}.{}; rebuild it with this program's pp_kernel.h",
        abi::MAJOR,
        abi::MINOR
    )]
    Major {
        /// The plugin's major version.
        found_major: u16,
        /// The plugin's minor version.
        found_minor: u16,
    },
    /// It is shorter than the least that its version must have.
    #[error(
        "the table has {found} bytes, version {}.0 needs at least {}",
        abi::MAJOR,
        abi::TABLE_REQUIRED_BYTES
    )]
    TooShort {
        /// `struct_size` as found.
        found: u32,
    },
    /// An entry that must be there is null.
    #[error("the entry `{name}` is missing")]
    MissingEntry {
        /// The first one that is.
        name: &'static str,
    },
}
