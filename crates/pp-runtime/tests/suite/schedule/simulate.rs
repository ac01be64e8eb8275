//! What the simulator says of times.

use std::collections::BTreeMap;

use pp_runtime::schedule::{
    Action, Cost, Costs, Flaw, Kind, Limits, Message, Op, PerStage, Schedule, Span, Step, Timeline,
    Way,
};

use super::golden;

fn build(kind: Kind, ranks: u32, stages: u32, microbatches: u32) -> Schedule {
    Schedule::build(kind, ranks, stages, microbatches).unwrap()
}

fn run(schedule: &Schedule, costs: &impl Cost, limits: Limits) -> Timeline {
    schedule.simulate(costs, limits).unwrap()
}

fn costs(forward: u64, input: u64, weight: u64, transfer: u64) -> Costs {
    Costs {
        forward: forward.into(),
        input: input.into(),
        weight: weight.into(),
        transfer: transfer.into(),
    }
}

/// The costs of a name such as `F4I5W3c1`.
fn named(name: &str) -> Costs {
    let numbers: Vec<u64> = name
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect();
    let [forward, input, weight, transfer] = numbers[..] else {
        panic!("{name}")
    };
    costs(forward, input, weight, transfer)
}

#[test]
fn golden_times_are_met_by_both_levels() {
    let mut met = 0;
    for golden in golden::all() {
        let lowered = Schedule::parse_csv(&golden.lowered()).unwrap();
        for schedule in [golden.compute(), lowered] {
            for (name, wanted) in &golden.sim {
                let timeline = run(&schedule, &named(name), Limits::default());
                let context = (golden.kind(), golden.ranks, golden.microbatches, name);
                assert_eq!(timeline.makespan, wanted.makespan, "{context:?}");
                assert_eq!(timeline.idle, wanted.idle, "{context:?}");
                met += 1;
            }
        }
    }
    assert_eq!(met, 240);
}

#[test]
fn computations_of_a_lowered_list_run_when_those_of_its_compute_list_do() {
    for (name, built) in golden::matrix() {
        let least = built.check(Limits::default()).unwrap().slots_per_edge;
        for costs in [costs(4, 5, 3, 1), costs(3, 7, 2, 20)] {
            for slots in [None, Some(least)] {
                let spans = |schedule: &Schedule| {
                    let spans = run(schedule, &costs, Limits { slots }).spans;
                    let steps = schedule.ranks().iter().flatten();
                    let all = steps.copied().zip(spans.into_iter().flatten());
                    let computes = |step: Step| step.actions().all(|action| action.op.is_compute());
                    all.filter(|(step, _)| computes(*step)).collect::<Vec<_>>()
                };
                let computed = spans(&built);
                for waits in [false, true] {
                    let lowered = spans(&built.lower(waits).unwrap());
                    assert_eq!(lowered, computed, "{name}, {slots:?}, {costs:?}");
                }
            }
        }
    }
}

#[test]
fn bubbles_are_those_of_the_formulas() {
    // Four ranks; F, I and W of one stage; the idle time of each rank.
    type Formula = fn(u64, u64, u64) -> u64;
    let table: [(Kind, u32, u32, Formula); 5] = [
        (Kind::GPipe, 1, 8, |f, i, w| 3 * (f + i + w)),
        (Kind::OneFOneB, 1, 8, |f, i, w| 3 * (f + i + w)),
        (Kind::Interleaved, 2, 8, |f, i, w| 3 * (f + i + w)),
        (Kind::LoopedBfs, 2, 8, |f, i, w| 3 * (f + i + w)),
        (Kind::ZbH1, 1, 8, |f, i, w| 3 * (f + i - w)),
    ];
    for (kind, stages, microbatches, formula) in table {
        for (f, i, w) in [(1, 1, 1), (4, 5, 3), (10, 10, 9)] {
            let built = build(kind, 4, stages, microbatches);
            let timeline = run(&built, &costs(f, i, w, 0), Limits::default());
            assert_eq!(timeline.idle, [formula(f, i, w); 4], "{kind} {f} {i} {w}");
        }
    }
    for (kind, microbatches, idle) in [(Kind::ZbV, 8, 3), (Kind::DualPipeV, 10, 6)] {
        let built = build(kind, 4, 2, microbatches);
        let timeline = run(&built, &Costs::default(), Limits::default());
        assert_eq!(timeline.idle, [idle; 4], "{kind}");
    }
    let gpipe = build(Kind::GPipe, 4, 1, 8);
    let timeline = run(&gpipe, &Costs::default(), Limits::default());
    assert!((timeline.bubble(2) - 9.0 / 33.0).abs() < 1e-12);
}

