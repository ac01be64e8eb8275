//! Stages of the front with a hook.

use std::rc::Rc;

use pp_contract::{ChunkIndex, Envelope, Outcome, VideoPlan};
use pp_runtime::stage::{Decoded, FrontStages, Offer, Place, Progress, StageError};

use super::Arm;

/// The front's stages with a hook.
#[derive(Debug)]
pub(crate) struct FaultyFront<'a, S> {
    inner: &'a mut S,
    arm: Rc<Arm>,
}

impl<'a, S> FaultyFront<'a, S> {
    pub(crate) fn new(inner: &'a mut S, arm: &Rc<Arm>) -> Self {
        let arm = Rc::clone(arm);
        Self { inner, arm }
    }
}

impl<Tx, Rx, S: FrontStages<Tx, Rx, Plan = VideoPlan>> FrontStages<Tx, Rx> for FaultyFront<'_, S> {
    type Plan = VideoPlan;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        self.inner.poll_source()
    }

    fn build(&mut self, place: Place, slot: &mut Tx) -> Result<Envelope<VideoPlan>, StageError> {
        self.arm.happen_to_process(place.chunk.get());
        self.inner.build(place, slot)
    }

    fn is_sink_ready(&mut self) -> Result<bool, StageError> {
        self.inner.is_sink_ready()
    }

    fn decode(
        &mut self,
        chunk: ChunkIndex,
        outcome: &Outcome,
        payload: Option<Rx>,
    ) -> Result<Progress<Decoded>, StageError> {
        self.inner.decode(chunk, outcome, payload)
    }

    fn poll_decoded(&mut self) -> Result<Option<Decoded>, StageError> {
        self.inner.poll_decoded()
    }

    fn forget(&mut self, chunk: ChunkIndex) {
        self.inner.forget(chunk);
    }

    fn frames_built(&self) -> u32 {
        self.inner.frames_built()
    }

    fn queued(&self) -> (u32, u32) {
        self.inner.queued()
    }
}
