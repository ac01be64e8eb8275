//! A plan of another crate goes all the way, and a wrong one goes nowhere.

use pp_contract::{
    BodyError, CacheEpoch, CallId, ChunkIndex, Composer, Hello, HelloParts, Lockstep, Message,
    Pipeline, Plan, PlanError, Rank, Sequencer, Settings, StageReport, Stamp, Text, VideoPlan,
    WorldSize, compare,
};
use pp_example_contract::{PIPELINE, VocoderParts, VocoderPlan};

const PARTS: VocoderParts = VocoderParts {
    start_frame: 128,
    frames: 64,
    mel_bins: 80,
    hop: 256,
    passes: 3,
};

fn pipeline() -> Pipeline {
    PIPELINE.parse().unwrap()
}

/// What the source sends.
fn message() -> Message<VocoderPlan> {
    let plan = VocoderPlan::from_parts(PARTS).unwrap();
    let tensors = plan.mel().unwrap();
    Message::new(plan, &pipeline().stages()[0], tensors).unwrap()
}

fn first_stamp() -> Stamp {
    Stamp::new(ChunkIndex::new(0), CacheEpoch::new(0), CallId::new(0))
}

fn hello<P: Plan>(rank: u32) -> Hello {
    let (plan_name, plan_version) = HelloParts::plan::<P>();
    let parts = HelloParts {
        job: 1,
        rank: Rank::new(rank),
        world_size: WorldSize::new(2).unwrap(),
        plan_name,
        plan_version,
        settings: Settings::new(),
        device_settings: Settings::new(),
        chunks: None,
        host: Text::truncated("here"),
        device: None,
        device_given: None,
        device_named: false,
    };
    Hello::new(parts).unwrap()
}

#[test]
fn a_piece_goes_there_and_its_samples_come_back() {
    let pipeline = pipeline();
    // The source prepares, which may fail, and commits, which may not.
    let (mut composer, mut sequencer) = (Composer::new(), Sequencer::new());
    let prepared = composer.prepare(&message()).unwrap();
    assert_eq!(prepared.payload_bytes(), 64 * 80 * 4);
    let sent = prepared.commit(&mut sequencer, first_stamp());

    // Rank 1 admits, decodes, works, and hands on its samples with the ids that it was given.
    let mut lockstep = Lockstep::new();
    let matched = lockstep.admit(sent.frame()).unwrap();
    let received: Message<VocoderPlan> = matched.message(&pipeline, 0).unwrap();
    assert_eq!(received, message());
    let (samples, report) = (received.plan().samples().unwrap(), work(&received));
    let handed_on = received
        .hand_on(&pipeline, (1, 0), samples, &report)
        .unwrap();
    let (mut composer, mut sequencer) = (Composer::new(), Sequencer::new());
    let prepared = composer.prepare(&handed_on).unwrap();
    let sent = prepared.commit(&mut sequencer, Stamp::of(matched.header()));

    // The sink takes it: a payload of the right size, after the planned passes.
    let mut lockstep = Lockstep::new();
    let matched = lockstep.admit(sent.frame()).unwrap();
    assert_eq!(matched.header().payload_bytes(), 64 * 256 * 4);
    let received: Message<VocoderPlan> = matched.message(&pipeline, 1).unwrap();
    assert_eq!(received.trail().of(&pipeline, 1), [report]);
}

/// The report of `vocode`.
fn work(message: &Message<VocoderPlan>) -> StageReport {
    StageReport {
        calls: message.plan().parts().passes,
        start_frame: message.plan().start_frame(),
        work_us: 900,
        ..StageReport::default()
    }
}

#[test]
fn a_stage_that_skips_a_pass_is_named() {
    let pipeline = pipeline();
    let samples = message().plan().samples().unwrap();
    let lazy = StageReport {
        calls: 2,
        ..work(&message())
    };
    let handed_on = message()
        .hand_on(&pipeline, (1, 0), samples, &lazy)
        .unwrap();
    let mut composer = Composer::new();
    let prepared = composer.prepare(&handed_on).unwrap();
    let sent = prepared.commit(&mut Sequencer::new(), first_stamp());
    let mut lockstep = Lockstep::new();
    let matched = lockstep.admit(sent.frame()).unwrap();
    let Err(BodyError::Trail(error)) = matched.message::<VocoderPlan>(&pipeline, 1) else {
        panic!("a skipped pass is taken");
    };
    let text = "vocode on rank 1 made 2 calls, 3 were planned";
    assert_eq!(error.to_string(), text);
}

#[test]
fn another_plan_is_refused_at_the_handshake() {
    assert_eq!(
        compare(&hello::<VocoderPlan>(0), &hello::<VocoderPlan>(1)),
        Ok(())
    );
    let mismatch = compare(&hello::<VocoderPlan>(0), &hello::<VideoPlan>(1)).unwrap_err();
    assert_eq!(
        mismatch.to_string(),
        "plan differs: rank 0 has \"vocoder\", rank 1 has \"video\"; \
         start every rank with the same value"
    );
}

#[test]
fn a_peer_of_another_plan_does_not_decode_the_message() {
    let mut composer = Composer::new();
    let prepared = composer.prepare(&message()).unwrap();
    let sent = prepared.commit(&mut Sequencer::new(), first_stamp());
    let mut lockstep = Lockstep::new();
    let matched = lockstep.admit(sent.frame()).unwrap();
    let refused = matched.message::<VideoPlan>(&pipeline(), 0);
    assert!(
        matches!(refused, Err(BodyError::Malformed { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_plan_that_breaks_its_own_rules_is_refused() {
    let error = VocoderPlan::from_parts(VocoderParts { hop: 0, ..PARTS }).unwrap_err();
    assert_eq!(error.to_string(), "hop is 0: 1 to 1024");

    let plan = VocoderPlan::from_parts(PARTS).unwrap();
    let (pipeline, samples) = (pipeline(), plan.samples().unwrap());
    let swapped = Message::new(plan, &pipeline.stages()[0], samples);
    assert!(matches!(swapped, Err(PlanError::Tensors { .. })));
}
