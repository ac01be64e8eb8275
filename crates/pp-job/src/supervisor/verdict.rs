//! How the ranks of a supervised job ended, and the one reason that is given for all of them.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use pp_contract::{Fault, FaultKind, Rank};
use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL, SIGTERM};

use crate::RANK_0;
use crate::error::code_of;
use crate::reports::{Report, Reported};

/// What is said of a rank that ended well, and too early.
const EARLY: &str = "the process ended before its work was done; does a kernel plugin call exit?";

/// What is said of a rank that had to be killed.
const STUCK: &str = "the process did not end in good order after the others had";

/// How a rank ended.
#[derive(Clone, Debug)]
pub(super) struct End {
    pub(super) rank: Rank,
    pub(super) pid: u32,
    /// `None` if the kernel does not say how.
    pub(super) status: Option<ExitStatus>,
    /// It had to be killed here.
    pub(super) by_us: bool,
}

impl End {
    /// Says whether it did its work, or as much of it as a signal allowed.
    pub(super) fn is_good(&self) -> bool {
        self.code() == Some(0) || self.interrupted_by().is_some()
    }

    /// The signal that ended its job early, as its exit code says.
    fn interrupted_by(&self) -> Option<u8> {
        let signal = u8::try_from(self.code()? - 128).ok()?;
        [SIGINT, SIGTERM, SIGHUP]
            .contains(&signal.into())
            .then_some(signal)
    }

    pub(super) fn was_killed(&self) -> bool {
        self.signal() == Some(Signal::KILL.as_raw())
    }

    /// How it ended, for a person.
    fn how(&self) -> String {
        match (self.signal(), self.code()) {
            (Some(signal), _) => format!("killed by {}", signal_name(signal)),
            (None, Some(code)) => format!("ended with exit code {code}"),
            (None, None) => "ended".into(),
        }
    }

    /// Why it ended, as it said itself.
    fn reported<'a>(&self, reports: &'a [Reported]) -> Option<&'a Fault> {
        reports.iter().find_map(|report| match &report.report {
            Report::Exiting(fault) if report.pid == self.pid => Some(fault),
            _ => None,
        })
    }

    /// Says whether it ended because of what it did, and was not stopped, killed or left by another.
    pub(super) fn is_own_doing(&self, reports: &[Reported]) -> bool {
        let outside = [SIGINT, SIGTERM, SIGHUP, SIGKILL];
        let is_outside = self
            .signal()
            .is_some_and(|signal| outside.contains(&signal));
        match self.reported(reports) {
            Some(fault) => fault.rank == self.rank && fault.kind != FaultKind::Interrupted,
            None => !is_outside && self.interrupted_by().is_none(),
        }
    }

    /// Why the rank is gone, and in words: what it reported itself, or why it was given up and killed here, or how it ended.
    pub(super) fn why(&self, reports: &[Reported], given_up: Option<Fault>) -> (Fault, String) {
        match self
            .reported(reports)
            .cloned()
            .or(given_up.filter(|_| self.by_us))
        {
            Some(fault) => (fault.clone(), fault.to_string()),
            None => {
                let how = self.how();
                (Fault::new(FaultKind::PeerDied, self.rank, "run", &how), how)
            }
        }
    }

    /// The signal that asks for an end and ended it, since it did not handle signals.
    fn interrupted_at_once(&self) -> Option<u8> {
        let asks = |signal: &i32| [SIGINT, SIGTERM, SIGHUP].contains(signal);
        self.signal().filter(asks).map(|signal| signal as u8)
    }

    fn signal(&self) -> Option<i32> {
        self.status.and_then(|s| s.signal())
    }

    fn code(&self) -> Option<i32> {
        self.status.and_then(|s| s.code())
    }

    /// Says whether rank 0 may not know why: it ended well, because it was told to or because a plugin
    /// calls `exit`; or it panicked.
    pub(super) fn is_silent(&self) -> bool {
        self.is_good() || self.code() == Some(i32::from(code_of(FaultKind::Internal)))
    }

    /// Says whether another process in its place may fare better: it was killed, or ended because a rank
    /// or a device was gone or silent.
    pub(super) fn is_worth_a_restart(&self) -> bool {
        let is_worth = |code| {
            let mut kinds = FaultKind::ALL
                .iter()
                .filter(|kind| kind.is_worth_a_restart());
            kinds.any(|kind| code == i32::from(code_of(*kind)))
        };
        self.signal().is_some() || self.code().is_some_and(is_worth)
    }
}

