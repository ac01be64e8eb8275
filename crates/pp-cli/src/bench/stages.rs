//! The stages of `pp bench overlap`.

use std::convert::Infallible;

use pp_contract::{ChunkIndex, Envelope, FaultKind, Manifest, Outcome, Plan as _};
use pp_runtime::core::Cut;
use pp_runtime::stage::{
    Built, Decoded, FrontStages, Offer, OnHost, PhaseBStages, Place, Progress, StageError,
};
use pp_transport::host::{RxLease, TxLease};

use super::plan::{BenchPlan, built};
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

fn corrupt(operation: &'static str, chunk: u64) -> StageError {
    let detail = format!("the payload of chunk {chunk} is not what was written into it");
    StageError::new(FaultKind::Internal, operation, detail)
}

impl FrontStages<TxLease, RxLease> for BenchFront {
    type Plan = BenchPlan;
    type Carry = ();
    type Decoding = Infallible;

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
    ) -> Result<Built<BenchPlan, ()>, StageError> {
        self.left -= 1;
        if self.touch {
            produce(slot.bytes_mut(), place.chunk.get());
        }
        built(place, self.manifest.clone(), self.manifest.clone())
    }

    fn decode(
        &mut self,
        chunk: ChunkIndex,
        (): (),
        _: &Outcome,
        payload: Option<RxLease>,
    ) -> Result<Progress<Decoded, Infallible>, StageError> {
        if let Some(payload) = payload.filter(|_| self.touch)
            && !consume(payload.bytes(), !chunk.get())
        {
            return Err(corrupt("decode", chunk.get()));
        }
        self.work.run();
        Ok(Progress::Done(Decoded::default()))
    }

    fn queued(&self) -> (u32, u32) {
        (u32::from(self.left > 0), 0)
    }
}

/// Computes in a fixed time.
pub(super) fn phase_b(
    work: Work,
    touch: bool,
) -> impl PhaseBStages<TxLease, RxLease, Plan = BenchPlan> {
    OnHost::new(
        move |envelope: &Envelope<BenchPlan>, input: &[u8], output: &mut [u8]| {
            let chunk = envelope.plan().start_frame();
            if touch && !consume(input, chunk) {
                return Err(corrupt("phase_b", chunk));
            }
            work.run();
            if touch {
                produce(output, !chunk);
            }
            Ok(())
        },
    )
}
