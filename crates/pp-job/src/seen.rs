//! A running job, as others see it.
//!
//! Rank 0 of every job has a [`Viewer`] ([`ThisRank::viewer`](crate::ThisRank::viewer)).

mod look;
mod snapshot;
mod viewer;

pub use self::snapshot::{
    AboutJob, ChunkView, FaultView, HowEnded, JobState, RankView, RecentFigures, RestartView,
    RunTotals, Snapshot, StageView, Thumb, Thumbnail,
};
pub use self::viewer::{Viewer, Watching};
