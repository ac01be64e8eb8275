//! The plugin's own session behind a pointer, in memory of any kind, and the checks around each call.
//!
//! Hazard: a raw pointer that crosses the border carries no length that anyone enforces. So the host checks every
//! argument against the session before the call, and after it the counts and the texts.
//!
//! Hazard: a device reads and writes after the call has returned, so no borrow can hold the memory. The caller
//! promises instead, in one contract for all three calls ([`RawSession`]).

use std::ops::Deref;

use pp_contract::{Manifest, VideoPlan, VideoPlanParts};

use crate::abi::{self, OpaqueSession};
use crate::config::{ChunkShape, Layout, SessionConfig, Space};
use crate::convert::{self, RawTensors, raw_plan};
use crate::error::KernelError;
use crate::frame::{FrameView, FrameViewMut, Plane};
use crate::payload::{Payload, PayloadMut};

use super::caller::{Caller, ErrorBuffer};

/// One session of a set of kernels, in the memory of its configuration. [`KernelSession`](super::KernelSession) is its
/// safe form on host memory; this one is for devices.
///
/// # The contract of a call
/// On a device, [`encode`](RawSession::encode), [`phase_b`](RawSession::phase_b) and [`decode`](RawSession::decode)
/// enqueue work on the session's stream and return. The caller promises:
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
pub struct RawSession {
    caller: Caller,
    config: SessionConfig,
    raw: *mut OpaqueSession,
    error: ErrorBuffer,
    /// Those of the call under way.
    frames: Vec<abi::Frame>,
    panicked: Option<(&'static str, String)>,
}

// SAFETY: the ABI says that calls on one session may come from different threads as long as they do not overlap, and
// every call takes `&mut self` (or `self` in drop). The raw pointers in `frames` are only read during a call.
unsafe impl Send for RawSession {}

impl std::fmt::Debug for RawSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RawSession")
            .field("kernels", &self.caller.name)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl RawSession {
    /// Makes the session.
    ///
    /// # Safety
    /// A configuration for CUDA holds a live context, current on this thread, and a live stream of it, both of which
    /// outlive the session.
    pub(super) unsafe fn open(caller: Caller, config: &SessionConfig) -> Result<Self, KernelError> {
        config
            .validate()
            .map_err(|failure| bad_call("create", failure.message))?;
        let create = caller.entry("create", caller.table.create)?;
        let raw_config = config.to_abi();
        let mut raw = std::ptr::null_mut();
        let mut error = ErrorBuffer::new();
        // SAFETY: the table was checked; the structs live across the call and carry their sizes; what the configuration
        // names is alive (the caller's duty).
        let status =
            error.with(|error| unsafe { create(&raw const raw_config, &raw mut raw, error) });
        caller.judge("create", status, &error)?;
        if raw.is_null() {
            return Err(caller.bad_answer("create", "it said OK and gave no session"));
        }
        Ok(RawSession {
            caller,
            config: *config,
            raw,
            error,
            frames: Vec::with_capacity(config.max_frames as usize),
            panicked: None,
        })
    }

    /// What the session was made for.
    #[must_use]
    pub fn config(&self) -> &SessionConfig {
        &self.config
    }

    /// The tensors of a chunk of this shape, each with its place in the payload. No work for the device.
    ///
    /// # Errors
    /// A shape that the session does not serve, or an answer that makes no sense.
    pub fn layout(&mut self, shape: ChunkShape) -> Result<Layout, KernelError> {
        const OP: &str = "layout";
        self.check_usable()?;
        self.check_frames(OP, shape.frames as usize)?;
        let mut inputs = RawTensors::EMPTY;
        let mut outputs = RawTensors::EMPTY;
        let mut args = abi::LayoutArgs {
            struct_size: abi::size::<abi::LayoutArgs>(),
            frames: shape.frames,
            steps: shape.steps,
            context_frames: shape.context_frames,
            capacity: abi::MAX_TENSORS as u32,
            input_count: 0,
            output_count: 0,
            reserved: 0,
            inputs: inputs.as_mut_ptr(),
            outputs: outputs.as_mut_ptr(),
        };
        // SAFETY: the session's own table; the arrays hold `capacity` elements and live across the call.
        unsafe { self.call(OP, self.caller.table.layout, &mut args) }?;
        let read = |raw: &RawTensors, count: u32, which: &str| {
            let written = raw
                .as_slice()
                .get(..count as usize)
                .ok_or_else(|| format!("{count} {which} tensors, at most {}", abi::MAX_TENSORS))?;
            convert::manifest(written).map_err(|failure| failure.message)
        };
        let lists = read(&inputs, args.input_count, "input")
            .and_then(|i| Ok((i, read(&outputs, args.output_count, "output")?)));
        match lists {
            Ok((inputs, outputs)) => Ok(Layout { inputs, outputs }),
            Err(reason) => Err(self.caller.bad_answer(OP, reason)),
        }
    }

    /// Checks the frames of a call, and takes them up.
    fn take_frames(
        &mut self,
        operation: &'static str,
        frames: impl ExactSizeIterator<Item = [abi::Plane; 3]>,
    ) -> Result<(), KernelError> {
        self.check_frames(operation, frames.len())?;
        self.frames.clear();
        self.frames
            .extend(frames.map(|planes| abi::Frame { planes }));
        self.check_planes(operation)
    }

    /// Frames to the input tensors of `phase_b`.
    ///
    /// # Safety
    /// [The contract of a call](RawSession#the-contract-of-a-call).
    ///
    /// # Errors
    /// Frames or plan of another size, a payload in memory of another kind, or a failure of the kernels.
    pub unsafe fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        input: &mut PayloadMut<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "encode";
        self.check_call(OP, plan)?;
        self.check_space(OP, input.is_on_device())?;
        let planes = |frame: &FrameView<'_>| {
            std::array::from_fn(|index| {
                let plane = frame.plane(index);
                raw_plane(&plane, plane.as_ptr().cast_mut())
            })
        };
        self.take_frames(OP, frames.iter().map(planes))?;
        let tensors = raw_tensors(OP, input.tensors())?;
        let input = tensors.payload(input.raw());
        let plan = raw_plan(plan);
        let mut args = abi::EncodeArgs {
            struct_size: abi::size::<abi::EncodeArgs>(),
            frame_count: self.frames.len() as u32,
            plan: &raw const plan,
            frames: self.frames.as_ptr(),
            input: &raw const input,
        };
        // SAFETY: the session's own table; the structs live across the call, every plane was checked to hold the session's
        // size, and the payload covers its tensors; the rest is the caller's duty.
        unsafe { self.call(OP, self.caller.table.encode, &mut args) }
    }

    /// Phase B: `input` to `output`. Gives the number of generator calls that were made or enqueued.
    ///
    /// # Safety
    /// [The contract of a call](RawSession#the-contract-of-a-call); the payloads do not overlap.
    ///
    /// # Errors
    /// A plan of another size, a payload in memory of another kind, or a failure of the kernels.
    pub unsafe fn phase_b(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
    ) -> Result<u32, KernelError> {
        const OP: &str = "phase_b";
        self.check_call(OP, plan)?;
        self.check_space(OP, input.is_on_device())?;
        self.check_space(OP, output.is_on_device())?;
        let input_tensors = raw_tensors(OP, input.tensors())?;
        let input = input_tensors.payload(input.raw());
        let output_tensors = raw_tensors(OP, output.tensors())?;
        let output = output_tensors.payload(output.raw());
        let plan = raw_plan(plan);
        let mut args = abi::PhaseBArgs {
            struct_size: abi::size::<abi::PhaseBArgs>(),
            observed_generator_calls: 0,
            plan: &raw const plan,
            input: &raw const input,
            output: &raw const output,
        };
        // SAFETY: as in `encode`.
        unsafe { self.call(OP, self.caller.table.phase_b, &mut args) }?;
        Ok(args.observed_generator_calls)
    }

    /// The output tensors of `phase_b` to frames.
    ///
    /// # Safety
    /// [The contract of a call](RawSession#the-contract-of-a-call).
    ///
    /// # Errors
    /// Frames or plan of another size, a payload in memory of another kind, or a failure of the kernels.
    pub unsafe fn decode(
        &mut self,
        plan: &VideoPlanParts,
        output: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), KernelError> {
        const OP: &str = "decode";
        self.check_call(OP, plan)?;
        self.check_space(OP, output.is_on_device())?;
        let planes = |frame: &mut FrameViewMut<'_>| {
            std::array::from_fn(|index| {
                let plane = frame.plane_mut(index);
                let data = plane.as_mut_ptr();
                raw_plane(plane, data)
            })
        };
        self.take_frames(OP, frames.iter_mut().map(planes))?;
        let tensors = raw_tensors(OP, output.tensors())?;
        let output = tensors.payload(output.raw());
        let plan = raw_plan(plan);
        let mut args = abi::DecodeArgs {
            struct_size: abi::size::<abi::DecodeArgs>(),
            frame_count: self.frames.len() as u32,
            plan: &raw const plan,
            output: &raw const output,
            frames: self.frames.as_ptr(),
        };
        // SAFETY: as in `encode`.
        unsafe { self.call(OP, self.caller.table.decode, &mut args) }
    }

    /// Calls an entry, and remembers a panic.
    ///
    /// # Safety
    /// The entry is of the session's table, and what the arguments point to is as the ABI asks for until the call returns.
    unsafe fn call<A>(
        &mut self,
        operation: &'static str,
        entry: Option<abi::CallFn<A>>,
        args: &mut A,
    ) -> Result<(), KernelError> {
        let (raw, entry) = (self.raw, self.caller.entry(operation, entry)?);
        // SAFETY: a live session, used by one thread at a time (`&mut self`); the rest is the caller's duty.
        let status = (self.error).with(|error| unsafe { entry(raw, args, error) });
        let result = self.caller.judge(operation, status, &self.error);
        if let Err(KernelError::Panicked { message, .. }) = &result {
            self.panicked = Some((operation, message.clone()));
        }
        result
    }

    pub(super) fn overrun(&self, operation: &'static str, what: String) -> KernelError {
        KernelError::Overrun {
            kernels: self.caller.name.to_string(),
            operation,
            what,
        }
    }

    fn check_usable(&self) -> Result<(), KernelError> {
        match &self.panicked {
            None => Ok(()),
            Some((operation, message)) => Err(KernelError::Panicked {
                kernels: self.caller.name.to_string(),
                operation,
                message: message.clone(),
            }),
        }
    }

    fn check_call(
        &self,
        operation: &'static str,
        plan: &VideoPlanParts,
    ) -> Result<(), KernelError> {
        self.check_usable()?;
        if (plan.width, plan.height) != (self.config.width, self.config.height) {
            return Err(bad_call(
                operation,
                format!(
                    "the plan is for {}x{}, the session for {}x{}",
                    plan.width, plan.height, self.config.width, self.config.height
                ),
            ));
        }
        VideoPlan::new(*plan).map_err(|error| bad_call(operation, error.to_string()))?;
        Ok(())
    }

    /// Refuses a payload in memory of another kind than the session's.
    fn check_space(&self, operation: &'static str, on_device: bool) -> Result<(), KernelError> {
        let reason = match (self.config.space, on_device) {
            (Space::Host, true) => "the payload lies on a device, the session works on host memory",
            (Space::Cuda { .. }, false) => {
                "the payload lies in host memory, the session works on a device"
            }
            _ => return Ok(()),
        };
        Err(bad_call(operation, reason.into()))
    }

    fn check_frames(&self, operation: &'static str, frames: usize) -> Result<(), KernelError> {
        let most = self.config.max_frames as usize;
        if frames == 0 || frames > most {
            return Err(bad_call(
                operation,
                format!("{frames} frames in a chunk, the session takes 1 to {most}"),
            ));
        }
        Ok(())
    }

    fn check_planes(&self, operation: &'static str) -> Result<(), KernelError> {
        for (number, frame) in self.frames.iter().enumerate() {
            for (index, plane) in frame.planes.iter().enumerate() {
                let must =
                    self.config
                        .chroma
                        .plane_size(index, self.config.width, self.config.height);
                if (plane.width, plane.height) != must {
                    return Err(bad_call(
                        operation,
                        format!(
                            "plane {index} of frame {number} is {}x{}, must be {}x{}",
                            plane.width, plane.height, must.0, must.1
                        ),
                    ));
                }
            }
        }
        Ok(())
    }
}

impl Drop for RawSession {
    fn drop(&mut self) {
        if let Some(destroy) = self.caller.table.destroy {
            // SAFETY: `raw` came from this table's `create`, is destroyed once, and no call is under way.
            unsafe { destroy(self.raw) }
        }
    }
}

fn bad_call(operation: &'static str, reason: String) -> KernelError {
    KernelError::BadCall { operation, reason }
}

fn raw_plane<D: Deref<Target = [u8]>>(plane: &Plane<D>, data: *mut u8) -> abi::Plane {
    abi::Plane {
        data: match plane.height() {
            0 => std::ptr::null_mut(),
            _ => data,
        },
        stride: plane.stride() as u64,
        width: plane.width() as u32,
        height: plane.height() as u32,
    }
}

fn raw_tensors(operation: &'static str, tensors: &Manifest) -> Result<RawTensors, KernelError> {
    RawTensors::new(tensors).map_err(|failure| bad_call(operation, failure.message))
}