#[test]
fn time_over_ideal_is_what_others_measured() {
    // Two ranks, eight microbatches: without transfers, and 72 µs a transfer where the forwards of a rank's stages take
    // 5 ms and 1 ms.
    let table = [
        (Kind::GPipe, 1, [1.125, 1.126, 1.131]),
        (Kind::OneFOneB, 1, [1.125, 1.130, 1.149]),
        (Kind::Interleaved, 2, [1.0625, 1.066, 1.0805]),
        (Kind::InterleavedZeroBubble, 2, [1.021, 1.024, 1.039]),
    ];
    for (kind, stages, wanted) in table {
        let built = build(kind, 2, stages, 8);
        let runs = [(1000, 0), (5000, 72), (1000, 72)];
        for ((forward, transfer), wanted) in runs.into_iter().zip(wanted) {
            let unit = forward / u64::from(stages);
            let costs = costs(unit, unit, unit, transfer);
            let timeline = run(&built, &costs, Limits::default());
            let ideal = timeline.makespan - timeline.idle[0];
            let over = timeline.makespan as f64 / ideal as f64;
            let context = format!("{kind} {forward} {transfer}: {over}");
            assert!((over - wanted).abs() < 0.0006, "{context}");
        }
    }
    let zb_h1 = run(
        &build(Kind::ZbH1, 2, 1, 8),
        &Costs::default(),
        Limits::default(),
    );
    assert_eq!((zb_h1.makespan, zb_h1.idle), (25, vec![1, 1]));
}

#[test]
fn a_send_that_waits_for_its_receive_holds_its_rank() {
    let gpipe = build(Kind::GPipe, 2, 1, 3);
    let timeline = run(&gpipe, &costs(1, 1, 1, 1), Limits::slots(0));
    let spans = |spans: &[(u64, u64)]| -> Vec<Span> {
        let spans = spans.iter();
        spans.map(|&(start, end)| Span { start, end }).collect()
    };
    // By hand. 0F1 leaves at 3, when rank 1 comes to 1F1; 1B1 leaves at 12, when rank 0 comes to 0B1.
    let by_hand = [(0, 1), (1, 2), (3, 4), (10, 12), (13, 15), (16, 18)];
    assert_eq!(timeline.spans[0], spans(&by_hand));
    let by_hand = [(2, 3), (4, 5), (6, 7), (7, 9), (9, 11), (12, 14)];
    assert_eq!(timeline.spans[1], spans(&by_hand));
    assert_eq!((timeline.makespan, timeline.idle), (18, vec![9, 9]));
}

/// Costs of which each stage has its own, and some microbatches; those behind the last have the last.
fn by_stage() -> Costs {
    Costs {
        forward: PerStage(vec![vec![3, 4], vec![1], vec![2, 1, 3]]),
        input: PerStage(vec![vec![1], vec![4, 2]]),
        weight: PerStage(vec![vec![2], vec![1, 3], vec![3], vec![1]]),
        transfer: PerStage(vec![vec![0, 1], vec![2], vec![1, 0, 3]]),
    }
}

