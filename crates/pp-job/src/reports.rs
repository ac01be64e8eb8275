//! What the ranks say to their supervisor, over one pipe.
//!
//! Hazard: a report of a process that is gone is taken for that of its successor, or two reports
//! mix. Guarantee: each names the process that wrote it, and goes out in one write of less than a
//! page.
//!
//! A second pipe leads to rank 0: the supervisor alone knows how the process of a rank ended that is started again.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::{Arc, OnceLock};

use anyhow::Context;
use pp_contract::{Fault, FaultKind, Rank};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::config::Supervisor;
use crate::error::Error;
use crate::threads::start_thread;

/// What a rank has to say.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// It ends, because of this.
    Exiting(Fault),
    /// Rank 0 gave this process of this rank up, because of this, and wants another. These chunks were in flight, if the
    /// ranks were connected.
    PeerLost(Rank, TargetProcess, Fault, Option<Chunks>),
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

/// The first chunk and the last.
pub(crate) type Chunks = (u64, u64);

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
    /// Says whether this process says that it ended because of this rank.
    pub(crate) fn blames(&self, pid: u32, rank: Rank) -> bool {
        self.pid == pid && matches!(&self.report, Report::Exiting(fault) if fault.rank == rank)
    }
}

/// Bytes of a report, at the most.
const MAX_BYTES: usize = 64 + Fault::MAX_BYTES;

/// As it goes through the pipe, behind its length. `None` is a mark of the supervisor.
fn encode(reported: Option<Reported>) -> postcard::Result<Vec<u8>> {
    let body = postcard::to_allocvec(&reported)?;
    Ok([&(body.len() as u32).to_le_bytes(), &body[..]].concat())
}

/// Reads reports, and marks of the supervisor, until no process has the pipe open; calls `take` with each.
pub(crate) fn read(pipe: OwnedFd, mut take: impl FnMut(Option<Reported>)) {
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
        // A report that cannot be read was not made.
        if let Ok(report) = postcard::from_bytes(&body) {
            take(report);
        }
    }
}

/// Writes a mark behind all that the ranks have reported.
pub(crate) fn mark(pipe: &OwnedFd) {
    if let Ok(mark) = encode(None) {
        // Fails only if no thread reads.
        let _ = rustix::io::write(pipe, &mark);
    }
}

/// Tells rank 0 why a rank is gone that is started again.
pub(crate) fn tell_loss(pipe: &OwnedFd, why: &Fault) {
    if let Ok(why) = why.encode() {
        // A rank 0 that reads none is told no more.
        let _ = rustix::io::write(pipe, &why);
    }
}

/// A rank's line to its supervisor, if it has one.
#[derive(Clone, Debug)]
pub(crate) struct Reporter {
    pub(crate) rank: Rank,
    /// Open to the end: later there may be no descriptor left.
    pipe: Option<Arc<File>>,
    /// Where the supervisor tells rank 0 of losses.
    losses: Option<Arc<File>>,
}

impl Reporter {
    pub(crate) fn new(rank: Rank, supervisor: Option<&Supervisor>) -> Self {
        let open = |fd: &Option<String>, options: &OpenOptions| {
            let path = format!("/proc/self/fd/{}", fd.as_ref()?);
            options.open(path).ok().map(Arc::new)
        };
        let mut to_read = OpenOptions::new();
        to_read
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed());
        Self {
            rank,
            pipe: supervisor.and_then(|of| open(&of.report_fd, OpenOptions::new().append(true))),
            losses: supervisor.and_then(|of| open(&of.losses_fd, &to_read)),
        }
    }

    /// Why this rank was lost, as its supervisor has told since this was asked last.
    pub(crate) fn why_lost(&self, rank: Rank) -> Option<Fault> {
        let (mut pipe, mut why) = (self.losses.as_deref()?, [0; Fault::MAX_BYTES]);
        let mut told = None;
        while let Ok(bytes @ 1..) = pipe.read(&mut why) {
            let fault = Fault::decode(&why[..bytes]).ok();
            // The first process was lost, and those behind it came to nothing.
            told = told.or(fault.filter(|fault| fault.rank == rank));
        }
        told
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
    pub(crate) fn live(&self, of_caller: bool) -> Result<(), Error> {
        let (Some(pipe), Some(alive)) = (&self.pipe, self.encode(Report::Alive)) else {
            return Ok(());
        };
        // A process is watched to its end, and a rank in the process of its caller until nothing else of it has the pipe.
        let kept = (!of_caller).then(|| Arc::clone(pipe));
        let pipe = Arc::downgrade(pipe);
        let beat = move || {
            let _kept = kept;
            while let Some(pipe) = pipe.upgrade() {
                // Waits while the pipe is full: it has signs enough in it.
                let _ = (&*pipe).write_all(&alive);
                drop(pipe);
                std::thread::sleep(crate::times::BEAT_EVERY);
            }
        };
        Ok(start_thread("pp-lives", beat).context("cannot start a thread")?)
    }

    /// Composes ahead what this rank, if it has a supervisor, reports when other code ends it.
    pub(crate) fn prepare_last(&self) {
        let no_memory =
            "out of memory; free memory, raise the limit on it (ulimit -v), or lower --depth";
        let last = [(FaultKind::Io, no_memory), (FaultKind::Plugin, EXITED)];
        let last = last.map(|(kind, why)| {
            let fault = Fault::new(kind, self.rank, "run", why);
            self.encode(Report::Exiting(fault)).unwrap_or_default()
        });
        if let Some(pipe) = &self.pipe {
            let _ = LAST.set((Arc::clone(pipe), last));
        }
    }
}

/// Why a process ended whose own code did not end it.
pub(crate) const EXITED: &str =
    "other code ended this process before its work was done; does a kernel plugin call exit?";

/// The pipe, and what this rank reports when it has no memory left to compose a report, and when other code calls `exit`.
/// The process has one memory and one end, and so one of this.
static LAST: OnceLock<(Arc<File>, [Vec<u8>; 2])> = OnceLock::new();

fn report_last(which: usize) -> bool {
    let last = LAST.get();
    last.is_some_and(|(pipe, reports)| (&**pipe).write_all(&reports[which]).is_ok())
}

/// Tells the supervisor, if there is one, that this rank ends because it has no memory left. Allocates nothing.
pub fn report_out_of_memory() -> bool {
    report_last(0)
}

/// Tells the supervisor, if there is one, that other code ends this rank.
pub(crate) fn report_exit() -> bool {
    report_last(1)
}
