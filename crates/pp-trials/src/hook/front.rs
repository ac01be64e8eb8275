//! Stages of the front with a hook.

use std::rc::Rc;

use pp_contract::{
    ChunkIndex, DType, Envelope, FaultKind, Manifest, Outcome, PlanError, TensorSpec, VideoPlan,
};
use pp_runtime::stage::{
    Built, Decoded, FrontStages, Offer, Place, Progress, RetainedPayloads, StageError,
};

use super::frame::{altered, longer, without};
use super::plan::{AnyPlan, Flaw, with_flaw};
use super::{Arm, Break};

/// How many times too long a tensor is that no slot holds.
const TOO_LONG: u64 = 1000;

/// The front's stages with a hook.
#[derive(Debug)]
pub(crate) struct FaultyFront<S> {
    pub(crate) inner: S,
    pub(crate) arm: Rc<Arm>,
}

impl<S> FaultyFront<S> {
    /// What the stage gives in place of what it was to give.
    fn break_envelope(
        &self,
        chunk: u64,
        envelope: &Envelope<VideoPlan>,
    ) -> Result<Envelope<AnyPlan>, StageError> {
        let (inputs, outputs) = (envelope.inputs(), envelope.outputs());
        let has_context = inputs.get("context_frames").is_some();
        let arm = &self.arm;
        if arm.strikes(Break::UnserializablePlan, chunk) {
            return Ok(with_flaw(envelope, Some(Flaw::RefusesToBeSerialized)));
        }
        if arm.strikes(Break::HugePlan, chunk) {
            return Ok(with_flaw(envelope, Some(Flaw::Huge)));
        }
        if arm.strikes(Break::UnsupportedDtype, chunk) {
            let with = |spec: &TensorSpec| {
                let dims = spec.shape().dims();
                TensorSpec::new(spec.name(), DType::F16, dims).expect("a tensor of another type")
            };
            let inputs = altered(inputs, "latents_in", with);
            return self.checked(envelope, inputs, outputs.clone());
        }
        if has_context && arm.strikes(Break::MissingContext, chunk) {
            let inputs = without(inputs, "context_frames");
            return self.checked(envelope, inputs, outputs.clone());
        }
        if arm.strikes(Break::OversizeTensor, chunk) {
            let inputs = altered(inputs, "latents_in", |spec| longer(spec, TOO_LONG));
            let outputs = altered(outputs, "latents_out", |spec| longer(spec, TOO_LONG));
            return self.checked(envelope, inputs, outputs);
        }
        Ok(with_flaw(envelope, None))
    }

    /// As the front makes an envelope: the plan's rules decide.
    fn checked(
        &self,
        envelope: &Envelope<VideoPlan>,
        inputs: Manifest,
        outputs: Manifest,
    ) -> Result<Envelope<AnyPlan>, StageError> {
        let made = Envelope::new(*envelope.plan(), inputs, outputs).map_err(refuse)?;
        Ok(with_flaw(&made, None))
    }
}

fn refuse(error: PlanError) -> StageError {
    StageError::new(FaultKind::Plugin, "plan", error.to_string())
}

/// The envelope that the front's own stages made.
fn ruled(envelope: &Envelope<AnyPlan>) -> Result<Envelope<VideoPlan>, StageError> {
    let plan = VideoPlan::new(envelope.plan().0.parts);
    plan.and_then(|plan| Envelope::new(plan, envelope.inputs().clone(), envelope.outputs().clone()))
        .map_err(refuse)
}

impl<Tx, Rx, S: FrontStages<Tx, Rx, Plan = VideoPlan>> FrontStages<Tx, Rx> for FaultyFront<S> {
    type Plan = AnyPlan;
    type Carry = S::Carry;
    type Decoding = S::Decoding;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        self.inner.poll_source()
    }

    fn build(
        &mut self,
        place: Place,
        slot: &mut Tx,
    ) -> Result<Built<AnyPlan, S::Carry>, StageError> {
        let chunk = place.chunk.get();
        self.arm.happen_to_process(chunk);
        let built = self.inner.build(place, slot)?;
        Ok(Built {
            envelope: self.break_envelope(chunk, &built.envelope)?,
            carry: built.carry,
            frames: built.frames,
            read_ns: built.read_ns,
        })
    }

    fn rebuild(
        &mut self,
        place: Place,
        sent: &Envelope<AnyPlan>,
        kept: &dyn RetainedPayloads<Tx>,
        slot: &mut Tx,
    ) -> Result<Envelope<AnyPlan>, StageError> {
        let rebuilt = self.inner.rebuild(place, &ruled(sent)?, kept, slot)?;
        Ok(with_flaw(&rebuilt, None))
    }

    fn is_sink_ready(&mut self, decoding: usize) -> Result<bool, StageError> {
        self.inner.is_sink_ready(decoding)
    }

    fn decode(
        &mut self,
        chunk: ChunkIndex,
        carry: S::Carry,
        outcome: &Outcome,
        payload: Option<Rx>,
    ) -> Result<Progress<Decoded, S::Decoding>, StageError> {
        self.arm.sees_decode(chunk.get());
        self.inner.decode(chunk, carry, outcome, payload)
    }

    fn poll_decoded(
        &mut self,
        oldest: S::Decoding,
    ) -> Result<Progress<Decoded, S::Decoding>, StageError> {
        self.inner.poll_decoded(oldest)
    }

    fn forget(&mut self, chunk: ChunkIndex, carry: S::Carry) {
        self.inner.forget(chunk, carry);
    }

    fn queued(&self) -> (u32, u32) {
        self.inner.queued()
    }
}
