//! `pp-trials shutdown`: every state of ours against everything that may become of the peer.
//!
//! Hazard: a shutdown works whenever one tries it, and hangs in the one state that was never
//! tried. Guarantee: each cell is real processes of this very program in the state that its name
//! says, seen to be there by a sign and not by a guess; how it ended, how long that took and what
//! was left is measured from outside.

mod cell;
mod judge;
mod launch;
mod left;
mod net;
mod play;
mod scene;
mod times;

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use pp_cli::args::{TransportChoice, whole};
use pp_cli::env::Env;
use pp_cli::print;
use pp_contract::FaultKind;
use pp_job::{Config, Error};
use serde::Serialize;

use self::cell::{Cell, Ground, name};
use self::left::Machine;
use self::play::{Common, Played, Unplayed, play};
use self::scene::Scene;
use self::times::Times;
use crate::trial::{Work, need_gpus, play_all, verdict};

#[derive(Args, Clone, Debug)]
pub(crate) struct ShutdownArgs {
    /// What the ranks run on.
    #[arg(long, value_enum, default_value = "host")]
    transport: TransportChoice,
    /// Only the cells whose name has one of these in it, like "front/idle" or "/killed/".
    #[arg(long, value_name = "TEXT", num_args = 1..)]
    only: Vec<String>,
    /// Cells at a time, 1 to 64; they mostly wait.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=64_u32))]
    jobs: u32,
    /// Write what was seen as JSON.
    #[arg(long, value_name = "FILE.json")]
    json: Option<PathBuf>,
    /// Name the cells, and those that cannot be run here with the reason; run none.
    #[arg(long)]
    list: bool,
    /// The driver and NCCL are the stand-ins of this project's tests.
    #[arg(long, hide = true)]
    fakes: bool,
}

/// What is told of a cell.
#[derive(Debug, Serialize)]
struct Told {
    cell: String,
    rank: String,
    state: String,
    event: String,
    wish: String,
    supervised: bool,
    /// What the state is on this ground.
    means: &'static str,
    /// Why it was not run.
    not_run: Option<String>,
    #[serde(flatten)]
    played: Played,
    /// What the times may be at most, where they have a bound.
    bounds_ms: Times,
    /// The whole cell, its set-up included.
    took_ms: f64,
    wrong: Vec<String>,
    /// The bounds that were not kept.
    missed: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    what: &'static str,
    ground: &'static str,
    heartbeat_ms: u128,
    jobs: u32,
    cells: Vec<Told>,
    left: Vec<String>,
    seconds: f64,
}

/// Runs the matrix.
pub(crate) fn shutdown(args: &ShutdownArgs, env: &Env) -> Result<(), Error> {
    let ground = match (args.transport, args.fakes) {
        (TransportChoice::Nccl, true) => Ground::Fakes,
        (TransportChoice::Nccl, false) => Ground::Gpus,
        (TransportChoice::Host, false) => Ground::Host,
        _ => {
            let what = "--transport is host or nccl here: each has a matrix of its own";
            return Err(Error::Usage(what.into()));
        }
    };
    let mut cells = Cell::all(ground);
    let is_wanted = |cell: &Cell| {
        let name = cell.to_string();
        args.only.is_empty() || args.only.iter().any(|text| name.contains(text))
    };
    cells.retain(is_wanted);
    if cells.is_empty() {
        return Err(Error::Usage(format!(
            "no cell has {:?} in its name; --list names them",
            args.only
        )));
    }
    if args.list {
        let line = |cell: &Cell| match cell.impossible(ground) {
            Some(why) => format!("{:<40} not run: {why}\n", cell.to_string()),
            None => format!("{cell}\n"),
        };
        return print(&cells.iter().map(line).collect::<String>());
    }
    // The ranks read the other settings.
    let heartbeat = |name: &str| env.get(name).filter(|_| name == "PP_HEARTBEAT_MS");
    let heartbeat = Config::alone(heartbeat)?.heartbeat.ok_or_else(|| {
        Error::Usage("PP_HEARTBEAT_MS=0: without heartbeats no rank notices a stop".into())
    })?;
    if ground == Ground::Gpus {
        need_gpus()?;
    }
    // Before minutes go by: a report that cannot be written is not worth them.
    let mut report_file = None;
    if let Some(path) = &args.json {
        let open = OpenOptions::new().create(true).append(true).open(path);
        report_file = Some(open.map_err(|source| not_written(path, source))?);
    }
    let work = Work::new("shutdown")?;
    let common = Common {
        program: std::env::current_exe().context("this program has no path")?,
        ground,
        no_networks: OnceLock::new(),
        work: work.path().to_owned(),
    };
    let started = Instant::now();
    let with_gpus = ground == Ground::Gpus;
    let before = Machine::look(with_gpus);
    let told = play_all(&cells, args.jobs as usize, |cell| {
        let told = tell(*cell, &common, heartbeat);
        let _ = print(&line(&told));
        told
    });
    drop(work);
    let report = Report {
        what: "shutdown",
        ground: ground.name(),
        heartbeat_ms: heartbeat.as_millis(),
        jobs: args.jobs,
        cells: told,
        left: Machine::left_since(&before, with_gpus),
        seconds: started.elapsed().as_secs_f64(),
    };
    finish(args.json.as_deref().zip(report_file), &report)
}

