//! `cargo xtask soak [--chunks N] [--minutes N] [--seed S]`: long jobs, and a fault at every turn.
//!
//! Each round makes a film and settings from the seed, runs the job undisturbed, and then again while Phase B is killed and
//! stopped at moments that nobody chose. The second film must be the first, byte for byte, and what the front holds must
//! not grow. With hard cuts two films may differ, since what a cut overtakes depends on the moment: such a job makes no
//! pass over the frames, each carries its number, and every one that comes out must be the source's, in rising order, with
//! nothing missing but what a cut may overtake. Between the rounds jobs are ended in every other way: the front killed,
//! drained, aborted.

mod film;
mod job;
mod random;
mod ranks;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use self::film::{Dropped, FRAME_BYTES, Film};
use self::job::{Ended, Job};
use self::random::Random;
use self::ranks::{Held, held, signal};
use crate::process::{build_pp, git};

/// Chunks of a round, and the minutes that rounds go on for, when nobody says how many.
const CHUNKS: u64 = 100_000;
const MINUTES: f64 = 10.0;
/// The fewest: a quarter of them fills what the front remembers of its last chunks (16,384 records).
const FEWEST_CHUNKS: u64 = 4 * 16_384;
/// By then a job has made all that it makes once.
const WARM_UP: u64 = 1_000;
/// Chunks between two faults, at most.
const FAULTS_WITHIN: u64 = 1_500;
/// What the front may hold more at any time than in its first quarter, and beside that for each fault: it remembers why,
/// when and how long.
const MAY_GROW_KIB: u64 = 256;
const FAULT_KIB: u64 = 2;
/// Time between two looks at a job.
const LOOK: Duration = Duration::from_millis(2);

/// What is to be done, from the command line.
struct Options {
    chunks: u64,
    minutes: f64,
    seed: u64,
}

/// Runs rounds until the time is up, and stops at the first that is not as it must be.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let Options {
        chunks,
        minutes,
        seed,
    } = options(args)?;
    let pp = build_pp()?;
    println!(
        "commit {}, seed {seed}: the same seed gives the same settings and moments\n\n\
         | chunks | Phase B killed | stopped | frames dropped by hard cuts | memory of the front at chunk {WARM_UP} | at the end | settings |\n\
         |---|---|---|---|---|---|---|",
        git(&["describe", "--always", "--dirty", "--abbrev=12"])?
    );
    let until = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let mut random = Random::new(seed);
    let mut rounds = 0;
    while rounds == 0 || Instant::now() < until {
        let seed = random.next();
        // Live video is the hardest: it comes first.
        let cuts = match rounds {
            0 => "hard",
            _ => random.pick(&["hard", "flush", "off"]),
        };
        rounds += 1;
        one_round(&pp, seed, chunks, cuts)
            .with_context(|| format!("round {rounds}, seed {seed}"))?;
    }
    println!(
        "\n{rounds} rounds, {} chunks under faults: nothing lost, doubled, changed or left behind, and the front did not grow",
        rounds * chunks
    );
    Ok(())
}

fn options(args: &[String]) -> Result<Options> {
    let (mut chunks, mut minutes) = (None, None);
    let mut seed = std::process::id().into();
    let mut args = args.iter();
    while let Some(flag) = args.next() {
        let value = args
            .next()
            .with_context(|| format!("{flag} takes a value"))?;
        match flag.as_str() {
            "--chunks" => {
                let given = value.parse().ok().filter(|c| *c >= FEWEST_CHUNKS);
                chunks = Some(given.with_context(|| {
                    format!("--chunks is {value:?}; it takes a number from {FEWEST_CHUNKS}")
                })?);
            }
            "--minutes" => {
                let given = value.parse().ok().filter(|m| (0.0..=1e5).contains(m));
                minutes = Some(given.with_context(|| {
                    format!("--minutes is {value:?}; it takes minutes from 0 to 100000")
                })?);
            }
            "--seed" => {
                seed = value
                    .parse()
                    .with_context(|| format!("--seed is {value:?}; it takes a whole number"))?;
            }
            other => bail!("no option {other:?}; there are --chunks N, --minutes N and --seed N"),
        }
    }
    // Who says how many chunks wants that one job.
    let minutes = minutes.unwrap_or(if chunks.is_some() { 0.0 } else { MINUTES });
    Ok(Options {
        chunks: chunks.unwrap_or(CHUNKS),
        minutes,
        seed,
    })
}

/// How a round's jobs are started.
struct Settings {
    args: Vec<String>,
    chunks: u64,
    frames_per_chunk: u64,
    depth: u64,
    film: Film,
}

/// What a job has to write.
enum Wanted {
    /// This.
    Same(Vec<u8>),
    /// Frames of the film, but for those that a hard cut overtook.
    WithoutOvertaken,
}

