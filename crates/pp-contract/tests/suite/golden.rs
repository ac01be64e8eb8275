//! Exact bytes, written by hand from docs/wire-format.md: the format does not drift.

use pp_contract::*;

use crate::support::*;

/// The bytes of a hex file; `#` begins a comment.
fn golden(text: &str) -> Vec<u8> {
    let codes = text
        .lines()
        .flat_map(|line| line.split('#').next().unwrap().split_whitespace());
    codes
        .map(|code| u8::from_str_radix(code, 16).unwrap())
        .collect()
}

/// The stamp of call 7.
fn call_7() -> Stamp {
    Stamp::new(ChunkIndex::new(3), CacheEpoch::new(1), CallId::new(7))
}

#[test]
fn noop_is_as_written_by_hand() {
    let bytes = golden(include_str!("../data/noop.hex"));
    assert_eq!(bare_frame(Bare::Noop, stamp(0)), bytes);

    let header = Header::decode(bytes.first_chunk().unwrap()).unwrap();
    assert_eq!(header.action(), Action::Noop);
    assert_eq!(header.edge_seq(), None);
    assert_eq!((header.payload_bytes(), header.body_bytes()), (0, 0));
}

#[test]
fn shutdown_is_as_written_by_hand() {
    let bytes = golden(include_str!("../data/shutdown.hex"));
    let mut stamp = Stamp::new(ChunkIndex::new(41), CacheEpoch::new(3), CallId::new(258));
    stamp.attempt = 1;
    assert_eq!(bare_frame(Bare::Shutdown, stamp), bytes);

    let header = Header::decode(bytes.first_chunk().unwrap()).unwrap();
    assert_eq!(header.action(), Action::Shutdown);
    assert_eq!(Stamp::of(&header), stamp);
}

#[test]
fn message_of_the_source_is_as_written_by_hand() {
    let bytes = golden(include_str!("../data/message.hex"));
    let (mut composer, mut sequencer) = (Composer::new(), Sequencer::new());
    for _ in 0..2 {
        let prepared = composer.prepare(&message()).unwrap();
        let _ = prepared.commit(&mut sequencer, stamp(0));
    }
    let prepared = composer.prepare(&message()).unwrap();
    assert_eq!(prepared.payload_bytes(), 3_041_536);
    assert_eq!(prepared.commit(&mut sequencer, call_7()).frame(), bytes);

    let header = Header::decode(bytes.first_chunk().unwrap()).unwrap();
    assert_eq!(header.action(), Action::Infer);
    assert_eq!(header.edge_seq().map(EdgeSeq::get), Some(2));
    assert_eq!(header.payload_bytes(), 3_041_536);
    assert_eq!(header.body_bytes(), 121);

    // The first payload of an edge is number 0; nothing else in this one is relative.
    let decoded = decode(&forge(&bytes, |frame| frame[32] = 0), 0).unwrap();
    assert_eq!(decoded.plan().parts(), &plan_parts());
    let tensors = decoded.tensors().iter();
    let layout: Vec<_> = tensors.map(|(at, spec)| (at, spec.to_string())).collect();
    let expected = [
        (0, "latents_in bf16 [4, 1584, 192]"),
        (2_433_024, "conditioning_embeds bf16 [0]"),
        (2_433_024, "denoising_step_list i64 [4]"),
        (2_433_280, "context_frames bf16 [1, 1584, 192]"),
    ];
    assert_eq!(layout, expected.map(|(at, spec)| (at, spec.to_owned())));
    assert_eq!(decoded.trail().reports(), []);
    assert!(decoded.note().is_empty() && !decoded.is_stale());
}

#[test]
fn message_in_the_last_lap_of_a_ring_is_as_written_by_hand() {
    let bytes = golden(include_str!("../data/lap.hex"));
    let report = |calls, work_us, idle_us, seal| StageReport {
        calls,
        start_frame: 16,
        work_us,
        idle_us,
        seal,
    };
    let (digest, cost_us) = (300, 1);
    let seal = Some(Seal { digest, cost_us });
    let mut message = message().with_note(b"cut".to_vec()).unwrap();
    let hand_on = |message: Message<VideoPlan>, at, tensors: Manifest, report| {
        message.hand_on(ring(), at, tensors, &report).unwrap()
    };
    let mut guided: Vec<_> = inputs().iter().map(|(_, spec)| *spec).collect();
    guided.push(tensor("guide", DType::F32, &[4, 1584, 192]));
    let guided = Manifest::new(&guided).unwrap();
    for lap in 0..3 {
        let (made, of_b) = (guided.clone(), report(2, 4000, 0, None));
        message = hand_on(message, (1, lap), made, of_b);
        let (made, of_guide) = (guided.clone(), report(2, 2, 100, None));
        message = hand_on(message, (2, lap), made, of_guide);
    }
    let made = outputs().sealed().unwrap();
    message = hand_on(message, (1, 3), made, report(2, 3000, 0, seal));
    let stamp = Stamp {
        attempt: 513,
        lap: 3,
        ..call_7()
    };
    assert_eq!(frame_of(&message, stamp), bytes);

    let mut lockstep = Lockstep::with_laps(4);
    let matched = lockstep.admit(&bytes).unwrap();
    assert_eq!(Stamp::of(matched.header()), stamp);
    let decoded = matched.message::<VideoPlan>(ring(), 1).unwrap();
    assert_eq!(decoded.note(), b"cut");
    assert_eq!(decoded.tensors(), &outputs().sealed().unwrap());
    let reports = [report(8, 15_000, 0, seal), report(6, 6, 300, None)];
    assert_eq!(decoded.trail().reports(), reports);
}

#[test]
fn acceptance_is_as_written_by_hand() {
    let bytes = golden(include_str!("../data/accepted.hex"));
    assert_eq!(frame_of(&accepted(), call_7()), bytes);
    let decoded = decode(&bytes, 2).unwrap();
    assert_eq!(decoded.trail().of(pipeline(), 1), [report(5)]);
    assert_eq!(decoded.trail().of(pipeline(), 2)[0].work_us, 128);
    assert_eq!(decoded, accepted());
}

#[test]
fn hello_is_as_written_by_hand() {
    let bytes = golden(include_str!("../data/hello.hex"));
    assert_eq!(hello(1).encode().unwrap(), bytes);
    assert_eq!(Hello::decode(&bytes).unwrap(), hello(1));
}

#[test]
fn fault_is_as_written_by_hand() {
    let bytes = golden(include_str!("../data/fault.hex"));
    assert_eq!(fault().encode().unwrap(), bytes);
    let decoded = Fault::decode(&bytes).unwrap();
    assert_eq!(
        decoded.to_string(),
        "peer died: rank 1: receive: socket closed"
    );
    assert_eq!(decoded.below(), "at byte 3");
}
