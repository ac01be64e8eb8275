//! The order of the messages on an edge: what is repeated, skipped, early or out of place is
//! refused, and after that everything is.

use pp_contract::*;

use crate::support::*;

/// The frames of these calls: `Some(chunk)` for an INFER, `None` for a NOOP.
fn calls(chunks: &[Option<u64>]) -> Vec<Vec<u8>> {
    let (mut composer, mut sequencer) = (Composer::new(), Sequencer::new());
    let frame = |(call, chunk): (u64, &Option<u64>)| {
        let mut stamp = stamp(call);
        stamp.chunk_index = ChunkIndex::new(chunk.unwrap_or(0));
        let prepared = match chunk {
            Some(_) => composer.prepare(&message()).unwrap(),
            None => composer.prepare_bare(Bare::Noop),
        };
        prepared.commit(&mut sequencer, stamp).frame().to_vec()
    };
    (0..).zip(chunks).map(frame).collect()
}

/// What the receiving end says to the last of these frames; the others are admitted.
fn refusal_of_last(frames: &[&[u8]]) -> LockstepError {
    let mut lockstep = Lockstep::new();
    let (last, before) = frames.split_last().unwrap();
    for frame in before {
        let _ = lockstep.admit(frame).unwrap();
    }
    lockstep.admit(last).unwrap_err()
}

#[test]
fn frames_in_order_are_admitted() {
    let mut lockstep = Lockstep::new();
    for frame in calls(&[Some(0), None, Some(1), Some(5), None]) {
        let _ = lockstep.admit(&frame).unwrap();
    }
}

#[test]
fn every_order_but_the_right_one_is_refused() {
    let frames = calls(&[Some(0), Some(1), Some(2), Some(3)]);
    let mut admitted = 0;
    for code in 0..256usize {
        let order = [code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6];
        let mut lockstep = Lockstep::new();
        let all = order.iter().all(|at| lockstep.admit(&frames[*at]).is_ok());
        admitted += usize::from(all);
        assert_eq!(all, order == [0, 1, 2, 3], "{order:?}");
    }
    assert_eq!(admitted, 1);
}

#[test]
fn a_fixed_order_is_the_only_one_and_begins_anew_with_each_step() {
    // By chunk, each with the number of its call.
    let all = calls(&[Some(0), Some(1), Some(2), Some(3)]);
    let payload = |at: usize, number: u8| forge(&all[at], |frame| frame[32] = number);
    let mut lockstep = Lockstep::in_order(vec![1, 0]);
    for (number, at) in (0..).zip([1, 0, 3, 2]) {
        let frame = payload(at, number);
        assert_eq!(
            lockstep.admit(&frame).unwrap().header().chunk_index().get(),
            at as u64
        );
    }
    for (number, admitted, next, due) in
        [(0, vec![], 0, 1), (1, vec![1], 1, 0), (2, vec![1, 0], 2, 3)]
    {
        let mut lockstep = Lockstep::in_order(vec![1, 0]);
        for (number, at) in (0..).zip(admitted) {
            let _ = lockstep.admit(&payload(at, number)).unwrap();
        }
        let [expected, got] = [due, next as u64].map(ChunkIndex::new);
        let refused = lockstep.admit(&payload(next, number)).unwrap_err();
        assert_eq!(refused, LockstepError::ChunkDue { expected, got });
    }
}

#[test]
fn repeated_call_is_refused_even_without_a_payload() {
    let frames = calls(&[None, None]);
    let (last, got) = (CallId::new(0), CallId::new(0));
    let error = LockstepError::CallOrder { last, got };
    assert_eq!(refusal_of_last(&[&frames[0], &frames[0]]), error);
    assert!(matches!(
        refusal_of_last(&[&frames[1], &frames[0]]),
        LockstepError::CallOrder { .. }
    ));
}

#[test]
fn repeated_chunk_is_refused() {
    let frames = calls(&[Some(4), None, Some(4)]);
    let (last, got) = (ChunkIndex::new(4), ChunkIndex::new(4));
    let error = LockstepError::ChunkOrder { last, got };
    let refused = refusal_of_last(&[&frames[0], &frames[1], &frames[2]]);
    assert_eq!(refused, error);
}

#[test]
fn payload_that_is_skipped_or_announced_twice_is_refused() {
    let frames = calls(&[Some(0), Some(1)]);
    let expected = EdgeSeq::new(1).unwrap();
    for number in [0, 2] {
        let wrong = forge(&frames[1], |frame| frame[32] = number);
        let got = EdgeSeq::new(number.into()).unwrap();
        let error = LockstepError::EdgeOrder { expected, got };
        assert_eq!(refusal_of_last(&[&frames[0], &wrong]), error);
    }
}

