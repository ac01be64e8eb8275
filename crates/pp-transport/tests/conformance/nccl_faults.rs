//! What is left in order when NCCL hangs, fails or is aborted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pp_device::{Device, DeviceBuffer};
use pp_testing::{HANG, until, until_some, wait_for};
use pp_transport::backend::{Abort, Joined};
use pp_transport::edge::EdgeTx as _;
use pp_transport::error::TransportError;

use crate::devices::{Gate, assert_free, free, settled_free, the_fakes, upload, with};
use crate::gpu_link::{
    connect, edge, ends, meet, on_device, on_one_host, past_the_buffers, payload, read_slowly,
    stream, talk, write_slowly,
};
use crate::nccl_link::{Nccl, connect_alone, join, set_blocking};

/// NCCL would wait for the peer if communicators ended in order.
#[test]
fn a_link_whose_peer_is_gone_ends_by_an_abort() {
    let fakes = the_fakes!();
    let mut ends = ends::<Nccl>(edge(2, 64));
    talk(&mut ends, 64, 3);
    let [mut first, second] = ends;
    fakes.set("FAULTS", "ncclCommFinalize:1:3,ncclCommDestroy:1:3");
    first.link.out.peer_is_gone();
    drop(first.link);
    fakes.set("FAULTS", "");
    // It has ended: this says how.
    (first.abort)("too late", Instant::now()).unwrap();
    drop(second);
}

/// The device says of a transfer that an abort cut short that it is done: its memory stays until the
/// abort is over, and no longer.
#[test]
fn the_memory_of_a_transfer_that_was_given_up_is_freed_when_its_communicators_are_gone() {
    let fakes = the_fakes!();
    const BYTES: u64 = 4096;
    drop(ends::<Nccl>(edge(1, 64)));
    let before = free();
    let mut ends = ends::<Nccl>(edge(1, BYTES as usize));
    let mut lease = ends[0].lease();
    let (writer, kernels) = (stream(0), on_device(0));
    write_slowly(&mut lease, &writer, &kernels, 300_000);
    let sending = ends[0].try_send(BYTES as usize, lease).unwrap();
    let (_, receiving) = ends[1].hear_one();
    // An abort that takes its time, on a thread of its own.
    fakes.set("NCCL_ABORT_MS", "400");
    let aborts = ends.each_ref().map(|end| Arc::clone(&end.abort));
    for abort in &aborts {
        abort("the test", Instant::now()).unwrap_err();
    }
    until(|| writer.is_idle().unwrap());
    drop((sending.abort(), receiving.abort()));
    drop(ends);
    fakes.set("NCCL_ABORT_MS", "");
    for abort in &aborts {
        abort("the test", Instant::now() + HANG).unwrap();
    }
    assert_free(before);
}

/// NCCL took the first operation of an edge and no caller waits for it any more: it may still
/// begin, until its communicators are gone.
#[test]
fn a_connection_that_was_given_up_leaves_no_memory_behind() {
    let fakes = the_fakes!();
    drop(ends::<Nccl>(edge(1, 64)));
    let before = free();
    // What the communicators are asked to do is never done.
    fakes.set("NCCL_POLLS", "1000000000");
    set_blocking(false);
    let met = meet::<Nccl>(&mut on_one_host(), edge(1, 64), edge(1, 64));
    let errors = connect::<Nccl>(met, Duration::from_secs(1), &|| true);
    fakes.set("NCCL_POLLS", "");
    for error in errors {
        let text = error.map(drop).unwrap_err().to_string();
        assert!(text.contains("connect the edges"), "{text}");
    }
    // The next one waits until those who were left behind have ended.
    drop(ends::<Nccl>(edge(1, 64)));
    assert_free(before);
}

