//! A job in a world of its own: every order in which its ranks go on, die, stop and are heard, and in which signals come
//! and time passes. The supervisor's core is the product's; the ranks are as small as their reports allow.

use std::collections::hash_map::DefaultHasher;
use std::collections::{HashSet, VecDeque};
use std::hash::{Hash as _, Hasher as _};
use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use super::core::{Action, Core, Event};
use super::*;
use crate::reports::{Report, Reported, TargetProcess};
use crate::{FRONT, PHASE_B};
use pp_contract::{Fault, FaultKind};

const KILLED: i32 = 9;
const TERM: u8 = 15;

/// How far a rank has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Step {
    /// A signal ends it.
    Loads,
    /// It takes signals, and waits for the other rank.
    Waits,
    Runs,
    /// The front has everything of Phase B.
    Served,
    /// The process is gone.
    Dead,
}

#[derive(Clone, Debug)]
struct Process {
    pid: u32,
    step: Step,
    is_stopped: bool,
    /// The front has said goodbye to Phase B.
    has_said_goodbye: bool,
    /// Signals that asked for an end.
    asked: u32,
    /// Its exit status was not heard yet.
    unheard: Option<i32>,
}

/// What may still be done to a job.
#[derive(Clone, Copy, Debug, Hash)]
struct Budget {
    kills: u32,
    /// Exits with code 0 in the middle of the work, as a kernel plugin may call it.
    exits: u32,
    stops: u32,
    signals: u32,
    /// Bytes in the pipe that are no report: no rank is heard from then on.
    noise: u32,
    /// Times that pass although something else could happen.
    ticks: u32,
}

#[derive(Clone, Debug)]
struct World {
    core: Core,
    restarts: u32,
    /// The front of a benchmark does not.
    says_served: bool,
    now: Instant,
    ranks: [Process; 2],
    starts: [u32; 2],
    /// Losses of Phase B that the front knows of.
    losses: u32,
    pipe: VecDeque<Reported>,
    left: Budget,
    /// Ranks that something was done to.
    hurt: [bool; 2],
    /// Something was done to Phase B while the front still needed it.
    was_needed: bool,
    /// When the front exited in the middle of its work.
    front_left: Option<Instant>,
    /// When the front ended with its work done.
    front_done: Option<Instant>,
    is_deaf: bool,
    /// By rank: the supervisor killed it while it lived.
    was_killed: [bool; 2],
    killed: Option<Instant>,
}

/// Something that may happen next.
#[derive(Clone, Copy, Debug)]
enum Move {
    GoOn(usize),
    Hear,
    HearEnd(usize),
    Kill(usize),
    Exit(usize),
    Noise,
    Stop(usize),
    Signal,
    Time,
}

impl World {
    fn new(restarts: u32, says_served: bool, left: Budget) -> Self {
        let now = Instant::now();
        let none = Process {
            pid: 0,
            step: Step::Dead,
            is_stopped: false,
            has_said_goodbye: false,
            asked: 0,
            unheard: None,
        };
        let mut world = Self {
            core: Core::new(restarts, Duration::from_secs(60), true, now),
            restarts,
            says_served,
            now,
            ranks: [none.clone(), none],
            starts: [0; 2],
            losses: 0,
            pipe: VecDeque::new(),
            left,
            hurt: [false; 2],
            was_needed: false,
            front_left: None,
            front_done: None,
            is_deaf: false,
            was_killed: [false; 2],
            killed: None,
        };
        world.start(FRONT);
        world.start(PHASE_B);
        world
    }

    fn start(&mut self, rank: Rank) {
        let at = rank.get() as usize;
        assert!(self.ranks[at].step == Step::Dead && self.ranks[at].unheard.is_none());
        self.starts[at] += 1;
        let pid = 100 * (rank.get() + 1) + self.starts[at];
        self.ranks[at] = Process {
            pid,
            step: Step::Loads,
            is_stopped: false,
            has_said_goodbye: false,
            asked: 0,
            unheard: None,
        };
        self.happens(Event::Started(rank, pid));
    }

    fn happens(&mut self, event: Event) {
        for action in self.core.handle(event, self.now) {
            match action {
                Action::Start(rank) => self.start(rank),
                Action::Kill(pid) => {
                    let at = self.place(pid);
                    self.was_killed[at] |= self.ranks[at].step != Step::Dead;
                    self.killed = Some(self.now);
                    self.dies(at, KILLED);
                }
                Action::Pass(pid, signal) => {
                    assert_eq!(signal, TERM);
                    let at = self.place(pid);
                    self.ranks[at].asked += 1;
                    if self.ranks[at].step == Step::Loads && !self.ranks[at].is_stopped {
                        self.dies(at, i32::from(TERM));
                    }
                }
                Action::Ask(_) => panic!("the user did not ask"),
                Action::Say(_) | Action::SayDrain(_) | Action::Log(_) => {}
                Action::NotRecorded(why) => panic!("{why}"),
            }
        }
    }

