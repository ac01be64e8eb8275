//! `cargo xtask placements [--part]`: the shipped job on every placement gives the bytes of one process.
//!
//! Hazard: a chunk that is rounded, dropped or computed without its past on one placement alone. Guarantee: the film of
//! the sample clip is the same, byte for byte, however the stages stand on ranks, each rank a process, also when a rank
//! is killed and started again. `--part` runs a part of the list in which each feature stands at least once;
//! `cargo xtask test` runs that part too.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::clip;
use crate::process::{build_program, command, output as output_of, target};

/// The placements. All that a row needs follows from its text: the fewest passes, and the ranks that may be killed.
const PIPELINES: [&str; 25] = [
    "encode@0,phase_b@0,decode@0",
    // Two ranks; the sink apart.
    "encode@0,phase_b@1,decode@0",
    "encode@0,phase_b@0,decode@1",
    "encode@0,phase_b@1,decode@1",
    // Parts on one rank and on two.
    "encode@0,phase_b@0,phase_b@0,decode@0",
    "encode@0,phase_b@1,phase_b@1,decode@0",
    "encode@0,phase_b@0,phase_b@1,decode@0",
    "encode@0,phase_b@0,phase_b@1,decode@1",
    "encode@0,phase_b@1,phase_b@0,phase_b@1,decode@0",
    // Three ranks.
    "encode@0,phase_b@1,decode@2",
    "encode@0,phase_b@1,phase_b@2,decode@0",
    "encode@0,phase_b@2,phase_b@1,decode@2",
    "encode@0,phase_b@1,phase_b@0,phase_b@1,decode@2",
    // Four ranks.
    "encode@0,phase_b@1,phase_b@2,decode@3",
    "encode@0,phase_b@1,phase_b@2,phase_b@3,decode@0",
    "encode@0,phase_b@1,phase_b@2,phase_b@3,decode@2",
    // Groups: with rank 0, without it, with the sink apart, and beside a part that one rank has alone.
    "encode@0,phase_b@0+1,decode@0",
    "encode@0,phase_b@1+2,decode@0",
    "encode@0,phase_b@0+1+2,decode@0",
    "encode@0,phase_b@1+2+3,decode@0",
    "encode@0,phase_b@1+2,decode@3",
    "encode@0,phase_b@0+1,phase_b@1,decode@1",
    "encode@0,phase_b@1+2,phase_b@3,decode@0",
    // Rings: on ranks of their own, and with rank 0 inside and the sink apart.
    "encode@0,(phase_b@1,phase_b@2)*2,decode@0",
    "encode@0,(phase_b@1,phase_b@0)*2,decode@2",
];
const DEPTHS: [u32; 4] = [1, 2, 4, 9];
/// What is denoised, and how many passes more than the pipeline needs.
const WORKS: [(Clip, u32); 4] = [
    (Clip::Sample, 0),
    (Clip::Sample, 2),
    (Clip::Scenes("flush"), 0),
    (Clip::Scenes("off"), 1),
];
/// Chunks of the clip at which a rank dies: the first, one inside, the last.
const DEATHS: [u64; 3] = [0, 5, 11];

/// The input of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clip {
    /// The sample clip, which has no cut.
    Sample,
    /// The sample clip made into three scenes, with this value of `--cuts`.
    Scenes(&'static str),
}

/// A rank that kills itself when it works on this chunk, in so many of its lives.
#[derive(Clone, Copy)]
struct Death {
    rank: u32,
    chunk: u64,
    times: u64,
}

/// One run of the job.
#[derive(Clone, Copy)]
struct Case {
    pipeline: &'static str,
    depth: u32,
    passes: u32,
    recompute: bool,
    clip: Clip,
    death: Option<Death>,
}

impl Case {
    fn args(&self) -> Vec<String> {
        let mut args = vec![
            format!("--denoise-steps={}", self.passes),
            format!("--depth={}", self.depth),
            format!("--pipeline={}", self.pipeline),
        ];
        if self.recompute {
            args.push("--recompute".to_owned());
        }
        if let Clip::Scenes(cuts) = self.clip {
            args.push(format!("--cuts={cuts}"));
        }
        if let Some(death) = self.death {
            args.push(format!("--restarts={}", death.times));
        }
        args
    }

    /// The name of the film that these settings give on one process.
    fn film(&self) -> String {
        let clip = match self.clip {
            Clip::Sample => "sample".to_owned(),
            Clip::Scenes(cuts) => format!("scenes-{cuts}"),
        };
        let context = if self.recompute { "-recompute" } else { "" };
        format!("{clip}-{}{context}", self.passes)
    }

    /// The same film on one process.
    fn alone(self) -> Self {
        Self {
            pipeline: PIPELINES[0],
            depth: 1,
            death: None,
            ..self
        }
    }
}

