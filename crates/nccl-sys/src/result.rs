//! Result codes as text.

use std::fmt;

use crate::bindings::ncclResult_t;

impl ncclResult_t {
    /// Says whether the call did what it should. [`ncclResult_t::ncclInProgress`], which a non-blocking communicator returns,
    /// is neither this nor a failure.
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.0 == ncclResult_t::ncclSuccess.0
    }

    /// The name in `nccl.h`, if this header knows the code.
    #[must_use]
    pub const fn name(self) -> Option<&'static str> {
        Some(match self {
            ncclResult_t::ncclSuccess => "ncclSuccess",
            ncclResult_t::ncclUnhandledCudaError => "ncclUnhandledCudaError",
            ncclResult_t::ncclSystemError => "ncclSystemError",
            ncclResult_t::ncclInternalError => "ncclInternalError",
            ncclResult_t::ncclInvalidArgument => "ncclInvalidArgument",
            ncclResult_t::ncclInvalidUsage => "ncclInvalidUsage",
            ncclResult_t::ncclRemoteError => "ncclRemoteError",
            ncclResult_t::ncclInProgress => "ncclInProgress",
            // ncclNumResults counts the codes of this header; a newer library uses its value for an error.
            _ => return None,
        })
    }
}

impl fmt::Display for ncclResult_t {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "code {}, which NCCL 2.28 does not have", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_codes_have_names_and_unknown_ones_do_not_pass_for_success() {
        assert_eq!(ncclResult_t(6).to_string(), "ncclRemoteError (6)");
        assert!(ncclResult_t(0).is_success());
        for newer in [8, 9, u32::MAX] {
            assert!(!ncclResult_t(newer).is_success());
            assert!(ncclResult_t(newer).to_string().contains(&newer.to_string()));
            assert_eq!(ncclResult_t(newer).name(), None);
        }
    }
}
