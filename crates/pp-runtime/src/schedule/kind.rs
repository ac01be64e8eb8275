//! The schedules that have builders, and the sizes that each takes.
//!
//! Hazard: at a size that a schedule was not made for, its rules give a deadlock or a microbatch that is never run.
//! Guarantee: such a size is refused before anything is built, with the nearest sizes that work.
//!
//! Choices: the sizes are those that PyTorch 2.15 takes.

use std::fmt;
use std::str::FromStr;

/// The least likeness of two names, 0 to 1, of which one is proposed for the other.
const NEAR: f64 = 0.6;
/// Most computations that are built: about 1 GiB of actions.
const MOST_COMPUTATIONS: u64 = 1 << 25;

/// A schedule that has a builder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Each microbatch goes forward and backward through all ranks before the next one starts.
    Naive,
    /// All forwards, then all backwards. Source: Huang et al. 2019, "GPipe".
    GPipe,
    /// 1F1B: rank r of P runs P - 1 - r forwards, then a forward and a backward in turn, then the backwards that are left.
    /// Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush).
    OneFOneB,
    /// 1F1B with several stages a rank, which take turns: each runs a group of microbatches, then the next stage does.
    /// Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters" (Megatron-LM).
    Interleaved,
    /// [`Kind::Interleaved`] with fewer forwards first and each `B` split: on rank r an `I` comes first, and its `W` follows
    /// r backwards later (ZB1P). Source: as [`Kind::ZbH1`].
    InterleavedZeroBubble,
    /// [`Kind::InterleavedZeroBubble`] with one stage a rank. Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism"
    /// (ZB-H1).
    ZbH1,
    /// All microbatches go through one stage of a rank, then all through its next stage. The backwards run in reverse.
    /// Source: Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism".
    LoopedBfs,
    /// Two stages a rank, in a V, and each `B` split where that fills a bubble. Source: Qi et al. 2024, "Zero Bubble Pipeline
    /// Parallelism" (ZB-V).
    ZbV,
    /// Two stages a rank, in a V: a forward of one stage overlaps with a backward of the other. Source: DualPipe,
    /// DeepSeek-V3 2024, of which this is the half in a V.
    DualPipeV,
}

impl Kind {
    /// All, as a list shows them.
    pub const ALL: [Self; 9] = [
        Self::Naive,
        Self::GPipe,
        Self::OneFOneB,
        Self::Interleaved,
        Self::InterleavedZeroBubble,
        Self::ZbH1,
        Self::LoopedBfs,
        Self::ZbV,
        Self::DualPipeV,
    ];

    /// Its name on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.names()[0]
    }

    /// Its name on a command line, and PyTorch's where that is another word.
    const fn names(self) -> &'static [&'static str] {
        match self {
            Self::Naive => &["naive"],
            Self::GPipe => &["gpipe"],
            Self::OneFOneB => &["1f1b"],
            Self::Interleaved => &["interleaved", "Interleaved1F1B"],
            Self::InterleavedZeroBubble => &["interleaved-zb", "InterleavedZeroBubble"],
            Self::ZbH1 => &["zb-h1"],
            Self::LoopedBfs => &["looped-bfs"],
            Self::ZbV => &["zbv", "ZBVZeroBubble"],
            Self::DualPipeV => &["dualpipe-v"],
        }
    }

    /// The stages that it has on each rank; `None` where any number goes.
    #[must_use]
    pub const fn stages_per_rank(self) -> Option<u32> {
        match self {
            Self::Naive | Self::GPipe | Self::OneFOneB | Self::ZbH1 => Some(1),
            Self::ZbV | Self::DualPipeV => Some(2),
            Self::Interleaved | Self::InterleavedZeroBubble | Self::LoopedBfs => None,
        }
    }

    /// Says whether its stages go up the ranks and down again: stage s on rank s, then on rank 2P-1-s.
    pub(super) const fn is_v(self) -> bool {
        matches!(self, Self::ZbV | Self::DualPipeV)
    }

    /// Says whether stages take turns by groups of microbatches, all of one size.
    const fn has_groups(self) -> bool {
        let zero_bubble = matches!(self, Self::InterleavedZeroBubble | Self::ZbH1);
        zero_bubble || matches!(self, Self::Interleaved)
    }

    /// Most computations of a microbatch in a stage.
    const fn computations(self) -> u64 {
        match self {
            Self::InterleavedZeroBubble | Self::ZbH1 | Self::ZbV | Self::DualPipeV => 3,
            _ => 2,
        }
    }

    /// Says whether it can be built at this size.
    pub(super) fn takes(self, size: Size) -> Result<(), SizeError> {
        let Size {
            ranks,
            stages_per_rank,
            microbatches,
        } = size;
        let named = [
            (ranks, "ranks"),
            (stages_per_rank, "stages a rank"),
            (microbatches, "microbatches"),
        ];
        if let Some(&(_, what)) = named.iter().find(|(count, _)| *count == 0) {
            return Err(SizeError::Zero { what });
        }
        if let Some(needed) = self.stages_per_rank()
            && needed != stages_per_rank
        {
            return Err(SizeError::StagesPerRank {
                kind: self,
                needed,
                stages_per_rank,
            });
        }
        // ZB-V goes through the motions of so many microbatches that every rank is busy.
        let busy = u64::from(ranks) * 2 - 1;
        let walked = match self {
            Self::ZbV => busy.max(microbatches.into()),
            _ => microbatches.into(),
        };
        let stages = u64::from(ranks) * u64::from(stages_per_rank);
        let computations = stages.saturating_mul(walked);
        let computations = computations.saturating_mul(self.computations());
        if computations > MOST_COMPUTATIONS {
            return Err(SizeError::TooLarge { size, computations });
        }
        let least = match self {
            Self::OneFOneB => ranks,
            Self::DualPipeV => 2 * ranks,
            _ => 1,
        };
        if microbatches < least {
            return Err(SizeError::TooFew {
                kind: self,
                size,
                least,
            });
        }
        match self.has_groups() && !has_equal_groups(ranks, microbatches) {
            true => Err(SizeError::unequal(self, size)),
            false => Ok(()),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = UnknownKind;

    /// Finds a schedule by its own name or by PyTorch's, which may begin with `Schedule`. Case, `-` and `_` do not count.
    fn from_str(name: &str) -> Result<Self, UnknownKind> {
        let name = plain(name);
        let name = name.strip_prefix("schedule").unwrap_or(&name);
        let found = all_names().find(|(_, known)| plain(known) == name);
        found.map(|(kind, _)| kind).ok_or_else(|| {
            let alike = |known: &str| strsim::normalized_damerau_levenshtein(name, &plain(known));
            let near = all_names().filter(|(_, known)| alike(known) > NEAR);
            let near = near.max_by(|(_, one), (_, other)| alike(one).total_cmp(&alike(other)));
            UnknownKind {
                near: near.map(|(kind, _)| kind),
            }
        })
    }
}

/// A name as it is compared.
fn plain(name: &str) -> String {
    name.to_lowercase().replace(['-', '_'], "")
}

fn all_names() -> impl Iterator<Item = (Kind, &'static str)> {
    let named = |kind: Kind| kind.names().iter().map(move |name| (kind, *name));
    Kind::ALL.into_iter().flat_map(named)
}

/// No schedule has this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct UnknownKind {
    /// The schedule whose name is most like it, if one is.
    pub near: Option<Kind>,
}

