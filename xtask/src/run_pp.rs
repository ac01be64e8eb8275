//! `cargo xtask run-pp`: real video through two processes, from a clean checkout.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::clip;
use crate::process::{build_pp, command, root, shown};

/// Builds `pp` and runs `pp run` with `args`; without any, on the clip with noise added.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let pp = build_pp()?;
    let mut pp_run = command(pp);
    pp_run.arg("run").stdin(Stdio::inherit());
    if args.is_empty() {
        fs::create_dir_all(root().join("out"))?;
        pp_run.arg("--input").arg(clip::expanded()?).args("--add-noise 20 --output out/denoised.y4m --report out/report.json --trace out/trace.json --timeline out/timeline.svg".split(' '));
    } else {
        pp_run.args(args);
        // Paths are the caller's, not the workspace's.
        if let Ok(here) = std::env::current_dir() {
            pp_run.current_dir(here);
        }
    }
    // In its place: the exit code, the one line of an error and every signal are its own.
    println!("$ {}", shown(&pp_run));
    Err(pp_run.exec()).context("cannot run pp")
}
