//! A rank dies at every possible point, and the output is the undisturbed one.
//!
//! Stage b here remembers frames: what it makes of a chunk depends on the frames before it in its epoch. So a chunk that
//! is lost, doubled, or worked on without its context shows in the output.

mod edges;
mod empty;
mod overtaken;
mod recorded;
mod stages;
mod world;

use std::sync::Mutex;
use std::time::Duration;

use pp_contract::{Fault, FaultKind, Rank};
use pp_runtime::core::Cut;
use pp_runtime::driver::{Driven, RankOptions, Summary};
use pp_testing::seats;

use self::edges::Fuse;
use self::stages::{SLOT, Seen, stages};
use self::world::{Life, WHOLE, attach, died, options, rank_run};

/// Two ranks, and rank 1 may be started again.
const PAIR: &str = "a@0 -> b@1 -> c@0";
/// The sink apart.
const CHAIN: &str = "a@0 -> b@1 -> c@2";
const SIX: [Cut; 6] = [Cut::None; 6];

/// What came of a run.
struct End {
    options: RankOptions,
    cuts: Vec<Cut>,
    result: Result<Summary, Fault>,
    seen: Seen,
    /// See [`world::End`].
    done: Vec<usize>,
}

fn run(pipeline: &str, cuts: &[Cut], depth: u32, restarts: u32, lives: &[Life]) -> End {
    run_with(options(pipeline, depth, restarts), cuts, lives, false)
}

fn run_with(options: RankOptions, cuts: &[Cut], lives: &[Life], drains: bool) -> End {
    let seen = Mutex::new(Seen::default());
    let world::End { result, done } = world::run(&options, lives, drains, &|rank, _| {
        stages(&options.pipeline, rank, cuts, &seen)
    });
    End {
        options,
        cuts: cuts.to_vec(),
        result,
        seen: seen.into_inner().unwrap(),
        done,
    }
}

/// What was taken is right and in order, and what is missing was made stale by a hard cut.
fn check(end: &End, lives: &[Life]) {
    let (pipeline, cuts, seen) = (&end.options.pipeline, &end.cuts, &end.seen);
    let about = || format!("{pipeline}, depth {}, {lives:?}", end.options.depth);
    let summary = end.result.as_ref();
    let summary = summary.unwrap_or_else(|fault| panic!("{}: {fault}", about()));
    let expected = stages::expected(pipeline, cuts);
    for (chunk, frames) in &seen.taken {
        assert_eq!(frames, &expected[*chunk as usize], "{}: {chunk}", about());
    }
    let taken: Vec<u64> = seen.taken.iter().map(|(chunk, _)| *chunk).collect();
    assert!(taken.is_sorted_by(|a, b| a < b), "{}: {taken:?}", about());
    let mut told = [&seen.accepted[..], &seen.forgotten].concat();
    told.sort_unstable();
    let all: Vec<u64> = (0..cuts.len() as u64).collect();
    assert_eq!(told, all, "{}: lost or doubled", about());
    assert_eq!(seen.accepted, taken, "{}", about());
    if !cuts.contains(&Cut::Hard) {
        assert_eq!(
            (&taken, &seen.forgotten),
            (&all, &Vec::new()),
            "{}",
            about()
        );
    }
    assert_eq!(summary.counts.emitted, seen.accepted.len() as u64);
    assert!(summary.counts.max_in_flight <= end.options.depth);
    assert_eq!(seen.stored, 1, "{}", about());
}

/// Runs the pipeline undisturbed, and then once for each operation of each rank that breaks there.
fn check_at_every_point(pipeline: &str, cuts: &[Cut], depth: u32, dies: u32) {
    let whole = run(pipeline, cuts, depth, 1, &[WHOLE]);
    check(&whole, &[WHOLE]);
    for (rank, done) in whole.done.iter().enumerate() {
        assert!(*done >= 2 * cuts.len(), "{done} operations of rank {rank}");
        for left in 0..*done {
            let rank = rank as u32;
            let lives = [Life { dies, rank, left }, WHOLE];
            check(&run(pipeline, cuts, depth, 1, &lives), &lives);
        }
    }
}

