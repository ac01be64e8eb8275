//! Recordings made by hand, and what is said of them.

use pp_contract::{
    CacheEpoch, CallId, ChunkIndex, DType, Fault, Generation, List, Rank as ContractRank, Text,
    WorldSize,
};
use pp_transport::flight::{Activity, Group, Kind, Message, Moment, Operation, Reason, State};

use super::*;

const SECOND: u64 = 1_000_000_000;

fn recording(rank: u32, world: u32, operations: Vec<Operation>) -> Recording {
    Recording {
        job: 7,
        rank: ContractRank::new(rank),
        world_size: WorldSize::new(world).unwrap(),
        pid: 100 + rank,
        host: Text::truncated("here"),
        boot: Text::truncated("boot"),
        written: Moment {
            monotonic_ns: 10 * SECOND,
            realtime_ns: 1_000 * SECOND,
        },
        reason: Reason::Asked,
        activity: None,
        capacity: 4096,
        total: operations.len() as u64,
        groups: List::default(),
        operations: List::new(operations).unwrap(),
    }
}

fn message(kind: Kind, peer: u32, message: Message, call: u64, at: u64) -> Operation {
    Operation {
        sequence: at,
        kind,
        state: State::Done,
        message: Some(message),
        group: None,
        peer: Some(ContractRank::new(peer)),
        generation: Generation::new(0),
        // Of two ranks: the edge has the number of the one that sends.
        edge: Some(if kind == Kind::Send {
            u32::from(peer == 0)
        } else {
            peer
        }),
        number: (message == Message::Chunk).then_some(call),
        bytes: 64,
        dtype: None,
        call_id: Some(CallId::new(call)),
        chunk_index: Some(ChunkIndex::new(call)),
        cache_epoch: Some(CacheEpoch::new(0)),
        prepared_ns: SECOND + at * 1000,
        committed_ns: Some(SECOND + at * 1000 + 100),
        started_ns: Some(SECOND + at * 1000 + 100),
        ended_ns: Some(SECOND + at * 1000 + 900),
    }
}

fn open(operation: Operation) -> Operation {
    Operation {
        state: State::Started,
        ended_ns: None,
        ..operation
    }
}

/// An all-reduce in the only group.
fn reduce(number: u64, bytes: u64, dtype: DType) -> Operation {
    Operation {
        group: Some(0),
        peer: None,
        edge: None,
        number: Some(number),
        bytes,
        dtype: Some(dtype),
        message: None,
        call_id: None,
        chunk_index: None,
        cache_epoch: None,
        ..message(Kind::AllReduce, 0, Message::Noop, 0, number)
    }
}

fn mesh(rank: u32, operations: Vec<Operation>) -> Recording {
    let members = (0..3).map(ContractRank::new).collect();
    let group = Group {
        name: Text::truncated("mesh"),
        members: List::new(members).unwrap(),
    };
    Recording {
        groups: List::new(vec![group]).unwrap(),
        ..recording(rank, 3, operations)
    }
}

fn ranked(recordings: Vec<Recording>) -> Vec<Ranked> {
    let file = |r: &Recording| PathBuf::from(format!("rank{}-{}", r.rank, r.pid));
    let files = recordings.into_iter().map(|r| (file(&r), r));
    together(files.collect()).unwrap().0
}

fn tell(recordings: Vec<Recording>) -> Analysis {
    Analysis::of(ranked(recordings), Vec::new())
}

use Kind::{Receive, Send};
use Message::Chunk;

/// Two chunks there, one back: the second is with rank 1.
fn rank_0() -> Vec<Operation> {
    vec![
        message(Send, 1, Chunk, 0, 0),
        message(Send, 1, Chunk, 1, 1),
        message(Receive, 1, Chunk, 0, 2),
    ]
}

fn rank_1() -> Vec<Operation> {
    vec![
        message(Receive, 0, Chunk, 0, 0),
        message(Send, 0, Chunk, 0, 1),
        message(Receive, 0, Chunk, 1, 2),
    ]
}

