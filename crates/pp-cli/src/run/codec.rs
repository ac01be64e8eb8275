//! What the stages of `pp run` ask of kernels, wherever the payloads lie.
//!
//! The stages know chunks, plans and cuts; a codec knows the memory that the transport's leases
//! lie in and how kernels are called on it: at once on a processor, issued to a stream on a GPU.

use std::error::Error;
use std::fmt::Debug;

use crate::video::buffer::{Buffer, FrameMemory};
use crate::video::header::Header;
use pp_contract::{FaultKind, Manifest, VideoPlanParts, with_source};
use pp_kernels::{Chroma, ChunkShape, Failure, FrameView, FrameViewMut, KernelError, Layout};
use pp_runtime::drift::Digester;
use pp_runtime::stage::{FrontWork, PhaseBWork, Progress, StageError};

/// Size and format of every frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) chroma: Chroma,
    /// Bytes of one frame, its planes back to back.
    pub(super) frame_bytes: usize,
}

impl Geometry {
    /// That of a stream's frames.
    pub(super) fn of(header: &Header) -> Self {
        Self {
            width: header.width(),
            height: header.height(),
            chroma: header.chroma(),
            frame_bytes: header.frame_bytes(),
        }
    }

    /// Whole frames, back to back.
    pub(super) fn views<'a>(&self, frames: &'a [u8]) -> Vec<FrameView<'a>> {
        frames
            .chunks_exact(self.frame_bytes)
            .map(|frame| FrameView::packed(frame, self.width, self.height, self.chroma))
            .collect::<Option<_>>()
            .expect("a chunk holds whole frames")
    }

    /// Whole frames, back to back, to be written.
    pub(super) fn views_mut<'a>(&self, frames: &'a mut [u8]) -> Vec<FrameViewMut<'a>> {
        frames
            .chunks_exact_mut(self.frame_bytes)
            .map(|frame| FrameViewMut::packed(frame, self.width, self.height, self.chroma))
            .collect::<Option<_>>()
            .expect("a chunk holds whole frames")
    }
}

/// What to make of an error in this operation.
pub(super) fn failed<E: Error + 'static>(
    kind: FaultKind,
    operation: &'static str,
) -> impl Fn(E) -> StageError {
    move |e| StageError::new(kind, operation, with_source(&e))
}

/// A payload that does not fit its tensors: no link lets one through.
pub(super) fn internal(operation: &'static str) -> impl Fn(Failure) -> StageError {
    failed(FaultKind::Internal, operation)
}

/// The kernels of the front.
pub(super) trait Codec {
    /// A slot of the edge to Phase B.
    type Tx: Debug;
    /// A slot of the edge back.
    type Rx: Debug;
    /// Who digests such slots.
    type Digester: Digester<Tx = Self::Tx, Rx = Self::Rx>;

    /// Digests slots, in order with the kernels' work.
    fn digester(&mut self) -> &mut Self::Digester;

    /// What is kept of a chunk between its encode and its decode.
    type Encoded;
    /// What is kept of a chunk while a device decodes it.
    type Decoding;

    /// The tensors of a chunk of this shape.
    fn layout(&mut self, shape: ChunkShape) -> Result<Layout, KernelError>;

    /// Memory that frames are best read into and decoded to, as large as a chunk; `None`: any.
    fn memory(&self) -> Result<Option<Box<dyn FrameMemory>>, StageError> {
        Ok(None)
    }

    /// Whether an encode reads its frames after it returned, until its chunk comes back.
    const READS_LATER: bool;

    /// Encodes the first frames of the buffer, `bytes` of it, into the slot.
    fn encode(
        &mut self,
        frames: &Buffer,
        bytes: usize,
        plan: &VideoPlanParts,
        tensors: &Manifest,
        slot: &mut Self::Tx,
    ) -> Result<Self::Encoded, StageError>;

    /// The noise that the kernels estimated when they encoded a chunk, once it is known; each is given once.
    fn estimated_noise(&mut self) -> Option<Vec<f32>>;

    /// Decodes into `frames`, which has the right length.
    fn decode(
        &mut self,
        encoded: Self::Encoded,
        frames: Buffer,
        plan: &VideoPlanParts,
        tensors: &Manifest,
        payload: Option<Self::Rx>,
    ) -> Result<Progress<Frames, Self::Decoding>, StageError>;

    /// How far the oldest decode under way is.
    fn poll_decoded(
        &mut self,
        oldest: Self::Decoding,
    ) -> Result<Progress<Frames, Self::Decoding>, StageError> {
        Ok(Progress::UnderWay(oldest))
    }

    /// The chunk will not be decoded.
    fn forget(&mut self, _encoded: Self::Encoded) {}
}

/// Frames that were decoded.
#[derive(Debug)]
pub(super) struct Frames {
    pub(super) bytes: Buffer,
    /// What a device worked for this chunk.
    pub(super) worked: Option<FrontWork>,
}

/// The kernels of Phase B.
pub(super) trait Generator {
    /// A slot of the edge to the front.
    type Tx: Debug;
    /// A slot of the edge from it.
    type Rx: Debug;
    /// Who digests such slots.
    type Digester: Digester<Tx = Self::Tx, Rx = Self::Rx>;

    /// Digests slots, in order with the kernels' work.
    fn digester(&mut self) -> &mut Self::Digester;

    /// What is kept of a chunk while a device computes it.
    type Computing;

    /// Computes from slot to slot.
    fn generate(
        &mut self,
        plan: &VideoPlanParts,
        inputs: &Manifest,
        input: Option<&Self::Rx>,
        outputs: &Manifest,
        output: &mut Self::Tx,
    ) -> Result<Progress<Generated, Self::Computing>, StageError>;

    /// How far the oldest computation under way is.
    fn poll_generated(
        &mut self,
        oldest: Self::Computing,
    ) -> Result<Progress<Generated, Self::Computing>, StageError> {
        Ok(Progress::UnderWay(oldest))
    }
}

/// What was computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Generated {
    /// Generator calls that were made.
    pub(super) calls: u32,
    /// What a device worked for this chunk.
    pub(super) worked: Option<PhaseBWork>,
}
