//! One call through the table: the function, and its status as a result.

use std::sync::Arc;

use pp_device::Stream;

use crate::abi::{self, OpaqueSession, Table};
use crate::border::called;
use crate::error::{Failure, KernelError, Status};
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

impl Caller {
    /// Calls a function of the table.
    pub(super) fn call(
        &self,
        operation: &str,
        call: impl FnOnce(*mut abi::ErrorText) -> u32,
    ) -> Result<(), KernelError> {
        called(call).map_err(|Failure { status, message }| {
            let (kernels, operation) = (self.name.to_string(), operation.to_owned());
            let message = match message.is_empty() {
                true => format!("status {} and no text", status.code()),
                false => message,
            };
            match status {
                Status::Panic => KernelError::Panicked {
                    kernels,
                    operation,
                    message,
                },
                status => KernelError::Failed {
                    kernels,
                    operation,
                    status,
                    message,
                },
            }
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
            bits: 0,
            reserved: 0,
        };
        // SAFETY: the table was checked; the structs and the array live across the call and carry their sizes.
        self.call("describe", |error| unsafe { describe(&raw mut raw, error) })?;
        let count = raw.stage_count as usize;
        let described = match stages.get(..count) {
            Some(stages) => Description::from_abi(&raw, stages),
            None => Err(format!("{count} stages, at most {}", abi::MAX_STAGES)),
        };
        described.map_err(|reason| self.bad_answer("describe", reason))
    }
}

/// A call that does not fit, and was not made.
pub(super) fn bad_call(operation: &str, reason: String) -> KernelError {
    KernelError::BadCall {
        operation: operation.into(),
        reason,
    }
}
