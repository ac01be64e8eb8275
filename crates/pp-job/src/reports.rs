//! What the ranks say to their supervisor, over one pipe.
//!
//! Hazard: a report of a process that is gone is taken for that of its successor, or two reports
//! mix. Guarantee: each names the process that wrote it, and goes out in one write of less than a
//! page. The text of its fault may be longer: it goes ahead in pieces, which have the number of their report.
//!
//! A second pipe leads to rank 0: the supervisor alone knows how the process of a rank ended that is started again.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::Context;
use pp_contract::{Fault, FaultKind, Rank, Text};
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
    /// Another rank says: its part of the job is done. Its program may go on.
    Left,
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

impl Report {
    /// The fault that it has.
    fn fault_mut(&mut self) -> Option<&mut Fault> {
        match self {
            Self::Exiting(fault) | Self::PeerLost(_, _, fault, _) | Self::NotRecorded(fault) => {
                Some(fault)
            }
            Self::Connected
            | Self::SignalsReady
            | Self::Served
            | Self::Finished
            | Self::Left
            | Self::Alive => None,
        }
    }
}

/// Bytes of a piece of a text, at the most.
const PIECE_BYTES: usize = 2900;

/// What goes through the pipe.
#[derive(Debug, Serialize, Deserialize)]
enum Sent {
    /// A mark of the supervisor.
    Mark,
    /// The next piece of the text of a report that follows: the process that made it, and its number there.
    Piece(u32, u32, Text<PIECE_BYTES>),
    /// A report, without the text of its fault, and its number.
    Report(Reported, u32),
}

/// The number of the next report of this process. It tells apart what several threads send at a time.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// Bytes of what is sent, at the most. A write of so many bytes is never mixed with another.
const MAX_BYTES: usize = 64 + PIECE_BYTES;
const _: () = assert!(Fault::MAX_BYTES_WITHOUT_TEXT <= PIECE_BYTES && 4 + MAX_BYTES < 4096);

/// As it goes through the pipe, behind its length.
fn encode(sent: &Sent) -> postcard::Result<Vec<u8>> {
    let body = postcard::to_allocvec(sent)?;
    Ok([&(body.len() as u32).to_le_bytes(), &body[..]].concat())
}

/// The pieces of a text, cut between characters.
fn pieces(mut text: &str) -> impl Iterator<Item = Text<PIECE_BYTES>> {
    std::iter::from_fn(move || {
        let piece = Text::truncated(text);
        text = &text[piece.len()..];
        (!piece.is_empty()).then_some(piece)
    })
}

/// Reads reports, and marks of the supervisor, until no process has the pipe open; calls `take` with each.
pub(crate) fn read(pipe: OwnedFd, mut take: impl FnMut(Option<Reported>)) {
    let mut pipe = File::from(pipe);
    // By process and number. A process that died before its report leaves one.
    let mut texts: HashMap<(u32, u32), String> = HashMap::new();
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
        match postcard::from_bytes(&body) {
            Ok(Sent::Mark) => take(None),
            Ok(Sent::Piece(pid, number, piece)) => {
                let text = texts.entry((pid, number)).or_default();
                if text.len() < Fault::MAX_TEXT_BYTES {
                    text.push_str(&piece);
                }
            }
            Ok(Sent::Report(mut reported, number)) => {
                let text = texts.remove(&(reported.pid, number));
                if let (Some(text), Some(fault)) = (text, reported.report.fault_mut()) {
                    fault.text = Text::truncated(&text);
                }
                take(Some(reported));
            }
            // A report that cannot be read was not made.
            Err(_) => {}
        }
    }
}

/// Writes a mark behind all that the ranks have reported.
pub(crate) fn mark(pipe: &OwnedFd) {
    if let Ok(mark) = encode(&Sent::Mark) {
        // Fails only if no thread reads.
        let _ = rustix::io::write(pipe, &mark);
    }
}

