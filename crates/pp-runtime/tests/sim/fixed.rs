//! Training schedules: forward and backward of each stage, in a fixed order, with few slots.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pp_contract::{CacheEpoch, ChunkIndex, Pipeline, Rank};
use pp_runtime::core::{
    Cut, Decision, FixedOrder, ONWARD, RankCore, StageFacts, Task, Turn, stages_of,
};

use pp_testing::{rows, words};

use crate::world::{Device, Shape};
use crate::{DEVICES, explore, ticket, walk_all};

/// A schedule: what each rank does, as PyTorch writes it. Two that overlap are joined by a `+`.
struct Case {
    ranks: Vec<&'static str>,
    /// The rank of each stage.
    stages: Vec<u32>,
    microbatches: u64,
    /// The least slots of an edge with which it ends, and chunks in flight.
    slots: u8,
    depth: u8,
}

/// The ranks, the rank of each stage, microbatches, slots and depth.
const CASES: &str = "
    // GPipe.
    0F0 0F1 0F2 0B0 0B1 0B2 / 1F0 1F1 1F2 1B0 1B1 1B2 | 0 1 | 3 | 1 | 3
    // 1F1B.
    0F0 0F1 0B0 0F2 0B1 0B2 / 1F0 1B0 1F1 1B1 1F2 1B2 | 0 1 | 3 | 1 | 2
    0F0 0F1 0B0 0B1 / 1F0 1F1 1B0 1B1 / 2F0 2B0 2F1 2B1 | 0 1 2 | 2 | 1 | 2
    // Worked on in another order than that in which they come.
    0F0 0F1 0B1 0B0 / 1F1 1F0 1B0 1B1 | 0 1 | 2 | 2 | 2
    // The receiver uses the later message first, and its slot is needed before the other one is back.
    0F0 0F2 0B2 0F1 0B1 0B0 / 1F2 1B2 1F1 1B1 1F0 1B0 | 0 1 | 3 | 2 | 3
    // Weight gradients apart.
    0F0 0F1 0I0 0W0 0I1 0W1 / 1F0 1I0 1F1 1I1 1W0 1W1 | 0 1 | 2 | 1 | 2
    // Stages in loops, and backward in falling order.
    0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0 / 1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 | 0 1 0 1 | 2 | 1 | 2
    // One more microbatch in the loop takes two slots.
    0F0 0F1 0F2 2F0 2F1 2F2 2B2 2B1 2B0 0B2 0B1 0B0 / 1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0 | 0 1 0 1 | 3 | 2 | 3
    // In a V, where forward and backward overlap.
    0F0 0F1 3F0 3B0 3F1+0B0 3B1 0B1 / 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 | 0 1 1 0 | 2 | 1 | 2
    0F0 0F1 1F0 1F1+1B0 0B0 1I1 0I1 0W1 1W1 | 0 0 | 2 | 1 | 2
";

fn cases(table: &'static str) -> Vec<Case> {
    let case = |[ranks, stages, microbatches, slots, depth]: [&'static str; 5]| Case {
        ranks: ranks.split(" / ").collect(),
        stages: words(stages)
            .iter()
            .map(|rank| rank.parse().unwrap())
            .collect(),
        microbatches: microbatches.parse().unwrap(),
        slots: slots.parse().unwrap(),
        depth: depth.parse().unwrap(),
    };
    rows(table).map(case).collect()
}

/// Forward of each stage, then backward of each, from the last to the first.
fn pipeline(stages: &[u32]) -> Pipeline {
    let forward = stages.iter().map(|rank| format!("f@{rank}"));
    let backward = stages.iter().rev().map(|rank| format!("b@{rank}"));
    let all: Vec<String> = forward.chain(backward).collect();
    format!("data@0 -> {} -> done@0", all.join(" -> "))
        .parse()
        .expect("a pipeline")
}

fn turn(stages: usize, word: &str) -> Turn {
    let task = |word: &str| {
        let op = word.find(char::is_alphabetic).expect("an action");
        let [stage, chunk] = [&word[..op], &word[op + 1..]].map(|n| n.parse::<usize>().unwrap());
        let stage = match &word[op..=op] {
            "F" => 1 + stage,
            _ => 2 * stages - stage,
        };
        let chunk = chunk as u64;
        Task { stage, chunk }
    };
    match word.split_once('+') {
        Some((first, second)) => Turn::Overlapped([task(first), task(second)]),
        None if word.contains('W') => Turn::Later(task(word)),
        None => Turn::Run(task(word)),
    }
}

