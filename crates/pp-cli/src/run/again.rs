//! A chunk composed again after a rank was lost and its stages were started anew.
//!
//! Hazard: what a stage remembers of earlier chunks died with its rank, and a chunk that is computed
//! without it comes out different. Guarantee: the first chunk that is sent again brings the
//! frames before it as `context_frames`, taken from the payloads that were sent, so that the
//! output is the undisturbed one, byte for byte. Every kernel keeps the rule that makes this true:
//! `context_frames` are the last frames of `latents_in` of the chunks before, as they were sent.

use pp_contract::{FaultKind, Manifest, Message, Plan as _, TensorSpec, VideoPlan};
use pp_kernels::ChunkShape;
use pp_runtime::stage::{Place, RetainedPayloads, StageError, StageResult, send_as_it_was};
use pp_transport::in_flight::Part;

/// The last frames of a payload that was sent.
struct Tail {
    chunks_back: usize,
    frames: u32,
    from: u64,
    bytes: u64,
}

fn internal(detail: String) -> StageError {
    StageError::new(FaultKind::Internal, "send again", detail)
}

/// Where the latents lie, how many frames they are, and the bytes of each.
fn latents(inputs: &Manifest) -> Option<(u64, u32, u64)> {
    let (offset, spec) = inputs.get("latents_in")?;
    let frames = *spec.shape().dims().first()?;
    let bytes = spec.bytes().checked_div(frames)?;
    Some((offset, u32::try_from(frames).ok()?, bytes))
}

/// The last `wanted` frames before the chunk, the oldest first; fewer where its epoch has fewer.
fn tails<Tx>(kept: &dyn RetainedPayloads<Tx>, wanted: u32) -> Vec<Tail> {
    let mut missing = wanted;
    let mut tails = Vec::new();
    for chunks_back in 1.. {
        let Some((offset, in_chunk, bytes)) = kept.inputs(chunks_back).and_then(latents) else {
            break;
        };
        let frames = in_chunk.min(missing);
        tails.push(Tail {
            chunks_back,
            frames,
            from: offset + u64::from(in_chunk - frames) * bytes,
            bytes: u64::from(frames) * bytes,
        });
        missing -= frames;
        if missing == 0 {
            break;
        }
    }
    tails.reverse();
    tails
}

/// The parts that put every tensor of `old` where `new` has it.
fn moved(old: &Manifest, new: &Manifest) -> Result<Vec<Part>, StageError> {
    let part = |(from, spec): (u64, &TensorSpec)| match new.get(spec.name()) {
        Some((to, same)) if same == spec => Ok(Part {
            from,
            to,
            bytes: spec.bytes(),
        }),
        _ => Err(internal(format!(
            "with context the kernels lay {spec} out in another way"
        ))),
    };
    old.iter().map(part).collect()
}

/// Composes the chunk with everything that stages which know no chunk before it must know.
///
/// `context_frames` is what a stage knows of the frames before a chunk. `tensors_of` lays a chunk out.
pub(super) fn compose_again<Tx>(
    place: Place,
    sent: &Message<VideoPlan>,
    kept: &dyn RetainedPayloads<Tx>,
    slot: &mut Tx,
    context_frames: u32,
    tensors_of: impl FnOnce(ChunkShape) -> StageResult<Manifest>,
) -> StageResult<(VideoPlan, Manifest)> {
    let mut plan = *sent.plan().parts();
    plan.init_cache = true;
    let wanted = if plan.do_kv_recompute || place.starts_epoch {
        0
    } else {
        context_frames
    };
    if wanted == 0 {
        // It needs no context, or has it.
        let (_, tensors) = send_as_it_was(sent, kept, slot)?;
        return Ok((VideoPlan::new(plan)?, tensors));
    }
    let tails = tails(kept, wanted);
    let context: u32 = tails.iter().map(|tail| tail.frames).sum();
    let old = sent.tensors().unsealed();
    let frames = latents(&old).map(|(_, frames, _)| frames);
    let (Some(frames), true) = (frames, context > 0) else {
        return Err(internal(format!(
            "nothing is kept of the chunks before chunk {}",
            place.chunk
        )));
    };
    plan.do_kv_recompute = true;
    plan.expected_generator_calls += 1;
    let tensors = tensors_of(ChunkShape {
        frames,
        steps: plan.num_denoise_steps,
        context_frames: context,
    })?;
    kept.copy(0, &moved(&old, &tensors)?, slot)?;
    let (mut to, spec) = tensors
        .get("context_frames")
        .ok_or_else(|| internal("the kernels lay out no context_frames".into()))?;
    let end = to + spec.bytes();
    for tail in tails {
        let Tail { from, bytes, .. } = tail;
        kept.copy(tail.chunks_back, &[Part { from, to, bytes }], slot)?;
        to += bytes;
    }
    if to != end {
        return Err(internal(format!(
            "{context} frames of latents_in do not fill {spec}"
        )));
    }
    Ok((VideoPlan::new(plan)?, tensors))
}
