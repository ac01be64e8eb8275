//! Every order in which two ranks load, exchange items, hand over, run, fail and close, in which messages are heard, ranks
//! die or stop, and time passes.

mod world;

use std::collections::HashSet;
use std::time::{Duration, Instant};

use pp_contract::{CacheEpoch, Fault, FaultKind, Rank};
use pp_transport::control::{Message, Vitals};

use self::world::Harm::{self, Busy, Kill, Raise, Signal, Sleep, Stop, Tick};
use self::world::World;
use super::core::{Core, Effect, Event};

/// Walks every order of events; the number of states.
fn walk(beats: bool, lives_on: bool, all: &[Harm]) -> usize {
    let first = World::new(Instant::now(), beats, lives_on, all);
    let mut seen = HashSet::from([first.key()]);
    let mut open = vec![(first, Vec::new())];
    while let Some((world, path)) = open.pop() {
        if world.is_over() {
            world.check(all);
            continue;
        }
        let moves = world.moves();
        let is_stuck = moves.is_empty() || path.len() > 200;
        assert!(!is_stuck, "it hangs: {path:?}\n{world:#?}");
        for what in moves {
            let mut path = path.clone();
            path.push(what);
            let made = std::panic::catch_unwind(|| {
                let mut next = world.clone();
                next.make(what);
                next
            });
            let Ok(next) = made else {
                panic!("{path:?}\n{world:#?}");
            };
            if seen.insert(next.key()) {
                open.push((next, path));
            }
        }
    }
    seen.len()
}

/// Walks with a rank that ends when its peer is lost, with one that lives on, and without heartbeats; prints how many
/// states there were.
fn walk_all(all: &[Harm]) {
    let may = |harm| all.contains(&harm);
    for (beats, lives_on) in [(true, false), (true, true), (false, false)] {
        // Without heartbeats a stopped peer is waited for.
        if (!lives_on || may(Kill) || may(Stop) || may(Raise)) && (beats || !may(Stop)) {
            let states = walk(beats, lives_on, all);
            println!("heartbeats: {beats}, lives on: {lives_on}, {all:?}: {states} states");
        }
    }
}

#[test]
#[ignore = "minutes long: cargo xtask walk"]
fn larger_walk() {
    walk_all(&[Raise, Kill, Stop, Signal, Tick, Tick]);
    walk_all(&[Raise, Kill, Busy, Signal, Tick, Tick]);
    walk_all(&[Kill, Sleep, Signal, Tick, Tick, Tick]);
}

#[test]
fn ranks_that_are_left_in_peace_end_well() {
    walk_all(&[Tick; 4]);
}

#[test]
fn a_rank_that_is_killed_ends_the_other_within_its_grace() {
    walk_all(&[Kill, Tick, Tick, Tick]);
}

#[test]
fn a_rank_that_is_stopped_is_lost_and_one_that_goes_on_is_not() {
    walk_all(&[Stop, Tick, Tick, Tick, Tick]);
}

#[test]
fn a_machine_that_slept_has_no_dead_peer() {
    walk_all(&[Sleep, Tick, Tick]);
}

#[test]
fn a_drain_reaches_the_switches_of_both_ranks() {
    walk_all(&[Signal, Tick, Tick]);
    walk_all(&[Signal, Kill]);
    walk_all(&[Signal, Busy, Tick]);
}

#[test]
fn the_first_fault_is_told_and_ends_both_ranks() {
    walk_all(&[Raise, Raise, Tick]);
    walk_all(&[Raise, Kill, Tick]);
    walk_all(&[Raise, Stop]);
    walk_all(&[Raise, Signal]);
}

#[test]
fn a_peer_that_was_busy_is_told_again() {
    walk_all(&[Raise, Busy, Tick]);
}

/// It wakes up for its heartbeats, and late by less than one.
#[test]
fn silence_that_a_ranks_own_sleep_explains_is_no_fault() {
    const BEAT: Duration = Duration::from_millis(100);
    for (late, silent_for) in [(0, 300), (20, 360), (80, 540)] {
        let start = Instant::now();
        let mut core: Core<u8> = Core::new([Rank::new(1)], Some(BEAT), BEAT, start);
        let mut now = start;
        core.handle(Event::Tick, now);
        let fault = loop {
            now += BEAT + Duration::from_millis(late);
            core.handle(Event::Tick, now);
            if let Some(fault) = core.take_fault() {
                break fault;
            }
        };
        assert_eq!(now - start, Duration::from_millis(silent_for));
        let text = fault.to_string();
        assert!(
            text.contains("overloaded? Then raise PP_HEARTBEAT_MS"),
            "{text}"
        );
    }
}

fn fault(rank: u32) -> Fault {
    Fault::new(FaultKind::PeerDied, Rank::new(rank), "watch", "gone")
}

/// A core that runs beside a driver, with peers 1 and 2.
fn running(now: Instant) -> Core<u8> {
    let grace = Duration::from_secs(1);
    let mut core = Core::new([1, 2].map(Rank::new), None, grace, now);
    assert_eq!(core.hand_over(None), Ok(None));
    core
}

