//! What the stages of `pp run` ask of kernels, wherever the payloads lie.
//!
//! The stages know chunks, plans and cuts; what is here knows the memory that the transport's leases lie in and how
//! kernels are called on it: at once on a processor, issued to a stream on a GPU.

use std::error::Error;
use std::fmt::Debug;

use pp_contract::{FaultKind, Manifest, Plan as _, VideoPlan, VideoPlanParts, with_source};
use pp_kernels::{
    ChunkShape, Failure, FrameGeometry, FrameView, FrameViewMut, KernelError, KernelSet, Layout,
    SessionConfig,
};
use pp_runtime::drift::{Digester, Verifier};
use pp_runtime::stage::{Chunk, Progress, StageError, StageResult, Worked};
use pp_video::buffer::{Buffer, FrameMemory};

/// The ticket for digests of payloads where these kernels work.
pub(super) type TicketOf<K> = <<K as Kernels>::Digester as Digester>::Ticket;

/// Whole frames, back to back.
pub(super) fn views(of: FrameGeometry, frames: &[u8]) -> Vec<FrameView<'_>> {
    let frames = frames.chunks_exact(of.frame_bytes());
    let views = frames.map(|frame| FrameView::packed(frame, &of));
    let views: Option<_> = views.collect();
    views.expect("a chunk holds whole frames")
}

/// Whole frames, back to back, to be written.
pub(super) fn views_mut(of: FrameGeometry, frames: &mut [u8]) -> Vec<FrameViewMut<'_>> {
    let frames = frames.chunks_exact_mut(of.frame_bytes());
    let views = frames.map(|frame| FrameViewMut::packed(frame, &of));
    let views: Option<_> = views.collect();
    views.expect("a chunk holds whole frames")
}

/// What to make of an error in this operation.
pub(super) fn failed<E: Error + 'static>(
    kind: FaultKind,
    operation: &'static str,
) -> impl Fn(E) -> StageError {
    move |e| StageError::new(kind, operation, with_source(&e))
}

/// A payload that does not fit its tensors: no edge lets one through.
pub(super) fn internal(operation: &'static str) -> impl Fn(Failure) -> StageError {
    failed(FaultKind::Internal, operation)
}

/// A stage of kernels that is to be opened.
pub struct Opening<'a> {
    pub(super) kernels: &'a KernelSet,
    /// What faults call it, too.
    pub(super) stage: &'static str,
    /// For host memory.
    pub(super) config: SessionConfig,
    pub(super) args: &'a [(String, String)],
    /// Most chunks in flight.
    pub(super) depth: u32,
    /// Whose fault it is when the kernels fail: a file's, or, for our own, the device's.
    pub(super) blame: FaultKind,
}

/// Where payloads lie: opens stages there.
pub trait Memory {
    /// The kernels of any stage.
    type Kernels: Kernels;

    /// Opens the kernels of a stage.
    ///
    /// # Errors
    /// They cannot be opened on this memory, or with these settings.
    fn open(&self, stage: &Opening<'_>) -> StageResult<Self::Kernels>;
}

/// The kernels of one stage: a source encodes, a sink decodes, and a stage between them generates. What is kept of a chunk
/// while a device works on it goes out and comes back.
pub trait Kernels {
    /// A slot to write.
    type Tx: Debug;
    /// A slot to read.
    type Rx: Debug;
    /// A member of a group.
    type Group;
    /// Who digests the slots that the stage uses.
    type Digester: Digester<Tx = Self::Tx, Rx = Self::Rx>;
    /// An encode under way.
    type Encoding;
    /// A generation under way.
    type Computing;
    /// A decode under way.
    type Decoding;

    /// Digests slots, in order with the kernels' work.
    fn digester(&mut self) -> &mut Self::Digester;

    /// The tensors of a chunk of this shape in this lap: those that the stage gets, and those that it makes.
    fn layout(&mut self, shape: ChunkShape, lap: u16) -> Result<Layout, KernelError>;

    /// The frames that a source takes or a sink makes.
    fn frames(&self) -> FrameGeometry;

    /// Memory that frames are best read into, or decoded to, as large as a chunk; `None`: any.
    fn memory(&self) -> StageResult<Option<Box<dyn FrameMemory>>> {
        Ok(None)
    }

    /// Encodes the first frames of the buffer, `bytes` of it, into the slot. A device may still read them when this
    /// returns; the buffer knows.
    fn encode(
        &mut self,
        frames: &Buffer,
        bytes: usize,
        plan: &VideoPlanParts,
        tensors: &Manifest,
        slot: &mut Self::Tx,
    ) -> StageResult<Progress<Encoded, Self::Encoding>>;

    /// How far the oldest encode under way is.
    fn poll_encoded(
        &mut self,
        oldest: Self::Encoding,
    ) -> StageResult<Progress<Encoded, Self::Encoding>> {
        Ok(Progress::UnderWay(oldest))
    }

