//! The numbers of the denoiser: window, passes, schedule. The formula they enter stands in [`crate::reference`].

use crate::error::Failure;

/// Frames of earlier chunks that a frame can attend to, and that Phase B remembers.
pub const CONTEXT_FRAMES: usize = 2;
/// Largest spatial offset.
pub const RADIUS: usize = 7;

/// Changes whenever results may: raise it with the formula or its numbers.
pub const DIGEST: u64 = 0x6370_755f_0000_0001;

/// Strength of each pass in thousandths: the filter's h is this times the noise's standard deviation.
const SCHEDULE: [i64; 2] = [700, 400];

/// `denoising_step_list` for a number of steps; further steps repeat the last one.
pub fn schedule(steps: u32) -> impl Iterator<Item = i64> {
    let last = SCHEDULE[SCHEDULE.len() - 1];
    (0..steps as usize).map(move |step| SCHEDULE.get(step).copied().unwrap_or(last))
}

/// One pass, as the schedule gives it.
#[derive(Debug, Clone, Copy)]
pub struct Pass {
    /// h over σ.
    pub strength: f32,
}

/// How a squared distance becomes a logit: `-max(distance - floor, 0) · scale`.
#[derive(Debug, Clone, Copy)]
pub struct Logit {
    /// Distance that noise alone makes.
    pub floor: f32,
    /// Of one squared difference.
    pub scale: f32,
}

fn env(name: &str, default: f32) -> f32 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

impl Pass {
    /// The pass of one element of `denoising_step_list`.
    ///
    /// # Errors
    /// A strength outside 1..=10000.
    pub fn from_step(step: i64) -> Result<Pass, Failure> {
        if !(1..=10_000).contains(&step) {
            return Err(Failure::invalid(format!(
                "denoising_step_list holds {step}, must lie within 1 and 10000"
            )));
        }
        Ok(Pass {
            strength: step as f32 / 1000.0,
        })
    }

    /// The window's radius for a key frame this far away in time; `None` where it is not looked at.
    #[must_use]
    pub fn radius(&self, distance: u64) -> Option<isize> {
        match distance {
            0 => Some(env("R0", 5.0) as isize),
            1 => Some(env("R1", 4.0) as isize),
            2 => (env("R2", 4.0) >= 0.0).then_some(env("R2", 4.0) as isize),
            _ => None,
        }
    }

    /// The logit's numbers for a plane whose noise is `sigma`.
    #[must_use]
    pub fn logit(&self, sigma: f32, first: bool, key_is_estimate: bool) -> Logit {
        let variance = sigma * sigma;
        let (floor, h) = match (first, key_is_estimate) {
            (true, _) => (env("F1", 2.0), env("H1", 0.7)),
            (false, false) => (env("F2N", 1.0), env("H2N", 0.5)),
            (false, true) => (env("F2", 0.05), env("H2", 0.4)),
        };
        let h2 = (h * h * variance).max(1e-6);
        Logit {
            floor: 64.0 * floor * variance,
            scale: 1.0 / (64.0 * h2),
        }
    }
}
