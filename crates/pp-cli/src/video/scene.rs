//! Finding hard cuts: the frame after a cut has nothing to do with the frame before it.
//!
//! Two signs must agree. The picture, reduced to a coarse grid of means (which noise hardly moves), changes by much and by
//! far more than it did lately; and the share of dark, middle and bright samples shifts. Motion moves the first but not
//! the second, noise moves neither, a pan moves the first steadily and so raises its own bar.

use super::header::Header;

const GRID: usize = 16;
const BINS: usize = 16;
/// Least mean change of a grid cell, in steps of 8-bit luma.
const LEAST_CHANGE: f32 = 10.0;
/// Least share of samples that moved to another bin.
const LEAST_SHIFT: f32 = 0.12;
/// How many times the usual change a cut must show.
const OVER_USUAL: f32 = 3.0;

/// Watches the luma of successive frames.
#[derive(Debug, Default)]
pub(crate) struct CutDetector {
    last: Option<Signature>,
    /// Running mean of the change between frames of one scene.
    usual_change: f32,
}

#[derive(Debug)]
struct Signature {
    grid: [f32; GRID * GRID],
    /// Shares, smoothed over neighbouring bins so that noise across a border counts little.
    histogram: [f32; BINS],
}

impl CutDetector {
    /// Whether a hard cut lies between the frame seen before and this one. The first frame is none.
    pub(crate) fn is_cut(&mut self, header: &Header, frame: &[u8]) -> bool {
        let width = header.width() as usize;
        let now = Signature::of(&frame[..header.luma_bytes()], width);
        let Some(last) = self.last.replace(now) else {
            return false;
        };
        let Some(now) = &self.last else { return false };
        let change = distance(&last.grid, &now.grid) / (GRID * GRID) as f32;
        let shift = distance(&last.histogram, &now.histogram) / 2.0;
        let cut = change > LEAST_CHANGE.max(OVER_USUAL * self.usual_change) && shift > LEAST_SHIFT;
        // A cut says nothing about the motion of the scene that begins.
        self.usual_change = if cut {
            0.0
        } else {
            0.7 * self.usual_change + 0.3 * change
        };
        cut
    }
}

impl Signature {
    fn of(luma: &[u8], width: usize) -> Self {
        let height = luma.len() / width;
        let (mut sums, mut counts) = ([0u32; GRID * GRID], [0u32; GRID * GRID]);
        let mut histogram = [0u32; BINS];
        // Every other row says enough.
        for (y, row) in luma.chunks_exact(width).enumerate().step_by(2) {
            let cells = y * GRID / height * GRID;
            for column in 0..GRID {
                let part = &row[column * width / GRID..(column + 1) * width / GRID];
                sums[cells + column] += part.iter().map(|&s| u32::from(s)).sum::<u32>();
                counts[cells + column] += part.len() as u32;
            }
            for &sample in row {
                histogram[usize::from(sample) * BINS / 256] += 1;
            }
        }
        let total: u32 = histogram.iter().sum();
        let share = |bin: usize| {
            histogram
                .get(bin)
                .map_or(0.0, |&n| n as f32 / total.max(1) as f32)
        };
        Self {
            grid: std::array::from_fn(|i| sums[i] as f32 / counts[i].max(1) as f32),
            histogram: std::array::from_fn(|i| {
                0.5 * share(i) + 0.25 * (share(i.wrapping_sub(1)) + share(i + 1))
            }),
        }
    }
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum()
}

#[cfg(test)]
mod tests {
    use super::super::header::Sampling;
    use super::super::noise::Noise;
    use super::*;

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
        let header = Header::new(WIDTH as u32, HEIGHT as u32, Sampling::Mono).unwrap();
        let mut detector = CutDetector::default();
        let found = frames.into_iter().enumerate();
        found
            .filter(|(_, f)| detector.is_cut(&header, f))
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
        let noise = Noise::new(20.0, 5);
        let frames = (0..30).map(|k| {
            let mut frame = scene(k / 10, k as f32);
            noise.add(u64::from(k), &mut frame);
            frame
        });
        assert_eq!(cuts(frames), [10, 20]);
    }

    #[test]
    fn a_fast_pan_and_a_fade_are_no_cuts() {
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
    fn cuts_in_quick_succession_are_all_found() {
        assert_eq!(cuts((0..6).map(|k| scene(k % 3, 0.0))), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn pictures_smaller_than_the_grid_are_handled() {
        let header = Header::new(3, 5, Sampling::Mono).unwrap();
        let mut detector = CutDetector::default();
        assert!(!detector.is_cut(&header, &[0; 15]));
        assert!(!detector.is_cut(&header, &[0; 15]));
    }
}
