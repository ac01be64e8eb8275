//! `pp schedule`: training schedules by name or from a file.

mod need;
mod plot;
mod show;
mod subject;

use std::fmt::Write as _;

use pp_job::Error;
use pp_runtime::schedule::Kind;

use crate::args::ScheduleCommand;
use crate::exit::print;

/// Performs a command of `pp schedule`.
pub(crate) fn perform(command: &ScheduleCommand) -> Result<(), Error> {
    match command {
        ScheduleCommand::List => list(),
        ScheduleCommand::Show(args) => show::show(args),
        ScheduleCommand::Check(args) => need::check(args),
        ScheduleCommand::Simulate(args) => need::simulate(args),
        ScheduleCommand::Plot(args) => plot::plot(args),
    }
}

fn list() -> Result<(), Error> {
    let mut text = String::new();
    for kind in Kind::ALL {
        let (what, sizes) = about(kind);
        let (name, in_torch) = (kind.name(), kind.torch_name().unwrap_or("-"));
        let _ = writeln!(text, "{name:<15} {in_torch:<22} {what}; {sizes}");
    }
    print(&text)
}

/// What a schedule is, and which sizes it takes.
fn about(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Naive => (
            "each microbatch forward and backward before the next",
            "one stage a rank",
        ),
        Kind::GPipe => ("all forwards, then all backwards", "one stage a rank"),
        Kind::OneFOneB => (
            "a forward and a backward in turn",
            "one stage a rank, as many microbatches as ranks or more",
        ),
        Kind::Interleaved => (
            "1F1B over several stages of each rank",
            "any stages a rank, microbatches a multiple of the rounds, max(1, microbatches / ranks)",
        ),
        Kind::InterleavedZeroBubble => (
            "as interleaved, with B split into I and W; on rank r, W runs r backwards after its I",
            "the same sizes",
        ),
        Kind::ZbH1 => (
            "interleaved-zb with one stage a rank (ZB1P)",
            "one stage a rank, microbatches as interleaved",
        ),
        Kind::LoopedBfs => (
            "all microbatches through one stage of a rank, then through the next",
            "any stages a rank",
        ),
        Kind::ZbV => ("zero bubble, two stages a rank in a V", "two stages a rank"),
        Kind::DualPipeV => (
            "a forward and a backward overlapped, in a V",
            "two stages a rank, as many microbatches as stages or more",
        ),
    }
}
