//! `cargo xtask soak [ARGS]` and `cargo xtask placements [ARGS]`: build `pp-trials` and run what it has of that name.

use std::path::Path;

use anyhow::Result;

use crate::clip;
use crate::process::{build_program, command, described, run as run_command};

/// Says of which commit, and runs it.
pub(crate) fn soak(args: &[String]) -> Result<()> {
    let trials = build_program("pp-trials", "pp-trials")?;
    println!("commit {}", described()?);
    run_command(command(trials).arg("soak").args(args))
}

/// Runs the placements on the sample clip.
pub(crate) fn placements(args: &[String]) -> Result<()> {
    let trials = build_program("pp-trials", "pp-trials")?;
    let mut placements = command(trials);
    placements.arg("placements").arg("--input");
    run_command(placements.arg(clip::expanded()?).args(args))
}

/// Runs the part of them that `seed` chooses on a smaller clip, with a program that is built.
pub(crate) fn part_of_placements(trials: &Path, seed: &str) -> Result<()> {
    run_command(command(trials).args(["placements", "--part", seed]))
}
