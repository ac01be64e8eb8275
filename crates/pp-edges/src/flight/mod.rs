//! The flight recorder: what a rank did last, and how far it came.
//!
//! Hazard: a job stands still or ends with "timed out", and nothing says which rank waited for
//! which, for what, and which of them never came. Guarantee: the last operations of each rank, with
//! their ids and times, can be read by any thread at any time, also while the thread that writes
//! them is stuck in one of them; reading and writing wait for no thread. A [`Recording`] of them is
//! a file with a version and a checksum, whose decoder is bounded and does not panic.
//!
//! Choices: the driver records its messages ([`EdgeLog`]), and an operation that goes on carries its
//! [`Record`], so that no edge knows of it; groups are told which recorder to use. Memory is claimed once. What this does not do: write files, look at clocks of
//! other hosts, or say what the recordings mean; the program that reads the recordings of all ranks
//! does that.

mod file;
mod group;
mod operation;
mod recorder;

pub use self::file::{
    Activity, FILE_VERSION, MAX_FILE_BYTES, Moment, Reason, Recording, RecordingError,
};
#[doc(hidden)]
pub use self::group::GroupLog;
pub use self::operation::{Kind, Message, Operation, State};
pub use self::recorder::{
    DEFAULT_OPERATIONS, EdgeLog, FlightRecorder, Group, MAX_GROUPS, MAX_MEMBERS, MAX_OPERATIONS,
    Record,
};
