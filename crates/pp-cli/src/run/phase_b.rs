//! Phase B of `pp run`: the kernels' phase_b, from slot to slot.

use std::collections::VecDeque;

use pp_contract::{Envelope, FaultKind, Plan as _, Seal, VideoPlan};
use pp_runtime::stage::{Computed, PhaseBStages, Place, Progress, StageError};

use super::codec::{Generated, Generator};
use super::verify::{Notary, PhaseBCheck, check_due};
use crate::args::Verify;

/// A chunk under way.
struct Started<S> {
    first_frame: u64,
    check: Option<PhaseBCheck<S>>,
}

type Sheet<G> = <<G as Generator>::Notary as Notary>::Sheet;

pub(super) struct VideoPhaseB<G: Generator> {
    generator: G,
    max_frames: u32,
    verify: Verify,
    /// Oldest first.
    started: VecDeque<Started<Sheet<G>>>,
    /// What the kernels have done and whose digests may still be on their way.
    generated: Option<Generated>,
}

impl<G: Generator> VideoPhaseB<G> {
    pub(super) fn new(generator: G, max_frames: u32, verify: Verify) -> Self {
        Self {
            generator,
            max_frames,
            verify,
            started: VecDeque::new(),
            generated: None,
        }
    }

    /// The kernels are done with the chunk.
    fn computed(
        &mut self,
        generated: Generated,
        started: Started<Sheet<G>>,
    ) -> Result<Computed, StageError> {
        let conclude = |check: PhaseBCheck<_>| check.conclude(self.generator.notary());
        let seal = started.check.map_or(Ok(None), conclude)?;
        Ok(computed(generated, started.first_frame, seal))
    }
}

fn refuse(detail: String) -> StageError {
    StageError::new(FaultKind::PeerMisbehaved, "phase_b", detail)
}

fn computed(generated: Generated, start_frame: u64, seal: Option<Seal>) -> Computed {
    Computed {
        observed_calls: generated.calls,
        start_frame,
        seal,
        worked: generated.worked,
    }
}

impl<G: Generator> PhaseBStages<G::Tx, G::Rx> for VideoPhaseB<G> {
    type Plan = VideoPlan;

    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<VideoPlan>,
        input: Option<&G::Rx>,
        output: &mut G::Tx,
    ) -> Result<Progress<Computed>, StageError> {
        let plan = envelope.plan().parts();
        let frames = envelope
            .inputs()
            .get("latents_in")
            .map(|(_, spec)| spec.shape().dims());
        if let Some([frames, ..]) = frames
            && *frames > u64::from(self.max_frames)
        {
            let most = self.max_frames;
            return Err(refuse(format!(
                "{frames} frames in a chunk of at most {most}"
            )));
        }
        check_due(self.verify, place.chunk, envelope)?;
        let inputs = envelope.inputs().unsealed();
        let outputs = envelope.outputs().unsealed();
        let notary = self.generator.notary();
        let mut check = PhaseBCheck::begin(notary, place.chunk, envelope, input)?;
        let progress = self
            .generator
            .generate(plan, &inputs, input, &outputs, output)
            .map_err(|mut error| {
                error.detail = format!("chunk {}: {}", place.chunk, error.detail);
                error
            })?;
        if let Some(check) = &mut check {
            check.end(self.generator.notary(), envelope, input, output)?;
        }
        let started = Started {
            first_frame: plan.current_start_frame,
            check,
        };
        match progress {
            Progress::Done(generated) => self.computed(generated, started).map(Progress::Done),
            Progress::UnderWay => {
                self.started.push_back(started);
                Ok(Progress::UnderWay)
            }
        }
    }

    fn poll_computed(&mut self) -> Result<Option<Computed>, StageError> {
        if self.generated.is_none() {
            self.generated = self.generator.poll_generated()?;
        }
        let Some(generated) = self.generated else {
            return Ok(None);
        };
        let started = self.started.front();
        let check = started.and_then(|started| started.check.as_ref());
        // Its digests were issued behind it.
        if !check.map_or(Ok(true), |check| check.is_there(self.generator.notary()))? {
            return Ok(None);
        }
        self.generated = None;
        let started = self.started.pop_front();
        let started = started.expect("asked only while a chunk is under way");
        self.computed(generated, started).map(Some)
    }
}
