//! Phase B of `pp run`: the kernels' phase_b, from slot to slot.

use std::collections::VecDeque;

use pp_contract::{Envelope, FaultKind, Manifest, Plan as _, VideoPlan};
use pp_kernels::TensorList;
use pp_runtime::stage::{Computed, PhaseBStages, Place, Progress, StageError};

use super::codec::{Generated, Generator};
use super::tensors::{list_of, to_kernels};

/// A manifest and the kernels' list for it: the same from chunk to chunk, most of the time.
#[derive(Default)]
struct Cached(Option<(Manifest, TensorList)>);

impl Cached {
    fn list(&mut self, manifest: &Manifest) -> Result<&TensorList, StageError> {
        if self.0.as_ref().is_none_or(|(known, _)| known != manifest) {
            let list = list_of(manifest).map_err(|e| refuse(e.to_string()))?;
            self.0 = Some((manifest.clone(), list));
        }
        Ok(&self.0.as_ref().expect("just put there").1)
    }
}

pub(super) struct VideoPhaseB<G> {
    generator: G,
    max_frames: u32,
    inputs: Cached,
    outputs: Cached,
    /// First frame of each chunk under way, oldest first.
    started: VecDeque<u64>,
}

impl<G: Generator> VideoPhaseB<G> {
    pub(super) fn new(generator: G, max_frames: u32) -> Self {
        Self {
            generator,
            max_frames,
            inputs: Cached::default(),
            outputs: Cached::default(),
            started: VecDeque::new(),
        }
    }
}

fn refuse(detail: String) -> StageError {
    StageError::new(FaultKind::PeerMisbehaved, "phase_b", detail)
}

fn computed(generated: Generated, start_frame: u64) -> Computed {
    Computed {
        observed_calls: generated.calls,
        start_frame,
        seal: None,
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
        let plan = to_kernels(envelope.plan().parts());
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
        let inputs = self.inputs.list(envelope.inputs())?;
        let outputs = self.outputs.list(envelope.outputs())?;
        let progress = self
            .generator
            .generate(&plan, inputs, input, outputs, output)
            .map_err(|mut error| {
                error.detail = format!("chunk {}: {}", place.chunk, error.detail);
                error
            })?;
        let start_frame = plan.current_start_frame;
        Ok(match progress {
            Progress::Done(generated) => Progress::Done(computed(generated, start_frame)),
            Progress::UnderWay => {
                self.started.push_back(start_frame);
                Progress::UnderWay
            }
        })
    }

    fn poll_computed(&mut self) -> Result<Option<Computed>, StageError> {
        let Some(generated) = self.generator.poll_generated()? else {
            return Ok(None);
        };
        let start_frame = self.started.pop_front();
        let start_frame = start_frame.expect("asked only while a chunk is under way");
        Ok(Some(computed(generated, start_frame)))
    }
}
