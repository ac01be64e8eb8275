//! The inner loop: windowed patch attention of one band of one plane over one key frame.
//!
//! For one offset `o` of the window all queries are handled at once: squared differences are summed over 4×4 cells,
//! four cells make the distance of an 8×8 patch, its softmax weight goes back to the four cells it covers, and each
//! cell adds `weight × value(x + o)` and `weight` to its sums. Overlapping patches thus meet in the same numerator and
//! denominator, which is how flash attention merges partial results. About seven vector operations for sixteen samples
//! and an offset.
//!
//! The loops are plain Rust over arrays of sixteen floats, compiled for several instruction sets and chosen at run
//! time. There is no fused multiply-add, so that every machine computes the same bits.

use multiversion::multiversion;

use super::plane::{CELL, LANES, PlaneLayout};

/// One query plane against one key plane.
#[derive(Clone, Copy)]
pub(super) struct Attend<'a> {
    pub(super) layout: PlaneLayout,
    pub(super) query: &'a [f32],
    pub(super) key: &'a [f32],
    pub(super) value: &'a [f32],
    /// Offsets run over `-radius..=radius` in both directions; at most the layout's margin.
    pub(super) radius: isize,
    /// Sum of squared differences (of 64 samples) that counts as none: what the noise alone makes.
    pub(super) floor: f32,
    /// Logit of one squared difference above the floor, not negative.
    pub(super) scale: f32,
    /// Added to every logit.
    pub(super) bias: f32,
}

/// Sums of one band: numerators in the layout's order, denominators per cell.
#[derive(Debug, Default)]
pub(super) struct Sums {
    numerator: Vec<f32>,
    denominator: Vec<f32>,
    distance: Vec<f32>,
    weight: Vec<f32>,
}

/// Rows of cells in a band.
pub(super) const BAND: usize = 8;

type Lanes = [f32; LANES];

fn lanes(slice: &[f32], at: usize) -> &Lanes {
    slice[at..at + LANES]
        .try_into()
        .expect("a slice of LANES floats")
}

fn lanes_mut(slice: &mut [f32], at: usize) -> &mut Lanes {
    (&mut slice[at..at + LANES])
        .try_into()
        .expect("a slice of LANES floats")
}

impl Sums {
    /// Makes room for a band of the layout and sets the sums to zero.
    pub(super) fn start(&mut self, layout: &PlaneLayout) {
        let width = row_floats(layout);
        for (sums, rows) in [
            (&mut self.numerator, BAND * CELL * CELL),
            (&mut self.denominator, BAND),
            (&mut self.distance, BAND + 2),
            (&mut self.weight, BAND + 1),
        ] {
            sums.clear();
            sums.resize(rows * width, 0.0);
        }
    }

    /// Writes the band's result, numerator over denominator, into `out`; the share `keep` of it comes from `noisy`.
    /// Both start at the band's first row of samples, margin to the left included.
    pub(super) fn finish(&self, layout: &PlaneLayout, keep: f32, noisy: &[f32], out: &mut [f32]) {
        let width = row_floats(layout);
        let lines = out
            .chunks_exact_mut(layout.stride)
            .zip(noisy.chunks_exact(layout.stride));
        for (number, (out, noisy)) in lines.enumerate() {
            let inside = layout.margin / CELL..layout.margin / CELL + layout.cells_x;
            let numerators = &self.numerator[number * width..];
            let denominators = &self.denominator[number / (CELL * CELL) * width..];
            let samples = out[inside.clone()].iter_mut().zip(&noisy[inside]);
            for ((out, noisy), (n, d)) in samples.zip(numerators.iter().zip(denominators)) {
                let estimate = n / d;
                *out = estimate + keep * (noisy - estimate);
            }
        }
    }
}

/// Floats of one row of cells in the sums: whole vectors, and one to look ahead.
fn row_floats(layout: &PlaneLayout) -> usize {
    (layout.cells_x.div_ceil(LANES) + 1) * LANES
}

/// Adds what the queries of the rows of cells `first..first + rows` gather from the key plane.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2",
    "aarch64+neon"
))]
pub(super) fn attend(job: &Attend<'_>, first: usize, rows: usize, sums: &mut Sums) {
    // Distances reach one row of cells beyond the band on either side, where there is one.
    let low = first.saturating_sub(1);
    let high = (first + rows + 1).min(job.layout.cells_y);
    let width = row_floats(&job.layout);
    for dy in -job.radius..=job.radius {
        for dx in -job.radius..=job.radius {
            let offset = Offset::new(&job.layout, dx, dy);
            for (cell, out) in (low..high).zip(sums.distance.chunks_exact_mut(width)) {
                distances(job, &offset, cell, out);
            }
            let below = sums.distance[width..].chunks_exact(width);
            let pairs = sums.distance.chunks_exact(width).zip(below);
            let patches = pairs.zip(sums.weight.chunks_exact_mut(width));
            for ((upper, lower), out) in patches.take(high - low - 1) {
                weights(job, upper, lower, out);
            }
            for row in 0..rows {
                let cell = first + row;
                // The patches that start in the row of cells above, and in this one.
                let above = (cell > low).then(|| &sums.weight[(cell - 1 - low) * width..][..width]);
                let here = (cell + 1 < high).then(|| &sums.weight[(cell - low) * width..][..width]);
                let denominator = &mut sums.denominator[row * width..][..width];
                let numerator =
                    &mut sums.numerator[row * CELL * CELL * width..][..CELL * CELL * width];
                gather(job, &offset, cell, [above, here], denominator, numerator);
            }
        }
    }
}

