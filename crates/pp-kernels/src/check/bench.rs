//! The kernels under test, and a stream through two of their sessions.

use pp_contract::VideoPlanParts;
use pp_device::CudaError;

use super::memory::{Place, Session};
use super::outcome::{Outcome, fail};
use crate::config::{Chroma, ChunkShape, SessionConfig};
use crate::plugin::KernelSet;

/// Kernels to check, and the memory in which their payloads are to lie.
#[derive(Debug)]
pub struct Bench<'a> {
    pub(super) set: &'a KernelSet,
    place: Place,
}

impl<'a> Bench<'a> {
    /// Sessions on host memory.
    #[must_use]
    pub fn on_host(set: &'a KernelSet) -> Self {
        let place = Place::Host;
        Bench { set, place }
    }

    /// Sessions in the memory of a CUDA device.
    ///
    /// # Safety
    /// `context` is a live `CUcontext` and `stream` a live `CUstream` of it. Both outlive the bench. The context is
    /// current on the calling thread, and on every thread that runs a check on the bench.
    ///
    /// # Errors
    /// No driver, one that is too old, or another context is current.
    pub unsafe fn on_device(
        set: &'a KernelSet,
        context: u64,
        stream: u64,
    ) -> Result<Self, CudaError> {
        // SAFETY: the caller's duty.
        let place = unsafe { Place::device(context, stream) }?;
        Ok(Bench { set, place })
    }
}

/// Frames that look a little like pictures: gradients, an edge, a texture, and noise.
fn picture(config: &SessionConfig, frame: usize, seed: u64) -> Vec<u8> {
    let (width, height) = (config.width as usize, config.height as usize);
    let mut bytes = vec![
        0;
        config
            .chroma
            .packed_frame_bytes(config.width, config.height)
    ];
    for (index, byte) in bytes.iter_mut().enumerate() {
        let (x, y) = (index % width + frame, index / width % height);
        let edge = if x > width / 2 { 60 } else { 0 };
        *byte = ((x * 3 + y * 2) % 120 + edge + (x / 3 + y / 5) % 2 * 20) as u8;
    }
    crate::denoise::cpu::add_gaussian(&mut bytes, 8.0, seed, frame as u64, 0);
    bytes
}

/// One stream through two sessions: one for the front and one for Phase B.
pub(super) struct Stream {
    pub(super) front: Session,
    pub(super) phase_b: Session,
    seen: u64,
}

impl Stream {
    pub(super) fn open(bench: &Bench<'_>, config: &SessionConfig) -> Outcome<Stream> {
        Ok(Stream {
            front: bench.open(config)?,
            phase_b: bench.open(config)?,
            seen: 0,
        })
    }

    /// Runs one chunk; gives the frames and the bytes that travelled.
    pub(super) fn chunk(
        &mut self,
        frames: &[Vec<u8>],
        steps: u32,
        context: u32,
    ) -> Outcome<(Vec<Vec<u8>>, Vec<u8>)> {
        let config = *self.front.config();
        let shape = ChunkShape {
            frames: frames.len() as u32,
            steps,
            context_frames: context,
        };
        let layout = self.front.layout(shape)?;
        let first = VideoPlanParts::first(config.width, config.height, steps);
        let plan = match self.seen {
            0 => first,
            seen => first.following(seen, context > 0),
        };
        self.seen += frames.len() as u64;

        let input = self.front.encode(frames, &plan, &layout.inputs)??;
        let (output, calls) = self.phase_b.phase_b(&plan, &layout, &input)??;
        if calls != plan.expected_generator_calls {
            return fail(format!(
                "phase_b made {calls} generator calls, the plan expects {}",
                plan.expected_generator_calls
            ));
        }
        let count = frames.len();
        let decoded = self
            .front
            .decode(&plan, &layout.outputs, &output, count)??;
        Ok((decoded, [input, output].concat()))
    }
}

impl Bench<'_> {
    pub(super) fn open(&self, config: &SessionConfig) -> Outcome<Session> {
        self.place.open(self.set, config)
    }

    /// A small session in the first chroma format that the kernels serve.
    pub(super) fn config(&self) -> SessionConfig {
        self.config_of(40, 24, self.set.describe().chroma[0])
    }

    pub(super) fn config_of(&self, width: u32, height: u32, chroma: Chroma) -> SessionConfig {
        SessionConfig {
            threads: 2,
            space: self.place.space(),
            ..SessionConfig::host(width, height, chroma, 3)
        }
    }

    pub(super) fn pictures(
        &self,
        config: &SessionConfig,
        first: usize,
        count: usize,
    ) -> Vec<Vec<u8>> {
        (first..first + count)
            .map(|frame| picture(config, frame, 1))
            .collect()
    }

    /// Two chunks of two steps, and with recompute if the kernels have a context; `between` runs between them.
    pub(super) fn two_chunks(
        &self,
        stream: &mut Stream,
        between: impl FnOnce() -> Outcome,
    ) -> Outcome<(Vec<Vec<u8>>, Vec<u8>)> {
        let config = *stream.front.config();
        let context = self.set.describe().context_frames.min(3);
        let (mut frames, mut bytes) = stream.chunk(&self.pictures(&config, 0, 3), 2, 0)?;
        between()?;
        let (more_frames, more_bytes) = stream.chunk(&self.pictures(&config, 3, 2), 2, context)?;
        frames.extend(more_frames);
        bytes.extend(more_bytes);
        Ok((frames, bytes))
    }
}
