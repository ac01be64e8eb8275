//! Runs of the real transport: what it does is ordered at every seed, and what the fakes spoil is seen.

use crate::job::{Case, Outcome, run};
use pp_fakes::check::{Expect, Report, Rule, check};

pub(crate) const CASE: Case = Case {
    chunks: 60,
    depth: 2,
    seed: 1,
    eager: 4096,
    blocking: true,
    p2p: None,
    host: None,
    cut: None,
};

/// The same by copy engine, with one slot, so that few orders follow from those of other slots.
pub(crate) const P2P: Case = Case {
    depth: 1,
    p2p: Some(1),
    ..CASE
};

/// The same where the rank that answers is in host memory, or the one that sends.
pub(crate) const BESIDE_HOST: [Case; 2] = [
    Case {
        host: Some(1),
        ..P2P
    },
    Case {
        host: Some(0),
        ..P2P
    },
];

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
    // The proof was about something: four fifths of the chunks carry a payload, there and back. NCCL receives each, too.
    let calls = if case.p2p.is_some() { 2 } else { 4 };
    assert!(report.transfers as u64 >= case.chunks / 5 * 4 * calls);
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
fn every_seed_and_depth_is_in_order_by_copy_engine() {
    for (seed, depth) in [(1, 1), (2, 2), (3, 4), (4, 8)] {
        assert_proven(Case { seed, depth, ..P2P });
    }
}

#[test]
fn every_seed_and_depth_is_in_order_beside_host_memory() {
    for (seed, depth) in [(1, 1), (2, 2), (3, 4), (4, 8)] {
        for case in BESIDE_HOST {
            assert_proven(Case {
                seed,
                depth,
                ..case
            });
        }
    }
}

/// Each has slots and numbers of its own, so that it does not believe those of the one before.
#[test]
fn generations_have_nothing_in_common() {
    let [to_host, from_host] = BESIDE_HOST;
    for case in [P2P, to_host, from_host] {
        let outcome = run(
            Case {
                p2p: Some(3),
                ..case
            },
            "",
        );
        assert!(outcome.is_right, "{}", outcome.said);
        // To connect is no work of the steady state.
        let expect = Expect {
            warm_up: usize::MAX,
            ..Expect::default()
        };
        let report = check(&outcome.recordings, expect);
        report.assert_clean();
        assert_eq!(report.transfers as u64, CASE.chunks / 5 * 4 * 2 * 3);
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
    let [to_host, from_host] = BESIDE_HOST;
    for case in [CASE, P2P, to_host, from_host] {
        assert_proven(Case {
            chunks: 2000,
            depth: 4,
            ..case
        });
    }
}

/// Spoils one run at the k-th call and says whether the checker saw the rule broken. Whatever harm was done is seen,
/// and usually it is seen where no harm was done: by the order, not by the bytes.
#[track_caller]
fn is_seen(case: Case, fault: &str, k: u32, rule: Rule) -> bool {
    let faults = fault.replacen(":", &format!(":{k}:"), 1);
    let outcome = run(case, &faults);
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
fn assert_seen(case: Case, fault: &str, ks: std::ops::Range<u32>, rule: Rule) {
    for k in ks {
        assert!(is_seen(case, fault, k, rule), "{fault} at call {k}");
    }
}

#[track_caller]
fn assert_mostly_seen(case: Case, fault: &str) {
    let seen = CALLS.filter(|&k| is_seen(case, fault, k, Rule::Race));
    let seen = seen.count();
    assert!(seen * 3 >= CALLS.len(), "{fault}: {seen}");
}

/// Neighbouring calls are those of different streams: sends, arrivals, stages.
const CALLS: std::ops::Range<u32> = 40..46;

#[test]
fn a_dropped_wait_is_seen() {
    assert_seen(CASE, "cuStreamWaitEvent:skip", CALLS, Rule::Race);
    assert_mostly_seen(P2P, "cuStreamWaitEvent:skip");
}

/// Before its copy or the work that reads the slot, or on another stream: a number or a credit. Numbers are half of
/// these calls, and of the credits a few do no harm: an answer that has come says that the slot was read.
#[test]
fn a_number_out_of_order_is_seen() {
    assert_mostly_seen(P2P, "cuStreamWriteValue32:early");
    assert_mostly_seen(P2P, "cuStreamWriteValue32:other");
}

/// A payload that comes to harm on its way has its number, and no order to break: its reader sees it.
#[test]
fn a_payload_that_comes_to_harm_is_wrong() {
    let outcome = run(P2P, "cuMemcpyDtoDAsync:40:flip");
    judge(&outcome, true).assert_clean();
    assert!(outcome.said.contains("bytes are wrong"), "{}", outcome.said);
}

/// The event still tells of the slot's last round: the slot is sent, read or written too early. A few of them do no
/// harm, since a later event of the same stream was seen done before the slot was used.
#[test]
fn a_slot_used_too_early_is_seen() {
    assert_mostly_seen(CASE, "cuEventRecord:skip");
    assert_mostly_seen(CASE, "cuEventQuery:skip");
    assert_mostly_seen(P2P, "cuEventRecord:skip");
}

/// A copy ahead of the work before it, a header ahead of its copy, a reader ahead of its payload, a credit ahead of the last
/// reader. Where the rank on the device answers, a few credits do no harm: an answer that has left says that its input was
/// read.
#[test]
fn what_is_too_early_beside_host_memory_is_seen() {
    let [to_host, from_host] = BESIDE_HOST;
    for call in ["cuStreamWaitEvent", "cuEventRecord", "cuEventQuery"] {
        let fault = format!("{call}:skip");
        assert_seen(to_host, &fault, CALLS, Rule::Race);
        assert_mostly_seen(from_host, &fault);
    }
}

#[test]
fn what_is_spoiled_at_one_call_is_seen() {
    for (fault, rule) in [
        // It is freed too early, or a second thread calls.
        ("ncclSend:free", Rule::Lifetime),
        ("ncclSend:thread", Rule::Issuer),
        ("ncclRecv:thread", Rule::Issuer),
        // One rank has another order or size, or a send is lost.
        ("ncclSend:swap", Rule::Agreement),
        ("ncclRecv:swap", Rule::Agreement),
        ("ncclSend:half", Rule::Agreement),
        ("ncclRecv:half", Rule::Agreement),
        ("ncclSend:skip", Rule::Agreement),
        // The host waits for the device.
        ("ncclSend:sync", Rule::Steady),
    ] {
        assert_seen(CASE, fault, 40..42, rule);
    }
}