fn computing(operations: Vec<Operation>) -> Recording {
    let activity = Activity {
        operation: Text::truncated("phase_b"),
        is_stage: true,
        since_ns: Some(8 * SECOND),
        waiting_since_ns: None,
    };
    Recording {
        activity: Some(activity),
        ..recording(1, 2, operations)
    }
}

#[test]
fn a_stage_that_does_not_come_back_is_where_it_stood_still() {
    let told = tell(vec![recording(0, 2, rank_0()), computing(rank_1())]);
    assert_eq!(
        told.verdict,
        "it stood still at rank 1: it was inside phase_b, with chunk 1 (call 1) unanswered for \
         2.000 s"
    );
    assert_eq!(
        told.ranks[0].wait.what,
        "it waited for the result of chunk 1 (call 1)"
    );
    assert_eq!(told.ranks[0].wait.on, [1]);
    assert_eq!(told.disagreement, None);
    assert_eq!(told.matched, 3);
    assert!(told.missing.is_empty() && told.never_came.is_empty());
    let text = told.to_string();
    assert!(text.contains("inside     phase_b for 2.000 s"), "{text}");
}

#[test]
fn a_rank_without_a_recording_is_who_never_came() {
    let told = tell(vec![recording(0, 2, rank_0())]);
    assert_eq!(told.missing, [1]);
    assert_eq!(
        told.verdict,
        "rank 1 left no recording: killed, stopped, or the file was not given; rank 0 waited \
         for the result of chunk 1 (call 1) for 9.000 s"
    );
}

#[test]
fn the_first_operation_on_which_two_ranks_disagree_is_named() {
    let mut theirs = rank_1();
    theirs[0].bytes = 32;
    theirs[2].chunk_index = Some(ChunkIndex::new(9));
    let told = tell(vec![recording(0, 2, rank_0()), recording(1, 2, theirs)]);
    assert_eq!(
        told.disagreement.as_deref(),
        Some("the chunk of call 0 from rank 0 to rank 1: bytes 64 at rank 0, 32 at rank 1")
    );
}

#[test]
fn a_message_that_was_never_taken_in_is_told_once_for_its_edge() {
    let mut ours = rank_0();
    ours.push(message(Send, 1, Chunk, 2, 3));
    let mut theirs = rank_1();
    theirs.pop();
    let told = tell(vec![recording(0, 2, ours), recording(1, 2, theirs)]);
    assert_eq!(
        told.never_came,
        ["rank 1 never took in the chunk of call 1 from rank 0 to rank 1"]
    );
    assert!(
        told.verdict.contains("rank 1, which never came"),
        "{}",
        told.verdict
    );
}

/// A message is held against its other half alone: what one rank lacks for a reason is no finding.
#[test]
fn a_rank_is_not_blamed_for_events_that_it_cannot_have_recorded() {
    let of = |operations| recording(1, 2, operations);
    let mut forgetful = of(vec![message(Receive, 0, Chunk, 1, 2)]);
    forgetful.total = 3;
    let mut early = of(Vec::new());
    early.written.monotonic_ns = SECOND / 2;
    // A process that took the place of another.
    let again = |o: Operation| Operation {
        generation: Generation::new(1),
        ..o
    };
    let mut sent_again = rank_0();
    sent_again.push(message(Send, 1, Chunk, 2, 5));
    sent_again.push(again(message(Send, 1, Chunk, 1, 6)));
    let mut first = of(rank_1());
    first.written.monotonic_ns = SECOND + 4_000;
    let second = Recording {
        pid: 999,
        ..of(vec![again(message(Receive, 0, Chunk, 1, 7))])
    };
    // Rank 1 works on a chunk twice: over two edges that lead the same way, or in two laps of a ring.
    let twice = |kind, peer, edge, number| {
        let lap = Operation {
            edge: Some(edge),
            number: Some(number),
            bytes: 32,
            ..message(kind, peer, Chunk, 0, 2)
        };
        vec![message(kind, peer, Chunk, 0, 0), lap]
    };
    let over_two_edges = (twice(Send, 1, 2, 0), vec![of(twice(Receive, 0, 2, 0))], 2);
    let in_two_laps = (twice(Send, 1, 0, 1), vec![of(twice(Receive, 0, 0, 1))], 2);
    for (ours, theirs, matched) in [
        (rank_0(), vec![forgetful], 1),
        (rank_0(), vec![early], 0),
        (sent_again, vec![first, second], 4),
        over_two_edges,
        in_two_laps,
    ] {
        let all = [vec![recording(0, 2, ours)], theirs].concat();
        let told = tell(all);
        assert_eq!((told.never_came, told.disagreement), (Vec::new(), None));
        assert_eq!(told.matched, matched);
    }
}

