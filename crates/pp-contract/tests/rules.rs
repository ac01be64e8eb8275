//! The rules of the protocol that live at this layer, each broken on purpose.

mod support;

use pp_contract::*;
use pp_testing::{Toy, ToyParts};
use serde::{Deserialize, Serialize};
use support::*;

/// A plan that can be told to be too large, or to refuse to be serialized.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct AwkwardParts {
    ballast: Vec<u8>,
    refuse: bool,
}

impl Serialize for AwkwardParts {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.refuse {
            return Err(serde::ser::Error::custom("not today"));
        }
        (&self.ballast, self.refuse).serialize(serializer)
    }
}

impl ToyParts for AwkwardParts {}

fn awkward(ballast: usize, refuse: bool) -> Envelope<Toy<AwkwardParts>> {
    let ballast = vec![7; ballast];
    let plan = Toy(AwkwardParts { ballast, refuse });
    Envelope::new(plan, Manifest::empty(), Manifest::empty()).unwrap()
}

// OM-01, OM-02: everything that can fail happens before the header leaves.

#[test]
fn plan_that_cannot_be_serialized_uses_up_no_number() {
    let mut composer = Composer::new();
    let mut sequencer = Sequencer::new();
    let refused = composer.prepare_envelope(&awkward(0, true)).unwrap_err();
    assert!(
        matches!(refused, PrepareError::Unserializable { .. }),
        "{refused}"
    );
    let too_large = composer
        .prepare_envelope(&awkward(MAX_BODY_BYTES, false))
        .unwrap_err();
    let kind = BodyKind::Envelope;
    assert_eq!(too_large, PrepareError::TooLarge { kind });

    // The next message is whole, and the first of its edge: the peer never hears of the others.
    let prepared = composer.prepare_envelope(&envelope()).unwrap();
    let sent = prepared.commit(&mut sequencer, fresh(0, 0));
    assert_eq!(sent.header().call_id(), CallId::new(0));
    assert_eq!(sent.header().edge_seq(), Some(EdgeSeq::FIRST));
    let mut lockstep = Lockstep::requests();
    let matched = lockstep.admit(sent.frame()).unwrap();
    assert_eq!(matched.envelope::<VideoPlan>().unwrap(), envelope());
}

#[test]
fn prepared_message_that_is_dropped_uses_up_no_number() {
    let mut composer = Composer::new();
    let mut sequencer = Sequencer::new();
    drop(composer.prepare_envelope(&envelope()).unwrap());
    let prepared = composer.prepare_envelope(&envelope()).unwrap();
    let sent = prepared.commit(&mut sequencer, fresh(0, 0));
    assert!(Lockstep::requests().admit(sent.frame()).is_ok());
}

#[test]
fn largest_plan_that_fits_travels() {
    // A body is the ballast, its length in 3 bytes, the flag, and two empty manifests.
    let largest = awkward(MAX_BODY_BYTES - 6, false);
    let mut composer = Composer::new();
    let prepared = composer.prepare_envelope(&largest).unwrap();
    let sent = prepared.commit(&mut Sequencer::new(), fresh(0, 0));
    assert_eq!(sent.frame().len(), MAX_FRAME_BYTES);
    let mut lockstep = Lockstep::requests();
    let matched = lockstep.admit(sent.frame()).unwrap();
    assert_eq!(matched.envelope::<Toy<AwkwardParts>>().unwrap(), largest);
    assert!(
        composer
            .prepare_envelope(&awkward(MAX_BODY_BYTES - 5, false))
            .is_err()
    );
}