#[test]
fn epoch_may_rise_and_not_fall() {
    let frames = calls(&[Some(0), Some(1), None]);
    let epoch = |at: usize, epoch: u8| forge(&frames[at], |frame| frame[24] = epoch);
    let (last, got) = (CacheEpoch::new(7), CacheEpoch::new(6));
    let error = LockstepError::EpochOrder { last, got };
    let refused = refusal_of_last(&[&epoch(0, 2), &epoch(1, 7), &epoch(2, 6)]);
    assert_eq!(refused, error);
}

#[test]
fn nothing_is_admitted_after_a_refusal() {
    let frames = calls(&[Some(0), Some(1)]);
    let mut lockstep = Lockstep::new();
    assert!(lockstep.admit(&frames[0][1..]).is_err());
    for frame in &frames {
        assert_eq!(lockstep.admit(frame).unwrap_err(), LockstepError::Poisoned);
    }
}

#[test]
fn nothing_is_admitted_after_a_terminal_frame() {
    let shutdown = first_frame("shutdown");
    for next in [Bare::Noop, Bare::Shutdown] {
        let error = refusal_of_last(&[&shutdown, &bare_frame(next, stamp(1))]);
        assert_eq!(error, LockstepError::AfterTerminal);
    }
}

// Attempts.

/// The frame as one of this attempt, and with this payload of the edge.
fn again(frame: &[u8], attempt: u8, payload: u8) -> Vec<u8> {
    forge(frame, |frame| {
        (frame[56], frame[32]) = (attempt, payload);
    })
}

#[test]
fn attempt_begins_anew_and_payloads_go_on() {
    let frames = calls(&[Some(0), Some(1), Some(2)]);
    let mut lockstep = Lockstep::new();
    for (call, attempt, payload) in [(0, 0, 0), (1, 0, 1), (0, 2, 2), (2, 2, 3), (1, 3, 4)] {
        let frame = again(&frames[call], attempt, payload);
        let matched = lockstep.admit(&frame).unwrap();
        assert_eq!(matched.header().call_id().get(), call as u64);
        assert_eq!(matched.header().attempt(), u16::from(attempt));
    }

    // Sent again on a new edge, payloads are counted from its beginning, and calls keep their numbers.
    let mut lockstep = Lockstep::new();
    for (call, payload) in [(1, 0), (2, 1)] {
        let _ = lockstep.admit(&again(&frames[call], 1, payload)).unwrap();
    }
}

#[test]
fn within_an_attempt_the_order_is_kept_and_attempts_do_not_fall() {
    let frames = calls(&[Some(0), Some(1)]);
    let refused = refusal_of_last(&[
        &frames[0],
        &again(&frames[1], 1, 1),
        &again(&frames[0], 1, 2),
    ]);
    assert!(
        matches!(refused, LockstepError::CallOrder { .. }),
        "{refused}"
    );
    let refused = refusal_of_last(&[&again(&frames[0], 2, 0), &again(&frames[1], 1, 1)]);
    assert_eq!(refused, LockstepError::AttemptOrder { last: 2, got: 1 });
}

// Laps.

/// Admits chunks in laps, on an edge of three.
fn laps(chunks: &[(u64, u16)]) -> Result<(), LockstepError> {
    let mut lockstep = Lockstep::with_laps(3);
    let (mut composer, mut sequencer) = (Composer::new(), Sequencer::new());
    chunks.iter().try_for_each(|(n, lap)| {
        let stamp = Stamp {
            lap: *lap,
            ..stamp(*n)
        };
        let prepared = composer.prepare(&message()).unwrap();
        let sent = prepared.commit(&mut sequencer, stamp);
        lockstep.admit(sent.frame()).map(drop)
    })
}

#[test]
fn each_lap_has_an_order_of_its_own() {
    let mixed = [
        (0, 0),
        (1, 0),
        (0, 1),
        (2, 0),
        (1, 1),
        (0, 2),
        (1, 2),
        (2, 1),
    ];
    assert_eq!(laps(&mixed), Ok(()));
    let (last, got) = (CallId::new(1), CallId::new(0));
    let error = LockstepError::CallOrder { last, got };
    assert_eq!(laps(&[(0, 0), (1, 0), (1, 1), (0, 1)]), Err(error));
}

#[test]
fn lap_that_the_edge_does_not_have_is_refused() {
    assert_eq!(laps(&[(0, 3)]), Err(LockstepError::Lap { got: 3, laps: 3 }));
    let lap = forge(&first_frame("message"), |frame| frame[58] = 1);
    let error = admit(&lap).unwrap_err();
    assert_eq!(error, LockstepError::Lap { got: 1, laps: 1 });
}
