//! What a supervisor does when ranks start, report, end or fall silent, and when signals come.
//!
//! Hazard: the order of these events is not the order in which they happened. Reports, ends and signals come by threads
//! of their own, and a stopped process says nothing. Guarantee: whatever the order, the job ends, no rank is left, rank 0
//! is started once, no rank is started again more often than is allowed, and one fault is named.
//!
//! Choices: nothing here starts, kills or waits for a process, and the time is an argument, so that a test walks every
//! order of small cases. [`super`] carries out what [`Core::handle`] wants.

mod handle;

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};

use super::events::{Action, Terms};
use super::missed::Vigil;
use super::rank_state::{Process, RankState};
use super::verdict::{End, Ends, Verdict, verdict};
use crate::RANK_0;
use crate::reports::{Report, Reported, TargetProcess};
use crate::signals::is_echo_of;
use crate::times::{ABORTED_WITHIN, CONTRADICTED_WITHIN, GOODBYE, LEFT_WITHIN, PATIENCE};

/// What a supervisor knows of its job.
#[derive(Clone, Debug)]
pub(super) struct Core {
    /// What the verdict is made of.
    job: Ends,
    /// How long rank 0 may take to say what it makes of the end of another rank.
    within: Duration,
    /// By rank.
    ranks: Vec<RankState>,
    /// The ranks were connected once.
    has_met: bool,
    /// Over ranks that are not connected.
    vigil: Vigil,
    signals: u32,
    /// The first signal, and when it came.
    first_signal: Option<(u8, Instant)>,
    /// The first signal, until it was said what it does.
    drains: Option<u8>,
    /// When the ranks that are left are killed, or given up once they were killed.
    deadline: Option<Instant>,
    is_killing: bool,
    /// It was said that programs go on behind the job.
    says_who_goes_on: bool,
    /// A process that was killed does not end.
    stuck: Option<Fault>,
    actions: Vec<Action>,
}

impl Core {
    /// A job whose ranks were not started yet.
    pub(super) fn new(terms: &Terms, now: Instant) -> Self {
        let world = terms.world.get();
        let place = |rank| RankState {
            may_restart: terms.may_restart.contains(&rank),
            is_awaited: rank != RANK_0,
            ..RankState::default()
        };
        Self {
            job: Ends {
                restarts: terms.restarts,
                may_go_on: terms.may_go_on,
                ..Ends::default()
            },
            within: terms.within,
            ranks: (0..world).map(Rank::new).map(place).collect(),
            has_met: false,
            vigil: Vigil::new(terms, now),
            signals: 0,
            first_signal: None,
            drains: None,
            deadline: None,
            is_killing: false,
            says_who_goes_on: false,
            stuck: None,
            actions: Vec::new(),
        }
    }

    /// All ranks have ended for good, or one never will.
    pub(super) fn is_over(&self) -> bool {
        self.job.ends.len() == self.ranks.len() || self.stuck.is_some()
    }

    /// When [`Event::Tick`] has something to do.
    pub(super) fn due(&self) -> Option<Instant> {
        let gone = self.ranks.iter().filter_map(|place| place.gone.as_ref());
        let times = gone.map(|(_, until)| *until);
        let kills = self.ranks.iter().filter_map(|place| place.kill_at);
        let times = times.chain(kills).chain(self.deadline);
        times.chain(self.vigil.due()).min()
    }

    /// The processes that run.
    pub(super) fn pids(&self) -> impl Iterator<Item = u32> {
        let running = self.ranks.iter().filter_map(|place| place.running);
        running.map(|running| running.pid)
    }

    /// One reason for all ranks, once [`Core::is_over`].
    pub(super) fn verdict(self) -> Verdict {
        if let Some(stuck) = self.stuck {
            return Verdict::Fault(stuck, None);
        }
        verdict(&self.job)
    }

    fn at(&mut self, rank: Rank) -> Option<&mut RankState> {
        self.ranks.get_mut(rank.get() as usize)
    }

    fn pid(&self, rank: Rank) -> Option<u32> {
        let place = self.ranks.get(rank.get() as usize)?;
        Some(place.running?.pid)
    }

