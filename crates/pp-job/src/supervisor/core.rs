//! What a supervisor does when ranks start, report, end or fall silent, and when signals come.
//!
//! Hazard: the order of these events is not the order in which they happened. Reports, ends and signals come by threads
//! of their own, and a stopped process says nothing. Guarantee: whatever the order, the job ends, no rank is left, the
//! front is started once, and one fault is named.
//!
//! Choices: nothing here starts, kills or waits for a process, and the time is an argument, so that a test walks every
//! order of small cases. [`super`] carries out what [`Core::handle`] wants.

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};

use super::missed::Vigil;
use super::verdict::{End, Ends, Verdict, verdict};
use crate::reports::{Report, Reported, TargetProcess};
use crate::signals::is_echo_of;
use crate::times::{ABORTED_WITHIN, CONTRADICTED_WITHIN, GOODBYE, KILLED_WITHIN, PATIENCE};
use crate::{FRONT, PHASE_B, WORLD};

/// What has happened.
#[derive(Clone, Debug)]
pub(super) enum Event {
    /// This process of a rank runs.
    Started(Rank, u32),
    /// The process of this rank that ran has ended.
    Ended(Rank, Option<ExitStatus>),
    Reported(Reported),
    /// No report comes any more, and a rank still runs: something else wrote into the pipe.
    ReportsOver,
    /// A signal that asks for an end.
    Signal(u8),
    /// All ranks are to say what they do.
    Asked,
    /// Time has passed.
    Tick,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Start(Rank),
    /// End this process at once.
    Kill(u32),
    /// Pass a signal that asks for an end on to this process.
    Pass(u32, u8),
    /// Have this process say what it does.
    Ask(u32),
    /// Tell the user.
    Say(String),
    /// Tell the user that the job drains because of this signal.
    SayDrain(u8),
    Log(String),
    /// A rank could not write its flight recording, because of this.
    NotRecorded(String),
}

/// A rank that runs.
#[derive(Clone, Copy, Debug)]
struct Running {
    pid: u32,
    /// It has said that it takes signals.
    hears: bool,
    /// It is to say what it does, as soon as it takes signals.
    is_asked: bool,
}

/// What a supervisor knows of its job.
#[derive(Clone, Debug)]
pub(super) struct Core {
    /// What the verdict is made of.
    job: Ends,
    /// How long the front may take to say what it makes of Phase B's end.
    within: Duration,
    /// By rank.
    running: [Option<Running>; WORLD as usize],
    /// The process of Phase B that ended last, and whether it had said that it takes signals.
    last: Option<(u32, bool)>,
    /// The process of Phase B that was killed here because the front gave it up.
    replaced: Option<u32>,
    /// Why Phase B was given up, by the front or here.
    given_up: Option<Fault>,
    /// Phase B ended, and the front has not said yet whether it wants another.
    gone: Option<(End, Instant)>,
    /// The front is not connected, and takes any Phase B that comes.
    front_waits: bool,
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
    /// A process that was killed does not end.
    stuck: Option<Fault>,
    actions: Vec<Action>,
}

impl Core {
    /// A job without ranks. `watches` where ranks give signs of life.
    pub(super) fn new(restarts: u32, within: Duration, watches: bool, now: Instant) -> Self {
        Self {
            job: Ends {
                restarts,
                ..Ends::default()
            },
            within,
            running: [None; WORLD as usize],
            last: None,
            replaced: None,
            given_up: None,
            gone: None,
            front_waits: true,
            has_met: false,
            vigil: Vigil::new(watches, now),
            signals: 0,
            first_signal: None,
            drains: None,
            deadline: None,
            is_killing: false,
            stuck: None,
            actions: Vec::new(),
        }
    }

