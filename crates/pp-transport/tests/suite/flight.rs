//! The flight recorder around a real link, and its file.

use pp_contract::{
    Bare, CacheEpoch, CallId, ChunkIndex, Composer, Fault, FaultKind, Generation, List, Lockstep,
    MAX_FRAME_BYTES, Rank, Stamp, Text, WorldSize, digest,
};
use pp_testing::prepare;
use pp_transport::flight::{
    Activity, EdgeLog, FlightRecorder, Kind, Message, Moment, Operation, Reason, Recording,
    RecordingError, State,
};
use pp_transport::host::{EdgeShape, Host, Receiving, RxLease, Sending};
use pp_transport::in_flight::{Completion, InFlight};
use proptest::prelude::*;

use crate::two_way::{TwoWay, on_host};

const BYTES: usize = 1024;
/// The numbers of the edges.
const UP: u32 = 4;
const DOWN: u32 = 9;
/// How far calls are ahead of chunks.
const AHEAD: u64 = 100;

/// Both ends of edges there and back, each recorded as a driver does.
struct Link {
    both: TwoWay<Host>,
    out: EdgeLog,
    incoming: EdgeLog,
    composer: Composer,
    inbox: Vec<u8>,
    lockstep: Lockstep,
}

fn recorded(operations: usize) -> (Link, Link, FlightRecorder, FlightRecorder) {
    let edge = EdgeShape {
        depth: 2,
        slot_bytes: BYTES as u64,
    };
    let (low, high) = on_host(edge, edge);
    let (ours, theirs) = (
        FlightRecorder::new(operations),
        FlightRecorder::new(operations),
    );
    let record =
        |both: TwoWay<Host>, recorder: &FlightRecorder, peer, [out, incoming]: [u32; 2]| {
            let log = |edge| EdgeLog {
                recorder: recorder.clone(),
                peer: Rank::new(peer),
                generation: Generation::new(3),
                edge,
            };
            Link {
                both,
                out: log(out),
                incoming: log(incoming),
                composer: Composer::new(),
                inbox: Vec::with_capacity(MAX_FRAME_BYTES),
                lockstep: Lockstep::new(),
            }
        };
    let low = record(low, &ours, 1, [UP, DOWN]);
    let high = record(high, &theirs, 0, [DOWN, UP]);
    (low, high, ours, theirs)
}

impl Link {
    fn send(&mut self, n: u64) -> InFlight<Sending> {
        let lease = self.both.try_lease().unwrap().expect("a slot is free");
        let (message, mut stamp) = prepare(&mut self.composer, n, BYTES);
        stamp.call_id = CallId::new(n + AHEAD);
        let record = self.out.sends(BYTES as u64, stamp);
        let sent = self.both.send(message, stamp, Some(lease)).unwrap();
        record.left(&sent.header);
        sent.payload.expect("it has one").recorded(record)
    }

    fn send_shutdown(&mut self, stamp: Stamp) {
        let record = self.out.sends(0, stamp);
        let message = self.composer.prepare_bare(Bare::Shutdown);
        record.left(&self.both.send(message, stamp, None).unwrap().header);
    }

    /// Takes in the next message, and receives its payload if it has one. `heard` looks before that.
    fn receive(&mut self, heard: impl FnOnce()) -> Option<InFlight<Receiving>> {
        assert!(self.both.poll_frame(&mut self.inbox).unwrap());
        let matched = self.lockstep.admit(&self.inbox).unwrap();
        let record = self.incoming.hears(matched.header());
        heard();
        if matched.header().payload_bytes() == 0 {
            return None;
        }
        let receiving = self.both.receive(&matched).unwrap();
        record.started();
        Some(receiving.recorded(record))
    }

    /// Takes in the next message with its payload.
    fn take(&mut self) -> RxLease {
        match self.receive(|| ()).expect("a payload").complete() {
            Ok(Completion::Done(lease)) => lease,
            _ => panic!("on the host a payload comes with its header"),
        }
    }
}

