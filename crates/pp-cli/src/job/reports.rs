//! What the ranks say to their supervisor, over one pipe.
//!
//! Hazard: a report of a process that is gone is taken for that of its successor, or two reports
//! mix. Guarantee: each names the process that wrote it, and goes out in one write of less than a
//! page.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::Context;
use pp_contract::{Fault, FaultKind, Rank};
use rustix::fs::{Mode, OFlags};

use super::{heartbeat, start_thread};
use crate::exit::Failure;

/// The pipe a supervised rank reports on.
pub(crate) const REPORT_FD: &str = "PP_REPORT_FD";
/// Time between two signs of life.
const BEAT_EVERY: Duration = Duration::from_secs(1);

/// What a rank has to say.
#[derive(Clone, Debug)]
pub(super) enum Word {
    /// It ends, because of this.
    Ends(Fault),
    /// The front gave this process of Phase B up, because of this, and wants another.
    Lost(Meant, Fault),
    /// The front and Phase B are connected.
    Met,
    /// This rank takes signals.
    Hears,
    /// The front has everything that it wants of Phase B.
    Served,
    /// The front has done its work: what it was to write is written.
    Finished,
    /// This rank runs, whatever it waits for or loads.
    Lives,
    /// This rank could not write its flight recording, because of this.
    NotRecorded(Fault),
}

/// Which process of Phase B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meant {
    /// One that came and went, and did not say which it is.
    Unknown,
    This(u32),
    /// Whichever there is: it did not come.
    Any,
}

impl Meant {
    fn to_wire(self) -> u32 {
        match self {
            Self::Unknown => 0,
            Self::This(pid) => pid,
            Self::Any => u32::MAX,
        }
    }

    fn from_wire(number: u32) -> Self {
        match number {
            0 => Self::Unknown,
            u32::MAX => Self::Any,
            pid => Self::This(pid),
        }
    }
}

/// One report.
#[derive(Clone, Debug)]
pub(super) struct Report {
    /// The process that made it.
    pub(super) pid: u32,
    pub(super) rank: Rank,
    pub(super) word: Word,
}

const ENDS: u32 = 0;
const LOST: u32 = 1;
const MET: u32 = 2;
/// The supervisor's own: nothing follows.
const OVER: u32 = 3;
const HEARS: u32 = 4;
const SERVED: u32 = 5;
const LIVES: u32 = 6;
const NOT_RECORDED: u32 = 7;
const FINISHED: u32 = 8;
/// Process, rank, kind, process that is meant, bytes of the fault.
const HEAD: usize = 5 * 4;

fn encode(rank: Rank, kind: u32, meant: u32, body: &[u8]) -> Vec<u8> {
    let head = [
        std::process::id(),
        rank.get(),
        kind,
        meant,
        body.len() as u32,
    ];
    let mut message: Vec<u8> = head.iter().flat_map(|n| n.to_le_bytes()).collect();
    message.extend_from_slice(body);
    message
}

/// Reads reports until the supervisor says that there are no more; calls `take` with each.
pub(super) fn read(pipe: OwnedFd, mut take: impl FnMut(Report)) {
    let mut pipe = File::from(pipe);
    loop {
        let mut head = [0; HEAD];
        if pipe.read_exact(&mut head).is_err() {
            return;
        }
        let (numbers, _) = head.as_chunks::<4>();
        let [pid, rank, kind, meant, len] =
            std::array::from_fn(|at| u32::from_le_bytes(numbers[at]));
        // What a plugin wrote into the pipe is no report, and neither is anything behind it.
        if kind == OVER || len as usize > Fault::MAX_BYTES {
            return;
        }
        let mut body = vec![0; len as usize];
        if pipe.read_exact(&mut body).is_err() {
            return;
        }
        let word = match (kind, Fault::decode(&body)) {
            (ENDS, Ok(fault)) => Word::Ends(fault),
            (LOST, Ok(fault)) => Word::Lost(Meant::from_wire(meant), fault),
            (MET, _) => Word::Met,
            (HEARS, _) => Word::Hears,
            (SERVED, _) => Word::Served,
            (FINISHED, _) => Word::Finished,
            (LIVES, _) => Word::Lives,
            (NOT_RECORDED, Ok(fault)) => Word::NotRecorded(fault),
            // A report that cannot be read was not made.
            _ => continue,
        };
        let rank = Rank::new(rank);
        take(Report { pid, rank, word });
    }
}

/// All ranks have ended: whoever reads the pipe may stop.
pub(super) fn end(pipe: &OwnedFd) {
    let over = encode(Rank::new(0), OVER, 0, &[]);
    // Fails only when nobody reads.
    let _ = rustix::io::write(pipe, &over);
}