/// A second simulator: time goes by unit after unit, and each rank looks whether it can begin.
fn by_the_clock(schedule: &Schedule, costs: &Costs, slots: Option<u32>) -> Vec<Vec<Span>> {
    let rank_of = |stage: u32| schedule.stage_to_rank().get(stage as usize).copied();
    // What an action makes: forward or not, stage, microbatch.
    type Made = (bool, u32, u32);
    let made = |action: Action| match action.op {
        Op::Forward => Some((true, action.stage, action.microbatch)),
        Op::BackwardInput | Op::Backward => Some((false, action.stage, action.microbatch)),
        _ => None,
    };
    let next = |(forward, stage, microbatch): Made, sign: bool| {
        let next = match forward == sign {
            true => Some(stage + 1).filter(|next| *next < schedule.stages()),
            false => stage.checked_sub(1),
        };
        next.map(|next| (forward, next, microbatch))
    };
    let mut ends: BTreeMap<Made, u64> = BTreeMap::new();
    let mut begun: Vec<Made> = Vec::new();
    let mut spans: Vec<Vec<Span>> = schedule.ranks().iter().map(|_| Vec::new()).collect();
    for now in 0..10_000 {
        for (rank, steps) in schedule.ranks().iter().enumerate() {
            let Some(step) = steps.get(spans[rank].len()) else {
                continue;
            };
            let is_here = |stage: u32| rank_of(stage) == Some(rank as u32);
            let has_arrived = |action: Action| {
                let Some(input) = made(action).and_then(|made| next(made, false)) else {
                    return true;
                };
                let transfer = if is_here(input.1) {
                    0
                } else {
                    costs.transfer.of(input.1, input.2)
                };
                ends.get(&input).is_some_and(|end| end + transfer <= now)
            };
            let has_room = |action: Action| {
                let Some(made) = made(action) else {
                    return true;
                };
                let Some(to) = next(made, true).filter(|to| !is_here(to.1)) else {
                    return true;
                };
                let of_edge = begun.iter().filter(|it| (it.0, it.1) == (made.0, made.1));
                let is_used = |it: &&Made| {
                    let end = ends.get(&(to.0, to.1, it.2));
                    end.is_some_and(|end| *end <= now)
                };
                let taken = of_edge.filter(|it| !is_used(it)).count();
                slots.is_none_or(|slots| taken < slots as usize)
            };
            let is_free = spans[rank].last().is_none_or(|span| span.end <= now);
            let mut actions = step.actions();
            if !is_free || !actions.all(|action| has_arrived(action) && has_room(action)) {
                continue;
            }
            let end = now + costs.step(rank as u32, *step);
            spans[rank].push(Span { start: now, end });
            for made in step.actions().filter_map(made) {
                begun.push(made);
                ends.insert(made, end);
            }
        }
        let done = spans.iter().map(Vec::len);
        if done.eq(schedule.ranks().iter().map(Vec::len)) {
            return spans;
        }
    }
    panic!("deadlock");
}

/// Forward or not, and the sending stage.
type Edge = (bool, u32);

/// By edge and by sending rank: the most slots that are taken at a time.
fn taken(schedule: &Schedule, spans: &[Vec<Span>]) -> (Vec<(Edge, u32)>, Vec<u32>) {
    let rank_of = |stage: u32| schedule.stage_to_rank()[stage as usize];
    let steps = schedule.ranks().iter().flatten();
    let all = steps.zip(spans.iter().flatten());
    let actions = all.flat_map(|(step, span)| step.actions().map(|action| (action, *span)));
    let actions: Vec<(Action, Span)> = actions
        .filter(|(action, _)| action.op != Op::BackwardWeight)
        .collect();
    // Begin and end of each message.
    let mut lives: BTreeMap<Edge, Vec<(u64, u64)>> = BTreeMap::new();
    for (maker, made) in &actions {
        for (user, used) in &actions {
            let is_forward = maker.op == Op::Forward;
            let is_next = match is_forward {
                true => maker.stage + 1 == user.stage,
                false => maker.stage == user.stage + 1,
            };
            let is_same = maker.microbatch == user.microbatch;
            let is_apart = rank_of(maker.stage) != rank_of(user.stage);
            if is_next && is_same && is_apart && is_forward == (user.op == Op::Forward) {
                let edge = (is_forward, maker.stage);
                lives.entry(edge).or_default().push((made.start, used.end));
            }
        }
    }
    let peak = |lives: &[(u64, u64)]| {
        let at = |now: u64| lives.iter().filter(|it| it.0 <= now && now < it.1).count();
        lives.iter().map(|it| at(it.0) as u32).max().unwrap_or(0)
    };
    let of_rank = |rank: u32| {
        let own = lives.iter().filter(|(edge, _)| rank_of(edge.1) == rank);
        let own = own.flat_map(|(_, lives)| lives.clone());
        peak(&own.collect::<Vec<_>>())
    };
    let ranks = (0..schedule.ranks().len() as u32).map(of_rank).collect();
    let edges = lives.iter().map(|(edge, lives)| (*edge, peak(lives)));
    (edges.collect(), ranks)
}

