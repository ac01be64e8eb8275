//! What must hold when the supervisor of a small job is done.

use std::time::Duration;

use pp_contract::{FaultKind, Rank};

use super::{Budget, Step, TERM, World};
use crate::supervisor::verdict::Verdict;

impl World {
    /// What must hold when the supervisor is done.
    #[expect(clippy::too_many_lines, reason = "one claim after the other")]
    pub(in crate::supervisor::tests) fn check(mut self, all: Budget) {
        assert!(
            self.ranks.iter().all(|rank| rank.step == Step::Dead),
            "a rank is left"
        );
        assert_eq!(self.starts[0], 1, "rank 0 has the input");
        let hurt = |left: Budget| left.kills + left.stops + left.exits;
        let losses = hurt(all) - hurt(self.left);
        let signals = all.signals - self.left.signals;
        // A signal may end a rank that does not take it yet.
        let others = self.case.world as u32 - 1;
        let needed = (losses + others * signals).min(self.case.restarts);
        let again: u32 = self.starts[1..].iter().map(|starts| starts - 1).sum();
        assert!(again <= needed, "a start that nothing asked for");
        for at in 1..self.case.world {
            let may = self.starts[at] == 1 || self.case.may_restart.contains(&at);
            assert!(may, "rank {at} may not be started again");
        }
        if let Some(at) = self.rank_0_left {
            assert!(self.now - at <= Duration::from_secs(1), "nothing follows");
        }
        let was_killed = self.was_killed[1..].contains(&true);
        let is_calm = !self.hurt.contains(&true) && signals < 2;
        if let (Some(at), Some(killed), true) = (self.rank_0_done, self.killed, was_killed)
            && signals < 2
            && !self.hurt[1..].contains(&true)
        {
            assert!(
                killed - at >= Duration::from_secs(5),
                "no time for a goodbye"
            );
        }
        while let Some(report) = self.pipe.pop_front() {
            self.core.note(report);
        }
        if is_calm {
            assert!(!self.was_killed[0], "a rank 0 that nothing was done to");
            assert!(!was_killed || all.ticks > 0, "a calm rank");
            assert!(!self.ended_a_program, "a program that went on");
        }
        let verdict = self.core.verdict();
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
        if let Verdict::Fault(fault, _) = &verdict
            && signals == 0
            && !was_slow
        {
            let says_nothing = fault.detail.as_str().contains("did not end in good order");
            assert!(!says_nothing, "no reason is given");
        }
        if let Verdict::Fault(fault, _) = &verdict
            && fault.kind == FaultKind::PeerDied
        {
            let fates = self.ranks[fault.rank.get() as usize].fate;
            let behind = usize::from(!fault.detail.contains("behind the job"));
            let fate = fates.unwrap_or_default()[behind];
            assert!(fault.detail.as_str().contains(fate), "{fate}: {fault}");
        }
        let was_hurt = |rank: Rank| self.hurt[rank.get() as usize];
        match (&verdict, self.hurt[0], signals) {
            (Verdict::Done, false, _) => {
                let behind = self.hurt[1..].contains(&true) && !self.was_needed;
                assert!(!(self.case.may_go_on && behind), "nothing is said of it");
            }
            (Verdict::Interrupted(TERM), false, 1..) => {}
            (Verdict::Fault(fault, _), _, 1..) if fault.kind == FaultKind::Interrupted => {}
            // It had time to leave the job.
            (Verdict::Fault(fault, _), false, _) if !self.hurt.contains(&true) => {
                assert!(self.case.may_go_on && was_slow && was_killed, "{fault}");
            }
            (Verdict::Fault(fault, _), true, _) => {
                assert!(was_hurt(fault.rank), "a rank that nothing was done to");
            }
            (Verdict::Fault(fault, _), false, _) if self.hurt.contains(&true) => {
                let timed_out = fault.kind == FaultKind::TimedOut;
                let was_late = self.case.may_go_on && was_slow && timed_out;
                assert!(
                    was_hurt(fault.rank) || was_late,
                    "a rank that nothing was done to"
                );
                let had_none = self.case.restarts == 0 || {
                    let mut hurt = (1..self.case.world).filter(|at| self.hurt[*at]);
                    hurt.any(|at| !self.case.may_restart.contains(&at))
                };
                let behind = self.case.may_go_on && !self.was_needed;
                let is_over = had_none || signals > 0 || was_slow || behind;
                let may_fail = losses > self.case.restarts || is_over;
                assert!(may_fail, "there was a restart left");
                assert!(
                    self.was_needed || !self.case.says_served || behind,
                    "the rank was needed no more"
                );
            }
            other => panic!("{other:?}"),
        }
    }
}
