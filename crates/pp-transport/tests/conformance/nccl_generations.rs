//! A process that lives on after an abort: what it sent is sent again, and nothing of the dead is kept.

use std::time::{Duration, Instant};

use pp_contract::Rank;
use pp_device::{Device, Stream};
use pp_testing::wait_for;
use pp_transport::error::TransportError;
use pp_transport::gpu::Sending;
use pp_transport::in_flight::{InFlight, Part, Resend as _};
use pp_transport::nccl::{self, CommOptions, Communicator, NcclOptions, UniqueId, is_at_rest};

use crate::devices::{
    Gate, HANG, download, fakes, ids, issuers, options, pair, settled_free, small_lanes, upload,
    wait,
};
use crate::nccl_link::{End, both_ways, ends, on_device, payload, read_slowly, talk, write_slowly};
use pp_fakes::ok;
use pp_fakes::raw::{Config, Handle};

const BYTES: usize = 6000;

fn whole(bytes: usize) -> Part {
    Part {
        from: 0,
        to: 0,
        bytes: bytes as u64,
    }
}

fn abort(ends: [End; 2]) {
    for end in &ends {
        let handle = end.link.abort_handle();
        handle.abort("the test", Instant::now() + HANG).unwrap();
    }
}

/// Sends what an earlier generation sent, from slot to slot.
fn send_again(end: &mut End, old: &InFlight<Sending>) -> InFlight<Sending> {
    let mut lease = end.lease();
    old.copy_into(&[whole(BYTES)], &mut lease).unwrap();
    end.try_send(BYTES, lease).unwrap()
}

fn receive_all(ends: &mut [End; 2], count: u64) {
    let deadline = Instant::now() + HANG;
    while ends[1].received < count {
        while ends[1].hear() {}
        ends[1].take(BYTES);
        assert!(Instant::now() < deadline, "it never came");
    }
}

#[test]
fn what_was_sent_is_sent_again_to_another_generation() {
    let mut old = ends(pair(both_ways(3, BYTES)));
    let sent: Vec<_> = (0..3).map(|_| old[0].send(BYTES)).collect();
    // One of them was being received.
    let (_, arriving) = old[1].hear_one();
    drop(arriving.abort());
    abort(old);
    let mut new = ends(pair(both_ways(3, BYTES)));
    let again: Vec<_> = sent
        .iter()
        .map(|old| send_again(&mut new[0], old))
        .collect();
    // While the copies may still be under way.
    sent.into_iter().for_each(|sent| drop(sent.abort()));
    receive_all(&mut new, 3);
    drop(again);
}

/// A send that failed after its header left: the peer is gone, and the payload is not.
#[test]
fn what_could_not_be_sent_is_sent_to_the_next_generation() {
    let Some(fakes) = fakes() else {
        return;
    };
    let mut old = ends(pair(both_ways(3, BYTES)));
    fakes.set("FAULTS", "ncclSend:1:6,nothing:4:skip");
    let mut unsent = old[0].fail_to_send(BYTES);
    fakes.set("FAULTS", "");
    // NCCL may have taken it all the same, and read it yet.
    let stream = Stream::new(&Device::open(0).unwrap()).unwrap();
    let written = unsent.write_on(&stream, |_| Ok::<_, TransportError>(()));
    let error = written.unwrap_err().to_string();
    assert!(error.contains("out of use"), "{error}");
    let unsent = InFlight::new(Sending::unsent(unsent));
    abort(old);
    let mut new = ends(pair(both_ways(3, BYTES)));
    let again = send_again(&mut new[0], &unsent);
    drop(unsent.abort());
    receive_all(&mut new, 1);
    drop(again);
}

