//! A session on host memory: safe calls on slices, with guard bytes around what the kernels write.

use pp_contract::VideoPlanParts;

use crate::config::{ChunkShape, Layout, SessionConfig};
use crate::error::KernelError;
use crate::frame::{FrameView, FrameViewMut};
use crate::guard;
use crate::payload::{Payload, PayloadMut};

use super::caller::Caller;
use super::raw::RawSession;

/// One session of a set of kernels, on host memory.
///
/// Its state (the frames it remembers, its scratch memory) is its own; results depend on the sequence of calls alone.
/// # If dropped
/// The kernels destroy it; after a panic inside them too.
#[derive(Debug)]
pub struct KernelSession {
    raw: RawSession,
}

impl KernelSession {
    /// The configuration is for host memory: the set has seen to that.
    pub(super) fn open(caller: Caller, config: &SessionConfig) -> Result<Self, KernelError> {
        // SAFETY: a session on host memory names no context and no stream.
        let raw = unsafe { RawSession::open(caller, config) }?;
        Ok(KernelSession { raw })
    }

    /// What the session was made for.
    #[must_use]
    pub fn config(&self) -> &SessionConfig {
        self.raw.config()
    }

    /// The tensors of a chunk of this shape, each with its place in the payload.
    ///
    /// # Errors
    /// A shape that the session does not serve, or an answer that makes no sense.
    pub fn layout(&mut self, shape: ChunkShape) -> Result<Layout, KernelError> {
        self.raw.layout(shape)
    }

    /// Frames to the input tensors of `phase_b`, written straight into `input`.
    ///
    /// # Errors
    /// Frames or plan of another size, a failure of the kernels, or a write past a tensor.
    pub fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        input: &mut PayloadMut<'_>,
    ) -> Result<(), KernelError> {
        // SAFETY: planes and payload are borrowed across the call, the payload exclusively.
        self.guarded("encode", input, |raw, input| unsafe {
            raw.encode(frames, plan, input)
        })
    }

    /// Phase B: `input` to `output`. Gives the number of generator calls it made.
    ///
    /// # Errors
    /// A plan of another size, a failure of the kernels, or a write past a tensor.
    pub fn phase_b(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
    ) -> Result<u32, KernelError> {
        // SAFETY: both payloads are borrowed across the call, the output exclusively.
        self.guarded("phase_b", output, |raw, output| unsafe {
            raw.phase_b(plan, input, output)
        })
    }

    /// The output tensors of `phase_b` to frames, read straight from `output`.
    ///
    /// # Errors
    /// Frames or plan of another size, or a failure of the kernels.
    pub fn decode(
        &mut self,
        plan: &VideoPlanParts,
        output: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), KernelError> {
        // SAFETY: the planes are borrowed exclusively across the call, and the payload is borrowed.
        unsafe { self.raw.decode(plan, output, frames) }
    }

    /// Arms the guards, runs `call`, checks the guards.
    fn guarded<T>(
        &mut self,
        operation: &'static str,
        payload: &mut PayloadMut<'_>,
        call: impl FnOnce(&mut RawSession, &mut PayloadMut<'_>) -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        if let Some((tensors, data, tail)) = payload.guarded() {
            guard::zero_gaps(tensors, data);
            guard::arm(tail);
        }
        let result = call(&mut self.raw, payload);
        // A payload on a device was refused.
        let Some((tensors, data, tail)) = payload.guarded() else {
            return result;
        };
        let overrun = match (guard::check_gaps(tensors, data), guard::check(tail)) {
            (Ok(()), Ok(())) => return result,
            (Err(spec), _) => format!("tensor {}", spec.name()),
            (_, Err(index)) => format!("the payload (byte {index} behind it)"),
        };
        Err(self.raw.overrun(operation, overrun))
    }
}
