//! `cargo xtask soak [ARGS]` and `cargo xtask placements [ARGS]`: build `pp-trials` and run what it has of that name.

use std::path::Path;
use std::process::Command;

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
    run_command(placements_of(&trials)?.args(args))
}

/// Runs the part of them that `seed` chooses, with a program that is built.
pub(crate) fn part_of_placements(trials: &Path, seed: &str) -> Result<()> {
    run_command(placements_of(trials)?.args(["--part", seed]))
}

fn placements_of(trials: &Path) -> Result<Command> {
    let mut placements = command(trials);
    placements.arg("placements").arg("--input");
    placements.arg(clip::expanded()?);
    Ok(placements)
}
