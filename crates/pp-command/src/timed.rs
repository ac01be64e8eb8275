//! Work on one stream of a GPU: payloads that it reads, copies to the host, and its time, asked after without waiting.

use std::time::{Duration, Instant};

use pp_device::{CudaError, DeviceBuffer, DevicePtr, Event, PinnedBuffer, Stream};
use pp_runtime::stage::{Progress, Worked};
use pp_transport::error::TransportError;
use pp_transport::gpu::DeviceRx;

/// Runs `issue`, which issues work that reads a payload, on nothing where there is none.
///
/// # Errors
/// The stream takes no work, or `issue` fails.
pub fn read_on<R, E: From<TransportError>>(
    payload: Option<&DeviceRx>,
    stream: &Stream,
    issue: impl FnOnce(DevicePtr) -> Result<R, E>,
) -> Result<R, E> {
    match payload {
        Some(payload) => payload.read_on(stream, issue),
        None => issue(DevicePtr { address: 0, len: 0 }),
    }
}

/// Memory on the GPU, and as much on the host, to which the GPU copies from there.
#[derive(Debug)]
pub struct Staged {
    on_device: DeviceBuffer,
    /// The memory on the host.
    pub host: PinnedBuffer,
}

impl Staged {
    /// Takes so many bytes on both, for work on this stream.
    ///
    /// # Errors
    /// There is not so much memory.
    pub fn new(stream: &Stream, bytes: usize) -> Result<Self, CudaError> {
        let staged = Self {
            on_device: DeviceBuffer::new(stream.device(), bytes)?,
            host: PinnedBuffer::new(stream.device(), bytes)?,
        };
        // Makes the events that follow their uses, now and not with a chunk.
        staged.is_used_by(stream)?;
        Ok(staged)
    }

    /// Notes that work which was issued to this stream uses both: they are freed after it.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn is_used_by(&self, stream: &Stream) -> Result<(), CudaError> {
        let host = self.host.used_by(stream);
        // Both know, also where the driver refuses one of them.
        self.on_device.used_by(stream).and(host)
    }

    /// Gives a part of the memory on the GPU.
    #[must_use]
    pub fn part(&self, at: usize, len: usize) -> DevicePtr {
        let address = self.on_device.address() + at as u64;
        DevicePtr { address, len }
    }
}

/// A stream whose work is timed by when the driver sees it done, which holds up nothing. Events are made once and used again.
#[derive(Debug)]
pub struct Timed {
    /// The stream.
    pub stream: Stream,
    free: Vec<Event>,
    /// When the last work was seen done.
    last: Option<Instant>,
}

/// Work that was issued.
#[derive(Debug)]
pub struct Issued {
    since: Instant,
    end: Event,
}

impl Issued {
    /// Ends the work: all of it has been issued to this stream.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn close(&self, stream: &Stream) -> Result<(), CudaError> {
        self.end.record(stream)
    }
}

impl Timed {
    /// Makes events for so much work at once; more are made when they are wanted.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new(stream: Stream, works: usize) -> Result<Self, CudaError> {
        let make = |_| Event::new(stream.device());
        let free = (0..works).map(make).collect::<Result<_, _>>()?;
        Ok(Self {
            stream,
            free,
            last: None,
        })
    }

    /// Begins work: what is issued from here on.
    ///
    /// # Errors
    /// The driver refuses another event.
    pub fn open(&mut self) -> Result<Issued, CudaError> {
        let end = match self.free.pop() {
            Some(end) => end,
            None => Event::new(self.stream.device())?,
        };
        let since = Instant::now();
        Ok(Issued { since, end })
    }

    /// Gives up work that no caller asks for any more; its event is recorded anew behind other work.
    pub fn forget(&mut self, work: Issued) {
        self.free.push(work.end);
    }

    /// Asks how far work is that was closed: the oldest that was not seen done.
    ///
    /// # Errors
    /// The device failed.
    pub fn poll(&mut self, work: Issued) -> Result<Progress<Worked, Issued>, CudaError> {
        if !work.end.is_done()? {
            return Ok(Progress::UnderWay(work));
        }
        let now = Instant::now();
        // Work that was issued ahead begins at the end of the one before.
        let last = self.last.replace(now).unwrap_or(work.since);
        let began = work.since.max(last);
        self.free.push(work.end);
        let ns = |time: Duration| time.as_nanos() as u64;
        Ok(Progress::Done(Worked {
            work_ns: ns(now - began),
            idle_ns: ns(began - last),
        }))
    }
}
