//! What waits in front of a job, and behind it, for each stream.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use pp_runtime::core::Cut;
use pp_runtime::stage::Offer;
use pp_transport::bell::Bell;

/// The way into a job and out of it for the program around it, where source and sink stand on rank 0.
///
/// Make it before the job, with its streams if they are known; open the job with [`Job::open_flow`](crate::Job::open_flow);
/// and let the source be made of [`Flow::inlet`] and the sink of [`Flow::outlet`]. A *stream* has an order of its own. Chunks
/// of different streams share the pipeline.
///
/// `T` is what is pushed, and `R` is what is pulled.
pub struct Flow<T, R>(Arc<Mutex<Queues<T, R>>>);

impl<T, R> Clone for Flow<T, R> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

pub(super) struct Queues<T, R> {
    /// The most chunks of a stream that wait to be taken into the job.
    pub(super) queue: usize,
    /// The most chunks of a stream that are in the job, or wait to be pulled.
    pub(super) room: usize,
    pub(super) streams: BTreeMap<u32, Stream<T, R>>,
    /// The number of the next stream.
    pub(super) next: u32,
    /// The stream whose chunk was taken last.
    pub(super) turn: u32,
    /// The stream whose chunk is offered: an offer stands.
    pub(super) offered: Option<u32>,
    /// No stream begins any more.
    pub(super) is_ended: bool,
    /// The job takes nothing any more.
    pub(super) is_closed: bool,
    /// The job gives nothing any more.
    pub(super) is_over: bool,
    /// Of the source.
    pub(super) bell: Option<Bell>,
}

pub(super) struct Stream<T, R> {
    pub(super) waiting: VecDeque<(T, Cut)>,
    /// Nothing more is pushed.
    pub(super) is_ended: bool,
    /// Chunks that are in the job.
    pub(super) under_way: usize,
    pub(super) results: VecDeque<R>,
    /// Nobody pulls any more.
    pub(super) is_left: bool,
    wakers: Vec<Waker>,
}

impl<T, R> Stream<T, R> {
    pub(super) fn wait(&mut self, waker: &Waker) {
        if !self.wakers.iter().any(|known| known.will_wake(waker)) {
            self.wakers.push(waker.clone());
        }
    }

    pub(super) fn wake(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.wakers)
    }

    /// Says whether all that was pushed has come out.
    pub(super) fn is_through(&self) -> bool {
        self.is_ended && self.waiting.is_empty() && self.under_way == 0
    }

    /// Says whether nobody will ask for this stream again.
    pub(super) fn is_forgotten(&self) -> bool {
        self.is_through() && self.is_left
    }
}

impl<T, R> Queues<T, R> {
    fn has_room(&self, stream: &Stream<T, R>) -> bool {
        stream.under_way + stream.results.len() < self.room
    }

    /// The stream whose chunk is taken next: the streams take turns.
    pub(super) fn due(&self) -> Option<u32> {
        if self.offered.is_some() {
            return self.offered;
        }
        let after = self.streams.range(self.turn.saturating_add(1)..);
        let mut all = after.chain(self.streams.range(..=self.turn));
        let is_due = |stream: &Stream<T, R>| !stream.waiting.is_empty() && self.has_room(stream);
        all.find(|(_, stream)| is_due(stream))
            .map(|(number, _)| *number)
    }

    pub(super) fn offer(&mut self) -> Offer {
        self.offered = self.due();
        if let Some((_, cut)) = self
            .offered
            .and_then(|at| self.streams[&at].waiting.front())
        {
            return Offer::Chunk(*cut);
        }
        let mut streams = self.streams.values();
        match self.is_ended && streams.all(|stream| stream.is_ended && stream.waiting.is_empty()) {
            true => Offer::End,
            false => Offer::Later,
        }
    }

    /// A chunk of a stream has left the job. Takes its result out of the place if somebody may pull it.
    pub(super) fn leaves(&mut self, number: u32, result: &mut Option<R>) -> Vec<Waker> {
        let Some(stream) = self.streams.get_mut(&number) else {
            return Vec::new();
        };
        // A peer may have changed which stream a chunk is of.
        stream.under_way = stream.under_way.saturating_sub(1);
        if !stream.is_left {
            stream.results.extend(result.take());
        }
        let wakers = stream.wake();
        if stream.is_forgotten() {
            self.streams.remove(&number);
        }
        wakers
    }

    pub(super) fn wake_all(&mut self) -> Vec<Waker> {
        self.streams.values_mut().flat_map(Stream::wake).collect()
    }

    /// The source may have something to do.
    pub(super) fn ring(&self) {
        if let Some(bell) = &self.bell {
            bell.ring();
        }
    }
}

impl<T, R> Flow<T, R> {
    /// A flow without a stream. Of each stream at most `queue` chunks wait to be taken into the job, and at most `room` are in
    /// the job or wait to be pulled. A stream that is to keep the pipeline busy alone needs as much room as the job has depth.
    ///
    /// # Panics
    /// If one of them is 0.
    #[must_use]
    pub fn new(queue: usize, room: usize) -> Self {
        assert!(queue > 0 && room > 0, "a queue of 0, or no room");
        Self(Arc::new(Mutex::new(Queues {
            queue,
            room,
            streams: BTreeMap::new(),
            next: 0,
            turn: u32::MAX,
            offered: None,
            is_ended: false,
            is_closed: false,
            is_over: false,
            bell: None,
        })))
    }

    /// Every critical section is a few assignments.
    pub(super) fn state(&self) -> MutexGuard<'_, Queues<T, R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and wakes whom the change concerns.
    pub(super) fn change(&self, act: impl FnOnce(&mut Queues<T, R>) -> Vec<Waker>) {
        let wakers = act(&mut self.state());
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Begins a stream, and gives its number.
    pub(super) fn begin(&self) -> u32 {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        let stream = Stream {
            waiting: VecDeque::new(),
            is_ended: state.is_ended,
            under_way: 0,
            results: VecDeque::new(),
            is_left: false,
            wakers: Vec::new(),
        };
        state.streams.insert(number, stream);
        number
    }

    /// No stream begins any more. The job ends once all streams have ended and everything has come to the sink. A stream that
    /// is begun later takes no chunk.
    pub fn end(&self) {
        let mut state = self.state();
        state.is_ended = true;
        state.ring();
    }

    /// Says whether all streams have ended, and nobody will pull a result any more: all were pulled, or the streams were left.
    #[must_use]
    pub fn is_done(&self) -> bool {
        let state = self.state();
        let mut streams = state.streams.values();
        streams.all(|stream| {
            stream.is_ended && (stream.is_left || stream.is_through() && stream.results.is_empty())
        })
    }

    /// Says whether the job takes nothing any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    /// From now on no stream waits for room: what was pushed is taken, also where nobody pulls.
    pub fn lift_room(&self) {
        let mut state = self.state();
        state.room = usize::MAX;
        state.ring();
    }

    /// The job is over.
    pub(crate) fn close(&self) {
        self.change(|state| {
            state.is_closed = true;
            state.is_over = true;
            state.wake_all()
        });
    }
}

impl<T, R> fmt::Debug for Flow<T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let streams = self.state().streams.len();
        f.debug_struct("Flow").field("streams", &streams).finish()
    }
}
