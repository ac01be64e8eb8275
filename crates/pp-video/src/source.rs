//! The source: threads that read frames into chunks ahead of the driver.
//!
//! The queue is bounded, so a fast file cannot fill memory; buffers come back through [`Source::recycle`], so a long run
//! allocates no more than the queue, the readers and the driver hold at once. Errors travel in the queue behind the chunks
//! that were read before them. A hard cut always begins a chunk.
//!
//! One thread decides where chunks begin. A pipe it reads itself. Of a file other threads read whole chunks ahead of it
//! (`ahead`), as long as frames follow each other without parameters: from the first that does not, this thread reads
//! on, so that an end, a break and a parameter are seen in one place.
//!
//! With [`Late::Drop`] that thread waits for nobody: where the queue is full, the oldest chunk in it makes room, so that a
//! frame's stamp is its arrival. Cuts are looked for in all frames, and the driver's end finds out from the numbers of the
//! frames what is missing.

mod ahead;
mod chunk;
mod hand;
mod skipping;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{io, thread};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use pp_contract::digest;
use pp_runtime::clock::now_ns;
use pp_runtime::core::Late;

use self::ahead::Ahead;
use self::chunk::Intake;
pub use self::chunk::{Chunk, Skip, SourceOptions};
use self::hand::{Closed, Hand, Next};
use self::skipping::Skipping;
use super::InputError;
use super::buffer::Buffer;

use super::scene::{CutDetector, Grid};
use super::y4m::Reader;

/// Buffers that may lie between recycling and reuse, at least; more are freed.
const SPARE_CHUNKS: usize = 64;

/// What [`Source::poll`] finds.
#[derive(Debug)]
pub enum Polled {
    /// The next chunk.
    Ready(Chunk),
    /// None yet; the wake callback will be called.
    Later,
    /// None any more.
    End,
}

/// The driver's end of the reading threads.
///
/// # If dropped
/// The threads end at their next chunk. The drop does not wait for them: a pipe may never give another byte.
#[derive(Debug)]
pub struct Source {
    ready: Receiver<Next>,
    /// Was taken out of the queue already.
    behind: Option<Next>,
    spare: Sender<Chunk>,
    /// Keeps what was recycled when everything has been read: to free it takes time.
    _kept: Receiver<Chunk>,
    /// Chunks that made room in the queue, and how many of them were known when the last one was taken.
    lost: (Arc<AtomicU64>, u64),
    /// How many more may be taken.
    left: Option<u64>,
    /// What lies before the next frame.
    before: Before,
}

/// What was taken so far.
#[derive(Debug, Default)]
struct Before {
    /// The next frame, if none is missing.
    next_frame: u64,
    cuts: u64,
    /// Frames that were dropped since the last chunk that was kept, and whether there is a cut among them.
    skipped: u64,
    cut: bool,
}