fn only(recorder: &FlightRecorder) -> Operation {
    let (operations, total) = recorder.operations();
    assert_eq!((operations.len(), total), (1, 1));
    operations.into_iter().next().unwrap()
}

#[test]
fn both_halves_of_a_message_are_recorded_state_by_state() {
    let (mut low, mut high, ours, theirs) = recorded(16);
    let sending = low.send(7);
    let sent = only(&ours);
    assert_eq!((sent.kind, sent.state), (Kind::Send, State::Started));
    assert_eq!(sent.peer, Some(Rank::new(1)));
    assert_eq!(sent.message, Some(Message::Chunk));
    assert_eq!(sent.call_id, Some(CallId::new(7 + AHEAD)));
    assert_eq!(sent.chunk_index, Some(ChunkIndex::new(7)));
    assert_eq!(sent.cache_epoch, Some(CacheEpoch::new(0)));
    assert_eq!((sent.number, sent.bytes), (Some(0), BYTES as u64));
    assert_eq!(sent.generation, Generation::new(3));
    assert_eq!(sent.edge, Some(UP));
    assert!(sent.prepared_ns <= sent.committed_ns.unwrap() && sent.ended_ns.is_none());

    let receiving = high.receive(|| {
        let heard = only(&theirs);
        assert_eq!((heard.kind, heard.state), (Kind::Receive, State::Prepared));
        assert_eq!(heard.call_id, sent.call_id);
        assert_eq!(heard.edge, Some(UP));
    });
    assert_eq!(only(&theirs).state, State::Started);
    let Some(Ok(Completion::Done(lease))) = receiving.map(InFlight::complete) else {
        panic!("on the host a payload comes with its header");
    };
    let taken = only(&theirs);
    assert_eq!((taken.state, taken.bytes), (State::Done, sent.bytes));
    assert!(taken.prepared_ns >= sent.prepared_ns);
    drop(lease);
    assert!(sending.is_done().unwrap());
    let done = only(&ours);
    assert_eq!(done.state, State::Done);
    assert!(done.ended_ns.unwrap() >= taken.ended_ns.unwrap());
}

#[test]
fn an_aborted_transfer_is_recorded_as_poisoned_and_a_dropped_one_as_left() {
    let (mut low, mut high, ours, theirs) = recorded(16);
    drop(low.send(0).abort());
    drop(low.send(1));
    let (operations, _) = ours.operations();
    let states: Vec<_> = operations.iter().map(|o| o.state).collect();
    assert_eq!(states, [State::Poisoned, State::Left]);
    drop(high.receive(|| ()).expect("a payload").abort());
    assert_eq!(only(&theirs).state, State::Poisoned);
}

#[test]
fn a_message_without_a_payload_is_done_when_it_left_and_when_it_came() {
    let (mut low, mut high, ours, theirs) = recorded(16);
    let stamp = Stamp::new(ChunkIndex::new(4), CacheEpoch::new(0), CallId::new(0));
    low.send_shutdown(stamp);
    assert!(high.receive(|| ()).is_none());
    for recorder in [&ours, &theirs] {
        let operation = only(recorder);
        assert_eq!(operation.message, Some(Message::Shutdown));
        assert_eq!((operation.state, operation.number), (State::Done, None));
    }
}

#[test]
fn the_ring_keeps_the_latest_and_says_how_many_there_were() {
    let (mut low, mut high, ours, _) = recorded(8);
    for n in 0..100 {
        drop(low.send(n));
        drop(high.take());
    }
    let (operations, total) = ours.operations();
    assert_eq!(total, 100);
    let chunks: Vec<_> = operations
        .iter()
        .map(|o| o.chunk_index.unwrap().get())
        .collect();
    assert_eq!(chunks, (92..100).collect::<Vec<_>>());
}

#[test]
fn a_recorder_that_is_off_keeps_nothing() {
    let (mut low, _high, ours, _) = recorded(0);
    drop(low.send(0));
    assert!(!ours.is_on());
    assert_eq!(ours.operations(), (Vec::new(), 0));
}