#[test]
fn a_collective_that_one_rank_of_three_never_entered_names_it() {
    for kind in [Kind::AllReduce, Kind::Scatter, Kind::Gather, Kind::Barrier] {
        let collective = |number| Operation {
            kind,
            ..reduce(number, 4096, DType::F32)
        };
        let two = || vec![collective(0), open(collective(1))];
        let one = vec![collective(0)];
        let told = tell(vec![mesh(0, two()), mesh(1, two()), mesh(2, one)]);
        assert_eq!(
            told.never_came,
            ["rank 2 never entered collective 1 of group mesh"]
        );
        let what = format!("it was in {kind} 1 of group mesh (4096 bytes of f32)");
        assert_eq!(told.ranks[0].wait.what, what);
        assert_eq!(told.ranks[1].wait.on, [2]);
        let verdict = told.verdict;
        assert!(verdict.contains("rank 2, which never came"), "{verdict}");
        assert_eq!((told.disagreement, told.absent.len()), (None, 1));
    }
}

/// The members of a group in host memory wait inside the call, so inside the stage.
#[test]
fn a_rank_that_waits_in_a_group_inside_a_stage_waits_for_the_member() {
    let inside = |operation| Recording {
        activity: Some(Activity {
            operation: Text::truncated("mix"),
            is_stage: true,
            since_ns: Some(SECOND),
            waiting_since_ns: None,
        }),
        ..mesh(0, vec![operation])
    };
    let entered = Operation {
        state: State::Committed,
        started_ns: None,
        ..open(reduce(0, 4096, DType::F32))
    };
    let told = tell(vec![
        inside(entered.clone()),
        mesh(1, vec![entered.clone()]),
    ]);
    let wait = &told.ranks[0].wait;
    assert_eq!(
        (&*wait.what, &*wait.on),
        (
            "it was in all-reduce 0 of group mesh (4096 bytes of f32)",
            &[2][..]
        )
    );
    let before = Operation {
        prepared_ns: 0,
        ..entered
    };
    let told = tell(vec![inside(before)]);
    assert!(told.ranks[0].wait.what.contains("inside mix"));
}

#[test]
fn collectives_are_held_against_each_other_by_their_number() {
    let other = vec![reduce(0, 2048, DType::Bf16)];
    let all = |bytes| vec![reduce(0, bytes, DType::F32)];
    let told = tell(vec![mesh(0, all(4096)), mesh(1, all(4096)), mesh(2, other)]);
    assert_eq!(
        told.disagreement.as_deref(),
        Some("collective 0 of group mesh: of type f32 at rank 0, bf16 at rank 2")
    );
    let told = tell(vec![
        mesh(0, all(4096)),
        mesh(1, all(512)),
        mesh(2, all(4096)),
    ]);
    assert_eq!(
        told.disagreement.as_deref(),
        Some("collective 0 of group mesh: bytes 4096 at rank 0, 512 at rank 1")
    );
}

