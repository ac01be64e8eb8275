//! What a supervisor does at each event, and once a rank is silent or takes longer than it may.

use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};

use super::Core;
use crate::supervisor::events::{Action, Event};
use crate::supervisor::verdict::End;
use crate::times::{KILLED_WITHIN, PATIENCE};

impl Core {
    /// Takes in what happened, and gives what is to be done, in that order.
    pub(in crate::supervisor) fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Started(rank, pid) => self.started(rank, pid, now),
            Event::Ended(rank, status, by_us) => self.ended(rank, status, by_us, now),
            Event::Reported(report) => self.reported(report, now),
            Event::ReportsOver => {
                // Rank 0's exit code alone says whether the job has done its work.
                self.vigil.end();
                self.job.is_finished = true;
                if self.job.may_go_on {
                    // None can say that it has left.
                    let running = self.ranks.iter_mut().filter_map(|p| p.running.as_mut());
                    running.for_each(|running| running.has_left = true);
                }
                if self.job.ends.iter().all(End::is_good) {
                    self.spare_the_others(now);
                }
            }
            Event::Signal(signal) => self.signalled(signal, now),
            Event::Asked => self.asked(),
            Event::Tick => self.late(now),
        }
        self.kill_the_replaced(now);
        std::mem::take(&mut self.actions)
    }

    /// Ends a rank that gives no sign of life; another process takes its place, where one may.
    fn miss(&mut self, rank: Rank, silence: Duration, now: Instant) {
        self.vigil.ended(rank);
        let Some(pid) = self.pid(rank) else {
            return;
        };
        let (operation, when) = match self.job.ends.first() {
            Some(end) => ("end", format!("after rank {} had ended", end.rank)),
            None => ("start", "before the ranks were connected".into()),
        };
        let silence = silence.as_secs_f64();
        let what = format!("no sign of life for {silence:.1} s {when}; is its process stopped?");
        let fault = Fault::new(FaultKind::TimedOut, rank, operation, what);
        self.actions
            .push(Action::Log(format!("a rank is missed fault={fault}")));
        if !self.may_restart(rank) {
            self.job.not_replaced.get_or_insert(fault);
            self.end_within(PATIENCE, now);
        } else if let Some(place) = self.at(rank) {
            place.given_up = Some(fault);
        }
        self.kill_to_replace(rank, pid, now);
    }

    /// The ranks whose processes are to end now. Behind a job that is done, programs go on that have left it.
    fn to_end(&self) -> Vec<(Rank, u32)> {
        let may = self.job.may_go_on && self.job.is_done().is_some() && self.signals < 2;
        let ranks = (0..).map(Rank::new).zip(&self.ranks);
        let running = ranks.filter_map(|(rank, place)| Some((rank, place, place.running?)));
        let ends = running.filter(|(_, place, running)| {
            !may || !running.has_left || place.replaced == Some(running.pid)
        });
        ends.map(|(rank, _, running)| (rank, running.pid)).collect()
    }

    /// Only programs run that go on behind the job: they may take the time that they want.
    fn let_go_on(&mut self, now: Instant) {
        (self.deadline, self.is_killing) = (None, false);
        self.vigil.resume(now);
        if !std::mem::replace(&mut self.says_who_goes_on, true) {
            let ranks = (0..).zip(&self.ranks);
            let left = ranks.filter(|(_, place)| place.running.is_some());
            let left: Vec<_> = left.map(|(rank, _): (u32, _)| rank.to_string()).collect();
            self.actions.push(Action::Say(format!(
                "pp: the job is done; waiting for the programs of the other ranks that go on: {}",
                left.join(", ")
            )));
        }
    }

    /// Time has passed.
    fn late(&mut self, now: Instant) {
        for (rank, silence) in self.vigil.look(now) {
            self.miss(rank, silence, now);
        }
        let ranks = (0..self.ranks.len() as u32).map(Rank::new);
        for rank in ranks.collect::<Vec<_>>() {
            let gone = self.at(rank).map(|place| &mut place.gone);
            let late = gone.and_then(|gone| gone.take_if(|(_, until)| now >= *until));
            if let Some((end, _)) = late {
                if self.is_awaited(rank) && self.has_met && self.may_restart(rank) {
                    self.restart(end, now);
                } else {
                    self.settle(end, now);
                }
            }
        }
        if self.deadline.is_some_and(|at| now >= at) {
            let ends = self.to_end();
            let Some((rank, _)) = ends.first() else {
                return self.let_go_on(now);
            };
            if self.is_killing {
                let what = "its process was killed and does not end; the kernel waits for a disk or a device in it";
                self.stuck = Some(Fault::new(FaultKind::TimedOut, *rank, "end", what));
                return;
            }
            self.deadline = Some(now + KILLED_WITHIN);
            self.is_killing = true;
            self.actions
                .extend(ends.into_iter().map(|(_, pid)| Action::Kill(pid)));
        }
    }
}
