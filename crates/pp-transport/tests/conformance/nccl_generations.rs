//! A process that lives on after a connection over NCCL failed or was given up.

use std::time::{Duration, Instant};

use pp_testing::{HANG, until};
use pp_transport::error::TransportError;
use pp_transport::gpu::Sending;
use pp_transport::in_flight::{InFlight, Resend as _};
use pp_transport::nccl::is_at_rest;

use crate::devices::{Gate, assert_free, free, the_fakes, with};
use crate::gpu_link::{
    BYTES, abort, connect, edge, ends, meet, on_one_host, receive_all, send_again, stream, talk,
};
use crate::nccl_link::{Nccl, connect_alone, join, set_blocking};

/// A send that failed after its header left: the peer is gone, and the payload is not.
#[test]
fn what_could_not_be_sent_is_sent_to_the_next_generation() {
    let fakes = the_fakes!();
    let mut old = ends::<Nccl>(edge(3, BYTES));
    fakes.set("FAULTS", "ncclSend:1:6,nothing:4:skip");
    let mut unsent = old[0].fail_to_send(BYTES);
    fakes.set("FAULTS", "");
    // NCCL may have taken it all the same, and read it yet.
    let written = unsent.write_on(&stream(0), |_| Ok::<_, TransportError>(()));
    let error = written.unwrap_err().to_string();
    assert!(error.contains("out of use"), "{error}");
    let unsent = InFlight::new(Sending::unsent(unsent));
    abort(old);
    let mut new = ends::<Nccl>(edge(3, BYTES));
    let again = send_again(&mut new[0], &unsent);
    drop(unsent.abort());
    receive_all(&mut new, 1);
    drop(again);
}

/// A process that has nothing more to do with NCCL ends as any other: also after a connection that
/// was refused before anything was made for it. Of the whole process, so in one of its own.
#[test]
fn a_connection_that_never_began_leaves_the_process_at_rest() {
    if !pp_testing::alone!() {
        return;
    }
    assert!(is_at_rest());
    let mut ends = ends::<Nccl>(edge(1, 64));
    assert!(!is_at_rest());
    talk(&mut ends, 64, 1);
    let error = with(|held| {
        let [backend, _] = &mut held.nccl;
        let connecting = || join(backend, &[0, 1], HANG).map(drop).unwrap_err();
        std::thread::scope(|scope| scope.spawn(connecting).join().unwrap())
    });
    assert!(
        matches!(error, TransportError::WrongThread { .. }),
        "{error}"
    );
    assert!(!is_at_rest());
    drop(ends);
    until(is_at_rest);
}

/// The peer never comes, and somebody says so before the deadline: the thread that waits inside NCCL
/// ends, and the next generation connects.
#[test]
fn a_connection_that_is_not_wanted_any_more_is_given_up_at_once() {
    the_fakes!();
    drop(ends::<Nccl>(edge(1, 64)));
    let before = free();
    set_blocking(false);
    for _ in 0..3 {
        let started = Instant::now();
        let is_wanted = || started.elapsed() < Duration::from_millis(100);
        let error = connect_alone(HANG, &is_wanted).map(drop).unwrap_err();
        assert!(matches!(error, TransportError::NotInTime { .. }), "{error}");
        assert!(started.elapsed() < HANG / 2);
    }
    drop(ends::<Nccl>(edge(1, 64)));
    assert_free(before);
}

/// The peer never posts its first receive, so both threads that connect hang inside NCCL, also where NCCL lets its caller
/// wait. They are freed, with all that they made, and the next generation connects.
#[test]
fn a_first_operation_that_hangs_is_given_up_and_the_next_generation_connects() {
    let fakes = the_fakes!();
    drop(ends::<Nccl>(edge(1, 64)));
    let (before, was_at_rest) = (free(), is_at_rest());
    for blocking in [false, true] {
        set_blocking(blocking);
        let met = meet::<Nccl>(&mut on_one_host(), edge(1, 64), edge(1, 64));
        let sends = Gate::open(fakes);
        let plan = "ncclSend:1:wait,ncclSend:2:wait,ncclRecv:1:skip";
        fakes.set("FAULTS", &format!("{plan},{blocking}:1:skip"));
        let errors = connect::<Nccl>(met, HANG, &|| !sends.was_reached_by(2));
        fakes.set("FAULTS", "");
        for error in errors {
            let text = error.map(drop).unwrap_err().to_string();
            assert!(text.contains("connect the edges"), "{text}");
        }
        drop(ends::<Nccl>(edge(1, 64)));
    }
    assert_free(before);
    if was_at_rest {
        until(is_at_rest);
    }
}
