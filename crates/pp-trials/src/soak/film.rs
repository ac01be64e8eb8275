//! A video that is made while it is read: small frames that carry their number, some noise, a scene cut now and then.

use std::io::{BufWriter, Result as IoResult, Write};

use anyhow::{Context, Result, bail, ensure};
use pp_testing::Random;

const SIDE: usize = 16;
const FRAME: usize = SIDE * SIDE;
const MARK: &[u8] = b"FRAME\n";
const HEAD: &[u8] = b"YUV4MPEG2 W16 H16 F25:1 Ip A1:1 Cmono\n";

/// Bytes of one frame in a Y4M file.
pub(crate) const FRAME_BYTES: u64 = (FRAME + MARK.len()) as u64;

/// A video of so many frames.
#[derive(Clone, Debug)]
pub(crate) struct Film {
    pub(crate) frames: u64,
    pub(crate) seed: u64,
}

/// One frame.
struct Frame {
    /// Another scene begins with it.
    is_cut: bool,
    samples: [u8; FRAME],
}

/// What hard cuts dropped of a video.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Dropped {
    /// Cuts that overtook something.
    pub(super) cuts: u64,
    pub(super) frames: u64,
}

impl Film {
    fn frames(&self) -> impl Iterator<Item = Frame> {
        let mut random = Random::new(self.seed);
        let mut light = 100;
        (0..self.frames).map(move |number| {
            let is_cut = random.below(300) == 0;
            if is_cut {
                light = 40 + random.below(140);
            }
            let mut samples = [0; FRAME];
            for (at, sample) in samples.iter_mut().enumerate() {
                let slope = (at % SIDE + at / SIDE) as u64 + number % 16;
                *sample = (light + slope + random.any() % 24).min(255) as u8;
            }
            samples[..8].copy_from_slice(&number.to_le_bytes());
            Frame { is_cut, samples }
        })
    }

    pub(crate) fn write(&self, out: impl Write) -> IoResult<()> {
        let mut out = BufWriter::with_capacity(1 << 16, out);
        out.write_all(HEAD)?;
        for frame in self.frames() {
            out.write_all(MARK)?;
            out.write_all(&frame.samples)?;
        }
        out.flush()
    }

    /// Checks what a job wrote that changes no frame and drops what a cut overtakes: each frame is this video's frame
    /// of its number, the numbers rise, and what is missing lies right before the first frame of a scene and is at most
    /// `at_most` frames for each cut.
    pub(super) fn check(&self, written: &[u8], at_most: u64, is_whole: bool) -> Result<Dropped> {
        let written = written.strip_prefix(HEAD).context("another header")?;
        let mut source = (0..).zip(self.frames());
        let mut dropped = Dropped::default();
        let mut next = 0;
        let pictures = written.chunks_exact(FRAME_BYTES as usize);
        ensure!(
            !is_whole || pictures.remainder().is_empty(),
            "half a frame at the end"
        );
        for picture in pictures {
            let samples = &picture[MARK.len()..];
            let (first, _) = samples.split_first_chunk().context("no number")?;
            let number = u64::from_le_bytes(*first);
            ensure!(number >= next, "frame {number} comes where {next} is due");
            let mut cuts = 0;
            let made = loop {
                match source.next() {
                    Some((at, frame)) => {
                        cuts += u64::from(frame.is_cut);
                        if at == number {
                            break frame;
                        }
                    }
                    None => bail!("there is no frame {number}"),
                }
            };
            ensure!(
                picture.starts_with(MARK) && samples == made.samples,
                "frame {number} is another"
            );
            let missing = number - next;
            if missing > 0 {
                ensure!(
                    made.is_cut && missing <= at_most * cuts,
                    "{missing} frames are missing before frame {number}, where {cuts} scenes begin"
                );
                dropped.cuts += 1;
                dropped.frames += missing;
            }
            next = number + 1;
        }
        ensure!(
            !is_whole || next == self.frames,
            "it ends before frame {next} of {}",
            self.frames
        );
        Ok(dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILM: Film = Film {
        frames: 2000,
        seed: 3,
    };

    /// The video without these frames.
    fn without(missing: impl Fn(u64) -> bool) -> Vec<u8> {
        let mut whole = Vec::new();
        FILM.write(&mut whole).unwrap();
        let (head, frames) = whole.split_at(HEAD.len());
        let frames = (0..).zip(frames.chunks(FRAME_BYTES as usize));
        let kept = frames.filter(|(number, _)| !missing(*number));
        kept.fold(head.to_vec(), |all, (_, frame)| [&all, frame].concat())
    }

    #[test]
    fn only_what_a_cut_overtook_may_be_missing() {
        let cuts = (0..).zip(FILM.frames()).skip(10);
        let cut: u64 = cuts
            .filter(|(_, frame)| frame.is_cut)
            .map(|(at, _)| at)
            .next()
            .unwrap();
        let check = |film: &[u8]| FILM.check(film, 6, true);
        assert_eq!(check(&without(|_| false)).unwrap(), Dropped::default());
        let dropped = check(&without(|at| (cut - 6..cut).contains(&at))).unwrap();
        assert_eq!(dropped, Dropped { cuts: 1, frames: 6 });
        for (what, film) in [
            ("too many", without(|at| (cut - 7..cut).contains(&at))),
            ("behind a cut", without(|at| at == cut)),
            ("far from a cut", without(|at| at == cut - 5)),
            ("the end", without(|at| at >= 1990)),
        ] {
            assert!(check(&film).is_err(), "{what}");
        }
        let whole = without(|_| false);
        let frame = FRAME_BYTES as usize;
        let doubled = [&whole, &whole[whole.len() - frame..]].concat();
        assert!(check(&doubled).is_err());
        let mut changed = whole.clone();
        changed[HEAD.len() + 5 * frame - 1] ^= 1;
        assert!(check(&changed).is_err());
        // A job that was ended may stop anywhere.
        assert!(
            FILM.check(&whole[..whole.len() - frame / 2], 6, false)
                .is_ok()
        );
    }
}
