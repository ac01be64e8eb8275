//! Ranks by what stands on them, in any pipeline.

use pp_contract::{Pipeline, Rank};
use pp_job::Error;

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

/// Says whether the roles of this pipeline are ranks of their own, as the catalogue says of what each of them has to do.
///
/// # Errors
/// The stage behind the source stands on the source's rank, too.
pub(super) fn check(pipeline: &Pipeline) -> Result<(), Error> {
    let stage = &pipeline.stages()[1];
    if !stage.ranks.contains(&Role::Source.rank(pipeline)) {
        return Ok(());
    }
    let name = &stage.name;
    let why = format!(
        "the catalogue breaks rules between source and {name}, and {name} stands on rank 0, that of the source; give {name} \
         other ranks, such as encode@0,{name}@1+2,decode@0"
    );
    Err(Error::Usage(why))
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
