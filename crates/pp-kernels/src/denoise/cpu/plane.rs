//! The layout in which the attention loop reads a plane: by phase of four columns, with a mirrored margin.
//!
//! The loop works on cells of 4×4 samples. A row of samples is stored as four rows, one for each column of the cells:
//! sample `x` lies in row `x % 4` at place `x / 4`. So a vector register holds the same column of sixteen neighbouring
//! cells; sums over a cell need no shuffle, and a key shifted by any `dx` is again a plain (unaligned) load.
//!
//! Around the plane lies a margin in which it is mirrored (the edge sample is repeated: index −1 is 0, −2 is 1), so
//! that every key of the window exists.

use super::tokens::{self, Sample};
use crate::denoise::geometry::{PATCH, PlaneGeometry, TOKEN};

/// Side of a cell.
pub(super) const CELL: usize = 4;
/// Cells in a vector.
pub(super) const LANES: usize = 16;

/// Where the samples of a padded plane lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlaneLayout {
    /// Cells in a row of the padded plane.
    pub(super) cells_x: usize,
    /// Rows of cells.
    pub(super) cells_y: usize,
    /// Mirrored samples on each side, a multiple of 4.
    pub(super) margin: usize,
    /// Floats from one row of a phase to the next.
    pub(super) stride: usize,
}

impl PlaneLayout {
    pub(super) fn new(geometry: &PlaneGeometry, radius: usize) -> PlaneLayout {
        let cells_x = geometry.padded_width() / CELL;
        let margin = radius.next_multiple_of(CELL);
        // Vectors run past the last cell; what they read there is never used.
        let stride = cells_x.next_multiple_of(LANES) + 2 * margin / CELL + 1;
        PlaneLayout {
            cells_x,
            cells_y: geometry.padded_height() / CELL,
            margin,
            stride,
        }
    }

    /// Floats of a plane.
    pub(super) fn len(&self) -> usize {
        (self.cells_y * CELL + 2 * self.margin) * CELL * self.stride
    }

    /// Index of the first sample of row `y` in phase 0; the margin is included, so `y` may be negative.
    pub(super) fn row(&self, y: isize) -> usize {
        (y + self.margin as isize) as usize * CELL * self.stride
    }

    /// Index of sample (`x`, `y`), either of which may lie in the margin.
    pub(super) fn at(&self, x: isize, y: isize) -> usize {
        let x = (x + self.margin as isize) as usize;
        self.row(y) + x % CELL * self.stride + x / CELL
    }

    /// Reads tokens into a plane, margin and all.
    pub(super) fn load<S: Sample>(&self, tokens: &[u8], geometry: &PlaneGeometry, out: &mut [f32]) {
        self.load_rows::<S>(tokens, (geometry, 0), out);
        self.mirror(out);
    }

    /// Reads tokens into a plane, from this row of tokens on, and leaves the margin as it is.
    pub(super) fn load_rows<S: Sample>(
        &self,
        tokens: &[u8],
        (geometry, row): (&PlaneGeometry, usize),
        out: &mut [f32],
    ) {
        for (index, token) in tokens.chunks_exact(S::BYTES * TOKEN).enumerate() {
            let x = index % geometry.tokens_x() * PATCH;
            let y = (row + index / geometry.tokens_x()) * PATCH;
            for dy in 0..PATCH {
                let start = self.at(x as isize, (y + dy) as isize);
                for (i, sample) in tokens::read_row::<S>(token, dy).into_iter().enumerate() {
                    out[start + i % CELL * self.stride + i / CELL] = sample;
                }
            }
        }
    }

    /// Writes a plane's samples as tokens, from this row of tokens on.
    pub(super) fn store<S: Sample>(
        &self,
        plane: &[f32],
        (geometry, row): (&PlaneGeometry, usize),
        out: &mut [u8],
    ) {
        for (index, token) in out.chunks_exact_mut(S::BYTES * TOKEN).enumerate() {
            let x = index % geometry.tokens_x() * PATCH;
            let y = (row + index / geometry.tokens_x()) * PATCH;
            for dy in 0..PATCH {
                let start = self.at(x as isize, (y + dy) as isize);
                let row = std::array::from_fn(|i| plane[start + i % CELL * self.stride + i / CELL]);
                tokens::write_row::<S>(token, dy, &row);
            }
        }
    }

    /// Fills the margin from the plane.
    pub(super) fn mirror(&self, plane: &mut [f32]) {
        let (width, height) = (
            (self.cells_x * CELL) as isize,
            (self.cells_y * CELL) as isize,
        );
        let margin = self.margin as isize;
        for y in 0..height {
            for x in (-margin..0).chain(width..width + margin) {
                plane[self.at(x, y)] = plane[self.at(mirrored(x, width), y)];
            }
        }
        for y in (-margin..0).chain(height..height + margin) {
            let from = self.row(mirrored(y, height));
            plane.copy_within(from..from + CELL * self.stride, self.row(y));
        }
    }
}

/// The sample inside `0..length` that stands for `x`.
pub(crate) fn mirrored(x: isize, length: isize) -> isize {
    let folded = x.rem_euclid(2 * length);
    folded.min(2 * length - 1 - folded)
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::config::Chroma;
    use crate::denoise::geometry::Geometry;

    #[test]
    fn mirror_repeats_the_edge_and_folds_as_often_as_needed() {
        let seen: Vec<_> = (-7..9).map(|x| mirrored(x, 3)).collect();
        assert_eq!(seen, [0, 0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0, 0, 1, 2]);
    }

    #[test]
    fn tokens_survive_the_layout() {
        let geometry = Geometry::new(41, 17, Chroma::Mono);
        let plane = &geometry.planes[0];
        let layout = PlaneLayout::new(plane, 7);
        let mut tokens = vec![0; geometry.frame_bytes()];
        for (i, token) in tokens.chunks_exact_mut(2 * TOKEN).enumerate() {
            for dy in 0..PATCH {
                tokens::write_row::<bf16>(
                    token,
                    dy,
                    &std::array::from_fn(|dx| ((i * 31 + dy * 8 + dx) % 256) as f32),
                );
            }
        }
        let mut samples = vec![0.0; layout.len()];
        layout.load::<bf16>(&tokens, plane, &mut samples);
        let mut back = vec![0; tokens.len()];
        layout.store::<bf16>(&samples, (plane, 0), &mut back);
        assert_eq!(back, tokens);
        // A guide is not rounded on its way.
        let third = samples
            .iter()
            .map(|sample| sample / 3.0)
            .collect::<Vec<_>>();
        let mut guide = vec![0; 2 * tokens.len()];
        layout.store::<f32>(&third, (plane, 0), &mut guide);
        let mut again = vec![0.0; layout.len()];
        layout.load::<f32>(&guide, plane, &mut again);
        assert_eq!(again, third);
        assert_eq!(samples[layout.at(-1, 3)], samples[layout.at(0, 3)]);
        assert_eq!(samples[layout.at(-7, -2)], samples[layout.at(6, 1)]);
        assert_eq!(
            samples[layout.at(48 + 6, 24 + 6)],
            samples[layout.at(41, 17)]
        );
    }
}
