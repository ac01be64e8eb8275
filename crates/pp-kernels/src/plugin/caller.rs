//! One call through the table: the function, the buffer for its error text, and its status as a result.

use std::sync::Arc;

use pp_device::Stream;

use crate::abi::{self, OpaqueSession, Table};
use crate::error::{KernelError, Status};
use crate::stage::{Description, StageInfo};

/// The stream of the results of a session, of which the table does not tell.
pub(super) type ResultsFn = unsafe fn(*mut OpaqueSession) -> Stream;

/// A table and the name to use in errors.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) table: Table,
    pub(super) name: Arc<str>,
    /// Of built-in kernels for devices.
    pub(super) results: Option<ResultsFn>,
}

/// Where the callee puts the text of an error; reused from call to call.
pub(super) struct ErrorBuffer {
    text: [u8; 512],
    length: u64,
}

impl ErrorBuffer {
    pub(super) fn new() -> ErrorBuffer {
        ErrorBuffer {
            text: [0; 512],
            length: 0,
        }
    }

    /// Calls `call` with an error struct that points here.
    pub(super) fn with(&mut self, call: impl FnOnce(*mut abi::ErrorText) -> u32) -> u32 {
        let mut raw = abi::ErrorText {
            struct_size: abi::size::<abi::ErrorText>(),
            reserved: 0,
            text: self.text.as_mut_ptr(),
            capacity: self.text.len() as u64,
            length: 0,
        };
        let status = call(&raw mut raw);
        self.length = raw.length;
        status
    }

    /// The text in one line; control characters and what is not UTF-8 are replaced, a length that lies is cut.
    fn text(&self) -> String {
        let length = usize::try_from(self.length)
            .unwrap_or(usize::MAX)
            .min(self.text.len());
        String::from_utf8_lossy(&self.text[..length])
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect()
    }
}

impl Caller {
    /// A status as a result.
    pub(super) fn judge(
        &self,
        operation: &str,
        status: u32,
        error: &ErrorBuffer,
    ) -> Result<(), KernelError> {
        if status == abi::OK {
            return Ok(());
        }
        let mut message = error.text();
        if message.is_empty() {
            message = format!("status {status} and no text");
        }
        let kernels = self.name.to_string();
        Err(match Status::from_code(status) {
            Status::Panic => KernelError::Panicked {
                kernels,
                operation: operation.into(),
                message,
            },
            status => KernelError::Failed {
                kernels,
                operation: operation.into(),
                status,
                message,
            },
        })
    }

    pub(super) fn bad_answer(&self, operation: &str, reason: impl Into<String>) -> KernelError {
        KernelError::BadAnswer {
            kernels: self.name.to_string(),
            operation: operation.into(),
            reason: reason.into(),
        }
    }

    /// An entry that the loader has checked to be there.
    pub(super) fn entry<F>(&self, operation: &str, entry: Option<F>) -> Result<F, KernelError> {
        entry.ok_or_else(|| self.bad_answer(operation, "the entry is missing"))
    }

    pub(super) fn describe(&self) -> Result<Description, KernelError> {
        let describe = self.entry("describe", self.table.describe)?;
        let mut stages = [StageInfo::EMPTY; abi::MAX_STAGES];
        let mut raw = abi::PpDescription {
            struct_size: abi::size::<abi::PpDescription>(),
            spaces: 0,
            chroma_formats: 0,
            context_frames: 0,
            digest: 0,
            name: [0; 64],
            version: [0; 32],
            stage_capacity: abi::MAX_STAGES as u32,
            stage_count: 0,
            stages: stages.as_mut_ptr(),
        };
        let mut error = ErrorBuffer::new();
        // SAFETY: the table was checked; the structs and the array live across the call and carry their sizes.
        let status = error.with(|error| unsafe { describe(&raw mut raw, error) });
        self.judge("describe", status, &error)?;
        let count = raw.stage_count as usize;
        let described = match stages.get(..count) {
            Some(stages) => Description::from_abi(&raw, stages),
            None => Err(format!("{count} stages, at most {}", abi::MAX_STAGES)),
        };
        described.map_err(|reason| self.bad_answer("describe", reason))
    }
}
