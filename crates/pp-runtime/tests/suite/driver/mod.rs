//! The driver over the host backend, all ranks in one process: what goes in comes out, once, in order.

mod fixed;
mod live;
mod stages;

use std::sync::Mutex;
use std::sync::mpsc;
use std::time::Duration;

use pp_contract::{ChunkIndex, FaultKind, Rank};
use pp_runtime::core::{Cut, Order};
use pp_runtime::driver::{BoxedStage, Driven, RankOptions, RankRun, Stages};
use pp_runtime::progress::StuckLimits;
use pp_runtime::schedule::Schedule;
use pp_runtime::stage::{Built, Chunk, Done, Offer, OnHost, Progress, Stage, StageResult};
use pp_runtime::watch::{SetUp, WatchOptions};
use pp_testing::{
    HANG, Toy, ToySink, ToySource, bytes, capabilities, channels, done, local, options, seats,
};
use pp_transport::host::{Host, RxLease, TxLease};

use self::stages::*;

/// Two ranks.
const PAIR: &str = "a@0 -> b@1 -> c@0";
/// The sink on a rank of its own.
const CHAIN: &str = "a@0 -> b@1 -> c@2";
/// Shapes, and how many stages are between source and sink, each lap counted.
const SHAPES: [(&str, u64); 6] = [
    (PAIR, 1),
    (CHAIN, 1),
    ("a@0 -> b@0 -> c@0", 1),
    ("a@0 -> b@1 -> b@1 -> c@0", 2),
    ("a@0 -> b@1 -> b@2 -> b@0 -> c@3", 3),
    ("a@0 -> (b@1 -> c@2)*2 -> d@0", 4),
];

#[test]
fn every_chunk_comes_out_once_and_in_order_at_every_depth() {
    for (pipeline, stages) in SHAPES {
        for depth in [1, 2, 3, 4, 8, 64] {
            let ends = run(pipeline, depth, Play::chunks(200), |_| {});
            ends.assert_all(200, stages);
            let summary = ends.summary();
            assert!(summary.counts.max_in_flight <= depth, "{pipeline}: {depth}");
            assert_eq!(summary.recorder.records().len(), 200);
            for record in summary.recorder.records() {
                let mut order = vec![
                    record.first_read_ns,
                    record.last_read_ns,
                    record.build_start_ns,
                    record.build_end_ns,
                    record.sent_ns,
                ];
                if let Some(sink) = record.stages.last().and_then(|sink| sink.times) {
                    order.extend([sink.arrived_ns, sink.start_ns, sink.end_ns]);
                }
                order.push(record.accepted_ns);
                assert!(order.is_sorted(), "{pipeline}: {record:?}");
                // A source that reads nothing counts from the admission.
                assert_eq!(record.first_read_ns, record.build_start_ns);
                assert_eq!(record.last_read_ns, record.build_start_ns);
            }
        }
    }
}

#[test]
fn a_record_has_when_the_frames_of_its_chunk_were_read() {
    for pipeline in [PAIR, CHAIN] {
        let play = Play {
            tells_reads: true,
            ..Play::chunks(50)
        };
        let ends = run(pipeline, 4, play, |_| {});
        let records = ends.summary().recorder.records();
        assert_eq!(records.len(), 50);
        for (chunk, record) in (0..).zip(records) {
            let read = (record.first_read_ns, record.last_read_ns);
            assert_eq!(read, (chunk, chunk + 1));
            let (latency, added) = (record.latency_ns(), record.added_latency_ns());
            assert_eq!(latency, Some(record.accepted_ns - chunk));
            assert_eq!(added, Some(record.accepted_ns - chunk - 1));
        }
    }
}

#[test]
fn stages_that_work_on_lose_nothing_and_fill_the_depth() {
    for (pipeline, stages) in SHAPES {
        for depth in [1, 2, 4] {
            let mut play = Play {
                on_devices: true,
                ..Play::chunks(200)
            };
            play.cuts[50] = Cut::Flush;
            let ends = run(pipeline, depth, play, |_| {});
            ends.assert_all(200, stages);
            for most in ends.most {
                assert!((1..=depth as usize).contains(&most), "{pipeline}: {most}");
            }
            // One rank looks at its source before each look at its other stages.
            let is_alone = ends.ranks.len() == 1;
            assert!(!is_alone || ends.accepted_early == 0, "{pipeline}");
        }
    }
}

