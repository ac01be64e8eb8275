//! `pp-trials soak`: long jobs, and a fault at every turn.
//!
//! Each round makes an input video and settings from the seed, runs the job undisturbed, and then again while ranks that
//! may be started again are killed and stopped at random moments. The second output must be the first, byte for byte,
//! and what rank 0 holds must not grow. With hard cuts two outputs may differ, since what a cut overtakes depends on
//! the moment: such a job makes no pass over the frames, each carries its number, and every one that comes out must be
//! the source's, in rising order, with nothing missing but what a cut may overtake. Between the rounds jobs are ended
//! in every other way: a rank killed, drained, aborted.

pub(crate) mod film;
mod job;

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pp_command::{print, whole};
use pp_contract::{Pipeline, Rank};
use pp_job::Error;
use pp_testing::process::{Ended, Footprint, signal};
use pp_testing::{Random, words};
use rustix::process::Signal;

use self::film::{Dropped, FRAME_BYTES, Film};
use self::job::Job;
use crate::trial::TWO;

/// Chunks of a round, and the minutes that rounds go on for, by default.
const CHUNKS: u64 = 100_000;
const MINUTES: u32 = 10;
/// The fewest: a quarter of them fills what rank 0 remembers of its last chunks (16,384 records).
const FEWEST_CHUNKS: u64 = 4 * 16_384;
/// By then a job has made all that it makes once.
const WARM_UP: u64 = 1_000;
/// Chunks between two faults, at most.
const FAULTS_WITHIN: u64 = 1_500;
/// What rank 0 may hold more at any time than in its first quarter, and beside that for each fault: it remembers why,
/// when and how long.
const MAY_GROW_KIB: u64 = 256;
const FAULT_KIB: u64 = 2;
/// Time between two looks at a job.
const LOOK: Duration = Duration::from_millis(2);

/// The arguments of `pp-trials soak`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct SoakArgs {
    /// Chunks of each job, 65536 to 18446744073709551615; by default 100000. One round, unless --minutes says otherwise.
    #[arg(long, value_name = "N", value_parser = whole(FEWEST_CHUNKS..=u64::MAX))]
    chunks: Option<u64>,
    /// Minutes that rounds go on for, 0 to 100000; by default 10.
    #[arg(long, value_name = "N", value_parser = whole(0..=100_000_u32))]
    minutes: Option<u32>,
    /// The same seed, 0 to 18446744073709551615, gives the same settings and moments; by default another each time.
    #[arg(long, value_name = "S", value_parser = whole(0..=u64::MAX))]
    seed: Option<u64>,
    /// The pipeline of the jobs. Its ranks without source and sink are killed and stopped.
    #[arg(long, value_name = "STAGES", default_value = TWO)]
    pipeline: Pipeline,
}

/// Runs rounds until the time is up, and stops at the first that is not as it must be.
pub(crate) fn soak(args: &SoakArgs) -> std::result::Result<(), Error> {
    let pipeline = &args.pipeline;
    if pipeline.restartable().next().is_none() {
        return Err(Error::Usage(format!(
            "--pipeline {pipeline}: no rank of it may be started again, since each has the source or the sink; give it \
             a rank between them"
        )));
    }
    // A number of chunks without minutes is that one job.
    let one_round_minutes = if args.chunks.is_some() { 0 } else { MINUTES };
    let minutes = args.minutes.unwrap_or(one_round_minutes);
    let chunks = args.chunks.unwrap_or(CHUNKS);
    let seed = args.seed.unwrap_or(std::process::id().into());
    print(&format!(
        "seed {seed}: the same seed gives the same settings and moments\n\n\
         | chunks | ranks killed | stopped | frames dropped by hard cuts | memory of rank 0 at chunk {WARM_UP} | at the end | settings |\n\
         |---|---|---|---|---|---|---|\n"
    ))?;
    let until = Instant::now() + Duration::from_secs(60 * u64::from(minutes));
    let mut random = Random::new(seed);
    let mut rounds = 0;
    while rounds == 0 || Instant::now() < until {
        let seed = random.any();
        // Live video is the hardest: it comes first. It takes a stage that may leave frames as they are.
        let cuts = match rounds {
            _ if parts(pipeline) > 0 => random.pick(&["flush", "off"]),
            0 => "hard",
            _ => random.pick(&["hard", "flush", "off"]),
        };
        rounds += 1;
        let row = round(seed, pipeline, chunks, cuts);
        print(&row.with_context(|| format!("round {rounds}, seed {seed}"))?)?;
    }
    print(&format!(
        "\n{rounds} rounds, {} chunks under faults: nothing lost, doubled, changed or left behind, and rank 0 did not grow\n",
        rounds * chunks
    ))
}