#[test]
fn unsupported_dtype_and_oversize_tensor_never_reach_an_envelope() {
    let f32_latents = Manifest::new(&[tensor("latents_out", DType::F32, &[4, 1584, 192])]).unwrap();
    let plan = VideoPlan::new(plan_parts()).unwrap();
    assert!(Envelope::new(plan, inputs(), f32_latents).is_err());

    let half = tensor("half", DType::I64, &[MAX_PAYLOAD_BYTES / 16 + 1]);
    let other = tensor("other", DType::I64, &[MAX_PAYLOAD_BYTES / 16]);
    let error = Manifest::new(&[half, other]).unwrap_err();
    assert!(matches!(error, ManifestError::TooLarge { .. }), "{error}");
    assert!(TensorSpec::new("huge", DType::U8, &[u64::MAX]).is_err());
}

// OM-03: the plan decides; both sides check the number of calls.

#[test]
fn plan_whose_calls_do_not_add_up_is_refused_on_both_sides() {
    let mut parts = plan_parts();
    parts.expected_generator_calls = 4;
    let error = VideoPlan::new(parts).unwrap_err();
    let text = "expected_generator_calls is 4: 4 steps with recompute take 5";
    assert_eq!(error.to_string(), text);

    // The peer skipped the recompute in its count: byte 5 of the plan after two of two bytes.
    let frame = &first_frames()[2].1;
    let forged = forge(frame, |frame| frame[HEADER_BYTES + 7] = 4);
    let mut lockstep = Lockstep::requests();
    let refused = lockstep.admit(&forged).unwrap().envelope::<VideoPlan>();
    assert_eq!(refused, Err(BodyError::Plan(error)));
}

#[test]
fn result_with_another_number_of_calls_is_refused() {
    let mut outcome = outcome();
    outcome.observed_calls = 4;
    let (planned, observed) = (5, 4);
    assert_eq!(
        judge(&outcome, 0),
        Err(ResultFault::Calls { planned, observed })
    );
}

// OM-06, OM-10, size: tensors travel through the manifest, and exactly those of the plan.

#[test]
fn tensors_other_than_the_planned_ones_are_refused() {
    let plan = VideoPlan::new(plan_parts()).unwrap();
    let all: Vec<TensorSpec> = inputs().iter().map(|(_, spec)| *spec).collect();
    let refused = |tensors: &[TensorSpec]| {
        let inputs = Manifest::new(tensors).unwrap();
        Envelope::new(plan, inputs, outputs())
            .unwrap_err()
            .to_string()
    };
    // Recompute without its context.
    assert!(refused(&all[..3]).contains("context_frames bf16] in this order"));
    // Order, type, an extra one, a list of another length.
    refused(&[all[1], all[0], all[2], all[3]]);
    let f16 = tensor("latents_in", DType::F16, &[4, 1584, 192]);
    refused(&[f16, all[1], all[2], all[3]]);
    refused(&[
        all[0],
        all[1],
        all[2],
        all[3],
        tensor("extra", DType::Bf16, &[1]),
    ]);
    let short = tensor("denoising_step_list", DType::I64, &[3]);
    refused(&[all[0], all[1], short, all[3]]);

    // Context that the plan does not call for is refused too: stale context is never used.
    let mut parts = plan_parts();
    (parts.do_kv_recompute, parts.expected_generator_calls) = (false, 4);
    let plan = VideoPlan::new(parts).unwrap();
    assert!(Envelope::new(plan, inputs(), outputs()).is_err());
    let without = Manifest::new(&all[..3]).unwrap();
    assert!(Envelope::new(plan, without, outputs()).is_ok());
}

#[test]
fn outputs_of_another_shape_than_the_inputs_are_refused() {
    let plan = VideoPlan::new(plan_parts()).unwrap();
    let smaller = Manifest::new(&[tensor("latents_out", DType::Bf16, &[4, 1583, 192])]).unwrap();
    let error = Envelope::new(plan, inputs(), smaller).unwrap_err();
    assert!(matches!(error, PlanError::Shape { .. }), "{error}");
}

