//! Phase B dies at every possible point, and the output is the undisturbed one.
//!
//! Phase B here remembers frames: what it makes of a chunk depends on the frames before it in its
//! epoch. So a chunk that is lost, doubled, or computed without its context shows in the output.

mod links;
mod overtaken;
mod recorded;
mod stages;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};
use pp_runtime::core::Cut;
use pp_runtime::driver::{Driven, FrontOptions, FrontRun, FrontSummary, run_phase_b};
use pp_runtime::switch::Switch;
use pp_testing::{Pair, edge};
use pp_transport::bell::Bell;
use pp_transport::error::TransportError;

use crate::links::{Fails, broken};
use crate::stages::{CONTEXT_CHUNKS, Front, Mixer, expected};

const FRONT: Rank = Rank::new(0);
const PHASE_B: Rank = Rank::new(1);
fn died() -> Fault {
    Fault::new(FaultKind::PeerDied, PHASE_B, "watch", "it was killed")
}

/// Ends Phase B where the front's thread panics, so that a test fails and does not hang.
struct TellPanic<'a>(&'a Switch);

impl Drop for TellPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.raise(died());
        }
    }
}

/// Where each generation breaks: operations that Phase B, and the front, still do.
#[derive(Clone, Copy, Debug)]
struct Life {
    phase_b: usize,
    front: usize,
}

const WHOLE: Life = Life {
    phase_b: usize::MAX,
    front: usize::MAX,
};

/// A front whose Phase B remembers.
fn options(restarts: u32, depth: u32) -> FrontOptions {
    FrontOptions {
        restarts,
        context_chunks: CONTEXT_CHUNKS,
        ..FrontOptions::new(PHASE_B, depth)
    }
}

/// A link with room for what the front holds.
fn pair(options: FrontOptions, bell: &Bell) -> Pair {
    let edge = |depth| edge(depth, 512);
    let up = edge(options.depth + options.context_chunks);
    let down = edge(options.depth);
    Pair::new(up, down, bell.clone())
}

struct End {
    result: Result<FrontSummary, Fault>,
    stages: Front,
    /// Operations of the first Phase B, and of the front over its first link.
    done: (usize, usize),
}

/// Runs a front over one Phase B after the other; the last one lives.
fn run(cuts: &[Cut], depth: u32, restarts: u32, lives: &[Life]) -> End {
    let mut stages = Front::new(cuts);
    let options = options(restarts, depth);
    let bell = Bell::new().unwrap();
    let counts: Vec<_> = (0..lives.len())
        .map(|_| <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default())
        .collect();
    let mut front = FrontRun::new(&mut stages, options);
    let mut result = Err(died());
    for (life, (phase_b_done, front_done)) in lives.iter().zip(&counts) {
        let Pair {
            front: front_link,
            back: back_link,
            front_switch: switch,
            back_switch,
        } = pair(options, &bell);
        let driven = std::thread::scope(|scope| {
            let phase_b = scope.spawn(|| {
                let mut link = Fails::new(back_link, life.phase_b, broken);
                link.done = Arc::clone(phase_b_done);
                let mut mixer = Mixer::default();
                let result = run_phase_b(link, &mut mixer, &back_switch, FRONT, depth);
                // What the watch thread of the front would say.
                if let Err(fault) = result {
                    let own = fault.operation.as_str() == "phase_b";
                    switch.raise(if own { fault } else { died() });
                }
            });
            let seen = switch.clone();
            let gone = move || {
                seen.raise(died());
                broken()
            };
            let mut link = Fails::new(front_link, life.front, gone);
            link.done = Arc::clone(front_done);
            let _tell = TellPanic(&back_switch);
            let driven = front.drive(link, &switch);
            // A front that has finished has said goodbye; Phase B leaves by itself, and soon.
            let deadline = Instant::now() + Duration::from_secs(20);
            let left = loop {
                match phase_b.is_finished() {
                    false if driven == Ok(Driven::Finished) && Instant::now() < deadline => {
                        std::thread::sleep(Duration::from_micros(100));
                    }
                    left => break left,
                }
            };
            back_switch.raise(died());
            assert!(left || driven != Ok(Driven::Finished), "Phase B stayed");
            phase_b.join().unwrap();
            driven
        });
        match driven {
            Ok(Driven::Lost(fault)) => assert_eq!(fault, died()),
            Ok(Driven::Finished) => {
                result = Ok(front.finish());
                break;
            }
            Err(fault) => {
                drop(front);
                result = Err(fault);
                break;
            }
        }
    }
    let (phase_b, front) = &counts[0];
    End {
        result,
        stages,
        done: (
            phase_b.load(Ordering::Relaxed),
            front.load(Ordering::Relaxed),
        ),
    }
}

