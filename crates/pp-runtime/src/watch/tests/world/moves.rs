//! What may happen to the two ranks, and in which order.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};

use super::*;

const TERM: u8 = 15;

/// What may still be done to the ranks, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::watch::tests) enum Harm {
    Kill,
    Stop,
    /// The machine sleeps.
    Sleep,
    Signal,
    /// A caller or a driver fails.
    Raise,
    /// A message is not taken.
    Busy,
    /// Time passes although something else could happen.
    Tick,
}

/// Something that may happen next.
#[derive(Clone, Copy, Debug)]
pub(in crate::watch::tests) enum Move {
    /// The caller or the driver goes on.
    Act(usize),
    Hear(usize),
    Tick(usize),
    Kill(usize),
    Stop(usize),
    GoOn(usize),
    Sleep,
    Signal(usize),
    Raise(usize),
    Busy(usize),
    Time,
}

impl World {
    pub(in crate::watch::tests) fn moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        let mut is_awaited = false;
        let may = |harm| self.left.contains(&harm);
        for at in 0..2 {
            let me = &self.ranks[at];
            if me.end.is_some() {
                continue;
            }
            moves.extend(may(Harm::Kill).then_some(Move::Kill(at)));
            if me.stopped.is_some() {
                continue;
            }
            let is_due = me.alarm || me.core.due().is_some_and(|due| due <= self.now);
            let before = moves.len();
            moves.extend(self.can_hear(at).then_some(Move::Hear(at)));
            moves.extend(is_due.then_some(Move::Tick(at)));
            is_awaited |= moves.len() > before;
            moves.extend(self.can_act(at).then_some(Move::Act(at)));
            moves.extend(may(Harm::Stop).then_some(Move::Stop(at)));
            let runs = me.step == Step::Drives;
            moves.extend((may(Harm::Signal) && runs).then_some(Move::Signal(at)));
            let ends = matches!(me.step, Step::Fails(_) | Step::Closes(_));
            moves.extend((may(Harm::Raise) && !ends).then_some(Move::Raise(at)));
            moves.extend((may(Harm::Busy) && !me.is_busy).then_some(Move::Busy(at)));
        }
        moves.extend(may(Harm::Sleep).then_some(Move::Sleep));
        // What was sent is heard, and what is due done, long before anything else is due.
        let passes = !is_awaited && self.due().is_some();
        moves.extend((passes && (may(Harm::Tick) || moves.is_empty())).then_some(Move::Time));
        let stopped = (0..2).filter(|at| self.ranks[*at].stopped.is_some());
        moves.extend(stopped.map(Move::GoOn));
        moves
    }

    fn due(&self) -> Option<Instant> {
        let runs = |rank: &&Process| rank.end.is_none() && rank.stopped.is_none();
        let ranks = self.ranks.iter().filter(runs);
        ranks.filter_map(|rank| rank.core.due()).min()
    }

    pub(in crate::watch::tests) fn is_over(&self) -> bool {
        self.ranks.iter().all(|rank| rank.end.is_some())
    }

    fn spend(&mut self, harm: Harm) {
        let place = self.left.iter().position(|left| *left == harm);
        place.map(|place| self.left.remove(place));
    }

    pub(in crate::watch::tests) fn make(&mut self, what: Move) {
        match what {
            Move::Act(at) => self.goes_on(at),
            Move::Hear(at) => self.hears(at),
            Move::Tick(at) => self.ticks(at),
            Move::Kill(at) => {
                self.spend(Harm::Kill);
                self.ends(at, End::Killed);
            }
            Move::Stop(at) => {
                self.spend(Harm::Stop);
                self.ranks[at].stopped = Some(self.now);
            }
            Move::GoOn(at) => {
                let me = &mut self.ranks[at];
                if me.core.grace_over().is_none()
                    && let Some((_, since)) = &mut me.first
                {
                    // The thread sees it now, and not while the process was stopped.
                    *since = self.now;
                }
                // One that is late by less than a heartbeat was there.
                let since = me.stopped.take().expect("it is stopped");
                if self.now >= since + 2 * BEAT {
                    (me.has_slept, me.heard) = (true, self.now);
                }
            }
            Move::Sleep => {
                self.spend(Harm::Sleep);
                self.now += 10 * BEAT;
                for rank in &mut self.ranks {
                    (rank.has_slept, rank.heard) = (true, self.now);
                }
            }
            Move::Signal(at) => {
                self.spend(Harm::Signal);
                let me = &mut self.ranks[at];
                me.alarm = true;
                let driver = me.driver.as_mut().expect("it runs");
                driver.drain.get_or_insert(TERM);
            }
            Move::Raise(at) => {
                self.spend(Harm::Raise);
                let fault = fault_of(at, FaultKind::Plugin);
                if self.ranks[at].is_set_up() {
                    self.fails(at, fault);
                } else {
                    self.raise(at, fault);
                }
            }
            Move::Busy(at) => {
                self.spend(Harm::Busy);
                self.ranks[at].is_busy = true;
            }
            Move::Time => {
                self.spend(Harm::Tick);
                self.now = self.now.max(self.due().expect("it waits"));
            }
        }
    }

    /// Two worlds of one key have the same future.
    pub(in crate::watch::tests) fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        format!("{self:?}").hash(&mut hasher);
        hasher.finish()
    }

    /// What must hold when both processes are gone.
    pub(in crate::watch::tests) fn check(&self, all: &[Harm]) {
        let count = |left: &[Harm]| {
            let hurts = |harm: &&Harm| matches!(harm, Harm::Kill | Harm::Stop | Harm::Raise);
            left.iter().filter(hurts).count()
        };
        let is_hurt = count(all) > count(&self.left);
        let ends = self.ranks.each_ref().map(|rank| rank.end.as_ref());
        assert!(is_hurt || ends == [Some(&End::Well); 2], "{ends:?}");
    }
}
