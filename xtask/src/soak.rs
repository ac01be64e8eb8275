//! `cargo xtask soak [ARGS]`: builds `pp-trials` and runs its `soak`.

use std::os::unix::process::CommandExt;

use anyhow::{Context, Result};

use crate::process::{build_program, command, git};

/// Says of which commit, and runs it.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let trials = build_program("pp-trials", "pp-trials")?;
    let commit = git(&["describe", "--always", "--dirty", "--abbrev=12"])?;
    println!("commit {commit}");
    Err(command(trials).arg("soak").args(args).exec()).context("cannot run pp-trials")
}
