//! The plan of the benchmarks: none of the video's fields, one tensor, any size.

use pp_contract::{DType, Manifest, ManifestError, Plan, PlanError, StageSpec};
use serde::{Deserialize, Serialize};

/// The payload is one tensor of bytes, or nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct BenchPlan {
    /// Which chunk it is.
    pub(super) chunk: u64,
    /// Whether the stages between source and sink hand a payload on, of the same size.
    pub(super) hands_on: bool,
}

impl Plan for BenchPlan {
    const NAME: &'static str = "bench";
    const VERSION: u16 = 2;
    type Parts = Self;

    fn from_parts(parts: Self) -> Result<Self, PlanError> {
        Ok(parts)
    }

    fn parts(&self) -> &Self {
        self
    }

    fn start_frame(&self) -> u64 {
        self.chunk
    }

    fn check(&self, stage: &StageSpec, _: bool, tensors: &Manifest) -> Result<(), PlanError> {
        match &*stage.name == SOURCE || self.hands_on {
            true => tensors.expect_tensors(&[("payload", DType::U8)]),
            false => tensors.expect_tensors(&[]),
        }
    }
}

/// The name of the source. The stages behind it are s1, s2 and so on.
pub(super) const SOURCE: &str = "s0";

/// One tensor of so many bytes.
pub(super) fn payload(bytes: u64) -> Result<Manifest, ManifestError> {
    Manifest::single("payload", DType::U8, &[bytes])
}
