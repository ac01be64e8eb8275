//! Chunks on their way from the sink to the caller, each in its slot until the caller asks for the next.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pp_transport::bell::Bell;
use pyo3::prelude::*;

/// Results that the caller has not taken, and how many it has given back.
#[pyclass(frozen, from_py_object, module = "pp_pipeline._native")]
#[derive(Clone)]
pub(crate) struct Results(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    is_there: Condvar,
}

#[derive(Default)]
struct State {
    ready: VecDeque<Py<PyAny>>,
    bell: Option<Bell>,
    /// Results that came, and that were given back.
    came: u64,
    given_back: u64,
}

impl Results {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this bell rings when a result is given back.
    pub(crate) fn rings(&self, bell: Bell) {
        self.state().bell = Some(bell);
    }

    /// Adds a result. Gives its number.
    pub(crate) fn add(&self, result: Py<PyAny>) -> u64 {
        let mut state = self.state();
        state.ready.push_back(result);
        state.came += 1;
        self.0.is_there.notify_one();
        state.came
    }

    /// Says whether the result with this number was given back.
    pub(crate) fn is_back(&self, number: u64) -> bool {
        self.state().given_back >= number
    }
}

#[pymethods]
impl Results {
    #[new]
    fn new() -> Self {
        Self(Arc::new(Shared {
            state: Mutex::default(),
            is_there: Condvar::new(),
        }))
    }

    /// Waits `seconds` for the next result. Gives `None` if none came.
    fn next(&self, py: Python<'_>, seconds: f64) -> Option<Py<PyAny>> {
        py.detach(|| {
            let mut state = self.state();
            if state.ready.is_empty() {
                let within = Duration::from_secs_f64(seconds.clamp(0.0, 3600.0));
                let waited = self.0.is_there.wait_timeout(state, within);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            state.ready.pop_front()
        })
    }

    /// The caller needs the oldest result that it has taken no more: its slot is free again.
    fn give_back(&self) {
        let mut state = self.state();
        state.given_back += 1;
        if let Some(bell) = &state.bell {
            bell.ring();
        }
    }

    /// Results that wait.
    fn __len__(&self) -> usize {
        self.state().ready.len()
    }
}
