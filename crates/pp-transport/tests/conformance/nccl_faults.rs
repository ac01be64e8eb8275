//! What is left in order when the driver refuses, a stage panics, or a transfer is given up.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use pp_contract::Rank;
use pp_device::{Device, DeviceBuffer, Event, Stream};
use pp_testing::wait_for;
use pp_transport::edge::EdgeTx as _;
use pp_transport::error::TransportError;
use pp_transport::nccl::{
    self, AbortHandle, CommOptions, Communicator, Issuer, NcclOptions, UniqueId,
};

use crate::devices::{
    Gate, HANG, fakes, ids, issuers, options, pair, settled_free, small_lanes, upload, wait,
};
use crate::nccl_link::{
    both_ways, ends, on_device, past_the_buffers, payload, read_slowly, talk, write_slowly,
};

use crate::two_way::Lanes;

fn stream(on: u32) -> Stream {
    Stream::new(&Device::open(on).unwrap()).unwrap()
}

/// For as long as this a slot must not have come back.
const A_WHILE: Duration = Duration::from_millis(50);

/// A reader that lets another read inside its own turn, on another stream that takes longer.
#[test]
fn a_reader_within_a_reader_is_not_forgotten() {
    let Some(_) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(1, 4096)));
    let kernels = on_device(1);
    let (outer, inner) = (stream(1), stream(1));
    let passed = Event::new(&Device::open(1).unwrap()).unwrap();
    let flight = ends[0].send(4096);
    let (_, arriving) = ends[1].hear_one();
    let payload = wait_for(arriving);
    let read = payload.read_on(&outer, |_| -> Result<(), TransportError> {
        payload.read_on(&inner, |_| {
            kernels.spin(inner.raw(), 400_000);
            passed.record(&inner).map_err(TransportError::from)
        })
    });
    read.unwrap();
    drop(payload);
    ends[1].assert_back_once(&passed, &flight);
}

/// What a stage issued before it panicked has no event behind it: its slot is never used again.
#[test]
fn a_stage_that_panics_costs_its_slot_and_nothing_else() {
    let Some(_) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(2, 4096)));
    let panics = |_| -> Result<(), TransportError> { panic!("a stage panics") };

    let mut lease = ends[0].lease();
    let writer = stream(0);
    catch_unwind(AssertUnwindSafe(|| lease.write_on(&writer, panics))).unwrap_err();
    let refused = ends[0].try_send(64, lease).unwrap_err().to_string();
    assert!(refused.contains("without an event"), "{refused}");
    let lease = ends[0].lease();
    assert!(ends[0].link.try_lease().unwrap().is_none());
    drop(lease);

    let flight = ends[1].send(64);
    let (_, arriving) = ends[0].hear_one();
    let payload = wait_for(arriving);
    catch_unwind(AssertUnwindSafe(|| payload.read_on(&writer, panics))).unwrap_err();
    drop(payload);
    let start = Instant::now();
    while start.elapsed() < A_WHILE {
        ends[0].hear();
        assert!(!flight.is_done().unwrap(), "the peer got a lost slot back");
    }
}

/// NCCL would wait for the peer if communicators ended in order.
#[test]
fn a_link_whose_peer_is_gone_ends_by_an_abort() {
    let Some(fakes) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(2, 64)));
    talk(&mut ends, 64, 3);
    let [mut first, second] = ends;
    fakes.set("FAULTS", "ncclCommFinalize:1:3,ncclCommDestroy:1:3");
    first.link.out.peer_is_gone();
    let closed = first.link.close(Instant::now() + HANG);
    fakes.set("FAULTS", "");
    closed.unwrap();
    drop(second);
}

