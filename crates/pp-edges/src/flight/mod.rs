//! The flight recorder: the last operations of a rank, and how far each came.
//!
//! Hazard: a job stands still or ends with "timed out", and nothing shows which rank waited for which, for what, and
//! which of them never came. Guarantee: any thread can read the last operations of each rank, with their ids and times,
//! at any time. This works even while the thread that writes them is stuck in one. Neither reading nor writing waits
//! for another thread. A [`Recording`] of the operations is a file with a version and a checksum. Its decoder is
//! bounded and does not panic.
//!
//! Choices: the driver records its messages ([`EdgeLog`]), and an operation in progress carries its [`Record`], so no
//! edge knows the recorder. Groups are told which recorder to use. Memory is allocated once. This module does not write
//! files, read clocks of other hosts, or interpret recordings. The program that reads the recordings of all ranks does
//! that.

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
