//! In which order a rank works.
//!
//! Hazard: a rank that works on what comes first runs another order than the one that was checked, and one that waits for
//! what never comes is a deadlock. Guarantee: a [`FixedOrder`] names each chunk of a step once for each stage of its rank,
//! and a rank that has one does exactly that, turn by turn.
//!
//! Choices: source and sink have no turns. They do what they can at any time, as in a stream.

use std::sync::Arc;

use pp_contract::{ChunkIndex, Pipeline, Rank};

use super::layout::LocalStage;

/// In which order a rank works.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// What can be done is done, in the order of the pipeline: for a stream.
    #[default]
    Streaming,
    /// Turn by turn: for a training schedule.
    Fixed(FixedOrder),
}

impl Order {
    /// The fixed order, if this is one.
    #[must_use]
    pub const fn fixed(&self) -> Option<&FixedOrder> {
        match self {
            Self::Streaming => None,
            Self::Fixed(order) => Some(order),
        }
    }
}

/// The work of a stage on a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Task {
    /// The stage, by its place in the pipeline.
    pub stage: usize,
    /// The chunk, counted from the beginning of its step.
    pub chunk: u64,
}

/// Names what a rank does at one time: an entry of its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Turn {
    /// A stage works on a chunk.
    Run(Task),
    /// Two stages work on a chunk each: when both inputs are here, and both results leave when both are done.
    Overlapped([Task; 2]),
    /// A stage does what it has put off of a chunk that it worked on. Nothing comes, and nothing leaves.
    Later(Task),
}

impl Turn {
    /// The works whose inputs it takes.
    pub fn runs(&self) -> impl Iterator<Item = Task> + use<> {
        let (first, second) = match *self {
            Self::Run(task) => (Some(task), None),
            Self::Overlapped([first, second]) => (Some(first), Some(second)),
            Self::Later(_) => (None, None),
        };
        first.into_iter().chain(second)
    }

    /// Renames the stages and chunks.
    fn map(self, name: impl Fn(Task) -> Task) -> Self {
        match self {
            Self::Run(task) => Self::Run(name(task)),
            Self::Overlapped(tasks) => Self::Overlapped(tasks.map(name)),
            Self::Later(task) => Self::Later(name(task)),
        }
    }
}

/// Why a list of turns is no order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    /// The pipeline has a ring.
    #[error(
        "the pipeline has a ring, and a fixed order runs a chunk once in each stage; name each lap as a stage"
    )]
    Ring,
    /// The pipeline has a group.
    #[error("{name} is run by a group of ranks, which has no fixed order; give it one rank")]
    Group {
        /// The stage.
        name: String,
    },
    /// A step of nothing.
    #[error("a step of 0 chunks; give it one at least")]
    Empty,
    /// The stage has no turns on this rank.
    #[error(
        "stage {stage} of the pipeline has no turns on rank {rank}; it stands elsewhere, or is source or sink"
    )]
    NotHere {
        /// The stage, by its place in the pipeline.
        stage: usize,
        /// The rank.
        rank: Rank,
    },
    /// A chunk that the step does not have.
    #[error("chunk {chunk} is run in a step of {chunks}, counted from 0")]
    NoSuchChunk {
        /// The chunk.
        chunk: u64,
        /// Chunks of the step.
        chunks: u64,
    },
    /// A work is done twice.
    #[error("stage {stage} of the pipeline runs chunk {chunk} twice")]
    Twice {
        /// The stage, by its place in the pipeline.
        stage: usize,
        /// The chunk.
        chunk: u64,
    },
    /// A work is never done.
    #[error("stage {stage} of the pipeline never runs chunk {chunk}")]
    Missing {
        /// The stage, by its place in the pipeline.
        stage: usize,
        /// The chunk.
        chunk: u64,
    },
    /// Something is put off that has not begun.
    #[error(
        "what stage {stage} of the pipeline puts off of chunk {chunk} comes before its run, or twice"
    )]
    NotPutOff {
        /// The stage, by its place in the pipeline.
        stage: usize,
        /// The chunk.
        chunk: u64,
    },
}

/// The turns of one rank in a step of so many chunks. The next step has the same turns with the next chunks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FixedOrder {
    turns: Arc<[Turn]>,
    chunks: u64,
    /// Of stages of this rank, the order in which chunks come; without an entry it is that of the turns.
    arrivals: Vec<(usize, Vec<u64>)>,
}