impl Source {
    /// Starts reading, into these buffers first. `wake` is called on a reading thread after each chunk, after an error
    /// and at the end.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start(
        reader: Reader,
        options: SourceOptions,
        buffers: Vec<Buffer>,
        wake: impl Fn() + Send + 'static,
    ) -> io::Result<Self> {
        let (ready_in, ready) = bounded(options.queue.max(1));
        let (spare, spare_out) = bounded(SPARE_CHUNKS.max(buffers.len()));
        for data in buffers {
            let chunk = Chunk {
                data,
                ..Chunk::default()
            };
            // There is room for as many.
            let _ = spare.try_send(chunk);
        }
        let header = reader.header.clone();
        let (left, drops) = (options.chunks, options.late == Late::Drop);
        let is_live = drops || options.pace;
        let intake = Arc::new(Intake { header, options });
        let ahead = match reader.plain_frames().filter(|_| !is_live) {
            Some(frames) => Some(Ahead::start(frames, &intake)?),
            None => None,
        };
        let (kept, lost) = (spare_out.clone(), Arc::default());
        let work = Work {
            reader,
            intake,
            done: spare.clone(),
            spare: spare_out,
            detector: CutDetector::default(),
            begins_at_cut: false,
            next_frame: 0,
            start_ns: None,
        };
        let hand = Hand {
            ready: ready_in,
            oldest: drops.then(|| ready.clone()),
            spare: spare.clone(),
            lost: Arc::clone(&lost),
            wake,
            cuts: 0,
            held_ns: 0,
        };
        thread::Builder::new()
            .name("source".into())
            .spawn(move || work.run(ahead, hand))?;
        Ok(Self {
            ready,
            behind: None,
            spare,
            _kept: kept,
            lost: (lost, 0),
            left,
            before: Before::default(),
        })
    }

    /// Gives the next chunk if there is one, without waiting.
    ///
    /// # Errors
    /// The input broke behind the last chunk, or the reading thread is gone. Nothing comes after it.
    pub fn poll(&mut self) -> Result<Polled, InputError> {
        if self.left == Some(0) {
            return Ok(Polled::End);
        }
        self.lost.1 = self.lost.0.load(Ordering::Acquire);
        match self.next() {
            Ok(Ok(Some(chunk))) => Ok(Polled::Ready(self.taken(chunk))),
            Ok(Ok(None)) => {
                self.behind = Some(Ok(None));
                Ok(Polled::End)
            }
            Ok(Err(error)) => Err(error),
            Err(TryRecvError::Empty) => Ok(Polled::Later),
            Err(TryRecvError::Disconnected) => Err(InputError::ReaderDied),
        }
    }

    /// Drops a chunk that was taken last and is not used: the next one says that its frames are missing, and has its cut.
    pub fn skip(&mut self, chunk: Chunk) {
        self.left = self.left.map(|left| left + 1);
        self.before.skipped = chunk.skipped + chunk.frames as u64;
        self.before.cut = chunk.cut;
        self.recycle(chunk);
    }

    /// Skips the chunk that was taken last, where its first frame was there before this time and another chunk waits, which
    /// takes its place; false where it stays.
    pub fn drop_late(&mut self, chunk: &mut Chunk, before_ns: u64) -> bool {
        chunk.read_ns.0 < before_ns && self.replace(chunk, |_, _| true)
    }

    /// Where chunks made room since this one was taken, lets the oldest that waits take its place, if `may` says so of both:
    /// it is not to be the younger ones that are lost.
    pub fn catch_up(&mut self, chunk: &mut Chunk, may: impl FnOnce(&Chunk, &Chunk) -> bool) {
        let lost = self.lost.0.load(Ordering::Acquire);
        if std::mem::replace(&mut self.lost.1, lost) != lost {
            let is_next = |old: &Chunk, new: &Chunk| old.end() == new.first_frame;
            self.replace(chunk, |old, new| !is_next(old, new) && may(old, new));
        }
    }

    fn replace(&mut self, chunk: &mut Chunk, may: impl FnOnce(&Chunk, &Chunk) -> bool) -> bool {
        let mut next = match self.next() {
            Ok(Ok(Some(next))) => next,
            Ok(other) => {
                self.behind = Some(other);
                return false;
            }
            // A thread that has died is found by the next poll.
            Err(_) => return false,
        };
        next.cut = chunk.cut || next.cuts > chunk.cuts;
        next.skipped = chunk.skipped + next.first_frame.saturating_sub(chunk.first_frame);
        if !may(chunk, &next) {
            self.behind = Some(Ok(Some(next)));
            return false;
        }
        self.skip(std::mem::take(chunk));
        *chunk = self.taken(next);
        true
    }

    /// What waits next.
    fn next(&mut self) -> Result<Next, TryRecvError> {
        self.behind.take().map_or_else(|| self.ready.try_recv(), Ok)
    }

    /// Notes what lies between the chunk and the one before.
    fn taken(&mut self, mut chunk: Chunk) -> Chunk {
        let before = std::mem::take(&mut self.before);
        let missing = chunk.first_frame.saturating_sub(before.next_frame);
        chunk.skipped = before.skipped + missing;
        chunk.cut = before.cut || chunk.cuts > before.cuts;
        self.before.next_frame = chunk.end();
        self.before.cuts = chunk.cuts;
        self.left = self.left.map(|left| left - 1);
        chunk
    }

    /// Counts the chunks that are ready.
    pub fn queued(&self) -> usize {
        self.ready.len() + usize::from(matches!(self.behind, Some(Ok(Some(_)))))
    }

    /// Gives the buffers of a chunk back for reuse; a device may still read them.
    pub fn recycle(&self, chunk: Chunk) {
        // Full, or the thread has ended: then it is freed.
        let _ = self.spare.try_send(chunk);
    }
}