impl Case {
    fn shape(&self, device: Device, steps: usize) -> Shape {
        let pipeline = pipeline(&self.stages);
        let order = |(rank, row): (u32, &&str)| {
            let turns = row.split(' ').map(|word| turn(self.stages.len(), word));
            let at = (&pipeline, Rank::new(rank));
            FixedOrder::new(at, turns.collect(), self.microbatches).expect("an order")
        };
        let orders: Vec<FixedOrder> = (0..).zip(&self.ranks).map(order).collect();
        let among = |order: &FixedOrder| order.clone().among(&orders);
        Shape {
            orders: orders.iter().map(among).collect(),
            pipeline,
            depth: self.depth,
            device,
            deaths: 0,
            may_drain: false,
            may_abort: false,
            script: vec![Cut::None; steps * self.microbatches as usize],
            slots: Some(self.slots),
        }
    }
}

#[test]
fn a_fixed_order_ends_well() {
    let mut all = Vec::new();
    for case in cases(CASES) {
        all.extend(DEVICES.map(|device| case.shape(device, 1)));
        all.extend(DEVICES.map(|device| case.shape(device, 2)));
    }
    walk_all(20_000, all);
}

#[test]
fn a_drain_ends_the_step_and_an_abort_ends_at_once() {
    let cases = cases(CASES);
    let drained = cases.iter().map(|case| Shape {
        may_drain: true,
        ..case.shape(Device::None, 2)
    });
    let aborted = cases.iter().map(|case| Shape {
        may_abort: true,
        ..case.shape(Device::None, 1)
    });
    walk_all(1_000, drained.chain(aborted).collect());
}

/// What the walk of a schedule that is wrong says first.
fn broken(shape: &Shape) -> String {
    let walked = catch_unwind(AssertUnwindSafe(|| explore(shape)));
    let said = walked.expect_err("the walk finds it");
    said.downcast_ref::<String>().expect("a text").clone()
}

#[test]
fn a_slot_too_few_stands_still() {
    let looped = &cases(CASES)[7];
    let shape = Shape {
        slots: Some(looped.slots - 1),
        ..looped.shape(Device::None, 1)
    };
    let said = broken(&shape);
    assert!(said.starts_with("nobody waits for ever"), "{said}");
}

#[test]
fn ranks_that_wait_for_each_other_stand_still() {
    let table = "
        0F0 0B0 0F1 0B1 / 1F1 1B1 1F0 1B0 | 0 1 | 2 | 2 | 2
        0F0 0B0 0F1 0B1 / 1F0 1F1 1B0 1B1 | 0 1 | 2 | 2 | 2
    ";
    for crossed in cases(table) {
        let said = broken(&crossed.shape(Device::None, 1));
        assert!(said.starts_with("nobody waits for ever"), "{said}");
    }
}

/// What a rank puts off is lost with it, though the source has all results.
#[test]
fn other_ranks_are_needed_until_they_have_said_that_nothing_more_comes() {
    let pipeline = pipeline(&[0, 1]);
    let rank = Rank::new(0);
    let turns = ["0F0", "0B0"].map(|word| turn(2, word)).into();
    let order = FixedOrder::new((&pipeline, rank), turns, 1).unwrap();
    let core = RankCore::<(), (), ()>::new(stages_of(&pipeline, rank), 1);
    let mut core = core.in_order(&order);
    let free = StageFacts {
        is_here: [true; 2],
        is_free: [true; 2],
    };
    let facts = [free; 4];
    core.handle_offer(Cut::None);
    let (chunk, epoch) = (ChunkIndex::new(0), CacheEpoch::new(0));
    core.handle_built(chunk, epoch, ());
    core.handle_source_end().unwrap();
    for stage in [1, 2] {
        core.handle_arrival(stage, ONWARD, ticket(0), ()).unwrap();
        assert_eq!(
            core.poll(&facts),
            Decision::Run {
                stage,
                input: ONWARD
            }
        );
        core.begin(stage, ONWARD);
    }
    core.handle_accepted(chunk, 0, false).unwrap();
    for stage in [0, 1] {
        assert_eq!(core.poll(&facts), Decision::Close { stage });
        core.handle_closed_behind(stage);
    }
    assert!(!core.is_served(|()| true));
    core.handle_closed(2, ONWARD);
    for stage in [2, 3] {
        assert!(!core.is_served(|()| true));
        core.handle_closed_behind(stage);
    }
    assert!(core.is_served(|()| true));
}