/// What is known of a job that counts when it is over.
#[derive(Clone, Debug, Default)]
pub(super) struct Ends {
    /// How ranks ended for good, in that order.
    pub(super) ends: Vec<End>,
    /// What the ranks reported, in that order, of their ends.
    pub(super) reports: Vec<Reported>,
    pub(super) interrupted: bool,
    /// How many reports there were when a second interrupt came. What came later came of it.
    pub(super) aborted_after: Option<usize>,
    /// Why a rank that ended, or was ended for giving no sign of life, was not replaced.
    pub(super) not_replaced: Option<Fault>,
    /// Rank 0 has everything of the other ranks, which may end as they like.
    pub(super) is_served: bool,
    /// Rank 0 has done its work, or cannot say so any more.
    pub(super) is_finished: bool,
    /// The programs of the other ranks may go on behind the job, and must end well.
    pub(super) may_go_on: bool,
    /// Over all ranks.
    pub(super) restarts: u32,
    pub(super) used: u32,
}

impl Ends {
    /// Says whether this process ended because of this rank, as it says.
    pub(super) fn blames(&self, pid: u32, rank: Rank) -> bool {
        self.reports.iter().any(|report| report.blames(pid, rank))
    }

    /// The faults that the last process of each rank reported: after how many reports, of which rank, and what.
    fn told<'a>(&'a self) -> Vec<(usize, Rank, &'a Fault)> {
        let is_last = |report: &Reported| self.ends.iter().any(|end| end.pid == report.pid);
        let told = |(at, report): (usize, &'a Reported)| match &report.report {
            Report::Exiting(fault) if is_last(report) => Some((at, report.rank, fault)),
            _ => None,
        };
        self.reports.iter().enumerate().filter_map(told).collect()
    }

    /// The job failed for this reason.
    fn because(&self, kind: FaultKind, rank: Rank, operation: &str, what: &str) -> Verdict {
        // A launcher or a person may have sent the signal to a rank alone.
        let signal = self.ends.iter().find_map(End::interrupted_by);
        let signal = signal.filter(|_| kind == FaultKind::Interrupted);
        let suffix = match self.used {
            0 => String::new(),
            used => format!("; {used} of {} restarts were used", self.restarts),
        };
        Verdict::Fault(
            Fault::new(kind, rank, operation, format!("{what}{suffix}")),
            signal,
        )
    }

    /// The job failed with this fault.
    fn again(&self, fault: &Fault) -> Verdict {
        let said = self.because(fault.kind, fault.rank, &fault.operation, &fault.detail);
        match said {
            Verdict::Fault(said, signal) => {
                let whole = fault.clone().with_detail(said.detail.as_str());
                Verdict::Fault(whole, signal)
            }
            said => said,
        }
    }

    /// How rank 0 ended, if the work is done: then it had everything of the other ranks.
    pub(super) fn is_done(&self) -> Option<&End> {
        self.good_rank_0().filter(|_| self.is_finished)
    }

    /// How rank 0 ended, if it ended well and reported no fault.
    fn good_rank_0(&self) -> Option<&End> {
        let has_reported = (self.told().iter()).any(|(_, reporter, _)| *reporter == RANK_0);
        let rank_0 = self.ends.iter().find(|end| end.rank == RANK_0)?;
        (rank_0.is_good() && !has_reported).then_some(rank_0)
    }

    /// A program of another rank did not end well behind the job.
    fn behind(&self) -> Option<Verdict> {
        let mut bad = self
            .ends
            .iter()
            .filter(|end| self.may_go_on && end.rank != RANK_0 && end.code() != Some(0));
        let end = bad.clone().find(|end| !end.by_us).or(bad.next())?;
        let asked = end.interrupted_by().or(end.interrupted_at_once());
        if self.aborted_after.is_some() && (end.by_us || asked.is_some()) {
            let what = "aborted by a second interrupt, behind the job";
            return Some(self.because(FaultKind::Interrupted, RANK_0, "end", what));
        }
        if let Some(signal) = asked.filter(|_| self.interrupted) {
            return Some(Verdict::Interrupted(signal));
        }
        if let Some(fault) = self.not_replaced.as_ref().filter(|_| end.by_us) {
            return Some(self.again(fault));
        }
        if let Some(fault) = end.reported(&self.reports) {
            return Some(self.again(fault));
        }
        Some(match end.by_us {
            true => self.because(FaultKind::TimedOut, end.rank, "end", STUCK),
            false => {
                let what = format!("{}, behind the job", end.how());
                self.because(FaultKind::PeerDied, end.rank, "end", &what)
            }
        })
    }

    /// What the exit code says of a rank that did not report why it ended.
    fn silent(&self, end: &End) -> Option<Verdict> {
        let what = match end.code()? {
            // Wrong usage is not reported: the rank has printed its own line.
            2 => return Some(Verdict::Told(2)),
            0 => EARLY.to_owned(),
            code => format!(
                "the process ended with exit code {code} and did not report why; does a kernel plugin call exit?"
            ),
        };
        Some(self.because(FaultKind::PeerDied, end.rank, "run", &what))
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Done,
    /// A signal ended it early, in good order.
    Interrupted(u8),
    /// It failed. If a signal was the reason, this is the one that a rank got.
    Fault(Fault, Option<u8>),
    /// It failed with this exit code, and a rank has said why.
    Told(u8),
}

