//! The shape of a pipeline: which stages there are, in which order, and on which ranks each stands.
//!
//! *Hazard.* A shape that only the code knows cannot be compared, so ranks with different shapes wait for each other.
//! *Guarantee.* A [`Pipeline`] is one text. All edges, groups and parts follow from it, and two pipelines are equal
//! exactly if their canonical texts are.
//!
//! ```
//! use pp_contract::{Pipeline, Rank};
//!
//! let pipeline: Pipeline = "encode@0,denoise@1,denoise@2,decode@0".parse()?;
//! assert_eq!(pipeline.to_string(), "encode@0 -> denoise@1 -> denoise@2 -> decode@0");
//! assert_eq!(pipeline.world_size().get(), 3);
//! let denoise = &pipeline.stages()[1];
//! assert_eq!((denoise.part, denoise.parts, denoise.leader()), (0, 2, Rank::new(1)));
//! # Ok::<(), pp_contract::PipelineError>(())
//! ```
//!
//! # Notation
//!
//! | text | meaning |
//! |---|---|
//! | `encode@0` | a stage and its rank; a name is `[a-z][a-z0-9_]*`, of at most 32 bytes |
//! | `a@0 -> b@1`, `a@0,b@1` | the output of `a` is the input of `b` |
//! | `b@1 -> b@2` | two parts of one stage, counted in the order of the text |
//! | `b@1+2` | a group: ranks 1 and 2 run the stage together, and rank 1 leads |
//! | `(b@1 -> c@2)*steps` | a ring: each chunk goes through it once for each denoising step of its plan |
//! | `(b@1 -> c@2)*4` | a ring with a fixed number of laps, 1 to 65535 |
//!
//! The first stage is the source: it stands on rank 0. The last stage is the sink. Each of the two stands once, on one
//! rank, and in no ring. All ranks from 0 to the largest have a stage. Rings do not nest, and hold no group. No rank is in two
//! groups, not even where all their ranks are the same: groups that share a rank could wait for each other for ever.

mod parse;

use core::fmt;

use crate::bounded::Text;
use crate::digest::digest;
use crate::ids::{Rank, WorldSize};

/// Most stages of a pipeline, each part counted.
pub const MAX_STAGES: usize = 256;
/// Most ranks of a pipeline.
pub const MAX_RANKS: u32 = 64;
/// Most chunks in flight.
pub const MAX_DEPTH: u32 = 256;

/// Why a text is no pipeline: where, what, and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("pipeline, character {position}: {problem}")]
pub struct PipelineError {
    /// The character at fault, counted from 1.
    pub position: usize,
    /// What is wrong with it, and what to write instead.
    pub problem: String,
}

/// One stage of a pipeline, or one part of a stage that stands in it several times.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StageSpec {
    /// The name of the stage.
    pub name: Text<32>,
    /// Which part of the stage this is, from 0.
    pub part: usize,
    /// How many parts the stage has; 1 for a stage that stands once.
    pub parts: usize,
    /// The ranks that run it together, the leader first; never empty.
    pub ranks: Vec<Rank>,
    /// Whether it is the last stage.
    pub is_sink: bool,
}

impl StageSpec {
    /// The rank that takes and hands on the payload.
    #[must_use]
    pub fn leader(&self) -> Rank {
        self.ranks[0]
    }

    /// What reports call it: its name, and which of its parts it is, counted from 1, where it has several: `b 1/2`.
    #[must_use]
    pub fn label(&self) -> String {
        match self.parts {
            1 => self.name.to_string(),
            parts => format!("{} {}/{parts}", self.name, self.part + 1),
        }
    }

    /// Where it stands, in words: `rank 1`, and a group on `ranks 1+2`.
    #[must_use]
    pub fn ranks_in_words(&self) -> String {
        let many = if self.is_group() { "s" } else { "" };
        format!("rank{many} {}", self.joined_ranks())
    }

    /// Says whether several ranks run it together.
    #[must_use]
    pub fn is_group(&self) -> bool {
        self.ranks.len() > 1
    }

    /// As it stands in the text: `b@1+2`.
    fn with_ranks(&self) -> String {
        format!("{}@{}", self.name, self.joined_ranks())
    }

    fn joined_ranks(&self) -> String {
        let ranks: Vec<String> = self.ranks.iter().map(Rank::to_string).collect();
        ranks.join("+")
    }
}

/// How often a chunk goes through a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Laps {
    /// Once for each denoising step of its plan.
    Steps,
    /// So many times, at least once.
    Fixed(u16),
}

/// Stages that a chunk goes through more than once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ring {
    /// Its first stage.
    pub first: usize,
    /// Its last stage.
    pub last: usize,
    /// How often a chunk goes through it.
    pub laps: Laps,
}

/// What an edge carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EdgeKind {
    /// The output of a stage to the next one.
    Onward,
    /// The output of the last stage of a ring, back to the first.
    Lap,
    /// Plan and manifest from the leader of a group to another member; no payload.
    Follow,
    /// The report of a member on its share of a chunk, to the leader of its group; no payload.
    Report,
    /// The sink's acceptance of a chunk, to the source; no payload.
    Accept,
}

/// A directed edge between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EdgeSpec {
    /// What it carries.
    pub kind: EdgeKind,
    /// The stage at its start, by its place in [`Pipeline::stages`].
    pub from: usize,
    /// The stage at its end.
    pub to: usize,
    /// The rank that sends.
    pub source: Rank,
    /// The rank that receives.
    pub target: Rank,
}

