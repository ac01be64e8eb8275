//! Why there is no place in a job.

use super::place::Env;

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

/// Longest value repeated in an error.
const SHOWN_CHARS: usize = 80;

/// One of two variables that belong together is missing.
pub(super) fn missing(env: &Env<'_>, present: &str, missing: &str, remedy: &str) -> LaunchError {
    let value = shown(&env.get(present).unwrap_or_default());
    let what = format!("{present}={value} is set but {missing} is not");
    LaunchError::new(what, remedy)
}

/// A variable has a value that cannot be.
pub(super) fn bad(name: &str, value: &str, why: &str, remedy: &str) -> LaunchError {
    LaunchError::new(format!("{name}={:?} {why}", shown(value)), remedy)
}

fn shown(value: &str) -> String {
    value.chars().take(SHOWN_CHARS).collect()
}