/// The slot is leased again while the copy waits for its turn.
#[test]
fn a_slot_that_is_copied_from_is_not_written_before_the_copy_is_done() {
    let Some(_) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(2, BYTES)));
    let sent = ends[0].send(BYTES);
    receive_all(&mut ends, 1);
    wait(|| sent.is_done().unwrap());
    let mut lease = ends[0].lease();
    let (writer, kernels) = (
        Stream::new(&Device::open(0).unwrap()).unwrap(),
        on_device(0),
    );
    write_slowly(&mut lease, &writer, &kernels, 200_000);
    sent.copy_into(&[whole(BYTES)], &mut lease).unwrap();
    upload(0, &mut wait_for(sent), 0, &[0xFF; BYTES]);
    let flight = ends[0].try_send(BYTES, lease).unwrap();
    let (_, arriving) = ends[1].hear_one();
    assert!(download(1, &wait_for(arriving)) == payload(0, 0, BYTES));
    drop(flight);
}

/// A process that has nothing more to do with NCCL ends as any other: also after a connection that
/// was refused before anything was made for it. Of the whole process, so in one of its own.
#[test]
fn a_connection_that_never_began_leaves_the_process_at_rest() {
    if !pp_testing::alone!() {
        return;
    }
    assert!(is_at_rest());
    let mut ends = ends(pair(both_ways(1, 64)));
    assert!(!is_at_rest());
    talk(&mut ends, 64, 1);
    let [issuer, _] = issuers();
    let id = UniqueId::new(issuer.nccl()).unwrap();
    let connecting = std::thread::spawn(move || {
        Communicator::connect(CommOptions {
            issuer,
            name: "mesh",
            members: vec![Rank::new(0), Rank::new(1)],
            me: Rank::new(0),
            id,
            gathers: None,
            deadline: Instant::now() + HANG,
            blocking: false,
        })
    });
    let error = connecting.join().unwrap().unwrap_err();
    assert!(
        matches!(error, TransportError::WrongThread { .. }),
        "{error}"
    );
    assert!(!is_at_rest());
    drop(ends);
    wait(is_at_rest);
}

#[test]
fn parts_go_where_they_belong_and_not_beyond() {
    let mut old = ends(pair(both_ways(1, BYTES)));
    let sent = old[0].send(BYTES);
    abort(old);
    let mut new = ends(pair(both_ways(1, BYTES)));
    let mut lease = new[0].lease();
    let half = BYTES as u64 / 2;
    let swapped = [(0, half), (half, 0)].map(|(from, to)| Part {
        from,
        to,
        bytes: half,
    });
    let beyond = Part {
        from: 1,
        ..whole(BYTES)
    };
    let error = sent.copy_into(&[swapped[0], beyond], &mut lease);
    assert!(
        matches!(error, Err(TransportError::PayloadMismatch { .. })),
        "{error:?}"
    );
    sent.copy_into(&swapped, &mut lease).unwrap();
    let flight = new[0].try_send(BYTES, lease).unwrap();
    let (_, arriving) = new[1].hear_one();
    let mut wanted = payload(0, 0, BYTES);
    wanted.rotate_left(BYTES / 2);
    assert!(download(1, &wait_for(arriving)) == wanted);
    drop((flight, sent));
}

