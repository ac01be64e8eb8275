//! Chunks, and what happens to every frame of them.

use super::super::buffer::Buffer;
use super::super::header::Header;
use super::super::noise::Noise;
use super::super::scene::{Grid, grid};
use super::super::y4m::Params;
use pp_runtime::core::Late;

/// What the source does besides reading.
#[derive(Debug)]
pub struct SourceOptions {
    /// Frames of a chunk, at least one; the last one, and one that a cut ends, have fewer.
    pub frames_per_chunk: usize,
    /// Stop after so many chunks, counted from the first frame of the input.
    pub chunks: Option<u64>,
    /// Give no chunk but those from here on.
    pub skip: Skip,
    /// Noise to add to every frame; the frames as they were before are kept.
    pub noise: Option<Noise>,
    /// Look for hard cuts.
    pub scene_cuts: bool,
    /// Chunks that wait to be taken.
    pub queue: usize,
    /// Threads that read a file; each has one chunk more.
    pub threads: usize,
    /// What happens to chunks for which there is no room. `Drop` makes room: the oldest that waits is dropped.
    pub late: Late,
    /// Read at the rate of the header: frame `k` is there `k` periods behind the first one.
    pub pace: bool,
}

/// Where a job begins that goes on with one that ended early. Chunks, cuts and noise are those of the whole input, all of
/// which is read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Skip {
    /// The first frame whose output counts. The chunk that holds it is given whole.
    pub frames: u64,
    /// So many frames before that chunk, or all since the last cut, are given, too, in whole chunks: stages look at them.
    pub context: u64,
}

/// Some successive frames, as they lie in the file.
#[derive(Debug, Default)]
pub struct Chunk {
    /// Counts from 0.
    pub index: u64,
    /// Number of its first frame in the input.
    pub first_frame: u64,
    /// How many it holds, at least one.
    pub frames: usize,
    /// A hard cut lies right before its first frame, or between frames that were dropped before it.
    pub cut: bool,
    /// It was skipped, and is given all the same, as the first: the source's kernels look at the chunk that begins an epoch.
    pub is_head: bool,
    /// Frames that were dropped between the chunk taken before and this one.
    pub skipped: u64,
    /// The parameters of its frames.
    pub params: Params,
    /// When its first and its last frame were there, in nanoseconds of the monotonic clock: read, or with `pace` due.
    pub read_ns: (u64, u64),
    /// How long the reader waited for room for the chunk before, in nanoseconds: so long this one may have been there unread.
    pub held_ns: u64,
    /// A digest of the first chunk of the input.
    pub input: u64,
    /// Cuts up to its first frame.
    pub(super) cuts: u64,
    pub(super) frame_bytes: usize,
    pub(super) data: Buffer,
    /// The frames before noise was added, if it was; there may be bytes behind them.
    pub clean: Vec<u8>,
    /// The grids of its frames, where it was read ahead and cuts are looked for.
    pub(super) grids: Vec<Grid>,
}

impl Chunk {
    /// Gives the frames one after the other, each planar.
    pub fn data(&self) -> &[u8] {
        &self.data[..self.frames * self.frame_bytes]
    }

    /// Gives how many were dropped, as far as 32 bits hold.
    pub fn skipped_frames(&self) -> u32 {
        self.skipped.try_into().unwrap_or(u32::MAX)
    }

    /// The number of the frame behind it.
    pub(super) fn end(&self) -> u64 {
        self.first_frame + self.frames as u64
    }

    /// Gives the memory that they lie in; it may hold more.
    pub fn memory(&self) -> &Buffer {
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
        (chunk.frames, chunk.cut, chunk.is_head, chunk.skipped) = (0, false, false, 0);
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
