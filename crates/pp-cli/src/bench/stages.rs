//! The stages of `pp bench overlap`.

use pp_contract::{ChunkIndex, Envelope, FaultKind, Manifest, Outcome, Plan as _};
use pp_runtime::core::Cut;
use pp_runtime::stage::{
    Computed, Decoded, FrontStages, Offer, PhaseBStages, Place, Progress, StageError,
};
use pp_transport::host::{RxLease, TxLease};

use super::plan::BenchPlan;
use super::simulate::{Work, consume, produce};

/// Builds payloads in no time and decodes them in a fixed one.
pub(super) struct BenchFront {
    manifest: Manifest,
    left: u64,
    work: Work,
    touch: bool,
}

impl BenchFront {
    pub(super) fn new(manifest: Manifest, chunks: u64, work: Work, touch: bool) -> Self {
        Self {
            manifest,
            left: chunks,
            work,
            touch,
        }
    }
}

fn corrupt(operation: &'static str, chunk: ChunkIndex) -> StageError {
    let detail = format!("the payload of chunk {chunk} is not what was written into it");
    StageError::new(FaultKind::Internal, operation, detail)
}

impl FrontStages<TxLease, RxLease> for BenchFront {
    type Plan = BenchPlan;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        Ok(if self.left == 0 {
            Offer::End
        } else {
            Offer::Chunk(Cut::None)
        })
    }

    fn build(
        &mut self,
        place: Place,
        slot: &mut TxLease,
    ) -> Result<Envelope<BenchPlan>, StageError> {
        self.left -= 1;
        let chunk = place.chunk.get();
        if self.touch {
            produce(slot.bytes_mut(), chunk);
        }
        Envelope::new(
            BenchPlan::new(chunk),
            self.manifest.clone(),
            self.manifest.clone(),
        )
        .map_err(|e| StageError::new(FaultKind::Internal, "build", e.to_string()))
    }

    fn decode(
        &mut self,
        chunk: ChunkIndex,
        _: &Outcome,
        payload: Option<RxLease>,
    ) -> Result<Progress<Decoded>, StageError> {
        if let Some(payload) = payload.filter(|_| self.touch)
            && !consume(payload.bytes(), !chunk.get())
        {
            return Err(corrupt("decode", chunk));
        }
        self.work.run();
        Ok(Progress::Done(Decoded::default()))
    }

    fn queued(&self) -> (u32, u32) {
        (u32::from(self.left > 0), 0)
    }
}

/// Computes in a fixed time.
pub(super) struct BenchPhaseB {
    work: Work,
    touch: bool,
}

impl BenchPhaseB {
    pub(super) fn new(work: Work, touch: bool) -> Self {
        Self { work, touch }
    }
}

impl PhaseBStages<TxLease, RxLease> for BenchPhaseB {
    type Plan = BenchPlan;

    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<BenchPlan>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> Result<Progress<Computed>, StageError> {
        let chunk = place.chunk.get();
        if let Some(input) = input.filter(|_| self.touch)
            && !consume(input.bytes(), chunk)
        {
            return Err(corrupt("phase_b", place.chunk));
        }
        self.work.run();
        if self.touch {
            produce(output.bytes_mut(), !chunk);
        }
        Ok(Progress::Done(Computed {
            observed_calls: 1,
            start_frame: envelope.plan().start_frame(),
            seal: None,
            worked: None,
        }))
    }
}