/// What was emitted is right and in order, and what is missing was overtaken by a hard cut.
fn check(end: &End, cuts: &[Cut], lives: &[Life]) {
    let summary = end.result.as_ref().unwrap_or_else(|fault| {
        panic!("{lives:?}: {fault}");
    });
    let expected = expected(cuts);
    for (chunk, frames) in &end.stages.emitted {
        assert_eq!(
            frames, &expected[*chunk as usize],
            "{lives:?}: chunk {chunk}"
        );
    }
    let mut chunks: Vec<u64> = end.stages.emitted.iter().map(|(chunk, _)| *chunk).collect();
    assert!(chunks.is_sorted(), "{lives:?}: {chunks:?}");
    chunks.extend(&end.stages.forgotten);
    chunks.sort_unstable();
    let all: Vec<u64> = (0..cuts.len() as u64).collect();
    assert_eq!(chunks, all, "{lives:?}: lost or doubled");
    if !cuts.contains(&Cut::Hard) {
        assert_eq!(end.stages.forgotten, [0; 0], "{lives:?}");
    }
    assert_eq!(summary.counts.emitted, end.stages.emitted.len() as u64);
    assert!(summary.counts.max_in_flight <= 4);
}

const SIX: [Cut; 6] = [Cut::None; 6];

#[test]
fn a_phase_b_that_dies_at_any_point_changes_nothing() {
    for depth in [1, 2, 4] {
        let undisturbed = run(&SIX, depth, 1, &[WHOLE]);
        check(&undisturbed, &SIX, &[WHOLE]);
        let (of_phase_b, of_front) = undisturbed.done;
        assert!(of_phase_b > 18 && of_front > 18, "{of_phase_b} {of_front}");
        // In the last place nothing breaks.
        for phase_b in 0..of_phase_b {
            let lives = [Life { phase_b, ..WHOLE }, WHOLE];
            check(&run(&SIX, depth, 1, &lives), &SIX, &lives);
        }
        for front in 0..of_front {
            let lives = [Life { front, ..WHOLE }, WHOLE];
            check(&run(&SIX, depth, 1, &lives), &SIX, &lives);
        }
    }
}

#[test]
fn so_does_a_second_death_at_any_point() {
    let depth = 2;
    let (of_phase_b, _) = run(&SIX, depth, 1, &[WHOLE]).done;
    for first in 0..of_phase_b {
        for second in 0..8 {
            let life = |phase_b| Life { phase_b, ..WHOLE };
            let lives = [life(first), life(second), WHOLE];
            check(&run(&SIX, depth, 2, &lives), &SIX, &lives);
            let front = |front| Life { front, ..WHOLE };
            let lives = [life(first), front(second), WHOLE];
            check(&run(&SIX, depth, 2, &lives), &SIX, &lives);
        }
    }
}

#[test]
fn cuts_and_deaths_get_along() {
    for cut in [Cut::Flush, Cut::Hard] {
        let mut cuts = SIX;
        cuts[3] = cut;
        let (of_phase_b, of_front) = run(&cuts, 3, 1, &[WHOLE]).done;
        for phase_b in 0..of_phase_b {
            let lives = [Life { phase_b, ..WHOLE }, WHOLE];
            check(&run(&cuts, 3, 1, &lives), &cuts, &lives);
        }
        for front in 0..of_front {
            let lives = [Life { front, ..WHOLE }, WHOLE];
            check(&run(&cuts, 3, 1, &lives), &cuts, &lives);
        }
    }
}

#[test]
fn without_restarts_a_death_ends_the_run() {
    let life = Life {
        phase_b: 9,
        ..WHOLE
    };
    let end = run(&SIX, 2, 0, &[life, WHOLE]);
    assert_eq!(end.result.unwrap_err(), died());
    assert_eq!(end.stages.rebuilt, 0);
}