/// Stages on ranks. Made from a text, and printed as one: see the [notation](self).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pipeline {
    stages: Vec<StageSpec>,
    rings: Vec<Ring>,
}

impl Pipeline {
    /// All stages, the source first and the sink last.
    #[must_use]
    pub fn stages(&self) -> &[StageSpec] {
        &self.stages
    }

    /// All rings, in the order of the text.
    #[must_use]
    pub fn rings(&self) -> &[Ring] {
        &self.rings
    }

    /// The number of ranks.
    #[must_use]
    pub fn world_size(&self) -> WorldSize {
        let ranks = self.stages.iter().flat_map(|stage| &stage.ranks);
        let last = ranks.max().copied().unwrap_or(Rank::new(0));
        WorldSize::new(last.get() + 1).unwrap_or_else(|_| unreachable!("one more than a number"))
    }

    /// The rank of the sink.
    #[must_use]
    pub fn sink(&self) -> Rank {
        self.stages[self.stages.len() - 1].leader()
    }

    /// Says whether another process may take the place of `rank`: of all ranks but those of the source and of the sink, which
    /// have the input and the output.
    #[must_use]
    pub fn may_restart(&self, rank: Rank) -> bool {
        rank != self.stages[0].leader() && rank != self.sink()
    }

    /// The ranks that [may be started again](Self::may_restart).
    pub fn restartable(&self) -> impl Iterator<Item = Rank> {
        let ranks = self.world_size().ranks();
        ranks.filter(|rank| self.may_restart(*rank))
    }

    /// The stages that `rank` runs, alone or as a member of a group, in the order of the pipeline.
    pub fn stages_at(&self, rank: Rank) -> impl Iterator<Item = (usize, &StageSpec)> {
        let stages = self.stages.iter().enumerate();
        stages.filter(move |(_, stage)| stage.ranks.contains(&rank))
    }

    /// The ring that stage `at` stands in.
    #[must_use]
    pub fn ring_at(&self, at: usize) -> Option<&Ring> {
        let mut rings = self.rings.iter();
        rings.find(|ring| (ring.first..=ring.last).contains(&at))
    }

    /// How often a chunk of so many steps goes through stage `at`; at least once.
    #[must_use]
    pub fn laps(&self, at: usize, steps: u16) -> u16 {
        match self.ring_at(at).map(|ring| ring.laps) {
            None => 1,
            Some(Laps::Steps) => steps.max(1),
            Some(Laps::Fixed(laps)) => laps,
        }
    }

    /// The stages that follow stage `at`: the next one, and behind a ring's last stage the ring's first.
    pub fn next(&self, at: usize) -> impl Iterator<Item = (EdgeKind, usize)> {
        let onward = (at + 1 < self.stages.len()).then_some((EdgeKind::Onward, at + 1));
        let ring = self.rings.iter().find(move |ring| ring.last == at);
        onward
            .into_iter()
            .chain(ring.map(|ring| (EdgeKind::Lap, ring.first)))
    }

    /// All edges between different ranks. Stages of one rank hand their slots on, so they need none.
    pub fn edges(&self) -> impl Iterator<Item = EdgeSpec> {
        let last = self.stages.len() - 1;
        let edge = |kind, from: usize, to: usize| EdgeSpec {
            kind,
            from,
            to,
            source: self.stages[from].leader(),
            target: self.stages[to].leader(),
        };
        let payloads = (0..=last)
            .flat_map(move |from| self.next(from).map(move |(kind, to)| edge(kind, from, to)));
        let followers = (0..=last).flat_map(move |at| {
            let own = move |kind| edge(kind, at, at);
            self.stages[at].ranks[1..].iter().flat_map(move |member| {
                let (mut follow, mut report) = (own(EdgeKind::Follow), own(EdgeKind::Report));
                (follow.target, report.source) = (*member, *member);
                [follow, report]
            })
        });
        let all = payloads
            .chain(followers)
            .chain([edge(EdgeKind::Accept, last, 0)]);
        all.filter(|edge| edge.source != edge.target)
    }

    /// The number of chunks that keep every rank busy: two, and one more for each edge with a payload and for each group,
    /// which moves one chunk while it works on another, up to [`MAX_DEPTH`].
    #[must_use]
    pub fn default_depth(&self) -> u32 {
        let is_payload = |edge: &EdgeSpec| matches!(edge.kind, EdgeKind::Onward | EdgeKind::Lap);
        let groups = self.stages.iter().filter(|stage| stage.is_group());
        (2 + (self.edges().filter(is_payload).count() + groups.count()) as u32).min(MAX_DEPTH)
    }

    /// The digest of the canonical text, which all ranks compare.
    #[must_use]
    pub fn digest(&self) -> u64 {
        digest(self.to_string().as_bytes())
    }
}

/// The canonical text: `parse` of it is the same pipeline.
impl fmt::Display for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, stage) in self.stages.iter().enumerate() {
            if at > 0 {
                f.write_str(" -> ")?;
            }
            if self.rings.iter().any(|ring| ring.first == at) {
                f.write_str("(")?;
            }
            f.write_str(&stage.with_ranks())?;
            match self
                .rings
                .iter()
                .find(|ring| ring.last == at)
                .map(|ring| ring.laps)
            {
                None => {}
                Some(Laps::Steps) => f.write_str(")*steps")?,
                Some(Laps::Fixed(laps)) => write!(f, ")*{laps}")?,
            }
        }
        Ok(())
    }
}
