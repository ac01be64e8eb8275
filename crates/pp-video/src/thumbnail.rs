//! A small picture of a frame, for the viewers of a running job.

use pp_job::seen::Thumbnail;
use pp_kernels::Chroma;

/// The largest width and height.
const SIZE: (u32, u32) = (160, 90);

/// Makes a picture of one frame with this width and height, without blending pixels, so that noise stays noise. Samples have 8
/// bits, or 10 in two bytes where the frame is twice as long; colours are taken as BT.601 in the limited range. A frame that is
/// shorter than it must be is grey at its end.
#[must_use]
pub fn thumbnail((width, height): (u32, u32), chroma: Chroma, frame: &[u8]) -> Thumbnail {
    let (across, down) = match chroma {
        Chroma::Mono | Chroma::C444 => (1, 1),
        Chroma::C422 => (2, 1),
        Chroma::C420 => (2, 2),
    };
    let plane = |across: u32, down: u32| {
        let (width, height) = (width.div_ceil(across), height.div_ceil(down));
        (width as usize, width as usize * height as usize)
    };
    let (luma, of_chroma) = (plane(1, 1), plane(across, down));
    let samples = luma.1
        + if chroma == Chroma::Mono {
            0
        } else {
            2 * of_chroma.1
        };
    let is_wide = frame.len() >= 2 * samples;
    let sample = |at: usize| match is_wide {
        false => frame.get(at).copied(),
        true => match frame.get(2 * at..2 * at + 2) {
            Some(&[low, high]) => Some((u16::from_le_bytes([low, high]) >> 2).min(255) as u8),
            _ => None,
        },
    };
    let (small, rows) = fitted(width, height);
    let mut rgb = Vec::with_capacity(3 * small as usize * rows as usize);
    for row in 0..rows {
        // The middle of what a pixel stands for.
        let y = (2 * row + 1) * height / (2 * rows);
        for column in 0..small {
            let x = (2 * column + 1) * width / (2 * small);
            let luma = sample(y as usize * luma.0 + x as usize).unwrap_or(128);
            let at = (y / down) as usize * of_chroma.0 + (x / across) as usize;
            let coloured = |plane: usize| match chroma {
                Chroma::Mono => 128,
                _ => sample(samples - (2 - plane) * of_chroma.1 + at).unwrap_or(128),
            };
            rgb.extend(to_rgb(luma, coloured(0), coloured(1)));
        }
    }
    Thumbnail {
        width: small,
        height: rows,
        rgb,
    }
}

/// The largest size within [`SIZE`] with the same sides' ratio, and no larger than the frame.
fn fitted(width: u32, height: u32) -> (u32, u32) {
    let (most_wide, most_high) = (SIZE.0.min(width), SIZE.1.min(height));
    match width * most_high <= height * most_wide {
        true => ((width * most_high / height).max(1), most_high),
        false => (most_wide, (height * most_wide / width).max(1)),
    }
}

fn to_rgb(y: u8, u: u8, v: u8) -> [u8; 3] {
    let luma = 298 * (i32::from(y) - 16);
    let (u, v) = (i32::from(u) - 128, i32::from(v) - 128);
    let sums = [luma + 409 * v, luma - 100 * u - 208 * v, luma + 516 * u];
    sums.map(|sum| ((sum + 128) >> 8).clamp(0, 255) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame whose left half is red and whose right half is black, in samples of 8 bits.
    fn frame(width: usize, height: usize, chroma: Chroma) -> Vec<u8> {
        let half = |width: usize, height: usize, left: u8, right: u8| {
            let row = (0..width).map(move |x| if 2 * x < width { left } else { right });
            let row: Vec<u8> = row.collect();
            row.repeat(height)
        };
        let (w, h) = match chroma {
            Chroma::Mono | Chroma::C444 => (width, height),
            Chroma::C422 => (width.div_ceil(2), height),
            Chroma::C420 => (width.div_ceil(2), height.div_ceil(2)),
        };
        let mut planes = vec![half(width, height, 81, 16)];
        if chroma != Chroma::Mono {
            planes.extend([half(w, h, 90, 128), half(w, h, 240, 128)]);
        }
        planes.concat()
    }

    #[test]
    fn colours_of_every_layout_are_those_of_the_frame() {
        for chroma in [Chroma::Mono, Chroma::C420, Chroma::C422, Chroma::C444] {
            let eight = frame(321, 181, chroma);
            let ten = eight
                .iter()
                .flat_map(|byte| (u16::from(*byte) << 2).to_le_bytes());
            for frame in [eight.clone(), ten.collect()] {
                let picture = thumbnail((321, 181), chroma, &frame);
                assert_eq!((picture.width, picture.height), (159, 90));
                let pixels: Vec<&[u8]> = picture.rgb.chunks(3).collect();
                assert_eq!(pixels.len(), 159 * 90);
                let left = match chroma {
                    Chroma::Mono => [76, 76, 76],
                    _ => [255, 0, 0],
                };
                for row in pixels.chunks(159) {
                    assert_eq!(
                        (row[0], row[158]),
                        (&left[..], &[0, 0, 0][..]),
                        "{chroma:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_picture_fits_and_is_never_larger_than_its_frame() {
        for (frame, picture) in [
            ((1920, 1080), (160, 90)),
            ((352, 288), (110, 90)),
            ((16_384, 1), (160, 1)),
            ((1, 16_384), (1, 90)),
            ((16_384, 16_384), (90, 90)),
            ((32, 20), (32, 20)),
        ] {
            assert_eq!(fitted(frame.0, frame.1), picture);
        }
        let cut_off = thumbnail((4, 4), Chroma::C420, &[16; 3]);
        assert_eq!(cut_off.rgb.len(), 3 * 16);
    }
}
