//! Chunks of the caller on their way to the source, and results on their way back.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use pp_job::flow::{Puller, Pusher, Refused};
use pp_runtime::core::Cut;
use pp_transport::bell::Bell;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// What is pushed into a stream.
pub(crate) enum Pushed {
    /// A chunk, and whether stages forget what they know of its stream.
    Chunk(Py<PyAny>, bool),
    /// The stream ends: stages are told.
    End,
    /// The source raised this.
    Raised(PyErr),
}

impl Pushed {
    /// What stages are told of a chunk that is dropped, they are told of the next one.
    fn hand_over(&self, next: &mut Self) {
        if let (Self::Chunk(_, true), Self::Chunk(_, forgets)) = (self, next) {
            *forgets = true;
        }
    }
}

/// The way into a job and out of it.
#[pyclass(frozen, from_py_object, module = "pp_pipeline._native")]
#[derive(Clone)]
pub(crate) struct Flow {
    pub(crate) inner: pp_job::flow::Flow<Pushed, Py<PyAny>>,
    /// Where each result stays in its slot until the caller gives it back.
    pub(crate) lent: Option<Arc<Lent>>,
}

/// How many results the caller has given back.
#[derive(Default)]
pub(crate) struct Lent {
    given_back: AtomicU64,
    bell: Mutex<Option<Bell>>,
}

impl Lent {
    /// From now on this bell rings when a result is given back.
    pub(crate) fn rings(&self, bell: Bell) {
        *self.bell.lock().unwrap_or_else(PoisonError::into_inner) = Some(bell);
    }

    /// Says whether so many were given back.
    pub(crate) fn is_back(&self, number: u64) -> bool {
        self.given_back.load(Ordering::Acquire) >= number
    }
}

#[pymethods]
impl Flow {
    #[new]
    fn new(queue: usize, room: usize, lends: bool, drops: bool) -> PyResult<Self> {
        if queue == 0 || room == 0 {
            let what = "the queue of a stream holds 1 chunk or more, and so does the job";
            return Err(PyValueError::new_err(what));
        }
        let inner = pp_job::flow::Flow::new(queue, room);
        Ok(Self {
            inner: match drops {
                true => inner.dropping(Pushed::hand_over),
                false => inner,
            },
            lent: lends.then(Arc::default),
        })
    }

    /// Whether each result stays in its slot until the caller gives it back.
    #[getter]
    fn lends(&self) -> bool {
        self.lent.is_some()
    }

    /// Whether the job takes nothing any more.
    #[getter]
    fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Whether all streams have ended, and nobody will pull a result any more.
    #[getter]
    fn is_done(&self) -> bool {
        self.inner.is_done()
    }

    /// From now on no stream waits for room.
    fn lift_room(&self) {
        self.inner.lift_room();
    }

    /// Begins a stream. `tells` says that stages hear of its end.
    fn stream(&self, tells: bool) -> Stream {
        let (pusher, puller) = self.inner.stream();
        Stream {
            number: pusher.number(),
            tells,
            pusher,
            puller,
            waker: OnceLock::new(),
        }
    }

    /// No stream begins any more.
    fn end(&self) {
        self.inner.end();
    }

    /// The caller needs the oldest result that it has taken no more: its slot is free again.
    fn give_back(&self) {
        let Some(lent) = &self.lent else { return };
        lent.given_back.fetch_add(1, Ordering::Release);
        let bell = lent.bell.lock();
        if let Some(bell) = &*bell.unwrap_or_else(PoisonError::into_inner) {
            bell.ring();
        }
    }
}

/// A stream of a job: what is pushed, and its results.
#[pyclass(frozen, module = "pp_pipeline._native")]
pub(crate) struct Stream {
    #[pyo3(get)]
    number: u32,
    /// Stages hear of its end.
    tells: bool,
    pusher: Pusher<Pushed, Py<PyAny>>,
    puller: Puller<Pushed, Py<PyAny>>,
    /// Calls back when a push or a pull is worth another try.
    waker: OnceLock<Waker>,
}

#[pymethods]
impl Stream {
    /// Sets what a push or a pull of no seconds has called, on any thread, when it is worth another try. Only the first call of
    /// this counts.
    fn calls(&self, callback: Py<PyAny>) {
        let _ = self.waker.set(Waker::from(Arc::new(Callback(callback))));
    }

