use super::AuthError::Frame;
use super::testing::{ONE, ZERO, key, ours, session};
use super::*;

#[test]
fn sealed_messages_of_every_size_open() {
    let (mut one, mut zero) = session();
    let sizes = [
        0,
        1,
        SEGMENT_PLAIN_BYTES - KIND_BYTES,
        SEGMENT_PLAIN_BYTES,
        MAX_MESSAGE_BYTES,
    ];
    for bytes in sizes {
        let body: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
        let wire = one.sealer.seal(7, &body).to_vec();
        let (prefix, sealed) = wire.split_at(PREFIX_BYTES);
        assert_eq!(
            u32::from_le_bytes(prefix.try_into().unwrap()) as usize,
            sealed.len()
        );
        assert!((MIN_SEALED_BYTES..=MAX_SEALED_BYTES).contains(&sealed.len()));
        assert_eq!(zero.opener.open(sealed).unwrap(), (7, &body[..]));
    }
}

#[test]
fn sealed_bytes_hide_the_body() {
    let (mut one, _) = session();
    let body = [b'x'; 64];
    let wire = one.sealer.seal(7, &body);
    assert!(!wire.windows(8).any(|window| window == [b'x'; 8]));
}

#[test]
fn frame_opens_once_only() {
    let (mut one, mut zero) = session();
    let frame = one.sealer.seal(7, b"body").to_vec();
    zero.opener.open(&frame[PREFIX_BYTES..]).unwrap();
    assert_eq!(zero.opener.open(&frame[PREFIX_BYTES..]), Err(Frame));
}

#[test]
fn frame_out_of_order_does_not_open() {
    let (mut one, mut zero) = session();
    let _first = one.sealer.seal(7, b"first").to_vec();
    let second = one.sealer.seal(7, b"second").to_vec();
    assert_eq!(zero.opener.open(&second[PREFIX_BYTES..]), Err(Frame));
}

#[test]
fn altered_or_cut_frame_does_not_open() {
    let (mut one, mut zero) = session();
    let frame = one.sealer.seal(7, b"body")[PREFIX_BYTES..].to_vec();
    for index in 0..frame.len() {
        let mut altered = frame.clone();
        altered[index] ^= 1;
        assert_eq!(zero.opener.open(&altered), Err(Frame));
        assert_eq!(zero.opener.open(&frame[..index]), Err(Frame));
    }
    // A failure does not count as a frame, so the true one still opens.
    assert_eq!(zero.opener.open(&frame).unwrap(), (7, &b"body"[..]));
}

#[test]
fn frame_cut_between_segments_is_noticed() {
    let (mut one, mut zero) = session();
    let frame = one.sealer.seal(7, &[0; MAX_MESSAGE_BYTES])[PREFIX_BYTES..].to_vec();
    assert!(frame.len() > SEGMENT_BYTES);
    assert_eq!(zero.opener.open(&frame[..SEGMENT_BYTES]), Err(Frame));
}

#[test]
fn frame_of_another_session_does_not_open() {
    let (mut one, _) = session();
    let (_, mut zero) = session();
    let frame = one.sealer.seal(7, b"body").to_vec();
    assert_eq!(zero.opener.open(&frame[PREFIX_BYTES..]), Err(Frame));
}

#[test]
fn frame_reflected_to_its_sender_does_not_open() {
    let (mut one, _) = session();
    let frame = one.sealer.seal(7, b"body").to_vec();
    assert_eq!(one.opener.open(&frame[PREFIX_BYTES..]), Err(Frame));
}

fn answer_to(call: &[u8]) -> AuthError {
    match Answerer::new(&ours(), ZERO, &call[PREFIX_BYTES..]) {
        Err(error) => error,
        Ok(_) => panic!("accepted"),
    }
}

