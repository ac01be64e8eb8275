//! What was sent can be sent again, to the peer of another generation.

use pp_contract::{Composer, Lockstep, Rank};
use pp_testing::{edge, prepare};
use pp_transport::bell::Bell;
use pp_transport::edge::{EdgeRx as _, EdgeTx as _};
use pp_transport::error::TransportError;
use pp_transport::host::{Host, HostRx, HostTx, Sending};
use pp_transport::in_flight::{InFlight, Part, Resend as _};

use crate::two_way::whole;

const BYTES: usize = 1000;

fn pair() -> (HostTx, HostRx) {
    pair_of(BYTES)
}

fn pair_of(bytes: usize) -> (HostTx, HostRx) {
    let bell = Bell::new().unwrap();
    let rank = |rank| (Rank::new(rank), &bell);
    Host::pair(edge(2, bytes as u64), rank(0), rank(1)).unwrap()
}

/// Byte `i` of a payload.
fn byte(i: usize) -> u8 {
    (i ^ (i >> 8) ^ (i >> 16)) as u8
}

fn send(edge: &mut HostTx) -> InFlight<Sending> {
    let mut lease = edge.try_lease().unwrap().unwrap();
    let bytes = lease.capacity();
    for (i, to) in lease.bytes_mut().iter_mut().enumerate() {
        *to = byte(i);
    }
    let mut composer = Composer::new();
    let (message, stamp) = prepare(&mut composer, 0, bytes);
    let sent = edge.send(message, stamp, Some(lease)).unwrap();
    sent.payload.unwrap()
}

#[test]
fn a_payload_outlives_both_ends_of_its_generation() {
    let (mut front, back) = pair();
    let sent = send(&mut front);
    drop((front, back));
    let (mut front, _back) = pair();
    let mut slot = front.try_lease().unwrap().unwrap();
    slot.bytes_mut().fill(0xFF);
    let parts = [
        Part {
            from: 0,
            to: 500,
            bytes: 400,
        },
        Part {
            from: 900,
            to: 0,
            bytes: 100,
        },
    ];
    sent.copy_into(&parts, &mut slot).unwrap();
    let bytes = slot.bytes_mut();
    assert!((0..400).all(|i| bytes[500 + i] == byte(i)));
    assert!((0..100).all(|i| bytes[i] == byte(900 + i)));
    assert!(bytes[100..500].iter().all(|byte| *byte == 0xFF));
    assert!(bytes[900..].iter().all(|byte| *byte == 0xFF));
}

/// More than one thread copies it.
#[test]
fn a_large_payload_is_sent_again_whole() {
    const LARGE: usize = 10 << 20;
    let (mut front, _back) = pair_of(LARGE);
    let sent = send(&mut front);
    let mut slot = front.try_lease().unwrap().unwrap();
    slot.bytes_mut().fill(0xFF);
    let (from, to, len) = (300, 7, LARGE - 1000);
    let [from_u64, to_u64, bytes] = [from, to, len].map(|place| place as u64);
    let part = Part {
        from: from_u64,
        to: to_u64,
        bytes,
    };
    sent.copy_into(&[part], &mut slot).unwrap();
    let bytes = slot.bytes_mut();
    assert!((0..len).all(|i| bytes[to + i] == byte(from + i)));
    let (before, behind) = (&bytes[..to], &bytes[to + len..]);
    assert!(before.iter().chain(behind).all(|byte| *byte == 0xFF));
}

#[test]
fn a_payload_in_flight_keeps_its_slot_though_the_peer_gave_it_back() {
    let (mut front, mut back) = pair();
    let sent = send(&mut front);
    let mut inbox = Vec::new();
    assert!(back.poll_frame(&mut inbox).unwrap());
    let mut lockstep = Lockstep::new();
    let receive = back.receive(&lockstep.admit(&inbox).unwrap()).unwrap();
    // Dropping the receive gives the credit back.
    drop(receive);
    assert!(sent.is_done().unwrap());
    let leases: Vec<_> = std::iter::from_fn(|| front.try_lease().unwrap()).collect();
    assert_eq!(leases.len(), 1, "a kept slot was leased");
    drop((leases, sent));
    let leases: Vec<_> = std::iter::from_fn(|| front.try_lease().unwrap()).collect();
    assert_eq!(leases.len(), 2);
}

#[test]
fn a_payload_that_could_not_be_sent_is_held_like_one_that_was() {
    let (mut front, back) = pair();
    let mut lease = front.try_lease().unwrap().unwrap();
    lease.bytes_mut().fill(9);
    let unsent = InFlight::new(Sending::unsent(lease));
    drop((front, back));
    let (mut front, _back) = pair();
    let mut slot = front.try_lease().unwrap().unwrap();
    unsent.copy_into(&[whole(BYTES as u64)], &mut slot).unwrap();
    assert!(slot.bytes_mut().iter().all(|byte| *byte == 9));
    assert!(!unsent.is_done().unwrap());
}

#[test]
fn a_part_beyond_the_slot_is_refused_and_nothing_is_copied_for_it() {
    let (mut front, _back) = pair();
    let sent = send(&mut front);
    let mut slot = front.try_lease().unwrap().unwrap();
    slot.bytes_mut().fill(7);
    let beyond = Part {
        from: 1,
        ..whole(BYTES as u64)
    };
    let error = sent.copy_into(&[beyond], &mut slot).unwrap_err();
    assert!(
        matches!(error, TransportError::PayloadMismatch { .. }),
        "{error}"
    );
    assert!(slot.bytes_mut().iter().all(|byte| *byte == 7));
}
