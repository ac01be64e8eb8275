//! The order of the messages on an edge: what is repeated, skipped, early or out of place is
//! refused, and after that everything is.

mod support;

use pp_contract::*;
use support::*;

/// The frames of these calls: `Some(chunk)` for an INFER, `None` for a NOOP.
fn calls(chunks: &[Option<u64>]) -> Vec<Vec<u8>> {
    let mut composer = Composer::new();
    let mut sequencer = Sequencer::new();
    let frame = |chunk: &Option<u64>| {
        let stamp = fresh(chunk.unwrap_or(0), 0);
        let sent = match chunk {
            Some(_) => composer
                .prepare_envelope(&envelope())
                .unwrap()
                .commit(&mut sequencer, stamp),
            None => composer
                .prepare_bare(Bare::Noop)
                .commit(&mut sequencer, stamp),
        };
        sent.frame().to_vec()
    };
    chunks.iter().map(frame).collect()
}

/// What a Phase B end says to the last of these frames; the others are admitted.
fn refusal_of_last(frames: &[&[u8]]) -> LockstepError {
    let mut lockstep = Lockstep::requests();
    let (last, before) = frames.split_last().unwrap();
    for frame in before {
        let _ = lockstep.admit(frame).unwrap();
    }
    lockstep.admit(last).unwrap_err()
}

#[test]
fn frames_in_order_are_admitted() {
    let mut lockstep = Lockstep::requests();
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
        let mut lockstep = Lockstep::requests();
        let all = order.iter().all(|at| lockstep.admit(&frames[*at]).is_ok());
        admitted += usize::from(all);
        assert_eq!(all, order == [0, 1, 2, 3], "{order:?}");
    }
    assert_eq!(admitted, 1);
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
    let frames = calls(&[Some(4), Some(4)]);
    let (last, got) = (ChunkIndex::new(4), ChunkIndex::new(4));
    let error = LockstepError::ChunkOrder { last, got };
    assert_eq!(refusal_of_last(&[&frames[0], &frames[1]]), error);
}

#[test]
fn skipped_payload_is_refused() {
    let frames = calls(&[Some(0), Some(1), Some(2)]);
    let expected = EdgeSeq::new(1).unwrap();
    let got = EdgeSeq::new(2).unwrap();
    let error = LockstepError::EdgeOrder { expected, got };
    assert_eq!(refusal_of_last(&[&frames[0], &frames[2]]), error);
}

#[test]
fn payload_announced_twice_is_refused() {
    let frames = calls(&[Some(0), Some(1)]);
    let again = forge(&frames[1], |frame| frame[32] = 0);
    let error = refusal_of_last(&[&frames[0], &again]);
    assert!(matches!(error, LockstepError::EdgeOrder { .. }), "{error}");
}

#[test]
fn epoch_may_rise_and_not_fall() {
    let frames = calls(&[Some(0), Some(1), None]);
    let epoch = |at: usize, epoch: u8| forge(&frames[at], |frame| frame[24] = epoch);
    let mut lockstep = Lockstep::requests();
    let _ = lockstep.admit(&epoch(0, 2)).unwrap();
    let _ = lockstep.admit(&epoch(1, 7)).unwrap();
    let (last, got) = (CacheEpoch::new(7), CacheEpoch::new(6));
    let error = LockstepError::EpochOrder { last, got };
    assert_eq!(lockstep.admit(&epoch(2, 6)).unwrap_err(), error);
}

#[test]
fn nothing_is_admitted_after_a_refusal() {
    let frames = calls(&[Some(0), Some(1)]);
    let mut lockstep = Lockstep::requests();
    assert!(lockstep.admit(&frames[0][1..]).is_err());
    for frame in &frames {
        assert_eq!(lockstep.admit(frame).unwrap_err(), LockstepError::Poisoned);
    }
}

#[test]
fn nothing_is_admitted_after_a_terminal_frame() {
    for terminal in [1, 4] {
        let (name, frame) = &first_frames()[terminal];
        let mut lockstep = Lockstep::requests();
        assert!(
            lockstep
                .admit(frame)
                .unwrap()
                .header()
                .action()
                .is_terminal(),
            "{name}"
        );
        let next = forge(&first_frames()[0].1, |frame| frame[8] = 1);
        assert_eq!(
            lockstep.admit(&next).unwrap_err(),
            LockstepError::AfterTerminal
        );
    }
}

#[test]
fn bodies_do_not_travel_against_their_direction() {
    let frames = first_frames();
    let (envelope, result) = (&frames[2].1, &frames[3].1);
    let kind = BodyKind::Result;
    let error = Lockstep::requests().admit(result).unwrap_err();
    assert_eq!(error, LockstepError::WrongDirection { kind });
    let kind = BodyKind::Envelope;
    let error = Lockstep::replies().admit(envelope).unwrap_err();
    assert_eq!(error, LockstepError::WrongDirection { kind });
}

