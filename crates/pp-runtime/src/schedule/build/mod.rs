//! Builders of the schedules that are known by name.
//!
//! Hazard: one action at another place is another schedule, with another bubble, and perhaps a deadlock.
//! Guarantee: the lists are PyTorch's, action by action, without its bubbles, at every size that it takes.
//!
//! Choices: a schedule is said by the order of its forwards, that of its backwards, and when the one gives way to the other.

mod looped;
mod v;

use super::Schedule;
use super::kind::{Kind, Size, SizeError};

impl Schedule {
    /// The schedule of this name, without sends and receives. Stage s stands on rank s mod `ranks`; in the V schedules
    /// stages go up the ranks and down again.
    ///
    /// # Errors
    /// [`SizeError`]: a count is 0; the stages a rank or the microbatches do not fit the schedule, and the error names what
    /// does; or there are too many computations.
    pub fn build(
        kind: Kind,
        ranks: u32,
        stages_per_rank: u32,
        microbatches: u32,
    ) -> Result<Self, SizeError> {
        let size = Size {
            ranks,
            stages_per_rank,
            microbatches,
        };
        kind.takes(size)?;
        let stages = 0..ranks * stages_per_rank;
        let rank_of = stages.map(|stage| match kind.is_v() && stage >= ranks {
            true => 2 * ranks - 1 - stage,
            false => stage % ranks,
        });
        let steps = |rank| match kind {
            Kind::ZbV => v::zb_v(size, rank),
            Kind::DualPipeV => v::dualpipe_v(size, rank),
            _ => looped::steps(kind, size, rank),
        };
        Ok(Self {
            ranks: (0..ranks).map(steps).collect(),
            rank_of: rank_of.collect(),
            microbatches,
        })
    }
}
