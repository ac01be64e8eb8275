//! A session on a CUDA device: calls that only enqueue work, and what their caller must keep alive for it.
//!
//! Hazard: the device reads and writes after the call has returned, so no borrow can hold the memory. The caller
//! promises instead, in one contract for all three calls ([`DeviceSession`]).

use pp_contract::VideoPlanParts;

use crate::config::{ChunkShape, Layout, SessionConfig};
use crate::error::KernelError;
use crate::frame::{FrameView, FrameViewMut};
use crate::payload::{Payload, PayloadMut};

use super::caller::Caller;
use super::core::{Core, bad_call, raw_tensors};

/// One session of a set of kernels, on the stream and in the context of its configuration.
///
/// # The contract of a call
/// [`encode`](DeviceSession::encode), [`phase_b`](DeviceSession::phase_b) and [`decode`](DeviceSession::decode) enqueue
/// work on the session's stream and return. Whoever calls them promises:
/// 1. the session's context is current on the calling thread;
/// 2. the payloads are device memory of that context, as long as they say;
/// 3. payloads and frames stay allocated, and are touched by nothing that the stream does not order, until the stream
///    has passed the call: an event recorded behind it is done.
///
/// Frames should lie in page-locked memory. Others give the same result, but the call may wait for the device.
///
/// An error after work was enqueued leaves that work on the stream: the promise holds for a call that failed, too.
/// # If dropped
/// The kernels destroy it, with the session's context current on this thread. The built-in ones enqueue their frees behind
/// the work on the stream and wait for nothing; a plugin may wait for the stream, but not for ever. Either way, what a
/// stream that hangs may still touch stays allocated.
#[derive(Debug)]
pub struct DeviceSession {
    core: Core,
}

impl DeviceSession {
    /// # Safety
    /// The configuration holds a live context, current on this thread, and a live stream of it, both of which outlive
    /// the session.
    pub(super) unsafe fn open(caller: Caller, config: &SessionConfig) -> Result<Self, KernelError> {
        // SAFETY: the caller's duty.
        let core = unsafe { Core::open(caller, config) }?;
        Ok(DeviceSession { core })
    }

    /// What the session was made for.
    #[must_use]
    pub fn config(&self) -> &SessionConfig {
        self.core.config()
    }

    /// The tensors of a chunk of this shape, each with its place in the payload. No work for the device.
    ///
    /// # Errors
    /// A shape that the session does not serve, or an answer that makes no sense.
    pub fn layout(&mut self, shape: ChunkShape) -> Result<Layout, KernelError> {
        self.core.layout(shape)
    }

    /// Enqueues: frames to the input tensors of `phase_b`.
    ///
    /// # Safety
    /// [The contract of a call](DeviceSession#the-contract-of-a-call).
    ///
    /// # Errors
    /// Frames or plan of another size, a payload in host memory, or a failure of the kernels to issue the work.
    pub unsafe fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        input: &mut PayloadMut<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "encode";
        self.core.check_call(OP, plan)?;
        check_on_device(OP, input.is_on_device())?;
        self.core.take_frames(OP, frames)?;
        let input_tensors = raw_tensors(OP, input.tensors())?;
        let input = input_tensors.payload(input.raw());
        // SAFETY: the frames were taken up just now; the rest is the caller's duty.
        let status = unsafe { self.core.encode(plan, &input) }?;
        self.core.judge(OP, status)
    }

    /// Enqueues: the generator, `input` to `output`. Gives the number of generator calls that were enqueued.
    ///
    /// # Safety
    /// [The contract of a call](DeviceSession#the-contract-of-a-call); the payloads do not overlap.
    ///
    /// # Errors
    /// A plan of another size, a payload in host memory, or a failure of the kernels to issue the work.
    pub unsafe fn phase_b(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
    ) -> Result<u32, KernelError> {
        const OP: &str = "phase_b";
        self.core.check_call(OP, plan)?;
        check_on_device(OP, input.is_on_device() && output.is_on_device())?;
        let input_tensors = raw_tensors(OP, input.tensors())?;
        let input = input_tensors.payload(input.raw());
        let output_tensors = raw_tensors(OP, output.tensors())?;
        let output = output_tensors.payload(output.raw());
        let mut observed = 0;
        // SAFETY: the caller's duty.
        let status = unsafe { self.core.phase_b(plan, &input, &output, &mut observed) }?;
        self.core.judge(OP, status)?;
        Ok(observed)
    }

    /// Enqueues: the output tensors of `phase_b` to frames.
    ///
    /// # Safety
    /// [The contract of a call](DeviceSession#the-contract-of-a-call).
    ///
    /// # Errors
    /// Frames or plan of another size, a payload in host memory, or a failure of the kernels to issue the work.
    pub unsafe fn decode(
        &mut self,
        plan: &VideoPlanParts,
        output: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), KernelError> {
        const OP: &str = "decode";
        self.core.check_call(OP, plan)?;
        check_on_device(OP, output.is_on_device())?;
        self.core.take_frames_mut(OP, frames)?;
        let output_tensors = raw_tensors(OP, output.tensors())?;
        let output = output_tensors.payload(output.raw());
        // SAFETY: the frames were taken up just now; the rest is the caller's duty.
        let status = unsafe { self.core.decode(plan, &output) }?;
        self.core.judge(OP, status)
    }
}

fn check_on_device(operation: &'static str, on_device: bool) -> Result<(), KernelError> {
    if !on_device {
        let reason = "the payload lies in host memory, the session works on a device";
        return Err(bad_call(operation, reason.into()));
    }
    Ok(())
}