/// Each report comes after the leader is done. What a member waited for the other is no work.
#[test]
fn a_leader_hands_on_what_all_members_have_reported_on() {
    for (pipeline, ranks) in [
        ("a@0 -> b@1+2 -> c@0", [1, 2]),
        ("a@0 -> b@1+0 -> c@2", [1, 0]),
    ] {
        for depth in [1, 2, 4] {
            let ends = run(pipeline, depth, Play::chunks(50), |_| {});
            ends.assert_all(50, 1);
            let records = ends.summary().recorder.records();
            assert_eq!(ends.waited_us.len(), records.len());
            for (record, waited_us) in records.zip(&ends.waited_us) {
                let [leader, other] = record.members(1) else {
                    panic!("{record:?}");
                };
                assert_eq!([leader.rank, other.rank], ranks);
                assert!(leader.idle_us >= *waited_us, "{waited_us} µs: {record:?}");
                assert!(other.work_us >= 1_000, "{record:?}");
                let stage = &record.stages[0];
                assert_eq!(stage.work_us, leader.work_us.max(other.work_us));
                assert_eq!(stage.idle_us, leader.idle_us.min(other.idle_us));
            }
        }
    }
}

#[test]
fn a_run_without_chunks_ends_well() {
    for (pipeline, stages) in SHAPES {
        run(pipeline, 4, Play::chunks(0), |_| {}).assert_all(0, stages);
    }
}

#[test]
fn a_drain_finishes_what_is_in_flight() {
    for (pipeline, stages) in SHAPES {
        let (play, open) = Play::gated(100_000);
        let ends = run(pipeline, 4, play, move |switches| {
            switches[0].request_drain(2);
            open.send(()).unwrap();
        });
        let admitted = ends.summary().counts.admitted;
        assert!(admitted < 100_000, "it did not drain");
        ends.assert_all(admitted, stages);
    }
}

#[test]
fn a_stage_that_fails_ends_all_ranks_with_its_name() {
    for (pipeline, rank, label) in [
        (PAIR, 1, "b"),
        (CHAIN, 1, "b"),
        ("a@0 -> b@0 -> c@1", 0, "b"),
        ("a@0 -> b@1 -> b@2 -> c@0", 1, "b 1/2"),
    ] {
        let play = Play {
            fails_at: Some(5),
            ..Play::chunks(50)
        };
        let ends = run(pipeline, 4, play, |_| {});
        for ended in ends.ranks {
            let fault = ended.unwrap_err();
            assert_eq!(
                (fault.kind, fault.rank),
                (FaultKind::Plugin, Rank::new(rank))
            );
            assert_eq!(fault.operation.as_str(), "add");
            assert_eq!(fault.detail.as_str(), "kernel exploded");
            assert_eq!(fault.text.as_str(), "kernel exploded\nat line 7");
            assert_eq!(fault.stage.as_deref(), Some(label));
            assert_eq!(fault.chunk, Some(ChunkIndex::new(5)));
        }
        // What left before the failure was taken, in order.
        assert!(ends.taken.len() <= 5);
        let chunks = ends.taken.iter().map(|(chunk, _)| *chunk);
        assert!(chunks.eq(0..ends.taken.len() as u64));
    }
}

#[test]
fn a_sink_that_fails_ends_all_ranks_with_its_name() {
    for (pipeline, rank) in [(PAIR, 0), (CHAIN, 2)] {
        let play = Play {
            sink_fails_at: Some(9),
            ..Play::chunks(50)
        };
        let ends = run(pipeline, 4, play, |_| {});
        for ended in ends.ranks {
            let fault = ended.unwrap_err();
            assert_eq!((fault.kind, fault.rank), (FaultKind::Io, Rank::new(rank)));
            assert_eq!(fault.stage.as_deref(), Some("c"));
            assert_eq!(fault.chunk, Some(ChunkIndex::new(9)));
        }
        assert_eq!(ends.taken.len(), 9);
        assert!(ends.accepted.len() <= 9);
    }
}

