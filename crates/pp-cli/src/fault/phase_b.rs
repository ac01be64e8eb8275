//! Stages of Phase B with a hook.

use std::rc::Rc;

use pp_contract::{Envelope, VideoPlan};
use pp_runtime::stage::{Computed, PhaseBStages, Place, Progress, StageError};

use super::{Arm, Break};

/// Phase B's stages with a hook.
#[derive(Debug)]
pub(crate) struct FaultyPhaseB<'a, S> {
    inner: &'a mut S,
    arm: Rc<Arm>,
}

impl<'a, S> FaultyPhaseB<'a, S> {
    pub(crate) fn new(inner: &'a mut S, arm: &Rc<Arm>) -> Self {
        let arm = Rc::clone(arm);
        Self { inner, arm }
    }
}

impl<Tx, Rx, S> PhaseBStages<Tx, Rx> for FaultyPhaseB<'_, S>
where
    S: PhaseBStages<Tx, Rx, Plan = VideoPlan>,
{
    type Plan = VideoPlan;

    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<VideoPlan>,
        input: Option<&Rx>,
        output: &mut Tx,
    ) -> Result<Progress<Computed>, StageError> {
        let chunk = place.chunk.get();
        self.arm.happen_to_process(chunk);
        if self.arm.strikes(Break::StallCompute, chunk) {
            std::thread::sleep(self.arm.hook.lasts);
        }
        self.inner.compute(place, envelope, input, output)
    }

    fn poll_computed(&mut self) -> Result<Option<Computed>, StageError> {
        self.inner.poll_computed()
    }
}
