//! The rules of the protocol that live at this layer, each broken on purpose.

use pp_contract::*;
use pp_testing::{Toy, ToyParts};
use serde::{Deserialize, Serialize};

use crate::support::*;

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

fn awkward(ballast: usize, refuse: bool) -> Message<Toy<AwkwardParts>> {
    let ballast = vec![7; ballast];
    let plan = Toy(AwkwardParts { ballast, refuse });
    Message::new(plan, &pipeline().stages()[0], Manifest::empty()).unwrap()
}

// OM-01, OM-02: everything that can fail happens before the header leaves.

#[test]
fn plan_that_cannot_be_serialized_uses_up_no_number() {
    let mut composer = Composer::new();
    let mut sequencer = Sequencer::new();
    let refused = composer.prepare(&awkward(0, true)).unwrap_err();
    assert!(
        matches!(refused, PrepareError::Unserializable { .. }),
        "{refused}"
    );
    let too_large = composer.prepare(&awkward(MAX_BODY_BYTES, false));
    assert_eq!(too_large.unwrap_err(), PrepareError::TooLarge);
    drop(composer.prepare(&message()).unwrap());

    // The next message is whole, and the first of its edge: the peer never hears of the others.
    let prepared = composer.prepare(&message()).unwrap();
    let sent = prepared.commit(&mut sequencer, stamp(0));
    assert_eq!(sent.header().edge_seq(), Some(EdgeSeq::FIRST));
    assert_eq!(decode(sent.frame(), 0), Ok(message()));
}

#[test]
fn largest_plan_that_fits_travels() {
    // A body is the ballast, its length in 3 bytes, the flag, no tensors, no trail, no note, and whether it is stale.
    let largest = awkward(MAX_BODY_BYTES - 8, false);
    let frame = frame_of(&largest, stamp(0));
    assert_eq!(frame.len(), MAX_FRAME_BYTES);
    let decoded = admit(&frame).unwrap().message(pipeline(), 0);
    assert_eq!(decoded, Ok(largest));
    let over = awkward(MAX_BODY_BYTES - 7, false);
    assert!(Composer::new().prepare(&over).is_err());
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
    let frame = first_frame("message");
    let forged = forge(&frame, |frame| frame[HEADER_BYTES + 7] = 4);
    assert_eq!(decode(&forged, 0), Err(BodyError::Plan(error)));
}