    fn place(&self, pid: u32) -> usize {
        let place = self.ranks.iter().position(|rank| rank.pid == pid);
        let place = place.expect("a process of this job");
        let rank = &self.ranks[place];
        assert!(
            rank.step != Step::Dead || rank.unheard.is_some(),
            "a signal to a process that was reaped"
        );
        place
    }

    fn dies(&mut self, at: usize, status: i32) {
        if self.ranks[at].step != Step::Dead {
            self.ranks[at].step = Step::Dead;
            self.ranks[at].unheard = Some(status);
        }
    }

    fn reports(&mut self, at: usize, report: Report) {
        let (pid, rank) = (self.ranks[at].pid, Rank::new(at as u32));
        if !self.is_deaf {
            self.pipe.push_back(Reported { pid, rank, report });
        }
    }

    /// It ends because of this fault.
    fn fails(&mut self, at: usize, kind: FaultKind, rank: Rank) {
        self.reports(
            at,
            Report::Exiting(Fault::new(kind, rank, "run", "a fault")),
        );
        self.dies(at, i32::from(crate::error::code_of(kind)) << 8);
    }

    fn can_go_on(&self, at: usize) -> bool {
        let [me, other] = [&self.ranks[at], &self.ranks[1 - at]];
        let has_lost = other.is_stopped || other.step == Step::Dead;
        match me.step {
            _ if me.is_stopped => false,
            Step::Dead => false,
            Step::Loads => true,
            Step::Waits => {
                let ends = me.asked > u32::from(at == 0 && self.losses > 0);
                ends || (at == 0 && other.step == Step::Waits && !has_lost)
            }
            Step::Runs => at == 0 || me.asked > 1 || has_lost || other.has_said_goodbye,
            Step::Served => true,
        }
    }

    /// The next thing that a rank does by itself.
    fn goes_on(&mut self, at: usize) {
        let other = self.ranks[1 - at].clone();
        let peer = Rank::new(1 - at as u32);
        let me = &mut self.ranks[at];
        let has_lost = other.is_stopped || other.step == Step::Dead;
        let why = if other.is_stopped && other.step != Step::Dead {
            FaultKind::TimedOut
        } else {
            FaultKind::PeerDied
        };
        match (me.step, at) {
            (Step::Loads, _) => {
                me.step = Step::Waits;
                self.reports(at, Report::SignalsReady);
            }
            (Step::Waits | Step::Runs, _) if me.asked > 1 => {
                self.fails(at, FaultKind::Interrupted, Rank::new(at as u32));
            }
            // A front that waits for another Phase B drains once that is there.
            (Step::Waits, _) if me.asked > 0 && (at == 1 || self.losses == 0) => {
                self.fails(at, FaultKind::Interrupted, Rank::new(at as u32));
            }
            (Step::Waits, 0) if other.step == Step::Waits && !has_lost => {
                (self.ranks[0].step, self.ranks[1].step) = (Step::Runs, Step::Runs);
                self.reports(0, Report::Connected);
            }
            (Step::Runs, 0) if has_lost && self.losses < self.restarts => {
                self.losses += 1;
                self.ranks[0].step = Step::Waits;
                let fault = Fault::new(why, peer, "run", "a fault");
                self.reports(0, Report::PeerLost(TargetProcess::This(other.pid), fault));
            }
            (Step::Runs, 1) if other.has_said_goodbye => self.dies(at, 0),
            (Step::Runs, _) if has_lost => self.fails(at, why, peer),
            (Step::Runs, 0) => {
                me.step = Step::Served;
                me.has_said_goodbye = true;
                if self.says_served {
                    self.reports(0, Report::Served);
                }
            }
            (Step::Served, _) => {
                let code = if me.asked > 0 {
                    128 + i32::from(TERM)
                } else {
                    0
                };
                self.reports(0, Report::Finished);
                self.front_done = Some(self.now);
                self.dies(0, code << 8);
            }
            (step, _) => unreachable!("{step:?}"),
        }
    }

