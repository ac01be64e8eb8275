//! How a check ends.

use pp_contract::with_source;

/// A reason that anything readable turns into.
pub(super) struct Why(pub(super) String);

impl<E: std::error::Error + 'static> From<E> for Why {
    fn from(error: E) -> Why {
        Why(with_source(&error))
    }
}

pub(super) type Outcome<T = ()> = Result<T, Why>;

pub(super) fn fail<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Why(reason.into()))
}
