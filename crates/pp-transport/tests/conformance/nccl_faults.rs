//! What is left in order when the driver refuses, a stage panics, or a transfer is given up.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use pp_transport::cuda::{Device, Event, Stream};
use pp_transport::error::TransportError;
use pp_transport::link::Link;

use crate::devices::{HANG, fakes, pair, settled_free, wait};
use crate::nccl_link::{both_ways, ends, on_device, talk, wait_for};

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
    let start = Instant::now();
    while start.elapsed() < A_WHILE {
        ends[1].hear();
        assert!(!flight.is_done().unwrap(), "given back while it is read");
    }
    assert!(!passed.is_done().unwrap(), "the reader was too fast");
    wait(|| passed.is_done().unwrap());
    let deadline = Instant::now() + HANG;
    while !flight.is_done().unwrap() {
        ends[1].link.try_lease().unwrap();
        assert!(Instant::now() < deadline);
    }
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

/// The device says of a transfer that an abort cut short that it is done; its memory stays.
#[test]
fn the_memory_of_a_transfer_that_was_given_up_is_never_freed() {
    let Some(_) = fakes() else {
        return;
    };
    const BYTES: u64 = 4096;
    drop(pair(both_ways(1, 64)));
    let devices = [0, 1].map(|on| Device::open(on).unwrap());
    let before = devices.each_ref().map(settled_free);
    let mut ends = ends(pair(both_ways(1, BYTES as usize)));
    let mut lease = ends[0].lease();
    let (writer, kernels) = (stream(0), on_device(0));
    let written = lease.write_on(&writer, |_| -> Result<(), TransportError> {
        kernels.spin(writer.raw(), 300_000);
        Ok(())
    });
    written.unwrap();
    let sending = ends[0].try_send(BYTES as usize, lease).unwrap();
    let (_, receiving) = ends[1].hear_one();
    for end in &ends {
        let handle = end.link.abort_handle();
        handle.abort("the test", Instant::now() + HANG).unwrap();
    }
    wait(|| writer.is_idle().unwrap());
    // Long enough for the streams of the link, too, to run empty.
    std::thread::sleep(A_WHILE);
    drop((sending.abort(), receiving.abort()));
    drop(ends);
    let after = devices.each_ref().map(settled_free);
    assert_eq!(after, before.map(|free| free - BYTES));
}
