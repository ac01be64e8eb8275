//! Signals to a supervised job: which rank gets them, and when.

use pp_contract::Rank;
use rustix::process::{Signal, kill_process};

use super::super::{FRONT, signals};
use super::{ABORTED_WITHIN, Job, number};

impl Job {
    pub(super) fn signalled(&mut self, signal: i32) {
        if signals::is_echo(signal) {
            return;
        }
        self.signals += 1;
        if signals::note(signal) {
            self.drains = Some(signal as u8);
            self.say_that_it_drains();
        }
        if self.signals == 2 {
            self.aborted_after = Some(self.reports.len());
            if let Some((mut end, _)) = self.gone.take() {
                // Another would have come: it is the interrupt that ends the job.
                end.by_us = true;
                self.ends.push(end);
            }
            // A rank that is stopped does not hear it.
            self.end_within(ABORTED_WITHIN);
        }
        // The front drains and tells the others; all must hear of an abort. A Phase B that is about
        // to join a front which drains must not end at the first.
        let front_alone = self.signals == 1 && self.restarts > 0 && self.has_met;
        let signal = Signal::from_named_raw(signal).unwrap_or(Signal::INT);
        for (rank, pid) in self.running.iter().enumerate() {
            if let Some(pid) = pid.filter(|_| rank == FRONT.get() as usize || !front_alone) {
                let _ = kill_process(pid, signal);
            }
        }
    }

    /// Before the ranks are connected a signal ends them, and that they are is read by another thread.
    pub(super) fn say_that_it_drains(&mut self) {
        if let Some(signal) = self.drains.take_if(|_| self.has_met) {
            signals::say_that_it_drains(signal);
        }
    }

    /// All ranks that run are to say what they do: those that would not die of it at once.
    pub(super) fn asked(&mut self) {
        for (rank, pid) in self.running.iter().enumerate() {
            match pid {
                Some(pid) if self.hears[rank] => {
                    let _ = kill_process(*pid, Signal::USR1);
                }
                _ => self.is_asked[rank] = true,
            }
        }
    }

    /// This process of a rank takes signals from now on.
    pub(super) fn hears(&mut self, rank: Rank, pid: u32) {
        let at = rank.get() as usize;
        let Some(running) = self.running.get(at).copied().flatten() else {
            return;
        };
        if number(running) == pid {
            self.hears[at] = true;
            if std::mem::take(&mut self.is_asked[at]) {
                let _ = kill_process(running, Signal::USR1);
            }
        }
    }
}