/// The driver takes the work and refuses the event behind it.
#[test]
fn a_slot_whose_event_was_refused_is_not_sent() {
    let Some(fakes) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(2, 64)));
    talk(&mut ends, 64, 2);
    let mut lease = ends[0].lease();
    let writer = stream(0);
    fakes.set("FAULTS", "cuEventRecord:1:999,nothing:4:skip");
    let written = lease.write_on(&writer, |_| Ok::<_, TransportError>(()));
    fakes.set("FAULTS", "");
    assert!(written.is_err());
    let refused = ends[0].try_send(64, lease).unwrap_err().to_string();
    assert!(refused.contains("without an event"), "{refused}");
    ends[0].lease();
}

/// The device says of a transfer that an abort cut short that it is done: its memory stays until the
/// abort is over, and no longer.
#[test]
fn the_memory_of_a_transfer_that_was_given_up_is_freed_when_its_communicators_are_gone() {
    let Some(fakes) = fakes() else {
        return;
    };
    const BYTES: u64 = 4096;
    drop(pair(both_ways(1, 64)));
    let devices = [0, 1].map(|on| Device::open(on).unwrap());
    let before = devices.each_ref().map(settled_free);
    let mut ends = ends(pair(both_ways(1, BYTES as usize)));
    let mut lease = ends[0].lease();
    let (writer, kernels) = (stream(0), on_device(0));
    write_slowly(&mut lease, &writer, &kernels, 300_000);
    let sending = ends[0].try_send(BYTES as usize, lease).unwrap();
    let (_, receiving) = ends[1].hear_one();
    // An abort that takes its time, on a thread of its own.
    fakes.set("NCCL_ABORT_MS", "400");
    let handles = ends.each_ref().map(|end| end.link.abort_handle());
    for handle in &handles {
        handle.abort("the test", Instant::now()).unwrap_err();
    }
    wait(|| writer.is_idle().unwrap());
    drop((sending.abort(), receiving.abort()));
    drop(ends);
    fakes.set("NCCL_ABORT_MS", "");
    for handle in &handles {
        handle.abort("the test", Instant::now() + HANG).unwrap();
    }
    let after = devices.each_ref().map(settled_free);
    assert_eq!(after, before);
}

/// The peer of this end has announced what this end has not received: to end in order would wait
/// for the peer's send, which waits for this end.
#[test]
fn a_link_that_owes_a_receive_does_not_end_in_order() {
    let bytes = past_the_buffers();
    for polls in [false, true] {
        let mut ends = ends(pair(both_ways(1, bytes)));
        let flight = ends[0].send(bytes);
        let [first, mut second] = ends;
        if polls {
            while !second.link.poll_frame(&mut Vec::new()).unwrap() {}
        }
        let handle = second.link.abort_handle();
        drop(second);
        assert!(handle.is_aborted(), "it ended in order");
        drop(first);
        assert!(flight.is_done().is_err());
    }
}

/// Connects one end, which does not come to anything.
fn connect_in_vain(issuer: Issuer, lanes: Lanes, ids: [UniqueId; 2]) -> TransportError {
    let options = NcclOptions {
        deadline: Instant::now() + Duration::from_secs(1),
        ..options(issuer, lanes, ids)
    };
    nccl::connect(options, &|| true).unwrap_err()
}

/// NCCL took the first operation of an edge and no caller waits for it any more: it may still
/// begin, until its communicators are gone.
#[test]
fn a_connection_that_was_given_up_leaves_no_memory_behind() {
    let Some(fakes) = fakes() else {
        return;
    };
    drop(pair(both_ways(1, 64)));
    let devices = [0, 1].map(|on| Device::open(on).unwrap());
    let before = devices.each_ref().map(settled_free);
    // What the communicators are asked to do is never done.
    fakes.set("NCCL_POLLS", "1000000000");
    let ([first, second], ids) = (issuers(), ids());
    let (low, high) = small_lanes();
    let errors = std::thread::scope(|scope| {
        let high = scope.spawn(move || connect_in_vain(second, high, ids));
        [connect_in_vain(first, low, ids), high.join().unwrap()]
    });
    fakes.set("NCCL_POLLS", "");
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("connect the edges"), "{text}");
    }
    // The next one waits until those who were left behind have ended.
    drop(pair(both_ways(1, 64)));
    let after = devices.each_ref().map(settled_free);
    assert_eq!(after, before);
}