/// The most parts that a stage is cut into, each of which takes a step; 0 where each stage stands once.
fn parts(pipeline: &Pipeline) -> u64 {
    let parts = pipeline.stages().iter().map(|stage| stage.parts as u64);
    parts.max().filter(|parts| *parts > 1).unwrap_or(0)
}

/// How a round's jobs are started.
struct Settings {
    args: Vec<String>,
    may_restart: Vec<Rank>,
    /// The number of ranks.
    world: u32,
    chunks: u64,
    frames_per_chunk: u64,
    depth: u64,
    film: Film,
}

/// What a job has to write.
enum Wanted {
    /// This.
    Same(Vec<u8>),
    /// Frames of the input video, but for those that a hard cut overtook.
    WithoutOvertaken,
}

impl Settings {
    fn new(random: &mut Random, pipeline: &Pipeline, chunks: u64, cuts: &str) -> Self {
        let frames_per_chunk = 1 + random.below(4);
        let depth = 1 + random.below(4);
        // Each part of a stage makes a step.
        let steps = parts(pipeline) + random.below(3);
        // Frames that are not changed say which they are.
        let steps = if cuts == "hard" { 0 } else { steps };
        let strength = random.pick(&["auto", "8"]);
        let more = format!(
            "--frames-per-chunk {frames_per_chunk} --depth {depth} --denoise-steps {steps} --strength {strength} \
             --cuts {cuts} --threads 1"
        );
        let mut args = vec!["--pipeline".to_owned(), pipeline.to_string()];
        args.extend(words(&more).into_iter().map(str::to_owned));
        if random.below(3) == 0 {
            args.push("--recompute".to_owned());
        }
        Self {
            args,
            may_restart: pipeline.restartable().collect(),
            world: pipeline.world_size().get(),
            chunks,
            frames_per_chunk,
            depth,
            film: Film {
                frames: chunks * frames_per_chunk,
                seed: random.any(),
            },
        }
    }

    /// What an undisturbed job writes.
    fn wanted(&self) -> Result<Wanted> {
        if self.args.iter().any(|arg| arg == "hard") {
            return Ok(Wanted::WithoutOvertaken);
        }
        let job = Job::start(&self.args, self.film.clone())?;
        ended_well(job.end()?).map(Wanted::Same)
    }

    /// Compares what a job wrote with what it has to write, as far as it came.
    fn check(&self, wanted: &Wanted, film: &[u8], is_whole: bool) -> Result<Dropped> {
        match wanted {
            Wanted::Same(wanted) if is_whole => compare(wanted, film),
            Wanted::Same(wanted) => compare(&wanted[..film.len().min(wanted.len())], film),
            Wanted::WithoutOvertaken => {
                let in_flight = self.depth * self.frames_per_chunk;
                return self.film.check(film, in_flight, is_whole);
            }
        }
        .map(|()| Dropped::default())
    }

    fn with(&self, more: &[&str]) -> Vec<String> {
        let more = more.iter().map(|arg| (*arg).to_owned());
        self.args.iter().cloned().chain(more).collect()
    }

    fn chunk_bytes(&self) -> u64 {
        self.frames_per_chunk * FRAME_BYTES
    }
}

/// One round: an undisturbed job, one under faults, and one that is ended otherwise. The row of the table.
fn round(seed: u64, pipeline: &Pipeline, chunks: u64, cuts: &str) -> Result<String> {
    let mut random = Random::new(seed);
    let settings = Settings::new(&mut random, pipeline, chunks, cuts);
    let wanted = settings.wanted()?;
    let Faults {
        killed,
        stopped,
        dropped,
        held: [warm, last],
    } = under_faults(&settings, &mut random, &wanted)?;
    end_otherwise(&settings, &mut random, &wanted)?;
    Ok(format!(
        "| {chunks} | {killed} | {stopped} | {} in {} cuts | {} KiB | {} KiB | `{}` |\n",
        dropped.frames,
        dropped.cuts,
        warm.anonymous_kib,
        last.anonymous_kib,
        settings.args.join(" ")
    ))
}

/// The output of a job that must have ended well.
pub(crate) fn ended_well(ended: Ended) -> Result<Vec<u8>> {
    ensure!(
        ended.code == Some(0),
        "the job ended with {:?}: {}",
        ended.code,
        ended.stderr.trim()
    );
    Ok(ended.stdout)
}

