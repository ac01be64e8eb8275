//! Every interleaving of small pipelines: both cores, two lanes, slots, a source, a drain, and a
//! Phase B that dies at any moment.
//!
//! The [`world`] delivers frames and carries out actions in every possible order. A state that was
//! seen is not walked again, so the walk is complete and ends. `cargo xtask mutants` puts mistakes
//! into the cores and the drivers, and names the test that finds each.

mod world;

use std::collections::HashSet;

use pp_contract::{CacheEpoch, ChunkIndex};
use pp_runtime::core::{Cut, Facts, FrontAction, FrontCore, PhaseBAction, PhaseBCore};

use crate::world::{Shape, World};

/// Walks everything reachable; gives the number of states and of distinct ends.
fn explore(shape: Shape, script: &[Cut]) -> (usize, usize) {
    let mut seen = HashSet::new();
    let mut ends = 0;
    let mut open = vec![World::new(shape, script)];
    while let Some(world) = open.pop() {
        world.check(shape);
        let next = world.next(shape);
        // A drain or a death may come at any time or never: an end without it is an end too.
        if next.is_empty() || world.is_over() {
            ends += 1;
            world.check_end(shape, script);
        }
        for world in next {
            if seen.insert(world.clone()) {
                open.push(world);
            }
        }
    }
    (seen.len(), ends)
}

const PLAIN: Shape = Shape {
    depth: 1,
    slots: 1,
    context: 1,
    restarts: 0,
    may_drain: false,
};

/// Walks these shapes for all scripts up to a length, and prints how many states and ends there were; there must be so
/// many at least.
fn explore_all(shapes: &[Shape], longest: usize, least: (usize, usize)) {
    let (mut states, mut ends) = (0, 0);
    for script in (0..=longest).flat_map(scripts) {
        for shape in shapes {
            let (more_states, more_ends) = explore(*shape, &script);
            states += more_states;
            ends += more_ends;
        }
    }
    println!("{states} states, {ends} ends");
    let is_complete = states > least.0 && ends > least.1;
    assert!(
        is_complete,
        "the walk is not complete: {states} states, {ends} ends"
    );
}

/// Of walks that are as large as most here.
const MANY: (usize, usize) = (100_000, 500);

fn of_depth(depth: u32) -> Shape {
    Shape {
        depth,
        slots: depth,
        ..PLAIN
    }
}

/// All scripts of `len` cuts.
fn scripts(len: usize) -> Vec<Vec<Cut>> {
    let mut all = vec![Vec::new()];
    for _ in 0..len {
        all = all
            .into_iter()
            .flat_map(|script: Vec<Cut>| {
                [Cut::None, Cut::Flush, Cut::Hard].map(|cut| {
                    let mut longer = script.clone();
                    longer.push(cut);
                    longer
                })
            })
            .collect();
    }
    all
}

#[test]
fn every_interleaving_of_small_pipelines_ends_well() {
    let drains = [false, true];
    let with = |depth| {
        drains.map(|may_drain| Shape {
            may_drain,
            ..of_depth(depth)
        })
    };
    let shapes: Vec<Shape> = (1..=3).flat_map(with).collect();
    explore_all(&shapes, 4, MANY);
}

#[test]
fn a_phase_b_that_dies_at_any_moment_does_no_harm() {
    let mut shapes = Vec::new();
    for depth in 1..=3 {
        for context in 0..=2 {
            shapes.push(Shape {
                context,
                restarts: 1,
                ..of_depth(depth)
            });
        }
    }
    explore_all(&shapes, 3, MANY);
}

#[test]
fn nor_does_it_when_it_dies_twice_or_the_run_drains() {
    let twice = |depth| Shape {
        restarts: 2,
        ..of_depth(depth)
    };
    let drained = |depth| Shape {
        restarts: 1,
        may_drain: true,
        ..of_depth(depth)
    };
    let shapes = [twice(1), twice(2), drained(1), drained(2)];
    explore_all(&shapes, 3, MANY);
}

#[test]
#[ignore = "minutes long: cargo xtask walk"]
fn larger_walk() {
    let shapes = [1, 2, 3].map(|depth| Shape {
        restarts: 2,
        may_drain: true,
        ..of_depth(depth)
    });
    println!("two cores, up to four chunks, two deaths, a drain:");
    explore_all(&shapes, 4, MANY);
}

#[test]
fn fewer_slots_than_the_depth_slow_down_but_never_stop() {
    for slots in 1..3 {
        for restarts in [0, 1] {
            let shape = Shape {
                depth: 4,
                slots,
                restarts,
                ..PLAIN
            };
            explore_all(&[shape], 3, (0, 0));
        }
    }
}

#[test]
fn a_hard_cut_drops_exactly_what_was_in_flight() {
    // Depth 3: two chunks leave, then the cut; both come back stale.
    let mut front = FrontCore::<_, ()>::new(3);
    let facts = Facts {
        credit: true,
        sink_ready: true,
    };
    for (chunk, cut) in [Cut::None, Cut::None, Cut::Hard].into_iter().enumerate() {
        front.handle_offer(cut);
        let FrontAction::Build { epoch, .. } = front.poll(facts) else {
            panic!("chunk {chunk} is not built");
        };
        front.handle_sent(ChunkIndex::new(chunk as u64), epoch, chunk);
    }
    for chunk in 0..3 {
        let epoch = CacheEpoch::new(u64::from(chunk == 2));
        front.handle_result(ChunkIndex::new(chunk), epoch).unwrap();
    }
    front.handle_source_end();
    for stale in 0..2 {
        assert_eq!(front.poll(facts), FrontAction::Drop);
        assert_eq!(front.handle_dropped(), stale);
    }
    assert_eq!(front.poll(facts), FrontAction::Decode);
    assert_eq!(front.begin_decode(), 2);
}

#[test]
fn a_result_that_was_not_due_is_refused() {
    let mut front = FrontCore::<_, ()>::new(2);
    let error = front.handle_result(ChunkIndex::new(7), CacheEpoch::new(0));
    assert!(
        error
            .unwrap_err()
            .to_string()
            .ends_with("where nothing was due")
    );
    front.handle_offer(Cut::None);
    front.handle_sent(ChunkIndex::new(0), CacheEpoch::new(0), ());
    let error = front.handle_result(ChunkIndex::new(0), CacheEpoch::new(1));
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("chunk 0 of epoch 0 was due")
    );
}

#[test]
fn phase_b_refuses_more_than_the_depth() {
    let mut back = PhaseBCore::<_, ()>::new(1);
    back.handle_envelope(ChunkIndex::new(0), ()).unwrap();
    assert!(back.handle_envelope(ChunkIndex::new(1), ()).is_err());
}

#[test]
fn phase_b_answers_a_shutdown_once_all_is_answered() {
    let mut back = PhaseBCore::new(1);
    back.handle_envelope(ChunkIndex::new(0), "call").unwrap();
    back.handle_shutdown();
    assert_eq!(back.poll(true), PhaseBAction::Compute);
    let call = back.begin_compute();
    back.handle_computing(call);
    assert_eq!(back.poll(true), PhaseBAction::Wait);
    back.take_computing();
    assert_eq!(back.poll(true), PhaseBAction::AnswerShutdown);
}
