//! `pp shutdown`: every state of ours against everything that may become of the peer.
//!
//! Hazard: a shutdown that works whenever one tries it, and hangs in the one state that nobody
//! tried. Guarantee: each cell is real processes of this very program in the state that its name
//! says, seen to be there by a sign and not by a guess; how it ended, how long that took and what
//! was left is measured from outside.

mod cell;
mod judge;
mod launch;
mod left;
mod net;
mod play;
mod rank;
mod scene;

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use pp_contract::FaultKind;
use serde::Serialize;

use self::cell::{Cell, Ground};
use self::judge::Times;
use self::left::Machine;
use self::play::{Common, Played, Unplayed, play};
use self::scene::Scene;
use crate::args::{TransportChoice, whole};
use crate::exit::{Failure, print};
use crate::job;
use crate::video::OutputError;

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
    rank: &'static str,
    state: &'static str,
    event: &'static str,
    wish: &'static str,
    supervised: bool,
    /// What the state is on this ground.
    means: &'static str,
    /// Why it was not run.
    not_run: Option<String>,
    /// Exit codes: ours, then the peer's; a signal is negative.
    codes: Vec<Option<i32>>,
    noticed_ms: Option<f64>,
    gone_ms: Option<f64>,
    all_gone_ms: Option<f64>,
    resumed_ms: Option<f64>,
    bounds_ms: BoundsMs,
    /// The whole cell, its set-up included.
    took_ms: f64,
    said: String,
    wrong: Vec<String>,
    /// The bounds that were not kept.
    missed: Vec<String>,
}

/// What `noticed_ms`, `all_gone_ms` and `resumed_ms` may be at most, where they have a bound.
#[derive(Debug, Default, Serialize)]
struct BoundsMs {
    noticed: Option<f64>,
    all_gone: Option<f64>,
    resumed: Option<f64>,
}

