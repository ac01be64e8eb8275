//! Exact bytes, written by hand from docs/wire-format.md: the format does not drift.

mod support;

use pp_contract::*;
use support::*;

/// The bytes of a hex file; `#` begins a comment.
fn golden(text: &str) -> Vec<u8> {
    let codes = text
        .lines()
        .flat_map(|line| line.split('#').next().unwrap().split_whitespace());
    codes
        .map(|code| u8::from_str_radix(code, 16).unwrap())
        .collect()
}

/// A sequencer that has given out `calls` calls and `payloads` payloads.
fn sequencer(calls: u64, payloads: u64) -> Sequencer {
    let mut sequencer = Sequencer::new();
    let mut composer = Composer::new();
    for call in 0..calls {
        let _ = if call < payloads {
            let prepared = composer.prepare_envelope(&envelope()).unwrap();
            prepared.commit(&mut sequencer, fresh(0, 0))
        } else {
            composer
                .prepare_bare(Bare::Noop)
                .commit(&mut sequencer, fresh(0, 0))
        };
    }
    sequencer
}

#[test]
fn noop_is_as_written_by_hand() {
    let bytes = golden(include_str!("data/noop.hex"));
    let mut composer = Composer::new();
    let sent = composer
        .prepare_bare(Bare::Noop)
        .commit(&mut Sequencer::new(), fresh(0, 0));
    assert_eq!(sent.frame(), bytes);

    let header = Header::decode(bytes.first_chunk().unwrap()).unwrap();
    assert_eq!(header.action(), Action::Noop);
    assert_eq!(header.body_kind(), BodyKind::None);
    assert_eq!(header.edge_seq(), None);
    assert_eq!((header.payload_bytes(), header.body_bytes()), (0, 0));
}

#[test]
fn shutdown_is_as_written_by_hand() {
    let bytes = golden(include_str!("data/shutdown.hex"));
    let mut composer = Composer::new();
    let sent = composer
        .prepare_bare(Bare::Shutdown)
        .commit(&mut sequencer(258, 0), fresh(41, 3));
    assert_eq!(sent.frame(), bytes);

    let header = Header::decode(bytes.first_chunk().unwrap()).unwrap();
    assert_eq!(header.action(), Action::Shutdown);
    assert_eq!(header.call_id().get(), 258);
    assert_eq!(header.chunk_index().get(), 41);
    assert_eq!(header.cache_epoch().get(), 3);
}

#[test]
fn envelope_is_as_written_by_hand() {
    let bytes = golden(include_str!("data/infer_envelope.hex"));
    let mut composer = Composer::new();
    let prepared = composer.prepare_envelope(&envelope()).unwrap();
    assert_eq!(prepared.payload_bytes(), 3_041_536);
    assert_eq!(
        prepared.commit(&mut sequencer(7, 2), fresh(3, 1)).frame(),
        bytes
    );

    let header = Header::decode(bytes.first_chunk().unwrap()).unwrap();
    assert_eq!(header.action(), Action::Infer);
    assert_eq!(header.body_kind(), BodyKind::Envelope);
    assert_eq!(header.edge_seq().map(EdgeSeq::get), Some(2));
    assert_eq!(
        (header.payload_bytes(), header.body_bytes()),
        (3_041_536, 129)
    );

    // The first frame of an edge carries edge_seq 0; nothing else in this one is relative.
    let first = forge(&bytes, |frame| frame[32] = 0);
    let mut lockstep = Lockstep::requests();
    let decoded = lockstep
        .admit(&first)
        .unwrap()
        .envelope::<VideoPlan>()
        .unwrap();
    assert_eq!(decoded.plan().parts(), &plan_parts());
    let layout: Vec<_> = decoded
        .inputs()
        .iter()
        .map(|(at, spec)| (at, spec.to_string()))
        .collect();
    let expected = [
        (0, "latents_in bf16 [4, 1584, 192]"),
        (2_433_024, "conditioning_embeds bf16 [0]"),
        (2_433_024, "denoising_step_list i64 [4]"),
        (2_433_280, "context_frames bf16 [1, 1584, 192]"),
    ];
    assert_eq!(layout, expected.map(|(at, spec)| (at, spec.to_owned())));
    assert_eq!(decoded.outputs(), &outputs());
}

#[test]
fn result_is_as_written_by_hand() {
    let bytes = golden(include_str!("data/infer_result.hex"));
    let mut composer = Composer::new();
    let prepared = composer.prepare_outcome(&outcome()).unwrap();
    assert_eq!(
        prepared
            .commit(&mut Sequencer::new(), echo(7, 3, 1))
            .frame(),
        bytes
    );

    let mut lockstep = Lockstep::replies();
    let call = golden(include_str!("data/infer_envelope.hex"));
    lockstep.expect(&Header::decode(call.first_chunk().unwrap()).unwrap());
    let matched = lockstep.admit(&bytes).unwrap();
    assert_eq!(matched.header().payload_bytes(), 2_433_024);
    let decoded = matched.outcome().unwrap();
    assert_eq!((decoded.observed_calls, decoded.start_frame), (5, 16));
    assert_eq!((decoded.phase_b_us, decoded.idle_us), (15_000, 0));
    assert_eq!(decoded.seal, outcome().seal);
    assert_eq!(decoded.outputs, outputs());
}

#[test]
fn failure_is_as_written_by_hand() {
    let bytes = golden(include_str!("data/error_failure.hex"));
    let mut composer = Composer::new();
    let prepared = composer.prepare_failure(&failure()).unwrap();
    assert_eq!(
        prepared
            .commit(&mut Sequencer::new(), echo(7, 3, 1))
            .frame(),
        bytes
    );

    let decoded = Lockstep::requests()
        .admit(&bytes)
        .unwrap()
        .failure()
        .unwrap();
    assert_eq!(
        decoded.to_string(),
        "compute failed (phase B to blame): out of memory"
    );
}

#[test]
fn hello_is_as_written_by_hand() {
    let bytes = golden(include_str!("data/hello.hex"));
    assert_eq!(hello(1).encode().unwrap(), bytes);
    assert_eq!(Hello::decode(&bytes).unwrap(), hello(1));
}

#[test]
fn fault_is_as_written_by_hand() {
    let bytes = golden(include_str!("data/fault.hex"));
    assert_eq!(fault().encode().unwrap(), bytes);
    let decoded = Fault::decode(&bytes).unwrap();
    assert_eq!(
        decoded.to_string(),
        "peer died: rank 1: receive: socket closed"
    );
}