    /// Takes in what happened, and gives what is to be done, in that order.
    pub(super) fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Started(rank, pid) => self.started(rank, pid, now),
            Event::Ended(rank, status) => self.ended(rank, status, now),
            Event::Reported(report) => self.reported(report, now),
            Event::ReportsOver => {
                // The front's exit code alone says whether it has done its work.
                self.vigil.end();
                self.job.is_finished = true;
                if self.job.ends.iter().all(End::is_good) {
                    self.spare_the_other(now);
                }
            }
            Event::Signal(signal) => self.signalled(signal, now),
            Event::Asked => self.asked(),
            Event::Tick => self.late(now),
        }
        std::mem::take(&mut self.actions)
    }

    /// All ranks have ended for good, or one never will.
    pub(super) fn is_over(&self) -> bool {
        self.job.ends.len() == WORLD as usize || self.stuck.is_some()
    }

    /// When [`Event::Tick`] has something to do.
    pub(super) fn due(&self) -> Option<Instant> {
        let gone = self.gone.as_ref().map(|(_, until)| *until);
        let times = [self.deadline, gone, self.vigil.due()];
        times.into_iter().flatten().min()
    }

    /// The processes that run.
    pub(super) fn pids(&self) -> impl Iterator<Item = u32> {
        self.running.iter().flatten().map(|running| running.pid)
    }

    /// One reason for all ranks, once [`Core::is_over`].
    pub(super) fn verdict(self) -> Verdict {
        if let Some(stuck) = self.stuck {
            return Verdict::Fault(stuck, None);
        }
        verdict(&self.job)
    }

    fn at(&mut self, rank: Rank) -> Option<&mut Option<Running>> {
        self.running.get_mut(rank.get() as usize)
    }

    fn pid(&self, rank: Rank) -> Option<u32> {
        let running = self.running.get(rank.get() as usize).copied().flatten();
        running.map(|running| running.pid)
    }

    fn started(&mut self, rank: Rank, pid: u32, now: Instant) {
        self.vigil.heard(rank, now);
        if let Some(place) = self.at(rank) {
            *place = Some(Running {
                pid,
                hears: false,
                is_asked: false,
            });
        }
    }

    /// Whether Phase B would be started again.
    fn may_restart(&self) -> bool {
        let front_runs = self.pid(FRONT).is_some();
        front_runs && self.job.used < self.job.restarts && self.signals < 2 && !self.is_killing
    }

    /// Starts another process in the place of this one of Phase B.
    fn restart(&mut self, lost: &End) {
        self.job.used += 1;
        self.replaced = None;
        self.gone = None;
        let (used, of) = (self.job.used, self.job.restarts);
        let why = lost.why(&self.job.reports, self.given_up.take());
        self.actions.extend([
            Action::Say(format!(
                "pp: Phase B (rank {PHASE_B}) is gone: {why}; restart {used} of {of}"
            )),
            Action::Log(format!("Phase B starts again used={used} of={of}")),
            Action::Start(PHASE_B),
        ]);
    }

    fn ended(&mut self, rank: Rank, status: Option<ExitStatus>, now: Instant) {
        let Some(Running { pid, hears, .. }) = self.at(rank).and_then(Option::take) else {
            return;
        };
        if rank == PHASE_B {
            self.last = Some((pid, hears));
        }
        self.vigil.ended(rank);
        let was_replaced = self.replaced == Some(pid);
        let mut end = End {
            rank,
            pid,
            status,
            by_us: false,
        };
        end.by_us = (self.is_killing || was_replaced) && end.was_killed();
        let is_worth_it = was_replaced || end.is_worth_a_restart();
        let may_be_missed = is_worth_it || end.is_silent();
        if rank == PHASE_B && self.may_restart() && may_be_missed && !self.job.is_served {
            if self.front_waits && is_worth_it {
                return self.restart(&end);
            }
            let is_blamed = self
                .job
                .reports
                .iter()
                .any(|report| blames_front(report, pid));
            // A front that waits cannot say what it makes of this. That the ranks have met, or that Phase B was served,
            // is read by another thread, which may be behind.
            let within = if is_blamed || self.front_waits {
                CONTRADICTED_WITHIN.min(self.within)
            } else {
                self.within
            };
            self.gone = Some((end, now + within));
            return;
        }
        self.settle(end, now);
    }

    /// A rank ended, and is not started again.
    fn settle(&mut self, end: End, now: Instant) {
        // Phase B may be done long before the front has written everything.
        let has_failed = self.job.reports.iter().any(|report| report.pid == end.pid);
        let is_harmless = match end.rank {
            FRONT => end.is_good() && !has_failed && self.job.is_finished,
            _ => self.job.is_served || (end.is_good() && !has_failed),
        };
        let is_front = end.rank == FRONT;
        self.job.ends.push(end);
        match (is_harmless, is_front) {
            (false, _) => self.end_within(PATIENCE, now),
            (true, true) => self.end_within(GOODBYE, now),
            // The front waits for it and cannot know. That they have met may not be read yet.
            (true, false) if self.front_waits && !self.job.is_served && !self.job.is_finished => {
                self.end_within(CONTRADICTED_WITHIN, now);
            }
            // A front that was connected knows by itself. No rank watches it any more.
            (true, false) => self.vigil.resume(now),
        }
        if is_front && let Some((gone, _)) = self.gone.take() {
            self.settle(gone, now);
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
                // The front is stopped or cut off, and would not say for a minute what it makes of it.
                if let Some((end, until)) = &mut self.gone
                    && blames_front(&report, end.pid)
                {
                    *until = (*until).min(now + CONTRADICTED_WITHIN);
                }
            }
            Report::SignalsReady => self.hears(report.rank, report.pid),
            Report::Connected => {
                self.has_met = true;
                match self.running[PHASE_B.get() as usize] {
                    Some(phase_b) if phase_b.hears => {
                        self.front_waits = false;
                        self.vigil.pause();
                    }
                    // It came after this report was made.
                    Some(_) => {}
                    None if self.last.is_some_and(|(_, hears)| hears) => {
                        self.front_waits = false;
                        // The front knows by itself.
                        if let Some((_, until)) = &mut self.gone {
                            *until = now + self.within;
                        }
                        // Otherwise the front is to end, too.
                        if self.job.ends.iter().all(End::is_good) {
                            self.spare_the_other(now);
                        }
                    }
                    None => {}
                }
                self.say_that_it_drains();
            }
            Report::PeerLost(target, fault) => {
                self.actions.push(Action::Log(format!(
                    "the front gave Phase B up fault={fault} target={target:?}"
                )));
                self.front_waits = true;
                self.given_up = Some(fault.clone());
                self.vigil.resume(now);
                self.replace(*target, report.pid, now);
            }
            _ => {}
        }
        let unrecorded = self.note(report);
        self.actions.extend(unrecorded.map(Action::NotRecorded));
        if before != (self.job.is_served, self.job.is_finished) {
            if let Some((end, _)) = self.gone.take_if(|_| self.job.is_served) {
                self.settle(end, now);
            }
            self.spare_the_other(now);
        }
    }

    /// A rank ended, and that this does the other no harm was read late.
    fn spare_the_other(&mut self, now: Instant) {
        if self.signals >= 2 || self.is_killing {
            return;
        }
        if self.job.ends.iter().all(|end| end.rank == PHASE_B) {
            self.deadline = None;
            if !self.job.ends.is_empty() {
                self.vigil.resume(now);
            }
        } else if self.job.is_finished && self.job.ends.iter().all(End::is_good) {
            self.deadline = Some(now + GOODBYE);
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

    /// The front wants another process than this one of Phase B.
    fn replace(&mut self, target: TargetProcess, front: u32, now: Instant) {
        let is_target = |pid: u32| match target {
            TargetProcess::Unknown => false,
            TargetProcess::This(target) => pid == target,
            TargetProcess::Any => true,
        };
        let was_last = |end: &End| {
            end.rank == PHASE_B && (target == TargetProcess::Unknown || is_target(end.pid))
        };
        if let Some((end, _)) = self.gone.take_if(|(end, _)| was_last(end)) {
            if self.may_restart() {
                return self.restart(&end);
            }
            self.settle(end, now);
        }
        match self.pid(PHASE_B).filter(|pid| is_target(*pid)) {
            Some(pid) if self.may_restart() => {
                // It may be stopped, or cut off: nothing else ends it.
                self.replaced = Some(pid);
                self.actions.push(Action::Kill(pid));
            }
            // The front waits in vain.
            Some(_) => self.end_in_vain(front, now),
            // It ended for good, and none comes in its place: the same.
            None if self.job.ends.iter().any(was_last) => self.end_in_vain(front, now),
            // It was replaced already.
            None => {}
        }
    }

    /// No Phase B comes to this process of the front any more: what it lost the last one to ends the job.
    fn end_in_vain(&mut self, front: u32, now: Instant) {
        self.job
            .reports
            .extend(self.given_up.take().map(|fault| Reported {
                pid: front,
                rank: FRONT,
                report: Report::Exiting(fault),
            }));
        self.end_within(PATIENCE, now);
    }

    /// Ends a rank that gives no sign of life; another takes the place of Phase B, where there may be one.
    fn miss(&mut self, rank: Rank, silence: Duration, now: Instant) {
        self.vigil.ended(rank);
        let Some(pid) = self.pid(rank) else {
            return;
        };
        let (operation, when) = if self.job.ends.iter().any(|end| end.rank == PHASE_B) {
            ("end", "after Phase B had ended")
        } else {
            ("start", "before the ranks were connected")
        };
        let silence = silence.as_secs_f64();
        let what = format!("no sign of life for {silence:.1} s {when}; is its process stopped?");
        let fault = Fault::new(FaultKind::TimedOut, rank, operation, what);
        self.actions
            .push(Action::Log(format!("a rank is missed fault={fault}")));
        if rank != PHASE_B || !self.may_restart() {
            self.job.missed.get_or_insert(fault);
            self.end_within(PATIENCE, now);
        } else {
            self.given_up = Some(fault);
        }
        self.replaced = Some(pid);
        self.actions.push(Action::Kill(pid));
    }

    /// Time has passed.
    fn late(&mut self, now: Instant) {
        if let Some((rank, silence)) = self.vigil.look(now) {
            self.miss(rank, silence, now);
        }
        if let Some((end, _)) = self.gone.take_if(|(_, until)| now >= *until) {
            if self.front_waits && self.has_met && self.may_restart() {
                self.restart(&end);
            } else {
                self.settle(end, now);
            }
        }
        if self.deadline.is_some_and(|at| now >= at) {
            let left = self.running.iter().position(Option::is_some);
            if let Some(rank) = left.filter(|_| self.is_killing) {
                let what = "its process was killed and does not end; the kernel waits for a disk or a device in it";
                let fault = Fault::new(FaultKind::TimedOut, Rank::new(rank as u32), "end", what);
                self.stuck = Some(fault);
                return;
            }
            self.deadline = Some(now + KILLED_WITHIN);
            self.is_killing = true;
            let kills: Vec<_> = self.pids().map(Action::Kill).collect();
            self.actions.extend(kills);
        }
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
            if let Some((mut end, _)) = self.gone.take() {
                // Another would have come: it is the interrupt that ends the job.
                end.by_us = true;
                self.job.ends.push(end);
            }
            // A rank that is stopped does not hear it.
            self.end_within(ABORTED_WITHIN, now);
        }
        // The front drains and tells the others; all must hear of an abort. A Phase B that is about
        // to join a front which drains must not end at the first.
        let front_alone = self.signals == 1 && self.job.restarts > 0 && self.has_met;
        for rank in [FRONT, PHASE_B] {
            if let Some(pid) = self.pid(rank).filter(|_| rank == FRONT || !front_alone) {
                self.actions.push(Action::Pass(pid, signal));
            }
        }
    }

    /// Before the ranks are connected a signal ends them, and that they are is read by another thread.
    fn say_that_it_drains(&mut self) {
        if let Some(signal) = self.drains.take_if(|_| self.has_met) {
            self.actions.push(Action::SayDrain(signal));
        }
    }

    /// All ranks that run are to say what they do: those that would not die of it at once.
    fn asked(&mut self) {
        for running in self.running.iter_mut().flatten() {
            if running.hears {
                self.actions.push(Action::Ask(running.pid));
            } else {
                running.is_asked = true;
            }
        }
    }

    /// This process of a rank takes signals from now on.
    fn hears(&mut self, rank: Rank, pid: u32) {
        if let Some((_, hears)) = self.last.as_mut().filter(|(last, _)| *last == pid) {
            *hears = true;
        }
        let running = self.at(rank).and_then(Option::as_mut);
        let Some(running) = running.filter(|running| running.pid == pid) else {
            return;
        };
        running.hears = true;
        if std::mem::take(&mut running.is_asked) {
            self.actions.push(Action::Ask(pid));
        }
    }
}

/// Whether this process of Phase B ended because of the front.
fn blames_front(report: &Reported, phase_b: u32) -> bool {
    let is_blamed =
        |report: &Report| matches!(report, Report::Exiting(fault) if fault.rank == FRONT);
    report.pid == phase_b && is_blamed(&report.report)
}
