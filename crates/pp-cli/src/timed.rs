//! Work on one stream of a GPU, timed by the GPU, and asked after without waiting.

use pp_device::{CudaError, Device, Event, Stream};
use pp_runtime::stage::Progress;

/// Two events around some work.
pub(crate) struct Span {
    start: Event,
    end: Event,
}

impl Span {
    fn new(device: &Device) -> Result<Self, CudaError> {
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

/// A stream whose work is timed. Events are made once and used again.
pub(crate) struct Timed {
    pub(crate) stream: Stream,
    free: Vec<Span>,
    last: Option<Span>,
}

/// Work that is done.
pub(crate) struct Done {
    pub(crate) work_ns: u64,
    /// Between the end of the work before and the beginning of this.
    pub(crate) idle_ns: u64,
}

impl Timed {
    /// With events for so many spans open at once; more are made when they are wanted.
    pub(crate) fn new(stream: Stream, spans: usize) -> Result<Self, CudaError> {
        // One more is kept to tell how long the stream was idle.
        let make = |_| Span::new(stream.device());
        let free = (0..=spans).map(make).collect::<Result<_, _>>()?;
        Ok(Self {
            stream,
            free,
            last: None,
        })
    }

    /// A span that begins here.
    pub(crate) fn open(&mut self) -> Result<Span, CudaError> {
        let span = match self.free.pop() {
            Some(span) => span,
            None => Span::new(self.stream.device())?,
        };
        span.start.record(&self.stream)?;
        Ok(span)
    }

    /// A span that is not asked after any more.
    pub(crate) fn recycle(&mut self, span: Span) {
        self.free.push(span);
    }

    /// How far the work of a span is that was closed: the oldest that was not seen done.
    pub(crate) fn poll(&mut self, span: Span) -> Result<Progress<Done, Span>, CudaError> {
        if !span.end.is_done()? {
            return Ok(Progress::UnderWay(span));
        }
        let idle = self
            .last
            .as_ref()
            .map(|last| span.start.elapsed_ns(&last.end));
        let work_ns = span.ns()?;
        self.free.extend(self.last.replace(span));
        Ok(Progress::Done(Done {
            work_ns,
            idle_ns: idle.transpose()?.unwrap_or(0),
        }))
    }
}
