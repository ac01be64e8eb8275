//! A chunk composed again for a Phase B that was started anew.
//!
//! Hazard: what Phase B remembers of earlier chunks died with it, and a chunk that is computed
//! without it comes out different. Guarantee: the first chunk that the new one gets brings the
//! frames before it as `context_frames`, taken from the payloads that were sent, so that the
//! output is the undisturbed one, byte for byte. Every kernel keeps the rule that makes this true:
//! `context_frames` are the last frames of `latents_in` of the chunks before, as they were sent.

use pp_contract::{Envelope, FaultKind, Manifest, Plan as _, TensorSpec, VideoPlan};
use pp_kernels::ChunkShape;
use pp_runtime::stage::{Place, RetainedPayloads, StageError, send_as_it_was};
use pp_transport::in_flight::Part;

use super::codec::Codec;
use super::front::{VideoFront, envelope_of};

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

impl<C: Codec> VideoFront<C> {
    /// Composes the chunk with everything that a fresh Phase B must know.
    pub(super) fn compose_again(
        &mut self,
        place: Place,
        sent: &Envelope<VideoPlan>,
        kept: &dyn RetainedPayloads<C::Tx>,
        slot: &mut C::Tx,
    ) -> Result<Envelope<VideoPlan>, StageError> {
        let mut plan = *sent.plan().parts();
        plan.init_cache = true;
        let wanted = if plan.do_kv_recompute || place.starts_epoch {
            0
        } else {
            self.context_frames
        };
        if wanted == 0 {
            // It needs no context, or has it.
            send_as_it_was(sent, kept, slot)?;
            return envelope_of(plan, sent.inputs().clone(), sent.outputs().clone());
        }
        let tails = tails(kept, wanted);
        let context: u32 = tails.iter().map(|tail| tail.frames).sum();
        let old = sent.inputs().unsealed();
        let frames = latents(&old).map(|(_, frames, _)| frames);
        let (Some(frames), true) = (frames, context > 0) else {
            return Err(internal(format!(
                "nothing is kept of the chunks before chunk {}",
                place.chunk
            )));
        };
        plan.do_kv_recompute = true;
        plan.expected_generator_calls += 1;
        let inputs = self.inputs_of(ChunkShape {
            frames,
            steps: plan.num_denoise_steps,
            context_frames: context,
        })?;
        kept.copy(0, &moved(&old, &inputs)?, slot)?;
        let (mut to, spec) = inputs
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
        envelope_of(plan, inputs, sent.outputs().clone())
    }
}