impl FixedOrder {
    /// The order of `rank` in steps of `chunks` chunks.
    ///
    /// # Errors
    /// [`OrderError`]: the pipeline has no fixed order, or the turns name a work twice, never, or where it cannot be.
    pub fn new(
        (pipeline, rank): (&Pipeline, Rank),
        turns: Vec<Turn>,
        chunks: u64,
    ) -> Result<Self, OrderError> {
        if !pipeline.rings().is_empty() {
            return Err(OrderError::Ring);
        }
        if let Some(group) = pipeline.stages().iter().find(|stage| stage.is_group()) {
            let name = group.name.to_string();
            return Err(OrderError::Group { name });
        }
        if chunks == 0 {
            return Err(OrderError::Empty);
        }
        let is_between = |stage: usize| stage > 0 && stage + 1 < pipeline.stages().len();
        let own = pipeline.stages_at(rank).map(|(stage, _)| stage);
        let own: Vec<usize> = own.filter(|stage| is_between(*stage)).collect();
        // What the turns name bounds the memory that this takes.
        let most = turns.iter().map(|turn| turn.runs().count()).sum::<usize>() as u64;
        let missing = |stage: usize, chunk| Err(OrderError::Missing { stage, chunk });
        if let Some(stage) = own.first().filter(|_| chunks > most) {
            return missing(*stage, most);
        }
        let mut seen = vec![[false; 2]; own.len() * chunks as usize];
        let place = |Task { stage, chunk }| {
            let at = own.iter().position(|own| *own == stage);
            let at = at.ok_or(OrderError::NotHere { stage, rank })?;
            match chunk < chunks {
                true => Ok(at * chunks as usize + chunk as usize),
                false => Err(OrderError::NoSuchChunk { chunk, chunks }),
            }
        };
        for turn in &turns {
            for task in turn.runs() {
                let Task { stage, chunk } = task;
                let [has_run, _] = &mut seen[place(task)?];
                if std::mem::replace(has_run, true) {
                    return Err(OrderError::Twice { stage, chunk });
                }
            }
            if let Turn::Later(task) = *turn {
                let Task { stage, chunk } = task;
                let [has_run, is_over] = &mut seen[place(task)?];
                if !*has_run || std::mem::replace(is_over, true) {
                    return Err(OrderError::NotPutOff { stage, chunk });
                }
            }
        }
        match seen.iter().position(|[has_run, _]| !has_run) {
            Some(at) => missing(own[at / chunks as usize], at as u64 % chunks),
            None => Ok(Self {
                turns: turns.into(),
                chunks,
                arrivals: Vec::new(),
            }),
        }
    }

    /// Sets in which order chunks come to each stage: as the stage before runs them, by the orders of all ranks.
    #[must_use]
    pub fn among(mut self, all: &[Self]) -> Self {
        let runs = self.turns.iter().flat_map(Turn::runs);
        let mut stages: Vec<usize> = runs.map(|task| task.stage).collect();
        stages.sort_unstable();
        stages.dedup();
        let made_before = |stage: usize| {
            // The source has no turns: what it makes comes in order.
            let chunks = match stage {
                1 => (0..self.chunks).collect(),
                _ => {
                    let before = all.iter().flat_map(|order| order.chunks_of(stage - 1));
                    before.collect::<Vec<u64>>()
                }
            };
            (stage, chunks)
        };
        self.arrivals = stages.into_iter().map(made_before).collect();
        self
    }

    /// Chunks of a step.
    #[must_use]
    pub const fn chunks(&self) -> u64 {
        self.chunks
    }

    /// The turns of a step.
    #[must_use]
    pub fn turns(&self) -> &[Turn] {
        &self.turns
    }

    /// The chunks of a step in the order in which a stage runs them.
    pub fn chunks_of(&self, stage: usize) -> impl Iterator<Item = u64> {
        let runs = self.turns.iter().flat_map(Turn::runs);
        runs.filter(move |task| task.stage == stage)
            .map(|task| task.chunk)
    }

    /// The chunks of a step in the order in which they come to a stage over an edge.
    #[must_use]
    pub fn arrivals_at(&self, stage: usize) -> Vec<u64> {
        let known = self.arrivals.iter().find(|(known, _)| *known == stage);
        known.map_or_else(
            || self.chunks_of(stage).collect(),
            |(_, chunks)| chunks.clone(),
        )
    }
}

/// Where a rank is in its fixed order. Stages are named by their places on the rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Turns {
    turns: Arc<[Turn]>,
    /// Stage and chunk of all that is put off, in rising order.
    later: Arc<[(usize, u64)]>,
    chunks: u64,
    /// The next turn.
    next: usize,
    /// The first chunk of the step.
    first: u64,
}

