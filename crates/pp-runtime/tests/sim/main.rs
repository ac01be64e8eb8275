//! Every interleaving of small pipelines: the core of each rank, edges, slots, devices, a drain, cuts, and ranks that die
//! at any moment.
//!
//! The [`world`] delivers frames and carries out actions in every possible order. A state that was
//! seen is not walked again, so the walk is complete and ends. `cargo xtask mutants` puts mistakes
//! into the core, and names the test that finds each.
//!
//! Where a rank dies each other hears of it at a moment of its own, drops its edges with all that is on them, and meets
//! the others again, as `pp_job` has it. A rank that hears that the source needs no other leaves instead.

mod fixed;
mod live;
mod world;

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use pp_contract::{CacheEpoch, ChunkIndex, Rank};
use pp_runtime::core::{Cut, Decision, ONWARD, RankCore, StageFacts, Ticket, stages_of};

use crate::world::{Device, Map, Shape, Step, World, print_of};

/// How each state was reached: from which state, by which step. Printed where a property is broken.
struct Ways {
    steps: Vec<(usize, Option<Step>)>,
    at: usize,
}

impl Drop for Ways {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let mut way = Vec::new();
        let mut at = self.at;
        while let (from, Some(step)) = self.steps[at] {
            way.push(step);
            at = from;
        }
        for step in way.iter().rev() {
            println!("    {step:?}");
        }
    }
}

/// Walks everything reachable; gives the number of states and of ends.
fn explore(shape: &Shape) -> (usize, usize) {
    let map = Map::new(shape.clone());
    let mut seen = HashSet::new();
    let mut ends = 0;
    let first = World::new(&map);
    seen.insert(print_of(&first));
    let mut ways = Ways {
        steps: vec![(0, None)],
        at: 0,
    };
    let mut open = vec![(0, first)];
    while let Some((at, world)) = open.pop() {
        ways.at = at;
        world.check(&map);
        let (here, steps) = (print_of(&world), world.steps(&map));
        if steps.is_empty() {
            ends += 1;
            world.check_end(&map);
        }
        for step in steps {
            ways.steps.push((at, Some(step)));
            ways.at = ways.steps.len() - 1;
            let next = world.after(&map, step);
            let print = print_of(&next);
            assert_ne!(print, here, "each step changes something");
            match seen.insert(print) {
                true => open.push((ways.at, next)),
                false => drop(ways.steps.pop()),
            }
        }
    }
    (seen.len(), ends)
}

fn shape(pipeline: &str, depth: u8, device: Device, cuts: &str) -> Shape {
    let cut = |cut| match cut {
        '-' => Cut::None,
        'f' => Cut::Flush,
        'h' => Cut::Hard,
        _ => unreachable!(),
    };
    Shape {
        pipeline: pipeline.parse().expect("a pipeline"),
        depth,
        device,
        deaths: 0,
        may_drain: false,
        may_abort: false,
        script: cuts.chars().map(cut).collect(),
        orders: Vec::new(),
        slots: None,
    }
}

fn walk(shape: &Shape) -> usize {
    let began = std::time::Instant::now();
    let (states, ends) = explore(shape);
    let cuts = shape.script.iter().map(|cut| match cut {
        Cut::None => '-',
        Cut::Flush => 'f',
        Cut::Hard => 'h',
    });
    println!(
        "{states:>9} states {ends:>4} ends {:>6} ms  {} depth {} {:?} {}{}{}{}",
        began.elapsed().as_millis(),
        shape.pipeline,
        shape.depth,
        shape.device,
        cuts.collect::<String>(),
        if shape.may_drain { " drain" } else { "" },
        if shape.may_abort { " abort" } else { "" },
        match shape.deaths {
            0 => String::new(),
            deaths => format!(" {deaths} deaths"),
        },
    );
    states
}