/// All runs, or the named part of them.
fn cases(is_part: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut deaths = 0;
    for (at, pipeline) in PIPELINES.into_iter().enumerate() {
        let may_die = may_restart(pipeline);
        // In the part each pipeline stands once, in other settings than the one before it.
        let turn = (at % 4, (at / 4 + at) % 2 == 1, (at / 4 + at / 2) % 4);
        for (d, depth) in DEPTHS.into_iter().enumerate() {
            for recompute in [false, true] {
                for (w, (clip, more)) in WORKS.into_iter().enumerate() {
                    if is_part && (d, recompute, w) != turn {
                        continue;
                    }
                    let calm = Case {
                        pipeline,
                        depth,
                        passes: least_passes(pipeline) + more,
                        recompute,
                        clip,
                        death: None,
                    };
                    if !is_part || may_die.is_empty() {
                        cases.push(calm);
                    }
                    if !may_die.is_empty() {
                        // Ranks and moments take turns.
                        let death = Some(Death {
                            rank: may_die[deaths % may_die.len()],
                            chunk: DEATHS[deaths % DEATHS.len()],
                            times: 1 + (deaths / DEATHS.len()) as u64 % 2,
                        });
                        cases.push(Case { death, ..calm });
                        deaths += 1;
                    }
                }
            }
        }
    }
    cases
}

/// The fewest passes that each part can have one of, in each lap.
fn least_passes(pipeline: &str) -> u32 {
    let parts = pipeline.matches("phase_b@").count() as u32;
    let laps = pipeline.split_once(")*").and_then(|(_, laps)| {
        let number = laps.split(',').next()?;
        number.parse().ok()
    });
    parts * laps.unwrap_or(1)
}

/// The ranks other than those of the source and of the sink.
fn may_restart(pipeline: &str) -> Vec<u32> {
    let stages = pipeline.split('@').skip(1).map(|after| {
        let end = after.find(|c: char| !c.is_ascii_digit() && c != '+');
        after[..end.unwrap_or(after.len())].split('+')
    });
    let stages: Vec<Vec<u32>> = stages
        .map(|ranks| ranks.filter_map(|rank| rank.parse().ok()).collect())
        .collect();
    let sink = stages.last().cloned().unwrap_or_default();
    let mut ranks: Vec<u32> = stages.into_iter().flatten().collect();
    ranks.retain(|rank| *rank != 0 && !sink.contains(rank));
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// Builds the program, runs the list, and compares each film with that of one process.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let is_part = match args {
        [] => false,
        [part] if part == "--part" => true,
        _ => bail!("cargo xtask placements [--part]"),
    };
    compare(&build_program("pp-trials", "pp-trials")?, is_part)
}

/// Runs the named part with a program that is built.
pub(crate) fn run_part(trials: &Path) -> Result<()> {
    compare(trials, true)
}

/// `trials` is `pp` that makes the faults that it is asked for.
fn compare(trials: &Path, is_part: bool) -> Result<()> {
    let job = Job::new(trials)?;
    let (started, cases) = (Instant::now(), cases(is_part));
    let mut wrong = 0;
    for (n, case) in cases.iter().enumerate() {
        let expected = job.folder.join(format!("{}.y4m", case.film()));
        if !expected.exists() {
            job.run(&case.alone(), &expected)?;
        }
        let made = job.folder.join("made.y4m");
        let came = match job.run(case, &made) {
            Ok(()) if fs::read(&made)? == fs::read(&expected)? => "the same bytes".to_owned(),
            Ok(()) => "WRONG: the film differs from that of one process".to_owned(),
            Err(error) => format!("WRONG: {error:#}"),
        };
        wrong += u32::from(came.starts_with("WRONG"));
        let args = case.args().join(" ");
        let died = case.death.map_or_else(String::new, |death| {
            let Death { rank, chunk, times } = death;
            format!(", rank {rank} killed at chunk {chunk} ({times} times)")
        });
        println!("{:3} of {}: {args}{died}: {came}", n + 1, cases.len());
    }
    job.check_that_scenes_are_cut(&cases)?;
    fs::remove_dir_all(&job.folder)?;
    ensure!(wrong == 0, "{wrong} of {} runs are WRONG", cases.len());
    let seconds = started.elapsed().as_secs();
    println!(
        "placements: {} runs, all the same bytes, {seconds} s",
        cases.len()
    );
    Ok(())
}

/// The program, and where its films lie.
struct Job {
    trials: PathBuf,
    folder: PathBuf,
    sample: PathBuf,
    scenes: PathBuf,
}

