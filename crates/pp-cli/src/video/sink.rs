//! The sink: a thread that writes decoded frames behind the driver.
//!
//! The queue is bounded and being full is a normal answer. A write that fails ends the thread; the next push hands the
//! error over. A regular file appears under its name only at [`Sink::commit`], when every frame is in it.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::OutputError;
use super::buffer::Buffer;
use super::header::Header;
use super::staged::StagedFile;
use super::y4m::{write_frame, write_header};

/// The driver's end of the writing thread.
///
/// # If dropped
/// Without a commit a regular file leaves nothing behind. Nobody waits for the thread: the reader of a pipe may be stuck.
#[derive(Debug)]
pub(crate) struct Sink {
    queue: Option<Sender<Buffer>>,
    spare: Receiver<Buffer>,
    /// The thread takes nothing more; what lies in the queue stays there.
    has_ended: Arc<AtomicBool>,
    capacity: usize,
    /// None once its result was handed over.
    thread: Option<JoinHandle<Result<Written, OutputError>>>,
}

#[derive(Debug)]
struct Written {
    file: StagedFile,
    frames: u64,
}

impl Sink {
    /// Opens `target` (`-` is standard output) and starts writing; gives these buffers out first. `wake` is called on the writing thread after each
    /// buffer that it takes, and when it fails.
    ///
    /// # Errors
    /// The target cannot be written to, or no thread could be started.
    pub(crate) fn open(
        target: &Path,
        header: &Header,
        queue: usize,
        buffers: Vec<Buffer>,
        wake: impl Fn() + Send + 'static,
    ) -> Result<Self, OutputError> {
        let file = StagedFile::create(target)?;
        let capacity = queue.max(1);
        let (queue, work) = bounded(capacity);
        let has_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&has_ended);
        // One is being written and one is in the hands of the driver.
        let (spare_in, spare) = bounded((capacity + 2).max(buffers.len()));
        for buffer in buffers {
            let _ = spare_in.try_send(buffer);
        }
        let header = header.clone();
        let thread = thread::Builder::new()
            .name("sink".into())
            .spawn(move || {
                let result = write_all(file, &header, &work, &spare_in, &wake);
                // A failure must be visible before the driver is told to look.
                drop(work);
                ended.store(true, Ordering::Release);
                wake();
                result
            })
            .map_err(|source| OutputError::Create {
                path: target.into(),
                source,
            })?;
        Ok(Self {
            queue: Some(queue),
            spare,
            has_ended,
            capacity,
            thread: Some(thread),
        })
    }

    /// A buffer that was written before, or an empty one.
    pub(crate) fn buffer(&self) -> Buffer {
        self.spare.try_recv().unwrap_or_default()
    }

    /// Queues whole frames. Waits while the queue is full; [`Sink::has_room_beside`] says whether it would.
    ///
    /// # Errors
    /// An earlier write failed. Handed over once; what is pushed afterwards goes nowhere.
    pub(crate) fn push(&mut self, frames: Buffer) -> Result<(), OutputError> {
        match self.queue.as_ref().map(|queue| queue.send(frames)) {
            Some(Err(_)) => self.result().map(|_| ()),
            _ => Ok(()),
        }
    }

    /// Whether [`Sink::push`] would not wait after so many others that are still to come: there is room, or the thread
    /// has failed and the push says so.
    pub(crate) fn has_room_beside(&self, coming: usize) -> bool {
        self.has_ended.load(Ordering::Acquire) || self.queued() + coming < self.capacity
    }

    /// Buffers that wait to be written.
    pub(crate) fn queued(&self) -> usize {
        self.queue.as_ref().map_or(0, Sender::len)
    }

    /// Waits until everything is written, gives the file its name, and says how many frames are in it.
    ///
    /// # Errors
    /// A write failed or the file could not be named; then nothing is left under the final name.
    pub(crate) fn commit(mut self) -> Result<u64, OutputError> {
        match self.result()? {
            Some(Written { file, frames }) => file.commit().map(|()| frames),
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

fn write_all(
    mut file: StagedFile,
    header: &Header,
    work: &Receiver<Buffer>,
    spare: &Sender<Buffer>,
    wake: &impl Fn(),
) -> Result<Written, OutputError> {
    let mut frames = 0;
    let result = write_header(&mut file, header).and_then(|()| {
        for buffer in work {
            wake();
            for frame in buffer.chunks_exact(header.frame_bytes()) {
                write_frame(&mut file, frame)?;
                frames += 1;
            }
            // Full: then it is freed.
            let _ = spare.try_send(buffer);
        }
        file.flush()
    });
    match result {
        Ok(()) => Ok(Written { file, frames }),
        Err(error) => Err(file.write_error(error)),
    }
}

#[cfg(test)]
mod tests;
