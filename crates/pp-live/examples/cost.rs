//! What it costs a job to be looked at: the period at 1,000 chunks/s, in turn alone, with an open page, alone, and under a flood
//! of requests.
//!
//! `cargo run --release -p pp-live --example cost [ROUNDS [SECONDS]]` prints the median period of each kind of turn, and by how
//! much it is longer than that of the turns without viewers on both sides of it. A page may cost 0.5 %, and a flood 2 %. The
//! job has two ranks; the flood is a process of its own, which calls as fast as it can.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pp_job::Finished;
use pp_job::prelude::*;
use pp_job::seen::at_low_priority;
use pp_live::{Live, Serving};
use pp_testing::{Toy, ToySink, ToySource, bytes, done};

/// How long the slowest stage works.
const WORK: Duration = Duration::from_millis(1);
/// The most that a turn may cost, in percent.
const MOST: [(&str, f64); 2] = [("a page", 0.5), ("a flood", 2.0)];

static TAKEN: AtomicU64 = AtomicU64::new(0);
static IS_OVER: AtomicBool = AtomicBool::new(false);

fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [kind, host, token] = &args[..] {
        at_low_priority();
        match kind.as_str() {
            "page" => follow(host, token),
            _ => flood(host, token),
        }
    }
    let number = |at: usize, default| {
        args.get(at)
            .and_then(|arg| arg.parse().ok())
            .unwrap_or(default)
    };
    let (rounds, seconds) = (number(0, 15), number(1, 4));
    pp_job::main(move || job(rounds, seconds))
}

fn job(rounds: u64, seconds: u64) -> Result<(), Error> {
    let pipeline: Pipeline = "read@0 -> work@1 -> write@0".parse()?;
    let config = Config::from_env(|name| std::env::var_os(name))?;
    let open = |_| {
        let poll = || match IS_OVER.load(Ordering::Relaxed) {
            true => Offer::End,
            false => Offer::Chunk(Cut::None),
        };
        let build =
            |place: Place, _: &mut TxLease| Built::new(Toy(place.chunk.get() + 1), bytes(64), ());
        Ok(Opened::new(ToySource::new(poll, build)))
    };
    let work = |chunk: Chunk<'_, Toy>, _: &[u8], _: &mut [u8]| {
        let until = Instant::now() + WORK;
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        Ok(done(chunk.message, bytes(64)))
    };
    let program = Program::<Host, _, _>::new("read", open)
        .payloads(|_, ()| 64)
        .stage("work", |_, ()| Ok(OnHost::new(work)))
        .sink("write", |(), _| {
            Ok(ToySink::<Toy, _>::new(|_, _| {
                TAKEN.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }))
        })
        .finish(|_, _: Finished| Ok(()));
    Job::new(&config, &pipeline).run(|this| {
        let mut serving = None;
        if let Some(viewer) = this.viewer() {
            let live: Live = "0".parse().map_err(Error::Usage)?;
            let shown = live.serve(viewer)?;
            let (host, token) = place(&shown);
            serving = Some(shown);
            std::thread::spawn(move || {
                measure(rounds, Duration::from_secs(seconds), &host, &token);
                IS_OVER.store(true, Ordering::Relaxed);
            });
        }
        let ran = this.run(Host, Profile::new(), program);
        drop(serving);
        ran
    })
}

fn place(shown: &Serving) -> (String, String) {
    let rest = shown.url().trim_start_matches("http://");
    let (host, token) = rest.split_once("/?token=").unwrap_or_default();
    (host.into(), token.into())
}

fn measure(rounds: u64, turn: Duration, host: &str, token: &str) {
    // Beyond the start of the job.
    while TAKEN.load(Ordering::Relaxed) < 2_000 {
        std::thread::sleep(Duration::from_millis(10));
    }
    let (mut alone, mut shares) = (Vec::new(), [Vec::new(), Vec::new()]);
    for round in 0..rounds {
        for (at, kind) in ["page", "flood"].into_iter().enumerate() {
            let before = period(turn);
            let mut viewer = start(kind, host, token);
            // A page is loaded once.
            std::thread::sleep(Duration::from_millis(300));
            let with = period(turn);
            let _ = viewer.kill();
            let _ = viewer.wait();
            let after = period(turn);
            alone.extend([before, after]);
            shares[at].push(100.0 * (2.0 * with / (before + after) - 1.0));
        }
        println!("round {} of {rounds}", round + 1);
    }
    println!("alone: a period of {:.4} ms", 1e3 * median(&mut alone));
    for ((what, most), shares) in MOST.iter().zip(&mut shares) {
        println!(
            "{what}: {:+.2} % of the period (at most {most} %)",
            median(shares)
        );
    }
}

/// Seconds from chunk to chunk, over a turn.
fn period(turn: Duration) -> f64 {
    let (begun, first) = (Instant::now(), TAKEN.load(Ordering::Relaxed));
    std::thread::sleep(turn);
    let chunks = TAKEN.load(Ordering::Relaxed) - first;
    begun.elapsed().as_secs_f64() / chunks as f64
}

fn median(of: &mut [f64]) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn start(kind: &str, host: &str, token: &str) -> Child {
    let program = std::env::current_exe().expect("a program has a file");
    let mut command = Command::new(program);
    command.args([kind, host, token]).env_clear();
    command.spawn().expect("a process can be started")
}

/// Asks as an open page does.
fn follow(host: &str, token: &str) -> ! {
    ask(host, token, "/");
    ask(host, token, "/snapshot.json");
    loop {
        if !ask(host, token, "/next.json") {
            std::thread::sleep(Duration::from_secs(1));
        }
        ask(host, token, "/thumb/before");
        ask(host, token, "/thumb/after");
    }
}

/// Asks for what costs most, without an end.
fn flood(host: &str, token: &str) -> ! {
    loop {
        ask(host, token, "/report.json");
    }
}

/// Asks, and says whether there was an answer.
fn ask(host: &str, token: &str, path: &str) -> bool {
    let asked = TcpStream::connect(host).and_then(|mut stream| {
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\r\n"
        )?;
        stream.read_to_end(&mut Vec::new())
    });
    asked.is_ok()
}