/// One reason for all ranks: the root cause, where it is known.
pub(super) fn verdict(job: &Ends) -> Verdict {
    let ends = &job.ends;
    let reports = job.told();
    let has_reported = |rank: Rank| reports.iter().any(|(_, reporter, _)| *reporter == rank);
    // Rank 0 says when the work is done. Then it had everything of the other ranks.
    if let Some(rank_0) = job.is_done() {
        return match rank_0.interrupted_by() {
            Some(signal) => Verdict::Interrupted(signal),
            None => job.behind().unwrap_or(Verdict::Done),
        };
    }
    let rank_0 = job.good_rank_0();
    // A rank that did not handle signals yet is ended by one, and its peers report that it is gone.
    let is_reported = reports
        .iter()
        .any(|(_, _, fault)| fault.kind == FaultKind::Interrupted);
    if job.interrupted && !is_reported && ends.iter().any(|end| end.interrupted_at_once().is_some())
    {
        let what = "interrupted before the ranks were ready";
        return job.because(FaultKind::Interrupted, RANK_0, "set up", what);
    }
    if let Some(fault) = &job.not_replaced {
        return job.again(fault);
    }
    // A rank that somebody killed is the cause of whatever the others report; one that said why it
    // ends, and crashed on its way out, is not; nor is one that rank 0 needed no more.
    let is_needed = |rank| rank == RANK_0 || !job.is_served;
    // Nor is one that did not handle signals yet when a signal came for all.
    let killed = ends
        .iter()
        .filter(|end| !end.by_us && !has_reported(end.rank) && is_needed(end.rank))
        .filter(|end| !job.interrupted || end.interrupted_at_once().is_none());
    if let Some((rank, signal)) = killed
        .filter_map(|end| Some((end.rank, end.signal()?)))
        .next()
    {
        let name = signal_name(signal);
        let what = format!(
            "the process was ended by {name}; if you did not send it, look for the kernel's \
             out-of-memory killer or a crash in a kernel plugin"
        );
        return job.because(FaultKind::PeerDied, rank, "run", &what);
    }
    if job.interrupted && rank_0.is_some_and(|end| end.interrupted_by().is_some()) {
        let what = "interrupted before the work was done";
        return job.because(FaultKind::Interrupted, RANK_0, "run", what);
    }
    if rank_0.is_some() && job.aborted_after.is_none() {
        return job.because(FaultKind::PeerDied, RANK_0, "run", EARLY);
    }
    let counts = |at: usize, fault: &Fault| {
        job.aborted_after.is_none_or(|before| at < before) || fault.kind == FaultKind::Interrupted
    };
    let reports: Vec<_> = reports
        .iter()
        .filter(|(at, _, fault)| counts(*at, fault))
        .copied()
        .collect();
    let silent = |end: &End| job.silent(end);
    if let Some(fault) = cause(&reports) {
        // Who sees that a rank is gone can only guess why.
        let mut gone = ends.iter().filter(|end| end.rank == fault.rank);
        let gone = gone.find(|end| !has_reported(end.rank) && end.interrupted_by().is_none());
        let gone = gone.filter(|_| fault.kind == FaultKind::PeerDied);
        return gone.and_then(silent).unwrap_or_else(|| job.again(fault));
    }
    if job.aborted_after.is_some() {
        let what = "aborted by a second interrupt; what was in flight is lost";
        return job.because(FaultKind::Interrupted, RANK_0, "run", what);
    }
    if let Some(said) = ends.iter().filter(|end| !end.is_good()).find_map(silent) {
        return said;
    }
    let mut others = ends.iter().filter(|end| end.rank != RANK_0);
    if let Some(early) = others.find(|end| end.is_good() && !job.is_served) {
        return job.because(FaultKind::PeerDied, early.rank, "run", EARLY);
    }
    let stuck = ends.iter().find(|end| !end.is_good());
    let rank = stuck.map_or(RANK_0, |end| end.rank);
    job.because(FaultKind::TimedOut, rank, "end", STUCK)
}

