//! Runs of the real transport: what it does is ordered at every seed, and what the fakes spoil is seen.

use crate::fakes::check::{Expect, Report, Rule, check};
use crate::job::{Case, Outcome, run};

const CASE: Case = Case { chunks: 60, depth: 2, seed: 1, eager: 4096, blocking: true };

fn judge(outcome: &Outcome, complete: bool) -> Report {
    check(&outcome.recordings, Expect { warm_up: 12, complete })
}

#[track_caller]
fn assert_proven(case: Case) {
    let outcome = run(case, "");
    assert!(outcome.is_right, "{}", outcome.said);
    let report = judge(&outcome, true);
    report.assert_clean();
    // The proof was about something: four fifths of the chunks carry a payload, there and back.
    assert!(report.transfers as u64 >= case.chunks / 5 * 4 * 4);
    assert!(report.accesses > report.transfers && report.steady_lines > report.transfers);
}

#[test]
fn every_seed_and_depth_is_in_order() {
    for (seed, depth) in [(1, 1), (2, 2), (3, 4), (4, 8)] {
        assert_proven(Case { seed, depth, ..CASE });
    }
}

#[test]
fn payloads_below_and_above_the_eager_limit_are_in_order() {
    for eager in [0, 100, 1 << 20] {
        assert_proven(Case { eager, seed: eager, ..CASE });
    }
}

#[test]
fn non_blocking_communicators_are_in_order() {
    assert_proven(Case { blocking: false, ..CASE });
}

#[test]
fn a_long_run_is_in_order() {
    assert_proven(Case { chunks: 2000, depth: 4, ..CASE });
}
