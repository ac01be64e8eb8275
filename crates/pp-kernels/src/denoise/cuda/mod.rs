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
mod team;

use pp_contract::{DType, VideoPlanParts};
use pp_device::{About, Stream};

pub use gpu::{Apart, Gpu, LaunchConfig, Limits, Rows};

use crate::config::{ChunkShape, Layout, SessionConfig, Space};
use crate::cuda::{borrow, ptx};
use crate::denoise::geometry::Geometry;
use crate::denoise::{settings, tensors};
use crate::error::Failure;
use crate::export::{Kernels, Session, no_args};
use crate::frame::{FrameView, FrameViewMut};
use crate::group::Collectives;
use crate::payload::{Payload, PayloadMut};
use crate::stage::{Description, StageInfo, StageKind};
use front::Front;
use kernels::{DenoiseKernels, Functions, Tokens};
use phase_b::PhaseB;
use sizes::Sizes;

/// The built-in CUDA kernels.
#[derive(Debug)]
pub enum Ptx {}

/// One stage of one stream through the built-in CUDA kernels.
#[derive(Debug)]
pub struct PtxSession<G: Gpu> {
    gpu: G,
    kind: StageKind,
    config: SessionConfig,
    geometry: Geometry,
    results: G,
    work: StageState<G>,
}

/// What a stage keeps.
#[derive(Debug)]
enum StageState<G: Gpu> {
    /// Encode or decode.
    Front(Front<G>),
    /// Phase B, one for each lap.
    PhaseB(Vec<PhaseB<G>>),
}

impl<G: Gpu> StageState<G> {
    fn front(&mut self) -> Result<&mut Front<G>, Failure> {
        match self {
            StageState::Front(front) => Ok(front),
            StageState::PhaseB(_) => Err(Failure::invalid("Phase B takes and gives no frames")),
        }
    }

    fn phase_b(&mut self, lap: u32) -> Result<&mut PhaseB<G>, Failure> {
        match self {
            StageState::PhaseB(laps) => (laps.get_mut(lap as usize))
                .ok_or_else(|| Failure::invalid(format!("there is no lap {lap}"))),
            StageState::Front(_) => Err(Failure::invalid("encode and decode are no Phase B")),
        }
    }
}

/// Says whether the built-in CUDA kernels run in this context, which must be current: loads them, so that a session that is
/// opened later finds them there.
///
/// # Errors
/// The driver or the device is too old or too small, or another context is current.
pub fn check_device(context: u64) -> Result<(), Failure> {
    // SAFETY: refuses a context that is not current; one that is lives across this call.
    let stream = unsafe { borrow(context, 0) }?;
    Functions::of(&stream).map(|_| ())
}

/// Says whether the built-in CUDA kernels run on such a device.
#[must_use]
pub fn runs_on(about: &About) -> bool {
    let capability = [about.compute_major, about.compute_minor];
    ptx::check(about.driver_version, capability).is_ok()
        && kernels::check_shared(about.shared_bytes_per_block).is_ok()
}

impl Kernels for Ptx {
    type Session = PtxSession<Stream>;

    fn describe() -> Description {
        settings::description("ptx", true, kernels::digest())
    }

    fn create(
        stage: &StageInfo,
        config: &SessionConfig,
        args: &[(&str, &str)],
    ) -> Result<PtxSession<Stream>, Failure> {
        no_args(args)?;
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
        unsafe { PtxSession::new(stream, stage.kind, config) }
    }
}