#[test]
fn a_reader_beside_a_link_at_work_sees_operations_that_make_sense() {
    let (mut low, mut high, ours, _) = recorded(4);
    let over = std::sync::atomic::AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = 0_u64;
            loop {
                // The last look finds the last operations.
                let is_over = over.load(std::sync::atomic::Ordering::Relaxed);
                for operation in ours.operations().0 {
                    seen += 1;
                    // Chunks and payloads count alike in this job.
                    let chunk = operation.chunk_index.unwrap().get();
                    assert_eq!(operation.sequence, chunk);
                    assert!(
                        operation
                            .call_id
                            .is_none_or(|call| call.get() == chunk + AHEAD)
                    );
                    assert_eq!(operation.is_over(), operation.ended_ns.is_some());
                }
                if is_over {
                    break seen;
                }
            }
        });
        for n in 0..50_000 {
            drop(low.send(n));
            drop(high.take());
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        reader.join().unwrap()
    });
    assert!(seen > 0);
}

fn recording() -> Recording {
    let (mut low, _high, ours, _) = recorded(16);
    drop(low.send(0));
    let empty = Recording {
        job: 0xABCD,
        rank: Rank::new(1),
        world_size: WorldSize::new(2).unwrap(),
        pid: 77,
        host: Text::truncated("host"),
        boot: Text::truncated("boot"),
        written: Moment {
            monotonic_ns: u64::MAX / 2,
            realtime_ns: 1,
        },
        reason: Reason::Fault(Fault::new(
            FaultKind::TimedOut,
            Rank::new(0),
            "phase_b",
            "no progress",
        )),
        activity: Some(Activity {
            operation: Text::truncated("phase_b"),
            is_stage: true,
            since_ns: Some(1),
            waiting_since_ns: None,
        }),
        capacity: 0,
        total: 0,
        groups: List::default(),
        operations: List::default(),
    };
    empty.with(&ours)
}

#[test]
fn a_file_gives_back_what_was_written() {
    let recording = recording();
    assert_eq!(recording.operations.len(), 1);
    assert_eq!(
        Recording::decode(&recording.encode().unwrap()),
        Ok(recording)
    );
}

#[test]
fn a_file_that_is_cut_off_damaged_or_of_another_version_says_so() {
    let file = recording().encode().unwrap();
    for len in 1..file.len() {
        let refused = Recording::decode(&file[..len]).unwrap_err();
        assert!(
            matches!(refused, RecordingError::Length { .. }),
            "cut to {len}: {refused}"
        );
    }
    assert_eq!(Recording::decode(&[]), Err(RecordingError::Magic));
    assert_eq!(Recording::decode(b"PNG"), Err(RecordingError::Magic));
    let mut longer = file.clone();
    longer.push(0);
    assert!(matches!(
        Recording::decode(&longer),
        Err(RecordingError::Length { .. })
    ));
    for at in 24..file.len() {
        let mut damaged = file.clone();
        damaged[at] ^= 1;
        assert!(matches!(
            Recording::decode(&damaged),
            Err(RecordingError::Digest { .. })
        ));
    }
    let mut newer = file;
    newer[8] = 4;
    assert_eq!(
        Recording::decode(&newer),
        Err(RecordingError::Version { theirs: 4 })
    );
}

/// A file whose digest is right, around any body.
fn sealed(body: &[u8]) -> Vec<u8> {
    let mut file = b"PPFLIGHT\x03\0\0\0".to_vec();
    file.extend_from_slice(&(body.len() as u32).to_le_bytes());
    file.extend_from_slice(&digest(body).to_le_bytes());
    file.extend_from_slice(body);
    file
}

proptest! {
    #[test]
    fn no_body_is_too_much_for_the_decoder(body in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = Recording::decode(&sealed(&body));
    }

    #[test]
    fn no_change_of_a_body_is(at in 0_usize..200, to in any::<u8>()) {
        let file = recording().encode().unwrap();
        let mut body = file[24..].to_vec();
        let at = at % body.len();
        body[at] = to;
        if let Ok(recording) = Recording::decode(&sealed(&body)) {
            // What is taken can be written again.
            prop_assert!(recording.encode().is_ok());
        }
    }
}