impl Job {
    fn new(trials: &Path) -> Result<Self> {
        let folder = target()?.join("placements");
        // What an earlier run left may be of another program.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let (sample, scenes) = (clip::expanded()?, folder.join("scenes.y4m"));
        fs::write(&scenes, clip::in_three_scenes(fs::read(&sample)?))?;
        Ok(Self {
            trials: trials.to_owned(),
            folder,
            sample,
            scenes,
        })
    }

    /// Runs the job into a file. A rank that was to die has died, and no other.
    fn run(&self, case: &Case, output: &Path) -> Result<()> {
        let report = self.folder.join("report.json");
        let mut pp = command(&self.trials);
        pp.args(["run", "--kernels", "cpu", "--transport", "host", "--input"]);
        pp.arg(match case.clip {
            Clip::Sample => &self.sample,
            Clip::Scenes(_) => &self.scenes,
        });
        pp.args(case.args()).arg("--report").arg(&report);
        pp.env("PP_FLIGHT_DIR", &self.folder);
        // A rank that gets no core for a while is not silent.
        pp.env("PP_HEARTBEAT_MS", "3000");
        if let Some(Death { rank, chunk, times }) = case.death {
            let fault = format!("kill@{rank}:chunk={chunk}:times={times}");
            pp.env("PP_FAULT", fault);
        }
        output_of(pp.arg("--output").arg(output))?;
        let report: Value = serde_json::from_slice(&fs::read(&report)?)?;
        let restarts = &report["run"]["restarts"];
        let wanted = case.death.map_or(0, |death| death.times);
        ensure!(*restarts == wanted, "{restarts} restarts, not {wanted}");
        Ok(())
    }

    /// With its cuts heeded the film of three scenes is another than without: else its rows show nothing.
    fn check_that_scenes_are_cut(&self, cases: &[Case]) -> Result<()> {
        let flush = cases
            .iter()
            .find(|case| case.clip == Clip::Scenes("flush"))
            .context("no run has scenes")?;
        let [heeded, ignored] = ["flush", "off"].map(|cuts| {
            let clip = Clip::Scenes(cuts);
            let case = Case { clip, ..*flush }.alone();
            let film = self.folder.join(format!("{}.y4m", case.film()));
            self.run(&case, &film)?;
            anyhow::Ok(fs::read(film)?)
        });
        ensure!(heeded? != ignored?, "the three scenes have no cut");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_named_part_has_each_feature_once() {
        let part = cases(true);
        let has = |what: &str, is_it: &dyn Fn(&Case) -> bool| {
            assert!(part.iter().any(is_it), "{what}");
        };
        for pipeline in PIPELINES {
            has(pipeline, &|case| case.pipeline == pipeline);
        }
        for depth in DEPTHS {
            has(&format!("depth {depth}"), &|case| {
                case.depth == depth && case.death.is_some()
            });
        }
        for rank in ["1", "2"] {
            has(&format!("rank {rank} of a group dies"), &|case| {
                let group = case.pipeline.contains("@1+2");
                let death = case.death.map(|death| death.rank.to_string());
                group && death.as_deref() == Some(rank)
            });
        }
        for (clip, _) in WORKS {
            for recompute in [false, true] {
                let case = part.iter().find(|case| case.clip == clip);
                let film = case.map(Case::film).unwrap_or_default();
                has(&format!("{film}, recompute {recompute}"), &|case| {
                    (case.clip, case.recompute) == (clip, recompute)
                });
            }
        }
        for chunk in DEATHS {
            for times in [1, 2] {
                has(&format!("{times} deaths at {chunk}"), &|case| {
                    let death = case.death;
                    death.is_some_and(|death| (death.chunk, death.times) == (chunk, times))
                });
            }
        }
        assert!(part.len() < cases(false).len() / 16);
    }

    #[test]
    fn a_row_says_how_many_passes_it_needs_and_which_ranks_may_be_killed() {
        for (pipeline, passes, ranks) in [
            ("encode@0,phase_b@0,decode@0", 1, &[][..]),
            ("encode@0,phase_b@0,decode@1", 1, &[]),
            ("encode@0,phase_b@1,phase_b@0,phase_b@1,decode@2", 3, &[1]),
            (
                "encode@0,phase_b@1,phase_b@2,phase_b@3,decode@2",
                3,
                &[1, 3],
            ),
            ("encode@0,phase_b@0+1,decode@0", 1, &[1]),
            ("encode@0,phase_b@1+2+10,decode@1", 1, &[2, 10]),
            ("encode@0,(phase_b@1,phase_b@2)*2,decode@0", 4, &[1, 2]),
            ("encode@0,(phase_b@1)*steps,decode@2", 1, &[1]),
        ] {
            assert_eq!(least_passes(pipeline), passes, "{pipeline}");
            assert_eq!(may_restart(pipeline), ranks, "{pipeline}");
        }
    }
}