    /// Waits for room and adds a chunk. Returns false if there was no room within `seconds`. Raises `RuntimeError` once nothing is
    /// taken any more.
    fn push(
        &self,
        py: Python<'_>,
        chunk: Py<PyAny>,
        cut: Option<&str>,
        forget: bool,
        seconds: f64,
    ) -> PyResult<bool> {
        let cut = match cut {
            None => Cut::None,
            Some("flush") => Cut::Flush,
            Some("hard") => Cut::Hard,
            Some(other) => {
                let what = format!("a cut is None, 'flush' or 'hard', and not {other:?}");
                return Err(PyValueError::new_err(what));
            }
        };
        let chunk = Pushed::Chunk(chunk, forget);
        let pushed = py.detach(|| match self.waker.get().filter(|_| seconds <= 0.0) {
            None => self.pusher.push_within(chunk, cut, duration(seconds)),
            Some(waker) => {
                let mut chunk = Some(chunk);
                let context = &mut Context::from_waker(waker);
                match self.pusher.poll_push(&mut chunk, cut, context) {
                    Poll::Ready(pushed) => pushed,
                    Poll::Pending => Err(Refused::Full(chunk.expect("it was not pushed"))),
                }
            }
        });
        match pushed {
            Ok(()) => Ok(true),
            Err(Refused::Full(_)) => Ok(false),
            Err(Refused::Over(_)) => Err(PyRuntimeError::new_err("the job takes no more chunks")),
        }
    }

    /// Nothing more is pushed. An exception ends the job, once the chunks before it are taken.
    #[pyo3(signature = (error=None))]
    fn end(&self, error: Option<Bound<'_, PyAny>>) {
        let last = match error {
            Some(error) => Some(Pushed::Raised(PyErr::from_value(error))),
            None => self.tells.then_some(Pushed::End),
        };
        self.pusher.end(last);
    }

    /// Waits `seconds` for the next result. Gives `None` if none came.
    fn next(&self, py: Python<'_>, seconds: f64) -> Option<Py<PyAny>> {
        let pulled = py.detach(|| match self.waker.get().filter(|_| seconds <= 0.0) {
            None => self.puller.pull_within(duration(seconds)),
            Some(waker) => self.puller.poll_pull(&mut Context::from_waker(waker)),
        });
        match pulled {
            Poll::Ready(result) => result,
            Poll::Pending => None,
        }
    }

    /// Nobody pulls any more.
    fn leave(&self) {
        self.puller.leave();
    }

    /// Whether the job takes nothing any more.
    #[getter]
    fn is_closed(&self) -> bool {
        self.pusher.is_closed()
    }

    /// Whether no result comes any more: all were pulled, or the job has ended before.
    #[getter]
    fn is_over(&self) -> bool {
        self.puller.is_over()
    }

    /// Whether all that was pushed has been pulled, and the stream has ended.
    #[getter]
    fn is_through(&self) -> bool {
        self.puller.is_through()
    }

    /// Chunks that wait.
    fn __len__(&self) -> usize {
        self.pusher.waiting()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.pusher.end(self.tells.then_some(Pushed::End));
    }
}

fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)
}

/// A chunk that the sink keeps beyond its call.
#[pyclass(frozen, module = "pp_pipeline._native")]
#[derive(Default)]
pub(crate) struct Hold {
    is_released: AtomicBool,
    bell: Mutex<Option<Bell>>,
}

impl Hold {
    /// From now on this bell rings when the chunk is released.
    pub(crate) fn rings(&self, bell: Bell) {
        *self.bell.lock().unwrap_or_else(PoisonError::into_inner) = Some(bell);
    }

    pub(crate) fn is_released(&self) -> bool {
        self.is_released.load(Ordering::Acquire)
    }
}

#[pymethods]
impl Hold {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// The chunk is needed no more: its memory may be used for another one. A second call does nothing.
    fn release(&self) {
        self.is_released.store(true, Ordering::Release);
        let bell = self.bell.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bell) = &*bell {
            bell.ring();
        }
    }
}

/// A function in Python that is called from any thread.
struct Callback(Py<PyAny>);

impl Wake for Callback {
    fn wake(self: Arc<Self>) {
        // The loop that it would wake may be gone.
        let _ = Python::attach(|py| self.0.call0(py).map(drop));
    }
}