impl<G: Gpu> PtxSession<G> {
    /// A session of a stage on a stream whose context is current.
    ///
    /// # Errors
    /// The driver or the device is too old or too small, or has no memory left.
    ///
    /// # Safety
    /// Each call of the session is made under the contract of a call (`pp_kernel.h`): the session's context is current,
    /// and frames and tensors are where their descriptions say, until the stream has passed the work.
    pub unsafe fn new(gpu: G, kind: StageKind, config: &SessionConfig) -> Result<Self, Failure> {
        let geometry = Geometry::of(config);
        let results = match config.members {
            1 => gpu.clone(),
            _ => gpu.for_results()?,
        };
        let work = match kind {
            StageKind::Source | StageKind::Sink => {
                let denoiser = DenoiseKernels::new(gpu.clone(), Sizes::new(&geometry)?)?;
                StageState::Front(Front::new(denoiser, config, &geometry)?)
            }
            StageKind::Middle => StageState::PhaseB(
                (0..config.laps)
                    .map(|lap| PhaseB::new((&gpu, &results), config, lap, &geometry))
                    .collect::<Result<_, _>>()?,
            ),
        };
        Ok(PtxSession {
            gpu,
            kind,
            config: *config,
            geometry,
            results,
            work,
        })
    }

    /// The stream that has passed a call once all work of the call is done. A group gathers on it.
    #[must_use]
    pub fn results(&self) -> &G {
        &self.results
    }
}

/// The trait's functions are safe: the caller of [`PtxSession::new`] has promised their contract for each call.
impl<G: Gpu> Session for PtxSession<G> {
    fn layout(&self, shape: ChunkShape, lap: u32) -> Result<Layout, Failure> {
        let stage = (self.kind, &self.config, &self.geometry);
        tensors::layout(stage, shape, lap, DType::Bf16)
    }

    fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        output: &mut PayloadMut<'_>,
    ) -> Result<(), Failure> {
        self.gpu.check_current()?;
        // SAFETY: the contract of a call, which the caller of `new` promised.
        unsafe { self.work.front()?.encode(frames, plan, output) }
    }

    fn run(
        &mut self,
        plan: &VideoPlanParts,
        lap: u32,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
        group: Option<&mut dyn Collectives>,
    ) -> Result<u32, Failure> {
        self.gpu.check_current()?;
        // SAFETY: the contract of a call, which the caller of `new` promised.
        unsafe { self.work.phase_b(lap)?.run(plan, input, output, group) }
    }

    fn decode(
        &mut self,
        _: &VideoPlanParts,
        input: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), Failure> {
        self.gpu.check_current()?;
        // SAFETY: the contract of a call, which the caller of `new` promised.
        unsafe { self.work.front()?.decode(input, frames) }
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
    pub(crate) fn scratch_bytes(&mut self) -> Result<usize, Failure> {
        Ok(self.work.phase_b(0)?.denoiser.sizes.scratch_bytes)
    }

    /// Enqueues one kernel alone, on whatever the session's memory holds.
    ///
    /// # Safety
    /// The contract of a call; `tokens` is memory of the context for so many frames, at most those of the largest
    /// chunk, and `strength` an i64 there.
    pub(crate) unsafe fn only(
        &mut self,
        kernel: Single,
        plan: &VideoPlanParts,
        tokens: u64,
        strength: u64,
        frames: u32,
    ) -> Result<(), Failure> {
        self.gpu.check_current()?;
        if let Single::Encode | Single::Decode = kernel {
            let front = self.work.front()?;
            let (denoiser, samples) = (&front.denoiser, front.chunk().address);
            // SAFETY: the caller's duty.
            return unsafe {
                match kernel {
                    Single::Encode => denoiser.encode(samples, tokens, frames),
                    _ => denoiser.decode(tokens, samples, frames),
                }
            };
        }
        let phase_b = self.work.phase_b(0)?;
        // SAFETY: the caller's duty.
        unsafe {
            match kernel {
                Single::Unfold => {
                    phase_b.unfold(Tokens::OfFrames(tokens), phase_b.place.slot, frames)
                }
                Single::AttendFirst => phase_b.attend(plan, true, false, strength, tokens, frames),
                _ => phase_b.attend(plan, false, true, strength, tokens, frames),
            }
        }
    }
}
