//! A job in a world of its own: every order in which its ranks go on, die, stop and are heard, and in which signals come
//! and time passes. The supervisor's core is the product's; the ranks are as small as their reports allow.

mod world;

use std::collections::HashSet;
use std::process::Command;
use std::time::Duration;

use pp_contract::{Fault, FaultKind, Rank};

use self::world::{Budget, Case, KILLED, Move, World};
use super::events::Event;
use super::verdict::Verdict;
use super::{is_alive, is_killed};
use crate::reports::{Report, TargetProcess};

/// Two ranks, of which rank 1 may be started again.
const PAIR: Case = Case {
    world: 2,
    restarts: 0,
    may_restart: &[1],
    says_served: true,
    may_go_on: false,
};

/// Three ranks, of which ranks 1 and 2 may be started again.
const THREE: Case = Case {
    world: 3,
    may_restart: &[1, 2],
    ..PAIR
};

/// Three ranks, of which rank 1 alone may be started again.
const ONE_OF_THREE: Case = Case {
    may_restart: &[1],
    ..THREE
};

/// Walks every order of events of a job; the number of states.
fn walk(case: Case, all: Budget) -> usize {
    let first = World::new(case, all);
    let start = first.now;
    let mut seen = HashSet::from([first.key(start)]);
    let mut open = vec![(first, Vec::new())];
    while let Some((world, path)) = open.pop() {
        if world.core.is_over() {
            let told = (path, world.clone());
            let checked =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.check(all)));
            assert!(checked.is_ok(), "{:?}\n{:#?}", told.0, told.1);
            continue;
        }
        let moves = world.moves();
        assert!(
            !moves.is_empty() && path.len() < 200,
            "it hangs: {path:?}\n{world:#?}"
        );
        for what in moves {
            let mut next = world.clone();
            next.make(what);
            if seen.insert(next.key(start)) {
                let mut path = path.clone();
                path.push(what);
                open.push((next, path));
            }
        }
    }
    seen.len()
}

const CALM: Budget = Budget {
    kills: 0,
    exits: 0,
    noise: 0,
    stops: 0,
    signals: 0,
    ticks: 0,
};

/// Walks jobs that may start ranks again so many times, and prints how many states there were. `may` says what may
/// happen beside a calm job.
fn walk_each(case: Case, restarts: std::ops::Range<u32>, may: impl FnOnce(&mut Budget)) {
    let mut all = CALM;
    may(&mut all);
    for restarts in restarts {
        let case = Case { restarts, ..case };
        println!("{case:?}, {all:?}: {} states", walk(case, all));
    }
}

fn walk_all(restarts: std::ops::Range<u32>, may: impl FnOnce(&mut Budget)) {
    walk_each(PAIR, restarts, may);
}

#[test]
#[ignore = "minutes long: cargo xtask walk"]
fn larger_walk() {
    walk_all(0..3, |all| (all.kills, all.exits, all.stops) = (2, 1, 1));
}

#[test]
fn a_calm_job_ends_well_and_no_rank_is_killed() {
    walk_all(0..2, |_| {});
}

#[test]
fn ranks_that_are_killed_end_the_job_or_are_replaced() {
    walk_all(2..3, |all| all.kills = 1);
    walk_all(0..3, |all| (all.kills, all.ticks) = (2, 1));
}

#[test]
fn a_rank_that_exits_without_a_word_ends_the_job_or_is_replaced() {
    walk_all(0..3, |all| (all.exits, all.ticks) = (1, 1));
    walk_all(1..2, |all| (all.kills, all.exits) = (1, 1));
}

#[test]
fn a_rank_that_is_stopped_ends_the_job_or_is_replaced() {
    walk_all(0..2, |all| (all.stops, all.ticks) = (1, 1));
}

#[test]
fn a_rank_0_that_is_not_heard_any_more_has_done_its_work_if_it_ends_well() {
    walk_all(0..1, |all| (all.noise, all.ticks) = (1, 1));
}

#[test]
fn signals_end_the_job_whatever_else_happens() {
    for (kills, stops) in [(0, 0), (1, 0), (0, 1)] {
        walk_all(0..2, |all| {
            (all.kills, all.stops, all.signals, all.ticks) = (kills, stops, 2, 1);
        });
    }
}

#[test]
fn a_program_that_goes_on_has_its_time_and_must_end_well() {
    let case = Case {
        may_go_on: true,
        ..PAIR
    };
    walk_each(case, 0..2, |all| all.ticks = 2);
    walk_each(case, 0..2, |all| (all.kills, all.ticks) = (1, 1));
    walk_each(case, 0..1, |all| (all.noise, all.ticks) = (1, 2));
    let signalled = |all: &mut Budget| (all.stops, all.signals, all.ticks) = (1, 2, 1);
    walk_each(case, 0..1, signalled);
    let three = Case { world: 3, ..case };
    walk_each(three, 0..1, |all| (all.stops, all.ticks) = (1, 1));
}

