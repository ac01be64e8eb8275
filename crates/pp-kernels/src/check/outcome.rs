//! Says how a check ends.

use std::error::Error;
use std::fmt;

use pp_contract::with_source;

use crate::error::{KernelError, Status};

/// Says why a check does not pass.
pub(super) enum Why {
    /// There is nothing to check.
    Skip(String),
    /// The kernels broke a rule.
    Fault(String),
    /// A call failed.
    Error(Box<dyn Error + Send>),
}

impl<E: Error + Send + 'static> From<E> for Why {
    fn from(error: E) -> Why {
        Why::Error(Box::new(error))
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Skip(reason) | Why::Fault(reason) => f.write_str(reason),
            // The report has a line for each check.
            Why::Error(error) => f.write_str(&with_source(&**error).replace('\n', " ")),
        }
    }
}

impl Why {
    /// Gives operation, status and text of a call that the kernels refused.
    pub(super) fn refusal(&self) -> Option<(&str, Status, &str)> {
        let Why::Error(error) = self else {
            return None;
        };
        match (&**error as &(dyn Error + 'static)).downcast_ref()? {
            KernelError::Failed {
                operation,
                status,
                message,
                ..
            } => Some((operation, *status, message)),
            _ => None,
        }
    }
}

pub(super) type Outcome<T = ()> = Result<T, Why>;

pub(super) fn fail<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Why::Fault(reason.into()))
}

pub(super) fn skip<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Why::Skip(reason.into()))
}