impl Turns {
    /// The turns of a rank with these stages.
    ///
    /// # Panics
    /// If the order is that of another rank.
    pub(super) fn new<'a>(
        order: &FixedOrder,
        stages: impl Iterator<Item = &'a LocalStage> + Clone,
    ) -> Self {
        let own = |task: Task| {
            let at = stages.clone().position(|stage| stage.at == task.stage);
            let stage = at.expect("the order is one of this rank");
            Task { stage, ..task }
        };
        let turns: Arc<[Turn]> = order.turns.iter().map(|turn| turn.map(own)).collect();
        let put_off = |turn: &Turn| match *turn {
            Turn::Later(Task { stage, chunk }) => Some((stage, chunk)),
            _ => None,
        };
        let mut later: Vec<(usize, u64)> = turns.iter().filter_map(put_off).collect();
        later.sort_unstable();
        Self {
            turns,
            later: later.into(),
            chunks: order.chunks,
            next: 0,
            first: 0,
        }
    }

    /// What is next, with the chunks of this step.
    pub(super) fn next(&self) -> Option<Turn> {
        let turn = self.turns.get(self.next)?;
        let chunk = |task: Task| Task {
            chunk: self.first.saturating_add(task.chunk),
            ..task
        };
        Some(turn.map(chunk))
    }

    /// The chunk that this stage runs next, if it is its turn.
    pub(super) fn due(&self, stage: usize) -> Option<ChunkIndex> {
        let mut runs = self.next()?.runs();
        let own = runs.find(|task| task.stage == stage)?;
        Some(ChunkIndex::new(own.chunk))
    }

    /// Says whether the stage puts something off of the chunk that it runs.
    pub(super) fn puts_off(&self, stage: usize, chunk: ChunkIndex) -> bool {
        let chunk = chunk.get().wrapping_sub(self.first);
        self.later.binary_search(&(stage, chunk)).is_ok()
    }

    /// A stage has begun. Two that overlap begin one after the other.
    pub(super) fn begun(&mut self, stage: usize) {
        let last = self.next().and_then(|turn| turn.runs().last());
        if last.is_some_and(|task| task.stage == stage) {
            self.advance();
        }
    }

    /// The turn is over.
    pub(super) fn advance(&mut self) {
        self.next += 1;
        if self.next == self.turns.len() {
            self.next = 0;
            self.first = self.first.saturating_add(self.chunks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stage: usize, chunk: u64) -> Turn {
        Turn::Run(Task { stage, chunk })
    }

    fn later(stage: usize, chunk: u64) -> Turn {
        Turn::Later(Task { stage, chunk })
    }

    fn order(pipeline: &str, turns: Vec<Turn>, chunks: u64) -> Result<FixedOrder, OrderError> {
        let pipeline = pipeline.parse().unwrap();
        FixedOrder::new((&pipeline, Rank::new(1)), turns, chunks)
    }

    #[test]
    fn an_order_names_each_work_once_and_what_is_put_off_behind_it() {
        let chain = "a@0 -> b@1 -> c@1 -> d@0";
        let both = |first, second| {
            Turn::Overlapped([first, second].map(|(stage, chunk)| Task { stage, chunk }))
        };
        for turns in [
            vec![run(1, 1), run(2, 1), run(2, 0), run(1, 0)],
            vec![
                run(1, 0),
                both((1, 1), (2, 0)),
                later(1, 1),
                run(2, 1),
                later(1, 0),
            ],
        ] {
            assert_eq!(order(chain, turns.clone(), 2).unwrap().turns(), turns);
        }
        let (stage, chunk, rank) = (1, 1, Rank::new(1));
        for (turns, chunks, error) in [
            (vec![], 0, OrderError::Empty),
            (
                vec![run(1, 0), run(2, 0), run(2, 1)],
                2,
                OrderError::Missing { stage, chunk },
            ),
            (
                vec![run(1, 0)],
                u64::MAX,
                OrderError::Missing { stage, chunk },
            ),
            (
                vec![run(1, 0), run(1, 1), run(1, 1)],
                2,
                OrderError::Twice { stage, chunk },
            ),
            (
                vec![both((1, 1), (1, 1))],
                2,
                OrderError::Twice { stage, chunk },
            ),
            (
                vec![run(1, 0), run(1, 2)],
                2,
                OrderError::NoSuchChunk {
                    chunk: 2,
                    chunks: 2,
                },
            ),
            (
                vec![run(1, 0), run(0, 0)],
                1,
                OrderError::NotHere { stage: 0, rank },
            ),
            (vec![run(3, 0)], 1, OrderError::NotHere { stage: 3, rank }),
            (
                vec![run(1, 0), later(1, 1), run(1, 1)],
                2,
                OrderError::NotPutOff { stage, chunk },
            ),
            (
                vec![run(1, 1), later(1, 1), later(1, 1)],
                1,
                OrderError::NoSuchChunk { chunk, chunks: 1 },
            ),
            (
                vec![run(1, 1), run(1, 0), later(1, 1), later(1, 1)],
                2,
                OrderError::NotPutOff { stage, chunk },
            ),
        ] {
            assert_eq!(order(chain, turns, chunks), Err(error));
        }
    }

    #[test]
    fn rings_and_groups_have_no_order() {
        let ring = order("a@0 -> (b@1)*2 -> c@0", vec![run(1, 0)], 1);
        assert_eq!(ring, Err(OrderError::Ring));
        let group = order("a@0 -> b@1+0 -> c@0", vec![run(1, 0)], 1);
        let said = "b is run by a group of ranks, which has no fixed order; give it one rank";
        assert_eq!(group.unwrap_err().to_string(), said);
    }
}
