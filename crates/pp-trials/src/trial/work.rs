//! The folder that trials work in, and trials side by side.

use std::io::Write as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use pp_job::Error;
use pp_job::command_line::asking;
use pp_testing::process::end_all;
use signal_hook::iterator::Signals;

/// A folder of this user alone, which goes away with this.
pub(super) struct Work(PathBuf);

impl Work {
    /// At an interrupt the ranks of all jobs end, the folder is removed, and this process ends.
    pub(super) fn new(name: &str) -> Result<Self, Error> {
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

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(super) fn make_own(folder: &Path) -> std::io::Result<()> {
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
            pp_job::command_line::end_now(128 + signal as u8);
        }
    };
    thread.spawn(wait).context("cannot start a thread")?;
    Ok(())
}

/// Plays all of these, some at a time; what came of them, in their order.
pub(super) fn play_all<I: Sync, T: Send>(
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
