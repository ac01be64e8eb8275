//! The schedules in which stage s stands on rank s mod P: all but those in a V.
//!
//! Each runs so many forwards first, then one forward and one backward in turn, then the backwards that are left. They
//! differ in the order of the forwards, in how many come first, and in whether the backward is split.

use super::super::kind::{self, Kind, Size};
use super::super::{Op, Step};

/// The forwards or backwards of a rank, in the order in which it runs them.
struct LoopedOrder {
    rank: u32,
    size: Size,
    /// Microbatches that go through one stage before the next stage takes its turn.
    group: u32,
}

impl LoopedOrder {
    /// Stage and microbatch of the `at`-th forward.
    const fn forward(&self, at: u32) -> (u32, u32) {
        let turn = at / self.group;
        let stages = self.size.stages_per_rank;
        let stage = (turn % stages) * self.size.ranks + self.rank;
        (stage, turn / stages * self.group + at % self.group)
    }

    /// Stage and microbatch of the `at`-th backward: the last stage takes the first turn.
    const fn backward(&self, at: u32) -> (u32, u32) {
        let (stage, microbatch) = self.forward(at);
        let first = (self.size.stages_per_rank - 1) * self.size.ranks;
        (first + 2 * self.rank - stage, microbatch)
    }
}

pub(super) fn steps(kind: Kind, size: Size, rank: u32) -> Vec<Step> {
    let Size {
        ranks,
        stages_per_rank,
        microbatches,
    } = size;
    let all = stages_per_rank * microbatches;
    let behind = ranks - 1 - rank;
    let group = match kind {
        Kind::LoopedBfs => microbatches,
        _ => microbatches / kind::groups(ranks, microbatches),
    };
    let turns = (stages_per_rank - 1) * group;
    // How many forwards come first, and by how many backwards a backward for the weights is late.
    let (first, late) = match kind {
        Kind::Naive => (0, None),
        Kind::GPipe | Kind::LoopedBfs => (all, None),
        Kind::OneFOneB => (behind, None),
        Kind::Interleaved => (turns + 2 * behind, None),
        _ => (turns + behind, Some(rank)),
    };
    let first = first.min(all);
    let order = LoopedOrder { rank, size, group };
    let forward = |at| {
        let (stage, microbatch) = order.forward(at);
        Step::one(stage, Op::Forward, microbatch)
    };
    let backward = |at, op| {
        let (stage, microbatch) = match kind {
            Kind::LoopedBfs => order.forward(all - 1 - at),
            _ => order.backward(at),
        };
        Step::one(stage, op, microbatch)
    };
    let mut steps: Vec<Step> = (0..first).map(forward).collect();
    for at in 0..all {
        if first + at < all {
            steps.push(forward(first + at));
        }
        match late {
            None => steps.push(backward(at, Op::Backward)),
            Some(late) => {
                steps.push(backward(at, Op::BackwardInput));
                steps.extend(
                    at.checked_sub(late)
                        .map(|at| backward(at, Op::BackwardWeight)),
                );
            }
        }
    }
    let left = late.map_or(all, |late| all.saturating_sub(late))..all;
    steps.extend(left.map(|at| backward(at, Op::BackwardWeight)));
    steps
}
