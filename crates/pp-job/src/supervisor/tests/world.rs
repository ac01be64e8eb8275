//! The processes of a small job, and what may happen to them.

mod check;

use std::collections::VecDeque;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank, WorldSize};

use crate::reports::{Report, Reported, TargetProcess};
use crate::supervisor::core::Core;
use crate::supervisor::events::{Action, Event, Terms};

pub(super) const KILLED: i32 = 9;
const TERM: u8 = 15;

/// How far a rank has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Step {
    /// A signal ends it.
    Loads,
    /// It takes signals, and waits for the other ranks.
    Waits,
    Runs,
    /// Rank 0 has everything of the others.
    Served,
    /// Another rank has done its part, and its program goes on.
    Left,
    /// The process is gone.
    Dead,
}

#[derive(Clone, Debug)]
struct Process {
    pid: u32,
    step: Step,
    is_stopped: bool,
    /// Rank 0 has said goodbye to the others.
    has_said_goodbye: bool,
    /// Signals that asked for an end.
    asked: u32,
    /// Its channels have ended, and its process will with this status.
    ends: Option<i32>,
    /// Its exit status was not heard yet.
    unheard: Option<i32>,
    /// The supervisor killed it while it lived.
    by_us: bool,
    /// What a person must be told where it was ended here: if it is started again, and if the job ends for it.
    fate: Option<[&'static str; 2]>,
}

/// What may still be done to a job.
#[derive(Clone, Copy, Debug, Hash)]
pub(super) struct Budget {
    pub(super) kills: u32,
    /// Exits with code 0 in the middle of the work, as a kernel plugin may call it.
    pub(super) exits: u32,
    pub(super) stops: u32,
    pub(super) signals: u32,
    /// Bytes in the pipe that are no report: no rank is heard from then on.
    pub(super) noise: u32,
    /// Times that pass although something else could happen.
    pub(super) ticks: u32,
}

/// A small job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) world: usize,
    pub(super) restarts: u32,
    /// The ranks that may be started again.
    pub(super) may_restart: &'static [usize],
    /// Rank 0 of a benchmark does not.
    pub(super) says_served: bool,
    /// Programs go on behind the job.
    pub(super) may_go_on: bool,
}

#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) core: Core,
    case: Case,
    pub(super) now: Instant,
    ranks: Vec<Process>,
    pub(super) starts: Vec<u32>,
    /// By rank: the process that rank 0 is connected with.
    met: Vec<Option<u32>>,
    /// Losses that rank 0 knows of.
    losses: u32,
    pipe: VecDeque<Reported>,
    left: Budget,
    /// Ranks that something was done to.
    hurt: Vec<bool>,
    /// Something was done to another rank while rank 0 still needed it.
    was_needed: bool,
    /// When rank 0 exited in the middle of its work.
    rank_0_left: Option<Instant>,
    /// When rank 0 ended with its work done.
    rank_0_done: Option<Instant>,
    is_deaf: bool,
    /// By rank: the supervisor killed it while it lived.
    pub(super) was_killed: Vec<bool>,
    killed: Option<Instant>,
    /// The supervisor killed a program that went on.
    ended_a_program: bool,
}

/// Something that may happen next.
#[derive(Clone, Copy, Debug)]
pub(super) enum Move {
    GoOn(usize),
    Hear,
    End(usize),
    HearEnd(usize),
    Kill(usize),
    Exit(usize),
    Noise,
    Stop(usize),
    Signal,
    Time,
}

impl World {
    pub(super) fn new(case: Case, left: Budget) -> Self {
        let now = Instant::now();
        let none = Process {
            pid: 0,
            step: Step::Dead,
            is_stopped: false,
            has_said_goodbye: false,
            asked: 0,
            ends: None,
            unheard: None,
            by_us: false,
            fate: None,
        };
        let rank = |at: &usize| Rank::new(*at as u32);
        let terms = Terms {
            world: WorldSize::new(case.world as u32).unwrap(),
            restarts: case.restarts,
            may_restart: case.may_restart.iter().map(rank).collect(),
            within: Duration::from_secs(60),
            may_go_on: case.may_go_on,
            watches: true,
            loads_within: Duration::ZERO,
        };
        let mut world = Self {
            core: Core::new(&terms, now),
            case,
            now,
            ranks: vec![none; case.world],
            starts: vec![0; case.world],
            met: vec![None; case.world],
            losses: 0,
            pipe: VecDeque::new(),
            left,
            hurt: vec![false; case.world],
            was_needed: false,
            rank_0_left: None,
            rank_0_done: None,
            is_deaf: false,
            was_killed: vec![false; case.world],
            killed: None,
            ended_a_program: false,
        };
        for at in 0..case.world {
            world.start(at);
        }
        world
    }

