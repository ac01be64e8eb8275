//! Frames to patch tokens and back: the whole of encode and decode, and exact in both directions.
//!
//! A token is an 8×8 patch in row-major order, each sample a bf16. Samples up to 255 need 8 bits of significand and
//! bf16 has 8, so nothing is lost. A sample of 10 bits is a quarter of itself in f16, which has 11: so all that is computed
//! from tokens is in steps of 8 bits. Planes are padded by repeating the last row and column.

use half::{bf16, f16};

use crate::config::Bits;
use crate::denoise::geometry::{PATCH, PlaneGeometry, TOKEN};
use crate::frame::{PlaneView, PlaneViewMut};

/// Bytes of one row of a token.
const ROW: usize = 2 * PATCH;

/// What the samples of a token are.
pub(super) trait Sample {
    const BYTES: usize;
    fn read(bytes: &[u8]) -> f32;
    /// Rounds to the nearest, ties to even.
    fn write(value: f32, bytes: &mut [u8]);
}

/// Frames of 8 bits.
impl Sample for bf16 {
    const BYTES: usize = 2;

    fn read(bytes: &[u8]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
    }

    fn write(value: f32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
    }
}

/// Frames of 10 bits.
impl Sample for f16 {
    const BYTES: usize = 2;

    fn read(bytes: &[u8]) -> f32 {
        f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
    }

    fn write(value: f32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&f16::from_f32(value).to_le_bytes());
    }
}

/// Guides: as they are computed, without rounding.
impl Sample for f32 {
    const BYTES: usize = 4;

