//! The source: threads that read frames into chunks ahead of the driver.
//!
//! The queue is bounded, so a fast file cannot fill memory; buffers come back through [`Source::recycle`], so a long run
//! allocates no more than the queue, the readers and the driver hold at once. Errors travel in the queue behind the chunks
//! that were read before them. A hard cut always begins a chunk.
//!
//! One thread decides where chunks begin. A pipe it reads itself. Of a file other threads read whole chunks ahead of it
//! (`ahead`), as long as frames follow each other without parameters: from the first that does not, this thread reads
//! on, so that an end, a break and a parameter are seen in one place.

mod ahead;
mod chunk;
mod skipping;

use std::sync::Arc;
use std::{io, thread};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use pp_runtime::clock::now_ns;

use self::ahead::Ahead;
use self::chunk::Intake;
pub use self::chunk::{Chunk, Skip, SourceOptions};
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

/// What the reading threads say, in the order of the input.
type Next = Result<Option<Chunk>, InputError>;

/// The driver's end of the reading threads.
///
/// # If dropped
/// The threads end at their next chunk. The drop does not wait for them: a pipe may never give another byte.
#[derive(Debug)]
pub struct Source {
    /// `None` is the end: without it, the thread has died.
    ready: Receiver<Next>,
    spare: Sender<Chunk>,
    /// Keeps what was recycled when everything has been read: to free it takes time.
    _kept: Receiver<Chunk>,
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
        let intake = Arc::new(Intake { header, options });
        let ahead = match reader.plain_frames() {
            Some(frames) => Some(Ahead::start(frames, &intake)?),
            None => None,
        };
        let kept = spare_out.clone();
        let work = Work {
            reader,
            intake,
            done: spare.clone(),
            spare: spare_out,
            detector: CutDetector::default(),
            begins_at_cut: false,
            next_frame: 0,
        };
        thread::Builder::new()
            .name("source".into())
            .spawn(move || {
                if work.run(ahead, &ready_in, &wake) {
                    // Without a receiver the driver has ended.
                    let _ = ready_in.send(Ok(None));
                }
                // The end must be visible before the driver is told to look.
                drop(ready_in);
                wake();
            })?;
        Ok(Self {
            ready,
            spare,
            _kept: kept,
        })
    }

    /// Gives the next chunk if there is one, without waiting.
    ///
    /// # Errors
    /// The input broke behind the last chunk, or the reading thread is gone. Nothing comes after it.
    pub fn poll(&self) -> Result<Polled, InputError> {
        match self.ready.try_recv() {
            Ok(next) => Ok(next?.map_or(Polled::End, Polled::Ready)),
            Err(TryRecvError::Empty) => Ok(Polled::Later),
            Err(TryRecvError::Disconnected) => Err(InputError::ReaderDied),
        }
    }

    /// Counts the chunks that are ready.
    pub fn queued(&self) -> usize {
        self.ready.len()
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
}

/// The driver is gone.
struct Closed;

impl Work {
    /// Reads to the end; false when it did not get there.
    fn run(mut self, ahead: Option<Ahead>, ready: &Sender<Next>, wake: &impl Fn()) -> bool {
        let skip = self.intake.options.skip;
        let mut skipping = Skipping::new(skip);
        let done = self.done.clone();
        let hand_on = |chunk| {
            ready.send(Ok(Some(chunk))).map_err(|_| Closed)?;
            wake();
            Ok(())
        };
        let mut give = |chunk| {
            let recycle = |chunk| drop(done.try_send(chunk));
            let mut given = skipping.take(chunk, recycle).into_iter();
            given.try_for_each(hand_on)
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
            (Ok(_), Ok(given)) => given.into_iter().try_for_each(hand_on),
            (Ok(Ok(())), Err(frames)) => {
                let (name, skip) = (self.reader.name.clone(), skip.frames);
                let error = InputError::Skipped { name, frames, skip };
                // Without a receiver the driver has ended.
                let _ = ready.send(Err(error));
                return false;
            }
        };
        match last.and(read) {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                let _ = ready.send(Err(error));
                false
            }
            Err(Closed) => false,
        }
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
        let chunks = self.intake.options.chunks;
        chunks.is_none_or(|limit| index < limit)
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
            let read_ns = now_ns();
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
