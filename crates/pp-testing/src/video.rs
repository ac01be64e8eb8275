//! Videos made up on the spot.

/// A Y4M file: a gradient that moves, with some noise; every byte depends on its place.
pub fn video(width: usize, height: usize, sampling: &str, frames: usize) -> Vec<u8> {
    scenes(width, height, sampling, frames, frames)
}

/// The same in scenes of so many frames: every second one is a negative.
pub fn scenes(width: usize, height: usize, sampling: &str, frames: usize, each: usize) -> Vec<u8> {
    let (w2, h2) = (width.div_ceil(2), height.div_ceil(2));
    let chroma = match sampling {
        "mono" => 0,
        "420jpeg" | "420p10" => 2 * w2 * h2,
        "422" => 2 * w2 * height,
        "444" => 2 * width * height,
        other => panic!("no sampling {other}"),
    };
    let mut file = format!("YUV4MPEG2 W{width} H{height} F25:1 Ip A1:1 C{sampling}\n").into_bytes();
    let mut seed = 12345_u32;
    for frame in 0..frames {
        file.extend_from_slice(b"FRAME\n");
        for at in 0..width * height + chroma {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let slope = (at % width) * 3 + at / width + frame * 5;
            let sample = (slope as u32 % 200 + (seed >> 27)) as u8;
            let sample = if frame / each % 2 == 1 {
                255 - sample
            } else {
                sample
            };
            match sampling {
                "420p10" => {
                    let finer = u16::from(sample) * 4 + (seed >> 20 & 3) as u16;
                    file.extend(finer.to_le_bytes());
                }
                _ => file.push(sample),
            }
        }
    }
    file
}