    fn moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        for at in 0..2 {
            let rank = &self.ranks[at];
            let lives = rank.step != Step::Dead;
            moves.extend(self.can_go_on(at).then_some(Move::GoOn(at)));
            moves.extend(rank.unheard.map(|_| Move::HearEnd(at)));
            moves.extend((lives && self.left.kills > 0).then_some(Move::Kill(at)));
            moves.extend((lives && self.left.exits > 0).then_some(Move::Exit(at)));
            let may_stop = lives && !rank.is_stopped && self.left.stops > 0;
            moves.extend(may_stop.then_some(Move::Stop(at)));
        }
        moves.extend((!self.pipe.is_empty()).then_some(Move::Hear));
        moves.extend((self.left.noise > 0).then_some(Move::Noise));
        moves.extend((self.left.signals > 0).then_some(Move::Signal));
        // What lies in the pipe is read, and an end noticed, long before any deadline.
        let is_heard = self.pipe.is_empty() && self.ranks.iter().all(|rank| rank.unheard.is_none());
        let waits = self.core.due().is_some() && is_heard;
        moves.extend((waits && (self.left.ticks > 0 || moves.is_empty())).then_some(Move::Time));
        moves
    }

    fn make(&mut self, what: Move) {
        match what {
            Move::GoOn(at) => self.goes_on(at),
            Move::Hear => {
                let report = self.pipe.pop_front().expect("there is one");
                self.happens(Event::Reported(report));
            }
            Move::HearEnd(at) => {
                let status = self.ranks[at].unheard.take().expect("it ended");
                let status = Some(std::process::ExitStatus::from_raw(status));
                self.happens(Event::Ended(Rank::new(at as u32), status));
            }
            Move::Kill(at) => {
                self.left.kills -= 1;
                self.hurts(at);
                self.dies(at, KILLED);
            }
            Move::Exit(at) => {
                self.left.exits -= 1;
                self.hurts(at);
                self.front_left = (at == 0).then_some(self.now).or(self.front_left);
                self.dies(at, 0);
            }
            Move::Noise => {
                self.left.noise -= 1;
                self.is_deaf = true;
                self.pipe.clear();
                self.happens(Event::ReportsOver);
            }
            Move::Stop(at) => {
                self.left.stops -= 1;
                self.hurts(at);
                self.ranks[at].is_stopped = true;
            }
            Move::Signal => {
                self.left.signals -= 1;
                // The same signal at once would count as one.
                self.now += Duration::from_millis(60);
                self.happens(Event::Signal(TERM));
            }
            Move::Time => {
                self.left.ticks = self.left.ticks.saturating_sub(1);
                self.now = self.now.max(self.core.due().expect("it waits"));
                for at in 0..2 {
                    let (pid, rank) = (self.ranks[at].pid, Rank::new(at as u32));
                    let rank_lives = self.ranks[at].step != Step::Dead;
                    if rank_lives && !self.ranks[at].is_stopped && !self.is_deaf {
                        let report = Report::Alive;
                        self.happens(Event::Reported(Reported { pid, rank, report }));
                    }
                }
                self.happens(Event::Tick);
            }
        }
    }

    fn hurts(&mut self, at: usize) {
        self.hurt[at] = true;
        self.was_needed |= at == 1 && !self.ranks[0].has_said_goodbye;
    }

    /// Two worlds of one key have the same future.
    fn key(&self, start: Instant) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.now - start).hash(&mut hasher);
        format!("{self:?}").hash(&mut hasher);
        hasher.finish()
    }

    /// What must hold when the supervisor is done.
    fn check(mut self, all: Budget) {
        assert!(
            self.ranks.iter().all(|rank| rank.step == Step::Dead),
            "a rank is left"
        );
        assert_eq!(self.starts[0], 1, "the front has the input");
        let hurt = |left: Budget| left.kills + left.stops + left.exits;
        let losses = hurt(all) - hurt(self.left);
        // A signal may end a Phase B that does not take it yet.
        let needed = (losses + all.signals - self.left.signals).min(self.restarts);
        assert!(
            self.starts[1] <= 1 + needed,
            "a start that nothing asked for"
        );
        if let Some(at) = self.front_left {
            assert!(self.now - at <= Duration::from_secs(1), "nothing follows");
        }
        if let (Some(at), Some(killed), true) = (self.front_done, self.killed, self.was_killed[1])
            && all.signals - self.left.signals < 2
            && !self.hurt[1]
        {
            assert!(
                killed - at >= Duration::from_secs(5),
                "no time for a goodbye"
            );
        }
        while let Some(report) = self.pipe.pop_front() {
            self.core.note(report);
        }
        if self.hurt == [false; 2] && all.signals - self.left.signals < 2 {
            assert!(!self.was_killed[0], "a front that nothing was done to");
            assert!(!self.was_killed[1] || all.ticks > 0, "a calm Phase B");
        }
        let verdict = self.core.verdict();
        let signals = all.signals - self.left.signals;
        // A rank that lets time pass may be too late to ask for another.
        let was_slow = self.left.ticks < all.ticks;
        if let Verdict::Fault(fault, _) = &verdict
            && fault
                .detail
                .as_str()
                .contains("was killed and does not end")
        {
            let since = self.now - self.killed.expect("it was killed");
            assert!(
                was_slow && since >= Duration::from_secs(10),
                "no time to end"
            );
            return;
        }
        match (&verdict, self.hurt, signals) {
            (Verdict::Done, [false, _], _) => {}
            (Verdict::Interrupted(TERM), [false, _], 1..) => {}
            (Verdict::Fault(fault, _), _, 1..) if fault.kind == FaultKind::Interrupted => {}
            (Verdict::Fault(fault, _), [true, false], _) => assert_eq!(fault.rank, FRONT),
            (Verdict::Fault(fault, _), [false, true], _) => {
                assert_eq!(fault.rank, PHASE_B);
                let may_fail = losses > self.restarts || signals > 0 || was_slow;
                assert!(may_fail, "there was a restart left");
                assert!(
                    self.was_needed || !self.says_served,
                    "Phase B was needed no more"
                );
            }
            (Verdict::Fault(..), [true, true], _) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Walks every order of events of a job; the number of states.
fn walk(restarts: u32, says_served: bool, all: Budget) -> usize {
    let first = World::new(restarts, says_served, all);
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

/// Walks jobs that may replace Phase B so many times, and prints how many states there were. `may` says what may happen
/// beside a calm job.
fn walk_all(restarts: std::ops::Range<u32>, may: impl FnOnce(&mut Budget)) {
    let mut all = CALM;
    may(&mut all);
    for restarts in restarts {
        println!(
            "{restarts} restarts, {all:?}: {} states",
            walk(restarts, true, all)
        );
    }
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
}

#[test]
fn a_rank_that_is_stopped_ends_the_job_or_is_replaced() {
    walk_all(0..2, |all| (all.stops, all.ticks) = (1, 1));
}

#[test]
fn a_front_that_is_not_heard_any_more_has_done_its_work_if_it_ends_well() {
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
fn a_front_that_does_not_say_that_it_is_served_has_its_time() {
    for (kills, ticks) in [(0, 3), (1, 1)] {
        let states = walk(
            0,
            false,
            Budget {
                kills,
                ticks,
                ..CALM
            },
        );
        println!("{kills} kills: {states} states");
    }
}

/// A Phase B that ended before the ranks met used up the restart, and the front does not know of it.
#[test]
fn a_front_that_asks_for_one_restart_too_many_gives_the_reason() {
    let mut world = World::new(1, true, CALM);
    world.dies(1, KILLED);
    world.make(Move::HearEnd(1));
    assert_eq!(world.starts, [1, 2]);
    world.dies(1, 0);
    world.make(Move::HearEnd(1));
    let fault = Fault::new(FaultKind::PeerDied, PHASE_B, "run", "the connection ended");
    world.reports(0, Report::PeerLost(TargetProcess::Unknown, fault));
    world.make(Move::Hear);
    while !world.core.is_over() {
        let moves = world.moves();
        world.make(*moves.last().expect("it goes on"));
    }
    let Verdict::Fault(fault, None) = world.core.verdict() else {
        panic!("it is no fault");
    };
    let words = "the connection ended; 1 of 1 restarts were used";
    assert!(fault.to_string().contains(words), "{fault}");
}

/// The walk knows no process that takes time to die.
#[test]
fn a_rank_that_was_killed_has_its_time_to_end() {
    let mut world = World::new(0, true, Budget { signals: 2, ..CALM });
    world.make(Move::GoOn(0));
    world.make(Move::GoOn(1));
    world.make(Move::Signal);
    world.make(Move::Signal);
    while world.was_killed != [true; 2] {
        world.make(Move::Time);
    }
    world.make(Move::HearEnd(0));
    for (seconds, is_over) in [(9, false), (11, true)] {
        let later = world.now + Duration::from_secs(seconds);
        world.core.handle(Event::Tick, later);
        assert_eq!(world.core.is_over(), is_over, "after {seconds} s");
    }
}
