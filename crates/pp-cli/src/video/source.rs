//! The source: a thread that reads frames into chunks ahead of the driver.
//!
//! The queue is bounded, so a fast file cannot fill memory; buffers come back through [`Source::recycle`], so a long run
//! allocates no more than the queue and the driver hold at once. Errors travel in the queue behind the chunks that were
//! read before them, so what was wrong is said at its place and not before. A hard cut always begins a chunk.

use std::io;
use std::thread;

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use pp_runtime::clock::now_ns;

use super::InputError;
use super::buffer::Buffer;
use super::header::Header;
use super::noise::Noise;
use super::scene::CutDetector;
use super::y4m::Reader;

/// Buffers that may lie between recycling and reuse; more are freed.
const SPARE_CHUNKS: usize = 64;

/// What the source does besides reading.
#[derive(Debug)]
pub(crate) struct SourceOptions {
    /// Frames of a chunk; the last one, and one that a cut ends, have fewer.
    pub(crate) frames_per_chunk: usize,
    /// Stop after so many chunks.
    pub(crate) chunks: Option<u64>,
    /// Noise to add to every frame.
    pub(crate) noise: Option<Noise>,
    /// Keep the frames as they were before the noise.
    pub(crate) keep_clean: bool,
    /// Look for hard cuts.
    pub(crate) scene_cuts: bool,
    /// Chunks read ahead.
    pub(crate) queue: usize,
}

impl Default for SourceOptions {
    fn default() -> Self {
        Self {
            frames_per_chunk: 4,
            chunks: None,
            noise: None,
            keep_clean: false,
            scene_cuts: true,
            queue: 4,
        }
    }
}

/// Some successive frames, as they lie in the file.
#[derive(Debug, Default)]
pub(crate) struct Chunk {
    /// Counts from 0.
    pub(crate) index: u64,
    /// Number of its first frame in the input.
    pub(crate) first_frame: u64,
    /// How many it holds, at least one.
    pub(crate) frames: usize,
    /// A hard cut lies right before its first frame.
    pub(crate) cut: bool,
    /// When its first and its last frame had been read, in nanoseconds of the monotonic clock.
    pub(crate) read_ns: (u64, u64),
    frame_bytes: usize,
    data: Buffer,
    clean: Vec<u8>,
}

impl Chunk {
    /// The frames one after the other, each planar.
    pub(crate) fn data(&self) -> &[u8] {
        &self.data[..self.frames * self.frame_bytes]
    }

    /// The memory that they lie in; it may hold more.
    pub(crate) fn memory(&self) -> &Buffer {
        &self.data
    }

    /// The same before noise was added, when the options ask to keep it.
    pub(crate) fn clean(&self) -> Option<&[u8]> {
        self.clean.get(..self.frames * self.frame_bytes)
    }

    fn frame_mut(&mut self, k: usize) -> &mut [u8] {
        &mut self.data[k * self.frame_bytes..(k + 1) * self.frame_bytes]
    }
}

/// What [`Source::poll`] finds.
#[derive(Debug)]
pub(crate) enum Polled {
    /// The next chunk.
    Ready(Chunk),
    /// None yet; the wake callback will be called.
    Later,
    /// None any more.
    End,
}

/// The driver's end of the reading thread.
///
/// # If dropped
/// The thread ends at its next chunk. Nobody waits for it: a pipe may never give another byte.
#[derive(Debug)]
pub(crate) struct Source {
    /// `None` is the end: without it, the thread has died.
    ready: Receiver<Result<Option<Chunk>, InputError>>,
    spare: Sender<Chunk>,
    /// Keeps what was recycled when the thread has read everything: to free it takes time.
    _kept: Receiver<Chunk>,
}