#[test]
fn call_of_another_secret_job_or_role_is_refused() {
    for key in [
        key("another secret, as long", "job"),
        key("a secret of many bytes", "job2"),
    ] {
        let (_, call) = Caller::new(&key, ONE, ZERO, 2);
        assert_eq!(answer_to(&call), AuthError::Key);
    }
    let (_, meant_for_two) = Caller::new(&ours(), ONE, Rank::new(2), 2);
    assert_eq!(answer_to(&meant_for_two), AuthError::Key);
    let (_, mut call) = Caller::new(&ours(), ONE, ZERO, 2);
    call[PREFIX_BYTES + 6] = 2;
    assert_eq!(
        answer_to(&call),
        AuthError::Key,
        "the rank in the clear is bound too"
    );
}

#[test]
fn call_of_another_version_is_named() {
    let (_, mut call) = Caller::new(&ours(), ONE, ZERO, 2);
    call[PREFIX_BYTES + 4] = 9;
    assert_eq!(answer_to(&call), AuthError::Version { theirs: 9 });
    let (caller, _) = Caller::new(&ours(), ONE, ZERO, 2);
    let mut answer = notice(ZERO, &[]);
    answer[PREFIX_BYTES + 4] = 9;
    let Err(error) = caller.finish(ZERO, &answer[PREFIX_BYTES..]) else {
        panic!("accepted");
    };
    assert_eq!(
        error.to_string(),
        "speaks control version 9, this rank speaks 3"
    );
}

#[test]
fn cut_or_altered_call_is_refused() {
    let (_, call) = Caller::new(&ours(), ONE, ZERO, 2);
    for index in PREFIX_BYTES..call.len() {
        answer_to(&call[..index]);
        let mut altered = call.clone();
        altered[index] ^= 0x80;
        answer_to(&altered);
    }
}

#[test]
fn answer_to_another_call_is_refused() {
    let (_, first) = Caller::new(&ours(), ONE, ZERO, 2);
    let (second, _) = Caller::new(&ours(), ONE, ZERO, 2);
    let answerer = Answerer::new(&ours(), ZERO, &first[PREFIX_BYTES..]).unwrap();
    let (answer, _) = answerer.accept().unwrap();
    assert!(matches!(
        second.finish(ZERO, &answer[PREFIX_BYTES..]),
        Err(AuthError::Key)
    ));
}

#[test]
fn repeated_call_leads_to_a_session_that_its_repeater_cannot_use() {
    let (caller, call) = Caller::new(&ours(), ONE, ZERO, 2);
    let answer = |call: &[u8]| {
        let answerer = Answerer::new(&ours(), ZERO, &call[PREFIX_BYTES..]).unwrap();
        answerer.accept().unwrap()
    };
    let (first, _) = answer(&call);
    let (_, mut again) = answer(&call);
    let Ok(Answer::Session(mut one)) = caller.finish(ZERO, &first[PREFIX_BYTES..]) else {
        panic!("the handshake of two honest ranks");
    };
    let confirm = one.sealer.seal(1, &[]).to_vec();
    assert_eq!(again.opener.open(&confirm[PREFIX_BYTES..]), Err(Frame));
}

#[test]
fn refusal_reaches_the_caller_with_its_reason() {
    let long = "ü".repeat(MAX_REASON_BYTES);
    for (reason, expected) in [("no", "no"), (&long, clip(&long)), ("", "refused")] {
        let (caller, call) = Caller::new(&ours(), ONE, ZERO, 2);
        let answerer = Answerer::new(&ours(), ZERO, &call[PREFIX_BYTES..]).unwrap();
        let answer = answerer.refuse(reason);
        assert!(answer.len() <= PREFIX_BYTES + MAX_ANSWER_BYTES);
        match caller.finish(ZERO, &answer[PREFIX_BYTES..]) {
            Ok(Answer::Refused(reason)) => assert_eq!(reason, expected),
            _ => panic!("not refused"),
        }
    }
}

#[test]
fn job_names_differ_and_tell_nothing() {
    let names = [
        ours().socket_name(),
        key("a secret of many bytes", "job2").socket_name(),
        key("another secret, as long", "job").socket_name(),
    ];
    assert_eq!(names[0], ours().socket_name());
    assert!(names[0] != names[1] && names[0] != names[2] && names[1] != names[2]);
    assert!(
        names
            .iter()
            .all(|name| name.len() == 35 && !name.contains("job"))
    );
}