#[test]
fn header_and_manifest_that_disagree_on_the_size_are_refused() {
    for (name, frame) in first_frames() {
        let altered = forge(&frame, |frame| frame[40] ^= 8);
        let mut receiver = Receiver::of(name);
        let error = match name {
            "envelope" => receiver
                .admit(&altered)
                .unwrap()
                .envelope::<VideoPlan>()
                .unwrap_err(),
            "result" => receiver.admit(&altered).unwrap().outcome().unwrap_err(),
            _ => continue,
        };
        assert!(matches!(error, BodyError::PayloadSize { .. }), "{error}");
    }
}

#[test]
fn body_of_another_kind_is_not_decoded() {
    let frame = &first_frames()[2].1;
    let mut lockstep = Lockstep::requests();
    let matched = lockstep.admit(frame).unwrap();
    let (wanted, got) = (BodyKind::Result, BodyKind::Envelope);
    assert_eq!(matched.outcome(), Err(BodyError::WrongKind { wanted, got }));
    assert!(matched.failure().is_err());
}

// OM-07: the receiver checks the whole envelope, whatever the sender checked.
#[test]
fn envelope_that_breaks_a_rule_is_refused_where_it_arrives() {
    let received = |inputs: Manifest, outputs: Manifest| {
        let envelope = Envelope::new(Toy(plan_parts()), inputs, outputs).unwrap();
        let mut composer = Composer::new();
        let prepared = composer.prepare_envelope(&envelope).unwrap();
        let sent = prepared.commit(&mut Sequencer::new(), fresh(0, 0));
        let mut lockstep = Lockstep::requests();
        lockstep
            .admit(sent.frame())
            .unwrap()
            .envelope::<VideoPlan>()
    };
    let all: Vec<TensorSpec> = inputs().iter().map(|(_, spec)| *spec).collect();
    assert!(received(inputs(), outputs()).is_ok());
    let without_context = Manifest::new(&all[..3]).unwrap();
    let refused = received(without_context, outputs());
    assert!(matches!(
        refused,
        Err(BodyError::Plan(PlanError::Tensors { .. }))
    ));
    assert!(received(inputs(), Manifest::empty()).is_err());

    // A name that stands twice: the constructor of the sender does not let it out, so forge it.
    let frame = &first_frames()[2].1;
    let second = frame
        .windows(5)
        .position(|bytes| bytes == b"\x13deno")
        .unwrap();
    let twice = forge(frame, |frame| {
        frame[second + 1..second + 20].copy_from_slice(b"conditioning_embeds");
    });
    let mut lockstep = Lockstep::requests();
    let refused = lockstep.admit(&twice).unwrap().envelope::<VideoPlan>();
    let twice = matches!(
        refused,
        Err(BodyError::Manifest(ManifestError::Twice { .. }))
    );
    assert!(twice, "{refused:?}");
}

// OM-09: a result of an old epoch is received and dropped.

#[test]
fn result_of_an_old_epoch_is_stale_whatever_it_says() {
    let mut wrong = outcome();
    assert_eq!(judge(&wrong, 0), Ok(Verdict::Accept));
    assert_eq!(judge(&wrong, 1), Ok(Verdict::Stale));
    (wrong.observed_calls, wrong.outputs) = (0, Manifest::empty());
    assert_eq!(judge(&wrong, 1), Ok(Verdict::Stale));
    assert!(judge(&wrong, 0).is_err());
}

#[test]
fn result_that_is_not_the_one_asked_for_is_refused() {
    let mut other_frame = outcome();
    other_frame.start_frame = 20;
    let echo_of = |field, expected, got| {
        Err(ResultFault::Echo {
            field,
            expected,
            got,
        })
    };
    assert_eq!(judge(&other_frame, 0), echo_of("start_frame", 16, 20));

    let mut other_shape = outcome();
    other_shape.outputs = Manifest::new(&[tensor("latents_out", DType::Bf16, &[1])]).unwrap();
    let error = judge(&other_shape, 0).unwrap_err();
    assert!(matches!(error, ResultFault::Outputs { .. }), "{error}");

    for (field, stamp) in [
        ("call_id", echo(1, 0, 0)),
        ("chunk_index", echo(0, 1, 0)),
        ("cache_epoch", echo(0, 0, 1)),
    ] {
        let mut composer = Composer::new();
        let prepared = composer.prepare_outcome(&outcome()).unwrap();
        let sent = prepared.commit(&mut Sequencer::new(), stamp);
        let envelope = envelope();
        let expectation = expectation(&envelope);
        let judged = expectation.judge(sent.header(), &outcome(), CacheEpoch::new(0));
        assert_eq!(judged, echo_of(field, 0, 1));
    }
}

