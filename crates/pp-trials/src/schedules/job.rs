//! `pp-trials schedule-job`: one toy job of a training schedule.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use pp_bench::sharpen_timers;
use pp_command::env::Env;
use pp_command::whole;
use pp_contract::{FaultKind, StageSpec};
use pp_job::{Config, Error, Job, Opened, Profile, Program, ThisRank};
use pp_runtime::schedule::{Runnable, Schedule};
use pp_runtime::stage::{Chunk, StageError};
use pp_testing::{Folder, Toy, ToySink};
use pp_transport::backend::Backend;
use pp_transport::edge::Edges;
use pp_transport::host::{Host, RxLease, TxLease};

use super::rendezvous::Rendezvous;
use super::stages::{Data, Lengths, Log, ModelStage, PAYLOAD, Timed, read};

/// A step to warm up, and the one that counts.
const STEPS: u64 = 2;

/// The arguments of `pp-trials schedule-job`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct JobArgs {
    /// The schedule, as PyTorch's CSV of computations.
    file: PathBuf,
    /// Where each rank is to write when it did what: a folder.
    #[arg(long, value_name = "FOLDER")]
    times: Option<PathBuf>,
    /// The forward of a stage, in microseconds.
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = whole(1..=1_000_000_u64))]
    forward_us: u64,
    /// Slots of each edge, 1 to 64.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole(1..=64_u32))]
    slots: u32,
    /// Each send waits until its receiver has used the payload, as a blocking send does.
    #[arg(long)]
    rendezvous: bool,
}

/// Runs the job, or this process's rank of it. The schedule is not checked: one that is a deadlock is to be one.
pub(crate) fn job(args: &JobArgs, env: &Env) -> Result<(), Error> {
    let usage = |error: &(dyn std::error::Error + 'static)| {
        let why = pp_contract::with_source(error);
        Error::Usage(format!("{}: {why}", args.file.display()))
    };
    let text = fs::read_to_string(&args.file);
    let text = text.map_err(|e| {
        StageError::file("read the schedule", &args.file, &e).into_fault(pp_job::RANK_0)
    })?;
    let schedule = Schedule::parse_csv(&text).map_err(|e| usage(&e))?;
    let runnable = schedule.runnable(args.slots).map_err(|e| usage(&e))?;
    let config = Config::from_env(env.lookup())?;
    Job::scheduled(&config, &runnable).run(|rank| match args.rendezvous {
        false => run(rank, Host, args, &runnable),
        true => run(rank, Rendezvous(Host), args, &runnable),
    })
}

fn run<B>(rank: ThisRank<'_>, backend: B, args: &JobArgs, runnable: &Runnable) -> Result<(), Error>
where
    B: Backend + Edges<Tx = TxLease, Rx = RxLease>,
{
    sharpen_timers();
    let log = Log::default();
    let microbatches = runnable.orders()[0].chunks();
    let stages = (runnable.pipeline().stages().len() as u64 - 2) / 2;
    let model = |is_forward: bool| {
        let (log, forward_us) = (Log::clone(&log), args.forward_us);
        move |spec: &StageSpec, (): &()| {
            let part = spec.part as u64;
            // The backwards stand in descending order.
            let stage = if is_forward { part } else { stages - 1 - part } as u32;
            Ok(ModelStage {
                stage,
                is_forward,
                lengths: Lengths::of(stage, forward_us),
                log: Log::clone(&log),
            })
        }
    };
    let profile = Profile::new().set("forward_us", args.forward_us);
    let program: Program<'_, B, Data, ()> =
        Program::new("data", |_| Ok(Opened::new(Data::new(microbatches, STEPS))))
            .payloads(|_, ()| PAYLOAD as u64)
            .stage("forward", model(true))
            .stage("backward", model(false))
            .sink("done", |(), _| {
                Ok(ToySink::<Toy, _>::new(
                    move |chunk: Chunk<'_, Toy>, payload: &[u8]| {
                        let passed = read(payload, chunk.place.chunk)?;
                        if passed == 2 * stages {
                            return Ok(());
                        }
                        let detail =
                            format!("the payload went through {passed} of {} stages", 2 * stages);
                        Err(StageError::new(FaultKind::Internal, "read payload", detail))
                    },
                ))
            });
    let number = rank.rank().get();
    rank.run(backend, profile, program)?;
    match &args.times {
        Some(folder) => Ok(write(folder, number, &log.borrow())?),
        None => Ok(()),
    }
}

fn file_of(folder: &Path, rank: u32) -> PathBuf {
    folder.join(format!("rank-{rank}.json"))
}

fn write(folder: &Path, rank: u32, log: &[Timed]) -> Result<()> {
    let file = file_of(folder, rank);
    fs::write(&file, serde_json::to_vec(log)?).with_context(|| file.display().to_string())
}

/// What the ranks of a job wrote.
pub(super) fn times_in(folder: &Folder) -> Result<Vec<Vec<Timed>>> {
    let read = |rank| {
        let file = file_of(folder.path(), rank);
        let text = fs::read(&file).with_context(|| file.display().to_string())?;
        Ok(serde_json::from_slice(&text)?)
    };
    let files = (0..).take_while(|rank| file_of(folder.path(), *rank).exists());
    files.map(read).collect()
}
