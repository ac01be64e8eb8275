//! `cargo xtask soak`: jobs without end, and a fault at every turn.
//!
//! Each round makes a film and settings from the seed, runs the job undisturbed, and then again
//! while Phase B is killed and stopped at moments that nobody chose. The second film must be the
//! first, byte for byte, and what the front holds must not grow. Between the rounds jobs are ended
//! in every other way: the front killed, drained, aborted.

mod film;
mod job;
mod random;
mod ranks;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use self::film::{FRAME_BYTES, Film};
use self::job::{Ended, Job};
use self::random::Random;
use self::ranks::{Held, held, signal};
use crate::process::build_pp;

/// Chunks of a round.
const CHUNKS: u64 = 10_000;
/// Chunks between two faults, at most.
const FAULTS_WITHIN: u64 = 1_500;
/// What the front may hold more at the end than after its first quarter.
const MAY_GROW_KIB: u64 = 4096;
/// Time between two looks at a job.
const LOOK: Duration = Duration::from_millis(2);

/// What is to be done, from the command line.
struct Options {
    minutes: f64,
    seed: u64,
}

/// What was done.
#[derive(Default)]
struct Totals {
    rounds: u64,
    chunks: u64,
    killed: u64,
    stopped: u64,
    ended: u64,
}

/// Runs rounds until the time is up, and stops at the first that is not as it must be.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let options = options(args)?;
    let pp = build_pp()?;
    println!(
        "seed {}: the same seed gives the same settings and moments",
        options.seed
    );
    let until = Instant::now() + Duration::from_secs_f64(options.minutes * 60.0);
    let mut random = Random::new(options.seed);
    let mut totals = Totals::default();
    while totals.rounds == 0 || Instant::now() < until {
        totals.rounds += 1;
        let seed = random.next();
        let round = totals.rounds;
        one_round(&pp, seed, &mut totals).with_context(|| format!("round {round}, seed {seed}"))?;
    }
    let Totals {
        rounds,
        chunks,
        killed,
        stopped,
        ended,
    } = totals;
    println!(
        "{rounds} rounds, {chunks} chunks under faults: Phase B killed {killed} times and stopped \
         {stopped} times, {ended} jobs ended otherwise; nothing lost, doubled, changed or left behind"
    );
    Ok(())
}

fn options(args: &[String]) -> Result<Options> {
    let mut options = Options {
        minutes: 10.0,
        seed: std::process::id().into(),
    };
    let mut args = args.iter();
    while let Some(flag) = args.next() {
        let value = args
            .next()
            .with_context(|| format!("{flag} takes a value"))?;
        match flag.as_str() {
            "--minutes" => {
                options.minutes = value
                    .parse()
                    .ok()
                    .filter(|m| (0.0..=1e5).contains(m))
                    .with_context(|| {
                        format!("--minutes is {value:?}; it takes minutes from 0 to 100000")
                    })?;
            }
            "--seed" => {
                options.seed = value
                    .parse()
                    .with_context(|| format!("--seed is {value:?}; it takes a whole number"))?;
            }
            other => bail!("no option {other:?}; there are --minutes N and --seed N"),
        }
    }
    Ok(options)
}

/// How a round's jobs are started.
struct Settings {
    args: Vec<String>,
    frames_per_chunk: u64,
    film: Film,
}

impl Settings {
    fn new(random: &mut Random) -> Self {
        let frames_per_chunk = 1 + random.below(4);
        let mut args = vec![
            "--frames-per-chunk".to_owned(),
            frames_per_chunk.to_string(),
            "--depth".to_owned(),
            (1 + random.below(4)).to_string(),
            "--denoise-steps".to_owned(),
            random.below(3).to_string(),
            "--strength".to_owned(),
            random.pick(&["auto", "8"]).to_owned(),
            "--cuts".to_owned(),
            random.pick(&["flush", "off"]).to_owned(),
            "--threads".to_owned(),
            "1".to_owned(),
        ];
        if random.below(3) == 0 {
            args.push("--recompute".to_owned());
        }
        Self {
            args,
            frames_per_chunk,
            film: Film {
                frames: CHUNKS * frames_per_chunk,
                seed: random.next(),
            },
        }
    }

    fn with(&self, more: &[&str]) -> Vec<String> {
        let more = more.iter().map(|arg| (*arg).to_owned());
        self.args.iter().cloned().chain(more).collect()
    }

    fn chunk_bytes(&self) -> u64 {
        self.frames_per_chunk * FRAME_BYTES
    }
}

