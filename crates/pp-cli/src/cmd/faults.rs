//! `pp faults`: break each rule of the protocol in a real job, and see what its ranks do.
//!
//! Each entry of the catalogue runs two ranks of this program on a small clip, in a folder of its
//! own. It behaved when every rank ended with one line that names kind, rank and operation, when
//! nothing was computed or decoded behind the fault, and when no process, no output and no other
//! file is left. Whether it ended within its bound is a verdict of its own.

mod catalogue;
mod clip;
mod entries_by_name;
mod entries_by_number;
mod job;
mod judge;
mod log;
mod print;

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context;
use pp_runtime::watch::MISSED_HEARTBEATS;

pub(crate) use self::catalogue::Transport;
use self::catalogue::{Entry, How, all};
use self::job::Start;
use self::judge::Said;
use self::print::Verdict;
use crate::args::FaultsArgs;
use crate::exit::Failure;
use crate::fault::VARIABLE;

/// Time between heartbeats: a rank that gets no core for a while is not silent.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// When a rank that says nothing is noticed.
const SILENCE: Duration = HEARTBEAT.saturating_mul(MISSED_HEARTBEATS);
/// Jobs side by side, at most.
const MOST_JOBS: usize = 4;

/// Lists the catalogue, or runs entries of it.
pub(crate) fn faults(args: &FaultsArgs) -> Result<(), Failure> {
    if args.list {
        return print::list(args.json);
    }
    if args.hooks {
        return print::hooks(args.json);
    }
    let entries = chosen(&args.run)?;
    let has_fakes = has_fakes();
    if args.transport == Transport::Nccl && !has_fakes {
        super::need_gpus()?;
    }
    let folder = Folder::new()?;
    let clip = folder.0.join("in.y4m");
    clip::write(&clip).context("cannot write the clip")?;
    let runner = Runner {
        transport: args.transport,
        has_fakes,
        clip,
        folder: folder.0.clone(),
    };
    let verdicts = runner.run_all(&entries);
    super::give_way_to_interrupt();
    drop(folder);
    print::verdicts(args.json, args.transport, &verdicts)?;
    let all = verdicts.len();
    let bad = verdicts.iter().filter(|v| v.is_bad()).count();
    if bad > 0 {
        return Err(anyhow::anyhow!("{bad} of {all} faults did not end as they must").into());
    }
    match verdicts.iter().filter(|v| v.is_late()).count() {
        0 => Ok(()),
        late => Err(super::late(&format!("{late} of {all} faults"))),
    }
}

/// The entries of these ids; all, where none is given.
fn chosen(ids: &[String]) -> Result<Vec<&'static Entry>, Failure> {
    if ids.is_empty() {
        return Ok(all().collect());
    }
    ids.iter()
        .map(|id| {
            all().find(|entry| entry.id == id).ok_or_else(|| {
                Failure::Usage(format!(
                    "there is no fault {id:?}; `pp faults --list` says which there are"
                ))
            })
        })
        .collect()
}

/// Whether a fake driver is there in place of a real one.
fn has_fakes() -> bool {
    std::env::vars_os().any(|(name, _)| name.to_string_lossy().starts_with("PP_FAKE_"))
}

/// A folder that goes away with this.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self, Failure> {
        let path = std::env::temp_dir().join(format!("pp-faults-{}", std::process::id()));
        let mut builder = std::fs::DirBuilder::new();
        builder
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot make the folder {} to work in", path.display()))?;
        let gone = path.clone();
        // The kernel ends the ranks with this process.
        super::when_interrupted(move || {
            let _ = std::fs::remove_dir_all(&gone);
            "the jobs that were running end, and nothing is judged".into()
        })?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What all entries of one call have in common.
struct Runner {
    transport: Transport,
    has_fakes: bool,
    clip: PathBuf,
    folder: PathBuf,
}

impl Runner {
    /// Runs the entries, a few side by side; the verdicts in their order.
    fn run_all(&self, entries: &[&'static Entry]) -> Vec<Verdict> {
        let next = AtomicUsize::new(0);
        let verdicts = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..self.jobs() {
                scope.spawn(|| {
                    while let Some(entry) = entries.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let verdict = self.verdict(entry);
                        let mut verdicts = verdicts.lock().expect("nobody panics with it");
                        verdicts.push(verdict);
                    }
                });
            }
        });
        let mut verdicts = verdicts.into_inner().expect("nobody panics with it");
        let place = |verdict: &Verdict| entries.iter().position(|e| e.id == verdict.id);
        verdicts.sort_by_key(place);
        verdicts
    }

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
        let made = std::fs::create_dir(&folder).context("no folder for the job");
        let outcome = made.and_then(|()| job::run(&self.starts(entry, &folder), &folder));
        match outcome {
            Err(error) => Verdict::failed(entry, format!("{error:#}")),
            Ok(outcome) => {
                let wrong = judge::judge(entry, &outcome, &folder);
                let said = [0, 1].map(|rank| Said::of(rank, &outcome.ranks[rank]));
                Verdict::judged(entry, wrong, said, outcome.took)
            }
        }
    }

    /// How both ranks of an entry are started.
    fn starts(&self, entry: &Entry, folder: &Path) -> [Start; 2] {
        let kernels = match self.transport {
            Transport::Host => ["--transport", "host", "--kernels", "cpu"],
            Transport::Nccl => ["--transport", "nccl", "--kernels", "ptx"],
        };
        let output = folder.join("out.y4m");
        [0, 1].map(|rank| {
            let mut start = Start::default();
            start.args.push("run".into());
            start.args.extend(kernels.map(str::to_owned));
            start.args.extend(["--input".into(), text(&self.clip)]);
            start.args.extend(["--output".into(), text(&output)]);
            start.args.extend(
                [
                    "--frames-per-chunk",
                    clip::FRAMES_PER_CHUNK,
                    "--denoise-steps",
                    "1",
                ]
                .map(str::to_owned),
            );
            start.args.extend(["--threads".into(), "1".into()]);
            start
                .args
                .extend(entry.args.iter().map(|&arg| arg.to_owned()));
            let mut set = |name: &str, value: &str| {
                start.env.push((name.to_owned(), value.to_owned()));
            };
            set("PP_HEARTBEAT_MS", &HEARTBEAT.as_millis().to_string());
            for (name, value) in entry.env {
                set(name, value);
            }
            match entry.how {
                How::Hook(hook) => set(VARIABLE, hook),
                How::Variable(on, name, value) if on == rank => set(name, value),
                How::Arguments(on, args) if on == rank => {
                    start.args.extend(args.iter().map(|&arg| arg.to_owned()));
                }
                _ => {}
            }
            start
        })
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