/// The thread that decides where chunks begin.
struct Work {
    reader: Reader,
    intake: Arc<Intake>,
    spare: Receiver<Chunk>,
    /// For a chunk that stayed empty.
    done: Sender<Chunk>,
    detector: CutDetector,
    /// The next frame was looked at already, and there is a cut before it.
    begins_at_cut: bool,
    next_frame: u64,
    /// When the first frame was there.
    start_ns: Option<u64>,
}

impl Work {
    /// Reads to the end.
    fn run<W: Fn()>(mut self, ahead: Option<Ahead>, mut hand: Hand<W>) {
        let skip = self.intake.options.skip;
        let mut skipping = Skipping::new(skip);
        let done = self.done.clone();
        let mut input = None;
        let mut give = |mut chunk: Chunk| {
            chunk.input = *input.get_or_insert_with(|| digest(chunk.data()));
            let recycle = |chunk| drop(done.try_send(chunk));
            let mut given = skipping.take(chunk, recycle).into_iter();
            given.try_for_each(|chunk| hand.give(chunk))
        };
        let read = match ahead {
            Some(mut ahead) => {
                let read = self.read_ahead(&mut ahead, &mut give);
                // Not freed: the memory may be a GPU's, and to free that takes time.
                ahead.stop(|chunk| drop(self.done.try_send(chunk)));
                read
            }
            None => Ok(Behind::default()),
        };
        let read = read.and_then(|behind| self.read_on(behind, &mut give));
        let last = match (&read, skipping.end()) {
            (Err(Closed), _) | (Ok(Err(_)), Err(_)) => Ok(()),
            (Ok(_), Ok(given)) => given.into_iter().try_for_each(|chunk| hand.give(chunk)),
            (Ok(Ok(())), Err(frames)) => {
                let (name, skip) = (self.reader.name.clone(), skip.frames);
                return hand.end(Ok(Err(InputError::Skipped { name, frames, skip })));
            }
        };
        hand.end(last.and(read));
    }

    /// Gives whole chunks of plain frames, which other threads read, up to the first that is not.
    fn read_ahead(
        &mut self,
        ahead: &mut Ahead,
        give: &mut impl FnMut(Chunk) -> Result<(), Closed>,
    ) -> Result<Behind, Closed> {
        let mut index = 0;
        ahead.go_to(0, || self.empty_chunk(), |_| {});
        while self.wants(index) {
            let mut chunk = ahead.next(|| self.empty_chunk()).ok_or(Closed)?;
            chunk.index = index;
            let mut cuts = (0..chunk.grids.len()).filter(|k| self.is_cut(Some(chunk.grids[*k])));
            let mut cut = cuts.next();
            if cut == Some(0) {
                chunk.cut = true;
                cut = cuts.next();
            }
            if let Some(frames) = cut {
                chunk.frames = frames;
                self.begins_at_cut = true;
            }
            self.next_frame += chunk.frames as u64;
            if cut.is_none() && chunk.frames < self.intake.options.frames_per_chunk {
                let skipped = self.reader.skip(&ahead.frames, self.next_frame);
                return Ok(Behind {
                    index,
                    begun: Some(chunk),
                    broken: skipped.err(),
                });
            }
            index += 1;
            give(chunk)?;
            if cut.is_some() {
                // What was read behind it begins elsewhere now.
                let recycle = |chunk| drop(self.done.try_send(chunk));
                ahead.go_to(self.next_frame, || self.empty_chunk(), recycle);
            }
        }
        Ok(Behind {
            index,
            ..Behind::default()
        })
    }

