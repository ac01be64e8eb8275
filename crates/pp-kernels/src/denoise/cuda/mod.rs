//! The built-in kernels on CUDA devices: the denoiser of [`crate::denoise::cpu`], from embedded PTX.
//!
//! The tensors are those of the CPU backend, shape for shape. `encode` and `decode` give the same bytes; `phase_b`
//! computes the same formula from bf16 products with f32 sums, and so other bits within the tolerance of
//! `kernels/README.md`. Hence a digest of its own: ranks do not mix the two.
//!
//! What the contents of a tensor may be is not checked, which would mean to wait for them: noise outside 0..=255 and
//! strengths outside 1..=10000 are moved to the nearest of these.

mod frames;
mod front;
mod gpu;
mod kernels;
mod phase_b;
mod sizes;

use pp_contract::VideoPlanParts;
use pp_device::Stream;

pub use gpu::{Gpu, LaunchConfig, Limits, Rows};

use crate::config::{ChunkShape, Description, Layout, SessionConfig, Space};
use crate::cuda::{borrow, ptx};
use crate::denoise::geometry::Geometry;
use crate::denoise::{settings, tensors};
use crate::error::Failure;
use crate::export::{Kernels, Session};
use crate::frame::{FrameView, FrameViewMut};
use crate::payload::{Payload, PayloadMut};
use front::Front;
use kernels::{Denoiser, Functions};
use phase_b::PhaseB;
use sizes::Sizes;

/// The built-in CUDA kernels.
#[derive(Debug)]
pub(crate) enum Ptx {}

/// One stream through the built-in CUDA kernels.
#[derive(Debug)]
pub struct PtxSession<G: Gpu> {
    gpu: G,
    geometry: Geometry,
    front: Front<G>,
    phase_b: PhaseB<G>,
}

/// Whether the built-in CUDA kernels run in this context, which must be current: loads them, so that a session that is
/// opened later finds them there.
///
/// # Errors
/// The driver or the device is too old or too small, or another context is current.
pub fn check_device(context: u64) -> Result<(), Failure> {
    // SAFETY: refuses a context that is not current; one that is lives across this call.
    let stream = unsafe { borrow(context, 0) }?;
    Functions::of(&stream).map(|_| ())
}

impl Kernels for Ptx {
    type Session = PtxSession<Stream>;

    fn describe() -> Description {
        settings::description("ptx", true, ptx::digest())
    }

    fn create(config: &SessionConfig) -> Result<PtxSession<Stream>, Failure> {
        let Space::Cuda { context, stream } = config.space else {
            return Err(Failure::unsupported(
                "the ptx kernels work in CUDA memory only",
            ));
        };
        // SAFETY: the caller that makes a session on a device promises that the stream is the context's, and that both
        // outlive it.
        let stream = unsafe { borrow(context, stream) }?;
        // SAFETY: the session is reached through the C table, or through `RawSession`, whose callers promise the
        // contract of a call.
        unsafe { PtxSession::new(stream, config) }
    }
}

impl<G: Gpu> PtxSession<G> {
    /// A session on a stream whose context is current.
    ///
    /// # Errors
    /// The driver or the device is too old or too small, or has no memory left.
    ///
    /// # Safety
    /// Each call of the session is made under the contract of a call (`pp_kernel.h`): the session's context is current,
    /// and frames and tensors are where their descriptions say, until the stream has passed the work.
    pub unsafe fn new(gpu: G, config: &SessionConfig) -> Result<Self, Failure> {
        let geometry = Geometry::of(config);
        let denoiser = Denoiser::new(gpu.clone(), Sizes::new(&geometry)?)?;
        Ok(PtxSession {
            front: Front::new(denoiser.clone(), config, &geometry)?,
            phase_b: PhaseB::new(denoiser, config, &geometry)?,
            gpu,
            geometry,
        })
    }
}

/// The trait's functions are safe: the caller of [`PtxSession::new`] has promised their contract for each call.
impl<G: Gpu> Session for PtxSession<G> {
    fn layout(&self, shape: ChunkShape) -> Result<Layout, Failure> {
        tensors::layout(&self.geometry, shape)
    }

    fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        input: &mut PayloadMut<'_>,
    ) -> Result<(), Failure> {
        self.gpu.check_current()?;
        // SAFETY: the contract of a call, which the caller of `new` promised.
        unsafe { self.front.encode(frames, plan, input) }
    }

    fn phase_b(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
    ) -> Result<u32, Failure> {
        self.gpu.check_current()?;
        // SAFETY: the contract of a call, which the caller of `new` promised.
        unsafe { self.phase_b.run(plan, input, output) }
    }

    fn decode(
        &mut self,
        _: &VideoPlanParts,
        output: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), Failure> {
        self.gpu.check_current()?;
        // SAFETY: the contract of a call, which the caller of `new` promised.
        unsafe { self.front.decode(output, frames) }
    }
}

/// A kernel that can be measured alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Single {
    Encode,
    Decode,
    Unfold,
    AttendFirst,
    AttendNext,
}

impl PtxSession<Stream> {
    /// Bytes of a frame as the attention reads it.
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.phase_b.denoiser.sizes.scratch_bytes
    }

    /// Enqueues one kernel alone, on whatever the session's memory holds.
    ///
    /// # Safety
    /// The contract of a call; `tokens` is memory of the context for so many frames, at most those of the largest
    /// chunk, and `strength` an i64 there.
    pub(crate) unsafe fn only(
        &self,
        kernel: Single,
        plan: &VideoPlanParts,
        tokens: u64,
        strength: u64,
        frames: u32,
    ) -> Result<(), Failure> {
        self.gpu.check_current()?;
        let (front, phase_b) = (&self.front, &self.phase_b);
        // SAFETY: the caller's duty.
        unsafe {
            match kernel {
                Single::Encode => front.denoiser.encode(front.chunk().address, tokens, frames),
                Single::Decode => front.denoiser.decode(tokens, front.chunk().address, frames),
                Single::Unfold => phase_b.unfold_into_ring(tokens, phase_b.place.slot, frames),
                Single::AttendFirst => phase_b.attend(plan, true, false, strength, tokens, frames),
                Single::AttendNext => phase_b.attend(plan, false, true, strength, tokens, frames),
            }
        }
    }
}