/// The first fault that was reported. A rank that ends with a fault of its own may be slower to say so
/// than another is to say that it died, or what it was told of the fault; its words count then. They may name a rank
/// whose words count more. Of ranks that failed alike, each by itself, the lowest is named, whichever was first.
fn cause<'a>(reports: &[(usize, Rank, &'a Fault)]) -> Option<&'a Fault> {
    let (_, reporter, mut first) = *reports.first()?;
    // Ranks that say of each other that they died say nothing new.
    let mut heard = vec![reporter];
    while !heard.contains(&first.rank) || heard.len() == 1 {
        heard.push(first.rank);
        let own = reports.iter().find(|(_, reporter, fault)| {
            let is_of_its_own = fault.rank == *reporter || first.kind == FaultKind::PeerDied;
            let is_new = fault.kind != FaultKind::PeerDied || !heard.contains(&fault.rank);
            *reporter == first.rank && is_of_its_own && is_new
        });
        match own {
            Some((_, _, own)) => first = own,
            None => break,
        }
    }
    let what = |fault: &Fault| (fault.kind, fault.operation.clone(), fault.detail.clone());
    let own = reports
        .iter()
        .filter(|(_, reporter, fault)| fault.rank == *reporter);
    let alike = own
        .map(|(_, _, fault)| *fault)
        .filter(|fault| what(fault) == what(first));
    alike.min_by_key(|fault| fault.rank).or(Some(first))
}