const CHAINS: [&str; 7] = [
    "a@0 -> b@0",
    "a@0 -> b@1",
    "a@0 -> b@1 -> c@0",
    "a@0 -> b@1 -> c@2",
    "a@0 -> b@1 -> c@1 -> d@0",
    "a@0 -> b@1 -> c@0 -> d@1",
    "a@0 -> b@1 -> c@2 -> d@0",
];
const RINGS: [&str; 4] = [
    "a@0 -> (b@1)*3 -> c@0",
    "a@0 -> (b@1 -> c@2)*2 -> d@0",
    "a@0 -> (b@1 -> c@1)*2 -> d@0",
    "a@0 -> (b@1 -> c@0)*2 -> d@2",
];
const DEVICES: [Device; 5] = [
    Device::None,
    Device::Working,
    Device::Moving,
    Device::Both,
    Device::InOrder,
];
/// Pipelines with a rank that may be replaced.
const REPLACED: [&str; 9] = [
    "a@0 -> b@1 -> c@0",
    "a@0 -> b@1 -> c@2",
    "a@0 -> b@1 -> c@1 -> d@0",
    "a@0 -> b@1 -> c@2 -> d@0",
    "a@0 -> b@0 -> c@1 -> d@2",
    "a@0 -> b@0 -> c@1 -> d@0",
    "a@0 -> (b@1 -> c@2)*2 -> d@0",
    "a@0 -> (b@1 -> c@1)*2 -> d@0",
    "a@0 -> (b@1 -> c@0)*2 -> d@2",
];
/// Stages that several ranks run together: with rank 0 and without, and with a member that works on a later stage too.
const GROUPS: [&str; 7] = [
    "a@0 -> b@0+1 -> c@0",
    "a@0 -> b@1+0 -> c@1",
    "a@0 -> b@1+2 -> c@0",
    "a@0 -> b@1+2 -> c@2 -> d@0",
    "a@0 -> b@1+2 -> c@3",
    "a@0 -> b@1+2 -> c@3 -> d@2",
    "a@0 -> b@1+2+3 -> c@0",
];

/// All combinations.
fn cases(pipelines: &[&str], depths: &[u8], devices: &[Device], cuts: &[&str]) -> Vec<Shape> {
    let mut all = Vec::new();
    for pipeline in pipelines {
        for depth in depths {
            for device in devices {
                let shape = |cuts: &&str| shape(pipeline, *depth, *device, cuts);
                all.extend(cuts.iter().map(shape));
            }
        }
    }
    all
}

fn drained(mut cases: Vec<Shape>) -> Vec<Shape> {
    cases.iter_mut().for_each(|case| case.may_drain = true);
    cases
}

fn aborted(mut cases: Vec<Shape>) -> Vec<Shape> {
    cases.iter_mut().for_each(|case| case.may_abort = true);
    cases
}

fn dying(deaths: u8, mut cases: Vec<Shape>) -> Vec<Shape> {
    cases.iter_mut().for_each(|case| case.deaths = deaths);
    cases
}