#[test]
fn payload_that_was_altered_or_is_not_finite_is_refused() {
    let manifest = Manifest::new(&[
        tensor("bytes", DType::U8, &[3]),
        tensor("b", DType::Bf16, &[2]),
        tensor("h", DType::F16, &[2]),
        tensor("f", DType::F32, &[2]),
    ]);
    let mut outcome = outcome();
    outcome.outputs = manifest.unwrap();
    outcome.seal = None;
    let good = vec![0u8; outcome.outputs.payload_bytes() as usize];
    assert_eq!(outcome.check_payload(&good), Ok(()));
    assert!(matches!(
        outcome.check_payload(&good[1..]),
        Err(ResultFault::PayloadSize { .. })
    ));
    // An infinity as the second element of each; all bits set in the bytes are fine.
    let infinities: [(&str, usize, &[u8]); 3] = [
        ("b", 256 + 2, &[0x80, 0x7f]),
        ("h", 512 + 2, &[0x00, 0xfc]),
        ("f", 768 + 4, &[0x00, 0x00, 0x80, 0x7f]),
    ];
    for (name, at, infinity) in infinities {
        let mut bad = good.clone();
        bad[..3].fill(0xff);
        bad[at..at + infinity.len()].copy_from_slice(infinity);
        let tensor = name.to_owned();
        let error = ResultFault::NotFinite { tensor, index: 1 };
        assert_eq!(outcome.check_payload(&bad), Err(error));
        bad[at + infinity.len() - 1] = 0x3f;
        assert_eq!(outcome.check_payload(&bad), Ok(()));
    }

    outcome.outputs = outcome.outputs.sealed().unwrap();
    let mut good = good;
    good.resize(outcome.outputs.payload_bytes() as usize, 0);
    let digest = outcome.outputs.seal(&mut good).unwrap().seal();
    outcome.seal = Some(Seal { digest, cost_us: 0 });
    assert_eq!(outcome.check_payload(&good), Ok(()));
    let seal_at = outcome.outputs.range(SEAL_TENSOR).unwrap().start;
    for (at, name) in [(2, "bytes"), (256 + 3, "b"), (seal_at + 8, SEAL_TENSOR)] {
        let mut altered = good.clone();
        altered[at] ^= 1;
        let error = outcome.check_payload(&altered).unwrap_err();
        let named = matches!(&error, ResultFault::Digest { tensor, .. } if tensor == name);
        assert!(named, "{name}: {error}");
    }
}

fn expectation(envelope: &Envelope<VideoPlan>) -> Expectation<'_> {
    let mut composer = Composer::new();
    let prepared = composer.prepare_envelope(envelope).unwrap();
    let sent = prepared.commit(&mut Sequencer::new(), fresh(0, 0));
    Expectation::of(sent.header(), envelope)
}

/// Judges the result of the first call, made in epoch 0.
fn judge(outcome: &Outcome, current_epoch: u64) -> Result<Verdict, ResultFault> {
    let mut composer = Composer::new();
    let prepared = composer.prepare_outcome(outcome).unwrap();
    let answer = prepared.commit(&mut Sequencer::new(), echo(0, 0, 0));
    let envelope = envelope();
    let current_epoch = CacheEpoch::new(current_epoch);
    expectation(&envelope).judge(answer.header(), outcome, current_epoch)
}
