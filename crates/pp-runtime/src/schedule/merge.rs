//! Both backwards of a microbatch as one.
//!
//! Hazard: a backward that is split for no reason computes some things twice. Guarantee: `I` and `W` of one stage and
//! microbatch become `B` where the one follows the other, and nothing else changes.

use super::{Action, Op, Schedule, Step};

impl Schedule {
    /// Merges each `I` with the `W` that follows it at once, if both are of one stage and microbatch, into a `B`.
    #[must_use]
    pub fn merge(&self) -> Self {
        Self {
            ranks: self.ranks.iter().map(|steps| merged(steps)).collect(),
            rank_of: self.rank_of.clone(),
            microbatches: self.microbatches,
        }
    }
}

fn merged(steps: &[Step]) -> Vec<Step> {
    let mut merged: Vec<Step> = Vec::with_capacity(steps.len());
    for &step in steps {
        match (merged.last_mut(), step) {
            (Some(Step::One(last)), Step::One(next)) if is_split(*last, next) => {
                last.op = Op::Backward;
            }
            _ => merged.push(step),
        }
    }
    merged
}

fn is_split(first: Action, second: Action) -> bool {
    let input = Action {
        op: Op::BackwardInput,
        ..second
    };
    first == input && second.op == Op::BackwardWeight
}
