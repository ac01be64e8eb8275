//! Both drivers over the host backend, in one process: what goes in comes out, once, in order.

mod stages;

use std::sync::mpsc;
use std::time::Duration;

use pp_contract::{FaultKind, Rank};
use pp_runtime::core::Cut;
use pp_runtime::driver::{FrontOptions, run_front};
use pp_runtime::watch::{SetUp, WatchOptions};
use pp_testing::{Pair, channels, edge};
use pp_transport::bell::Bell;

use self::stages::*;

#[test]
fn every_chunk_comes_back_once_and_in_order_at_every_depth() {
    for depth in [1, 2, 3, 4, 8, 64] {
        let ends = run(
            depth,
            Counting::new(vec![Cut::None; 200]),
            Adder::new(),
            |_, _| {},
        );
        let counts = ends.front.unwrap();
        assert_eq!(
            (counts.admitted, counts.emitted, counts.dropped),
            (200, 200, 0)
        );
        assert!(counts.max_in_flight <= depth, "{counts:?} at depth {depth}");
        assert_eq!(ends.back, Ok(200));
        let expected: Vec<_> = (0..200).map(|n| (n, (n as u8).wrapping_add(7))).collect();
        assert_eq!(ends.stages.emitted, expected, "depth {depth}");
        for record in ends.records {
            let b = record.phase_b.unwrap();
            let order = [
                record.first_read_ns,
                record.last_read_ns,
                record.build_start_ns,
                record.build_end_ns,
                record.sent_ns,
                b.recv_ns,
                b.compute_start_ns,
                b.compute_end_ns,
                b.sent_ns,
                record.received_ns,
                record.decode_start_ns,
                record.decode_end_ns,
                record.emitted_ns,
            ];
            assert!(order.is_sorted(), "{record:?}");
            // A source that reads nothing counts from the admission.
            assert_eq!(record.first_read_ns, record.build_start_ns);
            assert_eq!(record.last_read_ns, record.build_start_ns);
        }
    }
}

#[test]
fn a_record_has_when_the_frames_of_its_chunk_were_read() {
    let mut stages = Counting::new(vec![Cut::None; 50]);
    stages.tells_reads = true;
    let ends = run(4, stages, Adder::new(), |_, _| {});
    assert_eq!(ends.records.len(), 50);
    for (chunk, record) in (0..).zip(&ends.records) {
        assert_eq!(
            (record.first_read_ns, record.last_read_ns),
            (chunk, chunk + 1)
        );
        assert_eq!(record.latency_ns(), Some(record.emitted_ns - chunk));
        assert_eq!(
            record.added_latency_ns(),
            Some(record.emitted_ns - chunk - 1)
        );
    }
}

#[test]
fn stages_that_work_on_lose_nothing_and_fill_the_depth() {
    for depth in [1, 2, 4] {
        let mut cuts = vec![Cut::None; 200];
        cuts[50] = Cut::Flush;
        let mut stages = Counting::new(cuts);
        stages.later = Some(Device::default());
        let mut adder = Adder::new();
        adder.later = Some(Device::default());
        let ends = run(depth, stages, adder, |_, _| {});
        assert_eq!(ends.front.unwrap().emitted, 200);
        assert_eq!(ends.back, Ok(200));
        let expected: Vec<_> = (0..200).map(|n| (n, (n as u8).wrapping_add(7))).collect();
        assert_eq!(ends.stages.emitted, expected, "depth {depth}");
        for most in [
            ends.stages.later.unwrap().most,
            ends.adder.later.unwrap().most,
        ] {
            assert!((1..=depth as usize).contains(&most));
        }
    }
}

#[test]
fn nothing_to_do_is_done_well() {
    let ends = run(4, Counting::new(Vec::new()), Adder::new(), |_, _| {});
    assert_eq!(ends.front.unwrap().admitted, 0);
    assert_eq!(ends.back, Ok(0));
}

#[test]
fn a_drain_finishes_what_is_in_flight() {
    let mut stages = Counting::new(vec![Cut::None; 100_000]);
    let (open, gate) = mpsc::channel();
    stages.gate = Some(gate);
    let ends = run(4, stages, Adder::new(), move |front, _| {
        front.request_drain(2);
        open.send(()).unwrap();
    });
    let counts = ends.front.unwrap();
    assert!(counts.admitted < 100_000, "it did not drain");
    assert_eq!(counts.emitted, counts.admitted);
    assert_eq!(ends.back, Ok(counts.admitted));
}

