//! The four ends of a flow: two of the program, for each stream, and two of the job.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use pp_contract::{ChunkIndex, Plan};
use pp_runtime::core::Cut;
use pp_runtime::stage::{Built, Chunk, Offer, Place, Progress, Sink, Source, StageResult, Taken};

use pp_transport::bell::Bell;

use super::queues::Flow;

/// The longest sleep of a thread that waits without a bound.
const LONG: Duration = Duration::from_secs(3600);

impl<T, R> Flow<T, R> {
    /// Begins a stream: the first one has the number 0, the next one 1, and so on. Its two ends may be used by different threads.
    #[must_use]
    pub fn stream(&self) -> (Pusher<T, R>, Puller<T, R>) {
        let number = self.begin();
        let flow = self.clone();
        (
            Pusher { flow, number },
            Puller {
                flow: self.clone(),
                number,
            },
        )
    }

    /// The end of the flow at the source: give it the bell of the source.
    #[must_use]
    pub fn inlet(&self, bell: Bell) -> Inlet<T, R> {
        self.state().bell = Some(bell);
        Inlet(self.clone())
    }

    /// The end of the flow at the sink.
    #[must_use]
    pub fn outlet(&self) -> Outlet<T, R> {
        Outlet(self.clone())
    }
}

/// Pushes chunks into a stream. Dropping it ends the stream.
pub struct Pusher<T, R> {
    flow: Flow<T, R>,
    number: u32,
}

/// A chunk that was not pushed.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused<T> {
    /// The queue of the stream stayed full.
    Full(T),
    /// The stream was ended, or the job is over.
    Over(T),
}

impl<T, R> Pusher<T, R> {
    /// The number of the stream.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Pushes a chunk, and waits for room in the queue. `cut` is for a flow of one stream: it cuts the whole job.
    ///
    /// # Errors
    /// [`Refused::Over`].
    pub fn push(&self, chunk: T, cut: Cut) -> Result<(), Refused<T>> {
        self.push_within(chunk, cut, Duration::MAX)
    }

    /// Pushes a chunk, and waits at most so long for room in the queue; not at all if that is zero.
    ///
    /// # Errors
    /// [`Refused`] has the chunk.
    pub fn push_within(&self, chunk: T, cut: Cut, within: Duration) -> Result<(), Refused<T>> {
        let mut chunk = Some(chunk);
        match wait(within, |context| self.poll_push(&mut chunk, cut, context)) {
            Poll::Ready(pushed) => pushed,
            Poll::Pending => Err(Refused::Full(chunk.expect("it was not pushed"))),
        }
    }

    /// Pushes a chunk from a task of an async runtime.
    ///
    /// # Errors
    /// [`Refused::Over`].
    pub async fn push_async(&self, chunk: T, cut: Cut) -> Result<(), Refused<T>> {
        let mut chunk = Some(chunk);
        poll_fn(|context| self.poll_push(&mut chunk, cut, context)).await
    }

    /// Pushes the chunk out of its place; the waker of the context hears of room if there is none.
    ///
    /// # Errors
    /// [`Refused::Over`].
    ///
    /// # Panics
    /// If the place is empty.
    pub fn poll_push(
        &self,
        chunk: &mut Option<T>,
        cut: Cut,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Refused<T>>> {
        let mut state = self.flow.state();
        let (queue, is_closed) = (state.queue, state.is_closed);
        let stream = state.streams.get_mut(&self.number);
        let stream = stream.filter(|stream| !is_closed && !stream.is_ended);
        let Some(stream) = stream else {
            return Poll::Ready(Err(Refused::Over(chunk.take().expect("there is a chunk"))));
        };
        if stream.waiting.len() >= queue {
            stream.wait(context.waker());
            return Poll::Pending;
        }
        let chunk = chunk.take().expect("there is a chunk");
        stream.waiting.push_back((chunk, cut));
        state.ring();
        Poll::Ready(Ok(()))
    }

    /// Ends the stream: nothing more is pushed, but for `last`, which finds room in every queue.
    pub fn end(&self, mut last: Option<T>) {
        // What is not pushed is dropped without the lock.
        let last = &mut last;
        self.flow.change(|state| {
            let Some(stream) = state.streams.get_mut(&self.number) else {
                return Vec::new();
            };
            if !stream.is_ended {
                if !state.is_closed {
                    stream
                        .waiting
                        .extend(last.take().map(|last| (last, Cut::None)));
                }
                stream.is_ended = true;
            }
            let wakers = stream.wake();
            if stream.is_forgotten() {
                state.streams.remove(&self.number);
            }
            state.ring();
            wakers
        });
    }

    /// Says whether the job takes nothing any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.flow.is_closed()
    }

