//! The turns that PyTorch's runtime spends on other things than computing.
//!
//! Hazard: its lowering walks the ranks in turn, and what takes a turn moves every later receive. Between computations it
//! puts actions for stages that are sharded (FSDP): weights are gathered before a stage is needed and dropped after, and
//! its gradients are reduced and waited for at the end. Guarantee: their number before each step, in linear time.

use super::{Op, Step};

/// Stages of a rank that have their weights at a time.
const ACTIVE: usize = 3;

/// The stages that a rank needs next, nearest first, each with the step that needs it. More than [`ACTIVE`] are kept only
/// as far as they matter.
#[derive(Default)]
struct Next(Vec<(u32, usize)>);

impl Next {
    /// Takes in the step before.
    fn push(&mut self, at: usize, step: Step) {
        self.0
            .retain(|&(stage, _)| step.actions().all(|action| action.stage != stage));
        for action in step.actions() {
            self.0.insert(0, (action.stage, at));
        }
        self.0.truncate(ACTIVE + 1);
    }

    /// The stages that have their weights: one more where the last two are needed by an overlapped pair.
    fn active(&self) -> &[(u32, usize)] {
        match self.0.as_slice() {
            [.., (_, first), (_, second)] if self.0.len() > ACTIVE && first != second => {
                &self.0[..ACTIVE]
            }
            all => all,
        }
    }

    /// How many stages have their weights here and not there.
    fn without(&self, other: &Self) -> usize {
        let there = |stage| other.active().iter().any(|(other, _)| *other == stage);
        self.active()
            .iter()
            .filter(|(stage, _)| !there(*stage))
            .count()
    }
}

/// The turns that pass before each step of a rank.
pub(super) fn before(steps: &[Step], stages: u32, microbatches: u32) -> Vec<usize> {
    let mut turns = vec![0; steps.len()];
    let (mut next, mut after) = (Next::default(), Next::default());
    for (at, &step) in steps.iter().enumerate().rev() {
        after.0.clone_from(&next.0);
        next.push(at, step);
        if let Some(turns) = turns.get_mut(at + 1) {
            // Each stage that is dropped and each that is gathered.
            *turns = next.without(&after) + after.without(&next);
        }
    }
    if let Some(turns) = turns.first_mut() {
        *turns = next.active().len();
    }
    let mut backwards = vec![0; stages as usize];
    for (step, turns) in steps.iter().zip(turns.iter_mut().skip(1)) {
        for action in step.actions() {
            if matches!(action.op, Op::Backward | Op::BackwardWeight) {
                let backwards = &mut backwards[action.stage as usize];
                *backwards += 1;
                // The reduction, and the wait for it.
                *turns += if *backwards == microbatches { 2 } else { 0 };
            }
        }
    }
    turns
}
