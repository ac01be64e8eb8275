//! A crate that uses `pp-contract` alone: an audio vocoder that streams through the same contract.
//!
//! It brings its own plan and touches nothing of `pp-contract`. The front sends a few frames of a
//! mel spectrogram, Phase B sends back the samples. Everything else (header, order, sizes,
//! checksums, handshake) comes with the contract.

#![forbid(unsafe_code)]

use pp_contract::{DType, Envelope, Manifest, ManifestError, Plan, PlanError, TensorSpec};
use serde::{Deserialize, Serialize};

/// The fields of a [`VocoderPlan`], as they travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VocoderParts {
    /// The first frame of this piece.
    pub start_frame: u64,
    /// Number of frames, 1 to 4096.
    pub frames: u32,
    /// Mel bins of a frame, 1 to 256.
    pub mel_bins: u32,
    /// Samples that one frame becomes, 1 to 1024.
    pub hop: u32,
    /// Refinement passes, at least 1; each is one generator call.
    pub passes: u32,
}

/// Turn a piece of a spectrogram into samples.
///
/// In: `mel` f32 `[frames, mel_bins]`. Out: `samples` f32 `[frames * hop]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VocoderPlan(VocoderParts);

impl VocoderPlan {
    /// The tensors that go with the plan and those that come back: all that the front needs to
    /// ask for this piece.
    ///
    /// # Errors
    /// [`ManifestError`]; the bounds of the plan are well within those of a manifest, so none is
    /// known to occur.
    pub fn manifests(&self) -> Result<(Manifest, Manifest), ManifestError> {
        let mel = TensorSpec::new("mel", DType::F32, &self.mel_dims())?;
        let samples = TensorSpec::new("samples", DType::F32, &[self.samples()])?;
        Ok((Manifest::new(&[mel])?, Manifest::new(&[samples])?))
    }

    fn mel_dims(&self) -> [u64; 2] {
        [self.0.frames.into(), self.0.mel_bins.into()]
    }

    fn samples(&self) -> u64 {
        u64::from(self.0.frames) * u64::from(self.0.hop)
    }
}

impl Plan for VocoderPlan {
    const NAME: &'static str = "vocoder";
    const VERSION: u16 = 1;
    type Parts = VocoderParts;

    fn from_parts(parts: VocoderParts) -> Result<Self, PlanError> {
        for (field, value, max) in [
            ("frames", parts.frames, 4096),
            ("mel_bins", parts.mel_bins, 256),
            ("hop", parts.hop, 1024),
            ("passes", parts.passes, u32::MAX),
        ] {
            if !(1..=max).contains(&value) {
                return Err(PlanError::field(field, value, format!("1 to {max}")));
            }
        }
        Ok(Self(parts))
    }

    fn parts(&self) -> &VocoderParts {
        &self.0
    }

    fn expected_calls(&self) -> u32 {
        self.0.passes
    }

    fn start_frame(&self) -> u64 {
        self.0.start_frame
    }

    fn check_inputs(&self, inputs: &Manifest) -> Result<(), PlanError> {
        inputs.expect_tensors(&[("mel", DType::F32)])?;
        inputs.expect_shape("mel", &self.mel_dims())
    }

    fn check_outputs(&self, _inputs: &Manifest, outputs: &Manifest) -> Result<(), PlanError> {
        outputs.expect_tensors(&[("samples", DType::F32)])?;
        outputs.expect_shape("samples", &[self.samples()])
    }
}

/// What the front of a vocoder asks for.
pub type VocoderEnvelope = Envelope<VocoderPlan>;
