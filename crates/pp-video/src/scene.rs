//! Finding hard cuts: the frame after a cut has nothing to do with the frame before it.
//!
//! A picture is reduced to a coarse grid of mean brightness, which noise hardly moves. A cut changes the grid by much and
//! by far more than the frames before it did: a fast pan changes it steadily, and so raises its own bar. On real clips
//! with noise up to sigma 40, cuts changed the grid by 34 and more, pans by 16 at most.

use pp_kernels::Bits;

use super::header::Header;

const GRID: usize = 16;
/// Least mean change of a cell, in 8-bit sample values (0 to 255).
const LEAST_CHANGE: f32 = 20.0;
/// How many times the usual change a cut must show.
const OVER_USUAL: f32 = 2.5;

/// Mean luma of each cell of a picture, in 8-bit sample values.
pub(crate) type Grid = [f32; GRID * GRID];

/// Watches the luma of successive frames.
#[derive(Debug, Default)]
pub(crate) struct CutDetector {
    last: Option<Grid>,
    /// Running mean of the change between frames of one scene; none until it has moved.
    usual_change: Option<f32>,
}

impl CutDetector {
    /// Says whether a hard cut lies between the frame seen before and the one that has this grid. The first frame is none.
    pub(crate) fn is_cut(&mut self, now: Grid) -> bool {
        let Some(last) = self.last.replace(now) else {
            return false;
        };
        let sum: f32 = last.iter().zip(&now).map(|(a, b)| (a - b).abs()).sum();
        let change = sum / now.len() as f32;
        let usual = self.usual_change.unwrap_or(0.0);
        let cut = change > LEAST_CHANGE.max(OVER_USUAL * usual);
        // A cut says nothing about the motion in the scene that begins.
        self.usual_change =
            (!cut).then(|| self.usual_change.map_or(change, |u| 0.7 * u + 0.3 * change));
        cut
    }
}

/// The grid of a frame.
pub(crate) fn grid(header: &Header, frame: &[u8]) -> Grid {
    let (luma, width) = (&frame[..header.luma_bytes()], header.width() as usize);
    let (height, sample) = (header.height() as usize, header.bits().bytes());
    let (mut sums, mut counts) = ([0u32; GRID * GRID], [0u32; GRID * GRID]);
    // Every other row says enough.
    for (y, row) in luma.chunks_exact(width * sample).enumerate().step_by(2) {
        let cells = y * GRID / height * GRID;
        for column in 0..GRID {
            let place = |column: usize| column * width / GRID * sample;
            let part = &row[place(column)..place(column + 1)];
            sums[cells + column] += sum(part, header.bits());
            counts[cells + column] += (part.len() / sample) as u32;
        }
    }
    let scale = u32::from(header.bits().scale());
    std::array::from_fn(|i| sums[i] as f32 / (counts[i].max(1) * scale) as f32)
}

/// The samples of a part of a row, added up.
fn sum(part: &[u8], bits: Bits) -> u32 {
    match bits {
        Bits::Eight => part.iter().map(|&s| u32::from(s)).sum(),
        Bits::Ten => {
            let samples = part.as_chunks().0.iter();
            samples.map(|two| u32::from(u16::from_le_bytes(*two))).sum()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::noise::Noise;
    use super::*;
    use pp_kernels::Chroma;

    const WIDTH: usize = 96;
    const HEIGHT: usize = 80;

    /// A scene of soft shapes that slides by `shift` pixels.
    fn scene(kind: u32, shift: f32) -> Vec<u8> {
        let pixel = |i: usize| {
            let (x, y) = ((i % WIDTH) as f32 + shift, (i / WIDTH) as f32);
            let value = match kind {
                0 => 90.0 + 60.0 * (x / 19.0).sin() * (y / 13.0).cos(),
                1 => 150.0 + 70.0 * ((x + 2.0 * y) / 31.0).sin(),
                _ => 60.0 + 40.0 * (y / 7.0).sin(),
            };
            value as u8
        };
        (0..WIDTH * HEIGHT).map(pixel).collect()
    }

    fn cuts(frames: impl IntoIterator<Item = Vec<u8>>) -> Vec<usize> {
        let header = Header::new(WIDTH as u32, HEIGHT as u32, Chroma::Mono).unwrap();
        let mut detector = CutDetector::default();
        let found = frames.into_iter().enumerate();
        found
            .filter(|(_, f)| detector.is_cut(grid(&header, f)))
            .map(|(k, _)| k)
            .collect()
    }

    #[test]
    fn a_change_of_scene_is_a_cut_and_nothing_else_is() {
        let frames = (0..30).map(|k| scene(k / 10, k as f32));
        assert_eq!(cuts(frames), [10, 20]);
    }

    #[test]
    fn noise_hides_no_cut_and_makes_none() {
        let noise = Noise::new(20.0, 5, Bits::Eight);
        let frames = (0..30).map(|k| {
            let mut frame = scene(k / 10, k as f32);
            noise.add(u64::from(k), &mut frame);
            frame
        });
        assert_eq!(cuts(frames), [10, 20]);
    }

    #[test]
    fn a_pan_that_speeds_up_and_a_fade_are_no_cuts() {
        assert!(cuts((0..30).map(|k| scene(0, 0.5 * (k * k) as f32))).is_empty());
        assert!(cuts((0..40).map(|k| scene(0, 9.0 * k as f32))).is_empty());
        let fade = (0..40).map(|k| {
            scene(1, 0.0)
                .iter()
                .map(|&s| (u32::from(s) * (40 - k) / 40) as u8)
                .collect()
        });
        assert!(cuts(fade).is_empty());
    }

    #[test]
    fn the_grid_of_10_bits_is_that_of_8() {
        let coarse = Header::new(WIDTH as u32, HEIGHT as u32, Chroma::Mono).unwrap();
        let line = format!("YUV4MPEG2 W{WIDTH} H{HEIGHT} Cmono10");
        let fine = Header::parse(line.as_bytes()).unwrap();
        let frame = scene(0, 3.0);
        let four_times = frame.iter().flat_map(|&s| (4 * u16::from(s)).to_le_bytes());
        let four_times: Vec<u8> = four_times.collect();
        assert_eq!(grid(&fine, &four_times), grid(&coarse, &frame));
    }

    #[test]
    fn cuts_in_quick_succession_are_all_found() {
        assert_eq!(cuts((0..6).map(|k| scene(k % 3, 0.0))), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn pictures_smaller_than_the_grid_are_handled() {
        let header = Header::new(3, 5, Chroma::Mono).unwrap();
        let mut detector = CutDetector::default();
        assert!(!detector.is_cut(grid(&header, &[0; 15])));
        assert!(!detector.is_cut(grid(&header, &[0; 15])));
    }
}
