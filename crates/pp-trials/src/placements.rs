//! `pp-trials placements`: the shipped job on every placement gives the bytes of one process.
//!
//! Hazard: a chunk that is rounded, dropped or computed without its past on one placement alone. Guarantee: the film of
//! a clip is the same, byte for byte, however the stages stand on ranks, each rank a process, also when a rank is killed
//! and started again.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pp_contract::{Pipeline, Rank};
use pp_job::Error;
use pp_testing::process::{Output, Process};
use pp_testing::video;
use serde_json::Value;

use crate::hook::VARIABLE;
use crate::trial::{Ended, Ground, TWO, Trial, TrialArgs, beside_cpus, run_in, run_of};

/// The placements. All that a row needs follows from its text: the fewest passes, and the ranks that may be killed.
const PIPELINES: [&str; 27] = [
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
    "encode@0,phase_b@1+0,decode@1",
    "encode@0,phase_b@1+2,decode@0",
    "encode@0,phase_b@0+1+2,decode@0",
    "encode@0,phase_b@1+2+3,decode@0",
    "encode@0,phase_b@1+2,decode@3",
    "encode@0,phase_b@0+1,phase_b@1,decode@1",
    "encode@0,phase_b@1+2,phase_b@3,decode@0",
    // Rings: with rank 0 inside, on ranks of their own, and with the sink apart.
    "encode@0,(phase_b@0,phase_b@1)*2,decode@0",
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
/// A job that has not ended by then never will.
const DEADLINE: Duration = Duration::from_secs(300);

/// The input of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// The settings of the job, but for what a death needs.
    fn args(&self) -> Vec<String> {
        let mut args = vec![
            format!("--denoise-steps={}", self.passes),
            format!("--depth={}", self.depth),
        ];
        if self.recompute {
            args.push("--recompute".to_owned());
        }
        if let Clip::Scenes(cuts) = self.clip {
            args.push(format!("--cuts={cuts}"));
        }
        args
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

    fn pipeline(&self) -> Pipeline {
        self.pipeline.parse().expect("a pipeline of ours")
    }
}

impl Trial for Case {
    fn name(&self) -> String {
        let mut name = format!("{} {}", self.pipeline, self.args().join(" "));
        if let Some(Death { rank, chunk, times }) = self.death {
            name += &format!(", rank {rank} killed {times} times at chunk {chunk}");
        }
        name
    }

    fn features(&self) -> Vec<String> {
        let (clip, recompute) = (self.clip, self.recompute);
        let more = self.passes - least_passes(self.pipeline);
        let mut features = vec![
            self.pipeline.to_owned(),
            format!("{clip:?}, {more} passes more, recompute {recompute}"),
        ];
        match self.death {
            Some(Death { rank, chunk, times }) => {
                features.push(format!("killed at depth {}", self.depth));
                features.push(format!("killed {times} times at chunk {chunk}"));
                if self.pipeline.contains("@1+2") {
                    features.push(format!("rank {rank} of a group killed"));
                }
            }
            // It has what the run with a death beside it has.
            None if self.pipeline().restartable().next().is_some() => features.clear(),
            None => {}
        }
        features
    }

    fn means(&self, _: Ground) -> String {
        String::new()
    }

    fn not_here(&self, ground: Ground) -> Option<&'static str> {
        let has = ground.has_gpus(&self.pipeline(), true);
        (!has).then_some("there is no GPU for each rank")
    }
}