#[test]
fn a_rank_that_dies_at_any_point_changes_nothing() {
    for depth in [1, 2, 4] {
        check_at_every_point(PAIR, &SIX, depth, 1);
        check_at_every_point(CHAIN, &SIX, depth, 1);
    }
}

#[test]
fn the_death_of_a_rank_between_others_changes_nothing() {
    for dies in [1, 2] {
        check_at_every_point("a@0 -> b@1 -> d@2 -> c@3", &SIX, 3, dies);
        check_at_every_point("a@0 -> b@1 -> d@2 -> c@0", &SIX, 2, dies);
    }
}

#[test]
fn the_death_of_a_rank_with_two_stages_changes_nothing() {
    check_at_every_point("a@0 -> b@1 -> d@1 -> c@0", &SIX, 3, 1);
    check_at_every_point("a@0 -> b@1 -> d@0 -> c@0", &SIX, 2, 1);
}

#[test]
fn the_death_of_a_rank_of_a_ring_changes_nothing() {
    for dies in [1, 2] {
        check_at_every_point("a@0 -> (b@1 -> d@2)*2 -> c@0", &SIX, 3, dies);
    }
}

#[test]
fn a_second_death_at_any_point_changes_nothing() {
    for pipeline in [PAIR, CHAIN] {
        let done = run(pipeline, &SIX, 2, 1, &[WHOLE]).done;
        for first in 0..done[1] {
            for second in 0..8 {
                let life = |rank, left| Life {
                    dies: 1,
                    rank,
                    left,
                };
                for rank in 0..done.len() as u32 {
                    let lives = [life(1, first), life(rank, second), WHOLE];
                    check(&run(pipeline, &SIX, 2, 2, &lives), &lives);
                }
            }
        }
    }
}

#[test]
fn cuts_and_deaths_get_along() {
    for cut in [Cut::Flush, Cut::Hard] {
        let mut cuts = SIX;
        cuts[3] = cut;
        for pipeline in [PAIR, CHAIN] {
            check_at_every_point(pipeline, &cuts, 3, 1);
        }
    }
}

#[test]
fn without_restarts_a_death_ends_the_run() {
    for pipeline in [PAIR, CHAIN] {
        let life = Life {
            dies: 1,
            rank: 1,
            left: 9,
        };
        let end = run(pipeline, &SIX, 2, 0, &[life, WHOLE]);
        assert_eq!(end.result.unwrap_err(), died(1));
        assert_eq!(end.seen.rebuilt, 0);
    }
}

#[test]
fn restarts_are_used_up_one_by_one() {
    for pipeline in [PAIR, CHAIN] {
        let life = Life {
            dies: 1,
            rank: 1,
            left: 5,
        };
        let lives = [life, life, life, WHOLE];
        let end = run(pipeline, &SIX, 2, 3, &lives);
        check(&end, &lives);
        let summary = end.result.unwrap();
        assert_eq!(summary.restarts.len(), 3);
        for restart in &summary.restarts {
            assert_eq!(restart.fault, died(1));
            assert!(restart.sent_ns.unwrap() >= restart.lost_ns);
            assert!((1..=2).contains(&restart.sent_again), "{restart:?}");
        }
        let end = run(pipeline, &SIX, 2, 2, &lives);
        assert_eq!(end.result.unwrap_err(), died(1));
    }
}

#[test]
fn a_fault_that_would_happen_again_costs_no_restart() {
    for kind in [
        FaultKind::Plugin,
        FaultKind::BadInput,
        FaultKind::PeerMisbehaved,
        FaultKind::Interrupted,
        FaultKind::HandshakeMismatch,
        FaultKind::Internal,
    ] {
        let fault = Fault::new(kind, Rank::new(1), "mix", "again and again");
        assert_eq!(drive_with(&fault), Err(fault));
    }
    // Rank 0 has the source, and rank 2 the sink.
    for rank in 0..3 {
        for kind in [FaultKind::PeerDied, FaultKind::TimedOut, FaultKind::Device] {
            let fault = Fault::new(kind, Rank::new(rank), "watch", "gone");
            let driven = drive_with(&fault);
            match rank {
                1 => assert_eq!(driven, Ok(Driven::Lost(fault))),
                _ => assert_eq!(driven, Err(fault)),
            }
        }
    }
}

