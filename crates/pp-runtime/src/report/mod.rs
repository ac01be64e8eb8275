//! What a run looked like: one record per chunk, and everything derived from records.
//!
//! The hazard: an overlap that is claimed but not there. A pipeline that runs its stages one after the other prints the
//! same pictures as one that hides every transfer; only the times tell them apart, and only when the times of all ranks
//! lie on one clock.
//!
//! So there is one plain value, [`ChunkRecord`], that rank 0 fills and hands over once per chunk, one fixed ring that holds
//! the pipeline and the latest records ([`Recorder`]), and pure functions from there: [`Measures`], and its forms as text,
//! JSON, a Chrome/Perfetto trace and an SVG timeline. Nothing here reads a clock, starts a thread or allocates per chunk.
//!
//! In the figures of ranks a group counts as its leader: its members work on the same chunk at the same time, so they hide
//! nothing of each other. How long each member worked stands beside that, and each has a row of its own in the pictures.

mod far;
mod json;
mod measures;
mod measuring;
mod ratio;
mod record;
mod recorder;
mod svg;
mod text;
mod trace;
mod trained;
mod training;

#[cfg(test)]
pub(crate) mod testing;

pub use far::{FAR, are_far_apart};
pub use json::{SCHEMA, write_json};
pub use measures::{Measures, RankMeasures, StageMeasures, WhyNull};
pub use measuring::{DEFAULT_WARM_UP, default_warm_up};
pub use ratio::MEASUREMENT_ERROR;
pub use record::{ChunkRecord, MemberRecord, Restart, StageRecord, StageTimes};
pub use recorder::{RING_RECORDS, Recorder, Totals};
pub use svg::{write_schedules_svg, write_svg};
pub use text::{Count, write_text};
pub use trace::{TraceEvents, write_chrome_trace};
pub use trained::{CauseMeasures, StageCosts, TrainingMeasures};
pub use training::Training;

/// How a timeline or trace is to be labelled and cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Title of the picture, one line.
    pub title: String,
    /// How many chunks, counted back from the last, the SVG timeline shows.
    pub chunks: usize,
    /// Every time that a rank was lost and the run went on.
    pub restarts: Vec<Restart>,
}

impl Default for View {
    fn default() -> Self {
        Self {
            title: String::from("pipeline timeline"),
            chunks: 12,
            restarts: Vec::new(),
        }
    }
}
