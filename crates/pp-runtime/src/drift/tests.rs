//! What is found, and whom it blames, on payloads that are bytes.

use pp_contract::{CacheEpoch, DType, StageReport, TensorSpec, VideoPlan, VideoPlanParts};

use super::*;

const SOURCE: Rank = Rank::new(0);
const PHASE_B: Rank = Rank::new(1);
const CHUNK: ChunkIndex = ChunkIndex::new(7);

/// A digester whose tickets are known at once, or, as on a device, only later.
struct Paper<const AT_ONCE: bool>;

impl<const AT_ONCE: bool> Digester for Paper<AT_ONCE> {
    type Tx = Vec<u8>;
    type Rx = Vec<u8>;
    type Ticket = DigestPair;

    const AT_ONCE: bool = AT_ONCE;

    fn prepare(&mut self, _: u64, _: usize) -> StageResult<()> {
        Ok(())
    }

    fn seal(&mut self, manifest: &Manifest, slot: &mut Vec<u8>) -> StageResult<DigestPair> {
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
    ) -> StageResult<DigestPair> {
        let payload = payload.unwrap();
        Ok(DigestPair {
            stated: manifest.stated(payload).unwrap(),
            computed: Digests::of(&manifest.unsealed(), payload).unwrap(),
            cost_ns: 1000,
        })
    }

    fn is_there(&self, _: &DigestPair) -> StageResult<bool> {
        Ok(true)
    }

    fn read(&mut self, ticket: DigestPair) -> StageResult<DigestPair> {
        Ok(ticket)
    }

    fn drop_unread(&mut self, _: DigestPair) {}
}

fn pipeline() -> Pipeline {
    "encode@0,phase_b@1,decode@2".parse().unwrap()
}

fn every(chunks: u64) -> Verify {
    Verify::Every(std::num::NonZeroU64::new(chunks).unwrap())
}

fn spec(name: &str, dtype: DType, dims: &[u64]) -> TensorSpec {
    TensorSpec::new(name, dtype, dims).unwrap()
}

fn encoded() -> Manifest {
    Manifest::new(&[
        spec("latents_in", DType::Bf16, &[300]),
        spec("conditioning_embeds", DType::Bf16, &[3]),
        spec("denoising_step_list", DType::I64, &[1]),
    ])
    .unwrap()
}

fn message(tensors: Manifest) -> Message<VideoPlan> {
    let plan = VideoPlan::new(VideoPlanParts::first(16, 16, 1)).unwrap();
    Message::new(plan, &pipeline().stages()[0], tensors).unwrap()
}

fn chunk_of(message: &Message<VideoPlan>, chunk: ChunkIndex) -> Chunk<'_, VideoPlan> {
    let place = Place {
        chunk,
        epoch: CacheEpoch::new(0),
        lap: 0,
        starts_epoch: true,
        rebuilds: false,
        steps: None,
    };
    Chunk {
        place,
        message,
        waited_ns: 0,
        puts_off: false,
    }
}

/// Where the bytes of a payload change.
#[derive(Clone, Copy, PartialEq)]
enum At {
    ToMiddle,
    InMiddle,
    ToSink,
    InSink,
}

/// One chunk through three ranks, of which a byte changes somewhere; `None`: none does.
fn chunk<const AT_ONCE: bool>(change: Option<(At, usize)>) -> StageResult<Log> {
    let mut digester = Paper::<AT_ONCE>;
    let pipeline = pipeline();
    let [source, phase_b, sink] = [0, 1, 2].map(|at| Verifier::new(every(7), &pipeline, at));
    let payload = |of: &Manifest| -> Vec<u8> { (0..of.payload_bytes()).map(|i| i as u8).collect() };
    let changed = |at: At, bytes: &mut [u8]| match change {
        Some((there, byte)) if there == at => bytes[byte] ^= 1,
        _ => {}
    };
    let inputs = source.sealed(&encoded())?.unwrap();
    let mut input = payload(&inputs);
    let sealed = source.seal(&mut digester, CHUNK, &inputs, &mut input)?;
    changed(At::ToMiddle, &mut input);

    let message = message(inputs);
    let chunk = chunk_of(&message, CHUNK);
    let mut check = phase_b.begin(&mut digester, chunk, Some(&input))?.unwrap();
    changed(At::InMiddle, &mut input);
    let outputs = Manifest::new(&[spec("latents_out", DType::Bf16, &[300])]).unwrap();
    let outputs = phase_b.sealed(&outputs)?.unwrap();
    let mut output = payload(&outputs);
    let made = Some((&outputs, &mut output));
    phase_b.end(&mut digester, &mut check, Some(&input), made)?;
    assert!(phase_b.is_there(&digester, &check)?);
    let seal = phase_b.conclude(&mut digester, check)?;
    assert_eq!(seal.cost_us, 3);
    changed(At::ToSink, &mut output);

    let report = StageReport {
        calls: 1,
        seal: Some(seal),
        ..StageReport::default()
    };
    let message = message
        .hand_on(&pipeline, (1, 0), outputs, &report)
        .unwrap();
    let chunk = chunk_of(&message, CHUNK);
    let mut check = sink.begin(&mut digester, chunk, Some(&output))?.unwrap();
    changed(At::InSink, &mut output);
    sink.end(&mut digester, &mut check, Some(&output), None)?;
    let got = sink.conclude(&mut digester, check)?;
    assert_eq!((got.digest, got.cost_us), (seal.digest, 2));

    let mut log = Log::new(every(7), &pipeline);
    log.note(&mut digester, sealed, &[seal, got])?;
    Ok(log)
}