/// What a job that lost its peer again and again would keep: each generation ends in the middle of
/// its work, and the next gets what this one sent.
#[test]
fn fifty_generations_leave_no_memory_behind() {
    let Some(fakes) = fakes() else {
        return;
    };
    fakes.set("NCCL_ABORT_MS", "1");
    let devices = [0, 1].map(|on| Device::open(on).unwrap());
    let kernels = [0, 1].map(on_device);
    let streams = devices
        .each_ref()
        .map(|device| Stream::new(device).unwrap());
    let mut kept: Option<InFlight<Sending>> = None;
    let mut free = None;
    for generation in 0..53 {
        let mut ends = ends(pair(both_ways(3, BYTES)));
        let first = match kept.take() {
            None => ends[0].send(BYTES),
            Some(old) => {
                let again = send_again(&mut ends[0], &old);
                drop(old.abort());
                again
            }
        };
        receive_all(&mut ends, 1);
        // The peer does not receive it.
        let unheard = ends[0].send(BYTES);
        let arriving = (generation % 2 == 0).then(|| {
            // A receive that is cut short, and a payload that is still read when all is over.
            let flight = ends[1].send(BYTES);
            let payload = wait_for(ends[0].hear_one().1);
            read_slowly(&payload, &streams[0], &kernels[0], 3000);
            (flight, payload, ends[1].hear_one())
        });
        // A send that waits for what writes it.
        let mut lease = ends[1].lease();
        write_slowly(&mut lease, &streams[1], &kernels[1], 2000);
        let unwritten = ends[1].try_send(BYTES, lease).unwrap();
        abort(ends);
        if let Some((flight, payload, (_, arriving))) = arriving {
            drop((flight.abort(), arriving.abort(), payload));
        }
        // Poisoned, or simply dropped.
        if generation % 3 == 0 {
            drop(unwritten.abort());
        } else {
            drop(unwritten);
        }
        drop(unheard.abort());
        kept = Some(first);
        if generation == 2 {
            free = Some(devices.each_ref().map(settled_free));
        }
    }
    fakes.set("NCCL_ABORT_MS", "");
    assert_eq!(devices.each_ref().map(settled_free), free.unwrap());
}

/// The peer never comes, and somebody says so before the deadline: the thread that waits inside NCCL
/// ends, and the next generation connects.
#[test]
fn a_connection_that_is_not_wanted_any_more_is_given_up_at_once() {
    let Some(_) = fakes() else {
        return;
    };
    let device = Device::open(0).unwrap();
    drop(pair(both_ways(1, 64)));
    let before = settled_free(&device);
    for _ in 0..3 {
        let [issuer, _] = issuers();
        let (lanes, _peer) = small_lanes();
        let started = Instant::now();
        let options = options(issuer, lanes, ids());
        let is_wanted = || started.elapsed() < Duration::from_millis(100);
        let error = nccl::connect(options, &is_wanted).unwrap_err();
        assert!(matches!(error, TransportError::NotInTime { .. }), "{error}");
        assert!(started.elapsed() < HANG / 2);
    }
    drop(pair(both_ways(1, 64)));
    assert_eq!(settled_free(&device), before);
}

/// The peer joins both communicators and never uses them: the thread that connects hangs inside NCCL,
/// also where NCCL lets its caller wait. It is freed, with all that it made, and the next generation
/// connects.
#[test]
fn a_first_operation_that_hangs_is_given_up_and_the_next_generation_connects() {
    let Some(fakes) = fakes() else {
        return;
    };
    let device = Device::open(0).unwrap();
    drop(pair(both_ways(1, 64)));
    let (before, was_at_rest) = (settled_free(&device), is_at_rest());
    for blocking in [false, true] {
        let ([issuer, _], ids) = (issuers(), ids());
        let peer = std::thread::spawn(move || {
            Device::open(1).unwrap().bind().unwrap();
            ids.map(|id| {
                let (mut comm, id) = (std::ptr::null_mut(), id.to_bytes().map(u8::cast_signed));
                ok!(comm_init(&mut comm, 2, id, 1, &Config::new(true)));
                comm as usize
            })
        });
        let (lanes, _peer) = small_lanes();
        let options = NcclOptions {
            blocking,
            ..options(issuer, lanes, ids)
        };
        let sends = Gate::open(fakes);
        fakes.set("FAULTS", &format!("ncclSend:1:wait,{blocking}:1:skip"));
        let is_wanted = || !sends.was_reached_by(1);
        let error = nccl::connect(options, &is_wanted).unwrap_err();
        fakes.set("FAULTS", "");
        let text = error.to_string();
        assert!(text.contains("connect the edges"), "{text}");
        drop(pair(both_ways(1, 64)));
        for comm in peer.join().unwrap() {
            ok!(comm_abort(comm as Handle));
        }
    }
    assert_eq!(settled_free(&device), before);
    if was_at_rest {
        wait(is_at_rest);
    }
}