#[test]
fn a_failed_compute_ends_both_ranks_with_its_name() {
    let mut adder = Adder::new();
    adder.fail_at = Some(5);
    let ends = run(4, Counting::new(vec![Cut::None; 50]), adder, |_, _| {});
    for fault in [ends.front.unwrap_err(), ends.back.unwrap_err()] {
        assert_eq!(fault.kind, FaultKind::Plugin);
        assert_eq!(fault.rank, Rank::new(1));
        assert_eq!(fault.operation.as_str(), "phase_b");
        assert_eq!(fault.detail.as_str(), "kernel exploded");
    }
    // What came back before the failure was emitted, in order.
    assert!(ends.stages.emitted.len() <= 5);
    assert!(
        ends.stages
            .emitted
            .iter()
            .enumerate()
            .all(|(i, (n, _))| i as u64 == *n)
    );
}

#[test]
fn a_failed_decode_ends_the_front_with_its_name() {
    let mut stages = Counting::new(vec![Cut::None; 50]);
    stages.fail_decode_at = Some(9);
    let ends = run(4, stages, Adder::new(), |_, _| {});
    let fault = ends.front.unwrap_err();
    assert_eq!((fault.kind, fault.rank), (FaultKind::Io, Rank::new(0)));
    assert_eq!(ends.stages.emitted.len(), 9);
}

#[test]
fn a_result_with_other_calls_than_planned_is_refused() {
    let mut adder = Adder::new();
    adder.lie_about_calls = true;
    let ends = run(2, Counting::new(vec![Cut::None; 5]), adder, |_, _| {});
    let fault = ends.front.unwrap_err();
    assert_eq!(
        (fault.kind, fault.rank),
        (FaultKind::PeerMisbehaved, Rank::new(1))
    );
    let text = fault.to_string();
    assert!(
        text.contains("2 generator calls were made, 1 were planned"),
        "{text}"
    );
    assert!(ends.stages.emitted.is_empty());
}

#[test]
fn an_abort_ends_both_while_a_stage_waits() {
    let mut stages = Counting::new(vec![Cut::None; 100]);
    let (open, gate) = mpsc::channel();
    stages.gate = Some(gate);
    let ends = run(4, stages, Adder::new(), move |front, _| {
        front.abort();
        open.send(()).unwrap();
    });
    assert_eq!(ends.front.unwrap_err().kind, FaultKind::Interrupted);
    assert!(ends.back.is_err());
}

/// All results are here when the abort comes, and the first is being decoded: none of the others is decoded.
#[test]
fn nothing_is_decoded_after_an_abort() {
    let mut stages = Counting::new(vec![Cut::None; 4]);
    let (hold, served, go_on) = Hold::new();
    stages.hold = Some(hold);
    let (open, gate) = mpsc::channel();
    stages.gate = Some(gate);
    let ends = run(4, stages, Adder::new(), move |front, _| {
        served.recv().unwrap();
        go_on.send(()).unwrap();
        front.bell().ring();
        front.abort();
        open.send(()).unwrap();
    });
    assert_eq!(ends.front.unwrap_err().kind, FaultKind::Interrupted);
    // The abort may have come before the first, too.
    assert!(ends.stages.emitted.len() <= 1, "{:?}", ends.stages.emitted);
}

/// The sink is slow, and Phase B dies once all its results are here.
#[test]
fn a_front_that_has_all_results_finishes_without_its_peer() {
    let (ours, theirs) = channels();
    let mut stages = Counting::new(vec![Cut::None; 4]);
    let (hold, served, go_on) = Hold::new();
    stages.hold = Some(hold);
    let (keep, kept) = mpsc::channel();
    let ends = run(4, stages, Adder::new(), move |front, back| {
        let options = WatchOptions {
            rank: Rank::new(0),
            heartbeat: None,
            grace: Duration::from_secs(60),
            limits: None,
            on_stuck: Box::new(|_| {}),
            on_fault: None,
        };
        let set_up = SetUp::start(vec![ours], options).unwrap();
        let watch = set_up.run(front.clone(), None, None).unwrap();
        served.recv().unwrap();
        // As the end of its process: the channel breaks, and its driver comes to no answer.
        back.abort();
        drop(theirs);
        go_on.send(()).unwrap();
        front.bell().ring();
        keep.send(watch).unwrap();
    });
    kept.recv().unwrap().close();
    assert_eq!(ends.front.unwrap().emitted, 4);
    assert!(ends.back.is_err());
}

#[test]
fn a_peer_that_never_answers_the_shutdown_does_not_keep_the_front() {
    let edge = edge(1, BYTES as u64);
    let pair = Pair::new(edge, edge, Bell::new().unwrap());
    let options = FrontOptions::new(Rank::new(1), 1);
    // The other end of the link lives, and no driver reads it.
    let front = run_front(
        pair.front,
        &mut Counting::new(vec![]),
        &pair.front_switch,
        options,
    );
    assert_eq!(front.unwrap().counts.admitted, 0);
}
