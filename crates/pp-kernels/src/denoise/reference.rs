//! The denoiser in plain f64, straight from the formula: the oracle that every backend is tested against.
//!
//! `phase_b` is *windowed patch attention*, that is, non-local means over space and time with patches for tokens. For
//! one plane, with frames `V_t` (the noisy samples, padded to whole 8×8 patches, mirrored outside), noise σ and
//! strength h = `denoising_step_list[n] / 1000` · σ · `noise_scale` in pass n:
//!
//! - queries are the 8×8 patches of the guide `G_t` whose corners are multiples of 4, so they overlap by half;
//! - keys are the patches of `G_s` at every offset `o = (dx, dy)` from the query with `|dx|, |dy| ≤ R(|s − t|)`, in the
//!   frames `s` of the chunk and in the context frames; values are the patches of `V_s` at the same places;
//! - the logit of query p and key p + o is
//!
//! ```text
//! a(p, o, s) = b(s) − max(‖G_t[p] − G_s[p + o]‖² − 64 · FLOOR · (v_t + v_s) · σ², 0) / (64 h²)
//! ```
//!
//! with `b` = `kv_cache_attention_bias` for context frames and 0 for others, and `v` the variance of the guide's noise
//! over σ²;
//! - overlapping results are merged by their softmax denominators:
//!
//! ```text
//! y(x) = Σ_{p ∋ x} Σ_{o, s} e^a(p,o,s) V_s(x + o) / Σ_{p ∋ x} Σ_{o, s} e^a(p,o,s)
//! ```
//!
//! In the first pass the guide is the frame itself (v = 1). In later ones it is `y + KEEP · (V − y)`, with y of the pass
//! before and v = KEEP²; context frames have no y and stay as they are (v = 1).
//!
//! Since `‖q − k‖² = ‖q‖² + ‖k‖² − 2 q·k`, a GPU computes the logits as a matrix product with a bias, and numerator and
//! denominator as a second product: attention with 64 channels, whose partial results merge as in flash attention.
//!
//! Sources: A. Buades, B. Coll, J.-M. Morel, "A non-local algorithm for image denoising", CVPR 2005 (patches, the
//! distance less 2σ²: "Non-Local Means Denoising", IPOL 2011) and "Nonlocal image and movie denoising", IJCV 76, 2008
//! (search in neighbouring frames without motion compensation); T. Dao et al., "FlashAttention", NeurIPS 2022 (merging
//! by denominators).

use crate::denoise::cpu::mirrored;
use crate::denoise::settings::{FLOOR, KEEP, RADIUS};

/// One plane of a chunk, and all that its result depends on.
#[derive(Debug, Clone)]
pub struct Chunk<'a> {
    /// Padded width, a multiple of 8.
    pub width: usize,
    /// Padded height, a multiple of 8.
    pub height: usize,
    /// The frames right before the chunk, oldest first; row-major samples.
    pub context: &'a [Vec<f64>],
    /// The frames of the chunk.
    pub frames: &'a [Vec<f64>],
    /// Standard deviation of the noise.
    pub sigma: f64,
    /// `noise_scale` of the plan.
    pub noise_scale: f64,
    /// `kv_cache_attention_bias` of the plan.
    pub bias: f64,
    /// h over σ for each pass: `denoising_step_list / 1000`.
    pub strengths: &'a [f64],
}

/// The result of all passes; with none, the frames themselves.
#[must_use]
pub fn denoise(chunk: &Chunk<'_>) -> Vec<Vec<f64>> {
    let mut result = chunk.frames.to_vec();
    let mut guides = chunk.frames.to_vec();
    let mut variance = 1.0;
    for strength in chunk.strengths {
        result = (0..chunk.frames.len())
            .map(|t| pass(chunk, &guides, variance, *strength, t))
            .collect();
        let keep = f64::from(KEEP);
        variance = keep * keep;
        for ((guide, estimate), noisy) in guides.iter_mut().zip(&result).zip(chunk.frames) {
            for ((g, y), v) in guide.iter_mut().zip(estimate).zip(noisy) {
                *g = y + keep * (v - y);
            }
        }
    }
    result
}

/// One pass over frame `t` of the chunk.
fn pass(
    chunk: &Chunk<'_>,
    guides: &[Vec<f64>],
    variance: f64,
    strength: f64,
    t: usize,
) -> Vec<f64> {
    let sigma = chunk.sigma * chunk.noise_scale;
    let h2 = (strength * sigma)
        .powi(2)
        .max(f64::from(crate::denoise::cpu::MIN_H2));
    let mut numerator = vec![0.0; chunk.width * chunk.height];
    let mut denominator = numerator.clone();

    let context = chunk
        .context
        .iter()
        .map(|frame| (frame, frame, 1.0, chunk.bias));
    let own = chunk
        .frames
        .iter()
        .zip(guides)
        .map(|(frame, guide)| (guide, frame, variance, 0.0));
    for (s, (keys, values, key_variance, bias)) in context.chain(own).enumerate() {
        let Some(radius) = RADIUS.get(s.abs_diff(t + chunk.context.len())) else {
            continue;
        };
        let radius = *radius as isize;
        let floor = 64.0 * f64::from(FLOOR) * (variance + key_variance) * sigma * sigma;
        for top in (0..=chunk.height - 8).step_by(4) {
            for left in (0..=chunk.width - 8).step_by(4) {
                for dy in -radius..=radius {
                    for dx in -radius..=radius {
                        let key = |plane: &[f64], x: usize, y: usize| {
                            let x = mirrored(x as isize + dx, chunk.width as isize) as usize;
                            let y = mirrored(y as isize + dy, chunk.height as isize) as usize;
                            plane[y * chunk.width + x]
                        };
                        let samples =
                            || (top..top + 8).flat_map(|y| (left..left + 8).map(move |x| (x, y)));
                        let distance: f64 = samples()
                            .map(|(x, y)| {
                                (guides[t][y * chunk.width + x] - key(keys, x, y)).powi(2)
                            })
                            .sum();
                        let weight = (bias - (distance - floor).max(0.0) / (64.0 * h2)).exp();
                        for (x, y) in samples() {
                            numerator[y * chunk.width + x] += weight * key(values, x, y);
                            denominator[y * chunk.width + x] += weight;
                        }
                    }
                }
            }
        }
    }
    numerator
        .iter()
        .zip(&denominator)
        .map(|(n, d)| n / d)
        .collect()
}
