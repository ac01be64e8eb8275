//! A plan of another crate goes all the way, and a wrong one goes nowhere.

use pp_contract::{
    BodyError, CacheEpoch, ChunkIndex, Composer, Expectation, Hello, HelloParts, Lockstep,
    Manifest, Outcome, Plan, PlanError, Rank, Sequencer, Settings, Stamp, Text, Verdict, VideoPlan,
    WorldSize, compare,
};
use pp_example_contract::{VocoderEnvelope, VocoderParts, VocoderPlan};

const PARTS: VocoderParts = VocoderParts {
    start_frame: 128,
    frames: 64,
    mel_bins: 80,
    hop: 256,
    passes: 3,
};

fn envelope() -> VocoderEnvelope {
    let plan = VocoderPlan::from_parts(PARTS).unwrap();
    let (inputs, outputs) = plan.manifests().unwrap();
    VocoderEnvelope::new(plan, inputs, outputs).unwrap()
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
        chunks: None,
        host: Text::truncated("here"),
        device: None,
        device_given: None,
        kernels: Text::truncated("vocoder 1.0"),
        kernels_digest: 0,
    };
    Hello::new(parts).unwrap()
}

#[test]
fn a_piece_goes_there_and_its_result_comes_back() {
    // The front prepares, which may fail, and commits, which may not.
    let epoch = CacheEpoch::new(0);
    let asked = envelope();
    let mut front = (Composer::new(), Sequencer::new(), Lockstep::replies());
    let prepared = front.0.prepare_envelope(&asked).unwrap();
    assert_eq!(prepared.payload_bytes(), 64 * 80 * 4);
    let sent = prepared.commit(&mut front.1, Stamp::fresh(ChunkIndex::new(0), epoch));
    front.2.expect(sent.header());
    let expectation = Expectation::of(sent.header(), &asked);

    // Phase B admits, decodes, works, and answers with the ids that it was given.
    let mut phase_b = (Composer::new(), Sequencer::new(), Lockstep::requests());
    let matched = phase_b.2.admit(sent.frame()).unwrap();
    let received: VocoderEnvelope = matched.envelope().unwrap();
    assert_eq!(received, asked);
    let outcome = Outcome {
        observed_calls: received.plan().parts().passes,
        phase_b_us: 900,
        idle_us: 10,
        start_frame: received.plan().start_frame(),
        seal: None,
        outputs: received.outputs().clone(),
    };
    let prepared = phase_b.0.prepare_outcome(&outcome).unwrap();
    let answer = prepared.commit(&mut phase_b.1, Stamp::echo(matched.header()));

    // The front takes it, and would not take it after a cut.
    let matched = front.2.admit(answer.frame()).unwrap();
    assert_eq!(matched.header().payload_bytes(), 64 * 256 * 4);
    let outcome = matched.outcome().unwrap();
    let judge = |epoch| expectation.judge(matched.header(), &outcome, epoch);
    assert_eq!(judge(epoch), Ok(Verdict::Accept));
    assert_eq!(judge(CacheEpoch::new(1)), Ok(Verdict::Stale));
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
fn a_peer_of_another_plan_does_not_decode_the_envelope() {
    let mut composer = Composer::new();
    let prepared = composer.prepare_envelope(&envelope()).unwrap();
    let stamp = Stamp::fresh(ChunkIndex::new(0), CacheEpoch::new(0));
    let sent = prepared.commit(&mut Sequencer::new(), stamp);
    let mut lockstep = Lockstep::requests();
    let refused = lockstep
        .admit(sent.frame())
        .unwrap()
        .envelope::<VideoPlan>();
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
    let (inputs, outputs) = plan.manifests().unwrap();
    let swapped = VocoderEnvelope::new(plan, outputs, inputs.clone());
    assert!(matches!(swapped, Err(PlanError::Tensors { .. })));
    let nothing_back = VocoderEnvelope::new(plan, inputs, Manifest::empty());
    assert!(nothing_back.is_err());
}
