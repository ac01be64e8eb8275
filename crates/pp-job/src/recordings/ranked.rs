//! A recording among those of its job.

use std::path::PathBuf;

use pp_transport::flight::{Operation, Recording};
use serde::Serialize;

/// Where the clock of a recording stands against that of the first.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Clock {
    /// Is added to its times.
    pub(super) offset_ns: i128,
    pub(super) by: By,
    /// At most so much off; unknown where one way only was seen, or none.
    pub(super) within_ns: Option<u64>,
}

/// How a clock was placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum By {
    /// It is the clock of the first recording.
    SameClock,
    /// By messages in both directions.
    Messages,
    /// By messages in one direction: no later, or no earlier, than this.
    OneWay,
    /// By the clocks on the wall, which may be seconds apart.
    WallClock,
}

/// Recordings, and where they were read from.
pub(super) type Files = Vec<(PathBuf, Recording)>;

/// A recording, beside all others of its job.
pub(super) struct Ranked {
    pub(super) file: PathBuf,
    pub(super) recording: Recording,
    pub(super) clock: Clock,
}

impl Ranked {
    pub(super) fn rank(&self) -> u32 {
        self.recording.rank.get()
    }

    pub(super) fn operations(&self) -> impl DoubleEndedIterator<Item = &Operation> {
        self.recording.operations.iter()
    }

    /// A time of this rank on the clock of all.
    pub(super) fn at(&self, ns: u64) -> i128 {
        i128::from(ns) + self.clock.offset_ns
    }

    /// How long before the recording was written.
    pub(super) fn before_ns(&self, ns: u64) -> u64 {
        self.recording.written.monotonic_ns.saturating_sub(ns)
    }
}
