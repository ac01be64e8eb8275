//! The small commands, and what those that run jobs have in common.

pub(crate) mod doctor;
pub(crate) mod faults;
pub(crate) mod flight;
pub(crate) mod plugin;
pub(crate) mod shutdown;
pub(crate) mod verify;

use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use pp_contract::{FaultKind, with_source};
use pp_transport::cuda::Device;
use pp_transport::nccl::Nccl;
use signal_hook::iterator::Signals;

use crate::exit::{Failure, code_of};
use crate::job::{WORLD, signals};

/// From the moment at which a rank notices a fault to the end of the last rank.
pub(crate) const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// Refuses a machine without the GPUs and the NCCL that jobs on NCCL need: each job would say so again.
pub(crate) fn need_gpus() -> Result<(), Failure> {
    let refuse = |why: String| {
        let why =
            format!("{why}; `pp doctor` says what is missing, and --transport host needs none");
        Err(Failure::local(FaultKind::Device, "look for GPUs", why))
    };
    match Device::count() {
        Ok(count) if count < WORLD => refuse(format!("{count} visible, and a job needs {WORLD}")),
        Ok(_) => match Nccl::load() {
            Ok(_) => Ok(()),
            Err(error) => refuse(with_source(&error)),
        },
        Err(error) => refuse(with_source(&error)),
    }
}

/// Everything ended as it must, and these took longer than their bound.
pub(crate) fn late(which: &str) -> Failure {
    let why = format!("{which} took longer than their bound; run them where nothing else runs");
    Failure::local(FaultKind::TimedOut, "end jobs", why)
}

/// An interrupt came, and its thread ends this process.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Leaves the end of this process to the interrupt, if one came: what jobs did since is its doing.
pub(crate) fn give_way_to_interrupt() {
    while INTERRUPTED.load(Ordering::SeqCst) {
        std::thread::park();
    }
}

/// At an interrupt, cleans up, says what became of the jobs, and ends this process.
pub(crate) fn when_interrupted(
    clean_up: impl FnOnce() -> String + Send + 'static,
) -> Result<(), Failure> {
    let mut heard = Signals::new(signals::asking()).context("cannot handle signals")?;
    let thread = std::thread::Builder::new().name("pp-signals".into());
    let wait = move || {
        if let Some(signal) = heard.forever().next() {
            signals::note(signal as u8);
            INTERRUPTED.store(true, Ordering::SeqCst);
            let said = clean_up();
            // Without a standard error nobody wants to read it.
            let _ = writeln!(std::io::stderr(), "pp: error: interrupted: {said}");
            std::process::exit(code_of(FaultKind::Interrupted).into());
        }
    };
    thread.spawn(wait).context("cannot start a thread")?;
    Ok(())
}