    /// Gives everything behind what was read ahead.
    fn read_on(
        &mut self,
        mut behind: Behind,
        give: &mut impl FnMut(Chunk) -> Result<(), Closed>,
    ) -> Result<Result<(), InputError>, Closed> {
        while self.wants(behind.index) {
            let (mut chunk, end) = match behind.broken.take() {
                None => self.read_chunk(behind.begun.take()),
                Some(error) => (
                    behind.begun.take().unwrap_or_default(),
                    ChunkEnd::Broken(error),
                ),
            };
            chunk.index = behind.index;
            behind.index += 1;
            if chunk.frames > 0 {
                give(chunk)?;
            } else {
                let _ = self.done.try_send(chunk);
            }
            match end {
                ChunkEnd::Full => {}
                ChunkEnd::Cut(next) => behind.begun = Some(next),
                ChunkEnd::Input => return Ok(Ok(())),
                ChunkEnd::Broken(error) => return Ok(Err(error)),
            }
        }
        Ok(Ok(()))
    }

    fn wants(&self, index: u64) -> bool {
        let SourceOptions { chunks, late, .. } = self.intake.options;
        // Of those that are read some are dropped.
        chunks.is_none_or(|limit| late == Late::Drop || index < limit)
    }

    /// Reads until the chunk is full, the input ends, or a cut belongs to the next chunk. `begun` is a chunk that already
    /// holds its first frames.
    fn read_chunk(&mut self, begun: Option<Chunk>) -> (Chunk, ChunkEnd) {
        let mut chunk = begun.unwrap_or_else(|| self.empty_chunk());
        while chunk.frames < self.intake.options.frames_per_chunk {
            let k = chunk.frames;
            match self.reader.read_frame(chunk.frame_mut(k)) {
                Ok(true) => {}
                Ok(false) => return (chunk, ChunkEnd::Input),
                Err(error) => return (chunk, ChunkEnd::Broken(error)),
            }
            let read_ns = self.there_ns();
            let grid = self.intake.grid(&mut chunk);
            let cut = self.is_cut(grid);
            if cut && k > 0 {
                let mut next = self.empty_chunk();
                next.frame_mut(0).copy_from_slice(chunk.frame_mut(k));
                next.cut = true;
                self.take_in(&mut next, read_ns);
                return (chunk, ChunkEnd::Cut(next));
            }
            chunk.cut |= cut;
            self.take_in(&mut chunk, read_ns);
        }
        (chunk, ChunkEnd::Full)
    }

    /// When the frame that was just read was there. With `pace` it is not there before its time: this waits for that.
    fn there_ns(&mut self) -> u64 {
        let now = now_ns();
        let start_ns = *self.start_ns.get_or_insert(now);
        let Intake { header, options } = &*self.intake;
        let due_ns = header.due_ns(self.next_frame).filter(|_| options.pace);
        let Some(due_ns) = due_ns.map(|due_ns| start_ns.saturating_add(due_ns)) else {
            return now;
        };
        thread::sleep(Duration::from_nanos(due_ns.saturating_sub(now)));
        due_ns
    }

    /// Says whether there is a cut before the next frame, which has this grid.
    fn is_cut(&mut self, grid: Option<Grid>) -> bool {
        let is_known = std::mem::take(&mut self.begins_at_cut);
        is_known || grid.is_some_and(|grid| self.detector.is_cut(grid))
    }

    /// Counts the frame that was just read.
    fn take_in(&mut self, chunk: &mut Chunk, read_ns: u64) {
        let params = self.reader.params();
        if !params.is_empty() {
            chunk.params.push((chunk.frames, params.to_vec()));
        }
        self.intake.take_in(chunk, self.next_frame, read_ns);
        self.next_frame += 1;
    }

    /// A chunk without frames, in buffers that were given back and that no device reads any more, or in new ones.
    fn empty_chunk(&self) -> Chunk {
        for chunk in self.spare.try_iter().take(self.spare.len()) {
            if chunk.data.is_idle() {
                return self.intake.empty(chunk);
            }
            let _ = self.done.try_send(chunk);
        }
        self.intake.empty(Chunk::default())
    }
}

/// Where reading goes on behind what was read ahead.
#[derive(Default)]
struct Behind {
    /// Number of the next chunk.
    index: u64,
    /// That chunk, if it has frames already.
    begun: Option<Chunk>,
    /// Why nothing can be read from there.
    broken: Option<InputError>,
}

enum ChunkEnd {
    Full,
    Cut(Chunk),
    Input,
    Broken(InputError),
}

#[cfg(test)]
mod tests;
