//! A crate that uses `pp-contract` alone: an audio vocoder that streams through the same contract.
//!
//! It brings its own plan and touches nothing of `pp-contract`. The source sends a few frames of a mel spectrogram, the
//! stage `vocode` makes samples of them, and the sink accepts them. Everything else (header, order, sizes, checksums,
//! handshake) comes with the contract.

#![forbid(unsafe_code)]

use std::ops::Range;

use pp_contract::{DType, Manifest, ManifestError, Plan, PlanError, StageSpec};
use serde::{Deserialize, Serialize};

/// The stages, and a rank for each: the text that the ranks are started with.
pub const PIPELINE: &str = "mel@0 -> vocode@1 -> play@0";

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
    /// Refinement passes, at least 1; each is one call of `vocode`.
    pub passes: u32,
}

/// Turn a piece of a spectrogram into samples.
///
/// The source makes `mel` f32 `[frames, mel_bins]`, and `vocode` makes `samples` f32 `[frames * hop]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VocoderPlan(VocoderParts);

impl VocoderPlan {
    /// What the source makes for this piece.
    ///
    /// # Errors
    /// [`ManifestError`]; the bounds of the plan are well within those of a manifest, so none is
    /// known to occur.
    pub fn mel(&self) -> Result<Manifest, ManifestError> {
        Manifest::single("mel", DType::F32, &self.mel_dims())
    }

    /// What `vocode` makes of it.
    ///
    /// # Errors
    /// As [`VocoderPlan::mel`].
    pub fn samples(&self) -> Result<Manifest, ManifestError> {
        Manifest::single("samples", DType::F32, &[self.sample_count()])
    }

    fn mel_dims(&self) -> [u64; 2] {
        [self.0.frames.into(), self.0.mel_bins.into()]
    }

    fn sample_count(&self) -> u64 {
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

    fn calls(&self, stage: &StageSpec, laps: Range<u16>, _: u16) -> u32 {
        let in_each = match &*stage.name {
            "vocode" => self.0.passes,
            _ => 1,
        };
        in_each * laps.len() as u32
    }

    fn start_frame(&self) -> u64 {
        self.0.start_frame
    }

    fn check(&self, stage: &StageSpec, _: bool, tensors: &Manifest) -> Result<(), PlanError> {
        match &*stage.name {
            "vocode" => {
                tensors.expect_tensors(&[("samples", DType::F32)])?;
                tensors.expect_shape("samples", &[self.sample_count()])
            }
            _ => {
                tensors.expect_tensors(&[("mel", DType::F32)])?;
                tensors.expect_shape("mel", &self.mel_dims())
            }
        }
    }
}