/// All runs.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut deaths = 0;
    for pipeline in PIPELINES {
        let parsed: Pipeline = pipeline.parse().expect("a pipeline of ours");
        let may_die: Vec<u32> = parsed.restartable().map(Rank::get).collect();
        for depth in DEPTHS {
            for recompute in [false, true] {
                for (clip, more) in WORKS {
                    let calm = Case {
                        pipeline,
                        depth,
                        passes: least_passes(pipeline) + more,
                        recompute,
                        clip,
                        death: None,
                    };
                    cases.push(calm);
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

/// The arguments of `pp-trials placements`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct PlacementsArgs {
    /// The clip: Y4M of 8 bits, 4:2:0, with at least 12 chunks of 4 frames and no scene cut; by default one of 96x64 that is
    /// made up.
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Put the ranks that have no phase_b on CPUs, beside the GPUs of --transport p2p.
    #[arg(long)]
    beside_cpus: bool,
    #[command(flatten)]
    trials: TrialArgs,
}

/// Runs the list, and compares each film with that of one process.
pub(crate) fn placements(args: &PlacementsArgs) -> Result<(), Error> {
    let (sample, name) = match &args.input {
        None => (video(96, 64, "420jpeg", 48), "the clip".to_owned()),
        Some(path) => {
            let read = fs::read(path).with_context(|| format!("cannot read {}", path.display()));
            (read?, format!("--input {}", path.display()))
        }
    };
    let job = PlacedJob {
        scenes: in_three_scenes(sample.clone()).context(name)?,
        sample,
        ground: args.trials.ground(),
        beside_cpus: args.beside_cpus,
        films: Mutex::default(),
    };
    let fewest = job
        .ground
        .fewest_gpus(&TWO.parse().expect("a pipeline of ours"), true);
    if args.beside_cpus && (job.ground.is_host() || job.ground.has_nccl()) {
        return Err(Error::Usage(
            "--beside-cpus needs ranks on GPUs that copy to each other; add --transport p2p".into(),
        ));
    }
    args.trials
        .run("placements", fewest, cases(), |case, folder, told| {
            if let Err(error) = job.compare(case, folder) {
                told.wrong.push(format!("{error:#}"));
            }
        })
}

/// The film of a job on one process, or why there is none.
type OneProcessFilm = Arc<OnceLock<Result<Vec<u8>, String>>>;

/// What the jobs have in common.
struct PlacedJob {
    sample: Vec<u8>,
    /// The clip with two scene cuts.
    scenes: Vec<u8>,
    ground: Ground,
    beside_cpus: bool,
    /// Films of one process, by the settings that make them.
    films: Mutex<BTreeMap<String, OneProcessFilm>>,
}

impl PlacedJob {
    /// Holds the film of a placement against that of one process.
    fn compare(&self, case: &Case, folder: &Path) -> Result<()> {
        let expected = self.film_of_one(&case.alone(), folder)?;
        let film = expected.get().and_then(|film| film.as_deref().ok());
        if case.clip == Clip::Scenes("flush") {
            // With its cuts heeded the film is another than without: else these rows show nothing.
            let clip = Clip::Scenes("off");
            let ignored = self.film_of_one(
                &Case {
                    clip,
                    ..case.alone()
                },
                folder,
            )?;
            let ignored = ignored.get().and_then(|film| film.as_deref().ok());
            ensure!(film != ignored, "the three scenes have no cut");
        }
        let made = self.run(case, folder)?;
        ensure!(
            Some(&*made) == film,
            "the film differs from that of one process"
        );
        Ok(())
    }

    /// The film of one process, which the first that wants it makes.
    fn film_of_one(&self, alone: &Case, folder: &Path) -> Result<OneProcessFilm> {
        let mut films = self.films.lock().unwrap_or_else(PoisonError::into_inner);
        let film = Arc::clone(films.entry(alone.name()).or_default());
        drop(films);
        let made = film.get_or_init(|| self.run(alone, folder).map_err(|e| format!("{e:#}")));
        if let Err(error) = made {
            bail!("no film of one process: {error}");
        }
        Ok(film)
    }

    /// Runs the job; its film. A rank that was to die has died, and no other.
    fn run(&self, case: &Case, folder: &Path) -> Result<Vec<u8>> {
        let mut pp = Command::new(std::env::current_exe()?);
        match self.beside_cpus {
            false => run_in(folder, self.ground, &case.pipeline(), &mut pp)?,
            true => {
                run_of(folder, &case.pipeline(), &mut pp)?;
                pp.args(["--transport", "p2p", "--devices"]);
                pp.arg(beside_cpus(&case.pipeline()));
            }
        }
        let [report, output, input] =
            ["report.json", "out.y4m", "in.y4m"].map(|name| folder.join(name));
        let clip = match case.clip {
            Clip::Sample => &self.sample,
            Clip::Scenes(_) => &self.scenes,
        };
        fs::write(&input, clip)?;
        pp.arg("--input")
            .arg(&input)
            .args(case.args())
            .arg("--report")
            .arg(&report);
        // A rank that gets no core for a while is not silent.
        pp.env("PP_HEARTBEAT_MS", "3000");
        if let Some(Death { rank, chunk, times }) = case.death {
            pp.arg(format!("--restarts={times}"));
            pp.env(VARIABLE, format!("kill@{rank}:chunk={chunk}:times={times}"));
        }
        let _ = fs::remove_file(&output);
        let job = Process::start(pp.arg("--output").arg(&output), Output::Counted)?;
        job.ends(Instant::now() + DEADLINE);
        Ended::of(&job).check(&[0]).map_err(anyhow::Error::msg)?;
        let report: Value = serde_json::from_slice(&fs::read(&report)?)?;
        let restarts = &report["run"]["restarts"];
        let wanted = case.death.map_or(0, |death| death.times);
        ensure!(*restarts == wanted, "{restarts} restarts, not {wanted}");
        Ok(fs::read(&output)?)
    }
}

/// The clip as three scenes: the middle third of its frames has the luma of a negative.
fn in_three_scenes(mut clip: Vec<u8>) -> Result<Vec<u8>> {
    const FRAME: &[u8] = b"FRAME\n";
    let end = clip.iter().position(|byte| *byte == b'\n');
    let end = end.context("it is no Y4M file")?;
    ensure!(clip.starts_with(b"YUV4MPEG2 "), "it is no Y4M file");
    let header = String::from_utf8_lossy(&clip[..end]).into_owned();
    let size = |letter| {
        let mut words = header.split(' ').skip(1);
        let word = words.find_map(|word| word.strip_prefix(letter)?.parse::<usize>().ok());
        word.with_context(|| format!("its header has no {letter}: {header:?}"))
    };
    let (width, height) = (size('W')?, size('H')?);
    let luma = width * height;
    let bytes = FRAME.len() + luma + 2 * width.div_ceil(2) * height.div_ceil(2);
    let frames = &mut clip[end + 1..];
    let third = frames.len() / bytes / 3;
    let whole = frames.len().is_multiple_of(bytes) && frames.starts_with(FRAME);
    ensure!(whole && third > 0, "it has no whole frames of 4:2:0");
    for frame in frames.chunks_exact_mut(bytes).skip(third).take(third) {
        for sample in &mut frame[FRAME.len()..FRAME.len() + luma] {
            *sample = !*sample;
        }
    }
    Ok(clip)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trial::choose;

    #[test]
    fn the_middle_of_three_scenes_is_a_negative() {
        let clip = |frames| pp_testing::scenes(6, 4, "420jpeg", frames, frames);
        let (plain, cut) = (clip(48), in_three_scenes(clip(48)).unwrap());
        let bytes = 6 + 24 + 2 * 6;
        let header = plain.len() % bytes;
        let [plain, cut] = [&plain, &cut].map(|clip| clip[header..].chunks_exact(bytes));
        for (n, (plain, cut)) in plain.zip(cut).enumerate() {
            assert_eq!(cut[..6], *b"FRAME\n", "frame {n}");
            assert_eq!(plain != cut, (16..32).contains(&n), "frame {n}");
        }
        for not_whole in [
            &clip(48)[1..],
            &clip(48)[..clip(48).len() - 1],
            b"YUV4MPEG2",
        ] {
            assert!(in_three_scenes(not_whole.to_vec()).is_err());
        }
    }

    #[test]
    fn a_part_kills_ranks_on_each_pipeline_and_is_short() {
        let mut part = cases();
        choose(&mut part, "any");
        for pipeline in PIPELINES {
            let mut of_it = part.iter().filter(|case| case.pipeline == pipeline);
            let case = of_it.next().expect(pipeline);
            let may_die = case.pipeline().restartable().next().is_some();
            assert!(!may_die || case.death.is_some() || of_it.any(|case| case.death.is_some()));
        }
        for rank in [1, 2] {
            let kills = |case: &Case| case.death.is_some_and(|death| death.rank == rank);
            assert!(
                part.iter()
                    .any(|case| case.pipeline.contains("@1+2") && kills(case))
            );
        }
        assert!(part.len() < cases().len() / 24);
    }

    #[test]
    fn a_row_says_how_many_passes_it_needs() {
        for (pipeline, passes) in [
            ("encode@0,phase_b@0,decode@0", 1),
            ("encode@0,phase_b@1,phase_b@0,phase_b@1,decode@2", 3),
            ("encode@0,phase_b@1+2,decode@0", 1),
            ("encode@0,(phase_b@1,phase_b@2)*2,decode@0", 4),
            ("encode@0,(phase_b@1)*steps,decode@2", 1),
        ] {
            assert_eq!(least_passes(pipeline), passes, "{pipeline}");
        }
    }
}