/// Heartbeats that a machine full of jobs can keep; and no minute's wait for a Phase B that was
/// stopped before it had come.
fn patience() -> [(&'static str, String); 2] {
    [
        ("PP_HEARTBEAT_MS", "250".to_owned()),
        ("PP_RESTART_WITHIN_MS", "3000".to_owned()),
    ]
}

fn one_round(pp: &Path, seed: u64, totals: &mut Totals) -> Result<()> {
    let mut random = Random::new(seed);
    let settings = Settings::new(&mut random);
    let started = Instant::now();
    let job = Job::start(pp, &settings.args, &patience(), settings.film.clone())?;
    let undisturbed = ended_well(job.end()?)?;
    let (calm, started) = (started.elapsed(), Instant::now());
    let (killed, stopped) = under_faults(pp, &settings, &mut random, &undisturbed)?;
    let disturbed = started.elapsed();
    end_otherwise(pp, &settings, &mut random, &undisturbed)?;
    totals.chunks += CHUNKS;
    totals.killed += killed;
    totals.stopped += stopped;
    totals.ended += 1;
    println!(
        "round {}: {CHUNKS} chunks in {calm:.1?}; with Phase B killed {killed} times and stopped \
         {stopped} times in {disturbed:.1?}; {}",
        totals.rounds,
        settings.args.join(" ")
    );
    Ok(())
}

fn ended_well(ended: Ended) -> Result<Vec<u8>> {
    ensure!(
        ended.status.success(),
        "the job ended with {}: {}",
        ended.status,
        ended.said.trim()
    );
    Ok(ended.film)
}

/// The job again, while Phase B dies and falls silent; how often it did each.
fn under_faults(
    pp: &Path,
    settings: &Settings,
    random: &mut Random,
    undisturbed: &[u8],
) -> Result<(u64, u64)> {
    let args = settings.with(&["--restarts", "100000"]);
    let mut job = Job::start(pp, &args, &patience(), settings.film.clone())?;
    let (mut killed, mut stopped) = (0, 0);
    let mut due = random.below(FAULTS_WITHIN) * settings.chunk_bytes();
    let mut early = Held::default();
    let mut late = Held::default();
    let quarter = undisturbed.len() as u64 / 4;
    while job.goes_on()? {
        thread::sleep(LOOK);
        let written = job.written();
        if let Some(now) = job.rank(0).and_then(held) {
            let most = if written < quarter {
                &mut early
            } else {
                &mut late
            };
            most.memory_kib = most.memory_kib.max(now.memory_kib);
            most.files = most.files.max(now.files);
            most.threads = most.threads.max(now.threads);
        }
        if written < due {
            continue;
        }
        // Also in the middle of a recovery, when there may be none.
        let Some(phase_b) = job.rank(1) else {
            continue;
        };
        if random.below(8) == 0 {
            stopped += u64::from(signal(phase_b, "STOP"));
        } else {
            killed += u64::from(signal(phase_b, "KILL"));
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
    compare(undisturbed, &film)?;
    ensure!(
        late.memory_kib <= early.memory_kib + MAY_GROW_KIB
            && late.files <= early.files + 4
            && late.threads <= early.threads + 2,
        "the front grows: {early:?} in its first quarter, {late:?} later"
    );
    Ok((killed, stopped))
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
fn end_otherwise(
    pp: &Path,
    settings: &Settings,
    random: &mut Random,
    undisturbed: &[u8],
) -> Result<()> {
    let how = random.pick(&["kill the front", "kill Phase B", "drain", "abort"]);
    let mut job = Job::start(pp, &settings.args, &patience(), settings.film.clone())?;
    let due = (1 + random.below(CHUNKS / 2)) * settings.chunk_bytes();
    while job.goes_on()? && job.written() < due {
        thread::sleep(LOOK);
    }
    let (front, phase_b) = (job.rank(0), job.rank(1));
    match how {
        "kill the front" => front.map(|pid| signal(pid, "KILL")),
        "kill Phase B" => phase_b.map(|pid| signal(pid, "KILL")),
        "drain" => Some(signal(job.pid(), "INT")),
        _ => {
            signal(job.pid(), "INT");
            Some(signal(job.pid(), "INT"))
        }
    };
    let ended = job.end().with_context(|| how.to_owned())?;
    // Two signals may arrive as one, and a fast job may be done before any.
    let expected: &[i32] = match how {
        "drain" => &[0],
        "abort" => &[0, 130],
        _ => &[0, 7],
    };
    ensure!(
        ended
            .status
            .code()
            .is_some_and(|code| expected.contains(&code)),
        "{how}: it ended with {}: {}",
        ended.status,
        ended.said.trim()
    );
    // What was written is right as far as it goes: to a pipe everything goes at once.
    ensure!(
        undisturbed.starts_with(&ended.film),
        "{how}: what it wrote is not how the film begins"
    );
    Ok(())
}