/// A thread that was left behind is still in NCCL: until it has ended, no other thread of its
/// device may call, neither to issue nor to connect.
#[test]
fn nobody_calls_beside_a_thread_that_was_left_behind() {
    let Some(fakes) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(1, 64)));
    talk(&mut ends, 64, 1);
    // It sees that it was given up, and then takes its time to end.
    fakes.set("NCCL_ABORT_MS", "5000");
    let alone = || {
        let [first, _] = issuers();
        let (lanes, _) = small_lanes();
        connect_in_vain(first, lanes, ids()).to_string()
    };
    let error = alone();
    assert!(error.contains("communicators of the edges"), "{error}");
    let lease = ends[0].lease();
    let error = ends[0].try_send(64, lease).unwrap_err();
    assert!(
        matches!(error, TransportError::WrongThread { ordinal: 0 }),
        "{error}"
    );
    let error = alone();
    assert!(error.contains("wait for the thread"), "{error}");
    fakes.set("NCCL_ABORT_MS", "");
    // Refused before anything left: the numbers go on where they were.
    let deadline = Instant::now() + HANG;
    loop {
        ends[0].sent = 1;
        let lease = ends[0].lease();
        if ends[0].try_send(64, lease).is_ok() {
            break;
        }
        assert!(Instant::now() < deadline, "it never ended");
    }
    let (_, arriving) = ends[1].hear_one();
    wait_for(arriving);
}

/// Two threads that share an issuer and have issued nothing yet: one connects, the other may not
/// issue beside it.
#[test]
fn nobody_issues_while_another_thread_connects() {
    for attempt in 1..=20 {
        let mut ends = ends(pair(both_ways(1, 64)));
        let [first, _] = issuers();
        let id = ids()[0];
        let connecting = std::thread::spawn(move || {
            Communicator::connect(CommOptions {
                issuer: first,
                name: "mesh",
                members: vec![Rank::new(0), Rank::new(1)],
                me: Rank::new(0),
                id,
                gathers: None,
                deadline: Instant::now() + Duration::from_millis(500),
                blocking: false,
            })
        });
        std::thread::sleep(Duration::from_millis(10 * attempt));
        let lease = ends[0].lease();
        let sent = ends[0].try_send(64, lease);
        connecting.join().unwrap().unwrap_err();
        match sent {
            Err(TransportError::WrongThread { ordinal: 0 }) => return,
            Err(error) => panic!("{error}"),
            // It had not begun yet.
            Ok(sending) => drop(sending),
        }
    }
    panic!("nobody was in the way");
}

/// NCCL aborts in its own time: what was in flight may still be, so the abort is no success, and
/// nothing is freed on the device. That is for good, so it happens in a process of its own.
#[test]
fn an_abort_that_goes_on_is_no_success() {
    let Some(fakes) = fakes() else {
        return;
    };
    if !pp_testing::alone!() {
        return;
    }
    let ends = ends(pair(both_ways(1, 64)));
    let device = Device::open(0).unwrap();
    let handle = ends[0].link.abort_handle();
    fakes.set("FAULTS", "ncclGroupEnd:1:7,nothing:5:skip");
    let error = handle.abort("the test", Instant::now() + HANG).unwrap_err();
    fakes.set("FAULTS", "");
    assert!(
        matches!(error, TransportError::LeftBehind { .. }),
        "{error}"
    );
    let before = settled_free(&device);
    drop(DeviceBuffer::new(&device, 1 << 20).unwrap());
    assert_eq!(settled_free(&device), before - (1 << 20));
}

