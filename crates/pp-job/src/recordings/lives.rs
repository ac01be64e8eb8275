//! Which recordings are of one run of the job.
//!
//! Hazard: a job's id is made of what ranks are launched with, so that two launches with the same
//! address, port and secret have one id, and their files lie side by side under it. Guarantee: only
//! the newest run is told of; what was left out is named. A rank that was started again stays: each of
//! its lives has generations of its own, later than those before.

use std::path::PathBuf;

use pp_transport::flight::Recording;

use super::ranked::Files;
use crate::RANK_0;

/// Keeps the files of the newest run; the others, by name. The files are in the order of their ranks,
/// and those of a rank in that of their times.
pub(super) fn of_the_newest_run(files: Files) -> (Files, Vec<PathBuf>) {
    // Rank 0 has one life.
    let of_rank_0 = files
        .iter()
        .filter(|(_, recording)| recording.rank == RANK_0);
    let runs: Vec<(i128, i128)> = of_rank_0.map(|(_, recording)| times(recording)).collect();
    let newest = runs.len().checked_sub(1);
    let run_of = |recording: &Recording| {
        let own = times(recording);
        let apart = |run: &(i128, i128)| (own.0 - run.1).max(run.0 - own.1).max(0);
        let runs = runs.iter().enumerate().rev();
        runs.min_by_key(|(_, run)| apart(run)).map(|(at, _)| at)
    };
    let mut left_out = Vec::new();
    let mut kept = Files::new();
    // Backwards: what a rank did last decides what can have been before.
    for (file, recording) in files.into_iter().rev() {
        let later = kept.last().map(|(_, later)| later);
        let later = later.filter(|later| later.rank == recording.rank);
        let is_of_run = newest.is_none() || run_of(&recording) == newest;
        if is_of_run && later.is_none_or(|later| is_before(&recording, later)) {
            kept.push((file, recording));
        } else {
            left_out.push(file);
        }
    }
    kept.reverse();
    left_out.reverse();
    (kept, left_out)
}

/// When its first operation began that it still has, and when it was written, on the clock on the wall.
fn times(recording: &Recording) -> (i128, i128) {
    let written = &recording.written;
    let first = recording.operations.iter().map(|o| o.prepared_ns).min();
    let began = first.map_or(0, |first| written.monotonic_ns.saturating_sub(first));
    let realtime_ns = i128::from(written.realtime_ns);
    (realtime_ns - i128::from(began), realtime_ns)
}

/// Says whether it can be an earlier life of the same rank: its generations are all earlier.
fn is_before(earlier: &Recording, later: &Recording) -> bool {
    let last = earlier.operations.iter().map(|o| o.generation).max();
    let first = later.operations.iter().map(|o| o.generation).min();
    // One that ended before it did anything has none.
    earlier.rank != RANK_0 && last.zip(first).is_none_or(|(last, first)| last < first)
}
