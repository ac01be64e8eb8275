//! What the checker accepts and refuses.

use pp_runtime::schedule::{Flaw, Kind, Limits, Schedule, Step};
use pp_testing::assert_has;
use pp_testing::rows;

use super::golden::{self, CUSTOM, ZB1P, ZB1P_LOWERED};
use super::oracle;

/// Plain 1F1B whose sends meet head on.
const HEAD_ON: &str = "\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1";

fn parsed(rows: &str) -> Schedule {
    Schedule::parse_csv(rows).unwrap_or_else(|error| panic!("{rows}\n{error}"))
}

fn refusal(rows: &str, limits: Limits) -> String {
    let checked = parsed(rows).check(limits);
    checked.expect_err(rows).to_string()
}

/// Small schedules of every kind, as computations and lowered.
fn small() -> Vec<(String, Schedule)> {
    let mut all = Vec::new();
    for kind in Kind::ALL {
        for (ranks, stages, microbatches) in [(1, 1, 2), (2, 1, 3), (2, 2, 4), (3, 2, 6)] {
            let stages = kind.stages_per_rank().unwrap_or(stages);
            let Ok(built) = Schedule::build(kind, ranks, stages, microbatches) else {
                continue;
            };
            let name = format!("{kind} {ranks} {stages} {microbatches}");
            for waits in [false, true] {
                let lowered = built.lower(waits).unwrap();
                all.push((format!("{name} lowered, waits: {waits}"), lowered));
            }
            all.push((name, built));
        }
    }
    all
}

/// The rows as cells.
fn cells(schedule: &Schedule) -> Vec<Vec<String>> {
    let rows = schedule.ranks().iter();
    rows.map(|steps| steps.iter().map(Step::to_string).collect())
        .collect()
}

fn text(rows: &[Vec<String>]) -> String {
    let rows: Vec<String> = rows.iter().map(|row| row.join(",")).collect();
    rows.join("\n")
}

fn is_refused(rows: &[Vec<String>]) -> bool {
    match Schedule::parse_csv(&text(rows)) {
        Ok(schedule) => schedule.check(Limits::default()).is_err(),
        Err(_) => true,
    }
}

/// A generator of numbers below a bound.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }
}