    fn read(bytes: &[u8]) -> f32 {
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    fn write(value: f32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

/// A quarter of each sample of 10 bits, as f16.
const QUARTERS: [u16; 1024] = {
    let mut quarters = [0; 1024];
    let mut sample = 0;
    while sample < quarters.len() {
        quarters[sample] = f16::from_f32_const(sample as f32 / 4.0).to_bits();
        sample += 1;
    }
    quarters
};

/// Writes the tokens of one plane; `out` is the plane's part of the frame's tokens. A sample above the peak counts as that.
pub(super) fn encode_plane(plane: PlaneView<'_>, geometry: &PlaneGeometry, out: &mut [u8]) {
    match plane.bits() {
        // The upper half of an f32 is its bf16, and the lower half of a small integer's is zero.
        Bits::Eight => encode_with(plane, geometry, out, |[sample]| {
            (f32::from(sample).to_bits() >> 16) as u16
        }),
        Bits::Ten => encode_with(plane, geometry, out, |two| {
            let sample = u16::from_le_bytes(two).min(Bits::Ten.peak());
            QUARTERS[usize::from(sample)]
        }),
    }
}

/// Writes the tokens of a plane whose samples have so many bytes, each as `encoded` gives it.
fn encode_with<const BYTES: usize>(
    plane: PlaneView<'_>,
    geometry: &PlaneGeometry,
    out: &mut [u8],
    encoded: impl Fn([u8; BYTES]) -> u16,
) {
    let encode_row = |samples: &[[u8; BYTES]; PATCH], place: &mut [u8]| {
        for (sample, two) in samples.iter().zip(place.chunks_exact_mut(2)) {
            two.copy_from_slice(&encoded(*sample).to_le_bytes());
        }
    };
    let per_token_row = geometry.tokens_x() * TOKEN * 2;
    for (y, tokens) in out.chunks_exact_mut(per_token_row).enumerate() {
        for dy in 0..PATCH {
            let row = plane.row((y * PATCH + dy).min(geometry.height - 1));
            let mut places = tokens
                .chunks_exact_mut(2 * TOKEN)
                .map(|token| &mut token[dy * ROW..][..ROW]);
            let (patches, rest) = row.as_chunks::<BYTES>().0.as_chunks::<PATCH>();
            for (patch, place) in patches.iter().zip(&mut places) {
                encode_row(patch, place);
            }
            if let (Some(place), Some(last)) = (places.next(), rest.last()) {
                let mut patch = [*last; PATCH];
                patch[..rest.len()].copy_from_slice(rest);
                encode_row(&patch, place);
            }
        }
    }
}

/// Writes the samples of one plane: rounded to the nearest (ties up) and clamped to what the plane's bits hold.
pub(super) fn decode_plane(tokens: &[u8], geometry: &PlaneGeometry, plane: &mut PlaneViewMut<'_>) {
    // A cast saturates, and turns NaN into 0.
    match plane.bits() {
        Bits::Eight => decode_with(tokens, geometry, plane, |two| {
            [(bf16::read(two) + 0.5) as u8]
        }),
        Bits::Ten => decode_with(tokens, geometry, plane, |two| {
            let sample = (f16::read(two) * 4.0 + 0.5) as u16;
            sample.min(Bits::Ten.peak()).to_le_bytes()
        }),
    }
}

/// Writes the samples of a plane, each of so many bytes as `decoded` gives it.
fn decode_with<const BYTES: usize>(
    tokens: &[u8],
    geometry: &PlaneGeometry,
    plane: &mut PlaneViewMut<'_>,
    decoded: impl Fn(&[u8]) -> [u8; BYTES],
) {
    let per_token_row = geometry.tokens_x() * TOKEN * 2;
    for (y, tokens) in tokens.chunks_exact(per_token_row).enumerate() {
        let rows = PATCH.min(geometry.height - y * PATCH);
        for dy in 0..rows {
            let row = plane.row_mut(y * PATCH + dy).as_chunks_mut().0;
            let places = tokens
                .chunks_exact(2 * TOKEN)
                .map(|token| &token[dy * ROW..][..ROW]);
            for (samples, place) in row.chunks_mut(PATCH).zip(places) {
                for (sample, two) in samples.iter_mut().zip(place.chunks_exact(2)) {
                    *sample = decoded(two);
                }
            }
        }
    }
}

/// Reads one row of eight samples of a token.
pub(super) fn read_row<S: Sample>(token: &[u8], dy: usize) -> [f32; PATCH] {
    let row = &token[dy * PATCH * S::BYTES..][..PATCH * S::BYTES];
    std::array::from_fn(|i| S::read(&row[i * S::BYTES..][..S::BYTES]))
}

/// Writes one row of eight samples of a token.
pub(super) fn write_row<S: Sample>(token: &mut [u8], dy: usize, samples: &[f32; PATCH]) {
    let row = &mut token[dy * PATCH * S::BYTES..][..PATCH * S::BYTES];
    for (sample, place) in samples.iter().zip(row.chunks_exact_mut(S::BYTES)) {
        S::write(*sample, place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Chroma;
    use crate::denoise::geometry::Geometry;

    #[test]
    fn every_sample_value_survives_and_padding_repeats_the_edge() {
        let geometry = Geometry::new(19, 18, Chroma::Mono);
        let plane = geometry.planes[0];
        let samples: Vec<u8> = (0..19 * 18).map(|i| (i % 256) as u8).collect();
        let mut tokens = vec![0xEE; geometry.frame_bytes()];
        encode_plane(
            PlaneView::new(&samples, 19, 19, 18).unwrap(),
            &plane,
            &mut tokens,
        );
        let mut back = vec![0; samples.len()];
        decode_plane(
            &tokens,
            &plane,
            &mut PlaneViewMut::new(&mut back, 19, 19, 18).unwrap(),
        );
        assert_eq!(back, samples);
        // The last token's last row holds the last row's last three samples, then the last sample five times.
        let token = &tokens[8 * TOKEN * 2..];
        let last = f32::from(samples[18 * 19 - 1]);
        assert_eq!(read_row::<bf16>(token, 7)[2..], [last; 6]);
        assert_eq!(read_row::<bf16>(token, 1), read_row::<bf16>(token, 7));
    }

    #[test]
    fn decode_rounds_and_clamps() {
        let geometry = Geometry::new(16, 16, Chroma::Mono);
        let mut tokens = vec![0; geometry.frame_bytes()];
        let values = [-3.0, 0.49, 0.5, 1.0, 254.0, 300.0, f32::NAN, 2.5];
        write_row::<bf16>(&mut tokens, 0, &values);
        let mut back = vec![9; 256];
        decode_plane(
            &tokens,
            &geometry.planes[0],
            &mut PlaneViewMut::new(&mut back, 16, 16, 16).unwrap(),
        );
        assert_eq!(back[..8], [0, 0, 1, 1, 254, 255, 0, 3]);
    }
}