/// Walks these cases, as many at a time as there are cores, and prints how many states they have; there must be so many
/// at least.
fn walk_all(least: usize, cases: Vec<Shape>) {
    let (next, states) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            states.fetch_add(walk(case), Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let states = states.into_inner();
    println!("{states} states in {} cases", cases.len());
    assert!(states > least, "the walk is not complete: {states} states");
}

#[test]
fn chains_end_well() {
    let cuts = ["---", "-f-h", "-h-"];
    walk_all(25_000, cases(&CHAINS, &[1, 2, 3], &DEVICES[..1], &cuts));
    walk_all(70_000, cases(&CHAINS, &[1, 2], &DEVICES[1..], &cuts[1..]));
    // Chunks that a cut overtakes wait behind one that is worked on.
    walk_all(3_000, cases(&CHAINS, &[3], &DEVICES[1..2], &["--h"]));
}

#[test]
fn rings_end_well() {
    let cuts = ["---", "-h-"];
    walk_all(30_000, cases(&RINGS, &[1, 2, 3], &DEVICES[..1], &cuts));
    walk_all(100_000, cases(&RINGS, &[1, 2], &DEVICES[1..], &cuts));
}

#[test]
fn groups_end_well() {
    let cuts = ["---", "-f-h", "-h-"];
    walk_all(150_000, cases(&GROUPS, &[1, 2, 3], &DEVICES[..1], &cuts));
    walk_all(
        50_000,
        cases(&GROUPS[..4], &[1, 2], &DEVICES[1..], &cuts[2..]),
    );
    walk_all(
        4_000,
        cases(&GROUPS[4..], &[1, 2], &DEVICES[4..], &cuts[..1]),
    );
    let others = cases(&GROUPS[..4], &[2], &DEVICES[..2], &cuts[2..]);
    walk_all(31_000, drained(others.clone()));
    walk_all(350_000, aborted(others));
}

#[test]
fn members_that_die_do_no_harm() {
    let cuts = ["---", "-h-"];
    walk_all(
        1_000_000,
        dying(1, cases(&GROUPS[2..], &[1], &DEVICES, &cuts[1..])),
    );
    walk_all(
        80_000,
        dying(1, cases(&GROUPS[2..4], &[2], &DEVICES[..1], &cuts)),
    );
    walk_all(
        40_000,
        dying(1, cases(&GROUPS[2..4], &[2], &DEVICES[4..], &["--"])),
    );
    walk_all(
        55_000,
        dying(2, cases(&GROUPS[2..4], &[1], &DEVICES[..2], &["--"])),
    );
    let drains = cases(&GROUPS[2..4], &[1], &DEVICES[..1], &cuts[1..]);
    walk_all(40_000, drained(dying(1, drains.clone())));
    walk_all(109_000, aborted(dying(1, drains)));
}

#[test]
fn drains_and_aborts_end_well() {
    let chains = cases(&CHAINS, &[2], &DEVICES[..2], &["-h-"]);
    walk_all(20_000, drained(chains.clone()));
    walk_all(20_000, aborted(chains));
    let rings = cases(&RINGS, &[2], &DEVICES[..1], &["-h-"]);
    walk_all(15_000, drained(rings.clone()));
    walk_all(15_000, aborted(rings));
    let dies = cases(&REPLACED, &[1], &DEVICES[1..2], &["--"]);
    walk_all(10_000, aborted(dying(1, dies)));
}

#[test]
fn a_death_at_any_moment_does_no_harm() {
    let at_once = cases(&REPLACED, &[1, 2], &DEVICES[..1], &["---", "-h-", "f-f"]);
    walk_all(250_000, dying(1, at_once));
    let working = cases(&REPLACED, &[1, 2], &DEVICES[1..2], &["---", "-h-"]);
    walk_all(100_000, dying(1, working));
    let cut_twice = cases(
        &REPLACED[..3],
        &[2],
        &DEVICES[1..2],
        &["-h-", "-f-", "-hh-"],
    );
    walk_all(10_000, dying(1, cut_twice));
    // Two stages of one rank: what the sink has waits before the first when no other rank is needed any more.
    let needless = [
        "a@0 -> b@1 -> c@0 -> d@0",
        "a@0 -> b@1 -> c@2 -> d@2 -> e@0",
    ];
    let needless = cases(&needless, &[1], &DEVICES[3..4], &["--"]);
    walk_all(1_000, dying(2, needless));
    // Slots of a rank that lives on are still in use.
    let survivor = ["a@0 -> b@1 -> c@1 -> d@2 -> e@0"];
    let survivor = cases(&survivor, &[1], &DEVICES[1..2], &["--"]);
    walk_all(1_000, dying(1, survivor));
    let others = cases(&REPLACED, &[1], &DEVICES[2..], &["-h-"]);
    walk_all(25_000, dying(1, others));
}

#[test]
fn two_deaths_or_a_death_and_a_drain_do_no_harm() {
    let at_once = cases(&REPLACED, &[2], &DEVICES[..1], &["---"]);
    walk_all(200_000, dying(2, at_once));
    let cuts = cases(&REPLACED[..6], &[2], &DEVICES[..1], &["-h-"]);
    walk_all(250_000, dying(2, cuts));
    let working = cases(&REPLACED[..2], &[2], &DEVICES[1..2], &["---", "-h-"]);
    walk_all(50_000, dying(2, working));
    let longer = cases(&REPLACED[3..], &[1], &DEVICES[1..2], &["--"]);
    walk_all(10_000, dying(2, longer));
    let drains = cases(&REPLACED[..6], &[2], &DEVICES[..1], &["-h-"]);
    walk_all(80_000, drained(dying(1, drains)));
}

#[test]
#[ignore = "minutes long: cargo xtask walk"]
fn larger_walk() {
    let cuts = ["----", "-h--", "--h-", "-hh-", "-f-h", "-hfh"];
    let chains = cases(&CHAINS, &[1, 2, 3], &DEVICES, &cuts);
    walk_all(5_000_000, drained(chains));
    let rings = cases(&RINGS, &[1, 2], &DEVICES[..3], &cuts[..3]);
    walk_all(200_000, drained(rings));
    let deaths = cases(&REPLACED[..6], &[1, 2], &DEVICES[..4], &cuts);
    walk_all(2_000_000, dying(1, deaths));
    let deaths = cases(&REPLACED, &[1, 2], &DEVICES, &["---", "-h-"]);
    walk_all(1_000_000, dying(1, deaths));
    let deaths = cases(&REPLACED, &[1, 2], &DEVICES[..1], &["---", "-h-"]);
    walk_all(400_000, drained(dying(1, deaths.clone())));
    walk_all(400_000, aborted(dying(1, deaths)));
    let deaths = cases(&REPLACED[..6], &[1, 2], &DEVICES[..2], &["---", "-h-"]);
    walk_all(1_000_000, dying(2, deaths));
    let deaths = cases(&REPLACED[6..], &[1, 2], &DEVICES[..1], &["---", "-h-"]);
    walk_all(500_000, dying(2, deaths));
    let groups = cases(&GROUPS, &[1, 2, 3], &DEVICES, &cuts[1..5]);
    walk_all(1_000_000, drained(groups));
    let groups = cases(&GROUPS, &[1, 2], &DEVICES[..2], &["-h-"]);
    walk_all(500_000, aborted(groups));
    let groups = cases(&GROUPS[2..6], &[1, 2], &DEVICES, &["---", "-h-"]);
    walk_all(1_000_000, dying(1, groups));
    let groups = cases(&GROUPS[2..], &[1], &DEVICES, &["--", "-h"]);
    walk_all(300_000, dying(2, groups.clone()));
    walk_all(50_000, drained(dying(1, groups.clone())));
    walk_all(50_000, aborted(dying(1, groups)));
}

/// A core that nothing was asked of yet, and what it is told where every output is free.
fn core_of(pipeline: &str, rank: u32) -> (RankCore<u64, (), ()>, Vec<StageFacts>) {
    let pipeline = pipeline.parse().expect("a pipeline");
    let stages = stages_of(&pipeline, Rank::new(rank));
    let facts = StageFacts {
        is_here: [true; 2],
        is_free: [true; 2],
    };
    (RankCore::new(stages.clone(), 1), vec![facts; stages.len()])
}

fn ticket(chunk: u64) -> Ticket {
    Ticket {
        chunk: ChunkIndex::new(chunk),
        epoch: CacheEpoch::new(0),
        attempt: 0,
        lap: 0,
        way_out: (ONWARD, 0),
        is_stale: false,
    }
}

#[test]
fn a_rank_refuses_more_chunks_than_the_depth() {
    let (mut core, _) = core_of("a@0 -> b@1 -> c@0", 1);
    core.handle_arrival(0, ONWARD, ticket(0), ()).unwrap();
    let error = core.handle_arrival(0, ONWARD, ticket(1), ()).unwrap_err();
    let said = "chunk 1 came although 1 chunks wait already";
    assert_eq!(error.to_string(), said);
}

#[test]
fn an_acceptance_that_was_not_due_is_refused() {
    let (mut core, facts) = core_of("a@0 -> b@1 -> c@0", 0);
    let accept = |core: &mut RankCore<u64, (), ()>, chunk| {
        let accepted = core.handle_accepted(ChunkIndex::new(chunk), 0, false);
        accepted.map_err(|error| error.to_string())
    };
    let refused = |chunk, due| Err(format!("chunk {chunk} was accepted where {due} was due"));
    assert_eq!(accept(&mut core, 0), refused(0, "nothing"));
    core.handle_offer(Cut::None);
    let Decision::Build { chunk, epoch, .. } = core.poll(&facts) else {
        panic!("the chunk that was offered is built");
    };
    core.handle_built(chunk, epoch, 7);
    assert_eq!(accept(&mut core, 1), refused(1, "chunk 0"));
    assert_eq!(accept(&mut core, 0), Ok(Some(7)));
    assert_eq!(accept(&mut core, 0), refused(0, "nothing"));
}