fn tell(kind: u32, meant: u32, body: &[u8]) -> bool {
    tell_with(OFlags::empty(), kind, meant, body)
}

fn tell_with(flags: OFlags, kind: u32, meant: u32, body: &[u8]) -> bool {
    let variable = |name: &str| std::env::var(name).ok();
    let (Some(fd), Some(rank)) = (variable(REPORT_FD), variable("RANK")) else {
        return false;
    };
    let Ok(rank) = rank.parse() else {
        return false;
    };
    let message = encode(Rank::new(rank), kind, meant, body);
    OpenOptions::new()
        .append(true)
        .custom_flags(flags.bits().cast_signed())
        .open(format!("/proc/self/fd/{fd}"))
        .and_then(|mut pipe| pipe.write_all(&message))
        .is_ok()
}

/// Gives this rank's fault to the supervisor, who prints one line for all ranks; false when there
/// is none to give it to.
pub(crate) fn report(fault: &Fault) -> bool {
    fault.encode().is_ok_and(|body| tell(ENDS, 0, &body))
}

/// [`report`] for what no fault was made of.
pub(crate) fn report_own(failure: &Failure) -> bool {
    let rank = std::env::var("RANK")
        .ok()
        .and_then(|rank| rank.parse().ok());
    let rank = Rank::new(rank.unwrap_or(0));
    report(&failure.fault(rank, "run"))
}

/// Tells the supervisor, if there is one, that the front gave up this process of Phase B and waits
/// for another.
pub(crate) fn lost(meant: Meant, fault: &Fault) {
    if let Ok(body) = fault.encode() {
        tell(LOST, meant.to_wire(), &body);
    }
}

/// Tells the supervisor, if there is one, that this rank could not write its flight recording.
pub(crate) fn not_recorded(rank: Rank, why: &str) {
    let fault = Fault::new(FaultKind::Io, rank, "write a flight recording", why);
    if let Ok(body) = fault.encode() {
        tell(NOT_RECORDED, 0, &body);
    }
}

/// Tells the supervisor, if there is one, that the ranks are connected.
pub(crate) fn met() {
    tell(MET, 0, &[]);
}

/// Tells the supervisor, if there is one, that this rank takes signals: it is not ended by one that
/// only asks what it does.
pub(crate) fn hears() {
    tell(HEARS, 0, &[]);
}

/// Tells the supervisor, if there is one, that Phase B may go: its results are all here, and there is no more input.
pub(crate) fn served() {
    tell(SERVED, 0, &[]);
}

/// Tells the supervisor, if there is one, that the front has done its work.
pub(super) fn finished() {
    tell(FINISHED, 0, &[]);
}

/// What this rank reports when it has no memory left to compose a report.
struct OutOfMemory {
    pipe: CString,
    report: Vec<u8>,
}

static OUT_OF_MEMORY: OnceLock<OutOfMemory> = OnceLock::new();

/// Composes ahead what this rank, if it has a supervisor, reports when there is no memory left.
pub(super) fn prepare_out_of_memory(rank: Rank) {
    let detail = "out of memory; free memory, raise the limit on it (ulimit -v), or lower --depth";
    let fault = Fault::new(FaultKind::Io, rank, "run", detail);
    let pipe = std::env::var(REPORT_FD).ok();
    let pipe = pipe.and_then(|fd| CString::new(format!("/proc/self/fd/{fd}")).ok());
    if let (Some(pipe), Ok(fault)) = (pipe, fault.encode()) {
        let report = encode(rank, ENDS, 0, &fault);
        let _ = OUT_OF_MEMORY.set(OutOfMemory { pipe, report });
    }
}

/// Tells the supervisor, if there is one, that this rank ends because it has no memory left. Allocates nothing.
pub(crate) fn report_out_of_memory() -> bool {
    let Some(OutOfMemory { pipe, report }) = OUT_OF_MEMORY.get() else {
        return false;
    };
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC;
    let pipe = rustix::fs::open(pipe.as_c_str(), flags, Mode::empty());
    pipe.is_ok_and(|pipe| rustix::io::write(pipe, report).is_ok())
}

/// Begins to give the supervisor signs of life, unless there are no heartbeats in this job.
///
/// # Errors
/// No thread is to be had.
pub(super) fn live() -> Result<(), Failure> {
    if heartbeat()?.is_none() || std::env::var_os(REPORT_FD).is_none() {
        return Ok(());
    }
    let beat = || {
        loop {
            // A pipe that is full has signs enough in it.
            tell_with(OFlags::NONBLOCK, LIVES, 0, &[]);
            std::thread::sleep(BEAT_EVERY);
        }
    };
    start_thread("pp-lives", beat).context("cannot start a thread")?;
    Ok(())
}
