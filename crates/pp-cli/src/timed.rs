//! Work on one stream of a GPU, timed by the GPU, and asked after without waiting.

use std::collections::VecDeque;

use pp_transport::cuda::{CudaError, Device, Event, Stream};

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

/// A stream with the work that was issued to it, oldest first. Events are made once and used
/// again.
pub(crate) struct Timed<T> {
    stream: Stream,
    free: Vec<Span>,
    under_way: VecDeque<(Span, T)>,
    last: Option<Span>,
}

/// Work that is done.
pub(crate) struct Done<T> {
    pub(crate) what: T,
    pub(crate) work_ns: u64,
    /// Between the end of the work before and the beginning of this.
    pub(crate) idle_ns: u64,
}

impl<T> Timed<T> {
    /// With events for so many spans open at once; more are made when they are wanted.
    pub(crate) fn new(stream: Stream, spans: usize) -> Result<Self, CudaError> {
        // One more is kept to tell how long the stream was idle.
        let make = |_| Span::new(stream.device());
        let free = (0..=spans).map(make).collect::<Result<_, _>>()?;
        Ok(Self {
            stream,
            free,
            under_way: VecDeque::with_capacity(spans),
            last: None,
        })
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Work issued and not yet seen done.
    pub(crate) fn len(&self) -> usize {
        self.under_way.len()
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

    /// The work of this span has been issued; [`Timed::poll`] says when it is done.
    pub(crate) fn close(&mut self, span: Span, what: T) -> Result<(), CudaError> {
        span.close(&self.stream)?;
        self.under_way.push_back((span, what));
        Ok(())
    }

    /// A span that is not asked after any more.
    pub(crate) fn recycle(&mut self, span: Span) {
        self.free.push(span);
    }

    /// The oldest work, if it is done.
    pub(crate) fn poll(&mut self) -> Result<Option<Done<T>>, CudaError> {
        let oldest = self.under_way.front();
        if !oldest.map_or(Ok(false), |(span, _)| span.end.is_done())? {
            return Ok(None);
        }
        let (span, what) = self.under_way.pop_front().expect("just seen");
        let idle = self
            .last
            .as_ref()
            .map(|last| span.start.elapsed_ns(&last.end));
        let work_ns = span.ns()?;
        self.free.extend(self.last.replace(span));
        Ok(Some(Done {
            what,
            work_ns,
            idle_ns: idle.transpose()?.unwrap_or(0),
        }))
    }
}
