//! Claims over the edges between GPUs, whichever mover their payloads take.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pp_device::{Device, Event};
use pp_testing::{HANG, until, wait_for};
use pp_transport::error::TransportError;
use pp_transport::gpu::{DeviceRx, Sending};
use pp_transport::in_flight::{InFlight, Part};

use crate::devices::{assert_free, download, free, the_fakes, upload};
use crate::gpu_link::{
    BYTES, Mover, abort, edge, ends, on_device, past_the_buffers, payload, read_slowly,
    receive_all, send_again, stream, talk, write_slowly,
};
use crate::two_way::whole;

/// For as long as this a slot must not have come back.
const A_WHILE: Duration = Duration::from_millis(50);

macro_rules! conformance_on_gpus {
    ($mover:ty: $($claim:ident)+) => {
        $(
            #[test]
            fn $claim() {
                $crate::gpu_suite::$claim::<$mover>();
            }
        )+
    };
    ($mover:ty) => {
        $crate::conformance!($mover);
        $crate::gpu_suite::conformance_on_gpus!($mover:
            payloads_past_the_buffers_keep_their_order_both_ways
            the_steady_state_allocates_nothing
            a_slot_goes_back_only_when_its_reader_is_done
            a_reader_within_a_reader_is_not_forgotten
            a_send_waits_for_what_writes_its_slot
            an_abort_ends_what_is_in_flight_and_a_new_generation_works
            an_aborted_receive_is_never_believed
            a_link_that_owes_a_receive_does_not_end_in_order
            a_lease_that_outlives_an_abort_gives_no_slot_back
            a_stage_that_panics_costs_its_slot_and_nothing_else
            a_slot_whose_event_was_refused_is_not_sent
            what_was_sent_is_sent_again_to_another_generation
            a_slot_that_is_copied_from_is_not_written_before_the_copy_is_done
            parts_go_where_they_belong_and_not_beyond
            fifty_generations_leave_no_memory_behind
        );
    };
}
pub(crate) use conformance_on_gpus;

/// Both directions at once, with payloads that NCCL does not buffer: a wrong order would hang.
pub(crate) fn payloads_past_the_buffers_keep_their_order_both_ways<M: Mover>() {
    let bytes = past_the_buffers();
    for depth in [1, 2] {
        talk(&mut ends::<M>(edge(depth, bytes)), bytes, 6);
    }
}

/// Device memory in use does not grow with the messages.
pub(crate) fn the_steady_state_allocates_nothing<M: Mover>() {
    let mut ends = ends::<M>(edge(4, 4096));
    talk(&mut ends, 4096, 20);
    let before = free();
    talk(&mut ends, 4096, 200);
    assert_free(before);
}

pub(crate) fn a_slot_goes_back_only_when_its_reader_is_done<M: Mover>() {
    the_fakes!();
    let mut ends = ends::<M>(edge(1, 4096));
    let kernels = on_device(1);
    let streams = [stream(1), stream(1)];
    let flight = ends[0].send(4096);
    let (_, arriving) = ends[1].hear_one();
    let payload: DeviceRx = wait_for(arriving);
    // Two readers; the first takes longer than the second, and must not be forgotten over it.
    let passed = [0, 1].map(|_| Event::new(&Device::open(1).unwrap()).unwrap());
    for (i, us) in [400_000, 1000].into_iter().enumerate() {
        let read = payload.read_on(&streams[i], |_| -> Result<(), TransportError> {
            kernels.spin(streams[i].raw(), us);
            Ok(passed[i].record(&streams[i])?)
        });
        read.unwrap();
    }
    until(|| passed[1].is_done().unwrap());
    drop(payload);
    ends[1].assert_back_once(&passed[0], &flight);
}

