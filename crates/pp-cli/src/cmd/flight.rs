//! `pp flight`: what the ranks of a job did last.

use pp_command::print_result;
use pp_contract::FaultKind;
use pp_job::Error;
use pp_job::command_line::Analysis;

use crate::args::FlightArgs;
use pp_job::output::{one_file_each, write_file};

/// Reads the files, and says what they say together.
pub(crate) fn flight(args: &FlightArgs) -> Result<(), Error> {
    let sources: Vec<_> = args
        .files
        .iter()
        .map(|file| ("FILES", Some(&**file)))
        .collect();
    one_file_each(&sources, &[("--trace", args.trace.as_deref())])?;
    let analysis = Analysis::read(&args.files)?;
    if let Some(path) = &args.trace {
        write_file(path, |out| analysis.write_trace(out))
            .map_err(|error| Error::local(FaultKind::Io, "write trace", error))?;
    }
    print_result(&analysis, args.json)
}
