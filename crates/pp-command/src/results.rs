//! What a command prints and draws.

use std::fmt::Display;
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::Path;

use pp_job::Error;
use pp_job::output::{OutputError, Patient, stdout, write_file};
use pp_runtime::report::{Measures, Recorder, View, write_chrome_trace, write_svg};
use serde::Serialize;

/// Prints a result as text, or as one JSON object.
///
/// # Errors
/// The text cannot be written.
pub fn print_result(result: &(impl Serialize + Display), json: bool) -> Result<(), Error> {
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

/// Writes the trace and the timeline of a run, where asked for.
///
/// # Errors
/// A file cannot be written.
pub fn write_pictures(
    trace: Option<&Path>,
    timeline: Option<&Path>,
    recorder: &Recorder,
    measures: &Measures,
    view: &View,
) -> Result<(), OutputError> {
    if let Some(path) = trace {
        write_file(path, |out| write_chrome_trace(out, recorder, view))?;
    }
    if let Some(path) = timeline {
        write_file(path, |out| write_svg(out, recorder, measures, view))?;
    }
    Ok(())
}