#[test]
fn clocks_of_other_hosts_are_placed_between_messages_both_ways() {
    let mut theirs = recording(1, 2, rank_1());
    theirs.boot = Text::truncated("another");
    // Its clock is ahead by five seconds; each message takes 300 ns.
    let shift = |o: &Operation, by: u64| Operation {
        prepared_ns: o.prepared_ns + 5 * SECOND + by,
        ..o.clone()
    };
    let shifted = vec![
        shift(&theirs.operations[0], 300),
        // Sent 700 before it was taken in over there, at 2000.
        shift(&theirs.operations[1], 300),
        shift(&theirs.operations[2], 0),
    ];
    theirs.operations = List::new(shifted).unwrap();
    let ranked = ranked(vec![recording(0, 2, rank_0()), theirs]);
    let clock = &ranked[1].clock;
    assert_eq!(clock.by, ranked::By::Messages);
    let within = i128::from(clock.within_ns.unwrap());
    assert!(within < 1000, "{clock:?}");
    let off = clock.offset_ns + 5 * i128::from(SECOND);
    assert!(off.abs() <= within + 1, "{clock:?}");
}

#[test]
fn files_of_two_jobs_or_twice_the_same_are_refused_by_name() {
    let path = PathBuf::from;
    let other = Recording {
        job: 8,
        ..recording(1, 2, Vec::new())
    };
    let first = || recording(0, 2, Vec::new());
    let refused = |second| {
        let files = vec![(path("first"), first()), (path("second"), second)];
        together(files).err().unwrap().to_string()
    };
    let text = refused(other);
    assert!(text.contains("second: it is of job"), "{text}");
    let text = refused(first());
    assert!(text.contains("the same process as first"), "{text}");
    assert!(refused(recording(1, 3, Vec::new())).contains("3 ranks"));
}

#[test]
fn the_trace_has_every_operation_and_an_arrow_for_every_pair() {
    let ranked = ranked(vec![recording(0, 2, rank_0()), computing(rank_1())]);
    let mut out = Vec::new();
    picture::draw(&mut out, &ranked).unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&out).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let count = |ph: &str| events.iter().filter(|e| e["ph"] == ph).count();
    assert_eq!(
        [count("b"), count("e"), count("s"), count("f")],
        [6, 6, 3, 3]
    );
    assert_eq!(count("X"), 1);
    assert!(
        events
            .iter()
            .all(|e| e["ts"].as_f64().is_none_or(|ts| ts >= 0.0))
    );
}

fn failed(recording: Recording, kind: FaultKind, rank: u32, operation: &str) -> Recording {
    let fault = Fault::new(kind, ContractRank::new(rank), operation, "so it is");
    Recording {
        reason: Reason::Fault(fault),
        ..recording
    }
}

/// Two chunks, of which one was accepted: the other is with the sink.
#[test]
fn a_rank_0_of_three_waits_for_the_rank_that_has_the_chunk() {
    let sent = |peer| (0..2).map(move |call| message(Send, peer, Chunk, call, 10 + call));
    let came = |peer| (0..2).map(move |call| message(Receive, peer, Chunk, call, call));
    let ours = sent(1).chain([message(Receive, 2, Chunk, 0, 20)]);
    let theirs = came(1).chain([message(Send, 0, Chunk, 0, 19)]);
    let recordings = vec![
        recording(0, 3, ours.collect()),
        recording(1, 3, came(0).chain(sent(2)).collect()),
        recording(2, 3, theirs.collect()),
    ];
    let all = ranked(recordings);
    let waits: Vec<_> = all.iter().map(|own| waits::of(own, &all)).collect();
    assert_eq!((&waits[0].on, waits[1].is_idle), (&vec![2], true));
    assert!(waits[0].what.contains("the result of chunk 1 (call 1)"));
    assert!(waits[2].what.contains("chunk 1 (call 1) was with it"));
    // Of the sink nothing is known: what rank 1 has handed on is there.
    let two = &all[..2];
    assert_eq!(waits::of(&two[0], two).on, [2]);
}

