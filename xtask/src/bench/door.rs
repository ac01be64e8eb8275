//! `cargo xtask bench door`: a job while somebody attacks the place where its ranks meet.
//!
//! Ranks as a launcher starts them, with a port; the attacker is a program of its own, at the lowest
//! priority, because on this machine there is no other for it to run on: what it takes of the
//! processor by being there is no fault of the door. It begins before rank 0 and ends after it.
//! Every round runs each attack once and the job alone once, in turn.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::figures::{mark, median, print_mark, spread};
use super::peers::Contenders;
use crate::process::{built, cargo, command, output};

/// How long an attack goes on; longer than any of the jobs.
const ATTACK_SECONDS: &str = "3.5";
/// An attack takes its time in each round.
const ROUNDS: usize = 3;
/// From the beginning of an attack, and of rank 0, to the beginning of rank 1. Some attacks record
/// first what a rank says.
const HEAD_START: Duration = Duration::from_secs(1);
/// Stage in milliseconds, bytes each way, chunks.
const CASES: [(&str, &str, usize); 2] = [("5", "22118400", 200), ("0", "65536", 100_000)];

struct Attacks<'a> {
    pp: &'a Path,
    attack: PathBuf,
    kinds: Vec<String>,
}

/// What one run showed.
#[derive(Debug)]
struct Seen {
    period_ms: f64,
    period_mean_ms: f64,
    start_ms: f64,
    /// How many connections of the attacker got in, and how many were refused.
    counts: String,
}

/// Prints a row per attack and case.
pub(super) fn run(contenders: &Contenders) -> Result<()> {
    let mut example = cargo("build --release --package pp-transport --example attack");
    let attack = built(&mut example, "attack")?;
    let listed = output(&mut command(&attack))?;
    let attacks = Attacks {
        pp: &contenders.pp,
        attack,
        kinds: listed.lines().map(str::to_owned).collect(),
    };
    ensure!(!attacks.kinds.is_empty(), "the attack client lists nothing");
    for case in CASES {
        attacks.case(case)?;
    }
    Ok(())
}

impl Attacks<'_> {
    fn case(&self, case: (&str, &str, usize)) -> Result<()> {
        let (stage, bytes, chunks) = case;
        println!(
            "\nThe door, stages of {stage} ms that sleep, {bytes} bytes each way, {chunks} chunks, {ROUNDS} rounds\n\
             {:>14} {:>22} {:>10}   {:>10} {:>16} {:>24}",
            "", "period ms, median", "mean", "of alone", "start ms", "got in / refused"
        );
        let kinds: Vec<Option<&str>> = std::iter::once(None)
            .chain(self.kinds.iter().map(|kind| Some(kind.as_str())))
            .collect();
        let mut seen: Vec<Vec<Seen>> = kinds.iter().map(|_| Vec::new()).collect();
        for _ in 0..ROUNDS {
            for (kind, seen) in kinds.iter().zip(&mut seen) {
                seen.push(self.job(*kind, case)?);
            }
        }
        let of =
            |runs: &[Seen], value: fn(&Seen) -> f64| runs.iter().map(value).collect::<Vec<_>>();
        let alone = median(&mut of(&seen[0], |run| run.period_ms));
        for (kind, runs) in kinds.iter().zip(&seen) {
            let mut periods = of(runs, |run| run.period_ms);
            let mean = median(&mut of(runs, |run| run.period_mean_ms));
            let period = median(&mut periods);
            let last = runs.last().context("no round was run")?;
            println!(
                "{:>14} {:>22} {mean:>10.5} {:<1} {:>10.3} {:>16} {:>24}",
                kind.unwrap_or("alone"),
                spread(&mut periods, 5),
                mark(period, mean),
                period / alone,
                spread(&mut of(runs, |run| run.start_ms), 0),
                last.counts,
            );
        }
        print_mark();
        Ok(())
    }

    /// One job, under one attack.
    fn job(&self, kind: Option<&str>, (stage, bytes, chunks): (&str, &str, usize)) -> Result<Seen> {
        let port = free_port()?;
        let (secret, id) = ("the secret of a job under attack", format!("door/{port}"));
        let attacker = kind.map(|kind| {
            let secret = match kind {
                "wrong-secret" => "the secret of some other job",
                _ => secret,
            };
            let id = match kind {
                "other-job" => "another job",
                _ => &id,
            };
            self.attacker(kind, port, secret, id)
        });
        let attacker = attacker.transpose()?;
        let rank = |rank: &str| {
            let mut pp = Command::new(self.pp);
            pp.args(["bench", "overlap", "--json", "--simulate", "sleep"])
                .args(["--decode-ms", stage, "--phase-b-ms", stage])
                .args(["--bytes", bytes, "--chunks", &chunks.to_string()])
                .env("RANK", rank)
                .env("WORLD_SIZE", "2")
                .env("LOCAL_RANK", rank)
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .env("PP_JOB_ID", &id)
                .env("PP_JOB_SECRET", secret)
                // On two cores with three programs a rank may get none for a while.
                .env("PP_HEARTBEAT_MS", "3000");
            started(&mut pp, self.pp)
        };
        let rank_0 = rank("0")?;
        std::thread::sleep(HEAD_START);
        let began = Instant::now();
        let rank_1 = rank("1")?;
        let rank_0 = ended(rank_0)?;
        let wall = began.elapsed();
        ended(rank_1)?;
        let printed: Value =
            serde_json::from_slice(&rank_0.stdout).context("pp printed no JSON")?;
        let number = |key: &str| printed[key].as_f64().with_context(|| format!("no {key}"));
        let counts = match attacker {
            Some(attacker) => counts(&ended(attacker)?)?,
            None => String::new(),
        };
        let period_mean_ms = number("period_mean_ms")?;
        let worked_ms = period_mean_ms * chunks as f64;
        Ok(Seen {
            period_ms: number("period_ms")?,
            period_mean_ms,
            // Starting, meeting, agreeing, and ending: all that is not chunks.
            start_ms: (wall.as_secs_f64() * 1e3 - worked_ms).max(0.0),
            counts,
        })
    }

    fn attacker(&self, kind: &str, port: u16, secret: &str, id: &str) -> Result<Child> {
        let mut nice = Command::new("nice");
        nice.args(["-n", "19"])
            .arg(&self.attack)
            .args([kind, &format!("127.0.0.1:{port}"), ATTACK_SECONDS])
            .env("PP_ATTACK_SECRET", secret)
            .env("PP_ATTACK_JOB", id);
        started(&mut nice, &self.attack)
    }
}

fn started(command: &mut Command, what: &Path) -> Result<Child> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .with_context(|| format!("cannot start {}", what.display()))
}

fn ended(child: Child) -> Result<Output> {
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "a rank or the attacker ended with {}",
        output.status
    );
    Ok(output)
}

/// The numbers of `12 connections, 34 refused`.
fn counts(output: &Output) -> Result<String> {
    let text = String::from_utf8_lossy(&output.stdout);
    let mut numbers = text
        .split_whitespace()
        .filter_map(|word| word.parse::<u64>().ok());
    let both = numbers.next().zip(numbers.next());
    let (connections, refused) = both.with_context(|| format!("the attacker said {text:?}"))?;
    Ok(format!("{connections} / {refused}"))
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
