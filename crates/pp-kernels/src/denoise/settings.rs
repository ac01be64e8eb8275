//! The numbers of the denoiser: window, passes, schedule. The formula they enter stands in [`crate::denoise::reference`].
//!
//! They were chosen on four natural clips at σ = 20. The mean gain is flat around them: h a quarter smaller or one
//! eighth larger, or a floor of 1.05 to 1.15, changes it by less than 0.15 dB. A floor below 1 costs 0.7 dB, because
//! equal patches then lose weight for their noise.

use crate::config::{Bits, Chroma};
use crate::error::Failure;
use crate::stage::{Description, StageInfo, StageKind};

/// Changes whenever results may: raise it with the formula or its numbers.
pub const DIGEST: u64 = 0x6370_755f_0000_0001;

/// Passes by default.
pub const DEFAULT_STEPS: u32 = SCHEDULE.len() as u32;

/// Frames of earlier chunks that a frame can attend to, and that `phase_b` remembers.
pub const CONTEXT_FRAMES: usize = 2;

/// Largest spatial offset, for key frames 0, 1 and 2 frames away.
pub const RADIUS: [usize; CONTEXT_FRAMES + 1] = [4, 2, 2];

/// Share of the noisy sample in the queries and keys of every pass but the first; the rest is the estimate of the pass
/// before. Half keeps what texture the estimate has lost, at a quarter of the noise's variance.
pub const KEEP: f32 = 0.5;

/// The distance that counts as none, in units of what the noise alone makes on average. Above 1, because half of all
/// equal patches lie above the average.
pub const FLOOR: f32 = 1.1;

/// Strength of each pass in thousandths: the filter's h over the noise's standard deviation.
const SCHEDULE: [i64; 2] = [400, 450];

/// `denoising_step_list` for a number of steps; further steps repeat the last one.
pub fn schedule(steps: u32) -> impl Iterator<Item = i64> {
    let last = SCHEDULE[SCHEDULE.len() - 1];
    (0..steps as usize).map(move |step| SCHEDULE.get(step).copied().unwrap_or(last))
}

/// Checks one element of `denoising_step_list` and gives h over σ.
///
/// # Errors
/// A strength outside 1..=10000.
pub fn strength(step: i64) -> Result<f32, Failure> {
    match step {
        1..=10_000 => Ok(step as f32 / 1000.0),
        _ => Err(Failure::invalid(format!(
            "denoising_step_list holds {step}, must lie within 1 and 10000"
        ))),
    }
}

/// How the kernels describe themselves that work in host memory or on CUDA devices.
pub(crate) fn description(name: &str, on_device: bool, digest: u64) -> Description {
    Description {
        name: name.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        host: !on_device,
        cuda: on_device,
        chroma: Chroma::ALL.into(),
        // What the CUDA kernels attend to has the 8 bits of bf16.
        bits: if on_device { Bits::Eight } else { Bits::Ten },
        context_frames: CONTEXT_FRAMES as u32,
        digest,
        stages: vec![
            alike("encode", StageKind::Source),
            StageInfo {
                in_parts: true,
                in_group: true,
                in_ring: true,
                same_bytes: false,
                ..alike("phase_b", StageKind::Middle)
            },
            alike("decode", StageKind::Sink),
        ],
    }
}

/// A stage that gives the same bytes on CPUs and on CUDA devices, and takes gaps and any steps.
fn alike(name: &str, kind: StageKind) -> StageInfo {
    StageInfo {
        same_bytes: true,
        in_gaps: true,
        any_steps: true,
        ..StageInfo::new(name, kind)
    }
}