/// What a job under faults came to.
struct Faults {
    killed: u64,
    stopped: u64,
    dropped: Dropped,
    /// What rank 0 held after its warm-up, and at its end.
    held: [Footprint; 2],
}

/// The job again, while ranks die and fall silent; how often each was done.
fn under_faults(settings: &Settings, random: &mut Random, wanted: &Wanted) -> Result<Faults> {
    let args = settings.with(&["--restarts", "100000"]);
    let mut job = Job::start(&args, settings.film.clone())?;
    let (mut killed, mut stopped) = (0, 0);
    let mut due = random.below(FAULTS_WITHIN) * settings.chunk_bytes();
    let mut warm = None;
    let (mut early, mut late, mut last) = Default::default();
    let quarter = settings.chunks / 4 * settings.chunk_bytes();
    while job.goes_on()? {
        thread::sleep(LOOK);
        let written = job.written();
        if let Some(now) = job.rank(Rank::new(0)).and_then(Footprint::of) {
            let most: &mut Footprint = if written < quarter {
                &mut early
            } else {
                &mut late
            };
            *most = most.max(now);
            if warm.is_none() && written >= WARM_UP * settings.chunk_bytes() {
                warm = Some(now);
            }
            last = now;
        }
        if written < due {
            continue;
        }
        // Also in the middle of a recovery, when there may be none.
        let one = settings.may_restart[random.below(settings.may_restart.len() as u64) as usize];
        let Some(pid) = job.rank(one) else {
            continue;
        };
        if random.below(8) == 0 {
            stopped += u64::from(signal(pid, Signal::STOP));
        } else {
            killed += u64::from(signal(pid, Signal::KILL));
        }
        // Sometimes at once again: the one that has just been started.
        let next = if random.below(4) == 0 {
            0
        } else {
            random.below(FAULTS_WITHIN)
        };
        due = written + next * settings.chunk_bytes();
    }
    let film = ended_well(job.end()?)?;
    let dropped = settings.check(wanted, &film, true)?;
    ensure!(
        late.anonymous_kib <= early.anonymous_kib + MAY_GROW_KIB + FAULT_KIB * (killed + stopped)
            && late.descriptors <= early.descriptors + 4
            && late.threads <= early.threads + 2,
        "rank 0 grows: {early:?} in its first quarter, {late:?} later"
    );
    Ok(Faults {
        killed,
        stopped,
        dropped,
        held: [warm.unwrap_or(last), last],
    })
}

fn compare(wanted: &[u8], got: &[u8]) -> Result<()> {
    ensure!(
        wanted.len() == got.len(),
        "the film has {} bytes, {} undisturbed",
        got.len(),
        wanted.len()
    );
    match wanted.iter().zip(got).position(|(a, b)| a != b) {
        Some(at) => bail!(
            "the films differ at byte {at}, in frame {}",
            at as u64 / FRAME_BYTES
        ),
        None => Ok(()),
    }
}

/// A job that is ended in the middle, from outside.
fn end_otherwise(settings: &Settings, random: &mut Random, wanted: &Wanted) -> Result<()> {
    let how = random.pick(&["kill a rank", "drain", "abort"]);
    let one = Rank::new(random.below(settings.world.into()) as u32);
    let mut job = Job::start(&settings.args, settings.film.clone())?;
    let due = (1 + random.below(settings.chunks / 2)) * settings.chunk_bytes();
    while job.goes_on()? && job.written() < due {
        thread::sleep(LOOK);
    }
    match how {
        "kill a rank" => drop(job.rank(one).map(|pid| signal(pid, Signal::KILL))),
        "drain" => job.signal(Signal::INT),
        _ => {
            // The same signal again, at once, would count as one.
            job.signal(Signal::INT);
            job.signal(Signal::TERM);
        }
    }
    let ended = job.end().with_context(|| format!("{how} (rank {one})"))?;
    // A fast job may be done before any signal.
    let expected: &[i32] = match how {
        "drain" | "abort" => &[0, 130],
        _ => &[0, 7],
    };
    ensure!(
        ended.code.is_some_and(|code| expected.contains(&code)),
        "{how}: it ended with {:?}: {}",
        ended.code,
        ended.stderr.trim()
    );
    // What was written is right as far as it goes: to a pipe everything goes at once.
    let checked = settings.check(wanted, &ended.stdout, false);
    checked.with_context(|| format!("{how}: what it wrote is not how the film begins"))?;
    Ok(())
}
