//! `pp schedule`: training schedules by name or from a file.

mod args;
mod compare;
mod model;
mod need;
mod plot;
mod show;
mod subject;

use std::fmt;

use pp_command::print_result;
use pp_job::Error;
use serde::Serialize;

pub use crate::args::ScheduleCommand;

/// The schedules, their names in PyTorch, what they do, and the sizes that they take.
const LIST: &str = "\
naive           -                      each microbatch forward and backward before the next; one stage a rank
gpipe           GPipe                  all forwards, then all backwards; one stage a rank
1f1b            1F1B                   a forward and a backward in turn; one stage a rank, as many microbatches as ranks or more
interleaved     Interleaved1F1B        1F1B over several stages of each rank; any stages a rank, microbatches a multiple of the rounds, max(1, microbatches / ranks)
interleaved-zb  InterleavedZeroBubble  as interleaved, with B split into I and W; on rank r, W runs r backwards after its I; the same sizes
zb-h1           InterleavedZeroBubble  interleaved-zb with one stage a rank (ZB1P); one stage a rank, microbatches as interleaved
looped-bfs      LoopedBFS              all microbatches through one stage of a rank, then through the next; any stages a rank
zbv             ZBVZeroBubble          zero bubble, two stages a rank in a V; two stages a rank
dualpipe-v      DualPipeV              a forward and a backward overlapped, in a V; two stages a rank, as many microbatches as stages or more
";

/// The schedules, as `list` prints them.
#[derive(Serialize)]
struct Names {
    schedules: Vec<Named>,
}

#[derive(Serialize)]
struct Named {
    name: &'static str,
    /// PyTorch's name, if it has one.
    pytorch: Option<&'static str>,
    about: &'static str,
}

impl Names {
    fn all() -> Self {
        let of = |line: &'static str| {
            let (name, rest) = line.split_once(' ')?;
            let (pytorch, about) = rest.trim_start().split_once(' ')?;
            Some(Named {
                name,
                pytorch: Some(pytorch).filter(|name| *name != "-"),
                about: about.trim_start(),
            })
        };
        Self {
            schedules: LIST.lines().filter_map(of).collect(),
        }
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(LIST)
    }
}

/// Performs a command of `pp schedule`.
///
/// # Errors
/// A schedule that is no schedule, or does not hold; a file that cannot be read or written.
pub fn perform(command: &ScheduleCommand) -> Result<(), Error> {
    match command {
        ScheduleCommand::List { json } => print_result(&Names::all(), *json),
        ScheduleCommand::Show(args) => show::show(args),
        ScheduleCommand::Check(args) => need::check(args),
        ScheduleCommand::Simulate(args) => need::simulate(args),
        ScheduleCommand::Plot(args) => plot::plot(args),
        ScheduleCommand::Compare(args) => compare::compare(args),
    }
}