impl fmt::Display for UnknownKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Kind::ALL.map(Kind::name).join(", ");
        match self.near {
            Some(near) => write!(f, "no schedule of that name; did you mean {near}?"),
            None => write!(f, "no schedule of that name; there are {names}"),
        }
    }
}

/// The size of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Size {
    /// Ranks.
    pub ranks: u32,
    /// Stages of each rank.
    pub stages_per_rank: u32,
    /// Microbatches of one training step.
    pub microbatches: u32,
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            ranks,
            stages_per_rank,
            microbatches,
        } = self;
        write!(
            f,
            "{ranks} ranks of {stages_per_rank} stages with {microbatches} microbatches"
        )
    }
}

/// Why a schedule is not built at this size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizeError {
    /// There is none of something.
    #[error("there are 0 {what}; give at least 1")]
    Zero {
        /// What there is none of.
        what: &'static str,
    },
    /// The schedule has another number of stages on each rank.
    #[error("{kind} cannot have {stages_per_rank} stages a rank; give {needed}")]
    StagesPerRank {
        /// The schedule.
        kind: Kind,
        /// What it has.
        needed: u32,
        /// What was asked for.
        stages_per_rank: u32,
    },
    /// Too few microbatches for so many ranks.
    #[error("{kind} on {} ranks needs at least {least} microbatches, not {}", size.ranks, size.microbatches)]
    TooFew {
        /// The schedule.
        kind: Kind,
        /// What was asked for.
        size: Size,
        /// The fewest microbatches that work.
        least: u32,
    },
    /// The microbatches make no groups of one size.
    #[error(
        "{kind} on {} ranks cannot split {} microbatches into {groups} groups of one size; the nearest that work are {fewer} and {more}",
        size.ranks, size.microbatches
    )]
    Unequal {
        /// The schedule.
        kind: Kind,
        /// What was asked for.
        size: Size,
        /// The groups that would be needed.
        groups: u32,
        /// The next smaller number of microbatches that works.
        fewer: u32,
        /// The next larger one.
        more: u32,
    },
    /// It is too large to be held.
    #[error(
        "{computations} computations are too many; at most {MOST_COMPUTATIONS} are built; give fewer microbatches or ranks"
    )]
    TooLarge {
        /// What was asked for.
        size: Size,
        /// How many computations that is, or more.
        computations: u64,
    },
}

impl SizeError {
    fn unequal(kind: Kind, size: Size) -> Self {
        // Multiples of the ranks always work.
        let works = |microbatches: &u32| has_equal_groups(size.ranks, *microbatches);
        let fewer = (1..size.microbatches).rev().find(works);
        let more = (size.microbatches..).find(works);
        Self::Unequal {
            kind,
            size,
            groups: groups(size.ranks, size.microbatches),
            fewer: fewer.unwrap_or(1),
            more: more.unwrap_or(u32::MAX),
        }
    }
}

/// The groups in which interleaved stages take turns, each of as many microbatches as there are ranks, or more.
pub(super) fn groups(ranks: u32, microbatches: u32) -> u32 {
    (microbatches / ranks).max(1)
}

fn has_equal_groups(ranks: u32, microbatches: u32) -> bool {
    microbatches.is_multiple_of(groups(ranks, microbatches))
}