    fn is_awaited(&self, rank: Rank) -> bool {
        let place = self.ranks.get(rank.get() as usize);
        place.is_some_and(|place| place.is_awaited)
    }

    fn started(&mut self, rank: Rank, pid: u32, now: Instant) {
        self.vigil.begun(rank, now);
        if let Some(place) = self.at(rank) {
            place.running = Some(Process {
                pid,
                hears: false,
                has_left: false,
                is_asked: false,
            });
        }
    }

    /// Says whether this rank would be started again.
    fn may_restart(&self, rank: Rank) -> bool {
        let is_other = |at: &usize| *at != rank.get() as usize;
        // Each process that was killed to be replaced has a restart of its own.
        let kept = (0..self.ranks.len()).filter(is_other);
        let kept = kept.filter(|at| self.ranks[*at].replaced.is_some());
        let left = self.job.restarts.saturating_sub(self.job.used) as usize;
        let place = self.ranks.get(rank.get() as usize);
        place.is_some_and(|place| place.may_restart)
            && self.pid(RANK_0).is_some()
            && kept.count() < left
            && self.signals < 2
            && self.deadline.is_none()
    }

    /// Starts another process in the place of this one, unless one that stays is about to end the job.
    fn restart_unless_over(&mut self, lost: End, now: Instant) {
        let others = (0..).map(Rank::new).zip(&self.ranks).skip(1);
        let mut stay = others.filter(|(_, place)| !place.may_restart);
        if !stay.any(|(rank, _)| self.job.blames(lost.pid, rank)) {
            return self.restart(lost, now);
        }
        // The end of the one that it blames is read late.
        if let Some(place) = self.at(lost.rank) {
            place.gone = Some((lost, now + CONTRADICTED_WITHIN));
        }
    }

    /// Starts another process in the place of this one, unless the same chunk has ended both.
    fn restart(&mut self, lost: End, now: Instant) {
        let rank = lost.rank;
        let Some(place) = self.ranks.get_mut(rank.get() as usize) else {
            return;
        };
        let (fault, why) = place.lose(&lost, &self.job.reports);
        if let Some(again) = place.ended_twice(&fault) {
            self.job.not_replaced.get_or_insert(again);
            self.settle(lost, now);
            return self.end_within(PATIENCE, now);
        }
        self.job.used += 1;
        let (used, of) = (self.job.used, self.job.restarts);
        self.actions.extend([
            Action::TellLoss(fault),
            Action::Say(format!(
                "pp: rank {rank} is gone: {why}; restart {used} of {of}"
            )),
            Action::Log(format!("rank {rank} starts again used={used} of={of}")),
            Action::Start(rank),
        ]);
    }

    fn ended(&mut self, rank: Rank, status: Option<ExitStatus>, by_us: bool, now: Instant) {
        let Some(place) = self.at(rank) else {
            return;
        };
        let Some(Process { pid, hears, .. }) = place.running.take() else {
            return;
        };
        place.last = Some((pid, hears));
        place.kill_at = None;
        let was_replaced = place.replaced == Some(pid);
        let is_awaited = place.is_awaited;
        self.vigil.ended(rank);
        let mut end = End {
            rank,
            pid,
            status,
            by_us: false,
        };
        end.by_us = by_us && end.was_killed();
        let is_worth_it = end.is_worth_a_restart() || was_replaced && end.is_silent();
        let may_be_missed = is_worth_it || end.is_silent();
        if self.may_restart(rank) && may_be_missed && !self.job.is_served {
            if is_awaited && is_worth_it {
                return self.restart_unless_over(end, now);
            }
            // A rank 0 that waits cannot say what it makes of this. That the ranks have met, or that rank 0 was served,
            // is read by another thread, which may be behind.
            let within = if self.job.blames(pid, RANK_0) || is_awaited {
                CONTRADICTED_WITHIN.min(self.within)
            } else {
                self.within
            };
            if let Some(place) = self.at(rank) {
                place.gone = Some((end, now + within));
            }
            return;
        }
        self.settle(end, now);
    }

