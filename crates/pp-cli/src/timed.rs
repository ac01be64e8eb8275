//! Work on one stream of a GPU: payloads that it reads, copies to the host, and its time, asked after without waiting.

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
pub(crate) struct Staged {
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

/// A place in the order of a stream, and when it was passed.
struct Mark {
    passed: Event,
    at: Event,
}

impl Mark {
    fn new(device: &Device) -> Result<Self, CudaError> {
        Ok(Self {
            passed: Event::new(device)?,
            at: Event::timed(device)?,
        })
    }

    /// Marks the place behind what was issued to the stream. An event with a time makes its stream wait, 3 µs on an H200,
    /// and one without does not: so the time is taken on a stream of its own.
    fn record(&self, stream: &Stream, clock: &Stream) -> Result<(), CudaError> {
        self.passed.record(stream)?;
        clock.wait(&self.passed)?;
        self.at.record(clock)
    }
}

/// The time of some work, from a mark in front of it to one behind it.
pub(crate) struct Span {
    start: Mark,
    end: Mark,
    clock: Stream,
}

impl Span {
    /// One whose times are taken on the stream `clock`, which has no other work.
    pub(crate) fn new(clock: &Stream) -> Result<Self, CudaError> {
        Ok(Self {
            start: Mark::new(clock.device())?,
            end: Mark::new(clock.device())?,
            clock: clock.clone(),
        })
    }

    /// The work to be timed is issued behind this.
    pub(crate) fn begin(&self, stream: &Stream) -> Result<(), CudaError> {
        self.start.record(stream, &self.clock)
    }

    /// The work to be timed has been issued.
    pub(crate) fn close(&self, stream: &Stream) -> Result<(), CudaError> {
        self.end.record(stream, &self.clock)
    }

    /// Whether the work is done; its time is known a little later.
    pub(crate) fn has_passed(&self) -> Result<bool, CudaError> {
        self.end.passed.is_done()
    }

    /// Whether the work is done and its time known.
    pub(crate) fn is_done(&self) -> Result<bool, CudaError> {
        self.end.at.is_done()
    }

    /// The time of the work, once it is known.
    pub(crate) fn ns(&self) -> Result<u64, CudaError> {
        self.end.at.elapsed_ns(&self.start.at)
    }
}

/// A stream whose work is timed. Events are made once and used again.
pub(crate) struct Timed {
    pub(crate) stream: Stream,
    /// Where the times are taken.
    pub(crate) clock: Stream,
    free: Vec<Span>,
    last: Option<Span>,
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
    /// With events for so many spans open at once; more are made when they are wanted.
    pub(crate) fn new(stream: Stream, spans: usize) -> Result<Self, CudaError> {
        // One more is kept to tell how long the stream was idle.
        let clock = Stream::new(stream.device())?;
        let make = |_| Span::new(&clock);
        let free = (0..=spans).map(make).collect::<Result<_, _>>()?;
        Ok(Self {
            stream,
            clock,
            free,
            last: None,
        })
    }

    /// A span that begins here.
    pub(crate) fn open(&mut self) -> Result<Span, CudaError> {
        let span = match self.free.pop() {
            Some(span) => span,
            None => Span::new(&self.clock)?,
        };
        span.begin(&self.stream)?;
        Ok(span)
    }

    /// A span that is not asked after any more.
    pub(crate) fn recycle(&mut self, span: Span) {
        self.free.push(span);
    }

    /// How far the work of a span is that was closed: the oldest that was not seen done.
    pub(crate) fn poll(&mut self, span: Span) -> Result<Progress<Done, Span>, CudaError> {
        if !span.is_done()? {
            return Ok(Progress::UnderWay(span));
        }
        let idle = self
            .last
            .as_ref()
            .map(|last| span.start.at.elapsed_ns(&last.end.at));
        // Where work overlaps, that of this span counts from the end of the one before.
        let since_last = self
            .last
            .as_ref()
            .map(|last| span.end.at.elapsed_ns(&last.end.at));
        let work_ns = span.ns()?.min(since_last.transpose()?.unwrap_or(u64::MAX));
        self.free.extend(self.last.replace(span));
        Ok(Progress::Done(Done {
            work_ns,
            idle_ns: idle.transpose()?.unwrap_or(0),
        }))
    }
}