/// What the next stage says of a message with these reports, which `maker` sends for this lap. A toy plan lets all out.
fn trail_of(
    pipeline: &Pipeline,
    (maker, lap): (usize, u16),
    reports: &[StageReport],
) -> Result<(), TrailError> {
    let stages = pipeline.stages();
    let part = &stages[maker];
    let is_last_lap = match pipeline.ring_at(maker) {
        Some(ring) if maker < ring.last => lap + 1 == pipeline.laps_of(maker, &plan()),
        ring => ring.is_none() || lap == 0,
    };
    let is_last = part.part + 1 == part.parts && is_last_lap;
    let tensors = match &*part.name {
        "phase_b" if !is_last => guided(DType::F32),
        "phase_b" => outputs(),
        "decode" => Manifest::empty(),
        _ => inputs(),
    };
    let mut toy = Message::new(Toy(plan_parts()), &stages[0], tensors.clone()).unwrap();
    let mut reports = reports.iter();
    for (at, stage) in stages.iter().enumerate().skip(1) {
        for (place, report) in (0..stage.ranks.len()).zip(&mut reports) {
            toy = match place {
                0 => toy.hand_on(pipeline, (at, 0), tensors.clone(), report),
                _ => Ok(toy.joined(report)),
            }
            .unwrap();
        }
    }
    let frame = frame_of(&toy, Stamp { lap, ..stamp(0) });
    let mut lockstep = Lockstep::with_laps(9);
    let matched = lockstep.admit(&frame).unwrap();
    match matched.message::<VideoPlan>(pipeline, maker) {
        Ok(_) => Ok(()),
        Err(BodyError::Trail(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn only_the_reports_of_the_stages_so_far_are_taken() {
    let parts = parse("encode@0,phase_b@1,phase_b@2,phase_b@3,decode@0");
    let alone = parse("encode@0,(phase_b@1)*2,decode@0");
    let uneven = parse("encode@0,(phase_b@1)*3,decode@0");
    let line = pipeline();
    // The stage that sends, the lap of the next one, and the calls of the stages behind the source: 4 passes in all, and 1
    // more in each part and lap.
    let right: [(&Pipeline, (usize, u16), &[u32]); 19] = [
        (line, (0, 0), &[]),
        (line, (1, 0), &[5]),
        (line, (2, 0), &[5, 1]),
        (&parts, (1, 0), &[3]),
        (&parts, (2, 0), &[3, 2]),
        (&parts, (3, 0), &[3, 2, 2]),
        (&alone, (1, 1), &[3]),
        (&alone, (1, 0), &[6]),
        (&uneven, (1, 1), &[3]),
        (&uneven, (1, 2), &[5]),
        (&uneven, (1, 0), &[7]),
        (ring(), (0, 0), &[]),
        (ring(), (1, 0), &[2]),
        (ring(), (2, 1), &[2, 2]),
        (ring(), (1, 1), &[4, 2]),
        (ring(), (2, 3), &[6, 6]),
        (ring(), (1, 3), &[8, 6]),
        (ring(), (2, 0), &[8, 8]),
        (ring(), (3, 0), &[8, 8, 1]),
    ];
    for (pipeline, place, calls) in right {
        let case = format!("{pipeline}, {place:?}");
        let (maker, lap) = place;
        let reports: Vec<_> = calls.iter().map(|calls| report(*calls)).collect();
        assert_eq!(trail_of(pipeline, place, &reports), Ok(()), "{case}");
        for other in (0..6).filter(|other| *other != lap) {
            let refused = trail_of(pipeline, (maker, other), &reports);
            assert!(refused.is_err(), "{case} for lap {other}");
        }
        let mut others = vec![[&reports[..], &[report(1)]].concat()];
        if let Some((_, fewer)) = reports.split_last() {
            others.push(fewer.to_vec());
        }
        // A sink has no next stage that could report.
        for other in others
            .iter()
            .filter(|other| other.len() < pipeline.stages().len())
        {
            let refused = trail_of(pipeline, place, other);
            assert!(matches!(refused, Err(TrailError::Length { .. })), "{case}");
        }
        for at in 0..calls.len() {
            let stage = format!("{} on rank", pipeline.stages()[at + 1].name);
            for (calls, frame) in [(1, 0), (0, 4)] {
                let mut wrong = reports.clone();
                wrong[at].calls += calls;
                wrong[at].start_frame += frame;
                let refused = trail_of(pipeline, place, &wrong).unwrap_err();
                assert!(refused.to_string().starts_with(&stage), "{case}: {refused}");
            }
        }
    }
    let refused = trail_of(line, (1, 0), &[report(4)]).unwrap_err();
    let text = "phase_b on rank 1 made 4 calls, 5 were planned";
    assert_eq!(refused.to_string(), text);
}

/// A leader refuses what a member says of its work, and a member what the leader says of a payload that stays there.
#[test]
fn members_of_a_group_are_told_apart_in_what_is_refused() {
    let pipeline = &parse("encode@0,phase_b@1+2,decode@0");
    let follow = |slot: u64| {
        let mut composer = Composer::new();
        let told = message();
        let told = composer.prepare_without_payload(&told).unwrap();
        let told = told
            .commit(&mut Sequencer::new(), stamp(0))
            .frame()
            .to_vec();
        admit(&told)
            .unwrap()
            .followed::<VideoPlan>(pipeline, 1, slot)
    };
    let bytes = message().tensors().payload_bytes();
    assert_eq!(follow(bytes), Ok(message()));
    let refused = follow(bytes - 1).unwrap_err().to_string();
    let text = format!(
        "it tells of a payload of {bytes} bytes, its slots hold {}",
        bytes - 1
    );
    assert_eq!(refused, text);

    let reported = |calls: u32| {
        let said = frame_of(&message().reported(pipeline, 1, &report(calls)), stamp(0));
        let said = admit(&said)
            .unwrap()
            .reported::<VideoPlan>(pipeline, 1, Rank::new(2));
        said.map(drop)
    };
    assert_eq!(reported(5), Ok(()));
    let Err(BodyError::Trail(refused)) = reported(4) else {
        panic!("a wrong report is taken");
    };
    let text = "phase_b on rank 2 made 4 calls, 5 were planned";
    assert_eq!(refused.to_string(), text);

    // The leader hands on a report of each.
    let handed_on = |maker, calls: &[u32]| {
        let reports: Vec<_> = calls.iter().map(|calls| report(*calls)).collect();
        trail_of(pipeline, (maker, 0), &reports).map_err(|refused| refused.to_string())
    };
    for (maker, calls) in [(1, &[5, 5][..]), (2, &[5, 5, 1])] {
        assert_eq!(handed_on(maker, calls), Ok(()));
        let due = format!("it has {} reports, and {} were due", maker, maker + 1);
        assert_eq!(handed_on(maker, &calls[1..]), Err(due));
        assert_eq!(handed_on(maker, &[5, 4, 1][..=maker]), Err(text.into()));
    }
}

#[test]
fn plan_without_steps_goes_through_a_ring_once() {
    let mut parts = plan_parts();
    (parts.num_denoise_steps, parts.expected_generator_calls) = (0, 1);
    let plan = VideoPlan::new(parts).unwrap();
    assert_eq!([0, 1, 2, 3].map(|at| ring().laps_of(at, &plan)), [1; 4]);
}

// OM-06, OM-10, size: tensors travel through the manifest, and exactly those of the plan.

/// What goes from one part of `phase_b` to the next.
fn guided(guide: DType) -> Manifest {
    let mut specs: Vec<_> = inputs().iter().map(|(_, spec)| *spec).collect();
    specs.push(tensor("guide", guide, &[4, 1584, 192]));
    Manifest::new(&specs).unwrap()
}

#[test]
fn tensors_other_than_the_planned_ones_are_refused() {
    let all: Vec<TensorSpec> = inputs().iter().map(|(_, spec)| *spec).collect();
    let (source, phase_b) = (&pipeline().stages()[0], &pipeline().stages()[1]);
    let refused = |tensors: &[TensorSpec]| {
        let tensors = Manifest::new(tensors).unwrap();
        let refused = Message::new(plan(), source, tensors).unwrap_err();
        refused.to_string()
    };
    // Recompute without its context.
    assert!(refused(&all[..3]).contains("context_frames bf16] in this order"));
    // Order, type, an extra one, a list of another length.
    refused(&[all[1], all[0], all[2], all[3]]);
    let f16 = tensor("latents_in", DType::F16, &[4, 1584, 192]);
    refused(&[f16, all[1], all[2], all[3]]);
    // Samples of 10 bits are f16, those of the context, too.
    let context = *all[3].shape();
    let context = tensor("context_frames", DType::F16, context.dims());
    let ten_bits = Manifest::new(&[f16, all[1], all[2], context]).unwrap();
    assert!(Message::new(plan(), source, ten_bits).is_ok());
    refused(&[all[0], all[1], all[2], context]);
    let extra = tensor("extra", DType::Bf16, &[1]);
    refused(&[all[0], all[1], all[2], all[3], extra]);
    let short = tensor("denoising_step_list", DType::I64, &[3]);
    refused(&[all[0], all[1], short, all[3]]);

    // Context that the plan does not call for is refused too: stale context is never used.
    let mut parts = plan_parts();
    (parts.do_kv_recompute, parts.expected_generator_calls) = (false, 4);
    let plan_without = VideoPlan::new(parts).unwrap();
    assert!(plan_without.check(source, true, &inputs()).is_err());
    let without = Manifest::new(&all[..3]).unwrap();
    assert!(plan_without.check(source, true, &without).is_ok());

    // What `phase_b` makes: its guide from a part that is not the last, and its latents from the last.
    let parts = parse("encode@0,phase_b@1,phase_b@2,decode@0");
    let (first, last) = (&parts.stages()[1], &parts.stages()[2]);
    for (made, by_first, by_last) in [
        (guided(DType::F32), true, false),
        (guided(DType::Bf16), true, false),
        (guided(DType::F16), false, false),
        (inputs(), false, false),
        (outputs(), false, true),
        (
            Manifest::single("latents_out", DType::F16, &[4]).unwrap(),
            false,
            true,
        ),
        (
            Manifest::single("latents_out", DType::F32, &[4]).unwrap(),
            false,
            false,
        ),
    ] {
        assert_eq!(plan().check(first, true, &made).is_ok(), by_first, "{made}");
        assert_eq!(plan().check(last, true, &made).is_ok(), by_last, "{made}");
        assert_eq!(
            plan().check(phase_b, true, &made).is_ok(),
            by_last,
            "{made}"
        );
        // In a lap that is not the last one the last part is like another one.
        assert_eq!(plan().check(last, false, &made).is_ok(), by_first, "{made}");
    }
}

#[test]
fn header_and_manifest_that_disagree_on_the_size_are_refused() {
    for (name, maker) in [("message", 0), ("handed on", 1)] {
        let altered = forge(&first_frame(name), |frame| frame[40] ^= 8);
        let error = decode(&altered, maker).unwrap_err();
        assert!(matches!(error, BodyError::PayloadSize { .. }), "{error}");
    }
}

#[test]
fn message_without_a_body_is_not_decoded() {
    for (name, action) in [("noop", Action::Noop), ("shutdown", Action::Shutdown)] {
        let refused = decode(&first_frame(name), 0);
        assert_eq!(refused, Err(BodyError::NoBody { action }));
    }
}

// OM-07: the receiver checks the whole message, whatever the sender checked.
#[test]
fn message_that_breaks_a_rule_is_refused_where_it_arrives() {
    let received = |tensors: Manifest| {
        let source = &pipeline().stages()[0];
        let toy = Message::new(Toy(plan_parts()), source, tensors).unwrap();
        decode(&frame_of(&toy, stamp(0)), 0)
    };
    let all: Vec<TensorSpec> = inputs().iter().map(|(_, spec)| *spec).collect();
    assert_eq!(received(inputs()), Ok(message()));
    assert!(received(inputs().sealed().unwrap()).is_ok());
    for tensors in [Manifest::new(&all[..3]).unwrap(), Manifest::empty()] {
        let refused = received(tensors);
        let by_plan = matches!(refused, Err(BodyError::Plan(PlanError::Tensors { .. })));
        assert!(by_plan, "{refused:?}");
    }
    // From another stage than the one that sent it.
    for maker in [1, 2] {
        assert!(decode(&first_frame("message"), maker).is_err());
    }

    // A name that stands twice: the constructor of the sender does not let it out, so forge it.
    let frame = first_frame("message");
    let mut windows = frame.windows(5);
    let second = windows.position(|bytes| bytes == b"\x13deno").unwrap();
    let twice = forge(&frame, |frame| {
        frame[second + 1..second + 20].copy_from_slice(b"conditioning_embeds");
    });
    let refused = decode(&twice, 0);
    let by_manifest = matches!(
        refused,
        Err(BodyError::Manifest(ManifestError::Twice { .. }))
    );
    assert!(by_manifest, "{refused:?}");
}

// OM-09: what a cut overtook goes on without tensors, and no stage works on it.

#[test]
fn stale_message_has_neither_tensors_nor_reports_and_stays_so() {
    let stale = handed_on().overtaken();
    assert!(stale.is_stale() && stale.tensors().is_empty());
    assert_eq!(stale.trail().reports(), []);
    let worked = stale
        .clone()
        .hand_on(pipeline(), (2, 0), outputs(), &report(1));
    assert_eq!(worked.as_ref(), Ok(&stale));
    let accepted = stale.clone().accepted(pipeline(), &report(1), vec![7]);
    assert_eq!(accepted.as_ref(), Ok(&stale));
    // Every stage hands it on, and the sink, in every lap.
    for (maker, lap) in [(0, 0), (1, 0), (2, 3), (1, 3), (2, 0), (3, 0)] {
        let frame = frame_of(&stale, Stamp { lap, ..stamp(0) });
        let mut lockstep = Lockstep::with_laps(4);
        let matched = lockstep.admit(&frame).unwrap();
        let decoded = matched.message::<VideoPlan>(ring(), maker);
        assert_eq!(decoded.as_ref(), Ok(&stale));
    }

    // Any other message that only says it is stale is refused.
    for (name, maker) in [("message", 0), ("handed on", 1), ("accepted", 2)] {
        let frame = forge(&first_frame(name), |frame| *frame.last_mut().unwrap() = 1);
        let error = decode(&frame, maker).unwrap_err();
        let expected = matches!(error, BodyError::Plan(PlanError::Tensors { .. }))
            || error
                == BodyError::Trail(TrailError::Length {
                    expected: 0,
                    got: 2,
                });
        assert!(expected, "{name}: {error}");
    }
    // And one that is stale and says otherwise.
    let fresh = forge(&first_frame("stale"), |frame| {
        *frame.last_mut().unwrap() = 0
    });
    assert!(decode(&fresh, 1).is_err());
}

#[test]
fn acceptance_has_all_reports_and_no_tensors() {
    let accepted = decode(&first_frame("accepted"), 2).unwrap();
    assert_eq!(accepted.trail().reports().len(), 2);
    assert!(accepted.tensors().is_empty() && !accepted.is_stale());
    // A sink that sends tensors back has accepted nothing.
    let message = handed_on().hand_on(pipeline(), (2, 0), outputs(), &report(1));
    let refused = decode(&frame_of(&message.unwrap(), stamp(0)), 2);
    let by_plan = matches!(refused, Err(BodyError::Plan(PlanError::Tensors { .. })));
    assert!(by_plan, "{refused:?}");
}

#[test]
fn note_goes_all_the_way_and_has_a_bound() {
    let longest = vec![0xff; MAX_NOTE_BYTES];
    let noted = message().with_note(longest.clone()).unwrap();
    let noted = decode(&frame_of(&noted, stamp(0)), 0).unwrap();
    let noted = noted
        .hand_on(pipeline(), (1, 0), outputs(), &report(5))
        .unwrap();
    assert_eq!(noted.note(), longest);
    assert_eq!(noted.clone().overtaken().note(), longest);
    // The sink's note to the source takes its place.
    for note in [vec![], longest.clone()] {
        let accepted = noted.clone().accepted(pipeline(), &report(1), note.clone());
        let accepted = decode(&frame_of(&accepted.unwrap(), stamp(0)), 2).unwrap();
        assert_eq!(accepted.note(), note);
    }

    let over = [&longest[..], &[0]].concat();
    for refused in [
        message().with_note(over.clone()),
        noted.accepted(pipeline(), &report(1), over.clone()),
    ] {
        let error = refused.unwrap_err().to_string();
        assert_eq!(error, "note is 4097: at most 4096 bytes");
    }
    // The length, 0 in one byte, becomes 4097 in two.
    let forged = forge(&first_frame("message"), |frame| {
        let note = frame.len() - 2;
        frame.splice(note..=note, [0x81, 0x20].into_iter().chain(over));
        let body = (frame.len() - HEADER_BYTES) as u32;
        frame[48..52].copy_from_slice(&body.to_le_bytes());
    });
    let refused = decode(&forged, 0);
    assert!(
        matches!(refused, Err(BodyError::Malformed { .. })),
        "{refused:?}"
    );
}