fn not_written(path: &Path, source: std::io::Error) -> Error {
    let why = format!("{}: {source}", path.display());
    Error::local(FaultKind::Io, "write report", why)
}

fn tell(cell: Cell, common: &Common, heartbeat: Duration) -> Told {
    let ground = common.ground;
    let mut told = Told {
        cell: cell.to_string(),
        rank: name(cell.side),
        state: name(cell.ours),
        event: name(cell.event),
        wish: name(cell.wish),
        supervised: cell.supervised,
        means: Scene::of(cell, ground).means,
        not_run: cell.impossible(ground).map(str::to_owned),
        played: Played::default(),
        bounds_ms: Times::default(),
        took_ms: 0.0,
        wrong: Vec::new(),
        missed: Vec::new(),
    };
    if told.not_run.is_some() {
        return told;
    }
    let began = Instant::now();
    match play(cell, common) {
        Ok(played) => {
            told.wrong = judge::wrong(cell, ground, &played);
            told.bounds_ms = judge::bounds(cell, ground, heartbeat, played.times_ms);
            told.missed = judge::missed(played.times_ms, told.bounds_ms);
            told.played = played;
        }
        Err(Unplayed::NotHere(why)) => told.not_run = Some(why),
        Err(Unplayed::NotReached(why)) => {
            told.wrong = vec![format!("the state was not reached: {why}")];
        }
    }
    told.took_ms = (began.elapsed().as_secs_f64() * 10_000.0).round() / 10.0;
    told
}

fn line(told: &Told) -> String {
    let cell = &told.cell;
    if let Some(why) = &told.not_run {
        return format!("{cell:<40} not run: {why}\n");
    }
    let ms = |time: Option<Duration>| time.map_or("-".into(), |t| t.as_millis().to_string());
    let of =
        |bound: Option<Duration>| bound.map_or(String::new(), |b| format!(" of {}", b.as_millis()));
    let (times, bounds) = (told.played.times_ms, told.bounds_ms);
    let code = |code: &Option<i32>| code.map_or("?".into(), |code| code.to_string());
    let codes: Vec<String> = told.played.codes.iter().map(code).collect();
    let mut line = format!(
        "{cell:<40} {:<8} noticed {:>5}{} ms, gone {:>5} ms, all gone {:>5}{} ms\n",
        codes.join(","),
        ms(times.noticed),
        of(bounds.noticed),
        ms(times.gone),
        ms(times.all_gone),
        of(bounds.all_gone),
    );
    for what in &told.wrong {
        line += &format!("    WRONG: {what}\n");
    }
    for what in &told.missed {
        line += &format!("    MISSED: {what}\n");
    }
    line
}

fn finish(json: Option<(&Path, File)>, report: &Report) -> Result<(), Error> {
    if let Some((path, mut file)) = json {
        let text = serde_json::to_string(report).context("cannot write the report")?;
        let emptied = match file.metadata() {
            // A pipe or a device has no length to set.
            Ok(about) if about.is_file() => file.set_len(0),
            _ => Ok(()),
        };
        let written = emptied.and_then(|()| writeln!(file, "{text}"));
        written.map_err(|source| not_written(path, source))?;
    }
    let cells = &report.cells;
    let count = |is: fn(&Told) -> bool| cells.iter().filter(|told| is(told)).count();
    let wrong = count(|told| !told.wrong.is_empty());
    let missed = count(|told| !told.missed.is_empty());
    print(&format!(
        "{} cells on {}: {} run, {wrong} ended otherwise than they should, {missed} missed a bound; {:.1} s\n",
        cells.len(),
        report.ground,
        count(|told| told.not_run.is_none()),
        report.seconds,
    ))?;
    for what in &report.left {
        print(&format!("    LEFT: {what}\n"))?;
    }
    // What is left on the machine counts like a bad cell.
    verdict("cells", cells.len(), wrong + report.left.len(), missed)
}
