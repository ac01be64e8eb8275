//! Runs of the real transport: what it does is ordered at every seed, and what the fakes spoil is seen.

use crate::fakes::check::{Expect, Report, Rule, check};
use crate::job::{Case, Outcome, run};

const CASE: Case = Case {
    chunks: 60,
    depth: 2,
    seed: 1,
    eager: 4096,
    blocking: true,
};

fn judge(outcome: &Outcome, complete: bool) -> Report {
    check(
        &outcome.recordings,
        Expect {
            warm_up: 12,
            complete,
            ..Expect::default()
        },
    )
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
        assert_proven(Case {
            seed,
            depth,
            ..CASE
        });
    }
}

#[test]
fn payloads_below_and_above_the_eager_limit_are_in_order() {
    for eager in [0, 100, 1 << 20] {
        assert_proven(Case {
            eager,
            seed: eager,
            ..CASE
        });
    }
}

#[test]
fn non_blocking_communicators_are_in_order() {
    assert_proven(Case {
        blocking: false,
        ..CASE
    });
}

#[test]
fn a_long_run_is_in_order() {
    assert_proven(Case {
        chunks: 2000,
        depth: 4,
        ..CASE
    });
}

/// Spoils one run at the k-th call and says whether the checker saw the rule broken. Whatever harm was done is seen,
/// and usually it is seen where no harm was done: by the order, not by the bytes.
#[track_caller]
fn is_seen(fault: &str, k: u32, rule: Rule) -> bool {
    let faults = fault.replacen(":", &format!(":{k}:"), 1);
    let outcome = run(CASE, &faults);
    let report = judge(&outcome, false);
    let found = !report.violations.is_empty();
    assert!(
        found || outcome.is_right,
        "{faults}: harm was done and not seen: {}",
        outcome.said
    );
    report.broke(rule)
}

#[track_caller]
fn assert_seen(fault: &str, ks: std::ops::Range<u32>, rule: Rule) {
    for k in ks {
        assert!(is_seen(fault, k, rule), "{fault} at call {k}");
    }
}

/// Neighbouring calls are those of different streams: sends, arrivals, stages.
const CALLS: std::ops::Range<u32> = 40..46;

#[test]
fn a_dropped_wait_is_seen() {
    assert_seen("cuStreamWaitEvent:skip", CALLS, Rule::Race);
}

/// The event still tells of the slot's last round: the slot is sent, read or written too early. A few of them do no
/// harm, since a later event of the same stream was seen done before the slot was used.
#[test]
fn a_slot_used_too_early_is_seen() {
    for fault in ["cuEventRecord:skip", "cuEventQuery:skip"] {
        let seen = CALLS.filter(|&k| is_seen(fault, k, Rule::Race)).count();
        assert!(seen * 2 >= CALLS.len(), "{fault}: {seen}");
    }
}

#[test]
fn an_early_free_is_seen() {
    assert_seen("ncclSend:free", 40..42, Rule::Lifetime);
}

#[test]
fn a_second_thread_is_seen() {
    assert_seen("ncclSend:thread", 40..42, Rule::Issuer);
    assert_seen("ncclRecv:thread", 40..42, Rule::Issuer);
}

#[test]
fn an_order_changed_on_one_rank_is_seen() {
    assert_seen("ncclSend:swap", 40..42, Rule::Agreement);
    assert_seen("ncclRecv:swap", 40..42, Rule::Agreement);
}

#[test]
fn another_size_is_seen() {
    assert_seen("ncclSend:half", 40..42, Rule::Agreement);
    assert_seen("ncclRecv:half", 40..42, Rule::Agreement);
}

#[test]
fn a_lost_send_is_seen() {
    assert_seen("ncclSend:skip", 40..42, Rule::Agreement);
}

#[test]
fn a_synchronization_is_seen() {
    assert_seen("ncclSend:sync", 40..42, Rule::Steady);
}