#[test]
fn what_changes_is_named_with_its_chunk_and_the_rank_that_the_evidence_is_against() {
    // The second tensor of the inputs begins at 768, and the seal of the outputs does.
    for (at, byte, blames, tensor) in [
        (At::ToMiddle, 0, Some(SOURCE), "latents_in"),
        (At::ToMiddle, 768, Some(SOURCE), "conditioning_embeds"),
        (At::InMiddle, 599, None, "latents_in"),
        (At::ToSink, 5, Some(PHASE_B), "latents_out"),
        (At::ToSink, 768, Some(PHASE_B), "digests"),
        (At::InSink, 5, None, "latents_out"),
    ] {
        let change = Some((at, byte));
        for found in [chunk::<true>(change), chunk::<false>(change)] {
            let error = found.map(|_| ()).unwrap_err();
            assert_eq!(error.kind, FaultKind::Drift, "{error}");
            assert_eq!(error.blames, blames, "{error}");
            let words = format!("chunk 7: tensor {tensor}: ");
            assert!(error.detail.starts_with(&words), "{error}");
        }
    }
}

#[test]
fn what_does_not_change_is_in_the_report() {
    for log in [
        chunk::<true>(None),
        // Between the tensors nothing counts.
        chunk::<false>(Some((At::ToMiddle, 700))),
    ] {
        let log = log.unwrap();
        let report = serde_json::to_value(log.verified()).unwrap();
        assert_eq!(report["chunks_verified"], 1);
        let stages = report["stages"].as_array().unwrap();
        let stages: Vec<_> = stages
            .iter()
            .map(|s| (s["stage"].as_str(), s["rank"].as_u64(), s["ms"].as_f64()))
            .collect();
        let expected = [
            ("encode", 0, 0.001),
            ("phase_b", 1, 0.003),
            ("decode", 2, 0.002),
        ];
        assert_eq!(
            stages,
            expected.map(|(s, r, ms)| (Some(s), Some(r), Some(ms)))
        );
        let line = &report["chunks"][0];
        assert_eq!(line["chunk"], 7);
        assert_eq!(line["source"].as_object().unwrap().len(), 3);
        assert_eq!(line["seals"].as_array().unwrap().len(), 1);
    }
    assert!(Log::new(Verify::Off, &pipeline()).verified().is_none());
}

#[test]
fn chunk_that_lacks_its_digests_or_has_too_many_is_refused() {
    let verifier = Verifier::new(every(7), &pipeline(), 1);
    let (plain, sealed) = (message(encoded()), message(encoded().sealed().unwrap()));
    let payload = vec![0; sealed.tensors().payload_bytes() as usize];
    let begin = |chunk, message| {
        let chunk = chunk_of(message, ChunkIndex::new(chunk));
        verifier.begin(&mut Paper::<false>, chunk, Some(&payload))
    };
    assert!(begin(7, &sealed).unwrap().is_some() && begin(8, &plain).unwrap().is_none());
    for (chunk, message, words) in [
        (7, &plain, "chunk 7 has no digests from encode on rank 0"),
        (8, &sealed, "chunk 8 has digests from encode on rank 0"),
    ] {
        let error = begin(chunk, message).unwrap_err();
        assert_eq!(error.blames, Some(SOURCE), "{error}");
        assert!(error.detail.contains(words), "{error}");
    }
}

#[test]
fn last_part_of_a_stage_makes_what_the_whole_stage_makes() {
    let pipeline: Pipeline = "encode@0,phase_b@1,phase_b@2,decode@0".parse().unwrap();
    let labels: Vec<_> = pipeline.stages().iter().map(label).collect();
    assert_eq!(
        labels,
        ["encode", "phase_b part 1 of 2", "phase_b", "decode"]
    );
}
