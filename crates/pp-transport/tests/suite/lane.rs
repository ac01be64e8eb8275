//! The lane between ranks of different hosts: what an authenticated peer may still get wrong.

use pp_contract::Rank;
use pp_testing::edge;
use pp_transport::backend::EdgeEnd;
use pp_transport::bell::Bell;
use pp_transport::control::ControlReceiver;
use pp_transport::error::TransportError;
use pp_transport::host::MAX_SLOTS;
use pp_transport::lane::{self, Inlet, LaneEnd};
use pp_transport::launch::Via;

const FRAME: u8 = 1;
const CREDIT: u8 = 2;
/// The edge from this rank to its peer, that back, and one between two others.
const OUT: u32 = 7;
const IN: u32 = 3;
const ELSEWHERE: u32 = 5;

fn ends(out: u32, incoming: u32) -> [EdgeEnd; 2] {
    [(IN, incoming, false), (OUT, out, true)].map(|(number, depth, is_sender)| EdgeEnd {
        edge: number,
        shape: edge(depth, 64),
        is_sender,
    })
}

/// Lanes with two slots each way, their inlet, the bell, and the other end of their channel.
fn lanes() -> (Vec<LaneEnd>, Inlet, Bell, ControlReceiver) {
    let (zero, one) = crate::control_support::pair(Via::Tcp);
    let (sender, _) = zero.split();
    let (_, receiver) = one.split();
    let bell = Bell::new().unwrap();
    let (lanes, inlet) = lane::over_channel(sender, bell.clone(), &ends(2, 2)).unwrap();
    (lanes, inlet, bell, receiver)
}

/// A message for the edge on which it may come.
fn message(tag: u8, slot: u32, rest: &[u8]) -> Vec<u8> {
    of_edge(if tag == CREDIT { OUT } else { IN }, tag, slot, rest)
}

fn of_edge(edge: u32, tag: u8, slot: u32, rest: &[u8]) -> Vec<u8> {
    [&[tag][..], &edge.to_le_bytes(), &slot.to_le_bytes(), rest].concat()
}

#[track_caller]
fn assert_refused(inlet: &Inlet, body: &[u8], why: &str) {
    let error = inlet.deliver(body).unwrap_err();
    assert!(
        matches!(error, TransportError::PeerMisbehaved { .. }),
        "{error}"
    );
    let text = error.to_string();
    assert!(text.contains("rank 1") && text.contains(why), "{text}");
}

#[test]
fn messages_that_cannot_be_are_refused() {
    let (_lanes, inlet, _, _other) = lanes();
    assert_refused(&inlet, &[], "0 bytes");
    assert_refused(&inlet, &[FRAME, 0, 0], "3 bytes");
    assert_refused(&inlet, &message(9, 0, &[]), "tag 9");
    assert_refused(&inlet, &of_edge(OUT, 9, 0, &[]), "tag 9");
    for tag in [FRAME, CREDIT] {
        assert_refused(
            &inlet,
            &of_edge(ELSEWHERE, tag, 0, &[]),
            "edge 5, which is not between",
        );
    }
    assert_refused(
        &inlet,
        &of_edge(OUT, FRAME, 0, &[7]),
        "a frame on edge 7, on which it receives",
    );
    assert_refused(
        &inlet,
        &of_edge(IN, CREDIT, 0, &[]),
        "a credit on edge 3, on which it sends",
    );
    assert_refused(&inlet, &message(CREDIT, 0, &[1]), "more behind it");
    assert_refused(
        &inlet,
        &message(CREDIT, 2, &[]),
        "slot 2, which does not exist",
    );
    assert_refused(
        &inlet,
        &message(CREDIT, 1, &[]),
        "slot 1, which it does not have",
    );
    assert_refused(
        &inlet,
        &message(FRAME, 2, &[7]),
        "slot 2, which does not exist",
    );
    inlet.deliver(&message(FRAME, 1, &[7])).unwrap();
    assert_refused(&inlet, &message(FRAME, 1, &[7]), "slot 1 handed over twice");
    let large = vec![0; pp_contract::MAX_FRAME_BYTES + 1];
    assert_refused(&inlet, &message(FRAME, 0, &large), "are allowed");
}

#[test]
fn frames_without_end_are_refused() {
    let (_lanes, inlet, ..) = lanes();
    let frame = message(FRAME, u32::MAX, &[1; 64]);
    let taken = (0..10_000).take_while(|_| inlet.deliver(&frame).is_ok());
    assert_eq!(taken.count(), 512);
    assert_refused(&inlet, &frame, "512 frames wait");
}

#[test]
fn a_frame_rings_and_a_lane_that_is_gone_takes_no_harm() {
    let (lanes, inlet, bell, _other) = lanes();
    let ear = bell.listen();
    inlet.deliver(&message(FRAME, u32::MAX, &[1])).unwrap();
    assert!(ear.was_rung());
    drop(lanes);
    inlet.clone().deliver(&message(FRAME, 0, &[1])).unwrap();
}

#[test]
fn depths_that_cannot_be_are_refused() {
    let (zero, _one) = crate::control_support::pair(Via::Tcp);
    for (out, incoming) in [(0, 1), (1, 0), (MAX_SLOTS + 1, 1), (1, u32::MAX)] {
        let bell = Bell::new().unwrap();
        let ends = ends(out, incoming);
        let error = lane::over_channel(zero.sender().clone(), bell, &ends).unwrap_err();
        assert!(matches!(error, TransportError::BadShape { .. }), "{error}");
    }
    let bell = Bell::new().unwrap();
    let rank = |rank| (Rank::new(rank), &bell);
    assert!(lane::pair(edge(0, 64), rank(0), rank(1)).is_err());
}
