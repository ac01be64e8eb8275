//! What a run of a schedule may use.

use std::fmt;

/// Limits the resources of a schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The slots of each edge. `Some(0)`: a send ends only when its receive begins. [`None`]:
    /// [`check`](super::Schedule::check) finds the smallest number that suffices; in
    /// [`simulate`](super::Schedule::simulate) no action waits for a slot.
    pub slots: Option<u32>,
}

impl Limits {
    /// So many slots on each edge.
    #[must_use]
    pub const fn slots(slots: u32) -> Self {
        Self { slots: Some(slots) }
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.slots {
            None => write!(f, "any number of slots"),
            Some(1) => write!(f, "1 slot an edge"),
            Some(slots) => write!(f, "{slots} slots an edge"),
        }
    }
}