/// Tells rank 0 why a rank is gone that is started again, without the text of the fault.
pub(crate) fn tell_loss(pipe: &OwnedFd, why: &Fault) {
    if let Ok(why) = why.without_text().encode() {
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
        let (mut pipe, mut why) = (self.losses.as_deref()?, [0; Fault::MAX_BYTES_WITHOUT_TEXT]);
        let mut told = None;
        while let Ok(bytes @ 1..) = pipe.read(&mut why) {
            let fault = Fault::decode(&why[..bytes]).ok();
            // The first process was lost, and those behind it came to nothing.
            told = told.or(fault.filter(|fault| fault.rank == rank));
        }
        told
    }

    /// A report as it goes through the pipe, behind the pieces of its text.
    fn encode(&self, mut report: Report) -> Option<Vec<Vec<u8>>> {
        let (pid, rank) = (std::process::id(), self.rank);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let fault = report.fault_mut();
        let text = fault.map(|fault| std::mem::take(&mut fault.text));
        let piece = |piece| encode(&Sent::Piece(pid, number, piece));
        let mut messages: Vec<_> = pieces(text.as_deref().unwrap_or_default())
            .map(piece)
            .collect::<Result<_, _>>()
            .ok()?;
        let reported = Reported { pid, rank, report };
        messages.push(encode(&Sent::Report(reported, number)).ok()?);
        Some(messages)
    }

    /// Tells the supervisor, which prints one line for all ranks; false where there is none that takes it.
    pub(crate) fn tell(&self, report: Report) -> bool {
        let Some(pipe) = &self.pipe else {
            return false;
        };
        let messages = self.encode(report).unwrap_or_default();
        let mut writes = messages.iter().map(|message| (&**pipe).write_all(message));
        !messages.is_empty() && writes.all(|written| written.is_ok())
    }

    /// Begins to give the supervisor signs of life, if there is one.
    ///
    /// # Errors
    /// No thread is to be had.
    pub(crate) fn live(&self, of_caller: bool) -> Result<(), Error> {
        let (Some(pipe), Some(alive)) = (&self.pipe, self.encode(Report::Alive)) else {
            return Ok(());
        };
        let alive = alive.concat();
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
            let messages = self.encode(Report::Exiting(fault));
            messages.unwrap_or_default().concat()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts of 16 KiB from several threads and processes at once arrive whole, with the report that each belongs to.
    #[test]
    fn long_texts_of_several_processes_arrive_whole_and_apart() {
        const REPORTS: usize = 20;
        let (read_end, write_end) = rustix::pipe::pipe().unwrap();
        let text = |rank: u32, at: usize| {
            // Characters of two bytes, of which some lie over the end of a piece.
            let line = format!("rank {rank} at {at}: é\n");
            line.repeat(Fault::MAX_TEXT_BYTES / line.len() - 1)
        };
        let mut got = Vec::new();
        std::thread::scope(|scope| {
            let write_end = write_end;
            for rank in 0..4 {
                let pipe = File::from(write_end.try_clone().unwrap());
                scope.spawn(move || {
                    for at in 0..REPORTS {
                        let detail = text(rank, at);
                        let rank = Rank::new(rank);
                        let fault = Fault::new(FaultKind::Plugin, rank, "run", detail);
                        let report = match at % 2 {
                            0 => Report::Exiting(fault),
                            _ => Report::PeerLost(rank, TargetProcess::Any, fault, Some((1, 2))),
                        };
                        let reporter = Reporter {
                            rank,
                            pipe: None,
                            losses: None,
                        };
                        for message in reporter.encode(report).unwrap() {
                            assert!(message.len() < 4096);
                            (&pipe).write_all(&message).unwrap();
                        }
                    }
                });
            }
            drop(write_end);
            read(read_end, |reported| got.push(reported.unwrap()));
        });
        assert_eq!(got.len(), 4 * REPORTS);
        let mut next = [0; 4];
        for mut reported in got {
            let rank = reported.rank.get();
            let at = &mut next[rank as usize];
            let fault = reported.report.fault_mut().unwrap();
            assert!(fault.text.len() > 16_000);
            assert_eq!(*fault.text, *text(rank, *at).trim_end());
            assert_eq!(
                fault.detail,
                Text::truncated(&format!("rank {rank} at {at}: é"))
            );
            *at += 1;
        }
    }

    #[test]
    fn rank_0_is_told_of_a_loss_without_its_text() {
        let (read_end, write_end) = rustix::pipe::pipe_with(
            rustix::pipe::PipeFlags::DIRECT | rustix::pipe::PipeFlags::NONBLOCK,
        )
        .unwrap();
        let reporter = Reporter {
            rank: crate::RANK_0,
            pipe: None,
            losses: Some(Arc::new(File::from(read_end))),
        };
        let lost = Rank::new(1);
        let detail = format!("first\n{}", "d".repeat(20_000));
        let fault = Fault::new(FaultKind::Plugin, lost, "run", detail);
        let fault = fault.in_stage(
            &"s".repeat(48),
            Some(pp_contract::ChunkIndex::new(u64::MAX)),
        );
        tell_loss(&write_end, &fault);
        assert_eq!(reporter.why_lost(lost), Some(fault.without_text()));
    }
}
