//! How a check ends.

/// A reason that anything readable turns into.
pub(super) struct Why(pub(super) String);

impl<E: std::error::Error> From<E> for Why {
    fn from(error: E) -> Why {
        Why(chain(&error))
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

pub(super) type Outcome<T = ()> = Result<T, Why>;

pub(super) fn fail<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Why(reason.into()))
}
