//! Luma PSNR of two 4:2:0 clips, apart from the code under test on purpose.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// A YUV4MPEG2 clip in 4:2:0 that lies in memory.
pub(super) struct Clip<'a> {
    frames: &'a [u8],
    luma: usize,
    frame: usize,
}

impl<'a> Clip<'a> {
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self> {
        let end = bytes
            .iter()
            .position(|&b| b == b'\n')
            .context("no header line")?;
        let header = std::str::from_utf8(&bytes[..end])?;
        let side = |tag: char| -> Result<usize> {
            let word = header.split(' ').find_map(|word| word.strip_prefix(tag));
            Ok(word
                .with_context(|| format!("no {tag} in {header:?}"))?
                .parse()?)
        };
        let (width, height) = (side('W')?, side('H')?);
        let luma = width * height;
        let frame = luma + 2 * width.div_ceil(2) * height.div_ceil(2);
        let frames = &bytes[end + 1..];
        ensure!(
            frames.len().is_multiple_of(frame + 6),
            "{} bytes are no whole frames",
            frames.len()
        );
        Ok(Self {
            frames,
            luma,
            frame,
        })
    }

    /// The luma plane of each frame.
    pub(super) fn luma(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let luma = self.luma;
        self.frames
            .chunks_exact(self.frame + 6)
            .map(move |frame| &frame[6..6 + luma])
    }
}

/// PSNR of the mean squared error over all luma samples of both files.
pub(super) fn luma_psnr_db(clean: &Path, other: &Path) -> Result<f64> {
    let read =
        |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    psnr_db(&read(clean)?, &read(other)?)
}

fn psnr_db(clean: &[u8], other: &[u8]) -> Result<f64> {
    let (clean, other) = (Clip::parse(clean)?, Clip::parse(other)?);
    let count = clean.luma().count();
    ensure!(
        count == other.luma().count() && count > 0,
        "the clips differ in length"
    );
    let squares: u64 = clean
        .luma()
        .zip(other.luma())
        .flat_map(|(a, b)| a.iter().zip(b))
        .map(|(&a, &b)| u64::from(a.abs_diff(b)).pow(2))
        .sum();
    Ok(10.0 * (255.0 * 255.0 * (count * clean.luma) as f64 / squares as f64).log10())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clip(luma: u8) -> Vec<u8> {
        [b"YUV4MPEG2 W4 H2\nFRAME\n".as_slice(), &[luma; 8], &[0; 4]].concat()
    }

    #[test]
    fn a_known_difference_gives_known_decibels() {
        assert!((psnr_db(&clip(100), &clip(116)).unwrap() - 24.0485).abs() < 1e-4);
        assert!(psnr_db(&clip(1), &clip(1)[..20]).is_err());
    }
}