/// One chunk, and this fault before anything is answered.
fn drive_with(fault: &Fault) -> Result<Driven, Fault> {
    let (options, seen) = (options(CHAIN, 1, 1), Mutex::new(Seen::default()));
    let seat = seats(&options, SLOT).swap_remove(0);
    let fuse = Fuse::new(seat.switch.bell().clone(), usize::MAX, edges::broken);
    let own = stages(&options.pipeline, Rank::new(0), &[Cut::None], &seen);
    let mut run = rank_run(Rank::new(0), &options, own);
    attach(&mut run, seat.ends, &fuse);
    seat.switch.raise(fault.clone());
    run.drive(&seat.switch)
}

#[test]
fn an_edge_that_fails_first_waits_for_the_verdict_on_its_peer() {
    let (options, seen) = (options(PAIR, 1, 1), Mutex::new(Seen::default()));
    let seat = seats(&options, SLOT).swap_remove(0);
    let fuse = Fuse::new(seat.switch.bell().clone(), 1, edges::late);
    let own = stages(&options.pipeline, Rank::new(0), &SIX, &seen);
    let mut run = rank_run(Rank::new(0), &options, own);
    attach(&mut run, seat.ends, &fuse);
    let driven = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            seat.switch.raise(died(1));
        });
        run.drive(&seat.switch)
    });
    assert_eq!(driven, Ok(Driven::Lost(died(1))));
}

#[test]
fn a_chunk_that_nobody_needs_may_go_nowhere() {
    let (options, seen) = (options(CHAIN, 1, 1), Mutex::new(Seen::default()));
    let mut seats = seats(&options, SLOT);
    let (seat, source) = (seats.swap_remove(1), seats.swap_remove(0));
    let runs = |rank: u32, fuse: &_, ends| {
        let rank = Rank::new(rank);
        let own = stages(&options.pipeline, rank, &[Cut::None], &seen);
        let mut run = rank_run(rank, &options, own);
        attach(&mut run, ends, fuse);
        run
    };
    let served = seat.switch.clone();
    let sends_in_vain = move || {
        served.hear_served();
        edges::late()
    };
    // It leases a slot, takes in a header and its payload, and sends.
    let fuse = Fuse::new(seat.switch.bell().clone(), 3, sends_in_vain);
    let whole = Fuse::new(source.switch.bell().clone(), usize::MAX, edges::broken);
    let driven = std::thread::scope(|scope| {
        scope.spawn(|| runs(0, &whole, source.ends).drive(&source.switch));
        let driven = runs(1, &fuse, seat.ends).drive(&seat.switch);
        source.switch.raise(died(1));
        driven
    });
    assert_eq!((driven, fuse.done()), (Ok(Driven::Finished), 3));
}

#[test]
fn a_death_after_the_last_chunk_was_taken_ends_the_run_well() {
    for pipeline in [PAIR, CHAIN] {
        let done = run(pipeline, &SIX, 2, 1, &[WHOLE]).done;
        // Its last operation is the goodbye.
        let life = Life {
            dies: 1,
            rank: 1,
            left: done[1] - 1,
        };
        // The sink on another rank must still be told to store.
        let lives = [life, WHOLE];
        let end = run(pipeline, &SIX, 2, 1, &lives);
        check(&end, &lives);
        let restarts = end.result.unwrap().restarts;
        match pipeline {
            PAIR => assert_eq!(restarts, []),
            _ => assert_eq!((restarts[0].chunk, restarts[0].sent_again), (None, 0)),
        }
    }
}

#[test]
fn a_drain_that_was_asked_for_before_the_death_is_still_one_after_it() {
    for pipeline in [PAIR, CHAIN] {
        let cuts = [Cut::None; 200];
        let life = Life {
            dies: 1,
            rank: 1,
            left: 20,
        };
        let end = run_with(options(pipeline, 2, 1), &cuts, &[life, WHOLE], true);
        let counts = end.result.unwrap().counts;
        assert!(counts.admitted < 200 && counts.emitted == counts.admitted);
        assert_eq!(end.seen.taken.len() as u64, counts.admitted);
    }
}