#[test]
fn a_rank_0_that_does_not_say_that_it_is_served_has_its_time() {
    for (kills, ticks) in [(0, 3), (1, 1)] {
        let case = Case {
            says_served: false,
            ..PAIR
        };
        let states = walk(
            case,
            Budget {
                kills,
                ticks,
                ..CALM
            },
        );
        println!("{kills} kills: {states} states");
    }
}

#[test]
fn three_ranks_that_nothing_is_done_to_end_well() {
    walk_each(THREE, 0..2, |_| {});
}

#[test]
fn jobs_end_well_when_one_or_two_of_three_ranks_are_killed() {
    walk_each(THREE, 0..3, |all| all.kills = 2);
    walk_each(ONE_OF_THREE, 1..2, |all| all.kills = 2);
    walk_each(THREE, 0..2, |all| (all.kills, all.ticks) = (1, 1));
}

#[test]
fn jobs_end_well_when_one_of_three_ranks_exits_or_is_stopped() {
    walk_each(THREE, 0..2, |all| (all.exits, all.ticks) = (1, 1));
    walk_each(THREE, 0..2, |all| (all.stops, all.ticks) = (1, 1));
    walk_each(THREE, 1..3, |all| all.stops = 2);
}

#[test]
fn jobs_end_well_when_three_ranks_get_a_signal() {
    walk_each(THREE, 0..2, |all| (all.signals, all.ticks) = (1, 1));
    walk_each(ONE_OF_THREE, 1..2, |all| {
        (all.kills, all.signals, all.ticks) = (1, 1, 1);
    });
}

/// A rank that ended before the ranks met used up the restart, and rank 0 does not know of it.
#[test]
fn a_rank_0_that_asks_for_one_restart_too_many_gives_the_reason() {
    let mut world = World::new(
        Case {
            restarts: 1,
            ..PAIR
        },
        CALM,
    );
    world.dies(1, KILLED);
    world.make(Move::HearEnd(1));
    assert_eq!(world.starts, [1, 2]);
    world.dies(1, 0);
    world.make(Move::HearEnd(1));
    let rank = Rank::new(1);
    let fault = Fault::new(FaultKind::PeerDied, rank, "run", "the connection ended");
    world.reports(
        0,
        Report::PeerLost(rank, TargetProcess::Unknown, fault, None),
    );
    world.make(Move::Hear);
    while !world.core.is_over() {
        let moves = world.moves();
        world.make(*moves.last().expect("it goes on"));
    }
    let Verdict::Fault(fault, None) = world.core.verdict() else {
        panic!("it is no fault");
    };
    let words = "does a kernel plugin call exit?; 1 of 1 restarts were used";
    assert!(fault.to_string().contains(words), "{fault}");
}

/// The end of rank 1 is heard first, and that rank 0 needed it no more is read late.
#[test]
fn a_rank_0_that_was_served_outlives_the_bad_end_of_another_rank() {
    let mut world = World::new(PAIR, CALM);
    world.reports(0, Report::Connected);
    world.make(Move::Hear);
    world.dies(1, KILLED);
    world.make(Move::HearEnd(1));
    assert!(world.core.due().is_some());
    world.reports(0, Report::Served);
    world.make(Move::Hear);
    for _ in 0..100 {
        if world.core.due().is_some() {
            world.make(Move::Time);
        }
    }
    assert!(!world.was_killed[0]);
}

/// Rank 1 sees the end of rank 2 before that is heard, and rank 0 asks for another rank 1.
#[test]
fn a_rank_that_blames_one_that_stays_waits_for_its_end() {
    for (ends, asks_first) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut world = World::new(
            Case {
                restarts: 1,
                ..ONE_OF_THREE
            },
            CALM,
        );
        for at in [0, 1, 2, 0] {
            world.make(Move::GoOn(at));
            world.make(Move::Hear);
        }
        let lost = |rank| Fault::new(FaultKind::PeerDied, rank, "run", "its channel ended");
        world.reports(1, Report::Exiting(lost(Rank::new(2))));
        world.dies(1, 1);
        let rank = Rank::new(1);
        world.reports(
            0,
            Report::PeerLost(rank, TargetProcess::Any, lost(rank), None),
        );
        world.make(Move::Hear);
        let last = [Move::Hear, Move::HearEnd(1)];
        for what in if asks_first { last } else { [last[1], last[0]] } {
            world.make(what);
        }
        assert_eq!(world.starts, [1, 1, 1]);
        if ends {
            world.dies(2, 1);
            world.make(Move::HearEnd(2));
        }
        while world.starts[1] == 1 && !world.core.is_over() {
            let moves = world.moves();
            world.make(*moves.last().expect("it goes on"));
        }
        assert_eq!(world.starts, if ends { [1, 1, 1] } else { [1, 2, 1] });
    }
}

