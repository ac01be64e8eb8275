//! Frames as bytes, by the layout of docs/wire-format.md.

use pp_contract::{
    DType, HEADER_BYTES, MAX_NOTE_BYTES, Manifest, StageReport, TensorSpec, VideoPlan,
    VideoPlanParts, WIRE_VERSION,
};
use serde::{Deserialize, Serialize};

use super::kinds::Break;

/// Where the fields lie that are altered here.
const VERSION: usize = 4;
const ACTION: usize = 6;
const CHUNK_INDEX: usize = 16;
const EDGE_SEQ: usize = 32;
const PAYLOAD_BYTES: usize = 40;
const BODY_LEN: usize = 48;
const BODY_CRC32: usize = 52;
const ATTEMPT: usize = 56;
const LAP: usize = 58;
const HEADER_CRC32: usize = 60;

const NOOP: u8 = 0;
const INFER: u8 = 1;

/// What a body holds, unchecked.
#[derive(Debug, Serialize, Deserialize)]
struct Body {
    plan: VideoPlanParts,
    tensors: Vec<TensorSpec>,
    trail: Vec<StageReport>,
    note: Vec<u8>,
    is_stale: bool,
}

/// The chunk of an INFER.
pub(super) fn chunk_of(frame: &[u8]) -> Option<u64> {
    let is_infer = *frame.get(ACTION)? == INFER;
    is_infer.then(|| get(frame, CHUNK_INDEX))
}

fn get(frame: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&frame[at..at + 8]);
    u64::from_le_bytes(bytes)
}

fn put(frame: &mut [u8], at: usize, bytes: &[u8]) {
    frame[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Makes the checksum of the header right.
fn seal(frame: &mut [u8]) {
    let crc = crc32fast::hash(&frame[..HEADER_CRC32]);
    put(frame, HEADER_CRC32, &crc.to_le_bytes());
}

/// A NOOP with the numbers of this frame, in the next attempt.
pub(super) fn noop_of_next_attempt(frame: &[u8]) -> Vec<u8> {
    let mut noop = frame[..HEADER_BYTES].to_vec();
    noop[ACTION] = NOOP;
    put(&mut noop, EDGE_SEQ, &u64::MAX.to_le_bytes());
    put(&mut noop, PAYLOAD_BYTES, &[0; 8]);
    put(&mut noop, BODY_LEN, &[0; 8]);
    let attempt = u16::from_le_bytes([frame[ATTEMPT], frame[ATTEMPT + 1]]);
    put(&mut noop, ATTEMPT, &(attempt + 1).to_le_bytes());
    seal(&mut noop);
    noop
}

/// The frame as it is altered; `None` if there is nothing in it to alter.
pub(super) fn altered(what: Break, frame: &[u8]) -> Option<Vec<u8>> {
    let mut new = frame.to_vec();
    match what {
        Break::TruncatedFrame => new.truncate(HEADER_BYTES + (new.len() - HEADER_BYTES) / 2),
        Break::DamagedBody => new[HEADER_BYTES] ^= 1,
        Break::WrongVersion => put(&mut new, VERSION, &(WIRE_VERSION + 1).to_le_bytes()),
        Break::WrongLap => put(&mut new, LAP, &u16::MAX.to_le_bytes()),
        Break::LyingBody => {
            let body = (new.len() - HEADER_BYTES) as u32 + 8;
            put(&mut new, BODY_LEN, &body.to_le_bytes());
        }
        Break::LyingPayload => {
            let bytes = get(frame, PAYLOAD_BYTES) / 2 + 1;
            put(&mut new, PAYLOAD_BYTES, &bytes.to_le_bytes());
        }
        _ => return with_body(what, frame),
    }
    if new.len() >= HEADER_BYTES && what != Break::DamagedBody {
        seal(&mut new);
    }
    Some(new)
}

/// The frame with a body that breaks a rule. The header announces what the body then describes, but for a manifest that
/// lies.
fn with_body(what: Break, frame: &[u8]) -> Option<Vec<u8>> {
    let mut body: Body = postcard::from_bytes(&frame[HEADER_BYTES..]).ok()?;
    let old = postcard::to_allocvec(&body).ok()?;
    alter(what, &mut body);
    let bytes = postcard::to_allocvec(&body).ok()?;
    if bytes == old {
        return None;
    }
    let mut new = frame[..HEADER_BYTES].to_vec();
    let has_payload = get(frame, PAYLOAD_BYTES) > 0;
    if has_payload && what != Break::AlteredManifest && what != Break::StaleTensors {
        let payload = Manifest::new(&body.tensors).ok()?.payload_bytes();
        put(&mut new, PAYLOAD_BYTES, &payload.to_le_bytes());
    }
    put(&mut new, BODY_LEN, &(bytes.len() as u32).to_le_bytes());
    put(&mut new, BODY_CRC32, &crc32fast::hash(&bytes).to_le_bytes());
    seal(&mut new);
    new.extend_from_slice(&bytes);
    Some(new)
}

fn alter(what: Break, body: &mut Body) {
    match what {
        Break::WrongCalls => body.plan.expected_generator_calls += 1,
        Break::WrongReport => {
            if let Some(report) = body.trail.last_mut() {
                report.calls += 1;
            }
        }
        Break::ExtraReport => body.trail.push(StageReport::default()),
        Break::LongNote => body.note.resize(MAX_NOTE_BYTES + 1, 0),
        Break::StaleTensors => body.is_stale = true,
        Break::AlteredManifest => {
            if let Some(first) = body.tensors.first_mut() {
                *first = longer(first, 2);
            }
        }
        Break::ExtraTensor => body.tensors.push(side()),
        Break::MissingTensor => drop(body.tensors.pop()),
        Break::LostContext => body.tensors.retain(|spec| spec.name() != CONTEXT),
        Break::StaleContext if body.plan.do_kv_recompute => {
            body.plan.do_kv_recompute = false;
            body.plan.expected_generator_calls = body.plan.planned_calls();
        }
        _ => {}
    }
}

const CONTEXT: &str = "context_frames";

/// A tensor that no plan calls for.
fn side() -> TensorSpec {
    TensorSpec::new("side", DType::U8, &[256]).expect("a small tensor")
}

/// The tensor of `spec` with its first dimension so many times as long.
pub(super) fn longer(spec: &TensorSpec, times: u64) -> TensorSpec {
    let mut dims = spec.shape().dims().to_vec();
    if let Some(first) = dims.first_mut() {
        *first *= times;
    }
    TensorSpec::new(spec.name(), spec.dtype(), &dims).expect("a tensor much like one that was")
}

/// What was a manifest before, after a change of its tensors.
pub(super) fn edited(inner: &Manifest, edit: impl FnOnce(&mut Vec<TensorSpec>)) -> Manifest {
    let mut tensors = inner.iter().map(|(_, spec)| *spec).collect();
    edit(&mut tensors);
    Manifest::new(&tensors).expect("a manifest much like one that was")
}

/// The same tensors without the context; `None` if there is none.
pub(super) fn without_context(inner: &Manifest) -> Option<Manifest> {
    inner.get(CONTEXT)?;
    let is_other = |spec: &TensorSpec| spec.name() != CONTEXT;
    Some(edited(inner, |tensors| tensors.retain(is_other)))
}

/// The plan as a rank sees it that thinks its cache is good.
pub(super) fn without_recompute(plan: &VideoPlanParts) -> VideoPlan {
    let mut parts = *plan;
    parts.do_kv_recompute = false;
    parts.expected_generator_calls = parts.planned_calls();
    VideoPlan::new(parts).expect("the plan without its recompute")
}
