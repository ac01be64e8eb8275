//! `cargo xtask placements [--part]`: the shipped job on every placement gives the bytes of one process.
//!
//! Hazard: a chunk that is rounded, dropped or computed without its past on one placement alone. Guarantee: the film of
//! the sample clip is the same, byte for byte, however the stages stand on ranks, each rank a process. `--part` runs a
//! part of the list in which each feature stands at least once.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::clip;
use crate::process::{build_pp, command, run as run_command, target};

/// Pipelines, and the passes that they need at least.
const PIPELINES: [(&str, u32); 12] = [
    ("encode@0,phase_b@0,decode@0", 0),
    ("encode@0,phase_b@1,decode@0", 0),
    ("encode@0,phase_b@0,decode@1", 0),
    ("encode@0,phase_b@1,decode@2", 0),
    ("encode@0,phase_b@1,decode@1", 0),
    ("encode@0,phase_b@0,phase_b@0,decode@0", 2),
    ("encode@0,phase_b@0,phase_b@1,decode@1", 2),
    ("encode@0,phase_b@0,phase_b@1,decode@0", 2),
    ("encode@0,phase_b@1,phase_b@2,decode@0", 2),
    ("encode@0,phase_b@1,phase_b@0,phase_b@1,decode@0", 3),
    ("encode@0,phase_b@1,phase_b@2,phase_b@3,decode@0", 3),
    ("encode@0,phase_b@1,phase_b@2,decode@3", 2),
];
const DEPTHS: [u32; 4] = [1, 2, 4, 9];

/// One run of the job.
#[derive(Clone, Copy)]
struct Case {
    pipeline: &'static str,
    depth: u32,
    passes: u32,
    recompute: bool,
    restarts: bool,
}

impl Case {
    fn args(&self) -> Vec<String> {
        let mut args = vec![
            "--denoise-steps".to_owned(),
            self.passes.to_string(),
            "--depth".to_owned(),
            self.depth.to_string(),
            "--pipeline".to_owned(),
            self.pipeline.to_owned(),
        ];
        if self.recompute {
            args.push("--recompute".to_owned());
        }
        if self.restarts {
            args.extend(["--restarts".to_owned(), "1".to_owned()]);
        }
        args
    }

    /// What decides the bytes.
    fn film(&self) -> (u32, bool) {
        (self.passes, self.recompute)
    }
}

/// All runs, or the named part of them.
fn cases(is_part: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (at, (pipeline, least)) in PIPELINES.into_iter().enumerate() {
        for (n, depth) in DEPTHS.into_iter().enumerate() {
            for recompute in [false, true] {
                for passes in [least.max(1), least.max(1) + 2] {
                    let restarts = may_restart(pipeline) && (at + n) % 2 == 0;
                    // Each pipeline once, and over all of them each depth, with and without recompute.
                    let is_named = (n, recompute, passes) == (at % 4, at % 2 == 1, least.max(1));
                    if is_named || !is_part {
                        cases.push(Case {
                            pipeline,
                            depth,
                            passes,
                            recompute,
                            restarts,
                        });
                    }
                }
            }
        }
    }
    cases
}

/// Whether a rank other than those of the source and of the sink has a stage.
fn may_restart(pipeline: &str) -> bool {
    let rank = |stage: &str| stage.rsplit('@').next().unwrap_or_default().to_owned();
    let ranks: Vec<String> = pipeline.split(',').map(rank).collect();
    let last = &ranks[ranks.len() - 1];
    ranks.iter().any(|rank| rank != "0" && rank != last)
}

/// Runs the list, and compares each film with that of one process.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let is_part = match args {
        [] => false,
        [part] if part == "--part" => true,
        _ => bail!("cargo xtask placements [--part]"),
    };
    let pp = build_pp()?;
    let folder = target()?.join("placements");
    // What an earlier run left may be of another program.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let clip = clip::expanded()?;
    let (started, cases) = (Instant::now(), cases(is_part));
    for (n, case) in cases.iter().enumerate() {
        let (passes, recompute) = case.film();
        let expected = folder.join(format!("one-{passes}-{recompute}.y4m"));
        if !expected.exists() {
            let alone = Case {
                pipeline: PIPELINES[0].0,
                depth: 1,
                restarts: false,
                ..*case
            };
            film(&pp, &clip, &alone, &expected)?;
        }
        let made = folder.join("made.y4m");
        film(&pp, &clip, case, &made)?;
        let is_same = fs::read(&made)? == fs::read(&expected)?;
        let args = case.args().join(" ");
        ensure!(is_same, "{args}: the film differs from that of one process");
        println!("{:3} of {}: {args}: the same bytes", n + 1, cases.len());
    }
    fs::remove_dir_all(&folder)?;
    let seconds = started.elapsed().as_secs();
    println!(
        "placements: {} runs, all the same bytes, {seconds} s",
        cases.len()
    );
    Ok(())
}

/// Runs the job into a file.
fn film(pp: &Path, clip: &Path, case: &Case, output: &PathBuf) -> Result<()> {
    let mut pp = command(pp);
    pp.args(["run", "--kernels", "cpu", "--transport", "host", "--input"]);
    pp.arg(clip).args(case.args());
    run_command(pp.arg("--output").arg(output))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_named_part_has_each_feature_once() {
        let part = cases(true);
        for (pipeline, _) in PIPELINES {
            assert!(
                part.iter().any(|case| case.pipeline == pipeline),
                "{pipeline}"
            );
        }
        for depth in DEPTHS {
            assert!(part.iter().any(|case| case.depth == depth), "{depth}");
        }
        for flag in [false, true] {
            assert!(part.iter().any(|case| case.recompute == flag));
            assert!(part.iter().any(|case| case.restarts == flag));
        }
        assert!(part.len() < cases(false).len() / 4);
    }
}
