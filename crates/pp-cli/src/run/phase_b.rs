//! Phase B of `pp run`: the kernels' phase_b, from slot to slot.

use pp_contract::{Envelope, FaultKind, Plan as _, VideoPlan};
use pp_job::FRONT;
use pp_runtime::stage::{Computed, PhaseBStages, Place, Progress, StageError};

use super::codec::{Generated, Generator};
use pp_runtime::drift::{Digester, PhaseBCheck, Verify, check_due};

/// A chunk under way: in the kernels, or in the digests behind them.
pub(super) struct Computing<W, S> {
    work: Progress<Generated, W>,
    first_frame: u64,
    check: Option<PhaseBCheck<S>>,
}

type Ticket<G> = <<G as Generator>::Digester as Digester>::Ticket;
type ComputingOf<G> = Computing<<G as Generator>::Computing, Ticket<G>>;

pub(super) struct VideoPhaseB<G: Generator> {
    generator: G,
    max_frames: u32,
    verify: Verify,
}

impl<G: Generator> VideoPhaseB<G> {
    pub(super) fn new(generator: G, max_frames: u32, verify: Verify) -> Self {
        Self {
            generator,
            max_frames,
            verify,
        }
    }

    /// The result, once the kernels are done, and the digests that were issued behind them.
    fn conclude(
        &mut self,
        computing: ComputingOf<G>,
    ) -> Result<Progress<Computed, ComputingOf<G>>, StageError> {
        let Progress::Done(generated) = computing.work else {
            return Ok(Progress::UnderWay(computing));
        };
        let digester = self.generator.digester();
        if let Some(check) = &computing.check
            && !check.is_there(digester)?
        {
            return Ok(Progress::UnderWay(computing));
        }
        let check = computing.check;
        Ok(Progress::Done(Computed {
            observed_calls: generated.calls,
            start_frame: computing.first_frame,
            seal: check.map_or(Ok(None), |check| check.conclude(digester))?,
            worked: generated.worked,
        }))
    }
}

impl<G: Generator> PhaseBStages<G::Tx, G::Rx> for VideoPhaseB<G> {
    type Plan = VideoPlan;
    type Computing = ComputingOf<G>;

    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<VideoPlan>,
        input: Option<&G::Rx>,
        output: &mut G::Tx,
    ) -> Result<Progress<Computed, ComputingOf<G>>, StageError> {
        let plan = envelope.plan().parts();
        let frames = envelope
            .inputs()
            .get("latents_in")
            .map(|(_, spec)| spec.shape().dims());
        if let Some([frames, ..]) = frames
            && *frames > u64::from(self.max_frames)
        {
            let most = self.max_frames;
            let detail = format!("{frames} frames in a chunk of at most {most}");
            let kind = FaultKind::PeerMisbehaved;
            return Err(StageError::new(kind, "phase_b", detail));
        }
        check_due(self.verify, place.chunk, envelope, FRONT)?;
        let inputs = envelope.inputs().unsealed();
        let outputs = envelope.outputs().unsealed();
        let digester = self.generator.digester();
        let mut check = PhaseBCheck::begin(digester, place.chunk, envelope, input, FRONT)?;
        let work = self
            .generator
            .generate(plan, &inputs, input, &outputs, output)
            .map_err(|mut error| {
                error.detail = format!("chunk {}: {}", place.chunk, error.detail);
                error
            })?;
        if let Some(check) = &mut check {
            check.end(self.generator.digester(), envelope, input, output)?;
        }
        self.conclude(Computing {
            work,
            first_frame: plan.current_start_frame,
            check,
        })
    }

    fn poll_computed(
        &mut self,
        mut oldest: ComputingOf<G>,
    ) -> Result<Progress<Computed, ComputingOf<G>>, StageError> {
        if let Progress::UnderWay(work) = oldest.work {
            oldest.work = self.generator.poll_generated(work)?;
        }
        self.conclude(oldest)
    }
}