#[test]
fn a_drain_or_fault_from_one_peer_goes_to_the_others() {
    let now = Instant::now();
    let mut core = running(now);
    let lost = core.handle(Event::Lost(0, fault(1)), now);
    assert_eq!(lost, [Effect::LosePeer(fault(1))]);
    let by = now + Duration::from_millis(50);
    let told = core.handle(Event::Raised(fault(1)), now);
    let abort = Effect::Send(1, Message::Abort(fault(1)), by);
    assert_eq!(told, [Effect::Record(fault(1)), Effect::Wake, abort]);
    let mut core = running(now);
    let asked = core.handle(Event::Said(1, Message::Drain(15)), now);
    assert_eq!(asked, [Effect::RequestDrain(15)]);
    let told = core.handle(Event::Draining(15), now);
    assert_eq!(
        told,
        [0, 1].map(|at| Effect::Send(at, Message::Drain(15), by))
    );
}

#[test]
fn a_cut_that_a_peer_did_not_take_is_told_again() {
    let now = Instant::now();
    let mut core = running(now);
    let told = |effects: Vec<Effect<u8>>| {
        let told = effects.into_iter().filter_map(|effect| match effect {
            Effect::Send(at, Message::Cut(epoch), _) => Some((at, epoch.get())),
            _ => None,
        });
        told.collect::<Vec<_>>()
    };
    let [first, second] = [1, 2].map(CacheEpoch::new);
    assert_eq!(told(core.handle(Event::Cut(first), now)), [(0, 1), (1, 1)]);
    let unsent = Event::Unsent(1, Message::Cut(first));
    assert_eq!(told(core.handle(unsent, now)), []);
    assert_eq!(told(core.handle(Event::Tick, now)), [(1, 1)]);
    // The newest cut is all that it has to know.
    let unsent = Event::Unsent(1, Message::Cut(first));
    assert_eq!(told(core.handle(unsent, now)), []);
    assert_eq!(told(core.handle(Event::Cut(second), now)), [(0, 2), (1, 2)]);
    assert_eq!(told(core.handle(Event::Tick, now)), []);
}

#[test]
fn a_cut_and_an_end_that_come_while_a_rank_is_set_up_reach_its_driver() {
    let now = Instant::now();
    let mut core = Core::<u8>::new([Rank::new(0)], None, Duration::ZERO, now);
    let epoch = CacheEpoch::new(1);
    for message in [Message::Cut(epoch), Message::Served, Message::Bye] {
        assert_eq!(core.handle(Event::Said(0, message), now), []);
    }
    assert_eq!(core.hand_over(None), Ok(None));
    let heard = core.handle(Event::Tick, now);
    let left = Effect::PeerLeft(Rank::new(0));
    assert_eq!(heard, [Effect::Cut(epoch), Effect::Served, left]);
    assert_eq!(core.handle(Event::Tick, now), []);
}

#[test]
fn vital_signs_are_asked_for_while_somebody_looks_and_a_peer_that_is_set_up_hears_the_latest_word()
{
    let now = Instant::now();
    let mut core = running(now);
    let asked = |effects: Vec<Effect<u8>>| {
        let mut asked = effects.into_iter().filter_map(|effect| match effect {
            Effect::Send(0, Message::Ask(is_on), _) => Some(is_on),
            _ => None,
        });
        asked.next()
    };
    assert_eq!(asked(core.handle(Event::Watched(false), now)), None);
    assert_eq!(asked(core.handle(Event::Watched(true), now)), Some(true));
    assert_eq!(asked(core.handle(Event::Watched(true), now)), None);
    let unsent = Event::Unsent(0, Message::Ask(true));
    assert_eq!(asked(core.handle(unsent, now)), None);
    assert_eq!(asked(core.handle(Event::Tick, now)), Some(true));
    assert_eq!(asked(core.handle(Event::Watched(false), now)), Some(false));
    let vitals = Vitals::default();
    let said = Event::Said(0, Message::Vitals(vitals));
    assert!(core.handle(said, now).contains(&Effect::Vitals(0, vitals)));

    let mut late = Core::<u8>::new([Rank::new(0)], None, Duration::ZERO, now);
    for is_on in [true, false, true] {
        assert_eq!(late.handle(Event::Said(0, Message::Ask(is_on)), now), []);
    }
    assert_eq!(late.hand_over(None), Ok(None));
    let say = || Event::Vitals(vitals);
    assert_eq!(late.handle(Event::Tick, now), [Effect::Ask(true)]);
    // Nothing waits for it: neither a heartbeat, nor a rank that is not rank 0.
    let sent = [Effect::Send(0, Message::Vitals(vitals), now)];
    assert_eq!(late.handle(say(), now), sent);
    assert_eq!(core.handle(say(), now), []);
}

#[test]
fn a_peer_that_sends_what_is_not_due_or_more_than_is_taken_is_at_fault() {
    let now = Instant::now();
    let mut core = Core::new([Rank::new(1)], None, Duration::ZERO, now);
    for item in 0..8 {
        core.handle(Event::Item(0, item), now);
        assert_eq!(core.clone().take_fault(), None);
    }
    let early = core.clone().hand_over(None).unwrap_err();
    core.handle(Event::Item(0, 8), now);
    let late = core.take_fault().unwrap();
    let hello = Event::Said(0, Message::Hello(b"again"));
    let [Effect::LosePeer(again)] = &running(now).handle(hello, now)[..] else {
        panic!("it is no fault");
    };
    for fault in [&early, &late, again] {
        assert_eq!(
            (fault.kind, fault.rank),
            (FaultKind::PeerMisbehaved, Rank::new(1))
        );
    }
    assert_eq!(core.take(0), Some(Ok(0)));
}
