//! Luma PSNR over whole clips.

use serde::{Deserialize, Serialize};

use pp_kernels::Bits;

use super::header::Header;

/// Squared differences of luma, summed. The result is the PSNR of the mean squared error over all samples added, not a
/// mean of decibels, so a few perfect frames cannot outshine the rest.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct LumaPsnr {
    squares: u64,
    samples: u64,
}

impl LumaPsnr {
    /// Adds whole frames of two clips with this header.
    pub fn add(&mut self, header: &Header, reference: &[u8], decoded: &[u8]) {
        let (frame, luma) = (header.frame_bytes(), header.luma_bytes());
        for (a, b) in reference
            .chunks_exact(frame)
            .zip(decoded.chunks_exact(frame))
        {
            let (a, b) = (&a[..luma], &b[..luma]);
            self.squares += match header.bits() {
                Bits::Eight => squares(a, b),
                Bits::Ten => squares_of_two(a, b),
            };
            self.samples += (luma / header.bits().bytes()) as u64;
        }
    }

    /// Adds what was found elsewhere.
    pub fn merge(&mut self, other: Self) {
        self.squares = self.squares.saturating_add(other.squares);
        self.samples = self.samples.saturating_add(other.samples);
    }

    /// Gives decibels against the largest sample of so many bits; infinite when all samples agree, none when nothing was
    /// added.
    pub fn db(&self, bits: Bits) -> Option<f64> {
        let peak = f64::from(bits.peak());
        (self.samples > 0)
            .then(|| 10.0 * (peak * peak * self.samples as f64 / self.squares as f64).log10())
    }
}

fn squares(a: &[u8], b: &[u8]) -> u64 {
    // Short runs fit 32 bits, which vectorize.
    let run = |(a, b): (&[u8], &[u8])| -> u64 {
        let sum: u32 = a
            .iter()
            .zip(b)
            .map(|(&a, &b)| u32::from(a.abs_diff(b)).pow(2))
            .sum();
        u64::from(sum)
    };
    a.chunks(1 << 15).zip(b.chunks(1 << 15)).map(run).sum()
}

/// The same of samples of two bytes, which have 10 bits.
fn squares_of_two(a: &[u8], b: &[u8]) -> u64 {
    // 4,096 squares of 1,023 fit 32 bits. What a plugin decodes may be beyond.
    const RUN: usize = 2 << 12;
    let run = |(a, b): (&[u8], &[u8])| -> u64 {
        let pairs = a.as_chunks().0.iter().zip(b.as_chunks().0);
        let apart = pairs.map(|(a, b)| u16::from_le_bytes(*a).abs_diff(u16::from_le_bytes(*b)));
        let apart = apart.map(|apart| apart.min(1023));
        let sum: u32 = apart.map(|apart| u32::from(apart).pow(2)).sum();
        u64::from(sum)
    };
    a.chunks(RUN).zip(b.chunks(RUN)).map(run).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pp_kernels::Chroma;

    #[test]
    fn known_errors_give_known_decibels() {
        let header = Header::new(256, 256, Chroma::Mono).unwrap();
        let black = vec![0; 2 * header.frame_bytes()];
        let db = |level: u8| {
            let mut psnr = LumaPsnr::default();
            psnr.add(&header, &black, &vec![level; black.len()]);
            psnr.db(Bits::Eight).unwrap()
        };
        assert_eq!(db(255), 0.0);
        // 20 log10(255 / 16), by a pocket calculator.
        assert!((db(16) - 24.0485).abs() < 1e-4);
        assert_eq!(db(0), f64::INFINITY);
        assert_eq!(LumaPsnr::default().db(Bits::Eight), None);
    }

    #[test]
    fn samples_of_10_bits_have_a_peak_of_1023() {
        let header = Header::parse(b"YUV4MPEG2 W128 H65 C420p10").unwrap();
        let frame = |sample: u16| sample.to_le_bytes().repeat(header.frame_bytes() / 2);
        let db = |level| {
            let mut psnr = LumaPsnr::default();
            psnr.add(&header, &frame(0), &frame(level));
            psnr.db(Bits::Ten).unwrap()
        };
        assert_eq!(db(1023), 0.0);
        // 20 log10(1023 / 16), by a pocket calculator.
        assert!((db(16) - 36.1151).abs() < 1e-4);
    }

    #[test]
    fn chroma_does_not_count_and_frames_weigh_the_same() {
        let header = Header::new(3, 3, Chroma::C420).unwrap();
        let (luma, frame) = (header.luma_bytes(), header.frame_bytes());
        let reference = vec![100; 2 * frame];
        let mut decoded = reference.clone();
        decoded[luma..frame].fill(0);
        decoded[frame..frame + luma].fill(110);
        let mut psnr = LumaPsnr::default();
        psnr.add(&header, &reference, &decoded);
        // Mean squared error 0 and 100, so 50: 10 log10(65025 / 50).
        assert!((psnr.db(Bits::Eight).unwrap() - 31.1411).abs() < 1e-4);
    }
}
