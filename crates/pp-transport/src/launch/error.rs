//! Why there is no place in a job.

/// Why the environment does not say who we are.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A launcher's variable is there and its companion is not.
    #[error("{present} is set but {missing} is not; {remedy}")]
    Missing {
        /// The variable that is there, with its value.
        present: String,
        /// The variable that is not.
        missing: String,
        /// What to do.
        remedy: String,
    },
    /// A variable holds something that cannot be.
    #[error("{name}={value:?} {why}; {remedy}")]
    BadValue {
        /// The variable.
        name: String,
        /// Its value, cut to a readable length.
        value: String,
        /// What is wrong with it.
        why: String,
        /// What to do.
        remedy: String,
    },
    /// Two variables cannot both be true.
    #[error("{first} contradicts {second}; {remedy}")]
    Contradiction {
        /// One variable and value.
        first: String,
        /// The other.
        second: String,
        /// What to do.
        remedy: String,
    },
    /// The job secret is missing or unfit. The text never holds any of it.
    #[error("{why}; {remedy}")]
    Secret {
        /// What is wrong.
        why: String,
        /// What to do.
        remedy: String,
    },
}
