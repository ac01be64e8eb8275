//! `pp-trials faults`: break each rule of the protocol in a real job, and see what its ranks do.
//!
//! Each entry of the catalogue runs two ranks of this program on a small clip, in a folder of its
//! own. It behaved when every rank ended with one line that names kind, rank and operation, when
//! nothing was computed or decoded behind the fault, and when no process, no output and no other
//! file is left. Whether it ended within its bound is a verdict of its own.

mod catalogue;
mod clip;
mod entries;
mod job;
mod judge;
mod log;
mod print;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use pp_contract::WorldSize;
use pp_job::{Error, WORLD};
use pp_transport::launch::LocalJob;

use self::catalogue::{Entry, HEARTBEAT, How, Transport};
use self::entries::all;
use self::judge::Said;
use self::print::Verdict;
use crate::hook::VARIABLE;
use crate::trial::{Work, join, need_gpus, play_all, verdict, work_in};

/// Variables that would change what a rank does.
const OWN: [&str; 4] = ["PP_LOG", "PP_STUCK_MS", "PP_REPORT_FD", "PP_FLIGHT_OPS"];
/// Jobs side by side, at most.
const MOST_JOBS: usize = 4;

/// The arguments of `pp-trials faults`.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["list", "hooks", "run", "all"]))]
pub(crate) struct FaultsArgs {
    /// Say what there is, and do nothing.
    #[arg(long)]
    list: bool,
    /// Name the hooks of PP_FAULT, with their ranks and what each needs.
    #[arg(long)]
    hooks: bool,
    /// Make this fault; may be given more than once.
    #[arg(long, value_name = "ID")]
    run: Vec<String>,
    /// Make all of them.
    #[arg(long)]
    all: bool,
    /// What carries the payloads of the jobs.
    #[arg(long, value_enum, default_value = "host")]
    transport: Transport,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

/// Lists the catalogue, or runs entries of it.
pub(crate) fn faults(args: &FaultsArgs) -> Result<(), Error> {
    if args.list {
        return print::list(args.json);
    }
    if args.hooks {
        return print::hooks(args.json);
    }
    let entries = chosen(&args.run)?;
    let has_fakes = has_fakes();
    if args.transport == Transport::Nccl && !has_fakes {
        need_gpus()?;
    }
    let work = Work::new("faults")?;
    let clip = work.path().join("in.y4m");
    clip::write(&clip).context("cannot write the clip")?;
    let runner = Runner {
        transport: args.transport,
        has_fakes,
        program: std::env::current_exe().context("this program has no path")?,
        clip,
        folder: work.path().to_owned(),
    };
    let verdicts = play_all(&entries, runner.jobs(), |entry| runner.verdict(entry));
    drop(work);
    print::verdicts(args.json, args.transport, &verdicts)?;
    let count = |is: fn(&Verdict) -> bool| verdicts.iter().filter(|verdict| is(verdict)).count();
    let (bad, late) = (count(Verdict::is_bad), count(Verdict::is_late));
    verdict("faults", verdicts.len(), bad, late)
}

/// The entries of these ids; all, where none is given.
fn chosen(ids: &[String]) -> Result<Vec<&'static Entry>, Error> {
    if ids.is_empty() {
        return Ok(all().collect());
    }
    ids.iter()
        .map(|id| {
            all().find(|entry| entry.id == id).ok_or_else(|| {
                Error::Usage(format!(
                    "there is no fault {id:?}; `pp-trials faults --list` says which there are"
                ))
            })
        })
        .collect()
}

/// Whether a fake driver is there in place of a real one.
fn has_fakes() -> bool {
    std::env::vars_os().any(|(name, _)| name.to_string_lossy().starts_with("PP_FAKE_"))
}

/// What all entries of one call have in common.
struct Runner {
    transport: Transport,
    has_fakes: bool,
    program: PathBuf,
    clip: PathBuf,
    folder: PathBuf,
}

impl Runner {
    /// Real GPUs are not shared; everything else mostly waits.
    fn jobs(&self) -> usize {
        if self.transport == Transport::Nccl && !self.has_fakes {
            return 1;
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        cores.min(MOST_JOBS)
    }

    fn verdict(&self, entry: &'static Entry) -> Verdict {
        if !entry.transports.contains(&self.transport) {
            return Verdict::skipped(entry, "not a fault of this transport");
        }
        if entry.needs_fakes && !self.has_fakes {
            return Verdict::skipped(entry, "needs the fakes");
        }
        let folder = self.folder.join(entry.id);
        let job = LocalJob::new(WorldSize::new(WORLD).expect("a world of two"));
        let commands = [0, 1].map(|rank| self.command(entry, &folder, &job, rank));
        let [front, phase_b] = commands;
        let outcome = front.and_then(|front| job::run(&job, [front, phase_b?]));
        match outcome {
            Err(error) => Verdict::failed(entry, format!("no job: {error}")),
            Ok(outcome) => {
                let wrong = judge::judge(entry, &outcome, &folder);
                let said = [0, 1].map(|rank| Said::of(rank, &outcome.ranks[rank]));
                Verdict::judged(entry, wrong, said, outcome.took)
            }
        }
    }

    /// How a rank of an entry is started.
    fn command(
        &self,
        entry: &Entry,
        folder: &Path,
        job: &LocalJob,
        rank: u32,
    ) -> std::io::Result<Command> {
        let mut command = Command::new(&self.program);
        work_in(folder, &mut command)?;
        join(job, rank, &mut command);
        for name in OWN {
            command.env_remove(name);
        }
        let kernels = match self.transport {
            Transport::Host => ["--transport", "host", "--kernels", "cpu"],
            Transport::Nccl => ["--transport", "nccl", "--kernels", "ptx"],
        };
        command
            .arg("run")
            .args(kernels)
            .arg("--input")
            .arg(&self.clip);
        command.arg("--output").arg(folder.join("out.y4m"));
        command.args(["--frames-per-chunk", clip::FRAMES_PER_CHUNK]);
        command.args(["--denoise-steps", "1", "--threads", "1"]);
        command.args(entry.args);
        command.env("PP_HEARTBEAT_MS", HEARTBEAT.as_millis().to_string());
        command.envs(entry.env.iter().copied());
        match entry.how {
            How::Hook(hook) => drop(command.env(VARIABLE, hook)),
            How::Variable(on, name, value) if on == rank => drop(command.env(name, value)),
            How::Arguments(on, args) if on == rank => drop(command.args(args)),
            _ => {}
        }
        Ok(command)
    }
}