/// A thread that was left behind is still in NCCL: until it has ended, no other thread of its
/// device may call, neither to issue nor to connect.
#[test]
fn nobody_calls_beside_a_thread_that_was_left_behind() {
    let fakes = the_fakes!();
    let mut ends = ends::<Nccl>(edge(1, 64));
    talk(&mut ends, 64, 1);
    // It sees that it was given up, and then takes its time to end.
    let gate = Gate::closed(fakes);
    fakes.set("FAULTS", "ncclCommAbort:1:wait");
    set_blocking(false);
    let alone = || {
        let error = connect_alone(Duration::from_secs(1), &|| true);
        error.map(drop).unwrap_err().to_string()
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
    fakes.set("FAULTS", "");
    drop(gate);
    // Refused before anything left: the numbers go on where they were.
    until(|| {
        ends[0].sent = 1;
        let lease = ends[0].lease();
        ends[0].try_send(64, lease).is_ok()
    });
    let (_, arriving) = ends[1].hear_one();
    wait_for(arriving);
}

/// Two threads that share an issuer and have issued nothing yet: one connects, the other may not
/// issue beside it.
#[test]
fn nobody_issues_while_another_thread_connects() {
    for attempt in 1..=20 {
        let mut ends = ends::<Nccl>(edge(1, 64));
        let sent = with(|held| {
            let [backend, _] = &mut held.nccl;
            std::thread::scope(|scope| {
                let connecting = scope.spawn(|| {
                    let soon = Duration::from_millis(500);
                    join(backend, &[0, 1], soon).map(drop).unwrap_err()
                });
                std::thread::sleep(Duration::from_millis(10 * attempt));
                let lease = ends[0].lease();
                let sent = ends[0].try_send(64, lease);
                connecting.join().unwrap();
                sent
            })
        });
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
    let fakes = the_fakes!();
    if !pp_testing::alone!() {
        return;
    }
    let ends = ends::<Nccl>(edge(1, 64));
    let device = Device::open(0).unwrap();
    fakes.set("FAULTS", "ncclGroupEnd:1:7,nothing:5:skip");
    let error = (ends[0].abort)("the test", Instant::now() + HANG).unwrap_err();
    fakes.set("FAULTS", "");
    assert!(
        matches!(error, TransportError::LeftBehind { .. }),
        "{error}"
    );
    let free = || {
        settled_free(&Device::open(1).unwrap());
        device.memory().unwrap().free
    };
    let before = free();
    drop(DeviceBuffer::new(&device, 1 << 20).unwrap());
    assert_eq!(free(), before - (1 << 20));
}

/// A slot that waits for its reader when the generation dies is not given back afterwards.
#[test]
fn a_dead_generation_gives_no_slot_back() {
    the_fakes!();
    let mut ends = ends::<Nccl>(edge(1, 4096));
    let (reader, kernels) = (stream(1), on_device(1));
    let flight = ends[0].send(4096);
    let (_, arriving) = ends[1].hear_one();
    let payload = wait_for(arriving);
    read_slowly(&payload, &reader, &kernels, 100_000);
    drop(payload);
    (ends[1].abort)("the test", Instant::now() + HANG).unwrap();
    until(|| reader.is_idle().unwrap());
    let [_first, second] = ends;
    drop(second);
    assert!(!flight.is_done().unwrap(), "given back after the end");
}

/// Gives the generation up once so many have come to the gate, and opens it.
fn abort_at(gate: Gate, count: u64, abort: &Abort) {
    until(|| gate.was_reached_by(count));
    abort("the test", Instant::now() + HANG).unwrap();
    drop(gate);
}

/// As [`abort_at`], with a communicator in use at the gate: the abort waits until that is over.
fn abort_waits_at(gate: Gate, abort: &Abort) {
    until(|| gate.was_reached_by(1));
    let soon = Instant::now() + Duration::from_millis(500);
    let error = abort("the test", soon).unwrap_err();
    assert!(
        matches!(error, TransportError::LeftBehind { .. }),
        "{error}"
    );
    drop(gate);
    abort("the test", Instant::now() + HANG).unwrap();
}

/// A send that is held up before NCCL has it, until the communicators are gone.
#[test]
fn nothing_is_sent_after_an_abort() {
    let fakes = the_fakes!();
    let mut ends = ends::<Nccl>(edge(2, 64));
    let mut lease = ends[0].lease();
    upload(0, &mut lease, 0, &payload(0, 0, 64));
    let (gate, abort) = (Gate::closed(fakes), Arc::clone(&ends[0].abort));
    fakes.set("FAULTS", "cuStreamWaitEvent:1:wait");
    let error = std::thread::scope(|scope| {
        scope.spawn(|| abort_at(gate, 1, &abort));
        ends[0].try_send(64, lease).unwrap_err().to_string()
    });
    fakes.set("FAULTS", "");
    assert!(error.contains("the test"), "{error}");
}

/// A receive that is held up before NCCL has it: it looks after a slot that waits for its reader.
#[test]
fn nothing_is_received_after_an_abort() {
    let fakes = the_fakes!();
    let mut ends = ends::<Nccl>(edge(2, 64));
    let (reader, kernels) = (stream(1), on_device(1));
    let first = ends[0].send(64);
    let payload = wait_for(ends[1].hear_one().1);
    let (gate, abort) = (Gate::closed(fakes), Arc::clone(&ends[1].abort));
    read_slowly(&payload, &reader, &kernels, u64::MAX);
    drop(payload);
    until(|| gate.was_reached_by(1));
    let second = ends[0].send(64);
    // What earlier tests left to be freed is asked after as well.
    settled_free(&Device::open(1).unwrap());
    let error = std::thread::scope(|scope| {
        scope.spawn(|| abort_at(gate, 2, &abort));
        let begin = || fakes.set("FAULTS", "cuEventQuery:1:wait");
        until_some("an error", || ends[1].try_hear(begin).err()).to_string()
    });
    fakes.set("FAULTS", "");
    assert!(error.contains("the test"), "{error}");
    drop((first, second));
}

/// A look that began before an abort ends after it, when the device says of what was cut short that it is done. No other
/// thread may look meanwhile, so this needs a process of its own.
#[test]
fn a_look_that_an_abort_overtakes_believes_nothing() {
    let fakes = the_fakes!();
    if !pp_testing::alone!() {
        return;
    }
    let mut ends = ends::<Nccl>(edge(1, 64));
    let (writer, kernels) = (stream(0), on_device(0));
    let mut lease = ends[0].lease();
    let (gate, abort) = (Gate::closed(fakes), Arc::clone(&ends[1].abort));
    write_slowly(&mut lease, &writer, &kernels, u64::MAX);
    let sending = ends[0].try_send(64, lease).unwrap();
    let (_, receiving) = ends[1].hear_one();
    until(|| gate.was_reached_by(1));
    let looked = std::thread::scope(|scope| {
        scope.spawn(|| abort_at(gate, 2, &abort));
        fakes.set("FAULTS", "cuEventQuery:1:wait,nothing:8:skip");
        receiving.is_done()
    });
    fakes.set("FAULTS", "");
    assert!(looked.is_err(), "{looked:?}");
    drop(sending);
}

/// A thread that has begun a group of calls has to end it: until then the communicator is there.
#[test]
fn a_communicator_is_not_freed_while_a_group_of_calls_is_begun() {
    let fakes = the_fakes!();
    // Of this rank alone.
    let joined = with(|held| join(&mut held.nccl[0], &[0], HANG)).unwrap();
    let Joined {
        mut group, abort, ..
    } = joined;
    let gate = Gate::closed(fakes);
    fakes.set("FAULTS", "ncclAllReduce:1:wait");
    std::thread::scope(|scope| {
        scope.spawn(|| abort_waits_at(gate, &abort));
        // It may come to its end, or be cut short behind the gate.
        let _ = group.barrier(&stream(0));
    });
    fakes.set("FAULTS", "");
    let error = group.barrier(&stream(0)).unwrap_err().to_string();
    assert!(error.contains("the test"), "{error}");
}

/// A thread that is in the middle of a look at the communicators: an abort waits for it, for as long
/// as the look takes.
#[test]
fn communicators_are_not_freed_while_they_are_looked_at() {
    let fakes = the_fakes!();
    let bytes = past_the_buffers();
    let mut ends = ends::<Nccl>(edge(1, bytes));
    let flight = ends[0].send(bytes);
    let (gate, abort) = (Gate::closed(fakes), Arc::clone(&ends[0].abort));
    fakes.set("FAULTS", "ncclCommGetAsyncError:1:wait");
    let error = std::thread::scope(|scope| {
        scope.spawn(|| abort_waits_at(gate, &abort));
        loop {
            if let Err(error) = flight.is_done() {
                break error.to_string();
            }
        }
    });
    fakes.set("FAULTS", "");
    assert!(error.contains("the test"), "{error}");
}