#[test]
fn ten_bad_schedules_are_refused_with_their_witness() {
    let golden = golden::bad();
    let named = |name: &str| {
        let mut found = golden.iter().filter(|bad| bad.0.starts_with(name));
        found.next().unwrap().1.as_str()
    };
    let table = rows("
        named order of one edge swapped | one edge is received in another order than it is sent: 0SEND_F0 (rank 0, action 3) comes before 0SEND_F1 (rank 0, action 4), but 1RECV_F1 (rank 1, action 1) comes before 1RECV_F0 (rank 1, action 2)
        named forward twice | 0F0 (rank 0, action 1) and 0F0 (rank 0, action 2) both do 0F0; remove one
        named backward of stage 0 without its gradient | 0B0 (rank 0, action 3) needs 0RECV_B0, and rank 0 does not have it
        // Receives are missing, and one send is left over.
        0F0,0SEND_F0,0RECV_B0,0B0/1F0,1B0,1SEND_B0 | 0SEND_F0 (rank 0, action 2) needs 1RECV_F0, and rank 1 does not have it
        named send before its forward | 0SEND_F0 (rank 0, action 1) needs 0F0 (rank 0, action 2), which comes later on this rank
        named W before I | 0W0 (rank 0, action 2) needs 0I0 (rank 0, action 3), which comes later on this rank
        0F0,0B0/1B0,1F0 | 1B0 (rank 1, action 1) needs 1F0 (rank 1, action 2), which comes later on this rank
        // What PyTorch 2.15's Schedule1F1B says its order is.
        0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3/1F1,1B0,1F2,1B1,1F3,1B2,1F4,1B3 | 1B0 (rank 1, action 2) needs 1F0, and rank 1 does not have it
    ");
    for [rows, flaw] in table {
        let rows = match rows.strip_prefix("named ") {
            Some(name) => named(name),
            None => &rows.replace('/', "\n"),
        };
        assert_eq!(refusal(rows, Limits::default()), flaw, "{rows}");
    }
    assert_eq!(
        refusal(HEAD_ON, Limits::slots(0)),
        "deadlock if a send ends only when its receive begins: 0SEND_F1 (rank 0, action 4) waits \
         for 1RECV_F1 (rank 1, action 5) to begin, which comes after 1SEND_B0 (rank 1, action 4), which waits for \
         0RECV_B0 (rank 0, action 5) to begin, which comes after 0SEND_F1"
    );
    // Microbatch 7 of 1 is no schedule at all.
    let error = Schedule::parse_csv("0F7,0B7").unwrap_err().to_string();
    assert_has(&error, &["microbatch 0", "0F7"]);
}

#[test]
fn what_is_wrong_with_single_actions_is_named() {
    let table = rows("
        0F0,0F1,0B0 | 0F1 (rank 0, action 2) needs 0B1 (or 0I1 and 0W1), and rank 0 does not have it
        0F0,0I0 | 0I0 (rank 0, action 2) needs 0W0, and rank 0 does not have it
        0F0,0W0 | 0W0 (rank 0, action 2) needs 0I0, and rank 0 does not have it
        0F0,0F1,0B0,0I1,0W1/1W1,1F0,1B0 | 1W1 (rank 1, action 1) needs 1F1, and rank 1 does not have it
        0F0,0F1,0B0,0B1/1F0,1B0 | rank 1 never runs 1F1, nor its backward; every stage needs every microbatch
        0F0,0I0,0B0 | 0I0 (rank 0, action 2) and 0B0 (rank 0, action 3) are of one microbatch, which has either one B, or one I and one W
        0F0,0B0,0W0 | 0B0 (rank 0, action 2) and 0W0 (rank 0, action 3) are of one microbatch, which has either one B, or one I and one W
        0F0,0SEND_F0,1F0,1B0,0B0 | 0SEND_F0 (rank 0, action 2) has no other rank at its other end; remove it
        0RECV_F0,0F0,0SEND_F0,0RECV_B0,0B0/1RECV_F0,1F0,1B0,1SEND_B0 | 0RECV_F0 (rank 0, action 1) has no other rank at its other end; remove it
        0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0/1RECV_F0,1F0,1B0,1SEND_B0 | 1SEND_B0 (rank 1, action 4) needs 1WAIT_SEND_B0, and rank 1 does not have it
        0F0,0WAIT_SEND_F0,0B0/1F0,1B0 | 0WAIT_SEND_F0 (rank 0, action 2) needs 0SEND_F0, and rank 0 does not have it
        (1F0;0B0)OVERLAP_F_B,0F0,1B0,0F1,1F1,1B1,0B1 | (1F0;0B0)OVERLAP_F_B (rank 0, action 1) needs 0F0 (rank 0, action 2), which comes later on this rank
        0F0,1F0,1B0,0F1,(1F1;0B0)OVERLAP_F_B,1B1,0B1,0B0 | (1F1;0B0)OVERLAP_F_B (rank 0, action 5) and 0B0 (rank 0, action 8) both do 0B0; remove one
    ");
    for [rows, flaw] in table {
        let rows = &rows.replace('/', "\n");
        assert_eq!(refusal(rows, Limits::default()), flaw, "{rows}");
    }
}

#[test]
fn a_reduction_stands_behind_all_gradients_of_its_stage_and_alone() {
    let good = "0UNSHARD,0F0,1F0,1B0,1REDUCE_GRAD,0B0,1WAIT_REDUCE_GRAD,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD";
    parsed(good).check(Limits::default()).unwrap();
    // Nothing waits: each ends by itself.
    let synchronous = "0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD";
    parsed(synchronous).check(Limits::default()).unwrap();
    let table = rows("
        0F0,0F1,0B1,0REDUCE_GRAD,0B0 | 0REDUCE_GRAD (rank 0, action 4) needs 0B0 (rank 0, action 5), which comes later on this rank
        0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD | 0REDUCE_GRAD (rank 0, action 3) and 0REDUCE_GRAD (rank 0, action 4) both do 0REDUCE_GRAD; remove one
        0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD,1WAIT_REDUCE_GRAD,0WAIT_REDUCE_GRAD | 0REDUCE_GRAD (rank 0, action 6) begins before 1REDUCE_GRAD (rank 0, action 4) was waited for; a rank has one reduction pending at most
        0F0,0B0,0WAIT_REDUCE_GRAD | 0WAIT_REDUCE_GRAD (rank 0, action 3) needs 0REDUCE_GRAD, and rank 0 does not have it
        0F0,0B0,0WAIT_REDUCE_GRAD,0REDUCE_GRAD | 0WAIT_REDUCE_GRAD (rank 0, action 3) needs 0REDUCE_GRAD (rank 0, action 4), which comes later on this rank
        0F0,1F0,1B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,0B0,0REDUCE_GRAD | 0REDUCE_GRAD (rank 0, action 7) needs 0WAIT_REDUCE_GRAD, and rank 0 does not have it
    ");
    for [rows, flaw] in table {
        assert_eq!(refusal(rows, Limits::default()), flaw, "{rows}");
    }
}

#[test]
fn ranks_that_wait_for_each_other_are_named_with_what_they_wait_for() {
    // No number of slots helps.
    assert_eq!(
        refusal("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", Limits::default()),
        "deadlock: 0B0 (rank 0, action 2) waits for 1B0 (rank 1, action 3), which comes after 1F1 \
         (rank 1, action 2), which waits for 0F1 (rank 0, action 3), which comes after 0B0"
    );
    // Rank 0 runs all forwards of stage 0 before the first of stage 2.
    let built = Schedule::build(Kind::LoopedBfs, 2, 2, 8).unwrap();
    let flaw = built.check(Limits::slots(3)).unwrap_err();
    assert_eq!(
        flaw.to_string(),
        "deadlock with 3 slots an edge: 0F6 (rank 0, action 7) waits for the slot that 1F3 (rank 1, \
         action 4) frees, which waits for the slot that 2F0 (rank 0, action 9) frees, which comes after 0F6"
    );
    // A send that is waited for at once waits for its receive, whatever the slots.
    let waits = "\
0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B1";
    assert_eq!(
        refusal(waits, Limits::slots(2)),
        "deadlock: 0WAIT_SEND_F1 (rank 0, action 6) waits for 1RECV_F1 (rank 1, action 6) to begin, \
         which comes after 1WAIT_SEND_B0 (rank 1, action 5), which waits for 0RECV_B0 (rank 0, action 7) to begin, \
         which comes after 0WAIT_SEND_F1"
    );
}

#[test]
fn a_cycle_is_the_shortest_of_those_where_ranks_stand() {
    // Ranks 0, 1 and 2 wait for each other, and ranks 3 and 4 do.
    let rows = "\
0F0,3F0,3F1,0F1,3B0,3B1,0B0,0B1
1F0,1F1,1B0,1B1
2F0,2F1,2B0,2B1
4F0,4B0,4F1,4B1
5F0,5F1,5B0,5B1";
    let Err(Flaw::Deadlock(cycle)) = parsed(rows).check(Limits::default()) else {
        panic!("accepted");
    };
    let ranks: Vec<u32> = cycle.links.iter().map(|link| link.blocked.rank).collect();
    assert_eq!(ranks, [3, 4]);
}

#[test]
fn of_a_cycle_over_many_ranks_the_text_shows_some() {
    let built = Schedule::build(Kind::LoopedBfs, 20, 2, 40).unwrap();
    let Err(Flaw::Deadlock(cycle)) = built.check(Limits::slots(1)) else {
        panic!("accepted");
    };
    assert_eq!(cycle.links.len(), 20);
    let text = cycle.to_string();
    assert!(
        text.ends_with("16F4 (rank 16, action 5) frees, which waits, over 3 more ranks, for 0F20"),
        "{text}"
    );
}

#[test]
fn sends_that_meet_head_on_need_one_slot() {
    let head_on = parsed(HEAD_ON);
    let refused = head_on.check(Limits::slots(0));
    assert!(matches!(refused, Err(Flaw::Deadlock(_))));
    let report = head_on.check(Limits::slots(1)).unwrap();
    assert_eq!(report, head_on.check(Limits::default()).unwrap());
    assert_eq!(report.slots_per_edge, 1);
    // The same order as computations; and what never meets.
    let computed = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1";
    assert!(parsed(computed).check(Limits::slots(0)).is_err());
    let gpipe = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1";
    parsed(gpipe).check(Limits::slots(0)).unwrap();
}

#[test]
fn an_overlapped_pair_posts_both_of_its_receives_before_either_message_is_there() {
    // Rank 1 sends 2F0 and then 1B1, both to the pair.
    let rows = "\
0F1,3F1,0F0,3B1,(3F0;0B1)OVERLAP_F_B,3B0,0B0
1F1,2F1,1F0,2B1,2F0,1B1,2B0,1B0";
    parsed(rows).check(Limits::slots(0)).unwrap();
}

#[test]
fn golden_slots_and_activations_are_met_by_both_levels() {
    for golden in golden::all() {
        let lowered = parsed(&golden.lowered());
        for schedule in [golden.compute(), lowered] {
            let report = schedule.check(Limits::default()).unwrap();
            let name = (golden.kind(), golden.ranks, golden.stages_per_rank);
            assert_eq!(report.crossings, [], "{name:?}");
            let (found, wanted) = (report.slots_per_edge, golden.min_slots_per_edge);
            assert_eq!(found, wanted, "{name:?}");
            let slots = report.activation_slots.into_iter().map(u64::from);
            assert_eq!(
                slots.collect::<Vec<_>>(),
                golden.activation_slots,
                "{name:?}"
            );
        }
    }
    for rows in [ZB1P, ZB1P_LOWERED, CUSTOM] {
        let report = parsed(rows).check(Limits::default()).unwrap();
        assert_eq!(report.crossings, []);
    }
}

#[test]
fn a_weight_gradient_keeps_its_activation_and_an_input_gradient_does_not_free_it() {
    let rows = "0F0,0F1,0I0,0F2,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3";
    let report = parsed(rows).check(Limits::default()).unwrap();
    assert_eq!(report.activation_slots, [3]);
    assert_eq!(report.undone_weights, [1]);
    assert_eq!(report.slots_per_edge, 0);
    // Two stages of different size.
    let two = parsed("0F0,1F0,0F1,1F1,1I0,1I1,0I0,1W0,0W0,0I1,1W1,0W1");
    let size_of = |stage| [10, 1][stage as usize];
    assert_eq!(two.activations(size_of), [22]);
    assert_eq!(two.undone_weights(size_of), [12]);
    assert_eq!(two.undone_weights(|_| 1), [3]);
}

#[test]
fn outstanding_sends_end_with_their_wait_or_with_their_use() {
    let built = Schedule::build(Kind::GPipe, 2, 1, 4).unwrap();
    let outstanding = |schedule: &Schedule| {
        let report = schedule.check(Limits::default()).unwrap();
        report.outstanding_sends
    };
    // With one slot a forward begins when the one before is used.
    assert_eq!(outstanding(&built), [1, 1]);
    // PyTorch waits behind the local backward, and at the end.
    assert_eq!(outstanding(&built.lower(true).unwrap()), [4, 4]);
}

#[test]
fn messages_of_two_edges_that_cross_are_a_note() {
    let built = Schedule::build(Kind::Interleaved, 2, 2, 4).unwrap();
    let rows = built.lower(false).unwrap().to_csv();
    let swapped = rows
        .replace("3RECV_F1", "other")
        .replace("1RECV_F2", "3RECV_F1")
        .replace("other", "1RECV_F2");
    let report = parsed(&swapped).check(Limits::default()).unwrap();
    let notes: Vec<String> = report.crossings.iter().map(ToString::to_string).collect();
    assert_eq!(
        notes,
        [
            "PyTorch matches the messages from rank 0 to rank 1 by their order, and would mix these up: 2SEND_F1 (rank 0, \
             action 10) comes before 0SEND_F2 (rank 0, action 13), but 1RECV_F2 (rank 1, action 9) comes before 3RECV_F1 \
             (rank 1, action 12)"
        ]
    );
    // As computations alone, and as they are lowered.
    for schedule in [&built, &parsed(&rows)] {
        let report = schedule.check(Limits::default()).unwrap();
        assert!(report.crossings.is_empty());
    }
}

#[test]
fn every_built_schedule_passes() {
    for (name, built) in golden::matrix() {
        let report = built.check(Limits::default());
        let report = report.unwrap_or_else(|flaw| panic!("{name}: {flaw}"));
        let limits = Limits::slots(report.slots_per_edge);
        assert_eq!(built.check(limits).unwrap(), report, "{name}");
        for waits in [false, true] {
            let lowered = built.lower(waits).unwrap().check(limits);
            let lowered = lowered.unwrap_or_else(|flaw| panic!("{name}, waits: {waits}: {flaw}"));
            assert_eq!(lowered.crossings, [], "{name}, waits: {waits}");
        }
    }
}

#[test]
fn every_dropped_or_doubled_action_is_refused() {
    for (name, schedule) in small() {
        let rows = cells(&schedule);
        for (rank, row) in rows.iter().enumerate() {
            for at in 0..row.len() {
                let mut dropped = rows.clone();
                let cell = dropped[rank].remove(at);
                assert!(is_refused(&dropped), "{name} without {cell}");
                let mut doubled = rows.clone();
                doubled[rank].insert((at * 7 + 3) % row.len(), cell.clone());
                assert!(is_refused(&doubled), "{name} with two {cell}");
            }
        }
    }
}

#[test]
fn every_swap_of_two_dependent_actions_is_refused() {
    for (name, schedule) in small() {
        let rows = cells(&schedule);
        for (rank, steps) in schedule.ranks().iter().enumerate() {
            for later in 0..steps.len() {
                for earlier in 0..later {
                    if oracle::needs(&schedule, steps[later], steps[earlier]) {
                        let mut swapped = rows.clone();
                        swapped[rank].swap(earlier, later);
                        let pair = (&rows[rank][earlier], &rows[rank][later]);
                        assert!(is_refused(&swapped), "{name} with {pair:?} swapped");
                    }
                }
            }
        }
    }
}

#[test]
fn a_schedule_in_any_order_is_accepted_if_a_run_with_queues_ends() {
    let (mut accepted, mut refused) = (0, 0);
    for (at, (name, schedule)) in small().into_iter().enumerate() {
        for seed in 0..60 {
            let mut random = Random((at * 1000 + seed) as u64);
            let mut rows = cells(&schedule);
            for _ in 0..=random.below(8) {
                let rank = random.below(rows.len());
                let from = random.below(rows[rank].len());
                let to = (from + random.below(6)).min(rows[rank].len() - 1);
                let cell = rows[rank].remove(from);
                rows[rank].insert(to, cell);
            }
            let rows = text(&rows);
            let shuffled = parsed(&rows);
            for slots in 0..4 {
                let checked = shuffled.check(Limits::slots(slots));
                let ends = oracle::ends(&shuffled, slots);
                let context = format!("{name}, seed {seed}, {slots} slots: {checked:?}\n{rows}");
                assert_eq!(checked.is_ok(), ends, "{context}");
                *(if ends { &mut accepted } else { &mut refused }) += 1;
            }
            let mut numbers = 1..=schedule.microbatches();
            let least = numbers.find(|slots| oracle::ends(&shuffled, *slots));
            let report = shuffled.check(Limits::default()).ok();
            let found = report.map(|report| report.slots_per_edge.max(1));
            assert_eq!(found, least, "{name}, seed {seed}\n{rows}");
        }
    }
    assert!(accepted > 1000 && refused > 1000, "{accepted} {refused}");
}