    /// A rank ended, and is not started again.
    fn settle(&mut self, end: End, now: Instant) {
        // The other ranks may be done long before rank 0 has written everything.
        let has_failed = self.job.reports.iter().any(|report| report.pid == end.pid);
        let rank = end.rank;
        let is_harmless = match rank {
            RANK_0 => end.is_good() && !has_failed && self.job.is_finished,
            _ => self.job.is_served || (end.is_good() && !has_failed),
        };
        self.job.ends.push(end);
        if let Some(place) = self.at(rank) {
            // None comes in its place: it needs no restart.
            place.replaced = None;
        }
        match (is_harmless, rank) {
            (false, _) => self.end_within(PATIENCE, now),
            (true, RANK_0) => self.end_within(self.goodbye(), now),
            // Rank 0 waits for it and cannot know. That they have met may not be read yet.
            (true, _) if self.is_awaited(rank) && !self.job.is_served && !self.job.is_finished => {
                self.end_within(CONTRADICTED_WITHIN, now);
            }
            // A rank 0 that was connected knows by itself. No rank may watch it any more.
            (true, _) => self.vigil.resume(now),
        }
        if rank == RANK_0 {
            self.settle_gone(|_| true, now);
        }
    }

    /// No process comes in the place of those that are gone and for which this holds.
    fn settle_gone(&mut self, holds: impl Fn(&(End, Instant)) -> bool, now: Instant) {
        let gone = self.ranks.iter_mut().map(|place| &mut place.gone);
        let gone: Vec<_> = gone
            .filter_map(|gone| gone.take_if(|gone| holds(gone)))
            .collect();
        for (end, _) in gone {
            self.settle(end, now);
        }
    }

    /// The time that the others have behind a rank 0 that ended well.
    fn goodbye(&self) -> Duration {
        match self.job.may_go_on {
            true => LEFT_WITHIN,
            false => GOODBYE,
        }
    }

    fn end_within(&mut self, patience: Duration, now: Instant) {
        if self.is_killing {
            // Ranks that were killed have their own time.
            return;
        }
        let at = now + patience;
        self.deadline = Some(self.deadline.map_or(at, |earlier| earlier.min(at)));
    }

    fn reported(&mut self, report: Reported, now: Instant) {
        if self.pid(report.rank) == Some(report.pid) {
            self.vigil.heard(report.rank, now);
        }
        let before = (self.job.is_served, self.job.is_finished);
        match &report.report {
            Report::Exiting(_) => {
                // Rank 0 is stopped or cut off, and would not say for a minute what it makes of it.
                for (end, until) in self.ranks.iter_mut().filter_map(|p| p.gone.as_mut()) {
                    if report.blames(end.pid, RANK_0) {
                        *until = (*until).min(now + CONTRADICTED_WITHIN);
                    }
                }
            }
            Report::SignalsReady => self.hears(report.rank, report.pid),
            Report::Connected => self.met(now),
            Report::Left => {
                let place = self.at(report.rank).and_then(|p| p.running.as_mut());
                if let Some(running) = place.filter(|running| running.pid == report.pid) {
                    running.has_left = true;
                }
            }
            Report::PeerLost(rank, target, fault, chunks) => {
                self.actions.push(Action::Log(format!(
                    "rank 0 gave rank {rank} up fault={fault} target={target:?}"
                )));
                if let Some(place) = self.at(*rank).filter(|_| *rank != RANK_0) {
                    place.given_up = Some(fault.clone());
                    place.in_flight = *chunks;
                    self.vigil.resume(now);
                    self.all_meet_again(*rank, now);
                    self.replace(*rank, *target, report.pid, now);
                }
            }
            _ => {}
        }
        let unrecorded = self.note(report);
        self.actions.extend(unrecorded.map(Action::NotRecorded));
        if before != (self.job.is_served, self.job.is_finished) {
            if self.job.is_served {
                self.settle_gone(|_| true, now);
            }
            self.spare_the_others(now);
        }
    }