#[test]
fn a_report_of_other_calls_than_planned_never_leaves_its_rank() {
    for pipeline in [PAIR, CHAIN] {
        let play = Play {
            lies_about_calls: true,
            ..Play::chunks(5)
        };
        let ends = run(pipeline, 2, play, |_| {});
        for ended in ends.ranks {
            let fault = ended.unwrap_err();
            assert_eq!((fault.kind, fault.rank), (FaultKind::Usage, Rank::new(1)));
            assert_eq!(fault.operation.as_str(), "b");
            let text = fault.to_string();
            assert!(text.contains("made 2 calls, 1 were planned"), "{text}");
        }
        assert!(ends.taken.is_empty());
    }
}

#[test]
fn an_abort_ends_all_while_a_stage_waits() {
    for pipeline in [PAIR, CHAIN] {
        let (play, open) = Play::gated(100);
        let ends = run(pipeline, 4, play, move |switches| {
            switches[0].abort();
            open.send(()).unwrap();
        });
        for ended in ends.ranks {
            assert_eq!(ended.unwrap_err().kind, FaultKind::Interrupted);
        }
    }
}

/// All chunks are here when the abort comes, and the first is being taken: none of the others is.
#[test]
fn nothing_is_taken_after_an_abort() {
    for pipeline in [PAIR, "a@0 -> b@1 -> b@0 -> c@0"] {
        let (mut play, open) = Play::gated(4);
        let (hold, served, go_on) = Hold::new();
        play.hold = Mutex::new(Some(hold));
        let ends = run(pipeline, 4, play, move |switches| {
            served.recv().unwrap();
            go_on.send(()).unwrap();
            switches[0].bell().ring();
            switches[0].abort();
            open.send(()).unwrap();
        });
        let fault = ends.ranks[0].as_ref().unwrap_err();
        assert_eq!(fault.kind, FaultKind::Interrupted);
        // The abort may have come before the first, too.
        assert!(ends.taken.len() <= 1, "{:?}", ends.taken);
    }
}

/// The sink is slow, and rank 1 dies once all chunks are here.
#[test]
fn a_rank_that_has_all_chunks_finishes_without_the_others() {
    let (ours, theirs) = channels();
    let mut play = Play::chunks(4);
    let (hold, served, go_on) = Hold::new();
    play.hold = Mutex::new(Some(hold));
    let (keep, kept) = mpsc::channel();
    let ends = run(PAIR, 4, play, move |switches| {
        let set_up = SetUp::start(vec![ours], watch_options(None)).unwrap();
        let watch = set_up.run(switches[0].clone(), None, None).unwrap();
        served.recv().unwrap();
        // As the end of its process: the channel breaks, and its driver comes to no answer.
        switches[1].abort();
        drop(theirs);
        go_on.send(()).unwrap();
        switches[0].bell().ring();
        keep.send(watch).unwrap();
    });
    kept.recv().unwrap().close();
    assert_eq!(ends.ranks[0].as_ref().unwrap().counts.emitted, 4);
    assert_eq!(ends.taken.len(), 4);
    assert!(ends.was_stored && ends.ranks[1].is_err());
}

#[test]
fn a_rank_that_never_answers_the_shutdown_does_not_keep_the_source() {
    let options = options(PAIR, 1);
    // The other ends of the edges live, and no driver reads them.
    let mut seats = seats(&options, BYTES as u64).into_iter();
    let seat = seats.next().unwrap();
    let source = ToySource::new(|| Offer::End, |_, _| unreachable!("nothing is offered"));
    let sink = ToySink::<Toy, _>::new(|_, _| unreachable!("nothing was built"));
    let mut stages = Stages::new(Some(source));
    stages.push(BoxedStage::sink(sink));
    let slots = |_, _| Ok(local(&options, BYTES as u64));
    let mut run = RankRun::<Host, _>::new(Rank::new(0), stages, options.clone(), slots).unwrap();
    for (number, end) in seat.ends {
        run.attach(number, end);
    }
    assert_eq!(run.drive(&seat.switch), Ok(Driven::Finished));
    assert_eq!(run.finish().1.counts.admitted, 0);
}