/// Three ranks that have met, and may be started again twice.
fn three_that_run() -> World {
    let case = Case {
        restarts: 2,
        ..THREE
    };
    let mut world = World::new(case, CALM);
    for at in [1, 2, 0, 0] {
        world.make(Move::GoOn(at));
        world.make(Move::Hear);
    }
    world
}

/// Rank 0 speaks of one of them alone, and no time passes.
#[test]
fn ranks_that_are_lost_together_start_again_together() {
    let mut world = three_that_run();
    for at in [1, 2] {
        world.dies(at, KILLED);
        world.make(Move::HearEnd(at));
    }
    assert_eq!(world.starts, [1, 1, 1]);
    let rank = Rank::new(1);
    let fault = Fault::new(FaultKind::PeerDied, rank, "run", "the connection ended");
    world.reports(
        0,
        Report::PeerLost(rank, TargetProcess::Unknown, fault, None),
    );
    world.make(Move::Hear);
    assert_eq!(world.starts, [1, 2, 2]);
}

/// The walk kills no three ranks.
#[test]
fn no_rank_is_waited_for_once_rank_0_has_ended() {
    let mut world = three_that_run();
    for at in [1, 2, 0] {
        assert!(!world.core.is_over());
        world.dies(at, KILLED);
        world.make(Move::HearEnd(at));
    }
    assert!(world.core.is_over());
    assert_eq!(world.starts, [1, 1, 1]);
}

/// The walk knows no process that takes time to die.
#[test]
fn a_rank_that_was_killed_has_its_time_to_end() {
    let mut world = World::new(PAIR, Budget { signals: 2, ..CALM });
    world.make(Move::GoOn(0));
    world.make(Move::GoOn(1));
    world.make(Move::Signal);
    world.make(Move::Signal);
    while world.was_killed != [true, true] {
        world.make(Move::Time);
    }
    world.make(Move::HearEnd(0));
    for (seconds, is_over) in [(9, false), (11, true)] {
        let later = world.now + Duration::from_secs(seconds);
        world.core.handle(Event::Tick, later);
        assert_eq!(world.core.is_over(), is_over, "after {seconds} s");
    }
}

/// In the walk rank 0 names no chunks.
#[test]
fn a_rank_that_ends_twice_by_its_own_doing_with_a_chunk_in_flight_ends_the_job() {
    const SEGV: i32 = 11;
    const PANIC: i32 = 1 << 8;
    for (status, first, second, said) in [
        (
            SEGV,
            (3, 6),
            (5, 8),
            Some("ended twice with chunks 5 to 6 in flight"),
        ),
        (
            PANIC,
            (3, 6),
            (6, 9),
            Some("ended twice with chunk 6 in flight"),
        ),
        (SEGV, (3, 6), (7, 9), None),
        (KILLED, (3, 6), (3, 6), None),
    ] {
        let mut world = World::new(
            Case {
                restarts: 3,
                ..PAIR
            },
            CALM,
        );
        for chunks in [first, second] {
            world.make(Move::GoOn(1));
            world.make(Move::Hear);
            world.reports(0, Report::Connected);
            world.make(Move::Hear);
            let rank = Rank::new(1);
            let fault = Fault::new(FaultKind::PeerDied, rank, "run", "the connection ended");
            let process = TargetProcess::This(world.pid(1));
            world.dies(1, status);
            world.reports(0, Report::PeerLost(rank, process, fault, Some(chunks)));
            world.make(Move::Hear);
            world.make(Move::HearEnd(1));
        }
        assert_eq!(world.starts[1], if said.is_some() { 2 } else { 3 });
        let Some(said) = said else {
            continue;
        };
        while !world.core.is_over() {
            let moves = world.moves();
            world.make(*moves.last().expect("it goes on"));
        }
        let Verdict::Fault(fault, None) = world.core.verdict() else {
            panic!("it is no fault");
        };
        let text = fault.to_string();
        assert!(
            text.contains(said) && text.contains("; 1 of 3 restarts"),
            "{text}"
        );
    }
}

/// While the kernel still ends it, too: the lines of its state say that it was killed.
#[test]
fn a_rank_that_somebody_killed_is_not_killed_here() {
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    assert!(is_alive(child.id()) && !is_killed(child.id()));
    child.kill().unwrap();
    assert!(!is_alive(child.id()) && is_killed(child.id()));
    child.wait().unwrap();
}
