//! Errors on their way between Python and a job.

use std::sync::{Arc, Mutex, PoisonError};

use pp_contract::{ChunkIndex, Fault, FaultKind};
use pp_job::Error;
use pp_runtime::stage::StageError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

pyo3::create_exception!(
    _native,
    EndError,
    pyo3::exceptions::PyException,
    "What ended a job: (kind, rank, operation, line, exit code, stage, chunk, text). The package makes an exception of its own of it."
);

/// The exception that a stage of this process raised first.
#[derive(Clone, Default)]
pub(crate) struct Raised(Arc<Mutex<Option<PyErr>>>);

impl Raised {
    /// The fault of a stage that raised this: a line, and the traceback below it. The exception is kept.
    pub(crate) fn fault(
        &self,
        py: Python<'_>,
        operation: &'static str,
        error: PyErr,
    ) -> StageError {
        let detail = format!("{}\n{}", said(py, &error), traceback(py, &error));
        let mut raised = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        raised.get_or_insert(error);
        StageError::new(FaultKind::Plugin, operation, detail)
    }

    pub(crate) fn get(&self, py: Python<'_>) -> Option<PyErr> {
        let raised = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        raised.as_ref().map(|error| error.clone_ref(py))
    }
}

/// An exception in one line, with the place where it was raised and its notes.
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
    let notes = error.value(py).getattr("__notes__");
    let notes = notes.and_then(|notes| notes.try_iter());
    let notes = notes.into_iter().flatten().flatten();
    text.extend(notes.map(|note| format!(", {note}")));
    // An exception may say several lines, and the traceback has them.
    text.replace(['\n', '\r'], " ")
}

/// Most bytes of a traceback. A fault has room for them behind its line.
const TRACEBACK_BYTES: usize = Fault::MAX_TEXT_BYTES - 1024;

/// The traceback of an exception, as Python prints it. Of one that is too long the end counts.
fn traceback(py: Python<'_>, error: &PyErr) -> String {
    let format = || -> PyResult<String> {
        let module = py.import("traceback")?;
        // The value may not know its traceback yet.
        let error = (error.get_type(py), error.value(py), error.traceback(py));
        let lines = module.call_method1("format_exception", error)?;
        Ok(lines.extract::<Vec<String>>()?.concat())
    };
    let whole = format().unwrap_or_default();
    match whole.len().checked_sub(TRACEBACK_BYTES) {
        None | Some(0) => whole,
        Some(over) => format!("...\n{}", &whole[whole.ceil_char_boundary(over)..]),
    }
}

/// What ended a job, for the package.
pub(crate) fn ended(error: &Error) -> PyErr {
    let code = error.code();
    let whole = error.to_string();
    match error.as_fault() {
        Some(fault) => EndError::new_err((
            fault.kind.to_string(),
            Some(fault.rank.get()),
            Some(fault.operation.to_string()),
            whole,
            code,
            fault.stage.as_ref().map(ToString::to_string),
            fault.chunk.map(ChunkIndex::get),
            fault.below(),
        )),
        None => {
            let kind = match error {
                Error::Usage(_) => FaultKind::Usage.to_string(),
                Error::Interrupted(_) => FaultKind::Interrupted.to_string(),
                _ => FaultKind::Internal.to_string(),
            };
            EndError::new_err((
                kind,
                None::<u32>,
                None::<String>,
                whole,
                code,
                None::<String>,
                None::<u64>,
                String::new(),
            ))
        }
    }
}

/// What Python gave cannot be used.
pub(crate) fn refused(error: &(dyn std::error::Error + 'static)) -> PyErr {
    PyValueError::new_err(pp_contract::with_source(error))
}
