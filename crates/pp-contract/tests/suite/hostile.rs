//! What a peer, or the wire, may do to the bytes: every one is refused, by name, without a panic.

use pp_contract::*;

use crate::support::*;

#[test]
fn every_flip_of_one_bit_is_refused() {
    for (name, _, frame) in first_frames() {
        assert!(admit(&frame).is_ok(), "{name} is right as it is");
        for bit in 0..frame.len() * 8 {
            let mut flipped = frame.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(admit(&flipped).is_err(), "{name} with bit {bit} flipped");
        }
    }
}

#[test]
fn every_truncation_is_refused() {
    for (_, _, frame) in first_frames() {
        for len in 0..frame.len() {
            let error = admit(&frame[..len]).unwrap_err();
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
    for (_, _, frame) in first_frames() {
        let longer = [&frame[..], &[0]].concat();
        let error = admit(&longer).unwrap_err();
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
    for (name, maker, frame) in first_frames() {
        let grown = grow(&frame);
        if frame.len() == HEADER_BYTES {
            // There is no value that a body could follow.
            let error = admit(&grown).unwrap_err();
            let expected = matches!(error, LockstepError::Header(HeaderError::Body { .. }));
            assert!(expected, "{error}");
        } else {
            let error = decode(&grown, maker).unwrap_err();
            let expected = matches!(error, BodyError::Trailing { extra: 1, .. });
            assert!(expected, "{name}: {error}");
        }
    }
}

#[test]
fn body_length_that_lies_is_refused_before_the_body_is_looked_at() {
    let frame = &first_frame("message");
    for lie in [0, 1, 120, 122, MAX_BODY_BYTES as u32] {
        let forged = forge(frame, |frame| {
            frame[48..52].copy_from_slice(&lie.to_le_bytes())
        });
        let error = admit(&forged).unwrap_err();
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
    let frame = first_frame("message");
    // Number of tensors, length of the first name, number of its dimensions, and from the end those of the trail and the
    // note, and the flag.
    let (end, body) = (frame.len(), HEADER_BYTES);
    for at in [body + 31, body + 32, body + 44, end - 3, end - 2, end - 1] {
        for lie in 0..=255 {
            if lie == frame[at] {
                continue;
            }
            let forged = forge(&frame, |frame| frame[at] = lie);
            assert!(decode(&forged, 0).is_err(), "byte {at} is {lie}");
        }
    }
}

#[test]
fn another_magic_is_named() {
    let forged = forge(&first_frame("noop"), |frame| {
        frame[..4].copy_from_slice(b"GET ")
    });
    assert_header_error(&forged, HeaderError::Magic { got: *b"GET " });
}

#[test]
fn another_version_is_named_whatever_its_checksum() {
    let mut frame = first_frame("noop");
    frame[4] = 9;
    assert_header_error(&frame, HeaderError::Version { theirs: 9 });
    let message = HeaderError::Version { theirs: 9 }.to_string();
    assert_eq!(
        message,
        "wire version 9 is not 8; run the same build on every rank"
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
    let noop = first_frame("noop");
    assert_header_error(&forge(&noop, |frame| frame[6] = 3), unknown("Action", 3));
    let reserved = forge(&noop, |frame| frame[7] = 1);
    assert_header_error(&reserved, HeaderError::Reserved { got: 1 });
}

#[test]
fn only_the_combinations_that_make_sense_are_admitted() {
    for (name, _, frame) in first_frames() {
        for action in 0..4 {
            let forged = forge(&frame, |frame| frame[6] = action);
            let header = Header::decode(forged.first_chunk().unwrap());
            let has_body = frame.len() > HEADER_BYTES;
            let expected = if has_body {
                action == 1
            } else {
                [0, 2].contains(&action)
            };
            assert_eq!(header.is_ok(), expected, "{name} as {action}");
        }
    }
}

#[test]
fn payload_sizes_that_make_no_sense_are_refused() {
    let set_payload = |frame: &mut Vec<u8>, bytes: u64| {
        frame[40..48].copy_from_slice(&bytes.to_le_bytes());
    };
    let infer = first_frame("message");
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

    let forged = forge(&first_frame("noop"), |frame| {
        set_payload(frame, 1);
        frame[32..40].fill(0);
    });
    let action = Action::Noop;
    assert_header_error(&forged, HeaderError::PayloadNotAllowed { action, bytes: 1 });
}

#[test]
fn bad_checksums_are_told_apart() {
    let good = first_frame("message");
    let mut header_hit = good.clone();
    header_hit[8] ^= 1;
    let error = admit(&header_hit).unwrap_err();
    assert!(
        matches!(error, LockstepError::Header(HeaderError::Checksum { .. })),
        "{error}"
    );

    let mut body_hit = good;
    body_hit[HEADER_BYTES] ^= 1;
    let error = admit(&body_hit).unwrap_err();
    assert!(
        matches!(error, LockstepError::BodyChecksum { .. }),
        "{error}"
    );
}

fn assert_header_error(frame: &[u8], expected: HeaderError) {
    let error = admit(frame).unwrap_err();
    assert_eq!(error, LockstepError::Header(expected));
}
