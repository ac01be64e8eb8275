//! What a command prints, and how it may end.

use std::fmt::Display;
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::Path;

use pp_job::Error;
use pp_job::internal::{REPORT_FD, SUPERVISOR};
use pp_job::output::{OutputError, Patient, stdout};

use serde::Serialize;

use crate::env::Env;

/// From now on it is an error if other code calls `exit`, such as a plugin. Of a process that checks a plugin its parent
/// says so.
pub(crate) fn note_other_exits(env: &Env) {
    extern "C" fn at_exit() {
        pp_job::internal::note_exit();
    }
    if env.get(SUPERVISOR).is_none() || env.get(REPORT_FD).is_some() {
        // SAFETY: `at_exit` takes nothing, does not unwind into C, and lies in a program that is never unloaded.
        let _ = unsafe { libc::atexit(at_exit) };
    }
}

/// Prints a result as text, or as one JSON object.
pub(crate) fn print_result(result: &(impl Serialize + Display), json: bool) -> Result<(), Error> {
    if json {
        let text = serde_json::to_string(result).map_err(anyhow::Error::new)?;
        return print(&format!("{text}\n"));
    }
    print(&result.to_string())
}

/// Prints what a command found on standard output. A reader that closed the pipe does not want to read it; a full disk
/// is a failure.
///
/// # Errors
/// The text cannot be written.
pub fn print(text: &str) -> Result<(), Error> {
    let copy = stdout().try_clone_to_owned();
    let written = copy.and_then(|out| Patient(File::from(out)).write_all(text.as_bytes()));
    match written {
        Err(source) if source.kind() != ErrorKind::BrokenPipe => Err(OutputError::Write {
            path: Path::new("-").into(),
            bytes: 0,
            source,
        }
        .into()),
        _ => Ok(()),
    }
}