/// Where the keys of one offset lie.
struct Offset {
    dy: isize,
    /// For each column of a query cell, the start of the key's column in a row of samples.
    column: [usize; CELL],
}

impl Offset {
    #[inline(always)]
    fn new(layout: &PlaneLayout, dx: isize, dy: isize) -> Offset {
        // Column `phase` of a cell meets column `x % 4` of the key's cell `x / 4`.
        let column = std::array::from_fn(|phase| {
            let x = (phase as isize + dx + layout.margin as isize) as usize;
            x % CELL * layout.stride + x / CELL
        });
        Offset { dy, column }
    }

    /// The four rows of samples of a row of cells, shifted down by the offset.
    #[inline(always)]
    fn rows<'a>(&self, layout: &PlaneLayout, plane: &'a [f32], cell: usize) -> &'a [f32] {
        &plane[layout.row((cell * CELL) as isize + self.dy)..][..CELL * CELL * layout.stride]
    }
}

/// Sums of squared differences over the cells of one row.
#[inline(always)]
fn distances(job: &Attend<'_>, offset: &Offset, cell: usize, out: &mut [f32]) {
    let layout = &job.layout;
    let home = Offset::new(layout, 0, 0);
    let query = home.rows(layout, job.query, cell);
    let key = offset.rows(layout, job.key, cell);
    for x in (0..layout.cells_x).step_by(LANES) {
        let mut sum = [0.0; LANES];
        for row in 0..CELL {
            let line = row * CELL * layout.stride;
            for (q, k) in home.column.into_iter().zip(offset.column) {
                let q = lanes(query, line + q + x);
                let k = lanes(key, line + k + x);
                for i in 0..LANES {
                    let difference = q[i] - k[i];
                    sum[i] += difference * difference;
                }
            }
        }
        *lanes_mut(out, x) = sum;
    }
}

/// Softmax weights of the patches that start in one row of cells, from the sums of that row and the next.
#[inline(always)]
fn weights(job: &Attend<'_>, upper: &[f32], lower: &[f32], out: &mut [f32]) {
    let cells_x = job.layout.cells_x;
    for x in (0..cells_x).step_by(LANES) {
        let (a, b) = (lanes(upper, x), lanes(upper, x + 1));
        let (c, d) = (lanes(lower, x), lanes(lower, x + 1));
        let weight = lanes_mut(out, x);
        for i in 0..LANES {
            let distance = (a[i] + b[i]) + (c[i] + d[i]);
            let excess = (distance - job.floor).max(0.0);
            weight[i] = exp(job.bias - excess * job.scale);
        }
    }
    // No patch starts at the last cell of a row.
    out[cells_x - 1..].fill(0.0);
}

/// Adds the values of one row of cells, each weighted by the patches that cover its cell.
#[inline(always)]
fn gather(
    job: &Attend<'_>,
    offset: &Offset,
    cell: usize,
    patches: [Option<&[f32]>; 2],
    denominator: &mut [f32],
    numerator: &mut [f32],
) {
    let layout = &job.layout;
    let value = offset.rows(layout, job.value, cell);
    let width = denominator.len();
    for x in (0..layout.cells_x).step_by(LANES) {
        let mut sum = [0.0; LANES];
        for weight in patches.into_iter().flatten() {
            let own = lanes(weight, x);
            let left: Lanes = match x {
                0 => std::array::from_fn(|i| if i == 0 { 0.0 } else { own[i - 1] }),
                _ => *lanes(weight, x - 1),
            };
            for i in 0..LANES {
                sum[i] += own[i] + left[i];
            }
        }
        let total = lanes_mut(denominator, x);
        for i in 0..LANES {
            total[i] += sum[i];
        }
        for row in 0..CELL {
            for (phase, column) in offset.column.into_iter().enumerate() {
                let v = lanes(value, row * CELL * layout.stride + column + x);
                let n = lanes_mut(numerator, (row * CELL + phase) * width + x);
                for i in 0..LANES {
                    n[i] += sum[i] * v[i];
                }
            }
        }
    }
}

/// `e^x` for x in −80..=80 (clamped), relative error below 3e-7 + |x| · 2^-23 (the second part from `x · log2 e`).
///
/// `2^n · 2^f` with n the nearest integer and f within ±0.5; 2^f by its Taylor series to the sixth power.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const TO_INTEGER: f32 = 12_582_912.0; // 1.5 · 2^23: adding it leaves the nearest integer in the low bits
    let t = x.clamp(-80.0, 80.0) * std::f32::consts::LOG2_E;
    let shifted = t + TO_INTEGER;
    let f = t - (shifted - TO_INTEGER);
    let p = 1.540_353e-4;
    let p = p * f + 1.333_355_8e-3;
    let p = p * f + 9.618_129e-3;
    let p = p * f + 5.550_411e-2;
    let p = p * f + 2.402_265e-1;
    let p = p * f + std::f32::consts::LN_2;
    let p = p * f + 1.0;
    let power = (shifted.to_bits() << 23).wrapping_add(127 << 23);
    p * f32::from_bits(power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_as_close_as_its_comment_says() {
        for step in -80_000..=80_000 {
            let x = step as f32 / 1000.0;
            let exact = f64::from(x).exp();
            let relative = (f64::from(exp(x)) - exact).abs() / exact;
            // Half a unit for the constant log2 e, half a unit for the product.
            let rounding = f64::from(x.abs()) * 2f64.powi(-23);
            assert!(
                relative <= 3e-7 + rounding,
                "exp({x}) is off by {relative:e}"
            );
        }
    }
}