    /// Gives up an encode whose chunk was overtaken; a device may still work on it.
    fn forget(&mut self, _encoding: Self::Encoding) {}

    /// Computes from slot to slot, in this lap. A member of a group that does not lead has no slots.
    fn generate(
        &mut self,
        plan_and_lap: (&VideoPlanParts, u16),
        input: (&Manifest, Option<&Self::Rx>),
        output: (&Manifest, Option<&mut Self::Tx>),
        group: Option<&mut Self::Group>,
    ) -> StageResult<Progress<Generated, Self::Computing>>;

    /// All that makes the first `bytes` of the slot was issued: they may move before it is seen done.
    fn send_ahead(&mut self, _output: &mut Self::Tx, _bytes: u64) -> StageResult<()> {
        Ok(())
    }

    /// How far the oldest computation under way is.
    fn poll_generated(
        &mut self,
        oldest: Self::Computing,
    ) -> StageResult<Progress<Generated, Self::Computing>> {
        Ok(Progress::UnderWay(oldest))
    }

    /// Decodes into `frames`, which has the right length.
    fn decode(
        &mut self,
        frames: Buffer,
        plan: &VideoPlanParts,
        tensors: &Manifest,
        payload: Option<&Self::Rx>,
    ) -> StageResult<Progress<Frames, Self::Decoding>>;

    /// How far the oldest decode under way is.
    fn poll_decoded(
        &mut self,
        oldest: Self::Decoding,
    ) -> StageResult<Progress<Frames, Self::Decoding>> {
        Ok(Progress::UnderWay(oldest))
    }
}

fn list(tensors: &Manifest) -> String {
    let specs: Vec<_> = tensors.iter().map(|(_, spec)| spec.to_string()).collect();
    specs.join(", ")
}

/// The layouts of chunks, each asked for once: they depend on shape and lap alone.
#[derive(Default)]
pub(super) struct Layouts(Vec<Known>);

pub(super) struct Known {
    of: (ChunkShape, u16),
    pub(super) layout: Layout,
    /// What the stage makes, with digests, if some chunks have digests.
    pub(super) sealed: Option<Manifest>,
}

impl Layouts {
    /// The layout of a chunk that came with these tensors and so many frames, to the stage of this name.
    ///
    /// # Errors
    /// The kernels take other tensors.
    pub(super) fn of_chunk(
        &mut self,
        kernels: &mut impl Kernels,
        verifier: &Verifier,
        (chunk, frames, inputs): (&Chunk<'_, VideoPlan>, u32, &Manifest),
        name: &'static str,
    ) -> StageResult<&Known> {
        let context = inputs.get("context_frames");
        let context = context.and_then(|(_, spec)| spec.shape().dims().first().copied());
        let shape = ChunkShape {
            frames,
            steps: chunk.message.plan().parts().num_denoise_steps,
            // More than 32 bits hold are more than any kernels take.
            context_frames: context.map_or(0, |frames| frames.try_into().unwrap_or(u32::MAX)),
        };
        let known = self.of(kernels, verifier, (shape, chunk.place.lap))?;
        if known.layout.inputs != *inputs {
            let [wanted, got] = [&known.layout.inputs, inputs].map(list);
            let detail = format!(
                "chunk {}: the kernels of {name} take {wanted}; {got} came; let the stage before give what {name} takes, or take \
                 the kernels of both from one set",
                chunk.place.chunk
            );
            return Err(StageError::new(FaultKind::Plugin, name, detail));
        }
        Ok(known)
    }

    /// The layout of a chunk of this shape in this lap.
    pub(super) fn of(
        &mut self,
        kernels: &mut impl Kernels,
        verifier: &Verifier,
        of: (ChunkShape, u16),
    ) -> StageResult<&Known> {
        let at = self.0.iter().position(|known| known.of == of);
        if at.is_none() {
            let layout = kernels.layout(of.0, of.1);
            let layout = layout.map_err(failed(FaultKind::Plugin, "layout"))?;
            let sealed = verifier.sealed(&layout.outputs)?;
            self.0.push(Known { of, layout, sealed });
        }
        Ok(&self.0[at.unwrap_or(self.0.len() - 1)])
    }
}

/// An encode that is done.
#[derive(Debug)]
pub struct Encoded {
    /// What a device worked for this chunk.
    pub(super) worked: Option<Worked>,
    /// The noise that the kernels estimated, if they did in this chunk.
    pub(super) noise: Option<Vec<f32>>,
}

/// Frames that were decoded.
#[derive(Debug)]
pub struct Frames {
    pub(super) bytes: Buffer,
    /// What a device worked for this chunk.
    pub(super) worked: Option<Worked>,
}

/// What was computed.
#[derive(Clone, Copy, Debug)]
pub struct Generated {
    /// Generator calls that were made.
    pub(super) calls: u32,
    /// What a device worked for this chunk.
    pub(super) worked: Option<Worked>,
}