fn signal_name(signal: i32) -> String {
    let name = signal_hook::low_level::signal_name(signal);
    name.map_or_else(
        || format!("signal {signal}"),
        |name| format!("signal {signal} ({name})"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANK_1: Rank = Rank::new(1);

    #[test]
    fn what_rank_0_says_of_its_work_counts_more_than_how_the_processes_ended() {
        const SEGV: i32 = 11;
        let full = Fault::new(FaultKind::Io, RANK_0, "write output", "the disk is full");
        let (exit_0, exit_4, exit_130) = (0, 4 << 8, 130 << 8);
        // How rank 0 ended and what it reported, how rank 1 ended, what rank 0 had of it, and the code of the job.
        let cases = [
            (exit_0, None, exit_0, [true, true], None),
            (exit_0, None, SEGV, [true, true], None),
            (exit_130, None, exit_130, [true, true], Some(130)),
            // A plugin called exit.
            (exit_0, None, exit_0, [false, false], Some(7)),
            (exit_130, None, exit_0, [true, false], Some(7)),
            (exit_4, Some(&full), SEGV, [true, false], Some(4)),
            (exit_4, Some(&full), SEGV, [false, false], Some(7)),
        ];
        for (rank_0, report, back, [is_served, is_finished], code) in cases {
            let end = |rank, number, status| End {
                rank,
                pid: number,
                status: Some(ExitStatus::from_raw(status)),
                by_us: false,
            };
            let report = report.map(|fault| Reported {
                pid: 10,
                rank: RANK_0,
                report: Report::Exiting(fault.clone()),
            });
            let ends = Ends {
                ends: vec![end(RANK_1, 11, back), end(RANK_0, 10, rank_0)],
                reports: report.into_iter().collect(),
                interrupted: false,
                aborted_after: None,
                not_replaced: None,
                is_served,
                is_finished,
                may_go_on: false,
                restarts: 0,
                used: 0,
            };
            let ended = match verdict(&ends) {
                Verdict::Done => None,
                Verdict::Interrupted(signal) => Some(128 + signal),
                Verdict::Fault(fault, _) => Some(code_of(fault.kind)),
                Verdict::Told(code) => panic!("{code}"),
            };
            assert_eq!(ended, code, "{rank_0} {back} {is_served} {is_finished}");
        }
    }

    #[test]
    fn of_ranks_that_fail_alike_the_lowest_is_named_whichever_was_first() {
        let fault = |rank, detail| Fault::new(FaultKind::Plugin, rank, "load kernels", detail);
        let (zero, one) = (fault(RANK_0, "no plugin"), fault(RANK_1, "no plugin"));
        let other = fault(RANK_1, "no memory");
        let named = |reports: &[(usize, Rank, &Fault)]| cause(reports).cloned();
        let [early, late] = [(0, RANK_1, &one), (1, RANK_0, &zero)];
        assert_eq!(named(&[early, late]), Some(zero.clone()));
        assert_eq!(named(&[late, early]), Some(zero.clone()));
        assert_eq!(named(&[early]), Some(one.clone()));
        // Two reasons: the first counts.
        assert_eq!(named(&[(0, RANK_1, &other), late]), Some(other.clone()));
        // What rank 0 was told of rank 1 has fewer kinds, and is no failure of its own.
        let short = Fault::new(FaultKind::Internal, RANK_1, "stage", "no plugin");
        assert_eq!(
            named(&[(0, RANK_0, &short), (1, RANK_1, &one)]),
            Some(one.clone())
        );
        assert_eq!(named(&[(0, RANK_0, &one), early]), Some(one.clone()));
        // Each says of the next that it died.
        let [two, died_of] =
            [2, 1].map(|rank| Fault::new(FaultKind::PeerDied, Rank::new(rank), "run", "a fault"));
        let words = [
            (0, RANK_0, &two),
            (1, Rank::new(2), &died_of),
            (2, RANK_1, &one),
        ];
        assert_eq!(named(&words), Some(one.clone()));
        assert_eq!(named(&words[..2]), Some(died_of.clone()));
        assert_eq!(named(&words[..1]), Some(two.clone()));
        // Of each other: the first counts.
        let of_zero = Fault::new(FaultKind::PeerDied, RANK_0, "run", "a fault");
        assert_eq!(
            named(&[(0, RANK_0, &died_of), (1, RANK_1, &of_zero)]),
            Some(died_of)
        );
    }
}
