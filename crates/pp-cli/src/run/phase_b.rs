//! Phase B of `pp run`: the kernels' phase_b, from slot to slot.

use pp_contract::{Envelope, FaultKind, Manifest, Plan as _, VideoPlan};
use pp_kernels::{KernelSession, Payload, PayloadMut, TensorList};
use pp_runtime::driver::with_source;
use pp_runtime::stage::{Computed, PhaseBStages, Place, Progress, StageError};
use pp_transport::host::{RxLease, TxLease};

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

pub(super) struct VideoPhaseB {
    session: KernelSession,
    max_frames: u32,
    inputs: Cached,
    outputs: Cached,
}

impl VideoPhaseB {
    pub(super) fn new(session: KernelSession, max_frames: u32) -> Self {
        Self {
            session,
            max_frames,
            inputs: Cached::default(),
            outputs: Cached::default(),
        }
    }
}

fn refuse(detail: String) -> StageError {
    StageError::new(FaultKind::PeerMisbehaved, "phase_b", detail)
}

impl PhaseBStages<TxLease, RxLease> for VideoPhaseB {
    type Plan = VideoPlan;

    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<VideoPlan>,
        input: Option<&RxLease>,
        output: &mut TxLease,
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
        let bytes = input.map_or(&[][..], RxLease::bytes);
        let input = Payload::new(inputs, bytes).map_err(|e| refuse(e.to_string()))?;
        let mut output =
            PayloadMut::new(outputs, output.bytes_mut()).map_err(|e| refuse(e.to_string()))?;
        let calls = self
            .session
            .phase_b(&plan, &input, &mut output)
            .map_err(|e| {
                let detail = format!("chunk {}: {}", place.chunk, with_source(&e));
                StageError::new(FaultKind::Plugin, "phase_b", detail)
            })?;
        Ok(Progress::Done(Computed {
            observed_calls: calls,
            start_frame: plan.current_start_frame,
            output_digest: None,
            worked: None,
        }))
    }
}
