//! Chunks, and what happens to every frame of them.

use super::super::buffer::Buffer;
use super::super::header::Header;
use super::super::noise::Noise;
use super::super::scene::{Grid, grid};
use super::super::y4m::Params;

/// What the source does besides reading.
#[derive(Debug)]
pub(crate) struct SourceOptions {
    /// Frames of a chunk, at least one; the last one, and one that a cut ends, have fewer.
    pub(crate) frames_per_chunk: usize,
    /// Stop after so many chunks.
    pub(crate) chunks: Option<u64>,
    /// Noise to add to every frame; the frames as they were before are kept.
    pub(crate) noise: Option<Noise>,
    /// Look for hard cuts.
    pub(crate) scene_cuts: bool,
    /// Chunks that wait to be taken.
    pub(crate) queue: usize,
    /// Threads that read a file; each has one chunk more.
    pub(crate) threads: usize,
}

/// Some successive frames, as they lie in the file.
#[derive(Debug, Default)]
pub(crate) struct Chunk {
    /// Counts from 0.
    pub(crate) index: u64,
    /// Number of its first frame in the input.
    pub(crate) first_frame: u64,
    /// How many it holds, at least one.
    pub(crate) frames: usize,
    /// A hard cut lies right before its first frame.
    pub(crate) cut: bool,
    /// The parameters of its frames.
    pub(crate) params: Params,
    /// When its first and its last frame had been read, in nanoseconds of the monotonic clock.
    pub(crate) read_ns: (u64, u64),
    pub(super) frame_bytes: usize,
    pub(super) data: Buffer,
    /// The frames before noise was added, if it was; there may be bytes behind them.
    pub(crate) clean: Vec<u8>,
    /// The grids of its frames, where it was read ahead and cuts are looked for.
    pub(super) grids: Vec<Grid>,
}

impl Chunk {
    /// The frames one after the other, each planar.
    pub(crate) fn data(&self) -> &[u8] {
        &self.data[..self.frames * self.frame_bytes]
    }

    /// The memory that they lie in; it may hold more.
    pub(crate) fn memory(&self) -> &Buffer {
        &self.data
    }

    pub(super) fn frame_mut(&mut self, k: usize) -> &mut [u8] {
        &mut self.data[k * self.frame_bytes..(k + 1) * self.frame_bytes]
    }
}

/// What happens to every frame, whichever thread has read it.
pub(super) struct Intake {
    pub(super) header: Header,
    pub(super) options: SourceOptions,
}

impl Intake {
    /// A chunk without frames, with room for all it may hold.
    pub(super) fn empty(&self, mut chunk: Chunk) -> Chunk {
        chunk.frame_bytes = self.header.frame_bytes();
        chunk
            .data
            .resize(self.options.frames_per_chunk * chunk.frame_bytes);
        (chunk.frames, chunk.cut) = (0, false);
        chunk.params.clear();
        chunk.grids.clear();
        chunk
    }

    /// What shows whether there is a cut before the frame behind those that the chunk holds, where cuts are looked for.
    pub(super) fn grid(&self, chunk: &mut Chunk) -> Option<Grid> {
        let k = chunk.frames;
        self.options
            .scene_cuts
            .then(|| grid(&self.header, chunk.frame_mut(k)))
    }

    /// Counts frame `number`, which lies behind those the chunk holds, after keeping a copy and adding noise.
    pub(super) fn take_in(&self, chunk: &mut Chunk, number: u64, read_ns: u64) {
        let k = chunk.frames;
        if k == 0 {
            chunk.first_frame = number;
            chunk.read_ns.0 = read_ns;
        }
        chunk.read_ns.1 = read_ns;
        if let Some(noise) = &self.options.noise {
            let range = k * chunk.frame_bytes..(k + 1) * chunk.frame_bytes;
            chunk.clean.resize(chunk.data.len(), 0);
            chunk.clean[range.clone()].copy_from_slice(&chunk.data[range]);
            noise.add(number, chunk.frame_mut(k));
        }
        chunk.frames += 1;
    }
}
