//! The plan of the benchmarks: none of the video's fields, one tensor, any size.

use pp_contract::{
    DType, Envelope, FaultKind, Manifest, ManifestError, Plan, PlanError, TensorSpec,
};
use pp_runtime::stage::{Built, Place, StageError};

/// Says which chunk it is; the payload is one tensor of bytes, the same size back, or nothing.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BenchPlan(u64);

impl Plan for BenchPlan {
    const NAME: &'static str = "bench";
    const VERSION: u16 = 1;
    type Parts = u64;

    fn from_parts(parts: u64) -> Result<Self, PlanError> {
        Ok(Self(parts))
    }

    fn parts(&self) -> &u64 {
        &self.0
    }

    fn expected_calls(&self) -> u32 {
        1
    }

    fn start_frame(&self) -> u64 {
        self.0
    }

    fn check_inputs(&self, inputs: &Manifest) -> Result<(), PlanError> {
        inputs.expect_tensors(&[("payload", DType::U8)])
    }

    fn check_outputs(&self, _: &Manifest, outputs: &Manifest) -> Result<(), PlanError> {
        if *outputs == Manifest::empty() {
            return Ok(());
        }
        outputs.expect_tensors(&[("payload", DType::U8)])
    }
}

/// What is asked for of a chunk.
pub(super) fn built(
    place: Place,
    inputs: Manifest,
    outputs: Manifest,
) -> Result<Built<BenchPlan, ()>, StageError> {
    Envelope::new(BenchPlan(place.chunk.get()), inputs, outputs)
        .map(|envelope| Built::new(envelope, ()))
        .map_err(|e| StageError::new(FaultKind::Internal, "build", e.to_string()))
}

/// One tensor of so many bytes.
pub(super) fn payload(bytes: u64) -> Result<Manifest, ManifestError> {
    Manifest::new(&[TensorSpec::new("payload", DType::U8, &[bytes])?])
}
