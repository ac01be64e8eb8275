//! Work on one stream of a GPU: payloads that it reads, copies to the host, and its time, asked after without waiting.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pp_device::{CudaError, Device, DeviceBuffer, DevicePtr, Event, PinnedBuffer, Stream};
use pp_runtime::stage::{Progress, Worked};
use pp_transport::error::TransportError;
use pp_transport::gpu::DeviceRx;

/// Runs `issue`, which issues work that reads a payload, on nothing where there is none.
pub(crate) fn read_on<R, E: From<TransportError>>(
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
pub struct Staged {
    on_device: DeviceBuffer,
    pub(crate) host: PinnedBuffer,
}

impl Staged {
    pub(crate) fn new(stream: &Stream, bytes: usize) -> Result<Self, CudaError> {
        let staged = Self {
            on_device: DeviceBuffer::new(stream.device(), bytes)?,
            host: PinnedBuffer::new(stream.device(), bytes)?,
        };
        // Makes the events that follow their uses, now and not with a chunk.
        staged.is_used_by(stream)?;
        Ok(staged)
    }

    pub(crate) fn is_used_by(&self, stream: &Stream) -> Result<(), CudaError> {
        let host = self.host.used_by(stream);
        // Both know, also where the driver refuses one of them.
        self.on_device.used_by(stream).and(host)
    }

    /// Part of the memory on the GPU.
    pub(crate) fn part(&self, at: usize, len: usize) -> DevicePtr {
        let address = self.on_device.address() + at as u64;
        DevicePtr { address, len }
    }
}

/// Two events with a time around some work. Each makes its stream wait, 3 µs on an H200, so this is for what is seldom.
pub(crate) struct Span {
    pub(crate) start: Event,
    pub(crate) end: Event,
}

impl Span {
    pub(crate) fn new(device: &Device) -> Result<Self, CudaError> {
        Ok(Self {
            start: Event::timed(device)?,
            end: Event::timed(device)?,
        })
    }

    /// The work to be timed has been issued.
    pub(crate) fn close(&self, stream: &Stream) -> Result<(), CudaError> {
        self.end.record(stream)
    }

    /// Time between the events, once both are done.
    pub(crate) fn ns(&self) -> Result<u64, CudaError> {
        self.end.elapsed_ns(&self.start)
    }
}

/// A stream whose work is timed by when the driver sees it done, which holds up nothing. Events are made once and used again.
pub(crate) struct Timed {
    pub(crate) stream: Stream,
    free: Vec<Event>,
    /// When the last work was seen done.
    last: Option<Instant>,
}

/// Work that was issued.
pub struct Issued {
    since: Instant,
    end: Event,
}

impl Issued {
    /// All of the work has been issued.
    pub(crate) fn close(&self, stream: &Stream) -> Result<(), CudaError> {
        self.end.record(stream)
    }
}

/// Works of a source, oldest first: each is taken when its chunk was accepted, or forgotten.
#[derive(Default)]
pub(crate) struct Works {
    under_way: VecDeque<Issued>,
    done: VecDeque<Done>,
    /// So many of the oldest under way nobody asks for.
    forgotten: usize,
}

impl Works {
    pub(crate) fn with_capacity(works: usize) -> Self {
        Self {
            under_way: VecDeque::with_capacity(works),
            done: VecDeque::with_capacity(works),
            forgotten: 0,
        }
    }

    pub(crate) fn push(&mut self, work: Issued) {
        self.under_way.push_back(work);
    }

    /// Looks which are done by now: the sooner, the better their times.
    pub(crate) fn look(&mut self, timed: &mut Timed) -> Result<(), CudaError> {
        while let Some(work) = self.under_way.pop_front() {
            match timed.poll(work)? {
                Progress::Done(_) if self.forgotten > 0 => self.forgotten -= 1,
                Progress::Done(done) => self.done.push_back(done),
                Progress::UnderWay(work) => {
                    self.under_way.push_front(work);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Nobody asks for the oldest.
    pub(crate) fn forget(&mut self) {
        if self.done.pop_front().is_none() {
            self.forgotten += 1;
        }
    }

    /// The oldest, if it is done.
    pub(crate) fn take(&mut self, timed: &mut Timed) -> Result<Option<Done>, CudaError> {
        self.look(timed)?;
        Ok(self.done.pop_front())
    }
}

/// Work that is done.
pub(crate) struct Done {
    pub(crate) work_ns: u64,
    /// Between the end of the work before and the beginning of this.
    pub(crate) idle_ns: u64,
}

impl From<Done> for Worked {
    fn from(Done { work_ns, idle_ns }: Done) -> Self {
        Self { work_ns, idle_ns }
    }
}

impl Timed {
    /// With events for so much work at once; more are made when they are wanted.
    pub(crate) fn new(stream: Stream, works: usize) -> Result<Self, CudaError> {
        let make = |_| Event::new(stream.device());
        let free = (0..works).map(make).collect::<Result<_, _>>()?;
        Ok(Self {
            stream,
            free,
            last: None,
        })
    }

    /// Work that is issued from here on.
    pub(crate) fn open(&mut self) -> Result<Issued, CudaError> {
        let end = match self.free.pop() {
            Some(end) => end,
            None => Event::new(self.stream.device())?,
        };
        let since = Instant::now();
        Ok(Issued { since, end })
    }

    /// How far work is that was closed: the oldest that was not seen done.
    pub(crate) fn poll(&mut self, work: Issued) -> Result<Progress<Done, Issued>, CudaError> {
        if !work.end.is_done()? {
            return Ok(Progress::UnderWay(work));
        }
        let now = Instant::now();
        // Work that was issued ahead begins at the end of the one before.
        let last = self.last.replace(now).unwrap_or(work.since);
        let began = work.since.max(last);
        self.free.push(work.end);
        let ns = |time: Duration| time.as_nanos() as u64;
        Ok(Progress::Done(Done {
            work_ns: ns(now - began),
            idle_ns: ns(began - last),
        }))
    }
}
