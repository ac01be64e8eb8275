//! What is found, and whom it blames, on payloads that are bytes.

use pp_contract::{DType, TensorSpec, VideoPlan, VideoPlanParts};

use super::*;

const FRONT: Rank = Rank::new(0);
const PHASE_B: Rank = Rank::new(1);

/// A digester whose tickets are known at once, or, as on a device, only later.
struct Paper<const AT_ONCE: bool>;

impl<const AT_ONCE: bool> Digester for Paper<AT_ONCE> {
    type Tx = Vec<u8>;
    type Rx = Vec<u8>;
    type Ticket = DigestPair;

    const AT_ONCE: bool = AT_ONCE;

    fn prepare(&mut self, _: u64, _: usize) -> Result<(), StageError> {
        Ok(())
    }

    fn seal(&mut self, manifest: &Manifest, slot: &mut Vec<u8>) -> Result<DigestPair, StageError> {
        let computed = manifest.seal(slot).unwrap();
        Ok(DigestPair {
            stated: computed,
            computed,
            cost_ns: 1000,
        })
    }

    fn examine(
        &mut self,
        manifest: &Manifest,
        payload: Option<&Vec<u8>>,
    ) -> Result<DigestPair, StageError> {
        let payload = payload.unwrap();
        Ok(DigestPair {
            stated: manifest.stated(payload).unwrap(),
            computed: Digests::of(&manifest.unsealed(), payload).unwrap(),
            cost_ns: 1000,
        })
    }

    fn is_there(&self, _: &DigestPair) -> Result<bool, StageError> {
        Ok(true)
    }

    fn read(&mut self, ticket: DigestPair) -> Result<DigestPair, StageError> {
        Ok(ticket)
    }

    fn drop_unread(&mut self, _: DigestPair) {}
}

fn envelope() -> Envelope<VideoPlan> {
    let plan = VideoPlan::new(VideoPlanParts::first(16, 16, 1));
    let spec = |name, dtype, dims: &[u64]| TensorSpec::new(name, dtype, dims).unwrap();
    let inputs = Manifest::new(&[
        spec("latents_in", DType::Bf16, &[300]),
        spec("conditioning_embeds", DType::Bf16, &[3]),
        spec("denoising_step_list", DType::I64, &[1]),
    ]);
    let outputs = Manifest::new(&[spec("latents_out", DType::Bf16, &[300])]);
    let sealed = |of: Result<Manifest, _>| of.and_then(|of: Manifest| of.sealed()).unwrap();
    Envelope::new(plan.unwrap(), sealed(inputs), sealed(outputs)).unwrap()
}

const CHUNK: ChunkIndex = ChunkIndex::new(7);

/// One chunk through both ranks, with changes on the way there, by the stage to its input, and on the way back.
fn chunk<const AT_ONCE: bool>(
    up: impl FnOnce(&mut [u8]),
    stage: impl FnOnce(&mut [u8]),
    down: impl FnOnce(&mut [u8]),
) -> Result<Log, StageError> {
    let mut digester = Paper::<AT_ONCE>;
    let every = Verify::Every(std::num::NonZeroU64::MIN);
    let mut verifier = FrontVerifier::new(every, PHASE_B);
    let envelope = envelope();
    let payload = |of: &Manifest| -> Vec<u8> { (0..of.payload_bytes()).map(|i| i as u8).collect() };
    let mut input = payload(envelope.inputs());
    let mut check = Some(FrontCheck::seal(
        &mut digester,
        CHUNK,
        envelope.inputs(),
        &mut input,
    )?);
    up(&mut input);

    let mut phase_b =
        PhaseBCheck::begin(&mut digester, CHUNK, &envelope, Some(&input), FRONT)?.unwrap();
    stage(&mut input);
    let mut output = payload(envelope.outputs());
    phase_b.end(&mut digester, &envelope, Some(&input), &mut output)?;
    assert!(phase_b.is_there(&digester)?);
    let seal = phase_b.conclude(&mut digester)?;
    assert_eq!(seal.map(|seal| seal.cost_us), Some(3));

    down(&mut output);
    let outcome = Outcome {
        observed_calls: 1,
        phase_b_us: 0,
        idle_us: 0,
        start_frame: 0,
        seal,
        outputs: envelope.outputs().clone(),
    };
    verifier.examine(&mut digester, &mut check, &outcome, Some(&output))?;
    verifier.conclude(&mut digester, &mut check)?;
    Ok(verifier.log)
}

fn nothing(_: &mut [u8]) {}

#[test]
fn what_changes_is_named_with_its_chunk_and_the_rank_that_the_evidence_is_against() {
    // A tensor of the inputs begins at 768, and the seal of the outputs does.
    type Case = (
        fn(&mut [u8]),
        fn(&mut [u8]),
        fn(&mut [u8]),
        Option<Rank>,
        &'static str,
    );
    let cases: [Case; 5] = [
        (
            |b| b[0] ^= 1,
            nothing,
            nothing,
            Some(FRONT),
            "tensor latents_in",
        ),
        (
            |b| b[768] ^= 1,
            nothing,
            nothing,
            Some(FRONT),
            "tensor conditioning_embeds",
        ),
        (nothing, |b| b[599] ^= 1, nothing, None, "tensor latents_in"),
        (
            nothing,
            nothing,
            |b| b[5] ^= 1,
            Some(PHASE_B),
            "tensor latents_out",
        ),
        (
            nothing,
            nothing,
            |b| b[768] ^= 1,
            Some(PHASE_B),
            "tensor digests",
        ),
    ];
    for (up, stage, down, blames, tensor) in cases {
        for found in [
            chunk::<true>(up, stage, down),
            chunk::<false>(up, stage, down),
        ] {
            let error = found.map(|_| ()).unwrap_err();
            assert_eq!(error.kind, FaultKind::Drift, "{error}");
            assert_eq!(error.blames, blames, "{error}");
            let named = error.detail.contains(tensor) && error.detail.contains("chunk 7");
            assert!(named, "{error}");
        }
    }
}

#[test]
fn what_does_not_change_is_in_the_report() {
    for log in [
        chunk::<true>(nothing, nothing, nothing),
        // Between the tensors and behind the seal nothing counts.
        chunk::<false>(|b| b[700] ^= 1, nothing, nothing),
    ] {
        let log = log.unwrap();
        let report = serde_json::to_value(log.report(Verify::Off)).unwrap();
        assert_eq!(report["chunks_verified"], 1);
        let line = &report["chunks"][0];
        assert_eq!(
            (line["chunk"].as_u64(), line["front_ms"].as_f64()),
            (Some(7), Some(0.002))
        );
        assert_eq!(line["inputs"].as_object().unwrap().len(), 3);
        assert!(line["outputs"]["latents_out"].is_string(), "{line}");
    }
}

#[test]
fn phase_b_refuses_a_chunk_that_lacks_its_digests() {
    let every = Verify::Every(std::num::NonZeroU64::new(7).unwrap());
    let sealed = envelope();
    let plain = Envelope::new(
        *sealed.plan(),
        sealed.inputs().unsealed(),
        sealed.outputs().unsealed(),
    );
    let plain = plain.unwrap();
    assert_eq!(check_due(every, CHUNK, &sealed, FRONT), Ok(()));
    assert_eq!(check_due(every, ChunkIndex::new(8), &plain, FRONT), Ok(()));
    for (chunk, envelope) in [(CHUNK, &plain), (ChunkIndex::new(8), &sealed)] {
        let error = check_due(every, chunk, envelope, FRONT).unwrap_err();
        assert_eq!(error.blames, Some(FRONT), "{error}");
    }
}
