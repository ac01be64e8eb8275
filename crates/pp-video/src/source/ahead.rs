//! Threads that read whole chunks of a file, each the next one in turn.
//!
//! Each thread has one chunk at a time. They read with `pread` and map nothing: a file that becomes shorter while it is
//! read is a short chunk, and no signal.

use std::sync::Arc;
use std::{io, thread};

use crossbeam_channel::{Receiver, Sender, bounded};
use pp_runtime::clock::now_ns;

use super::super::y4m::PlainFrames;
use super::chunk::{Chunk, Intake};

/// A chunk to fill, from this frame on.
type Job = (u64, Chunk);
/// The threads. They end when this is dropped.
pub(super) struct Ahead {
    /// The frames they read.
    pub(super) frames: PlainFrames,
    frames_per_chunk: u64,
    threads: Vec<(Sender<Job>, Receiver<Chunk>)>,
    /// The thread whose turn it is.
    turn: usize,
    /// Threads that have a chunk, the next ones in turn.
    filling: usize,
    /// The first frame that no thread has begun to read.
    next_frame: u64,
}

impl Ahead {
    /// Starts the threads, at least one.
    ///
    /// # Errors
    /// A thread could not be started.
    pub(super) fn start(frames: PlainFrames, intake: &Arc<Intake>) -> io::Result<Self> {
        let options = &intake.options;
        let start = |_| {
            let ((jobs, to_do), (done, filled)) = (bounded::<Job>(1), bounded(1));
            let (frames, intake) = (frames.clone(), Arc::clone(intake));
            let fill = move || {
                for (first, chunk) in to_do {
                    if done.send(fill(&frames, &intake, first, chunk)).is_err() {
                        return;
                    }
                }
            };
            thread::Builder::new().name("read".into()).spawn(fill)?;
            Ok((jobs, filled))
        };
        Ok(Self {
            threads: (0..options.threads.max(1))
                .map(start)
                .collect::<io::Result<_>>()?,
            frames_per_chunk: options.frames_per_chunk as u64,
            frames,
            turn: 0,
            filling: 0,
            next_frame: 0,
        })
    }

    /// Reads from this frame on, into chunks from `empty`. What was read before goes to `recycle`.
    pub(super) fn go_to(
        &mut self,
        frame: u64,
        mut empty: impl FnMut() -> Chunk,
        recycle: impl Fn(Chunk),
    ) {
        self.stop(recycle);
        self.next_frame = frame;
        while self.filling < self.threads.len() {
            self.begin(empty());
        }
    }

    /// Reads nothing more. What was read and not taken goes to `recycle`.
    pub(super) fn stop(&mut self, recycle: impl Fn(Chunk)) {
        while self.filling > 0 {
            self.filled().into_iter().for_each(&recycle);
            self.turn = (self.turn + 1) % self.threads.len();
        }
    }

    /// The next chunk, with the frames that could be read. It has fewer than it has room for only where another frame
    /// cannot be read so. `None` when a thread has died.
    pub(super) fn next(&mut self, empty: impl FnOnce() -> Chunk) -> Option<Chunk> {
        let chunk = self.filled()?;
        self.begin(empty());
        Some(chunk)
    }

    fn filled(&mut self) -> Option<Chunk> {
        self.filling -= 1;
        self.threads[self.turn].1.recv().ok()
    }

    /// Gives the thread whose turn it is the next chunk to fill.
    fn begin(&mut self, chunk: Chunk) {
        // A thread that has died is found by the receive that follows.
        let _ = self.threads[self.turn].0.send((self.next_frame, chunk));
        self.next_frame += self.frames_per_chunk;
        self.filling += 1;
        self.turn = (self.turn + 1) % self.threads.len();
    }
}

fn fill(frames: &PlainFrames, intake: &Intake, first: u64, mut chunk: Chunk) -> Chunk {
    for number in first..first + intake.options.frames_per_chunk as u64 {
        let k = chunk.frames;
        if !frames.read(number, chunk.frame_mut(k)) {
            break;
        }
        let read_ns = now_ns();
        let grid = intake.grid(&mut chunk);
        chunk.grids.extend(grid);
        intake.take_in(&mut chunk, number, read_ns);
    }
    chunk
}
