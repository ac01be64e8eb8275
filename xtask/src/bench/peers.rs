//! The programs that run beside ours, built or found here.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process::{build_pp, command, output, run, succeeds, target};

/// Whose run it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    /// `pp bench overlap`.
    Pp,
    /// The hand-written loop in `peers/shm_pilot.c`: the limit.
    Limit,
    /// `torch.distributed` over gloo.
    Gloo,
}

/// One point of a benchmark.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Case {
    pub(super) bytes: usize,
    pub(super) decode_ms: f64,
    pub(super) phase_b_ms: f64,
    pub(super) touch: bool,
    pub(super) chunks: usize,
    pub(super) depth: usize,
}

pub(super) const DEPTH: usize = 4;

pub(super) struct Contenders {
    pub(super) pp: PathBuf,
    pilot: PathBuf,
    /// A Python that can import torch.
    python: Option<PathBuf>,
}

impl Contenders {
    /// Builds ours and the C pilot, and looks for a Python with torch.
    pub(super) fn build() -> Result<Self> {
        let pp = build_pp()?;
        let directory = target()?.join("peers");
        fs::create_dir_all(&directory)?;
        let pilot = directory.join("shm_pilot");
        let mut cc = command("cc");
        cc.args(["-O3", "-march=native", "xtask/peers/shm_pilot.c", "-o"]);
        run(cc.arg(&pilot)).context("the pilot needs a C compiler: apt-get install gcc")?;
        let venv = directory.join("venv/bin/python");
        let with_torch =
            |python: &PathBuf| succeeds(command(python).args(["-c", "import torch.distributed"]));
        let python = [venv, "python3".into()].into_iter().find(with_torch);
        if python.is_none() {
            let venv = directory.join("venv").display().to_string();
            println!(
                "skipped: gloo, no Python with torch; to have it: python3 -m venv {venv} && \
                 {venv}/bin/pip install torch numpy"
            );
        }
        Ok(Self { pp, pilot, python })
    }

    /// Those that can run, ours first.
    pub(super) fn names(&self) -> Vec<Contender> {
        let gloo = self.python.iter().map(|_| Contender::Gloo);
        [Contender::Pp, Contender::Limit]
            .into_iter()
            .chain(gloo)
            .collect()
    }

    /// Half a round trip of a cache line between the cores, in microseconds.
    pub(super) fn hop_us(&self) -> Result<f64> {
        let printed = json_of(command(&self.pilot).arg("hop"))?;
        let hop_us = printed["hop_us"].as_f64();
        hop_us.context("shm_pilot printed no hop_us")
    }

    /// Runs one case to its end; the keys are those of `pp bench overlap --json`.
    pub(super) fn run(&self, contender: Contender, case: &Case) -> Result<Value> {
        let (bytes, chunks, depth) = (case.bytes, case.chunks, case.depth);
        let (decode, phase_b) = (case.decode_ms, case.phase_b_ms);
        let (program, args) = match contender {
            Contender::Pp => {
                let stages = format!("--decode-ms {decode} --phase-b-ms {phase_b}");
                let touch = if case.touch { "--touch" } else { "" };
                let size = format!("--bytes {bytes} --chunks {chunks} --depth {depth} {touch}");
                let args = format!("bench overlap --json --simulate sleep {stages} {size}");
                (&self.pp, args)
            }
            Contender::Limit => {
                let mode = if case.touch { "touch" } else { "overlap" };
                let args = format!("{mode} {bytes} {decode} {phase_b} {chunks} {depth}");
                (&self.pilot, args)
            }
            Contender::Gloo => {
                let python = self.python.as_ref().context("gloo was not found")?;
                // Two orders of magnitude slower per hand-over: fewer chunks say as much.
                let args = format!("{bytes} {decode} {phase_b} {}", chunks.min(100));
                (python, format!("xtask/peers/gloo_pilot.py {args}"))
            }
        };
        json_of(command(program).args(args.split_whitespace()))
    }
}

fn json_of(program: &mut Command) -> Result<Value> {
    let printed = output(program)?;
    serde_json::from_str(&printed).with_context(|| format!("no JSON: {printed}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pilot_needs_no_vectors_of_the_processor() {
        let mut cc = command("cc");
        cc.args("-O3 -Wall -Wextra -Werror -c -o /dev/null".split(' '));
        output(cc.arg("xtask/peers/shm_pilot.c")).unwrap();
    }
}
