//! What only the copy engine does: payloads that move before their message, and credits that a stream writes.

use pp_contract::{Composer, Lockstep};
use pp_testing::{prepare, until, until_some, wait_for};
use pp_transport::error::TransportError;
use pp_transport::gpu_backend::GpuBackend;

use crate::devices::{Gate, Held, the_fakes};
use crate::gpu_link::{Mover, edge, ends, on_device, read_slowly, stream, talk};
use crate::suite::Backend as _;

struct P2p;

impl Mover for P2p {
    type Edges = GpuBackend;

    fn backends(held: &mut Held) -> &mut [GpuBackend; 2] {
        &mut held.p2p
    }
}

crate::gpu_suite::conformance_on_gpus!(P2p);

/// A credit that waits for its reader has not left.
#[test]
fn a_link_that_ends_before_its_credits_have_left_is_given_up() {
    let fakes = the_fakes!();
    let mut ends = ends::<P2p>(edge(1, 64));
    let done = ends[1].send(64);
    drop(wait_for(ends[0].hear_one().1));
    until(|| done.is_done().unwrap());
    let (gate, reader, kernels) = (Gate::closed(fakes), stream(1), on_device(1));
    let flight = ends[0].send(64);
    let payload = wait_for(ends[1].hear_one().1);
    read_slowly(&payload, &reader, &kernels, u64::MAX);
    drop(payload);
    let [first, second] = ends;
    drop(second);
    assert!(done.is_done().is_err(), "it did not wait for its credit");
    drop(gate);
    // The credit leaves all the same, and is true.
    until(|| flight.is_done().unwrap());
    drop(first);
}

#[test]
fn nothing_is_sent_ahead_once_the_memory_of_the_peer_is_gone() {
    let fakes = the_fakes!();
    let mut ends = ends::<P2p>(edge(1, 64));
    let mut lease = ends[0].lease();
    drop(ends);
    fakes.set("FAULTS", "cuMemcpyDtoDAsync:1:999,nothing:7:skip");
    let ahead = lease.send_ahead(64);
    fakes.set("FAULTS", "");
    ahead.unwrap();
}

/// The driver takes the copy and refuses the number behind it.
#[test]
fn a_slot_whose_number_was_refused_is_sent_no_more() {
    let fakes = the_fakes!();
    let mut ends = ends::<P2p>(edge(2, 64));
    talk(&mut ends, 64, 2);
    fakes.set("FAULTS", "cuStreamWriteValue32:1:999,nothing:6:skip");
    let mut unsent = ends[0].fail_to_send(64);
    fakes.set("FAULTS", "");
    let written = unsent.write_on(&stream(0), |_| Ok::<_, TransportError>(()));
    let error = written.unwrap_err().to_string();
    assert!(error.contains("out of use"), "{error}");
    let other = ends[0].lease();
    drop(unsent);
    let leased = ends[0].link.try_lease().unwrap();
    assert!(leased.is_none(), "a slot that may move is leased");
    drop(other);
}

#[test]
fn a_slot_that_was_sent_ahead_is_sent_as_it_was() {
    const BYTES: usize = 64;
    let (mut sender, mut receiver) = P2p::pair(2, BYTES as u64);
    let (mut composer, mut lockstep, mut inbox) = (Composer::new(), Lockstep::new(), Vec::new());
    let stream = stream(0);
    for n in 0..3 {
        let mut lease = until_some("a slot", || sender.try_lease().unwrap());
        P2p::write(&mut lease, 0, &[n as u8; BYTES]);
        lease.send_ahead(BYTES + 1).unwrap_err();
        lease.send_ahead(BYTES).unwrap();
        assert!(matches!(
            lease.send_ahead(BYTES),
            Err(TransportError::SentAhead)
        ));
        let written = lease.write_on(&stream, |_| Ok::<_, TransportError>(()));
        assert!(matches!(written, Err(TransportError::SentAhead)));
        let (message, stamp) = prepare(&mut composer, n, BYTES / 2);
        let refused = sender.send(message, stamp, Some(lease)).unwrap_err();
        let text = refused.error.to_string();
        assert!(text.contains("of which 64 bytes were sent ahead"), "{text}");
        let (message, stamp) = prepare(&mut composer, n, BYTES);
        drop(sender.send(message, stamp, refused.buffer).unwrap());
        until(|| receiver.poll_frame(&mut inbox).unwrap());
        let matched = lockstep.admit(&inbox).unwrap();
        let payload = wait_for(receiver.receive(&matched).unwrap());
        assert_eq!(P2p::read(&payload), [n as u8; BYTES]);
    }
    let mut leases = [(); 2].map(|()| until_some("a slot", || sender.try_lease().unwrap()));
    leases[0].send_ahead(BYTES).unwrap();
    let [ahead, mut left] = leases;
    drop(ahead);
    let leased = sender.try_lease().unwrap();
    assert!(leased.is_none(), "a slot that moves is leased");
    // The send says that the edge is gone.
    drop(sender);
    left.send_ahead(BYTES).unwrap();
}
