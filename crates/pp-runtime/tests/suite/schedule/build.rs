//! Builders, and the sizes that they refuse.

use std::collections::HashMap;

use pp_runtime::schedule::{Action, Kind, Op, Schedule, SizeError, Step};
use pp_testing::{rows, words};

use super::golden;

fn refused(kind: Kind, ranks: u32, stages: u32, microbatches: u32) -> String {
    Schedule::build(kind, ranks, stages, microbatches)
        .unwrap_err()
        .to_string()
}

#[test]
fn every_list_is_pytorchs_action_by_action() {
    for golden in golden::all() {
        let kind = golden.kind();
        let (ranks, stages) = (golden.ranks, golden.stages_per_rank);
        let built = Schedule::build(kind, ranks, stages, golden.microbatches).unwrap();
        let case = format!("{kind} {ranks} {stages} {}", golden.microbatches);
        assert_eq!(built.to_csv(), golden.compute().to_csv(), "{case}");
        assert_eq!(built.stage_to_rank(), golden.stage_to_rank, "{case}");
        assert_eq!(built.microbatches(), golden.microbatches, "{case}");
    }
}

#[test]
fn naive_runs_one_microbatch_after_the_other() {
    let naive = Schedule::build(Kind::Naive, 2, 1, 3).unwrap();
    assert_eq!(
        naive.to_csv(),
        "0F0,0B0,0F1,0B1,0F2,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    );
}

#[test]
fn at_the_sizes_of_pytorchs_tests_each_microbatch_is_run_once_in_each_stage() {
    let built = golden::matrix();
    assert!(built.len() > 150, "{}", built.len());
    for (case, schedule) in built {
        let mut count: HashMap<Action, u32> = HashMap::new();
        for (rank, steps) in (0..).zip(schedule.ranks()) {
            for action in steps.iter().flat_map(Step::actions) {
                assert_eq!(
                    schedule.stage_to_rank()[action.stage as usize],
                    rank,
                    "{case}: {action}"
                );
                *count.entry(action).or_default() += 1;
            }
        }
        for stage in 0..schedule.stages() {
            for microbatch in 0..schedule.microbatches() {
                let mut count = |op| {
                    count
                        .remove(&Action::new(stage, op, microbatch))
                        .unwrap_or(0)
                };
                let forward = count(Op::Forward);
                let split = [count(Op::BackwardInput), count(Op::BackwardWeight)];
                let backward = (split, count(Op::Backward));
                let is_once = [([0, 0], 1), ([1, 1], 0)].contains(&backward);
                assert!(
                    forward == 1 && is_once,
                    "{case}: {stage} {microbatch}: {backward:?}"
                );
            }
        }
        assert!(count.is_empty(), "{case}: {count:?}");
    }
}

#[test]
fn a_size_that_does_not_work_is_refused_with_the_nearest_that_do() {
    let cases = rows("
        gpipe | 0 1 4 | there are 0 ranks; give at least 1
        looped-bfs | 2 0 4 | there are 0 stages a rank; give at least 1
        zbv | 2 2 0 | there are 0 microbatches; give at least 1
        naive | 2 2 4 | naive cannot have 2 stages a rank; give 1
        zb-h1 | 2 2 4 | zb-h1 cannot have 2 stages a rank; give 1
        dualpipe-v | 2 3 8 | dualpipe-v cannot have 3 stages a rank; give 2
        1f1b | 4 1 3 | 1f1b on 4 ranks needs at least 4 microbatches, not 3
        dualpipe-v | 4 2 7 | dualpipe-v on 4 ranks needs at least 8 microbatches, not 7
        interleaved | 4 2 11 | interleaved on 4 ranks cannot split 11 microbatches into 2 groups of one size; the nearest that work are 10 and 12
        gpipe | 8192 1 4096 | 67108864 computations are too many; at most 33554432 are built; give fewer microbatches or ranks
    ");
    for [kind, size, text] in cases {
        let size = words(size)
            .into_iter()
            .map(|number| number.parse().unwrap());
        let [ranks, stages, microbatches] = size.collect::<Vec<u32>>()[..] else {
            unreachable!();
        };
        let kind = kind.parse().unwrap();
        assert_eq!(refused(kind, ranks, stages, microbatches), text);
    }
}

#[test]
fn between_the_nearest_sizes_none_works() {
    for kind in [Kind::Interleaved, Kind::InterleavedZeroBubble] {
        for (ranks, microbatches) in (1..9).flat_map(|ranks| (1..50).map(move |m| (ranks, m))) {
            let works = |microbatches| Schedule::build(kind, ranks, 2, microbatches).is_ok();
            let error = match Schedule::build(kind, ranks, 2, microbatches) {
                Ok(_) => continue,
                Err(error) => error,
            };
            let SizeError::Unequal { fewer, more, .. } = error else {
                panic!("{error}");
            };
            assert!(works(fewer) && works(more), "{ranks} {microbatches}");
            assert!(!(fewer + 1..more).any(works), "{ranks} {microbatches}");
        }
    }
}

#[test]
fn no_number_is_too_large_to_be_refused() {
    let too_large = |kind, ranks, stages, microbatches| {
        let error = Schedule::build(kind, ranks, stages, microbatches).unwrap_err();
        assert!(
            matches!(error, SizeError::TooLarge { .. }),
            "{kind}: {error}"
        );
    };
    for kind in Kind::ALL {
        let stages = kind.stages_per_rank().unwrap_or(u32::MAX);
        for size in [[u32::MAX; 2], [1, u32::MAX], [u32::MAX, 1], [1 << 16; 2]] {
            too_large(kind, size[0], stages, size[1]);
        }
    }
    // Its product is 0 in 64 bits.
    too_large(Kind::LoopedBfs, 1 << 31, 1 << 31, 4);
    // It walks through as many microbatches as keep all ranks busy.
    too_large(Kind::ZbV, 1 << 16, 2, 1);
}

#[test]
fn a_schedule_is_known_by_its_name_and_by_pytorchs_and_for_others_the_nearest_is_proposed() {
    for kind in Kind::ALL {
        assert_eq!(kind.to_string().parse(), Ok(kind));
    }
    for (name, kind) in [
        ("GPipe", Kind::GPipe),
        ("Schedule1F1B", Kind::OneFOneB),
        ("Interleaved1F1B", Kind::Interleaved),
        ("ScheduleInterleavedZeroBubble", Kind::InterleavedZeroBubble),
        ("LoopedBFS", Kind::LoopedBfs),
        ("ZBVZeroBubble", Kind::ZbV),
        ("dualpipev", Kind::DualPipeV),
    ] {
        assert_eq!(name.parse(), Ok(kind), "{name}");
    }
    let said = |name: &str| name.parse::<Kind>().unwrap_err().to_string();
    for (name, near) in [
        ("dualpipe", "dualpipe-v"),
        ("1f2b", "1f1b"),
        ("Interleaved1F1", "interleaved"),
        ("zero-bubble", "zbv"),
    ] {
        let proposed = format!("no schedule of that name; did you mean {near}?");
        assert_eq!(said(name), proposed, "{name}");
    }
    for name in ["hanayo", "", "schedule"] {
        assert_eq!(
            said(name),
            "no schedule of that name; there are naive, gpipe, 1f1b, interleaved, interleaved-zb, zb-h1, looped-bfs, zbv, dualpipe-v"
        );
    }
}
