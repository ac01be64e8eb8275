//! Standard output, kept for the results of a command.
//!
//! *Hazard.* A plugin or a library prints to descriptor 1, into the middle of a result. *Guarantee.* After [`keep_stdout`]
//! what other code prints goes to standard error, also in the ranks that this process starts.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::stdio::{dup2_stdout, stderr};

/// A process has one standard output.
static KEPT: OnceLock<OwnedFd> = OnceLock::new();

/// Keeps standard output for results, and lets descriptor 1 lead to standard error. Call it once, before a library is
/// loaded. `was_closed` says that this process began without a standard output: then each write of a result fails.
///
/// # Errors
/// The system refuses a descriptor.
pub fn keep_stdout(was_closed: bool) -> io::Result<()> {
    let kept = match was_closed {
        // The standard library has opened this file in its place, and took all writes.
        true => File::open("/dev/null")?.into(),
        false => rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?,
    };
    dup2_stdout(stderr())?;
    let _ = KEPT.set(kept);
    Ok(())
}

/// Gives the descriptor for results: what [`keep_stdout`] kept, or descriptor 1.
pub fn stdout() -> BorrowedFd<'static> {
    KEPT.get()
        .map_or_else(rustix::stdio::stdout, |kept| kept.as_fd())
}
