//! The command line that the ranks of this process get.

use std::ffi::OsString;
use std::sync::OnceLock;

/// A process has one command line.
static GIVEN: OnceLock<Vec<OsString>> = OnceLock::new();

/// Takes a command line, the name of the program first, in place of the one that this process began with: a program that
/// reads a part of it from a file gives its ranks what was read. Call it once, before a job.
pub fn set_arguments(all: Vec<OsString>) {
    let _ = GIVEN.set(all);
}

/// The command line of this process, the name of the program first.
pub fn arguments() -> Vec<OsString> {
    let given = GIVEN.get().cloned();
    given.unwrap_or_else(|| std::env::args_os().collect())
}