/// A slot that waits for its reader when the generation dies is not given back afterwards.
#[test]
fn a_dead_generation_gives_no_slot_back() {
    let Some(_) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(1, 4096)));
    let (reader, kernels) = (stream(1), on_device(1));
    let flight = ends[0].send(4096);
    let (_, arriving) = ends[1].hear_one();
    let payload = wait_for(arriving);
    read_slowly(&payload, &reader, &kernels, 100_000);
    drop(payload);
    let handle = ends[1].link.abort_handle();
    handle.abort("the test", Instant::now() + HANG).unwrap();
    wait(|| reader.is_idle().unwrap());
    let [_first, second] = ends;
    drop(second);
    assert!(!flight.is_done().unwrap(), "given back after the end");
}

/// Gives the generation up once so many have come to the gate, and opens it.
fn abort_at(gate: Gate, count: u64, handle: &AbortHandle) {
    wait(|| gate.was_reached_by(count));
    handle.abort("the test", Instant::now() + HANG).unwrap();
    drop(gate);
}

/// As [`abort_at`], with a communicator in use at the gate: the abort waits until that is over.
pub(crate) fn abort_waits_at(gate: Gate, handle: &AbortHandle) {
    wait(|| gate.was_reached_by(1));
    let soon = Instant::now() + Duration::from_millis(500);
    let error = handle.abort("the test", soon).unwrap_err();
    assert!(
        matches!(error, TransportError::LeftBehind { .. }),
        "{error}"
    );
    drop(gate);
    handle.abort("the test", Instant::now() + HANG).unwrap();
}

/// A send that is held up before NCCL has it, until the communicators are gone.
#[test]
fn nothing_is_sent_after_an_abort() {
    let Some(fakes) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(2, 64)));
    let mut lease = ends[0].lease();
    upload(0, &mut lease, 0, &payload(0, 0, 64));
    let (gate, handle) = (Gate::closed(fakes), ends[0].link.abort_handle());
    fakes.set("FAULTS", "cuStreamWaitEvent:1:wait");
    let error = std::thread::scope(|scope| {
        scope.spawn(|| abort_at(gate, 1, &handle));
        ends[0].try_send(64, lease).unwrap_err().to_string()
    });
    fakes.set("FAULTS", "");
    assert!(error.contains("the test"), "{error}");
}

/// A receive that is held up before NCCL has it: it looks after a slot that waits for its reader.
#[test]
fn nothing_is_received_after_an_abort() {
    let Some(fakes) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(2, 64)));
    let (reader, kernels) = (stream(1), on_device(1));
    let first = ends[0].send(64);
    let payload = wait_for(ends[1].hear_one().1);
    let (gate, handle) = (Gate::closed(fakes), ends[1].link.abort_handle());
    read_slowly(&payload, &reader, &kernels, u64::MAX);
    drop(payload);
    wait(|| gate.was_reached_by(1));
    let second = ends[0].send(64);
    // What earlier tests left to be freed is asked after as well.
    settled_free(&Device::open(1).unwrap());
    let error = std::thread::scope(|scope| {
        scope.spawn(|| abort_at(gate, 2, &handle));
        loop {
            let begin = || fakes.set("FAULTS", "cuEventQuery:1:wait");
            if let Err(error) = ends[1].try_hear(begin) {
                break error.to_string();
            }
        }
    });
    fakes.set("FAULTS", "");
    assert!(error.contains("the test"), "{error}");
    drop((first, second));
}

/// A thread that is in the middle of a look at the communicators: an abort waits for it, for as long
/// as the look takes.
#[test]
fn communicators_are_not_freed_while_they_are_looked_at() {
    let Some(fakes) = fakes() else {
        return;
    };
    let bytes = past_the_buffers();
    let mut ends = ends(pair(both_ways(1, bytes)));
    let flight = ends[0].send(bytes);
    let (gate, handle) = (Gate::closed(fakes), ends[0].link.abort_handle());
    fakes.set("FAULTS", "ncclCommGetAsyncError:1:wait");
    let error = std::thread::scope(|scope| {
        scope.spawn(|| abort_waits_at(gate, &handle));
        loop {
            if let Err(error) = flight.is_done() {
                break error.to_string();
            }
        }
    });
    fakes.set("FAULTS", "");
    assert!(error.contains("the test"), "{error}");
}