    fn start(&mut self, at: usize) {
        let was = &self.ranks[at];
        assert!(was.step == Step::Dead && was.ends.is_none() && was.unheard.is_none());
        self.starts[at] += 1;
        let rank = Rank::new(at as u32);
        let pid = 100 * (rank.get() + 1) + self.starts[at];
        self.ranks[at] = Process {
            pid,
            step: Step::Loads,
            is_stopped: false,
            has_said_goodbye: false,
            asked: 0,
            ends: None,
            unheard: None,
            by_us: false,
            fate: None,
        };
        self.happens(Event::Started(rank, pid));
    }

    pub(super) fn happens(&mut self, event: Event) {
        for action in self.core.handle(event, self.now) {
            match action {
                Action::Start(rank) => self.start(rank.get() as usize),
                Action::Kill(pid) => {
                    let at = self.place(pid);
                    let goes_on = self.ranks[at].step == Step::Left && !self.ranks[at].is_stopped;
                    self.ended_a_program |= goes_on;
                    self.was_killed[at] |= self.ranks[at].step != Step::Dead;
                    self.killed = Some(self.now);
                    self.ranks[at].by_us |= self.ranks[at].unheard.is_none();
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
                Action::Say(line) if line.starts_with("pp: the job is done") => {
                    let is_left = |rank: &Process| rank.step == Step::Left || self.is_deaf;
                    assert!(self.ranks.iter().any(is_left));
                    assert!(self.rank_0_done.is_some());
                }
                Action::Say(line) => {
                    let told = |at: &usize| line.starts_with(&format!("pp: rank {at} is gone: "));
                    let at = (0..self.case.world).find(told).expect("a rank is gone");
                    let [fate, _] = self.ranks[at].fate.unwrap_or_default();
                    // One that was stopped was lost by that, too.
                    let is_late = self.ranks[at].is_stopped && line.contains("timed out");
                    assert!(line.contains(fate) || is_late, "it was {fate}: {line}");
                }
                Action::TellLoss(_) | Action::SayDrain(_) | Action::Log(_) => {}
                Action::NotRecorded(why) => panic!("{why}"),
            }
        }
    }

    fn place(&self, pid: u32) -> usize {
        let place = self.ranks.iter().position(|rank| rank.pid == pid);
        let place = place.expect("a process of this job");
        let rank = &self.ranks[place];
        assert!(
            rank.step != Step::Dead || rank.ends.or(rank.unheard).is_some(),
            "a signal to a process that was reaped"
        );
        place
    }

    pub(super) fn pid(&self, at: usize) -> u32 {
        self.ranks[at].pid
    }

    pub(super) fn dies(&mut self, at: usize, status: i32) {
        if self.ranks[at].step != Step::Dead {
            self.ranks[at].step = Step::Dead;
            self.ranks[at].ends = Some(status);
        }
    }

    /// The end of a process is noticed once all that it reported is heard.
    fn can_hear_end(&self, at: usize) -> bool {
        let rank = &self.ranks[at];
        rank.unheard.is_some() && self.pipe.iter().all(|report| report.pid != rank.pid)
    }

    pub(super) fn reports(&mut self, at: usize, report: Report) {
        let (pid, rank) = (self.ranks[at].pid, Rank::new(at as u32));
        if !self.is_deaf {
            self.pipe.push_back(Reported { pid, rank, report });
        }
    }

    /// It ends because of this fault.
    fn fails(&mut self, at: usize, kind: FaultKind, blamed: usize) {
        let fault = Fault::new(kind, Rank::new(blamed as u32), "run", "a fault");
        self.reports(at, Report::Exiting(fault));
        self.dies(at, i32::from(crate::error::code_of(kind)) << 8);
    }

    /// A rank that these have lost: a process that is stopped or gone.
    fn lost_by(&self, at: usize) -> Option<usize> {
        (0..self.case.world).find(|other| {
            let rank = &self.ranks[*other];
            *other != at && (rank.is_stopped || rank.step == Step::Dead)
        })
    }

    /// A rank that rank 0 was connected with, and has lost.
    fn lost_by_rank_0(&self) -> Option<usize> {
        (1..self.case.world).find(|at| {
            let rank = &self.ranks[*at];
            let is_there = rank.step != Step::Dead && !rank.is_stopped;
            self.met[*at].is_some_and(|pid| pid != rank.pid || !is_there)
        })
    }

    /// Says whether all other ranks are there for rank 0, which waits.
    fn can_meet(&self) -> bool {
        let is_there = |rank: &Process| {
            !rank.is_stopped && (rank.step == Step::Waits || rank.step == Step::Runs)
        };
        self.ranks[1..].iter().all(is_there) && self.lost_by_rank_0().is_none()
    }

    /// What ends this rank, which is not rank 0 and runs: the loss of rank 0, or of any other where none comes again.
    fn ends_for(&self, at: usize) -> Option<usize> {
        let lost = self.lost_by(at)?;
        (lost == 0 || self.case.restarts == 0).then_some(lost)
    }

    fn can_go_on(&self, at: usize) -> bool {
        let me = &self.ranks[at];
        match me.step {
            _ if me.is_stopped => false,
            Step::Dead => false,
            Step::Loads => true,
            Step::Waits if at == 0 => {
                let ends = me.asked > u32::from(self.losses > 0);
                ends || self.lost_by_rank_0().is_some() || self.can_meet()
            }
            Step::Waits => me.asked > 0,
            Step::Runs if at == 0 => true,
            Step::Runs => {
                me.asked > 1 || self.ends_for(at).is_some() || self.ranks[0].has_said_goodbye
            }
            Step::Served | Step::Left => true,
        }
    }

    /// Why a rank counts as lost.
    fn why(&self, at: usize) -> FaultKind {
        match self.ranks[at].is_stopped && self.ranks[at].step != Step::Dead {
            true => FaultKind::TimedOut,
            false => FaultKind::PeerDied,
        }
    }

    /// The next thing that a rank does by itself.
    fn goes_on(&mut self, at: usize) {
        let asked = self.ranks[at].asked;
        match (self.ranks[at].step, at) {
            (Step::Loads, _) => {
                self.ranks[at].step = Step::Waits;
                self.reports(at, Report::SignalsReady);
            }
            (Step::Waits | Step::Runs, _) if asked > 1 => {
                self.fails(at, FaultKind::Interrupted, at);
            }
            // A rank 0 that waits for a rank to come again drains once that is there.
            (Step::Waits, _) if asked > 0 && (at != 0 || self.losses == 0) => {
                self.fails(at, FaultKind::Interrupted, at);
            }
            (Step::Waits | Step::Runs, 0) if self.lost_by_rank_0().is_some() => {
                let lost = self.lost_by_rank_0().expect("just asked");
                self.loses(lost);
            }
            (Step::Waits, 0) => {
                for (rank, met) in self.ranks.iter_mut().zip(&mut self.met) {
                    (rank.step, *met) = (Step::Runs, Some(rank.pid));
                }
                self.reports(0, Report::Connected);
            }
            (Step::Runs, 0) => {
                self.ranks[0].step = Step::Served;
                self.ranks[0].has_said_goodbye = true;
                if self.case.says_served {
                    self.reports(0, Report::Served);
                }
            }
            (Step::Runs, _) if self.ranks[0].has_said_goodbye => {
                self.reports(at, Report::Left);
                match self.case.may_go_on {
                    true => self.ranks[at].step = Step::Left,
                    false => self.dies(at, 0),
                }
            }
            (Step::Left, _) => self.dies(at, 0),
            (Step::Runs, _) => {
                let lost = self.ends_for(at).expect("it can go on");
                self.fails(at, self.why(lost), lost);
            }
            (Step::Served, _) => {
                let code = if asked > 0 { 128 + i32::from(TERM) } else { 0 };
                self.reports(0, Report::Finished);
                self.rank_0_done = Some(self.now);
                self.dies(0, code << 8);
            }
            (step, _) => unreachable!("{step:?}"),
        }
    }

    /// Rank 0 has lost this rank.
    fn loses(&mut self, lost: usize) {
        let why = self.why(lost);
        if self.losses == self.case.restarts || !self.case.may_restart.contains(&lost) {
            return self.fails(0, why, lost);
        }
        self.losses += 1;
        self.ranks[0].step = Step::Waits;
        let pid = self.met[lost].expect("it was there");
        // It leaves all others, too.
        self.met.fill(None);
        let rank = Rank::new(lost as u32);
        let fault = Fault::new(why, rank, "run", "a fault");
        let target = TargetProcess::This(pid);
        self.reports(0, Report::PeerLost(rank, target, fault, None));
    }

    pub(super) fn moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        for at in 0..self.case.world {
            let rank = &self.ranks[at];
            let lives = rank.step != Step::Dead;
            moves.extend(self.can_go_on(at).then_some(Move::GoOn(at)));
            moves.extend(rank.ends.map(|_| Move::End(at)));
            moves.extend(self.can_hear_end(at).then_some(Move::HearEnd(at)));
            moves.extend((lives && self.left.kills > 0).then_some(Move::Kill(at)));
            moves.extend((lives && self.left.exits > 0).then_some(Move::Exit(at)));
            let may_stop = lives && !rank.is_stopped && self.left.stops > 0;
            moves.extend(may_stop.then_some(Move::Stop(at)));
        }
        moves.extend((!self.pipe.is_empty()).then_some(Move::Hear));
        moves.extend((self.left.noise > 0).then_some(Move::Noise));
        moves.extend((self.left.signals > 0).then_some(Move::Signal));
        // What lies in the pipe is read, and an end noticed, long before any deadline.
        let is_over = |rank: &Process| rank.ends.or(rank.unheard).is_none();
        let is_heard = self.pipe.is_empty() && self.ranks.iter().all(is_over);
        let waits = self.core.due().is_some() && is_heard;
        moves.extend((waits && (self.left.ticks > 0 || moves.is_empty())).then_some(Move::Time));
        moves
    }

