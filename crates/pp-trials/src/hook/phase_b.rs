//! Stages of Phase B with a hook.

use std::rc::Rc;

use pp_contract::{Envelope, Plan as _, VideoPlan};
use pp_runtime::stage::{Computed, PhaseBStages, Place, Progress, StageError};

use super::frame::without;
use super::plan::AnyPlan;
use super::{Arm, Break};

/// Phase B's stages with a hook.
#[derive(Debug)]
pub(crate) struct FaultyPhaseB<S> {
    pub(crate) inner: S,
    pub(crate) arm: Rc<Arm>,
}

impl<Tx, Rx, S> PhaseBStages<Tx, Rx> for FaultyPhaseB<S>
where
    S: PhaseBStages<Tx, Rx, Plan = VideoPlan>,
{
    type Plan = VideoPlan;
    type Computing = S::Computing;

    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<VideoPlan>,
        input: Option<&Rx>,
        output: &mut Tx,
    ) -> Result<Progress<Computed, S::Computing>, StageError> {
        let chunk = place.chunk.get();
        self.arm.sees_compute(chunk);
        self.arm.happen_to_process(chunk);
        if self.arm.strikes(Break::Leave, chunk) {
            pp_job::end_now(0);
        }
        if self.arm.strikes(Break::StallCompute, chunk) {
            std::thread::sleep(self.arm.hook.lasts);
        }
        if envelope.plan().parts().do_kv_recompute
            && self.arm.strikes(Break::SkippedRecompute, chunk)
        {
            let envelope = without_recompute(envelope);
            return self.inner.compute(place, &envelope, input, output);
        }
        self.inner.compute(place, envelope, input, output)
    }

    fn poll_computed(
        &mut self,
        oldest: S::Computing,
    ) -> Result<Progress<Computed, S::Computing>, StageError> {
        self.inner.poll_computed(oldest)
    }
}

/// The Phase B of a front whose plan has no rules: a process of its own, whose plan has them.
#[derive(Debug)]
pub(crate) enum Elsewhere {}

impl<Tx, Rx> PhaseBStages<Tx, Rx> for Elsewhere {
    type Plan = AnyPlan;
    type Computing = Self;

    fn compute(
        &mut self,
        _: Place,
        _: &Envelope<AnyPlan>,
        _: Option<&Rx>,
        _: &mut Tx,
    ) -> Result<Progress<Computed, Self>, StageError> {
        match *self {}
    }
}

/// The work of `envelope` as a rank sees it that thinks its cache is good.
fn without_recompute(envelope: &Envelope<VideoPlan>) -> Envelope<VideoPlan> {
    let mut parts = *envelope.plan().parts();
    parts.do_kv_recompute = false;
    parts.expected_generator_calls = parts.planned_calls();
    let plan = VideoPlan::new(parts).expect("the plan without its recompute");
    // The context lies behind all other tensors: without it they lie where they were.
    let inputs = without(&envelope.inputs().unsealed(), "context_frames");
    Envelope::new(plan, inputs, envelope.outputs().clone())
        .expect("the tensors of the plan without its recompute")
}