/// A stage whose results go on, and whose device is never done.
struct Hangs(Option<ChunkIndex>);

impl Stage<TxLease, RxLease> for Hangs {
    type Plan = Toy;
    type Kept = Done;

    fn run(
        &mut self,
        chunk: Chunk<'_, Toy>,
        _: Option<&RxLease>,
        _: &mut TxLease,
    ) -> StageResult<Progress<Done, Done>> {
        self.0 = Some(chunk.place.chunk);
        Ok(Progress::Done(done(chunk.message, bytes(8))))
    }

    fn ahead(&mut self) -> Option<(ChunkIndex, StageResult<bool>)> {
        self.0.map(|chunk| (chunk, Ok(false)))
    }
}

/// A fixed order that needs more chunks in flight than there may be, also behind work that a device never ends, and edges
/// without a slot.
#[test]
fn a_rank_that_can_never_go_on_is_stuck_also_where_no_stage_works() {
    let schedule = Schedule::parse_csv("0F0,0F1,0B0,0B1").unwrap();
    let schedule = schedule.runnable(1).unwrap();
    let fixed = RankOptions {
        order: Order::Fixed(schedule.orders()[0].clone()),
        ..RankOptions::new(schedule.pipeline().clone(), 1, capabilities())
    };
    let own = "wait for a chunk in flight";
    for (options, slot_bytes, blamed, waits, hangs) in [
        (fixed.clone(), BYTES, 0, own, false),
        (fixed, BYTES, 0, "wait for the device", true),
        (options("a@0 -> b@0 -> c@0", 2), 0, 0, own, false),
        (options(PAIR, 2), 0, 1, own, false),
    ] {
        let told = format!("{options:?}");
        let build = |_, _: &mut TxLease| Built::new(Toy(0), bytes(8), ());
        let source = ToySource::new(|| Offer::Chunk(Cut::None), build);
        let mut stages = Stages::new(Some(source));
        for _ in 2..options.pipeline.stages_at(Rank::new(0)).count() {
            let at_once =
                |chunk: Chunk<'_, Toy>, _: &[u8], _: &mut [u8]| Ok(done(chunk.message, bytes(8)));
            stages.push(match hangs {
                true => BoxedStage::new(Hangs(None)),
                false => BoxedStage::new(OnHost::new(at_once)),
            });
        }
        stages.push(BoxedStage::sink(ToySink::<Toy, _>::new(|_, _| Ok(()))));
        let mut seats = seats(&options, slot_bytes as u64).into_iter();
        let seat = seats.next().unwrap();
        let slots = |_, _| Ok(local(&options, slot_bytes as u64));
        let mut run =
            RankRun::<Host, _>::new(Rank::new(0), stages, options.clone(), slots).unwrap();
        for (number, end) in seat.ends {
            run.attach(number, end);
        }
        let limits = StuckLimits {
            stage: Duration::from_secs(1),
            transport: HANG,
            first: Duration::ZERO,
        };
        let set_up = SetUp::start(Vec::new(), watch_options(Some(limits))).unwrap();
        let watch = set_up.run(seat.switch.clone(), None, None).unwrap();
        let fault = run.drive(&seat.switch).unwrap_err();
        watch.close();
        let (kind, rank) = (fault.kind, fault.rank.get());
        assert_eq!((kind, rank), (FaultKind::TimedOut, blamed), "{told}");
        let operation = fault.operation.as_str();
        assert_eq!(operation, waits, "{told}");
    }
}

fn watch_options(limits: Option<StuckLimits>) -> WatchOptions {
    WatchOptions {
        rank: Rank::new(0),
        heartbeat: None,
        grace: HANG,
        limits,
        on_stuck: Box::new(|_| {}),
        on_fault: None,
        on_sign: None,
    }
}

/// Longer than a source waits for an answer that it does not need.
#[test]
fn the_source_hears_of_the_end_when_the_sink_has_stored_all() {
    let play = Play {
        at_the_end: Some(|| std::thread::sleep(Duration::from_millis(1500))),
        ..Play::chunks(3)
    };
    run(CHAIN, 2, play, |_| {}).assert_all(3, 1);
}
