//! What a peer, or the wire, may do to the bytes: every one is refused, by name, without a panic.

mod support;

use pp_contract::*;
use support::*;

#[test]
fn every_flip_of_one_bit_is_refused() {
    for (name, frame) in first_frames() {
        assert!(
            Receiver::of(name).admit(&frame).is_ok(),
            "{name} is right as it is"
        );
        for bit in 0..frame.len() * 8 {
            let mut flipped = frame.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let admitted = Receiver::of(name).admit(&flipped);
            assert!(admitted.is_err(), "{name} with bit {bit} flipped");
        }
    }
}

#[test]
fn every_truncation_is_refused() {
    for (name, frame) in first_frames() {
        for len in 0..frame.len() {
            let error = Receiver::of(name).admit(&frame[..len]).unwrap_err();
            assert!(
                matches!(error, LockstepError::Length { got, .. } if got == len),
                "{error}"
            );
        }
    }
    let hello = hello(1).encode().unwrap();
    for len in 0..hello.len() {
        let error = Hello::decode(&hello[..len]).unwrap_err();
        assert!(
            matches!(error, HandshakeError::Length { got, .. } if got == len),
            "{error}"
        );
    }
    let fault = fault().encode().unwrap();
    for len in 0..fault.len() {
        assert!(Fault::decode(&fault[..len]).is_err());
    }
}

#[test]
fn bytes_after_a_frame_are_refused() {
    for (name, frame) in first_frames() {
        let longer = [&frame[..], &[0]].concat();
        let error = Receiver::of(name).admit(&longer).unwrap_err();
        let (expected, got) = (frame.len(), frame.len() + 1);
        assert_eq!(error, LockstepError::Length { expected, got });
    }
    let hello = [&hello(1).encode().unwrap()[..], &[0]].concat();
    assert!(matches!(
        Hello::decode(&hello),
        Err(HandshakeError::Length { .. })
    ));
    let fault = [&fault().encode().unwrap()[..], &[0]].concat();
    assert!(matches!(
        Fault::decode(&fault),
        Err(BodyError::Trailing { extra: 1, .. })
    ));
}

#[test]
fn bytes_after_the_value_in_a_body_are_refused() {
    let grow = |frame: &[u8]| {
        forge(frame, |frame| {
            frame.push(0);
            let len = (frame.len() - HEADER_BYTES) as u32;
            frame[48..52].copy_from_slice(&len.to_le_bytes());
        })
    };
    for (name, frame) in first_frames() {
        let grown = grow(&frame);
        let mut receiver = Receiver::of(name);
        let error = match name {
            "envelope" => receiver
                .admit(&grown)
                .unwrap()
                .envelope::<VideoPlan>()
                .unwrap_err(),
            "result" => receiver.admit(&grown).unwrap().outcome().unwrap_err(),
            "failure" => receiver.admit(&grown).unwrap().failure().unwrap_err(),
            // There is no value that a body could follow.
            _ => {
                let error = receiver.admit(&grown).unwrap_err();
                let expected = matches!(error, LockstepError::Header(HeaderError::Body { .. }));
                assert!(expected, "{error}");
                continue;
            }
        };
        assert!(
            matches!(error, BodyError::Trailing { extra: 1, .. }),
            "{name}: {error}"
        );
    }
}

#[test]
fn body_length_that_lies_is_refused_before_the_body_is_looked_at() {
    let frame = &frame("envelope");
    for lie in [0, 1, 128, 130, MAX_BODY_BYTES as u32] {
        let forged = forge(frame, |frame| {
            frame[48..52].copy_from_slice(&lie.to_le_bytes())
        });
        let error = Lockstep::requests().admit(&forged).unwrap_err();
        let named = matches!(
            error,
            LockstepError::Length { .. }
                | LockstepError::Header(HeaderError::Body { bytes: 0, .. })
        );
        assert!(named, "{lie}: {error}");
    }
    for lie in [MAX_BODY_BYTES as u32 + 1, u32::MAX] {
        let forged = forge(frame, |frame| {
            frame[48..52].copy_from_slice(&lie.to_le_bytes())
        });
        assert_header_error(&forged, HeaderError::BodyTooLarge { bytes: lie });
    }
}

#[test]
fn lengths_inside_a_body_that_lie_are_refused() {
    let frame = frame("envelope");
    // Number of tensors, length of the first name, number of its dimensions.
    for at in [22, 23, 35].map(|at| HEADER_BYTES + at) {
        for lie in 0..=255 {
            if lie == frame[at] {
                continue;
            }
            let forged = forge(&frame, |frame| frame[at] = lie);
            let mut lockstep = Lockstep::requests();
            let matched = lockstep.admit(&forged).unwrap();
            assert!(
                matched.envelope::<VideoPlan>().is_err(),
                "byte {at} is {lie}"
            );
        }
    }
}

