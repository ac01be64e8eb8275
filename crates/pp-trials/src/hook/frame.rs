//! Frames as bytes, by the layout of docs/wire-format.md.

use pp_contract::{
    CacheEpoch, ChunkIndex, Composer, Envelope, HEADER_BYTES, Header, Lockstep, Manifest, Outcome,
    Plan, Prepared, Sequencer, Stamp, TensorSpec,
};

use super::plan::{AnyPlan, unchecked};

/// Where the fields lie that are altered here.
pub(super) const VERSION: usize = 4;
const ACTION: usize = 6;
const CHUNK_INDEX: usize = 16;
const EDGE_SEQ: usize = 32;
pub(super) const PAYLOAD_BYTES: usize = 40;
pub(super) const BODY_LEN: usize = 48;
const BODY_CRC32: usize = 52;
const HEADER_CRC32: usize = 60;

const INFER: u8 = 1;

/// The chunk of an INFER.
pub(super) fn chunk_of(frame: &[u8]) -> Option<u64> {
    let is_infer = *frame.get(ACTION)? == INFER;
    is_infer.then(|| get(frame, CHUNK_INDEX))
}

pub(super) fn get(frame: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&frame[at..at + 8]);
    u64::from_le_bytes(bytes)
}

pub(super) fn put(frame: &mut [u8], at: usize, bytes: &[u8]) {
    frame[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Makes the checksum of the header right.
pub(super) fn seal(frame: &mut [u8]) {
    let crc = crc32fast::hash(&frame[..HEADER_CRC32]);
    put(frame, HEADER_CRC32, &crc.to_le_bytes());
}

/// The given frame with another body, and all that the header says of a body.
fn with_body(frame: &[u8], body: &[u8]) -> Vec<u8> {
    let mut new = frame[..HEADER_BYTES].to_vec();
    new.extend_from_slice(body);
    put(&mut new, BODY_LEN, &(body.len() as u32).to_le_bytes());
    put(&mut new, BODY_CRC32, &crc32fast::hash(body).to_le_bytes());
    seal(&mut new);
    new
}

/// The given frame as the first of its edge, which is always admitted.
fn as_first(frame: &[u8]) -> Vec<u8> {
    let mut first = frame.to_vec();
    if get(frame, PAYLOAD_BYTES) > 0 {
        put(&mut first, EDGE_SEQ, &0u64.to_le_bytes());
        seal(&mut first);
    }
    first
}

/// Alters the envelope of a frame, and lets the header announce what the envelope then describes;
/// or leaves the header as it was.
pub(super) fn with_envelope(
    frame: &[u8],
    announce: bool,
    alter: impl FnOnce(Envelope<AnyPlan>) -> Envelope<AnyPlan>,
) -> Option<Vec<u8>> {
    let first = as_first(frame);
    let mut lockstep = Lockstep::requests();
    let envelope = alter(lockstep.admit(&first).ok()?.envelope().ok()?);
    let bytes = announce.then(|| envelope.inputs().payload_bytes());
    let mut composer = Composer::new();
    let prepared = composer.prepare_envelope(&envelope).ok()?;
    Some(with_message(frame, bytes, prepared))
}

/// Alters the outcome of a frame, and lets the header announce what the outcome then describes; or
/// leaves the header as it was.
pub(super) fn with_outcome(
    frame: &[u8],
    announce: bool,
    alter: impl FnOnce(Outcome) -> Outcome,
) -> Option<Vec<u8>> {
    let first = as_first(frame);
    let (header, _) = first.split_first_chunk()?;
    let mut lockstep = Lockstep::replies();
    lockstep.expect(&Header::decode(header).ok()?);
    let outcome = alter(lockstep.admit(&first).ok()?.outcome().ok()?);
    let bytes = announce.then(|| outcome.outputs.payload_bytes());
    let mut composer = Composer::new();
    let prepared = composer.prepare_outcome(&outcome).ok()?;
    Some(with_message(frame, bytes, prepared))
}

/// The same frame with the body of this message, whose header is thrown away; it may announce another payload.
fn with_message(frame: &[u8], announce: Option<u64>, message: Prepared<'_>) -> Vec<u8> {
    let stamp = Stamp::fresh(ChunkIndex::new(0), CacheEpoch::new(0));
    let committed = message.commit(&mut Sequencer::new(), stamp);
    let mut frame = frame.to_vec();
    if let Some(bytes) = announce {
        put(&mut frame, PAYLOAD_BYTES, &bytes.to_le_bytes());
    }
    with_body(&frame, &committed.frame()[HEADER_BYTES..])
}

/// What was a manifest before, after a change of its tensors.
pub(super) fn edited(inner: &Manifest, edit: impl FnOnce(&mut Vec<TensorSpec>)) -> Manifest {
    let mut tensors = inner.iter().map(|(_, spec)| *spec).collect();
    edit(&mut tensors);
    Manifest::new(&tensors).expect("a manifest much like one that was")
}

/// The same tensors without one.
pub(super) fn without(inner: &Manifest, name: &str) -> Manifest {
    edited(inner, |tensors| tensors.retain(|spec| spec.name() != name))
}

/// The tensors of `inner`, one of them altered.
pub(super) fn altered(
    inner: &Manifest,
    name: &str,
    alter: impl Fn(&TensorSpec) -> TensorSpec,
) -> Manifest {
    edited(inner, |tensors| {
        let named = tensors.iter_mut().filter(|spec| spec.name() == name);
        named.for_each(|spec| *spec = alter(spec));
    })
}

/// The tensor of `spec` with its first dimension so many times as long.
pub(super) fn longer(spec: &TensorSpec, times: u64) -> TensorSpec {
    let mut dims = spec.shape().dims().to_vec();
    if let Some(first) = dims.first_mut() {
        *first *= times;
    }
    TensorSpec::new(spec.name(), spec.dtype(), &dims).expect("a tensor much like one that was")
}

/// The envelope with other inputs.
pub(super) fn with_inputs(envelope: &Envelope<AnyPlan>, inputs: Manifest) -> Envelope<AnyPlan> {
    let plan = AnyPlan(envelope.plan().parts().clone());
    unchecked(plan, inputs, envelope.outputs().clone())
}
