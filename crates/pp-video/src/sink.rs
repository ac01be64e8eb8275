//! The sink: threads that write decoded frames behind the driver.
//!
//! The queue is bounded and being full is a normal answer. A write that fails ends the writing; the next push hands the
//! error over. A regular file appears under its name only at [`Sink::commit`], when every frame is in it; one that is to be
//! kept has another name before ([`Keep`]).
//!
//! One thread writes, in order. A file in memory would keep that thread busy with copies, so several threads fill it,
//! each a chunk at a place that the first thread has reserved: a disk that is full is found there, and not by a signal in
//! the middle of a copy.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded};
use memmap2::MmapOptions;

use super::buffer::Buffer;
use super::header::Header;
use super::kept::{self, Keep, Record};
use super::y4m::{Frames, Params, write_header};
use pp_job::output::{OutputError, StagedFile};

/// Threads from which on filling a file in memory is faster than writing it.
const THREADS_THAT_PAY: usize = 4;

/// Whole frames with their parameters, and how many frames are repeated before them.
type Batch = (Buffer, Params, u64);

/// How the sink writes.
#[derive(Clone, Debug)]
pub struct SinkOptions {
    /// Batches of frames that wait to be written.
    pub queue: usize,
    /// Threads that fill a file in memory; each has one batch more.
    pub threads: usize,
    /// Keep what was written.
    pub keep: Option<Keep>,
    /// Frames may be repeated: one thread writes then, and keeps the last frames.
    pub repeats: bool,
}

/// The driver's end of the writing threads.
///
/// # If dropped
/// Without a commit a regular file leaves nothing behind. The drop does not wait for the threads: the reader of a pipe may
/// be stuck. Where a file is kept, it waits until all that was pushed is in it.
#[derive(Debug)]
pub struct Sink {
    queue: Option<Sender<Batch>>,
    spare: Receiver<Buffer>,
    /// The thread takes nothing more; what lies in the queue stays there.
    has_ended: Arc<AtomicBool>,
    capacity: usize,
    is_kept: bool,
    record: Option<Record>,
    /// None once its result was handed over.
    thread: Option<JoinHandle<Result<Written, OutputError>>>,
}

/// What was written, and how many frames are in it.
type Written = (StagedFile, u64);

impl Sink {
    /// Opens `target` (`-` is standard output) and starts writing; gives these buffers out first. `wake` is called on the
    /// writing thread after each batch that it takes, and when it fails.
    ///
    /// # Errors
    /// The target cannot be written to, or no thread could be started.
    pub fn open(
        target: &Path,
        header: &Header,
        options: SinkOptions,
        buffers: Vec<Buffer>,
        wake: impl Fn() + Send + 'static,
    ) -> Result<Self, OutputError> {
        let (file, record) = match options.keep {
            None => (StagedFile::create(target)?, None),
            Some(keep) => kept::open(target, header, keep)?,
        };
        let capacity = options.queue.max(1);
        let (queue, work) = bounded(capacity);
        let has_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&has_ended);
        // One is being written and one is in the hands of the driver.
        let (spare_in, spare) = bounded((capacity + 2).max(buffers.len()));
        for buffer in buffers {
            let _ = spare_in.try_send(buffer);
        }
        let mut writer = Writer {
            file,
            header: header.clone(),
            spare: spare_in,
            frames: 0,
            last: None,
            repeats: options.repeats,
        };
        let thread = thread::Builder::new().name("sink".into());
        let started = thread.spawn(move || {
            let batches = work.iter().inspect(|_| wake());
            let result = writer.write_all(batches, options.threads);
            // A failure must be visible before the driver is told to look.
            drop(work);
            ended.store(true, Ordering::Release);
            wake();
            match result {
                Ok(()) => Ok((writer.file, writer.frames)),
                Err(error) => Err(writer.file.write_error(error)),
            }
        });
        let thread = started.map_err(|source| OutputError::Create {
            path: target.into(),
            source,
        })?;
        Ok(Self {
            queue: Some(queue),
            spare,
            has_ended,
            capacity,
            is_kept: record.is_some(),
            record,
            thread: Some(thread),
        })
    }

    /// Gives a buffer that was written before, or an empty one.
    pub fn buffer(&self) -> Buffer {
        self.spare.try_recv().unwrap_or_default()
    }

    /// Says which input the frames are made of, before the first are pushed: where the output is kept that is written beside it,
    /// and where it is gone on in, compared.
    ///
    /// # Errors
    /// What was kept is of another input, or nothing can be written beside it.
    pub fn of_input(&mut self, digest: u64) -> Result<(), OutputError> {
        let record = self.record.as_mut();
        record.map_or(Ok(()), |record| record.of_input(digest))
    }

    /// Queues whole frames. Waits while the queue is full; [`Sink::has_room_beside`] says whether it would. With
    /// [`SinkOptions::repeats`] the frame before them is written `again` times more first; before all others, their first one.
    ///
    /// # Errors
    /// An earlier write failed. Handed over once; what is pushed afterwards goes nowhere.
    pub fn push(&mut self, frames: Buffer, params: Params, again: u64) -> Result<(), OutputError> {
        match self
            .queue
            .as_ref()
            .map(|queue| queue.send((frames, params, again)))
        {
            Some(Err(_)) => self.result().map(|_| ()),
            _ => Ok(()),
        }
    }

    /// Says whether [`Sink::push`] would not wait after so many others that are still to come: there is room, or the thread
    /// has failed and the push says so.
    pub fn has_room_beside(&self, coming: usize) -> bool {
        self.has_ended.load(Ordering::Acquire) || self.queued() + coming < self.capacity
    }

    /// Counts the batches that wait to be written.
    pub fn queued(&self) -> usize {
        self.queue.as_ref().map_or(0, Sender::len)
    }

    /// Waits until everything is written, gives the file its name, and says how many frames are in it.
    ///
    /// # Errors
    /// A write failed or the file could not be named; then nothing is left under the final name.
    pub fn commit(mut self) -> Result<u64, OutputError> {
        match self.result()? {
            Some((file, frames)) => {
                file.commit()?;
                self.record.take().into_iter().for_each(Record::remove);
                Ok(frames)
            }
            None => Ok(0),
        }
    }

    /// Ends the thread and takes what it returned, once.
    fn result(&mut self) -> Result<Option<Written>, OutputError> {
        self.queue = None;
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result.map(Some),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(None),
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if self.is_kept {
            self.queue = None;
            // Whatever went wrong, what was written is kept.
            let _ = self.thread.take().map(JoinHandle::join);
        }
    }
}

