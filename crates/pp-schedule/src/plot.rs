//! `pp schedule plot`: a picture.

use std::io::Write as _;
use std::path::Path;
use std::slice;

use pp_command::print;
use pp_contract::FaultKind;
use pp_job::Error;
use pp_job::output::{is_stdout, one_file_each, write_file};
use pp_runtime::report::write_schedules_svg;
use pp_runtime::schedule::Timeline;

use crate::args::{PlotArgs, Subject};
use crate::subject::Loaded;

/// Draws the schedule over simulated time.
pub(super) fn plot(args: &PlotArgs) -> Result<(), Error> {
    let loaded = args.subject.load()?;
    let timeline = loaded.simulate(&args.simulation)?;
    let title = loaded.name.clone();
    let subjects = slice::from_ref(&args.subject.subject);
    draw(subjects, &args.output, &title, &[(loaded, timeline)])
}

/// Draws simulated schedules, one below the other.
pub(super) fn draw(
    subjects: &[Subject],
    output: &Path,
    title: &str,
    schedules: &[(Loaded, Timeline)],
) -> Result<(), Error> {
    let files = subjects.iter().filter_map(|subject| match subject {
        Subject::File(path) => Some(("FILE.csv", Some(&**path))),
        Subject::Built(_) => None,
    });
    let files: Vec<_> = files.collect();
    one_file_each(&files, &[("--output", Some(output))])?;
    let schedules = schedules.iter();
    let all = schedules.map(|(loaded, timeline)| (&*loaded.name, &loaded.schedule, timeline));
    let mut picture = Vec::new();
    write_schedules_svg(&mut picture, title, &all.collect::<Vec<_>>())?;
    if is_stdout(output) {
        return print(&String::from_utf8_lossy(&picture));
    }
    write_file(output, |out| out.write_all(&picture))
        .map_err(|error| Error::local(FaultKind::Io, "write picture", error))
}