    /// Chunks that wait to be taken into the job.
    #[must_use]
    pub fn waiting(&self) -> usize {
        let state = self.flow.state();
        let stream = state.streams.get(&self.number);
        stream.map_or(0, |stream| stream.waiting.len())
    }
}

impl<T, R> Drop for Pusher<T, R> {
    fn drop(&mut self) {
        self.end(None);
    }
}

/// Pulls the results of a stream, in the order in which its chunks were pushed. As an iterator it waits for each.
/// Dropping it leaves the stream ([`Puller::leave`]).
pub struct Puller<T, R> {
    flow: Flow<T, R>,
    number: u32,
}

impl<T, R> Puller<T, R> {
    /// Waits at most so long for the next result. `Ready(None)` says that none comes: all came, or the job is over.
    pub fn pull_within(&self, within: Duration) -> Poll<Option<R>> {
        wait(within, |context| self.poll_pull(context))
    }

    /// Waits for the next result, in a task of an async runtime. `None` says that none comes.
    pub async fn pull_async(&self) -> Option<R> {
        poll_fn(|context| self.poll_pull(context)).await
    }

    /// The next result; the waker of the context hears of it if it is not there.
    pub fn poll_pull(&self, context: &mut Context<'_>) -> Poll<Option<R>> {
        let mut state = self.flow.state();
        let is_over = state.is_over;
        let Some(stream) = state.streams.get_mut(&self.number) else {
            return Poll::Ready(None);
        };
        if let Some(result) = stream.results.pop_front() {
            // Its stream may have room now.
            state.ring();
            return Poll::Ready(Some(result));
        }
        if is_over || stream.is_left || stream.is_through() {
            return Poll::Ready(None);
        }
        stream.wait(context.waker());
        Poll::Pending
    }

    /// Nobody pulls any more: results of the stream are dropped, also those that come later. A pull that waits ends.
    pub fn leave(&self) {
        let mut results = VecDeque::new();
        self.flow.change(|state| {
            let Some(stream) = state.streams.get_mut(&self.number) else {
                return Vec::new();
            };
            stream.is_left = true;
            // Whatever is in a result is dropped without the lock.
            results = std::mem::take(&mut stream.results);
            let wakers = stream.wake();
            if stream.is_forgotten() {
                state.streams.remove(&self.number);
            }
            state.ring();
            wakers
        });
    }

    /// Says whether no result comes any more: all were pulled, or the job has ended before.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let state = self.flow.state();
        let stream = state.streams.get(&self.number);
        stream.is_none_or(|stream| {
            let is_over = state.is_over || stream.is_left || stream.is_through();
            stream.results.is_empty() && is_over
        })
    }

    /// Says whether all that was pushed has been pulled, and the stream has ended.
    #[must_use]
    pub fn is_through(&self) -> bool {
        let state = self.flow.state();
        let stream = state.streams.get(&self.number);
        stream.is_none_or(|stream| stream.is_through() && stream.results.is_empty())
    }
}

impl<T, R> Iterator for Puller<T, R> {
    type Item = R;

    fn next(&mut self) -> Option<R> {
        match self.pull_within(Duration::MAX) {
            Poll::Ready(result) => result,
            Poll::Pending => unreachable!("the wait has no bound"),
        }
    }
}

impl<T, R> Drop for Puller<T, R> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The end of a flow at the source, for a source that is written by hand; else [`Inlet::source`]. If it is dropped, nothing can
/// be pushed any more.
pub struct Inlet<T, R>(Flow<T, R>);

impl<T, R> Inlet<T, R> {
    /// What [`Source::poll`] returns.
    #[must_use]
    pub fn offer(&self) -> Offer {
        self.0.state().offer()
    }

    /// Takes the chunk that was offered, with the number of its stream.
    #[must_use]
    pub fn take(&self) -> Option<(u32, T)> {
        let mut taken = None;
        self.0.change(|state| {
            let Some(number) = state.due() else {
                return Vec::new();
            };
            state.offered = None;
            state.turn = number;
            let stream = state.streams.get_mut(&number).expect("it is due");
            stream.under_way += 1;
            taken = stream.waiting.pop_front().map(|(chunk, _)| (number, chunk));
            stream.wake()
        });
        taken
    }

    /// A chunk that was taken never comes to the sink, since a hard cut overtook it.
    pub fn is_overtaken(&self, stream: u32) {
        self.0.change(|state| state.leaves(stream, &mut None));
    }

    /// Chunks that wait.
    #[must_use]
    pub fn queued(&self) -> u32 {
        let state = self.0.state();
        state
            .streams
            .values()
            .map(|stream| stream.waiting.len() as u32)
            .sum()
    }