#[test]
fn another_magic_is_named() {
    let forged = forge(&frame("noop"), |frame| frame[..4].copy_from_slice(b"GET "));
    assert_header_error(&forged, HeaderError::Magic { got: *b"GET " });
}

#[test]
fn another_version_is_named_whatever_its_checksum() {
    let mut frame = frame("noop");
    frame[4] = 9;
    assert_header_error(&frame, HeaderError::Version { theirs: 9 });
    let message = HeaderError::Version { theirs: 9 }.to_string();
    assert_eq!(
        message,
        "wire version 9 is not 2; run the same build on every rank"
    );

    let mut hello = hello(0).encode().unwrap();
    hello[4..6].copy_from_slice(&0x0300_u16.to_le_bytes());
    assert_eq!(
        Hello::decode(&hello),
        Err(HandshakeError::Version { theirs: 0x300 })
    );
}

#[test]
fn header_with_unknown_codes_or_reserved_bits_is_refused() {
    let unknown = |what, code| HeaderError::Code(UnknownCode { what, code });
    let noop = frame("noop");
    assert_header_error(&forge(&noop, |frame| frame[6] = 4), unknown("Action", 4));
    assert_header_error(&forge(&noop, |frame| frame[7] = 4), unknown("BodyKind", 4));
    let reserved = forge(&noop, |frame| frame[59] = 1);
    assert_header_error(&reserved, HeaderError::Reserved { got: 1 << 24 });
}

#[test]
fn only_the_combinations_that_make_sense_are_admitted() {
    let sensible = [(0, 0), (1, 1), (1, 2), (2, 0), (3, 3)];
    for (name, frame) in first_frames() {
        for (action, kind) in (0..4).flat_map(|action| (0..4).map(move |kind| (action, kind))) {
            let forged = forge(&frame, |frame| (frame[6], frame[7]) = (action, kind));
            let header = Header::decode(forged.first_chunk().unwrap());
            let has_body = frame.len() > HEADER_BYTES;
            let has_payload = frame[32] != 0xff;
            let expected = sensible.contains(&(action, kind))
                && has_body == (kind != 0)
                && (!has_payload || action == 1);
            assert_eq!(header.is_ok(), expected, "{name} as {action} with {kind}");
        }
    }
}

#[test]
fn payload_sizes_that_make_no_sense_are_refused() {
    let set_payload = |frame: &mut Vec<u8>, bytes: u64| {
        frame[40..48].copy_from_slice(&bytes.to_le_bytes());
    };
    let infer = frame("envelope");
    let over = MAX_PAYLOAD_BYTES + 1;
    let forged = forge(&infer, |frame| set_payload(frame, over));
    assert_header_error(&forged, HeaderError::PayloadTooLarge { bytes: over });

    let forged = forge(&infer, |frame| set_payload(frame, 0));
    let error = HeaderError::EdgeSeq {
        bytes: 0,
        edge_seq: 0,
    };
    assert_header_error(&forged, error);

    let forged = forge(&infer, |frame| frame[32..40].fill(0xff));
    let (bytes, edge_seq) = (3_041_536, u64::MAX);
    assert_header_error(&forged, HeaderError::EdgeSeq { bytes, edge_seq });

    let forged = forge(&frame("noop"), |frame| {
        set_payload(frame, 1);
        frame[32..40].fill(0);
    });
    let action = Action::Noop;
    assert_header_error(&forged, HeaderError::PayloadNotAllowed { action, bytes: 1 });
}

#[test]
fn bad_checksums_are_told_apart() {
    let good = frame("envelope");
    let mut header_hit = good.clone();
    header_hit[8] ^= 1;
    let error = Lockstep::requests().admit(&header_hit).unwrap_err();
    assert!(
        matches!(error, LockstepError::Header(HeaderError::Checksum { .. })),
        "{error}"
    );

    let mut body_hit = good;
    body_hit[HEADER_BYTES] ^= 1;
    let error = Lockstep::requests().admit(&body_hit).unwrap_err();
    assert!(
        matches!(error, LockstepError::BodyChecksum { .. }),
        "{error}"
    );
}

fn frame(wanted: &str) -> Vec<u8> {
    let mut frames = first_frames().into_iter();
    frames
        .find(|(name, _)| *name == wanted)
        .expect("a kind of frame")
        .1
}

fn assert_header_error(frame: &[u8], expected: HeaderError) {
    let error = Lockstep::requests().admit(frame).unwrap_err();
    assert_eq!(error, LockstepError::Header(expected));
}