pub(crate) fn a_send_waits_for_what_writes_its_slot<M: Mover>() {
    the_fakes!();
    for drops in [false, true] {
        let mut ends = ends::<M>(edge(1, 4096));
        let kernels = on_device(0);
        let streams = [stream(0), stream(0)];
        let passed = [0, 1].map(|_| Event::new(&Device::open(0).unwrap()).unwrap());
        let mut lease = ends[0].lease();
        // The later writer wins, though the first one is slow, and may have been of a lease that was dropped.
        for (at, (us, n)) in [(100_000, 7), (0, 0)].into_iter().enumerate() {
            let stream = &streams[at];
            let written = lease.write_on(stream, |slot| -> Result<(), TransportError> {
                kernels.spin(stream.raw(), us);
                kernels.fill(stream.raw(), slot.address, slot.len, n);
                Ok(passed[at].record(stream)?)
            });
            written.unwrap();
            if drops && n > 0 {
                drop(lease);
                lease = ends[0].lease();
            }
        }
        let flight = ends[0].try_send(4096, lease).unwrap();
        let (_, arriving) = ends[1].hear_one();
        let got = download(1, &wait_for(arriving));
        assert!(passed[0].is_done().unwrap(), "sent before it was written");
        assert!(got == payload(0, 0, 4096), "sent before it was written");
        drop(flight);
    }
}

pub(crate) fn an_abort_ends_what_is_in_flight_and_a_new_generation_works<M: Mover>() {
    let bytes = past_the_buffers();
    for round in 0..2 {
        let mut ends = ends::<M>(edge(1, bytes));
        // The peer does not receive it, and it is too large to be buffered.
        let flight = ends[0].send(bytes);
        let aborts = [0, 1].map(|on| Arc::clone(&ends[on].abort));
        let deadline = Instant::now() + HANG;
        let threads =
            aborts.map(|abort| std::thread::spawn(move || abort("the test gave it up", deadline)));
        for thread in threads {
            thread.join().unwrap().unwrap();
        }
        // The device lets go and calls it a success; the link must not believe it.
        std::thread::sleep(Duration::from_millis(50));
        for error in [
            flight.is_done().unwrap_err(),
            ends[0].link.try_lease().unwrap_err(),
            ends[1].link.poll_frame(&mut Vec::new()).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(text.contains("the test gave it up"), "{round}: {text}");
        }
        drop(flight.complete().unwrap_err().buffer);
        drop(ends);
    }
    talk(&mut ends::<M>(edge(2, 4096)), 4096, 10);
}

/// A receive that an abort cuts short: the device says that it succeeded.
pub(crate) fn an_aborted_receive_is_never_believed<M: Mover>() {
    the_fakes!();
    let mut ends = ends::<M>(edge(1, 4096));
    let kernels = on_device(0);
    let stream = stream(0);
    let mut lease = ends[0].lease();
    write_slowly(&mut lease, &stream, &kernels, 300_000);
    let _sending = ends[0].try_send(4096, lease).unwrap();
    let (_, receiving) = ends[1].hear_one();
    assert!(!M::RECEIVES_WAIT || !receiving.is_done().unwrap());
    (ends[1].abort)("its peer is late", Instant::now() + HANG).unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(100) {
        assert!(receiving.is_done().is_err());
    }
    drop(receiving.complete().unwrap_err());
}

/// The peer of this end has announced what this end has not received: the two have not ended alike.
pub(crate) fn a_link_that_owes_a_receive_does_not_end_in_order<M: Mover>() {
    let bytes = past_the_buffers();
    for polls in [false, true] {
        let mut ends = ends::<M>(edge(1, bytes));
        let done = ends[1].send(bytes);
        drop(wait_for(ends[0].hear_one().1));
        until(|| done.is_done().unwrap());
        let flight = ends[0].send(bytes);
        let [first, mut second] = ends;
        if polls {
            while !second.link.poll_frame(&mut Vec::new()).unwrap() {}
        }
        drop(second);
        assert!(done.is_done().is_err(), "it ended in order");
        drop(first);
        assert!(flight.is_done().is_err());
    }
}

