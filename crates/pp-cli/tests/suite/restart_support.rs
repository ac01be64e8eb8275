//! A run whose rank 1 is killed or stopped again and again, at moments that follow from how far it
//! has come.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use pp_testing::process::Strike;
use pp_testing::{Random, read_json};

use crate::common::{assert_keys_are_documented, pp};

/// A command that reads and writes a video through this process.
pub(crate) fn through(args: &[&str]) -> Command {
    let mut command = pp(&["run", "--input", "-", "--output", "-"]);
    command.args(["--frames-per-chunk", "2"]).args(args);
    command
}

/// The command of [`through`], on shared memory.
pub(crate) fn host(args: &[&str]) -> Command {
    let mut command = through(&["--transport", "host", "--denoise-steps", "2"]);
    command.args(args);
    command
}

/// Kills of rank 1 all over an output of so many bytes. Some come while the one before is not made up for.
pub(crate) fn kills(random: &mut Random, count: u64, bytes: u64) -> Vec<Strike> {
    let mut at: Vec<u64> = (0..count).map(|_| random.below(bytes)).collect();
    at.sort_unstable();
    let kills = at.into_iter().map(|at| Strike {
        after: Duration::from_micros(random.below(4) * random.below(3000)),
        ..Strike::kill(at)
    });
    kills.collect()
}

/// What a run reports of itself.
pub(crate) fn report(path: &PathBuf) -> serde_json::Value {
    let whole = read_json(path);
    assert_keys_are_documented(&whole);
    whole["run"].clone()
}
