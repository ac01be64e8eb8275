//! What Phase B says back: the outcome of a chunk, or why there is none.

use core::fmt;

use serde::{Deserialize, Serialize};

use crate::bounded::Text;
use crate::codec::{self, BodyError};
use crate::manifest::{Manifest, WireManifest};
use crate::seal::Seal;

/// The result of one chunk. Durations were measured where the work was done, so no clocks need
/// agree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// How many generator calls were made.
    pub observed_calls: u32,
    /// How long the chunk took.
    pub phase_b_us: u64,
    /// How long Phase B had waited for it.
    pub idle_us: u64,
    /// The first frame of the chunk, as Phase B saw it.
    pub start_frame: u64,
    /// What is said of a payload that carries digests; none where it does not.
    pub seal: Option<Seal>,
    /// The tensors of the payload that goes with it.
    pub outputs: Manifest,
}

impl Outcome {
    pub(crate) fn from_body(body: &[u8]) -> Result<Self, BodyError> {
        #[derive(Deserialize)]
        struct Body {
            observed_calls: u32,
            phase_b_us: u64,
            idle_us: u64,
            start_frame: u64,
            seal: Option<Seal>,
            outputs: WireManifest,
        }

        let body: Body = codec::decode("a result", body)?;
        Ok(Self {
            observed_calls: body.observed_calls,
            phase_b_us: body.phase_b_us,
            idle_us: body.idle_us,
            start_frame: body.start_frame,
            seal: body.seal,
            outputs: body.outputs.try_into()?,
        })
    }
}

wire_enum! {
    /// Which kind of thing went wrong.
    pub enum FailureCode {
        /// A message that could not be understood, or that breaks the contract.
        BadMessage = 1 => "bad message",
        /// Contents that the stage cannot work on.
        BadInput = 2 => "bad input",
        /// The computation failed.
        Compute = 3 => "compute failed",
        /// The work was given up on purpose.
        Interrupted = 4 => "interrupted",
        /// A fault of our own.
        Internal = 5 => "internal error",
        /// A device, its driver or NCCL failed.
        Device = 6 => "device failed",
        /// A digest differs: bytes are not those that were sent, or that were there before.
        Drift = 7 => "drift",
    }
}

wire_enum! {
    /// One of the two sides of the pipeline.
    pub enum Side {
        /// Rank 0: builds the inputs, takes the results.
        Front = 0 => "front",
        /// Rank 1: runs Phase B.
        PhaseB = 1 => "phase B",
    }
}

/// Why there is no result, and whose fault that is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind of thing went wrong.
    pub code: FailureCode,
    /// The side that caused it; not always the one that noticed.
    pub blames: Side,
    /// For people; [`Text::truncated`] makes any message fit.
    pub message: Text<512>,
}

impl Failure {
    pub(crate) fn from_body(body: &[u8]) -> Result<Self, BodyError> {
        codec::decode("a failure", body)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({} to blame): {}",
            self.code, self.blames, self.message
        )
    }
}
