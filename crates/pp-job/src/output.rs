//! The results of a job: no result replaces another file of the command, and each appears whole or not at all.

mod error;
mod patient;
mod place;
mod staged;
mod stdout;

pub use self::error::{OutputError, Shown};
pub use self::patient::Patient;
pub use self::place::{is_stdout, one_file_each};
pub use self::staged::{StagedFile, can_be_created, is_locked, kept_name, write_file};
pub(crate) use self::staged::{discard_hidden, has_hidden};
pub use self::stdout::{keep_stdout, stdout};
