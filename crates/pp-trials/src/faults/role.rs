//! Ranks by what stands on them, in any pipeline.

use pp_contract::{Pipeline, Rank};

/// A rank, by what stands on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Source,
    /// The first stage behind the source.
    Stage,
    /// The last member of the group that runs this stage.
    Member,
    Sink,
}

impl Role {
    /// Its rank in this pipeline.
    pub(super) fn rank(self, pipeline: &Pipeline) -> Rank {
        match self {
            Self::Source => Rank::new(0),
            Self::Stage => pipeline.stages()[1].leader(),
            Self::Member => *pipeline.stages()[1].ranks.last().expect("a rank"),
            Self::Sink => pipeline.sink(),
        }
    }
}
