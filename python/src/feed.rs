//! Chunks on their way from the caller's iterator, or from pushes, to the source.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pp_runtime::core::Cut;
use pp_runtime::stage::Offer;
use pp_transport::bell::Bell;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// A queue with a bound. The driver looks into it without Python's lock.
#[pyclass(frozen, from_py_object, module = "pp_pipeline._native")]
#[derive(Clone)]
pub(crate) struct Feed(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// There is room, or nothing is taken any more.
    room: Condvar,
    most: usize,
}

#[derive(Default)]
struct State {
    chunks: VecDeque<(Py<PyAny>, Cut)>,
    bell: Option<Bell>,
    /// Nothing more comes, perhaps because of this.
    end: Option<Option<PyErr>>,
    /// Nobody takes any more.
    is_closed: bool,
}

impl Feed {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this bell rings when there is a chunk.
    pub(crate) fn rings(&self, bell: Bell) {
        self.state().bell = Some(bell);
    }

    pub(crate) fn offer(&self) -> Result<Offer, PyErr> {
        let mut state = self.state();
        if let Some((_, cut)) = state.chunks.front() {
            return Ok(Offer::Chunk(*cut));
        }
        match &mut state.end {
            None => Ok(Offer::Later),
            Some(why) => why.take().map_or(Ok(Offer::End), Err),
        }
    }

    pub(crate) fn queued(&self) -> u32 {
        self.state().chunks.len() as u32
    }

    /// Takes the chunk that is offered.
    pub(crate) fn take(&self) -> Option<Py<PyAny>> {
        let taken = self.state().chunks.pop_front();
        self.0.room.notify_one();
        taken.map(|(chunk, _)| chunk)
    }

    /// Nobody takes any more: a push fails.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.0.room.notify_all();
    }
}

#[pymethods]
impl Feed {
    #[new]
    fn new(most: usize) -> Self {
        Self(Arc::new(Shared {
            state: Mutex::default(),
            room: Condvar::new(),
            most,
        }))
    }

    /// Waits for room and adds a chunk. Returns false if there was no room within `seconds`, and raises `RuntimeError` once
    /// nobody takes chunks any more.
    #[pyo3(signature = (chunk, cut=None, seconds=None))]
    fn push(
        &self,
        py: Python<'_>,
        chunk: Py<PyAny>,
        cut: Option<&str>,
        seconds: Option<f64>,
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
        let until = seconds.map(|s| Instant::now() + Duration::from_secs_f64(s.clamp(0.0, 1e9)));
        let has_room = py.detach(|| {
            let mut state = self.state();
            loop {
                if state.is_closed || state.end.is_some() || state.chunks.len() < self.0.most {
                    return true;
                }
                let left = until.map_or(Duration::MAX, |at| {
                    at.saturating_duration_since(Instant::now())
                });
                if left.is_zero() {
                    return false;
                }
                let left = left.min(Duration::from_secs(3600));
                let waited = self.0.room.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        });
        let mut state = self.state();
        if state.is_closed || state.end.is_some() {
            return Err(PyRuntimeError::new_err("the job takes no more chunks"));
        }
        if !has_room {
            return Ok(false);
        }
        state.chunks.push_back((chunk, cut));
        if let Some(bell) = &state.bell {
            bell.ring();
        }
        Ok(true)
    }

    /// Nothing more comes; an exception ends the job.
    #[pyo3(signature = (error=None))]
    fn end(&self, error: Option<Bound<'_, PyAny>>) {
        let mut state = self.state();
        state.end.get_or_insert(error.map(PyErr::from_value));
        if let Some(bell) = &state.bell {
            bell.ring();
        }
        self.0.room.notify_all();
    }

    /// Chunks that wait.
    fn __len__(&self) -> usize {
        self.state().chunks.len()
    }
}