impl Settings {
    fn new(random: &mut Random, chunks: u64, cuts: &str) -> Self {
        let frames_per_chunk = 1 + random.below(4);
        let depth = 1 + random.below(4);
        let steps = random.below(3);
        let mut args = vec![
            "--frames-per-chunk".to_owned(),
            frames_per_chunk.to_string(),
            "--depth".to_owned(),
            depth.to_string(),
            "--denoise-steps".to_owned(),
            // Frames that are not changed say which they are.
            if cuts == "hard" { 0 } else { steps }.to_string(),
            "--strength".to_owned(),
            random.pick(&["auto", "8"]).to_owned(),
            "--cuts".to_owned(),
            cuts.to_owned(),
            "--threads".to_owned(),
            "1".to_owned(),
        ];
        if random.below(3) == 0 {
            args.push("--recompute".to_owned());
        }
        Self {
            args,
            chunks,
            frames_per_chunk,
            depth,
            film: Film {
                frames: chunks * frames_per_chunk,
                seed: random.next(),
            },
        }
    }

    /// What an undisturbed job writes.
    fn wanted(&self, pp: &Path) -> Result<Wanted> {
        if self.args.iter().any(|arg| arg == "hard") {
            return Ok(Wanted::WithoutOvertaken);
        }
        let job = Job::start(pp, &self.args, &environment(), self.film.clone())?;
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

/// Heartbeats that a machine full of jobs can keep; no minute's wait for a Phase B that was stopped
/// before it had come; and one heap, since how many there are hangs on which threads meet.
fn environment() -> [(&'static str, String); 3] {
    [
        ("PP_HEARTBEAT_MS", "1000".to_owned()),
        ("PP_RESTART_WITHIN_MS", "3000".to_owned()),
        ("MALLOC_ARENA_MAX", "1".to_owned()),
    ]
}

fn one_round(pp: &Path, seed: u64, chunks: u64, cuts: &str) -> Result<()> {
    let mut random = Random::new(seed);
    let settings = Settings::new(&mut random, chunks, cuts);
    let wanted = settings.wanted(pp)?;
    let Faults {
        killed,
        stopped,
        dropped,
        held: [warm, last],
    } = under_faults(pp, &settings, &mut random, &wanted)?;
    end_otherwise(pp, &settings, &mut random, &wanted)?;
    println!(
        "| {chunks} | {killed} | {stopped} | {} in {} cuts | {} KiB | {} KiB | `{}` |",
        dropped.frames,
        dropped.cuts,
        warm.memory_kib,
        last.memory_kib,
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

/// What a job under faults came to.
struct Faults {
    killed: u64,
    stopped: u64,
    dropped: Dropped,
    /// What the front held after its warm-up, and at its end.
    held: [Held; 2],
}

/// The job again, while Phase B dies and falls silent; how often it did each.
fn under_faults(
    pp: &Path,
    settings: &Settings,
    random: &mut Random,
    wanted: &Wanted,
) -> Result<Faults> {
    let args = settings.with(&["--restarts", "100000"]);
    let mut job = Job::start(pp, &args, &environment(), settings.film.clone())?;
    let (mut killed, mut stopped) = (0, 0);
    let mut due = random.below(FAULTS_WITHIN) * settings.chunk_bytes();
    let mut warm = None;
    let (mut early, mut late, mut last) = Default::default();
    let quarter = settings.chunks / 4 * settings.chunk_bytes();
    while job.goes_on()? {
        thread::sleep(LOOK);
        let written = job.written();
        if let Some(now) = job.rank(0).and_then(held) {
            let most: &mut Held = if written < quarter {
                &mut early
            } else {
                &mut late
            };
            most.memory_kib = most.memory_kib.max(now.memory_kib);
            most.files = most.files.max(now.files);
            most.threads = most.threads.max(now.threads);
            if warm.is_none() && written >= WARM_UP * settings.chunk_bytes() {
                warm = Some(now);
            }
            last = now;
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
    let dropped = settings.check(wanted, &film, true)?;
    ensure!(
        late.memory_kib <= early.memory_kib + MAY_GROW_KIB + FAULT_KIB * (killed + stopped)
            && late.files <= early.files + 4
            && late.threads <= early.threads + 2,
        "the front grows: {early:?} in its first quarter, {late:?} later"
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
fn end_otherwise(
    pp: &Path,
    settings: &Settings,
    random: &mut Random,
    wanted: &Wanted,
) -> Result<()> {
    let how = random.pick(&["kill the front", "kill Phase B", "drain", "abort"]);
    let mut job = Job::start(pp, &settings.args, &environment(), settings.film.clone())?;
    let due = (1 + random.below(settings.chunks / 2)) * settings.chunk_bytes();
    while job.goes_on()? && job.written() < due {
        thread::sleep(LOOK);
    }
    let (front, phase_b) = (job.rank(0), job.rank(1));
    match how {
        "kill the front" => front.map(|pid| signal(pid, "KILL")),
        "kill Phase B" => phase_b.map(|pid| signal(pid, "KILL")),
        "drain" => Some(signal(job.pid(), "INT")),
        _ => {
            // The same signal again, at once, would count as one.
            signal(job.pid(), "INT");
            Some(signal(job.pid(), "TERM"))
        }
    };
    let ended = job.end().with_context(|| how.to_owned())?;
    // A fast job may be done before any signal.
    let expected: &[i32] = match how {
        "drain" | "abort" => &[0, 130],
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
    let checked = settings.check(wanted, &ended.film, false);
    checked.with_context(|| format!("{how}: what it wrote is not how the film begins"))?;
    Ok(())
}
