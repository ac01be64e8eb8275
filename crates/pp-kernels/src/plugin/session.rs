//! A session on host memory: safe calls on slices, with guard bytes around what the kernels write.

use pp_contract::VideoPlanParts;

use crate::abi;
use crate::config::{ChunkShape, Layout, SessionConfig};
use crate::error::KernelError;
use crate::frame::{FrameView, FrameViewMut};
use crate::guard;
use crate::payload::{Payload, PayloadMut};

use super::caller::Caller;
use super::core::{Core, Status, bad_call, raw_tensors};

/// One session of a set of kernels, on host memory.
///
/// Its state (the frames it remembers, its scratch memory) is its own; results depend on the sequence of calls alone.
/// # If dropped
/// The kernels destroy it; after a panic inside them too.
#[derive(Debug)]
pub struct KernelSession {
    core: Core,
}

impl KernelSession {
    /// The configuration is for host memory: the set has seen to that.
    pub(super) fn open(caller: Caller, config: &SessionConfig) -> Result<Self, KernelError> {
        // SAFETY: a session on host memory names no context and no stream.
        let core = unsafe { Core::open(caller, config) }?;
        Ok(KernelSession { core })
    }

    /// What the session was made for.
    #[must_use]
    pub fn config(&self) -> &SessionConfig {
        self.core.config()
    }

    /// The tensors of a chunk of this shape, each with its place in the payload.
    ///
    /// # Errors
    /// A shape that the session does not serve, or an answer that makes no sense.
    pub fn layout(&mut self, shape: ChunkShape) -> Result<Layout, KernelError> {
        self.core.layout(shape)
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
        const OP: &str = "encode";
        self.core.check_call(OP, plan)?;
        self.core.take_frames(OP, frames)?;
        // SAFETY: the planes are borrowed across the call, the payload exclusively; both are slices of what they say.
        self.write(OP, input, |core, input| unsafe { core.encode(plan, input) })
    }

    /// The generator: `input` to `output`. Gives the number of generator calls it made.
    ///
    /// # Errors
    /// A plan of another size, a failure of the kernels, or a write past a tensor.
    pub fn phase_b(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
    ) -> Result<u32, KernelError> {
        const OP: &str = "phase_b";
        self.core.check_call(OP, plan)?;
        check_on_host(OP, input.is_on_device())?;
        let input_tensors = raw_tensors(OP, input.tensors())?;
        let input = input_tensors.payload(input.raw());
        let mut observed = 0;
        // SAFETY: both payloads are borrowed across the call, the output exclusively.
        self.write(OP, output, |core, output| unsafe {
            core.phase_b(plan, &input, output, &mut observed)
        })?;
        Ok(observed)
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
        const OP: &str = "decode";
        self.core.check_call(OP, plan)?;
        check_on_host(OP, output.is_on_device())?;
        self.core.take_frames_mut(OP, frames)?;
        let output_tensors = raw_tensors(OP, output.tensors())?;
        let output = output_tensors.payload(output.raw());
        // SAFETY: the planes are borrowed exclusively across the call; the payload is borrowed and covers its tensors.
        let status = unsafe { self.core.decode(plan, &output) }?;
        self.core.judge(OP, status)
    }

    /// Arms the guards, runs `call`, checks the guards.
    fn write(
        &mut self,
        operation: &'static str,
        payload: &mut PayloadMut<'_>,
        call: impl FnOnce(&mut Core, &abi::Payload) -> Status,
    ) -> Result<(), KernelError> {
        let Some((tensors, data, tail)) = payload.guarded() else {
            return check_on_host(operation, true);
        };
        let raw_tensors = raw_tensors(operation, tensors)?;
        guard::zero_gaps(tensors, data);
        guard::arm(tail);
        let raw = raw_tensors.payload((data.as_mut_ptr(), data.len() as u64));
        let status = call(&mut self.core, &raw)?;
        let overrun = match (guard::check_gaps(tensors, data), guard::check(tail)) {
            (Ok(()), Ok(())) => return self.core.judge(operation, status),
            (Err(spec), _) => format!("tensor {}", spec.name()),
            (_, Err(index)) => format!("the payload (byte {index} behind it)"),
        };
        // A panic is remembered even when the guard bytes are what is reported.
        let _ = self.core.judge(operation, status);
        Err(self.core.overrun(operation, overrun))
    }
}

fn check_on_host(operation: &'static str, on_device: bool) -> Result<(), KernelError> {
    if on_device {
        let reason = "the payload lies on a device, the session works on host memory";
        return Err(bad_call(operation, reason.into()));
    }
    Ok(())
}