pub(crate) fn a_lease_that_outlives_an_abort_gives_no_slot_back<M: Mover>() {
    let mut ends = ends::<M>(edge(1, 64));
    let flight = ends[0].send(64);
    let payload = wait_for(ends[1].hear_one().1);
    (ends[1].abort)("the test", Instant::now() + HANG).unwrap();
    drop(payload);
    assert!(!flight.is_done().unwrap(), "given back after the end");
}

/// A reader that lets another read inside its own turn, on another stream that takes longer.
pub(crate) fn a_reader_within_a_reader_is_not_forgotten<M: Mover>() {
    the_fakes!();
    let mut ends = ends::<M>(edge(1, 4096));
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
pub(crate) fn a_stage_that_panics_costs_its_slot_and_nothing_else<M: Mover>() {
    the_fakes!();
    let mut ends = ends::<M>(edge(2, 4096));
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

/// The driver takes the work and refuses the event behind it.
pub(crate) fn a_slot_whose_event_was_refused_is_not_sent<M: Mover>() {
    let fakes = the_fakes!();
    let mut ends = ends::<M>(edge(2, 64));
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

pub(crate) fn what_was_sent_is_sent_again_to_another_generation<M: Mover>() {
    let mut old = ends::<M>(edge(3, BYTES));
    let sent: Vec<_> = (0..3).map(|_| old[0].send(BYTES)).collect();
    // One of them was being received.
    let (_, arriving) = old[1].hear_one();
    drop(arriving.abort());
    abort(old);
    let mut new = ends::<M>(edge(3, BYTES));
    let again: Vec<_> = sent
        .iter()
        .map(|old| send_again(&mut new[0], old))
        .collect();
    // While the copies may still be under way.
    sent.into_iter().for_each(|sent| drop(sent.abort()));
    receive_all(&mut new, 3);
    drop(again);
}

/// The slot is leased again while the copy waits for its turn.
pub(crate) fn a_slot_that_is_copied_from_is_not_written_before_the_copy_is_done<M: Mover>() {
    the_fakes!();
    let mut ends = ends::<M>(edge(2, BYTES));
    let sent = ends[0].send(BYTES);
    receive_all(&mut ends, 1);
    until(|| sent.is_done().unwrap());
    let mut lease = ends[0].lease();
    let (writer, kernels) = (stream(0), on_device(0));
    write_slowly(&mut lease, &writer, &kernels, 200_000);
    sent.copy_into(&[whole(BYTES as u64)], &mut lease).unwrap();
    upload(0, &mut wait_for(sent), 0, &[0xFF; BYTES]);
    let flight = ends[0].try_send(BYTES, lease).unwrap();
    let (_, arriving) = ends[1].hear_one();
    assert!(download(1, &wait_for(arriving)) == payload(0, 0, BYTES));
    drop(flight);
}

pub(crate) fn parts_go_where_they_belong_and_not_beyond<M: Mover>() {
    let mut old = ends::<M>(edge(1, BYTES));
    let sent = old[0].send(BYTES);
    abort(old);
    let mut new = ends::<M>(edge(1, BYTES));
    let mut lease = new[0].lease();
    let half = BYTES as u64 / 2;
    let swapped = [(0, half), (half, 0)].map(|(from, to)| Part {
        from,
        to,
        bytes: half,
    });
    let beyond = Part {
        from: 1,
        ..whole(BYTES as u64)
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
pub(crate) fn fifty_generations_leave_no_memory_behind<M: Mover>() {
    let fakes = the_fakes!();
    fakes.set("NCCL_ABORT_MS", "1");
    let kernels = [0, 1].map(on_device);
    let streams = [stream(0), stream(1)];
    let mut kept: Option<InFlight<Sending>> = None;
    let mut before = None;
    for generation in 0..53 {
        let mut ends = ends::<M>(edge(3, BYTES));
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
            before = Some(free());
        }
    }
    fakes.set("NCCL_ABORT_MS", "");
    assert_free(before.unwrap());
}
