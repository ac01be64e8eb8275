//! Noise: how much of it a frame holds, and how to add it on purpose.

use pp_contract::VideoPlanParts;

use crate::config::SessionConfig;
use crate::frame::{FrameView, PlaneView};

/// The noise of each plane of a stream: given, or estimated from a chunk's middle frame when the clip begins or is cut.
#[derive(Debug)]
pub(crate) struct StreamNoise {
    given: Option<f32>,
    planes: usize,
    sigma: Vec<f32>,
}

impl StreamNoise {
    pub(crate) fn new(config: &SessionConfig) -> StreamNoise {
        StreamNoise {
            given: config.noise_sigma,
            planes: config.chroma.planes(),
            sigma: Vec::new(),
        }
    }

    /// The standard deviation for each plane of this chunk.
    pub(crate) fn of_chunk(&mut self, frames: &[FrameView<'_>], plan: &VideoPlanParts) -> &[f32] {
        if self.sigma.is_empty() || plan.init_cache || plan.reset_crossattn_cache {
            let frame = &frames[frames.len() / 2];
            let given = self.given;
            let planes = 0..self.planes;
            self.sigma.clear();
            self.sigma.extend(
                planes.map(|plane| given.unwrap_or_else(|| estimate_sigma(frame.plane(plane)))),
            );
        }
        &self.sigma
    }
}

/// Estimates the standard deviation of the noise of one plane, in steps of 8 bits.
///
/// Immerkær's difference of two Laplacians removes what is smooth; the median of its absolute value over the plane is
/// hardly moved by edges. Clipped samples (0 and the peak) say nothing about the noise and are left out.
/// Source: J. Immerkær, "Fast noise variance estimation", CVIU 64(2), 1996; the median instead of the mean after
/// D. Donoho and I. Johnstone, "Ideal spatial adaptation by wavelet shrinkage", Biometrika 81(3), 1994.
#[must_use]
pub fn estimate_sigma(plane: PlaneView<'_>) -> f32 {
    let peak = plane.bits().peak();
    // |response| is at most 16 times the peak.
    let mut histogram = vec![0u32; 16 * usize::from(peak) + 1];
    let mut rows: [Vec<u16>; 3] = Default::default();
    let read = |row: &mut Vec<u16>, y: usize| {
        row.clear();
        row.extend(plane.samples(y));
    };
    let mut count = 0u32;
    for y in 1..plane.height().saturating_sub(1) {
        rows.rotate_left(1);
        match y {
            1 => (0..).zip(&mut rows).for_each(|(y, row)| read(row, y)),
            y => read(&mut rows[2], y + 1),
        }
        for ((a, b), c) in rows[0]
            .windows(3)
            .zip(rows[1].windows(3))
            .zip(rows[2].windows(3))
        {
            if b[1] == 0 || b[1] == peak {
                continue;
            }
            let s = |v: u16| i32::from(v);
            let response = s(a[0]) + s(a[2]) + s(c[0]) + s(c[2])
                - 2 * (s(a[1]) + s(b[0]) + s(b[2]) + s(c[1]))
                + 4 * s(b[1]);
            histogram[response.unsigned_abs() as usize] += 1;
            count += 1;
        }
    }
    if count == 0 {
        return 0.0;
    }
    // The median by counting, with the place inside its bin interpolated.
    let half = f64::from(count) / 2.0;
    let mut below = 0.0;
    for (value, &n) in histogram.iter().enumerate() {
        let n = f64::from(n);
        if below + n >= half {
            // Bin `value` covers value ± 0.5, bin 0 only its upper half.
            let (start, length) = if value == 0 {
                (0.0, 0.5)
            } else {
                (value as f64 - 0.5, 1.0)
            };
            let median = start + length * (half - below) / n;
            // Response of white noise: variance 36 σ²; median of |N(0,1)|: 0.6745.
            let sigma = median / (6.0 * 0.674_489_75);
            return (sigma / f64::from(plane.bits().scale())) as f32;
        }
        below += n;
    }
    0.0
}

/// Adds Gaussian noise of standard deviation `sigma` to samples, rounded and clipped to 0..=255.
///
/// The noise depends on `seed`, `frame`, `plane` and the sample's index alone, so it does not matter how a stream is
/// cut into chunks.
pub fn add_gaussian(samples: &mut [u8], sigma: f32, seed: u64, frame: u64, plane: u32) {
    let mut state = mix(mix(seed ^ 0x9E37_79B9_7F4A_7C15) ^ frame) ^ mix(u64::from(plane) + 1);
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(state)
    };
    // 53 bits, never zero.
    let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) * 2f64.powi(-53);
    for pair in samples.chunks_mut(2) {
        // Box-Muller.
        let radius = f64::from(sigma) * (-2.0 * unit(next()).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * unit(next())).sin_cos();
        for (sample, normal) in pair.iter_mut().zip([radius * cos, radius * sin]) {
            *sample = (f64::from(*sample) + normal).round().clamp(0.0, 255.0) as u8;
        }
    }
}

/// The finalizer of SplitMix64. Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators",
/// OOPSLA 2014.
fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}
