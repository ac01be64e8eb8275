//! Errors on their way between Python and a job.

use std::sync::{Arc, Mutex, PoisonError};

use pp_contract::FaultKind;
use pp_job::Error;
use pp_runtime::stage::StageError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

pyo3::create_exception!(
    _native,
    EndError,
    pyo3::exceptions::PyException,
    "What ended a job: (kind, rank, operation, text, exit code). The package makes an exception of its own of it."
);

/// The exception that a stage of this process raised first.
#[derive(Clone, Default)]
pub(crate) struct Raised(Arc<Mutex<Option<PyErr>>>);

impl Raised {
    /// The fault of a stage that raised this. The exception is kept.
    pub(crate) fn fault(
        &self,
        py: Python<'_>,
        operation: &'static str,
        error: PyErr,
    ) -> StageError {
        let detail = said(py, &error);
        let mut raised = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        raised.get_or_insert(error);
        StageError::new(FaultKind::Plugin, operation, detail)
    }

    pub(crate) fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// An exception in one line, with the place where it was raised.
fn said(py: Python<'_>, error: &PyErr) -> String {
    let name = error.get_type(py).name();
    let name = name.map_or_else(|_| "an exception".into(), |name| name.to_string());
    let mut text = format!("{name}: {}", error.value(py));
    let mut at = error.traceback(py).map(Bound::into_any);
    let mut place = None;
    while let Some(frame) = at {
        let line = frame
            .getattr("tb_lineno")
            .and_then(|line| line.extract::<u32>());
        let code = frame
            .getattr("tb_frame")
            .and_then(|frame| frame.getattr("f_code"));
        let file = code.and_then(|code| code.getattr("co_filename"));
        let file = file.and_then(|file| file.extract::<String>());
        if let (Ok(line), Ok(file)) = (line, file) {
            place = Some(format!(" ({file}:{line})"));
        }
        at = frame.getattr("tb_next").ok().filter(|next| !next.is_none());
    }
    text.extend(place);
    text
}

/// What ended a job, for the package.
pub(crate) fn ended(error: &Error) -> PyErr {
    let code = error.code();
    let whole = error.to_string();
    let fault = match error {
        Error::Recorded(inner, _) => match &**inner {
            Error::Fault(fault) | Error::Aborted(fault, _) => Some(fault),
            _ => None,
        },
        Error::Fault(fault) | Error::Aborted(fault, _) => Some(fault),
        _ => None,
    };
    match fault {
        Some(fault) => EndError::new_err((
            fault.kind.to_string(),
            Some(fault.rank.get()),
            Some(fault.operation.to_string()),
            whole,
            code,
        )),
        None => {
            let kind = match error {
                Error::Usage(_) => FaultKind::Usage.to_string(),
                Error::Interrupted(_) => FaultKind::Interrupted.to_string(),
                _ => FaultKind::Internal.to_string(),
            };
            EndError::new_err((kind, None::<u32>, None::<String>, whole, code))
        }
    }
}

/// What Python gave cannot be used.
pub(crate) fn refused(error: &(dyn std::error::Error + 'static)) -> PyErr {
    PyValueError::new_err(pp_contract::with_source(error))
}
