//! What the catalogue of faults and the matrix of shutdowns have in common: jobs of this very program, side by side, each
//! in a folder of its own.

use std::io::Write as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use pp_contract::{FaultKind, Rank, with_source};
use pp_device::Device;
use pp_job::{Error, SUPERVISOR, WORLD, asking};
use pp_testing::process::{end_all, with_variable};
use pp_transport::launch::LocalJob;
use pp_transport::nccl::Nccl;
use signal_hook::iterator::Signals;

use crate::hook::VARIABLE;

/// From the moment at which a rank notices a fault to the end of the last rank.
pub(crate) const ENDS_WITHIN: Duration = Duration::from_secs(1);
/// Parts of a job's folder that are no part of its result, and who finds each: what ranks record, and where fakes meet.
pub(crate) const ASIDE: [(&str, &str); 2] =
    [("flight", "PP_FLIGHT_DIR"), ("meet", "PP_FAKE_NCCL_DIR")];
/// The variable that tells the ranks of a job from others.
const JOB_ID: &str = "PP_JOB_ID";

/// Refuses a machine without the GPUs and the NCCL that jobs on NCCL need: each job would say so again.
pub(crate) fn need_gpus() -> Result<(), Error> {
    let refuse = |why: String| {
        let why =
            format!("{why}; `pp doctor` says what is missing, and --transport host needs none");
        Err(Error::local(FaultKind::Device, "look for GPUs", why))
    };
    match Device::count() {
        Ok(count) if count < WORLD => {
            refuse(format!("{count} GPUs visible, and a job needs {WORLD}"))
        }
        Ok(_) => match Nccl::load() {
            Ok(_) => Ok(()),
            Err(error) => refuse(with_source(&error)),
        },
        Err(error) => refuse(with_source(&error)),
    }
}

/// A folder of this user alone, which goes away with this.
pub(crate) struct Work(PathBuf);

impl Work {
    /// At an interrupt the ranks of all jobs end, the folder is removed, and this process ends.
    pub(crate) fn new(name: &str) -> Result<Self, Error> {
        let path = std::env::temp_dir().join(format!("pp-{name}-{}", std::process::id()));
        make_own(&path)
            .with_context(|| format!("cannot make the folder {} to work in", path.display()))?;
        let work = path.clone();
        when_interrupted(move || {
            end_all();
            let _ = std::fs::remove_dir_all(&work);
        })?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn make_own(folder: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(folder)
}

/// An interrupt came, and its thread ends this process.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

fn when_interrupted(clean_up: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let mut heard = Signals::new(asking()).context("cannot handle signals")?;
    let thread = std::thread::Builder::new().name("pp-signals".into());
    let wait = move || {
        if let Some(signal) = heard.forever().next() {
            INTERRUPTED.store(true, Ordering::SeqCst);
            clean_up();
            let said = "the jobs that were running were given up, and their ranks ended";
            // Standard error may be closed.
            let _ = writeln!(std::io::stderr(), "pp: error: interrupted: {said}");
            std::process::exit(128 + signal);
        }
    };
    thread.spawn(wait).context("cannot start a thread")?;
    Ok(())
}

/// Plays all of these, some at a time; what came of them, in their order.
pub(crate) fn play_all<I: Sync, T: Send>(
    items: &[I],
    at_a_time: usize,
    play: impl Fn(&I) -> T + Sync,
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(at) else {
                        return;
                    };
                    let result = play(item);
                    done.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push((at, result));
                }
            });
        }
    });
    // What jobs did since the interrupt is its doing, and its thread ends this process.
    while INTERRUPTED.load(Ordering::SeqCst) {
        std::thread::park();
    }
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// How the whole ended, of which so many were bad, and so many others were late.
pub(crate) fn verdict(what: &str, all: usize, bad: usize, late: usize) -> Result<(), Error> {
    if bad > 0 {
        return Err(anyhow::anyhow!("{bad} of {all} {what} did not end as they must").into());
    }
    if late > 0 {
        let why = format!(
            "{late} of {all} {what} took longer than their bound; run them where nothing else runs"
        );
        return Err(Error::local(FaultKind::TimedOut, "end jobs", why));
    }
    Ok(())
}

/// Gives `run` of this program the folder of its job, and nothing of a launcher's environment.
pub(crate) fn work_in(folder: &Path, command: &mut Command) -> std::io::Result<()> {
    for name in LocalJob::LAUNCHER_VARIABLES.iter().chain(&[VARIABLE]) {
        command.env_remove(name);
    }
    for (name, variable) in ASIDE {
        let own = folder.join(name);
        make_own(&own)?;
        command.env(variable, own);
    }
    Ok(())
}

/// Makes it a rank of the job; it dies with this process.
pub(crate) fn join(job: &LocalJob, rank: u32, command: &mut Command) {
    command
        .envs(job.env(Rank::new(rank)))
        .env(SUPERVISOR, std::process::id().to_string());
}

/// The processes of a job that are still there.
pub(crate) fn left_of(job: &LocalJob) -> Vec<u32> {
    let env = job.env(Rank::new(0));
    let id = env.iter().find(|(name, _)| *name == JOB_ID);
    id.map_or_else(Vec::new, |(name, id)| with_variable(name, id))
}