/// A front end that waits for the answers to three INFERs and a SHUTDOWN, chunk 10 and on.
fn waiting() -> Lockstep<Replies> {
    let mut composer = Composer::new();
    let mut sequencer = Sequencer::new();
    let mut replies = Lockstep::replies();
    for chunk in 10..13 {
        let prepared = composer.prepare_envelope(&envelope()).unwrap();
        replies.expect(prepared.commit(&mut sequencer, fresh(chunk, 0)).header());
    }
    let prepared = composer.prepare_bare(Bare::Shutdown);
    replies.expect(prepared.commit(&mut sequencer, fresh(12, 0)).header());
    replies
}

#[test]
fn answers_in_the_order_of_the_calls_are_admitted() {
    let mut replies = waiting();
    let mut composer = Composer::new();
    let mut sequencer = Sequencer::new();
    for call in 0..3 {
        let prepared = composer.prepare_outcome(&outcome()).unwrap();
        let sent = prepared.commit(&mut sequencer, echo(call, 10 + call, 0));
        let _ = replies.admit(sent.frame()).unwrap();
    }
    let sent = composer
        .prepare_bare(Bare::Shutdown)
        .commit(&mut sequencer, echo(3, 12, 0));
    let _ = replies.admit(sent.frame()).unwrap();
}

#[test]
fn answer_that_is_not_due_is_refused() {
    let wrong = [
        echo(1, 11, 0),
        echo(0, 11, 0),
        echo(0, 10, 1),
        echo(9, 10, 0),
    ];
    for stamp in wrong {
        let mut composer = Composer::new();
        let prepared = composer.prepare_outcome(&outcome()).unwrap();
        let sent = prepared.commit(&mut Sequencer::new(), stamp);
        let error = waiting().admit(sent.frame()).unwrap_err();
        assert!(
            matches!(error, LockstepError::NotDue { .. }),
            "{stamp:?}: {error}"
        );
    }
}

#[test]
fn answer_without_a_call_is_refused() {
    let result = &first_frames()[3].1;
    let error = Lockstep::replies().admit(result).unwrap_err();
    assert!(matches!(error, LockstepError::NotDue { .. }), "{error}");

    // And a second answer to one call.
    let mut receiver = Receiver::of("result");
    let _ = receiver.admit(result).unwrap();
    let again = forge(result, |frame| frame[32] = 1);
    let error = receiver.admit(&again).unwrap_err();
    assert!(matches!(error, LockstepError::NotDue { .. }), "{error}");
}

#[test]
fn answer_is_in_kind() {
    let mut composer = Composer::new();
    let noop = composer
        .prepare_bare(Bare::Noop)
        .commit(&mut Sequencer::new(), echo(0, 10, 0));
    let error = waiting().admit(noop.frame()).unwrap_err();
    assert!(matches!(error, LockstepError::NotDue { .. }), "{error}");
}

#[test]
fn failure_may_overtake_results_and_ends_the_edge() {
    let mut composer = Composer::new();
    let mut failing = |call, chunk| {
        let prepared = composer.prepare_failure(&failure()).unwrap();
        prepared
            .commit(&mut Sequencer::new(), echo(call, chunk, 0))
            .frame()
            .to_vec()
    };
    let mut replies = waiting();
    let failed = failing(2, 12);
    assert_eq!(
        replies.admit(&failed).unwrap().failure().unwrap(),
        failure()
    );
    let sent = failing(0, 10);
    assert_eq!(
        replies.admit(&sent).unwrap_err(),
        LockstepError::AfterTerminal
    );
    assert!(waiting().admit(&failing(7, 10)).is_err());
}

#[test]
fn calls_sent_again_keep_their_numbers_and_later_ones_go_on_from_there() {
    let (mut composer, mut sequencer) = (Composer::new(), Sequencer::new());
    let mut fresh_peer = Lockstep::requests();
    let numbered =
        |call| Stamp::numbered(ChunkIndex::new(call), CacheEpoch::new(2), CallId::new(call));
    for (stamp, call, payload) in [
        (numbered(41), 41, 0),
        (numbered(42), 42, 1),
        (fresh(43, 2), 43, 2),
    ] {
        let prepared = composer.prepare_envelope(&envelope()).unwrap();
        let sent = prepared.commit(&mut sequencer, stamp);
        let matched = fresh_peer.admit(sent.frame()).unwrap();
        assert_eq!(matched.header().call_id(), CallId::new(call));
        // Payloads are counted on the new edge, from its beginning.
        assert_eq!(matched.header().edge_seq(), EdgeSeq::new(payload).ok());
    }
}