    /// All ranks were connected when rank 0 said so.
    fn met(&mut self, now: Instant) {
        self.has_met = true;
        for place in self.ranks.iter_mut().skip(1) {
            match (&place.running, place.last) {
                (Some(running), _) if running.hears => place.is_awaited = false,
                // It came after this report was made.
                (Some(_), _) => {}
                (None, Some((_, true))) => {
                    place.is_awaited = false;
                    // Rank 0 knows by itself.
                    if let Some((_, until)) = &mut place.gone {
                        *until = now + self.within;
                    }
                }
                (None, _) => {}
            }
        }
        let is_met = |place: &RankState| !place.is_awaited && place.running.is_some();
        if self.ranks.iter().all(is_met) {
            self.vigil.pause();
        }
        // Otherwise rank 0 is to end, too.
        let is_well = |end: &End| end.is_good() && !self.is_awaited(end.rank);
        if self.job.ends.iter().all(is_well) && !self.job.ends.is_empty() {
            self.spare_the_others(now);
        }
        self.say_that_it_drains();
    }

    /// A rank ended, and that this does the others no harm was read late.
    fn spare_the_others(&mut self, now: Instant) {
        if self.signals >= 2 || self.is_killing {
            return;
        }
        if self.job.ends.iter().all(|end| end.rank != RANK_0) {
            self.deadline = None;
            if !self.job.ends.is_empty() {
                self.vigil.resume(now);
            }
        } else if self.job.is_finished && self.job.ends.iter().all(End::is_good) {
            self.deadline = Some(now + self.goodbye());
        }
    }

    /// Takes in a report that changes nothing any more but the verdict; why a recording could not be written, if it
    /// says so.
    pub(super) fn note(&mut self, report: Reported) -> Option<String> {
        match &report.report {
            Report::Exiting(_) => self.job.reports.push(report),
            Report::NotRecorded(why) => return Some(why.detail.to_string()),
            Report::Served => self.job.is_served = true,
            Report::Finished => self.job.is_finished = true,
            _ => {}
        }
        None
    }

    /// Rank 0 has lost this rank and has left all others, too: of those that are gone it will say nothing.
    fn all_meet_again(&mut self, lost: Rank, now: Instant) {
        for place in self.ranks.iter_mut().skip(1) {
            place.is_awaited = true;
        }
        let ranks = (1..self.ranks.len() as u32).map(Rank::new);
        for rank in ranks.filter(|rank| *rank != lost) {
            let may_restart = self.may_restart(rank);
            let gone = self.at(rank).map(|place| &mut place.gone);
            let again = |(end, until): &mut (End, Instant)| {
                // What ended well may not be lost.
                *until = (*until).min(now + CONTRADICTED_WITHIN);
                may_restart && end.is_worth_a_restart()
            };
            if let Some((end, _)) = gone.and_then(|gone| gone.take_if(again)) {
                self.restart_unless_over(end, now);
            }
        }
    }

    /// Rank 0 wants another than this process of this rank.
    fn replace(&mut self, rank: Rank, target: TargetProcess, rank_0: u32, now: Instant) {
        let is_target = |pid: u32| match target {
            TargetProcess::Unknown => false,
            TargetProcess::This(target) => pid == target,
            TargetProcess::Any => true,
        };
        let was_last = |end: &End| {
            end.rank == rank && (target == TargetProcess::Unknown || is_target(end.pid))
        };
        let gone = self.at(rank).map(|place| &mut place.gone);
        if let Some((end, _)) = gone.and_then(|gone| gone.take_if(|(end, _)| was_last(end))) {
            if self.may_restart(rank) {
                return self.restart_unless_over(end, now);
            }
            self.settle(end, now);
        }
        match self.pid(rank).filter(|pid| is_target(*pid)) {
            Some(pid) if self.may_restart(rank) => {
                // One that came is ending if its channel has: how it ends says more than rank 0 can know.
                let given_up = self.at(rank).and_then(|place| place.given_up.as_ref());
                let is_ending = given_up.is_some_and(|fault| fault.kind == FaultKind::PeerDied)
                    && target != TargetProcess::Any;
                let within = if is_ending {
                    CONTRADICTED_WITHIN
                } else {
                    Duration::ZERO
                };
                self.kill_to_replace(rank, pid, now + within);
            }
            // Rank 0 waits in vain.
            Some(_) => self.end_in_vain(rank, rank_0, now),
            // It ended for good, and none comes in its place: the same.
            None if self.job.ends.iter().any(was_last) => self.end_in_vain(rank, rank_0, now),
            // It was replaced already.
            None => {}
        }
    }

