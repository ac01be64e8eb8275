//! Gaussian noise that is the same in every run, so that a denoiser can be judged.
//!
//! Each frame has its own generator, seeded by the seed and the frame's number: how frames are cut into chunks does not
//! matter. Samples come from a table of the normal distribution at 65,536 even quantiles, already multiplied by sigma and
//! rounded; a pixel is an integer, so rounding the noise or the sum is the same. Four samples cost one step of the
//! generator.

use pp_kernels::Bits;

const QUANTILES: usize = 1 << 16;

/// Noise of one standard deviation, ready to be added.
#[derive(Clone, Debug)]
pub struct Noise {
    seed: u64,
    table: Vec<i16>,
    bits: Bits,
}

impl Noise {
    /// Makes noise for samples of so many bits, with standard deviation `sigma` in 8-bit sample values (0 to 255); negative
    /// and absurd ones are brought into range.
    pub fn new(sigma: f32, seed: u64, bits: Bits) -> Self {
        let sigma = f64::from(sigma).clamp(0.0, 1_000.0) * f64::from(bits.scale());
        let table = normal_quantiles()
            .map(|z| (sigma * z).round() as i16)
            .collect();
        Self { seed, table, bits }
    }

    /// Adds noise to all planes of frame `number` and clips to what a sample holds.
    pub fn add(&self, number: u64, frame: &mut [u8]) {
        let mut state = mix(self.seed ^ mix(number));
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(state)
        };
        let peak = self.bits.peak() as i16;
        let noisy = |sample: i16, index: u64| {
            let noise = self.table[(index & 0xffff) as usize];
            sample.saturating_add(noise).clamp(0, peak)
        };
        match self.bits {
            Bits::Eight => {
                for four in frame.chunks_mut(4) {
                    let mut bits = next();
                    for sample in four {
                        *sample = noisy((*sample).into(), bits) as u8;
                        bits >>= 16;
                    }
                }
            }
            Bits::Ten => {
                for four in frame.as_chunks_mut().0.chunks_mut(4) {
                    let mut bits = next();
                    for sample in four {
                        *sample = noisy(i16::from_le_bytes(*sample), bits).to_le_bytes();
                        bits >>= 16;
                    }
                }
            }
        }
    }
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The middles of 65,536 equal parts of the standard normal distribution, found by summing its density from the left.
fn normal_quantiles() -> impl Iterator<Item = f64> {
    const STEP: f64 = 1e-4;
    let density = |z: f64| (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt();
    let (mut z, mut below) = (-6.0, 0.0);
    (0..QUANTILES).map(move |i| {
        let wanted = (i as f64 + 0.5) / QUANTILES as f64;
        while below < wanted && z < 6.0 {
            below += STEP * density(z + STEP / 2.0);
            z += STEP;
        }
        z
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(samples: &[u8], centre: f64) -> (f64, f64, f64) {
        let n = samples.len() as f64;
        let moment = |power| {
            samples
                .iter()
                .map(|&s| (f64::from(s) - centre).powi(power))
                .sum::<f64>()
                / n
        };
        (moment(1), moment(2).sqrt(), moment(4) / moment(2).powi(2))
    }

    #[test]
    fn noise_has_the_moments_of_a_gaussian() {
        let mut frame = vec![128; 1 << 20];
        Noise::new(20.0, 1, Bits::Eight).add(0, &mut frame);
        let (mean, deviation, kurtosis) = moments(&frame, 128.0);
        // Four standard errors of each estimate over 2^20 samples.
        assert!(mean.abs() < 0.08, "{mean}");
        assert!((deviation - 20.0).abs() < 0.06, "{deviation}");
        assert!((kurtosis - 3.0).abs() < 0.03, "{kurtosis}");
    }

    #[test]
    fn noise_of_10_bits_is_that_of_8_in_finer_steps() {
        let (mut coarse, mut fine) = (vec![128; 1 << 16], [0, 2].repeat(1 << 16));
        Noise::new(20.0, 1, Bits::Eight).add(5, &mut coarse);
        Noise::new(20.0, 1, Bits::Ten).add(5, &mut fine);
        let fine = fine.as_chunks().0.iter();
        let fine = fine.map(|two| f32::from(u16::from_le_bytes(*two)) / 4.0);
        let pairs = coarse.iter().zip(fine);
        let apart = pairs.map(|(coarse, fine)| (f32::from(*coarse) - fine).abs());
        // Each is rounded to its own step.
        let apart: Vec<_> = apart.collect();
        assert!(apart.iter().all(|apart| *apart <= 0.625), "{apart:?}");
        assert!(apart.iter().any(|apart| *apart > 0.0));
        let mut edges = [0, 0, 255, 3].repeat(1 << 10);
        Noise::new(20.0, 9, Bits::Ten).add(0, &mut edges);
        let edges = edges.as_chunks().0.iter();
        let edges: Vec<_> = edges.map(|two| u16::from_le_bytes(*two)).collect();
        assert!(edges.iter().all(|sample| *sample <= 1023));
        assert!(edges.contains(&0) && edges.contains(&1023));
    }

    #[test]
    fn neighbours_and_frames_are_uncorrelated() {
        let noise = Noise::new(20.0, 1, Bits::Eight);
        let (mut a, mut b) = (vec![128; 1 << 20], vec![128; 1 << 20]);
        noise.add(0, &mut a);
        noise.add(1, &mut b);
        let correlation = |x: &[u8], y: &[u8]| {
            let products = x
                .iter()
                .zip(y)
                .map(|(&x, &y)| (f64::from(x) - 128.0) * (f64::from(y) - 128.0));
            products.sum::<f64>() / x.len() as f64 / 400.0
        };
        for lag in 1..=4 {
            assert!(correlation(&a, &a[lag..]).abs() < 0.005, "lag {lag}");
        }
        assert!(correlation(&a, &b).abs() < 0.005);
    }

    #[test]
    fn the_same_seed_gives_the_same_frame_and_another_does_not() {
        let noisy = |seed, number| {
            let mut frame = vec![128; 1001];
            Noise::new(20.0, seed, Bits::Eight).add(number, &mut frame);
            frame
        };
        assert_eq!(noisy(7, 3), noisy(7, 3));
        assert_ne!(noisy(7, 3), noisy(8, 3));
        assert_ne!(noisy(7, 3), noisy(7, 4));
    }

    #[test]
    fn quantiles_match_the_tables_of_the_normal_distribution() {
        let table: Vec<f64> = normal_quantiles().collect();
        let at = |p: f64| table[(p * QUANTILES as f64) as usize];
        assert!((at(0.5) - 0.0).abs() < 1e-3);
        assert!((at(0.975) - 1.9600).abs() < 1e-3);
        assert!((at(0.84134) - 1.0).abs() < 1e-3);
        assert!((at(0.0013499) + 3.0).abs() < 5e-3);
    }

    #[test]
    fn clipping_keeps_black_and_white_in_range_and_no_noise_changes_nothing() {
        let mut frame = vec![0; 4096];
        frame[2048..].fill(255);
        let before = frame.clone();
        Noise::new(0.0, 9, Bits::Eight).add(0, &mut frame);
        assert_eq!(frame, before);
        Noise::new(20.0, 9, Bits::Eight).add(0, &mut frame);
        assert!(frame[..2048].iter().all(|&s| s < 128) && frame[2048..].iter().all(|&s| s > 127));
    }
}
