//! The clip that faults are made on: small, with a scene cut in the middle.

use std::io::{self, Write};
use std::path::Path;

const WIDTH: usize = 64;
const HEIGHT: usize = 48;
/// Frames; chunks are of [`FRAMES_PER_CHUNK`].
const FRAMES: usize = 24;
/// Frames that travel together.
pub(super) const FRAMES_PER_CHUNK: &str = "2";
/// Chunks in the clip.
pub(super) const CHUNKS: u64 = 12;
/// The chunk that begins behind the scene cut, and its first frame.
pub(super) const CUT: u64 = 6;

/// Writes the clip.
pub(super) fn write(path: &Path) -> io::Result<()> {
    let mut file = io::BufWriter::new(std::fs::File::create(path)?);
    writeln!(file, "YUV4MPEG2 W{WIDTH} H{HEIGHT} F25:1 Ip A1:1 C420jpeg")?;
    for frame in 0..FRAMES {
        file.write_all(b"FRAME\n")?;
        let is_behind = frame as u64 >= CUT * FRAMES as u64 / CHUNKS;
        let luma = (0..WIDTH * HEIGHT).map(|at| {
            let (x, y) = (at % WIDTH, at / WIDTH);
            let slope = (x + y + frame) % 64;
            if is_behind { 220 - slope } else { 20 + slope }
        });
        let bytes: Vec<u8> = luma.map(|value| value as u8).collect();
        file.write_all(&bytes)?;
        file.write_all(&vec![128; WIDTH * HEIGHT / 2])?;
    }
    file.flush()
}