impl BoundsMs {
    fn of(bounds: Times) -> Self {
        Self {
            noticed: bounds.noticed.map(milliseconds),
            all_gone: bounds.all_gone.map(milliseconds),
            resumed: bounds.resumed.map(milliseconds),
        }
    }
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
pub(crate) fn shutdown(args: &ShutdownArgs) -> Result<(), Failure> {
    let ground = match (args.transport, args.fakes) {
        (TransportChoice::Nccl, true) => Ground::Fakes,
        (TransportChoice::Nccl, false) => Ground::Gpus,
        (TransportChoice::Host, false) => Ground::Host,
        _ => {
            let what = "--transport is host or nccl here: each has a matrix of its own";
            return Err(Failure::Usage(what.into()));
        }
    };
    let mut cells = Cell::all(ground);
    let is_wanted = |cell: &Cell| {
        let name = cell.to_string();
        args.only.is_empty() || args.only.iter().any(|text| name.contains(text))
    };
    cells.retain(is_wanted);
    if cells.is_empty() {
        return Err(Failure::Usage(format!(
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
    let heartbeat = job::heartbeat()?.ok_or_else(|| {
        Failure::Usage("PP_HEARTBEAT_MS=0: without heartbeats nobody notices a stop".into())
    })?;
    if ground == Ground::Gpus {
        super::need_gpus()?;
    }
    // Before minutes go by: a report that cannot be written is not worth them.
    let mut report_file = None;
    if let Some(path) = &args.json {
        let open = OpenOptions::new().create(true).append(true).open(path);
        report_file = Some(open.map_err(|source| not_written(path, source))?);
    }
    let common = Common {
        program: std::env::current_exe().context("this program has no path")?,
        ground,
        no_networks: OnceLock::new(),
        work: std::env::temp_dir().join(format!("pp-shutdown-{}", std::process::id())),
    };
    launch::make_own(&common.work).context("no folder for temporary files")?;
    let work = common.work.clone();
    super::when_interrupted(move || {
        rank::end_all();
        let _ = std::fs::remove_dir_all(&work);
        "the cells that were running were given up, and their ranks ended".into()
    })?;
    let started = Instant::now();
    let with_gpus = ground == Ground::Gpus;
    let before = Machine::look(with_gpus);
    let told = run_all(&cells, args.jobs, &common, heartbeat);
    super::give_way_to_interrupt();
    // Each cell has removed its own.
    let _ = std::fs::remove_dir(&common.work);
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

fn not_written(path: &Path, source: std::io::Error) -> Failure {
    let path = path.into();
    let error = OutputError::Create { path, source };
    Failure::local(FaultKind::Io, "write report", error)
}

/// Runs the cells, some at a time, and tells of them in their order.
fn run_all(cells: &[Cell], jobs: u32, common: &Common, heartbeat: Duration) -> Vec<Told> {
    let queue: Mutex<VecDeque<usize>> = Mutex::new((0..cells.len()).collect());
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                let next = || lock(&queue).pop_front();
                while let Some(index) = next() {
                    let cell = cells[index];
                    let told = tell(cell, common, heartbeat);
                    let _ = print(&line(&told));
                    lock(&done).push((index, told));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, told)| told).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn tell(cell: Cell, common: &Common, heartbeat: Duration) -> Told {
    let ground = common.ground;
    let mut told = Told {
        cell: cell.to_string(),
        rank: cell.side.name(),
        state: cell.ours.name(),
        event: cell.event.name(),
        wish: cell.wish.name(),
        supervised: cell.supervised,
        means: Scene::of(cell, ground).means,
        not_run: cell.impossible(ground).map(str::to_owned),
        codes: Vec::new(),
        noticed_ms: None,
        gone_ms: None,
        all_gone_ms: None,
        resumed_ms: None,
        bounds_ms: BoundsMs::default(),
        took_ms: 0.0,
        said: String::new(),
        wrong: Vec::new(),
        missed: Vec::new(),
    };
    if told.not_run.is_some() {
        return told;
    }
    let began = Instant::now();
    let result = play(cell, common);
    told.took_ms = milliseconds(began.elapsed());
    match result {
        Ok(played) => {
            told.wrong = judge::wrong(cell, ground, &played);
            let seen = Times::of(&played);
            let bounds = judge::bounds(cell, ground, heartbeat, seen);
            told.bounds_ms = BoundsMs::of(bounds);
            told.missed = judge::missed(seen, bounds);
            let Played {
                codes,
                noticed,
                gone,
                all_gone,
                resumed,
                said,
                left: _,
            } = played;
            told.codes = codes;
            told.noticed_ms = noticed.map(milliseconds);
            told.gone_ms = gone.map(milliseconds);
            told.all_gone_ms = all_gone.map(milliseconds);
            told.resumed_ms = resumed.map(milliseconds);
            told.said = said;
        }
        Err(Unplayed::NotHere(why)) => told.not_run = Some(why),
        Err(Unplayed::NotReached(why)) => {
            told.wrong = vec![format!("the state was not reached: {why}")];
        }
    }
    told
}

fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 10_000.0).round() / 10.0
}

fn line(told: &Told) -> String {
    let name = &told.cell;
    if let Some(why) = &told.not_run {
        return format!("{name:<40} not run: {why}\n");
    }
    let ms = |time: Option<f64>| time.map_or("-".into(), |ms| format!("{ms:.0}"));
    let of = |bound: Option<f64>| bound.map_or(String::new(), |ms| format!(" of {ms:.0}"));
    let code = |code: &Option<i32>| code.map_or("?".into(), |code| code.to_string());
    let codes: Vec<String> = told.codes.iter().map(code).collect();
    let mut line = format!(
        "{name:<40} {:<8} noticed {:>5}{} ms, gone {:>5} ms, all gone {:>5}{} ms\n",
        codes.join(","),
        ms(told.noticed_ms),
        of(told.bounds_ms.noticed),
        ms(told.gone_ms),
        ms(told.all_gone_ms),
        of(told.bounds_ms.all_gone),
    );
    for what in &told.wrong {
        line += &format!("    WRONG: {what}\n");
    }
    for what in &told.missed {
        line += &format!("    MISSED: {what}\n");
    }
    line
}

fn finish(json: Option<(&Path, File)>, report: &Report) -> Result<(), Failure> {
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
    if wrong > 0 || !report.left.is_empty() {
        return Err(Failure::Other(anyhow::anyhow!(
            "{wrong} cells ended otherwise than they should, and {} things were left",
            report.left.len()
        )));
    }
    if missed > 0 {
        return Err(super::late(&format!("{missed} of {} cells", cells.len())));
    }
    Ok(())
}