/// Chunks of a second each, the last of which is with rank 1 for half of one.
#[test]
fn a_job_that_runs_when_it_is_asked_does_not_stand_still() {
    let slow = |operations: Vec<Operation>, last: u64| {
        let at = |(n, o): (usize, Operation)| Operation {
            prepared_ns: (7 + n as u64) * SECOND + last,
            ..o
        };
        operations.into_iter().enumerate().map(at).collect()
    };
    let mut theirs = computing(slow(rank_1(), SECOND / 2));
    if let Some(activity) = &mut theirs.activity {
        activity.since_ns = Some(9 * SECOND + SECOND / 2);
    }
    let mut ours = rank_0();
    ours.push(message(Send, 1, Chunk, 2, 3));
    // Behind the last send.
    theirs.written.monotonic_ns += 1;
    let told = tell(vec![recording(0, 2, slow(ours, 0)), theirs]);
    assert_eq!(
        told.verdict,
        "the job was running when it was asked; rank 1 was inside phase_b, with chunk 1 (call 1) \
         unanswered for 500.0 ms"
    );
    assert!(told.running && told.never_came.is_empty());
    let not_yet = "rank 1 had not yet taken in the chunk of call 2 from rank 0 to rank 1";
    assert_eq!(told.under_way, [not_yet]);
}

#[test]
fn a_panic_and_then_a_fault_come_before_where_the_ranks_were() {
    let broken = |rank, operations| {
        let own = recording(rank, 2, operations);
        failed(own, FaultKind::PeerMisbehaved, 0, "receive header")
    };
    let told_of = |second| tell(vec![broken(0, rank_0()), second]).verdict;
    let verdict = told_of(broken(1, rank_1()));
    let begins = "peer misbehaved: rank 0: receive header: so it is; rank 0 waited for the result";
    assert!(verdict.starts_with(begins), "{verdict}");
    assert!(verdict.contains("; rank 1: chunk 1"), "{verdict}");
    let panicked = Recording {
        reason: Reason::Panic(Text::truncated("words")),
        ..recording(1, 2, rank_1())
    };
    let verdict = told_of(panicked);
    assert!(
        verdict.starts_with("rank 1 panicked: words; rank 0 waited"),
        "{verdict}"
    );
    // What ran out of time is told by where it stood.
    let late = failed(computing(rank_1()), FaultKind::TimedOut, 1, "phase_b");
    let verdict = tell(vec![recording(0, 2, rank_0()), late]).verdict;
    assert!(verdict.starts_with("it stood still at rank 1"), "{verdict}");
}

#[test]
fn of_two_launches_under_one_id_the_newest_is_told_and_the_other_named() {
    let launch = |pid: u32, seconds: u64, rank: u32| {
        let operations = if rank == 0 { rank_0() } else { rank_1() };
        let mut one = recording(rank, 2, operations);
        one.pid = pid;
        one.written.realtime_ns += seconds * SECOND;
        let file = PathBuf::from(format!("rank{rank}-{pid}"));
        (file, one)
    };
    // Out of order, and the first launch has a rank more.
    let files = vec![
        launch(30, 60, 0),
        launch(11, 0, 1),
        launch(31, 60, 1),
        launch(10, 0, 0),
    ];
    let (kept, left_out) = together(files).unwrap();
    let pids: Vec<u32> = kept.iter().map(|r| r.recording.pid).collect();
    assert_eq!(pids, [30, 31]);
    assert_eq!(
        left_out,
        [PathBuf::from("rank0-10"), PathBuf::from("rank1-11")]
    );
    let text = Analysis::of(kept, left_out).to_string();
    assert!(
        text.contains("left out: rank1-11: of an earlier launch"),
        "{text}"
    );
    // What is left of the newest alone does not borrow a rank of the one before.
    let (kept, left_out) =
        together(vec![launch(30, 60, 0), launch(11, 0, 1), launch(10, 0, 0)]).unwrap();
    assert_eq!((kept.len(), left_out.len()), (1, 2));
    // Without rank 0 the generations tell.
    let (kept, _) = together(vec![launch(11, 0, 1), launch(31, 60, 1)]).unwrap();
    assert_eq!(kept[0].recording.pid, 31);
    assert_eq!(kept.len(), 1);
}