    /// It may be stopped, or cut off: nothing else ends it.
    fn kill_to_replace(&mut self, rank: Rank, pid: u32, at: Instant) {
        if let Some(place) = self.at(rank) {
            (place.replaced, place.kill_at) = (Some(pid), Some(at));
        }
    }

    /// Kills the processes whose time to end by themselves is over.
    fn kill_the_replaced(&mut self, now: Instant) {
        let late = self.ranks.iter_mut().filter_map(|place| place.is_late(now));
        self.actions.extend(late.map(Action::Kill));
    }

    /// No process of this rank comes to this process of rank 0 any more: what it lost the last one to ends the job.
    fn end_in_vain(&mut self, rank: Rank, rank_0: u32, now: Instant) {
        let given_up = self.at(rank).and_then(|place| place.given_up.take());
        self.job.reports.extend(given_up.map(|fault| Reported {
            pid: rank_0,
            rank: RANK_0,
            report: Report::Exiting(fault),
        }));
        self.end_within(PATIENCE, now);
    }

    fn signalled(&mut self, signal: u8, now: Instant) {
        let since = self.first_signal.map(|(first, at)| (first, now - at));
        if is_echo_of(since, signal) {
            return;
        }
        self.signals += 1;
        self.job.interrupted = true;
        if self.first_signal.is_none() {
            self.first_signal = Some((signal, now));
            self.drains = Some(signal);
            self.say_that_it_drains();
        }
        if self.signals == 2 {
            self.job.aborted_after = Some(self.job.reports.len());
            for place in &mut self.ranks {
                if let Some((mut end, _)) = place.gone.take() {
                    // Another would have come: it is the interrupt that ends the job.
                    end.by_us = true;
                    self.job.ends.push(end);
                }
            }
            // A rank that is stopped does not hear it.
            self.end_within(ABORTED_WITHIN, now);
        }
        // Rank 0 drains and tells the others; all must hear of an abort. A rank that is about to join a rank 0 which
        // drains must not end at the first.
        let rank_0_alone = self.signals == 1 && self.job.restarts > 0 && self.has_met;
        let told = if rank_0_alone { 1 } else { self.ranks.len() };
        let running = self.ranks[..told].iter().filter_map(|place| place.running);
        let pass = running.map(|running| Action::Pass(running.pid, signal));
        self.actions.extend(pass);
    }

    /// Before the ranks are connected a signal ends them, and that they are is read by another thread.
    fn say_that_it_drains(&mut self) {
        let drains = self.drains.take_if(|_| self.has_met);
        // Nothing is in flight where only programs go on.
        if let Some(signal) = drains.filter(|_| self.job.is_done().is_none()) {
            self.actions.push(Action::SayDrain(signal));
        }
    }

    /// All ranks that run are to say what they do: those that would not die of it at once.
    fn asked(&mut self) {
        for running in self.ranks.iter_mut().filter_map(|p| p.running.as_mut()) {
            if running.hears {
                self.actions.push(Action::Ask(running.pid));
            } else {
                running.is_asked = true;
            }
        }
    }

    /// This process of a rank takes signals from now on.
    fn hears(&mut self, rank: Rank, pid: u32) {
        let Some(place) = self.at(rank) else {
            return;
        };
        if let Some((_, hears)) = place.last.as_mut().filter(|(last, _)| *last == pid) {
            *hears = true;
        }
        let running = place.running.as_mut();
        let Some(running) = running.filter(|running| running.pid == pid) else {
            return;
        };
        running.hears = true;
        if std::mem::take(&mut running.is_asked) {
            self.actions.push(Action::Ask(pid));
        }
    }
}