impl Source {
    /// Starts reading, into these buffers first. `wake` is called on the reading thread after each chunk, after an error
    /// and at the end.
    ///
    /// # Errors
    /// No thread could be started.
    pub(crate) fn start(
        reader: Reader,
        options: SourceOptions,
        buffers: Vec<Buffer>,
        wake: impl Fn() + Send + 'static,
    ) -> io::Result<Self> {
        let (ready_in, ready) = bounded(options.queue.max(1));
        let (spare, spare_out) = bounded(SPARE_CHUNKS);
        for data in buffers {
            let chunk = Chunk {
                data,
                ..Chunk::default()
            };
            // Full: then it is freed.
            let _ = spare.try_send(chunk);
        }
        let kept = spare_out.clone();
        let work = Work {
            done: spare.clone(),
            header: reader.header().clone(),
            reader,
            options,
            spare: spare_out,
            detector: CutDetector::default(),
            next_frame: 0,
        };
        thread::Builder::new()
            .name("source".into())
            .spawn(move || {
                if work.run(&ready_in, &wake) {
                    // Without a receiver nobody wants to know.
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

    /// The next chunk if there is one, without waiting.
    ///
    /// # Errors
    /// The input broke behind the last chunk, or the reading thread is gone. Nothing comes after it.
    pub(crate) fn poll(&self) -> Result<Polled, InputError> {
        match self.ready.try_recv() {
            Ok(result) => Ok(result?.map_or(Polled::End, Polled::Ready)),
            Err(TryRecvError::Empty) => Ok(Polled::Later),
            Err(TryRecvError::Disconnected) => Err(InputError::ReaderDied),
        }
    }

    /// Chunks that are ready.
    pub(crate) fn queued(&self) -> usize {
        self.ready.len()
    }

    /// Gives the buffers of a chunk back for reuse.
    pub(crate) fn recycle(&self, chunk: Chunk) {
        // Full, or the thread has ended: then it is freed.
        let _ = self.spare.try_send(chunk);
    }
}

/// The reading thread.
struct Work {
    reader: Reader,
    header: Header,
    options: SourceOptions,
    spare: Receiver<Chunk>,
    /// For a chunk that stayed empty.
    done: Sender<Chunk>,
    detector: CutDetector,
    next_frame: u64,
}

impl Work {
    /// Reads to the end; false when it did not get there.
    fn run(mut self, ready: &Sender<Result<Option<Chunk>, InputError>>, wake: &impl Fn()) -> bool {
        let mut index = 0;
        let mut begun = None;
        while self.options.chunks.is_none_or(|limit| index < limit) {
            let (chunk, end) = self.read_chunk(index, begun.take());
            index += 1;
            if chunk.frames > 0 {
                if ready.send(Ok(Some(chunk))).is_err() {
                    return false;
                }
                wake();
            } else {
                let _ = self.done.try_send(chunk);
            }
            match end {
                ChunkEnd::Full => {}
                ChunkEnd::Cut(next) => begun = Some(next),
                ChunkEnd::Input => return true,
                ChunkEnd::Broken(error) => {
                    // Without a receiver nobody wants to know.
                    let _ = ready.send(Err(error));
                    return false;
                }
            }
        }
        true
    }

    /// Reads until the chunk is full, the input ends, or a cut belongs to the next chunk. `begun` is a chunk that already
    /// holds its first frame.
    fn read_chunk(&mut self, index: u64, begun: Option<Chunk>) -> (Chunk, ChunkEnd) {
        let mut chunk = begun.unwrap_or_else(|| self.empty_chunk());
        chunk.index = index;
        while chunk.frames < self.options.frames_per_chunk.max(1) {
            let k = chunk.frames;
            match self.reader.read_frame(chunk.frame_mut(k)) {
                Ok(true) => {}
                Ok(false) => return (chunk, ChunkEnd::Input),
                Err(error) => return (chunk, ChunkEnd::Broken(error)),
            }
            let read_ns = now_ns();
            let cut =
                self.options.scene_cuts && self.detector.is_cut(&self.header, chunk.frame_mut(k));
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

    /// Counts the frame that was read behind those the chunk holds, after keeping a copy and adding noise.
    fn take_in(&mut self, chunk: &mut Chunk, read_ns: u64) {
        let k = chunk.frames;
        if k == 0 {
            chunk.first_frame = self.next_frame;
            chunk.read_ns.0 = read_ns;
        }
        chunk.read_ns.1 = read_ns;
        if self.options.keep_clean {
            let range = k * chunk.frame_bytes..(k + 1) * chunk.frame_bytes;
            chunk.clean.resize(chunk.data.len(), 0);
            chunk.clean[range.clone()].copy_from_slice(&chunk.data[range]);
        }
        if let Some(noise) = &self.options.noise {
            noise.add(self.next_frame, chunk.frame_mut(k));
        }
        chunk.frames += 1;
        self.next_frame += 1;
    }

    fn empty_chunk(&self) -> Chunk {
        let mut chunk = self.spare.try_recv().unwrap_or_default();
        chunk.frame_bytes = self.header.frame_bytes();
        chunk
            .data
            .resize(self.options.frames_per_chunk.max(1) * chunk.frame_bytes);
        (chunk.frames, chunk.cut) = (0, false);
        chunk
    }
}

enum ChunkEnd {
    Full,
    Cut(Chunk),
    Input,
    Broken(InputError),
}

#[cfg(test)]
mod tests;
