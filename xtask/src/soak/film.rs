//! A film that is made while it is read: small frames, some noise, a scene cut now and then.

use std::io::{BufWriter, Result, Write};

use super::random::Random;

const SIDE: usize = 16;
const FRAME: usize = SIDE * SIDE;
const HEAD: &[u8] = b"FRAME\n";

/// Bytes of one frame in a Y4M file.
pub(super) const FRAME_BYTES: u64 = (FRAME + HEAD.len()) as u64;

/// A film of so many frames.
#[derive(Clone, Debug)]
pub(super) struct Film {
    pub(super) frames: u64,
    pub(super) seed: u64,
}

impl Film {
    pub(super) fn write(&self, out: impl Write) -> Result<()> {
        let mut out = BufWriter::with_capacity(1 << 16, out);
        writeln!(out, "YUV4MPEG2 W{SIDE} H{SIDE} F25:1 Ip A1:1 Cmono")?;
        let mut random = Random::new(self.seed);
        let mut light = 100;
        let mut frame = [0_u8; FRAME];
        for number in 0..self.frames {
            if random.below(300) == 0 {
                light = 40 + random.below(140);
            }
            for (at, sample) in frame.iter_mut().enumerate() {
                let slope = (at % SIDE + at / SIDE) as u64 + number % 16;
                *sample = (light + slope + random.next() % 24).min(255) as u8;
            }
            out.write_all(HEAD)?;
            out.write_all(&frame)?;
        }
        out.flush()
    }
}