#[test]
fn restarts_are_used_up_one_by_one() {
    let life = Life {
        phase_b: 5,
        ..WHOLE
    };
    let lives = [life, life, life, WHOLE];
    let end = run(&SIX, 2, 3, &lives);
    check(&end, &SIX, &lives);
    let summary = end.result.unwrap();
    assert_eq!(summary.restarts.len(), 3);
    for restart in &summary.restarts {
        assert_eq!(restart.fault, died());
        assert!(restart.sent_ns.unwrap() >= restart.lost_ns);
        assert!((1..=2).contains(&restart.sent_again), "{restart:?}");
    }
    let end = run(&SIX, 2, 2, &lives);
    assert_eq!(end.result.unwrap_err(), died());
}

#[test]
fn what_would_happen_again_is_no_reason_to_start_again() {
    // A Phase B that is told to go on where it never began: a fault of ours, not a death.
    for kind in [
        FaultKind::Plugin,
        FaultKind::BadInput,
        FaultKind::PeerMisbehaved,
        FaultKind::Interrupted,
        FaultKind::HandshakeMismatch,
        FaultKind::Internal,
    ] {
        let fault = Fault::new(kind, PHASE_B, "phase_b", "again and again");
        assert_eq!(drive_with(&fault), Err(fault));
    }
    for rank in [FRONT, PHASE_B] {
        for kind in [FaultKind::PeerDied, FaultKind::TimedOut, FaultKind::Device] {
            let fault = Fault::new(kind, rank, "watch", "gone");
            let driven = drive_with(&fault);
            if rank == PHASE_B {
                assert_eq!(driven, Ok(Driven::Lost(fault)));
            } else {
                assert_eq!(driven, Err(fault));
            }
        }
    }
}

/// One chunk, and this fault before anything is answered.
fn drive_with(fault: &Fault) -> Result<Driven, Fault> {
    let mut stages = Front::new(&[Cut::None]);
    let options = options(1, 1);
    let pair = pair(options, &Bell::new().unwrap());
    pair.front_switch.raise(fault.clone());
    FrontRun::new(&mut stages, options).drive(pair.front, &pair.front_switch)
}

#[test]
fn a_link_that_fails_first_waits_for_the_verdict_on_its_peer() {
    let mut stages = Front::new(&SIX);
    let options = options(1, 1);
    let pair = pair(options, &Bell::new().unwrap());
    let late = || TransportError::NotInTime {
        what: "the link".into(),
        step: "poll",
        after: Duration::from_secs(1),
    };
    let link = Fails::new(pair.front, 1, late);
    let mut front = FrontRun::new(&mut stages, options);
    let driven = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            pair.front_switch.raise(died());
        });
        front.drive(link, &pair.front_switch)
    });
    assert_eq!(driven, Ok(Driven::Lost(died())));
}

#[test]
fn a_death_after_the_last_chunk_was_emitted_ends_the_run_well() {
    let (of_phase_b, _) = run(&SIX, 2, 1, &[WHOLE]).done;
    // Its last operation is the answer to the goodbye.
    let life = Life {
        phase_b: of_phase_b - 1,
        ..WHOLE
    };
    let end = run(&SIX, 2, 1, &[life]);
    check(&end, &SIX, &[life]);
    assert_eq!(end.result.unwrap().restarts, []);
}

#[test]
fn a_drain_that_was_asked_for_before_the_death_is_still_one_after_it() {
    let cuts = [Cut::None; 200];
    let mut stages = Front::new(&cuts);
    let options = options(1, 2);
    let bell = Bell::new().unwrap();
    let mut front = FrontRun::new(&mut stages, options);
    let first = pair(options, &bell);
    let (link, switch) = (first.front, first.front_switch);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let link = Fails::new(first.back, 20, broken);
            let died_of = run_phase_b(link, &mut Mixer::default(), &first.back_switch, FRONT, 2);
            died_of.unwrap_err();
            switch.request_drain(2);
            switch.raise(died());
        });
        assert_eq!(front.drive(link, &switch), Ok(Driven::Lost(died())));
    });
    let second = pair(options, &bell);
    let (link, switch) = (second.front, second.front_switch);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut mixer = Mixer::default();
            let ended = run_phase_b(second.back, &mut mixer, &second.back_switch, FRONT, 2);
            if ended.is_err() {
                switch.raise(died());
            }
            ended.unwrap();
        });
        assert_eq!(front.drive(link, &switch), Ok(Driven::Finished));
    });
    let counts = front.finish().counts;
    assert!(counts.admitted < 200 && counts.emitted == counts.admitted);
    assert_eq!(stages.emitted.len() as u64, counts.admitted);
}
