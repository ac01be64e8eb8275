//! The computations of the example: sound out of a spectrogram, at half its speed if that is wanted.

use pp_job::prelude::*;

pub mod on_gpu;

/// Bins of a frame.
pub const BINS: u64 = 16;
/// Samples that one frame becomes.
pub const HOP: u64 = 64;
/// The most frames of a piece.
pub const PIECE: u64 = 32;

/// Writes the samples of these frames, the first of which has this number. Each bin is the loudness of an oscillator, whose
/// phase depends on the number of the sample alone. All values are little-endian f32.
pub fn vocode(first: u64, mel: &[u8], samples: &mut [u8]) {
    let mel = mel.as_chunks::<4>().0.iter();
    let mel: Vec<f32> = mel.map(|bytes| f32::from_le_bytes(*bytes)).collect();
    for (at, sample) in samples.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let Some(frame) = mel.chunks(BINS as usize).nth(at / HOP as usize) else {
            return;
        };
        let time = (first * HOP + at as u64) as f32 / 16_000.0;
        let tone = |(bin, loud): (usize, &f32)| loud * (time * 600.0 * (bin + 1) as f32).sin();
        *sample = frame
            .iter()
            .enumerate()
            .map(tone)
            .sum::<f32>()
            .to_le_bytes();
    }
}

/// Writes each frame twice: the sound lasts twice as long.
///
/// # Errors
/// As [`room_for_twice`].
pub fn slow(samples: &[u8], twice: &mut [u8]) -> StageResult<()> {
    room_for_twice(samples.len(), twice.len())?;
    let frames = samples.chunks(FRAME);
    for (frame, to) in frames.zip(twice.chunks_mut(2 * FRAME)) {
        let (first, second) = to.split_at_mut(FRAME);
        first.copy_from_slice(frame);
        second.copy_from_slice(frame);
    }
    Ok(())
}

/// Bytes of the samples of a frame.
pub const FRAME: usize = HOP as usize * 4;

/// Checks that so many bytes are whole frames, and that twice as many have room.
///
/// # Errors
/// They are not, or have not: the stage in front does not make samples, or makes them twice already.
pub fn room_for_twice(samples: usize, room: usize) -> StageResult<()> {
    if samples.is_multiple_of(FRAME) && 2 * samples <= room {
        return Ok(());
    }
    let what = format!(
        "{samples} bytes are no frames of {FRAME} bytes, or do not fit twice into {room}; let slow stand once, behind vocode"
    );
    Err(StageError::new(FaultKind::Usage, "slow", what))
}
