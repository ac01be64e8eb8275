//! What waits in front of a job, and behind it, for each stream.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use pp_runtime::clock::now_ns;
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
    /// What the next chunk takes over from one that is dropped; `None` where nothing is dropped.
    pub(super) drops: Option<fn(&T, &mut T)>,
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

/// A chunk that waits to be taken into the job.
pub(super) struct Waiting<T> {
    pub(super) chunk: T,
    pub(super) cut: Cut,
    /// When it was pushed.
    pub(super) pushed_ns: u64,
    /// How many were dropped right before it.
    skipped: u64,
}

impl<T> Waiting<T> {
    /// One that is pushed now.
    pub(super) fn new(chunk: T, cut: Cut) -> Self {
        let pushed_ns = now_ns();
        Self {
            chunk,
            cut,
            pushed_ns,
            skipped: 0,
        }
    }
}

pub(super) struct Stream<T, R> {
    pub(super) waiting: VecDeque<Waiting<T>>,
    /// The last of those that wait was pushed with the end of the stream.
    pub(super) ends_with_last: bool,
    /// Chunks that were dropped right before one that came out without a result, behind which none is in the job.
    skipped: u64,
    /// The same, of each chunk that is in the job.
    gaps: VecDeque<u64>,
    /// Chunks that were dropped right before the result that was pulled last.
    pub(super) pulled_behind: u64,
    /// Nothing more is pushed.
    pub(super) is_ended: bool,
    /// Chunks that are in the job.
    pub(super) under_way: usize,
    /// Each with how many chunks were dropped right before it.
    pub(super) results: VecDeque<(R, u64)>,
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

    /// Drops the oldest chunks that wait for as long as `is_late` says so of the next one, but never the last one; and none before
    /// `from`. Gives them.
    pub(super) fn drop_late(
        &mut self,
        hand_over: fn(&T, &mut T),
        from: usize,
        mut is_late: impl FnMut(&Self) -> bool,
    ) -> Vec<T> {
        let mut dropped = Vec::new();
        let kept = from + 1 + usize::from(self.ends_with_last);
        while self.waiting.len() > kept && is_late(self) {
            let Some(late) = self.waiting.remove(from) else {
                break;
            };
            let next = &mut self.waiting[from];
            hand_over(&late.chunk, &mut next.chunk);
            next.cut = match (late.cut, next.cut) {
                (Cut::Hard, _) | (_, Cut::Hard) => Cut::Hard,
                (Cut::Flush, _) | (_, Cut::Flush) => Cut::Flush,
                (Cut::None, Cut::None) => Cut::None,
            };
            next.skipped += late.skipped + 1;
            dropped.push(late.chunk);
        }
        dropped
    }

    /// The next chunk goes into the job. Gives how many were dropped right before it.
    pub(super) fn take(&mut self) -> Option<(Waiting<T>, u64)> {
        let next = self.waiting.pop_front()?;
        let skipped = next.skipped + std::mem::take(&mut self.skipped);
        self.under_way += 1;
        self.gaps.push_back(skipped);
        Some((next, skipped))
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
        let next = self.offered.map(|at| self.streams[&at].waiting.front());
        if let Some(next) = next.flatten() {
            return Offer::Chunk(next.cut);
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
        let behind = stream.gaps.pop_front().unwrap_or(0);
        match (result.take(), stream.gaps.front_mut()) {
            (Some(result), _) if !stream.is_left => stream.results.push_back((result, behind)),
            (Some(left), _) => *result = Some(left),
            // It has no result, and its gap is before the next one.
            (None, Some(next)) => *next += behind,
            (None, None) => stream.skipped += behind,
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
            drops: None,
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

    /// Lets no pusher wait: where the queue of a stream is full its oldest chunk is dropped, and so are chunks that would come out
    /// too late ([`Opened::late`](crate::Opened::late)), never the last one that waits. The next chunk of the stream takes over the
    /// cut of one that is dropped, and `hand_over` gives it what else it must have of that. [`Puller::skipped`](super::Puller::skipped)
    /// tells of the gap. Call it before the first push.
    #[must_use]
    pub fn dropping(self, hand_over: fn(&T, &mut T)) -> Self {
        self.state().drops = Some(hand_over);
        self
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
            ends_with_last: false,
            skipped: 0,
            gaps: VecDeque::new(),
            pulled_behind: 0,
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