    pub(super) fn make(&mut self, what: Move) {
        match what {
            Move::GoOn(at) => self.goes_on(at),
            Move::Hear => {
                let report = self.pipe.pop_front().expect("there is one");
                self.happens(Event::Reported(report));
            }
            Move::End(at) => self.ranks[at].unheard = self.ranks[at].ends.take(),
            Move::HearEnd(at) => {
                let rank = &mut self.ranks[at];
                let status = rank.unheard.take().or_else(|| rank.ends.take());
                let status = status.expect("it ended");
                let status = Some(std::process::ExitStatus::from_raw(status));
                let by_us = rank.by_us;
                self.happens(Event::Ended(Rank::new(at as u32), status, by_us));
            }
            Move::Kill(at) => {
                self.left.kills -= 1;
                self.hurts(at);
                self.ranks[at].fate = Some(["killed by signal 9 (SIGKILL)", "ended by signal 9"]);
                self.dies(at, KILLED);
            }
            Move::Exit(at) => {
                self.left.exits -= 1;
                self.hurts(at);
                self.rank_0_left = (at == 0).then_some(self.now).or(self.rank_0_left);
                self.ranks[at].fate =
                    Some(["ended with exit code 0", "a kernel plugin call exit?"]);
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
                for at in 0..self.case.world {
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
        self.was_needed |= at != 0 && !self.ranks[0].has_said_goodbye;
    }

    /// Two worlds of one key have the same future.
    pub(super) fn key(&self, start: Instant) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.now - start).hash(&mut hasher);
        format!("{self:?}").hash(&mut hasher);
        hasher.finish()
    }
}
