//! `phase_b` of the CPU backend in a group: what the leader and the others send each other around the passes.

use pp_contract::DType;

use crate::config::{ChunkShape, SessionConfig};
use crate::denoise::messages::Messages;
use crate::denoise::passes::Share;
use crate::denoise::rows::RowShares;
use crate::denoise::tensors::{Types, latents, latents_dims};
use crate::error::Failure;
use crate::group::Collectives;
use crate::payload::{Payload, PayloadMut};

/// The other members, and how the rows are cut.
pub(super) struct CpuTeam<'a> {
    pub(super) cut: &'a RowShares,
    pub(super) group: &'a mut dyn Collectives,
}

impl CpuTeam<'_> {
    pub(super) fn send(&mut self, bytes: &[u8], to: usize) -> Result<(), Failure> {
        let (from, count) = (bytes.as_ptr(), bytes.len() as u64);
        // SAFETY: the session works on host memory, and the slice is borrowed across the call.
        unsafe { self.group.send(from, count, to as u32) }
    }

    pub(super) fn receive(&mut self, bytes: &mut [u8], from: usize) -> Result<(), Failure> {
        let (to, count) = (bytes.as_mut_ptr(), bytes.len() as u64);
        // SAFETY: as in `send`, exclusively.
        unsafe { self.group.receive(to, count, from as u32) }
    }
}

/// Runs a call of `phase_b` with the other members: the leader sends every other one its rows, `compute` runs the
/// passes over this member's rows, and the leader gets them back.
pub(super) fn run(
    cut: &RowShares,
    config: &SessionConfig,
    (shape, share): (ChunkShape, Share),
    (input, output): (&Payload<'_>, &mut PayloadMut<'_>),
    group: &mut dyn Collectives,
    compute: impl FnOnce(
        &Payload<'_>,
        &mut PayloadMut<'_>,
        &mut dyn Collectives,
    ) -> Result<u32, Failure>,
) -> Result<u32, Failure> {
    let types = Types {
        latents: latents(config.bits),
        guide: DType::F32,
    };
    let messages = Messages::new(cut, (shape, &share), types)?;
    let Messages { parts, results, .. } = &messages;
    let total = |bytes: &[u64]| bytes.iter().sum::<u64>() as usize;
    let own = config.member as usize;
    if own > 0 {
        let [part, made] = messages.of(own);
        let mut from = vec![0; part.payload_bytes() as usize];
        let mut to = vec![0; made.payload_bytes() as usize];
        // SAFETY: the vectors are as long as the call says, and only this call uses them.
        unsafe { group.scatter(std::ptr::null(), parts, from.as_mut_ptr(), 0) }?;
        let input = Payload::new(part, &from)?;
        let calls = compute(&input, &mut PayloadMut::new(made, &mut to)?, &mut *group)?;
        // SAFETY: as above.
        unsafe { group.gather(to.as_ptr(), results, std::ptr::null_mut(), 0) }?;
        return Ok(calls);
    }
    let mut sent = vec![0; total(parts)];
    for (spec, one) in messages.sent(cut, input.tensors()) {
        let whole = input.tensor(spec.name(), spec.dtype(), spec.shape().dims())?;
        one.apply(whole, &mut sent);
    }
    // SAFETY: as above; the leader's own part has no byte.
    unsafe { group.scatter(sent.as_ptr(), parts, [].as_mut_ptr(), 0) }?;
    let calls = compute(input, &mut *output, &mut *group)?;
    let mut got = sent;
    got.resize(total(results), 0);
    // SAFETY: as above.
    unsafe { group.gather([].as_ptr(), results, got.as_mut_ptr(), 0) }?;
    let ((name, dtype), dims) = (
        messages.made,
        latents_dims(&cut.own().geometry, shape.frames),
    );
    let whole = output.tensor_mut(name, dtype, &dims)?;
    for one in messages.got(cut) {
        one.apply(&got, whole);
    }
    Ok(calls)
}