    /// A source whose chunks `build` makes, each in its slot, of what was pushed and the number of its stream.
    pub fn source<Tx, P: Plan, F>(self, build: F) -> impl Source<Tx, Plan = P, Carry = u32>
    where
        F: FnMut(Place, (u32, T), &mut Tx) -> StageResult<Built<P, ()>>,
    {
        Pushed(self, build)
    }
}

impl<T, R> Drop for Inlet<T, R> {
    fn drop(&mut self) {
        self.0.change(|state| {
            state.is_closed = true;
            state.bell = None;
            state.wake_all()
        });
    }
}

struct Pushed<T, R, F>(Inlet<T, R>, F);

impl<T, R, Tx, P, F> Source<Tx> for Pushed<T, R, F>
where
    P: Plan,
    F: FnMut(Place, (u32, T), &mut Tx) -> StageResult<Built<P, ()>>,
{
    type Plan = P;
    /// The number of its stream.
    type Carry = u32;

    fn poll(&mut self) -> StageResult<Offer> {
        Ok(self.0.offer())
    }

    fn build(&mut self, place: Place, slot: &mut Tx) -> StageResult<Built<P, u32>> {
        let (stream, chunk) = self.0.take().expect("it was offered");
        let built = (self.1)(place, (stream, chunk), slot)?;
        Ok(Built {
            plan: built.plan,
            tensors: built.tensors,
            note: built.note,
            carry: stream,
            frames: built.frames,
            read_ns: built.read_ns,
            skipped_frames: built.skipped_frames,
            held_ns: built.held_ns,
            late_ns: built.late_ns,
        })
    }

    fn accepted(
        &mut self,
        _: ChunkIndex,
        stream: u32,
        note: Option<&[u8]>,
    ) -> StageResult<Option<u64>> {
        if note.is_none() {
            self.0.is_overtaken(stream);
        }
        Ok(None)
    }

    fn queued(&self) -> u32 {
        self.0.queued()
    }
}

/// The end of a flow at the sink, for a sink that is written by hand; else [`Outlet::sink`]. If it is dropped, no more results
/// come.
pub struct Outlet<T, R>(Flow<T, R>);

impl<T, R> Outlet<T, R> {
    /// Gives the stream the result of its oldest chunk that is in the job; or says that this chunk has none.
    pub fn give(&self, stream: u32, mut result: Option<R>) {
        self.0.change(|state| state.leaves(stream, &mut result));
    }

    /// A sink that makes of each chunk the number of its stream and a result. The plan has the number, unless there is one stream
    /// alone, which is 0.
    pub fn sink<Rx, P: Plan, F>(self, take: F) -> impl Sink<Rx, Plan = P, Kept = Infallible>
    where
        F: FnMut(Chunk<'_, P>, Option<&Rx>) -> StageResult<(u32, R)>,
    {
        Pulled(self, take, PhantomData)
    }
}

impl<T, R> Drop for Outlet<T, R> {
    fn drop(&mut self) {
        self.0.change(|state| {
            state.is_over = true;
            state.wake_all()
        });
    }
}

struct Pulled<T, R, P, F>(Outlet<T, R>, F, PhantomData<P>);

impl<T, R, Rx, P, F> Sink<Rx> for Pulled<T, R, P, F>
where
    P: Plan,
    F: FnMut(Chunk<'_, P>, Option<&Rx>) -> StageResult<(u32, R)>,
{
    type Plan = P;
    type Kept = Infallible;

    fn take(
        &mut self,
        chunk: Chunk<'_, P>,
        input: Option<&Rx>,
    ) -> StageResult<Progress<Taken, Self::Kept>> {
        let taken = Taken::of(chunk.message.plan(), 1);
        let (stream, result) = (self.1)(chunk, input)?;
        self.0.give(stream, Some(result));
        Ok(Progress::Done(taken))
    }
}

/// Wakes a thread that waits.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Asks again whenever it is woken, for at most so long.
fn wait<T>(within: Duration, mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
    if within.is_zero() {
        return poll(&mut Context::from_waker(Waker::noop()));
    }
    thread_local! {
        /// One for each thread, so that a wait which begins again is known.
        static OWN: Waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    }
    let until = Instant::now().checked_add(within);
    OWN.with(|waker| {
        loop {
            let polled = poll(&mut Context::from_waker(waker));
            let left = until.map_or(LONG, |until| {
                until.saturating_duration_since(Instant::now())
            });
            if polled.is_ready() || left.is_zero() {
                return polled;
            }
            std::thread::park_timeout(left.min(LONG));
        }
    })
}

macro_rules! debug {
    ($($end:ident),*) => {$(
        impl<T, R> fmt::Debug for $end<T, R> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($end)).finish_non_exhaustive()
            }
        }
    )*};
}

debug!(Pusher, Puller, Inlet, Outlet);