/// The writing thread.
struct Writer {
    file: StagedFile,
    header: Header,
    spare: Sender<Buffer>,
    frames: u64,
    /// The frames written last, where frames may be repeated.
    last: Option<Buffer>,
    repeats: bool,
}

impl Writer {
    fn write_all(
        &mut self,
        batches: impl Iterator<Item = Batch>,
        threads: usize,
    ) -> io::Result<()> {
        if self.file.written() == 0 {
            write_header(&mut self.file, &self.header)?;
        }
        let in_memory = self.file.in_memory().map(File::try_clone);
        match in_memory.filter(|_| threads >= THREADS_THAT_PAY && !self.repeats) {
            Some(file) => self.fill_in(&file?, batches, threads),
            None => self.write_in_turn(batches),
        }
    }

    fn write_in_turn(&mut self, batches: impl Iterator<Item = Batch>) -> io::Result<()> {
        for (buffer, params, again) in batches {
            if self.repeats {
                let bytes = self.header.frame_bytes();
                let frame = match &self.last {
                    Some(last) => &last[last.len() - bytes..],
                    None => &buffer[..bytes],
                };
                let plain = Params::new();
                let frame = frames(&self.header, frame, &plain);
                (0..again).try_for_each(|_| frame.write(&mut self.file))?;
                self.frames += again;
            }
            let frames = frames(&self.header, &buffer, &params);
            frames.write(&mut self.file)?;
            self.frames += frames.count();
            let done = match self.repeats {
                true => self.last.replace(buffer),
                false => Some(buffer),
            };
            // Full: then it is freed.
            let _ = done.map(|buffer| self.spare.try_send(buffer));
        }
        self.file.flush()
    }

    /// Lets several threads write, each batch into memory that has been reserved for it.
    fn fill_in(
        &mut self,
        file: &File,
        batches: impl Iterator<Item = Batch>,
        threads: usize,
    ) -> io::Result<()> {
        let (header, spare) = (self.header.clone(), self.spare.clone());
        let fill = |to_do: Receiver<(u64, Batch)>| {
            for (at, (buffer, params, _)) in to_do {
                let frames = frames(&header, &buffer, &params);
                let mut options = MmapOptions::new();
                options.offset(at).len(frames.file_bytes() as usize);
                // SAFETY: the file has no name, so that this process alone has it (`StagedFile::in_memory`), and it is
                // never cut: the range lies inside it, its pages exist (`extend`), and no other thread has the range.
                let mut map = unsafe { options.map_mut(file) }?;
                frames.write(&mut &mut map[..])?;
                // Full: then it is freed.
                let _ = spare.try_send(buffer);
            }
            Ok(())
        };
        let fill = &fill;
        // The channel is made inside: whatever ends the closure ends the threads.
        thread::scope(|scope| {
            let (jobs, to_do) = bounded(threads);
            let start = |_| {
                let to_do = to_do.clone();
                thread::Builder::new().spawn_scoped(scope, move || fill(to_do))
            };
            let filling: Vec<_> = (0..threads).map(start).collect::<io::Result<_>>()?;
            drop(to_do);
            let mut reserved = Ok(());
            for (buffer, params, _) in batches {
                let frames = frames(&self.header, &buffer, &params);
                let (count, bytes) = (frames.count(), frames.file_bytes());
                reserved = self.file.extend(bytes).and_then(|at| {
                    self.frames += count;
                    let job = (at, (buffer, params, 0));
                    jobs.send(job).map_err(|_| io::ErrorKind::Other.into())
                });
                // A thread ends early only when it has failed.
                if reserved.is_err() || filling.iter().any(|thread| thread.is_finished()) {
                    break;
                }
            }
            drop(jobs);
            let filled = filling.into_iter().map(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            filled.fold(Ok(()), io::Result::and).and(reserved)
        })
    }
}

fn frames<'a>(header: &Header, bytes: &'a [u8], params: &'a Params) -> Frames<'a> {
    Frames {
        bytes,
        frame_bytes: header.frame_bytes(),
        params,
    }
}

#[cfg(test)]
mod tests;
