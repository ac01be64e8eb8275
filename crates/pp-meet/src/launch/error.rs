//! Why there is no place in a job.

/// Why the environment does not say who we are. The text never holds any of a secret.
#[derive(Debug, thiserror::Error)]
#[error("{what}; {remedy}")]
pub struct LaunchError {
    what: String,
    remedy: String,
}

impl LaunchError {
    pub(super) fn new(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            remedy: remedy.into(),
        }
    }
}
