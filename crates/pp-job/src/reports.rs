//! What the ranks say to their supervisor, over one pipe.
//!
//! Hazard: a report of a process that is gone is taken for that of its successor, or two reports
//! mix. Guarantee: each names the process that wrote it, and goes out in one write of less than a
//! page.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use anyhow::Context;
use pp_contract::{Fault, FaultKind, Rank};
use serde::{Deserialize, Serialize};

use crate::config::Supervisor;
use crate::error::Error;
use crate::threads::start_thread;

/// What a rank has to say.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// It ends, because of this.
    Exiting(Fault),
    /// Rank 0 gave this process of this rank up, because of this, and wants another.
    PeerLost(Rank, TargetProcess, Fault),
    /// Rank 0 says: all ranks are connected.
    Connected,
    /// This rank takes signals.
    SignalsReady,
    /// Rank 0 has everything that it wants of the other ranks.
    Served,
    /// Rank 0 says: the work is done, and what was to be written is written.
    Finished,
    /// This rank runs, also while it waits or loads.
    Alive,
    /// This rank could not write its flight recording, because of this.
    NotRecorded(Fault),
}

/// Which process of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum TargetProcess {
    /// One that came and went, and did not say which it is.
    Unknown,
    This(u32),
    /// Whichever there is: it did not come.
    Any,
}

/// A report, and who made it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Reported {
    /// The process that made it.
    pub(crate) pid: u32,
    pub(crate) rank: Rank,
    pub(crate) report: Report,
}

impl Reported {
    /// Whether this process says that it ended because of this rank.
    pub(crate) fn blames(&self, pid: u32, rank: Rank) -> bool {
        self.pid == pid && matches!(&self.report, Report::Exiting(fault) if fault.rank == rank)
    }
}

/// Bytes of a report, at the most.
const MAX_BYTES: usize = 32 + Fault::MAX_BYTES;

/// As it goes through the pipe, behind its length. `None` is the supervisor's own: nothing follows.
fn encode(reported: Option<Reported>) -> postcard::Result<Vec<u8>> {
    let body = postcard::to_allocvec(&reported)?;
    Ok([&(body.len() as u32).to_le_bytes(), &body[..]].concat())
}

/// Reads reports until the supervisor says that there are no more; calls `take` with each.
pub(crate) fn read(pipe: OwnedFd, mut take: impl FnMut(Reported)) {
    let mut pipe = File::from(pipe);
    loop {
        let mut len = [0; 4];
        if pipe.read_exact(&mut len).is_err() {
            return;
        }
        // What a plugin wrote into the pipe is no report, and neither is anything behind it.
        let len = u32::from_le_bytes(len) as usize;
        let mut body = vec![0; len.min(MAX_BYTES)];
        if len > MAX_BYTES || pipe.read_exact(&mut body).is_err() {
            return;
        }
        match postcard::from_bytes::<Option<Reported>>(&body) {
            Ok(Some(report)) => take(report),
            Ok(None) => return,
            // A report that cannot be read was not made.
            Err(_) => {}
        }
    }
}

/// All ranks have ended: the thread that reads the pipe may stop.
pub(crate) fn end(pipe: &OwnedFd) {
    if let Ok(over) = encode(None) {
        // Fails only if no thread reads.
        let _ = rustix::io::write(pipe, &over);
    }
}

/// A rank's line to its supervisor, if it has one.
#[derive(Clone, Debug)]
pub(crate) struct Reporter {
    pub(crate) rank: Rank,
    /// Open to the end: later there may be no descriptor left.
    pipe: Option<Arc<File>>,
}

impl Reporter {
    pub(crate) fn new(rank: Rank, supervisor: Option<&Supervisor>) -> Self {
        let fd = supervisor.and_then(|supervisor| supervisor.report_fd.as_deref());
        let pipe = fd.and_then(|fd| {
            let path = format!("/proc/self/fd/{fd}");
            let pipe = OpenOptions::new().append(true).open(path);
            pipe.ok().map(Arc::new)
        });
        Self { rank, pipe }
    }

    fn encode(&self, report: Report) -> Option<Vec<u8>> {
        let (pid, rank) = (std::process::id(), self.rank);
        encode(Some(Reported { pid, rank, report })).ok()
    }

    /// Tells the supervisor, which prints one line for all ranks; false where there is none that takes it.
    pub(crate) fn tell(&self, report: Report) -> bool {
        let (Some(pipe), Some(message)) = (&self.pipe, self.encode(report)) else {
            return false;
        };
        (&**pipe).write_all(&message).is_ok()
    }

    /// Begins to give the supervisor signs of life, if there is one.
    ///
    /// # Errors
    /// No thread is to be had.
    pub(crate) fn live(&self) -> Result<(), Error> {
        if self.pipe.is_none() {
            return Ok(());
        }
        let reporter = self.clone();
        let beat = move || {
            loop {
                // Waits while the pipe is full: it has signs enough in it.
                reporter.tell(Report::Alive);
                std::thread::sleep(crate::times::BEAT_EVERY);
            }
        };
        Ok(start_thread("pp-lives", beat).context("cannot start a thread")?)
    }

    /// Composes ahead what this rank, if it has a supervisor, reports when there is no memory left.
    pub(crate) fn prepare_out_of_memory(&self) {
        let detail =
            "out of memory; free memory, raise the limit on it (ulimit -v), or lower --depth";
        let fault = Fault::new(FaultKind::Io, self.rank, "run", detail);
        if let (Some(pipe), Some(report)) = (&self.pipe, self.encode(Report::Exiting(fault))) {
            let _ = OUT_OF_MEMORY.set((Arc::clone(pipe), report));
        }
    }
}

/// The pipe, and what this rank reports when it has no memory left to compose a report. Memory is the process's, and so
/// is this.
static OUT_OF_MEMORY: OnceLock<(Arc<File>, Vec<u8>)> = OnceLock::new();

/// Tells the supervisor, if there is one, that this rank ends because it has no memory left. Allocates nothing.
pub fn report_out_of_memory() -> bool {
    let prepared = OUT_OF_MEMORY.get();
    prepared.is_some_and(|(pipe, report)| (&**pipe).write_all(report).is_ok())
}
