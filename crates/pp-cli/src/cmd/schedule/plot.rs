//! `pp schedule plot`: a picture.

use std::io::Write as _;

use pp_contract::FaultKind;
use pp_job::Error;
use pp_job::output::{is_stdout, one_file_each, write_file};
use pp_runtime::report::write_schedule_svg;

use crate::args::{PlotArgs, Subject};
use crate::exit::print;

/// Draws the schedule over simulated time.
pub(super) fn plot(args: &PlotArgs) -> Result<(), Error> {
    let input = match &args.subject.subject {
        Subject::File(path) => Some(&**path),
        Subject::Built(_) => None,
    };
    one_file_each(&[("FILE.csv", input)], &[("--output", Some(&args.output))])?;
    let loaded = args.subject.load()?;
    let timeline = loaded.simulate(&args.simulation)?;
    let mut picture = Vec::new();
    write_schedule_svg(&mut picture, &loaded.schedule, &timeline, &loaded.name)?;
    if is_stdout(&args.output) {
        return print(&String::from_utf8_lossy(&picture));
    }
    write_file(&args.output, |out| out.write_all(&picture))
        .map_err(|error| Error::local(FaultKind::Io, "write picture", error))
}