#[test]
fn a_clock_that_ticks_gives_the_same_times_and_the_same_use_of_slots() {
    for kind in Kind::ALL {
        for (ranks, stages, microbatches) in [(2, 2, 4), (4, 1, 8), (3, 3, 6)] {
            let stages = kind.stages_per_rank().unwrap_or(stages);
            let Ok(built) = Schedule::build(kind, ranks, stages, microbatches) else {
                continue;
            };
            let least = built.check(Limits::default()).unwrap().slots_per_edge;
            for costs in [
                costs(1, 1, 1, 0),
                costs(2, 3, 1, 1),
                costs(1, 2, 4, 5),
                by_stage(),
            ] {
                for slots in [None, Some(least), Some(least + 1)] {
                    let found = run(&built, &costs, Limits { slots });
                    let wanted = by_the_clock(&built, &costs, slots);
                    let name = format!("{kind} {ranks} {stages}, {slots:?}, {costs:?}");
                    assert_eq!(found.spans, wanted, "{name}");
                    if slots != Some(least) {
                        continue;
                    }
                    let (edges, ranks) = taken(&built, &wanted);
                    let uses = found.report.edges.iter();
                    let mut uses: Vec<(Edge, u32)> = uses
                        .map(|edge| ((edge.way == Way::Forward, edge.from), edge.peak))
                        .collect();
                    uses.sort_unstable();
                    assert_eq!(uses, edges, "{name}");
                    assert_eq!(found.report.outstanding_sends, ranks, "{name}");
                }
            }
        }
    }
}

#[test]
fn more_slots_take_no_more_time() {
    let built = build(Kind::LoopedBfs, 4, 2, 12);
    let least = built.check(Limits::default()).unwrap().slots_per_edge;
    let takes = |limits| run(&built, &costs(2, 2, 2, 3), limits).makespan;
    let slots = least..=12;
    let times: Vec<u64> = slots.map(|slots| takes(Limits::slots(slots))).collect();
    assert!(times.is_sorted_by(|few, many| few >= many), "{times:?}");
    assert!(times[0] > times[times.len() - 1], "{times:?}");
    assert_eq!(times[times.len() - 1], takes(Limits::default()));
    let too_few = built.simulate(&Costs::default(), Limits::slots(least - 1));
    assert!(too_few.is_err());
}

#[test]
fn each_action_and_each_message_may_take_its_own_time() {
    struct Slow;
    impl Cost for Slow {
        fn action(&self, rank: u32, action: Action) -> u64 {
            match (rank, action.op, action.microbatch) {
                (1, Op::Forward, 1) => 100,
                _ => 10,
            }
        }

        fn transfer(&self, message: Message) -> u64 {
            u64::from(message.microbatch) + 2 * u64::from(message.from)
        }
    }
    let gpipe = build(Kind::GPipe, 2, 1, 2);
    let timeline = run(&gpipe, &Slow, Limits::default());
    let begins = |rank: usize| {
        let spans = timeline.spans[rank].iter();
        spans.map(|span| span.start).collect::<Vec<_>>()
    };
    assert_eq!(begins(0), [0, 10, 133, 144]);
    assert_eq!(begins(1), [10, 21, 121, 131]);
    // A function alone: messages take no time.
    let same = |_: u32, _: Action| 10;
    assert_eq!(run(&gpipe, &same, Limits::default()).makespan, 60);
}

#[test]
fn what_computes_nothing_takes_no_time_and_an_overlapped_pair_takes_both() {
    let sharded = "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD";
    let pair = "0F0,1F0,1B0,0F1,(1F1;0B0)OVERLAP_F_B,1B1,0B1";
    for (rows, makespan) in [(sharded, 12), (pair, 4 * 12)] {
        let schedule = Schedule::parse_csv(rows).unwrap();
        let timeline = run(&schedule, &costs(4, 5, 3, 9), Limits::default());
        assert_eq!((timeline.makespan, timeline.idle), (makespan, vec![0]));
    }
}

#[test]
fn times_past_64_bits_are_refused() {
    let built = build(Kind::GPipe, 2, 1, 2);
    let refused = |costs: Costs| built.simulate(&costs, Limits::default()).unwrap_err();
    assert_eq!(
        refused(costs(u64::MAX / 2, 1, 1, 0)).to_string(),
        "1F1 (rank 1, action 2) ends later than 64 bits can count; give the costs in a larger unit"
    );
    for costs in [costs(1, u64::MAX, u64::MAX, 0), costs(1, 1, 1, u64::MAX)] {
        assert!(matches!(refused(costs), Flaw::TooLong(_)));
    }
}
