//! The schedules in a V: each rank has one stage on the way up and one on the way down.

use std::collections::VecDeque;

use super::super::kind::Size;
use super::super::{Action, Op, Step};

/// The stage on the way up, and the one on the way down.
const UP: usize = 0;
const DOWN: usize = 1;

/// What a rank has done so far. Each stage takes its microbatches in order.
struct RankProgress {
    stages: [u32; 2],
    microbatches: u32,
    forwards: [u32; 2],
    backwards: [u32; 2],
    weights: [u32; 2],
    steps: Vec<Step>,
}

impl RankProgress {
    fn new(size: Size, rank: u32) -> Self {
        Self {
            stages: [rank, 2 * size.ranks - 1 - rank],
            microbatches: size.microbatches,
            forwards: [0; 2],
            backwards: [0; 2],
            weights: [0; 2],
            steps: Vec::new(),
        }
    }

    /// Adds an action, unless its microbatch is behind the last.
    fn add(&mut self, side: usize, op: Op, microbatch: u32) {
        if microbatch < self.microbatches {
            self.steps
                .push(Step::one(self.stages[side], op, microbatch));
        }
    }

    fn forward(&mut self, side: usize) {
        self.add(side, Op::Forward, self.forwards[side]);
        self.forwards[side] += 1;
    }

    fn input(&mut self, side: usize) {
        self.add(side, Op::BackwardInput, self.backwards[side]);
        self.backwards[side] += 1;
    }

    fn weight(&mut self, side: usize) {
        self.add(side, Op::BackwardWeight, self.weights[side]);
        self.weights[side] += 1;
    }

    /// Both backwards, one after the other.
    fn split(&mut self, side: usize) {
        self.input(side);
        self.weight(side);
    }

    /// Both backwards as one.
    fn backward(&mut self, side: usize) {
        self.add(side, Op::Backward, self.backwards[side]);
        self.backwards[side] += 1;
        self.weights[side] += 1;
    }

    /// A forward of one stage and a backward of the other as one.
    fn overlap(&mut self, forward: usize, backward: usize) {
        let [at, back] = [self.forwards[forward], self.backwards[backward]];
        self.steps.push(Step::Overlapped {
            forward: Action::new(self.stages[forward], Op::Forward, at),
            backward: Action::new(self.stages[backward], Op::Backward, back),
        });
        self.forwards[forward] += 1;
        self.backwards[backward] += 1;
        self.weights[backward] += 1;
    }
}

/// Source: Qi et al., "Zero Bubble Pipeline Parallelism", section 6 (ZB-V).
pub(super) fn zb_v(size: Size, rank: u32) -> Vec<Step> {
    // With fewer microbatches the actions of those that are not there are left out.
    let all = size.microbatches.max(2 * size.ranks - 1);
    let behind = size.ranks - rank;
    let mut done = RankProgress::new(size, rank);
    for _ in 0..2 * behind - 1 {
        done.forward(UP);
    }
    for _ in 0..rank {
        done.forward(DOWN);
        done.forward(UP);
    }
    for _ in 0..behind {
        done.forward(DOWN);
        done.split(DOWN);
    }
    while done.forwards[DOWN] < all {
        if done.forwards[UP] < all {
            done.forward(UP);
        }
        done.split(UP);
        done.forward(DOWN);
        done.split(DOWN);
    }
    for _ in 0..rank {
        done.input(UP);
        done.input(DOWN);
    }
    for _ in 0..behind {
        done.split(UP);
    }
    for side in [DOWN, UP] {
        while done.weights[side] < done.backwards[side] {
            done.weight(side);
        }
    }
    done.steps
}

/// Source: DeepSeek, DualPipe; its half in a V ("cut in half").
pub(super) fn dualpipe_v(size: Size, rank: u32) -> Vec<Step> {
    let behind = size.ranks - 1 - rank;
    let mut done = RankProgress::new(size, rank);
    // Backwards for the weights that are left for later, oldest first.
    let mut late = VecDeque::new();
    for _ in 0..2 * behind {
        done.forward(UP);
    }
    for _ in 0..=rank {
        done.forward(UP);
        done.forward(DOWN);
    }
    for _ in 0..behind {
        done.split(DOWN);
        done.forward(DOWN);
    }
    for at in 0..size.microbatches - 2 * size.ranks + rank + 1 {
        // The last rank has its first backward at once, not beside a forward: that makes a smaller bubble.
        if at == 0 && behind == 0 {
            done.forward(UP);
            done.backward(DOWN);
        } else {
            done.overlap(UP, DOWN);
        }
        done.overlap(DOWN, UP);
    }
    for _ in 0..behind {
        done.backward(DOWN);
        done.overlap(DOWN, UP);
    }
    // From the middle on the backwards are split.
    let turns = (0..=rank).flat_map(|_| [DOWN, UP]);
    for (at, side) in turns.enumerate() {
        match at as u32 <= rank {
            true => done.backward(side),
            false => {
                done.input(side);
                late.push_back(side);
            }
        }
    }
    for _ in 0..behind {
        late.pop_front()
            .into_iter()
            .for_each(|side| done.weight(side));
        done.input(UP);
        late.push_back(UP);
    }
    late.into_iter().for_each(|side| done.weight(side));
    done.steps
}
