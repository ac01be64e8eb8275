//! What every session shares: the plugin's own session behind a pointer, and the checks around each call.
//!
//! Hazard: a raw pointer that crosses the border carries no length that anyone enforces. So the host checks every
//! argument against the session before the call, and after it the counts and the texts.

use pp_contract::{Manifest, VideoPlan, VideoPlanParts};

use crate::abi::{self, OpaqueSession};
use crate::config::{ChunkShape, Layout, SessionConfig};
use crate::convert::{self, RawTensors, raw_plan};
use crate::error::KernelError;
use crate::frame::{FrameView, FrameViewMut};

use super::caller::{Caller, ErrorBuffer};

/// The status that an entry returned, or why it was not called.
pub(super) type Status = Result<u32, KernelError>;

/// A session of any memory space. Its frames are those of the call under way.
pub(super) struct Core {
    caller: Caller,
    config: SessionConfig,
    raw: *mut OpaqueSession,
    error: ErrorBuffer,
    frames: Vec<abi::Frame>,
    panicked: Option<(&'static str, String)>,
}

// SAFETY: the ABI says that calls on one session may come from different threads as long as they do not overlap, and
// every call takes `&mut self` (or `self` in drop). The raw pointers in `frames` are only read during a call.
unsafe impl Send for Core {}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core")
            .field("kernels", &self.caller.name)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Core {
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
        Ok(Core {
            caller,
            config: *config,
            raw,
            error,
            frames: Vec::with_capacity(config.max_frames as usize),
            panicked: None,
        })
    }

    pub(super) fn config(&self) -> &SessionConfig {
        &self.config
    }

    pub(super) fn layout(&mut self, shape: ChunkShape) -> Result<Layout, KernelError> {
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
        let layout = self.caller.entry(OP, self.caller.table.layout)?;
        let raw = self.raw;
        // SAFETY: `raw` is a live session of this table, used by one thread at a time (`&mut self`); the arrays hold
        // `capacity` elements and live across the call.
        let status = self
            .error
            .with(|error| unsafe { layout(raw, &raw mut args, error) });
        self.judge(OP, status)?;
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

    /// Checks a call that reads frames, and takes them up.
    pub(super) fn take_frames(
        &mut self,
        operation: &'static str,
        frames: &[FrameView<'_>],
    ) -> Result<(), KernelError> {
        self.check_frames(operation, frames.len())?;
        self.frames.clear();
        for frame in frames {
            let planes = std::array::from_fn(|index| {
                let plane = frame.plane(index);
                let (stride, width, height) = (plane.stride(), plane.width(), plane.height());
                raw_plane(plane.as_ptr().cast_mut(), stride, width, height)
            });
            self.frames.push(abi::Frame { planes });
        }
        self.check_planes(operation)
    }

    /// Checks a call that writes frames, and takes them up.
    pub(super) fn take_frames_mut(
        &mut self,
        operation: &'static str,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), KernelError> {
        self.check_frames(operation, frames.len())?;
        self.frames.clear();
        for frame in frames.iter_mut() {
            let planes = std::array::from_fn(|index| {
                let plane = frame.plane_mut(index);
                let (stride, width, height) = (plane.stride(), plane.width(), plane.height());
                raw_plane(plane.as_mut_ptr(), stride, width, height)
            });
            self.frames.push(abi::Frame { planes });
        }
        self.check_planes(operation)
    }

    /// Calls `encode` on the frames taken up; gives the status.
    ///
    /// # Safety
    /// The frames taken up are those of this call, readable, and `input` covers its tensors and may be written; for
    /// a session on a device until its stream has passed the call, otherwise until this returns.
    pub(super) unsafe fn encode(&mut self, plan: &VideoPlanParts, input: &abi::Payload) -> Status {
        let plan = raw_plan(plan);
        let mut args = abi::EncodeArgs {
            struct_size: abi::size::<abi::EncodeArgs>(),
            frame_count: self.frames.len() as u32,
            plan: &raw const plan,
            frames: self.frames.as_ptr(),
            input,
        };
        let encode = self.caller.entry("encode", self.caller.table.encode)?;
        let raw = self.raw;
        // SAFETY: a live session used by one thread (`&mut self`); the structs live across the call, every plane was
        // checked to hold the session's size; the memory behind them is the caller's duty.
        Ok(self
            .error
            .with(|error| unsafe { encode(raw, &raw mut args, error) }))
    }

    /// Calls `phase_b`; gives the status and the number of generator calls.
    ///
    /// # Safety
    /// Both payloads cover their tensors; `input` may be read and `output` written; as long as for
    /// [`Core::encode`].
    pub(super) unsafe fn phase_b(
        &mut self,
        plan: &VideoPlanParts,
        input: &abi::Payload,
        output: &abi::Payload,
        observed: &mut u32,
    ) -> Status {
        let plan = raw_plan(plan);
        let mut args = abi::PhaseBArgs {
            struct_size: abi::size::<abi::PhaseBArgs>(),
            observed_generator_calls: 0,
            plan: &raw const plan,
            input,
            output,
        };
        let phase_b = self.caller.entry("phase_b", self.caller.table.phase_b)?;
        let raw = self.raw;
        // SAFETY: as in `encode`.
        let status = self
            .error
            .with(|error| unsafe { phase_b(raw, &raw mut args, error) });
        *observed = args.observed_generator_calls;
        Ok(status)
    }

    /// Calls `decode` on the frames taken up; gives the status.
    ///
    /// # Safety
    /// The frames taken up are those of this call and may be written, `output` covers its tensors and may be read; as
    /// long as for [`Core::encode`].
    pub(super) unsafe fn decode(&mut self, plan: &VideoPlanParts, output: &abi::Payload) -> Status {
        let plan = raw_plan(plan);
        let mut args = abi::DecodeArgs {
            struct_size: abi::size::<abi::DecodeArgs>(),
            frame_count: self.frames.len() as u32,
            plan: &raw const plan,
            output,
            frames: self.frames.as_ptr(),
        };
        let decode = self.caller.entry("decode", self.caller.table.decode)?;
        let raw = self.raw;
        // SAFETY: as in `encode`.
        Ok(self
            .error
            .with(|error| unsafe { decode(raw, &raw mut args, error) }))
    }

    pub(super) fn overrun(&self, operation: &'static str, what: String) -> KernelError {
        KernelError::Overrun {
            kernels: self.caller.name.to_string(),
            operation,
            what,
        }
    }

    pub(super) fn judge(
        &mut self,
        operation: &'static str,
        status: u32,
    ) -> Result<(), KernelError> {
        let result = self.caller.judge(operation, status, &self.error);
        if let Err(KernelError::Panicked { message, .. }) = &result {
            self.panicked = Some((operation, message.clone()));
        }
        result
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

    pub(super) fn check_call(
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

impl Drop for Core {
    fn drop(&mut self) {
        if let Some(destroy) = self.caller.table.destroy {
            // SAFETY: `raw` came from this table's `create`, is destroyed once, and no call is under way.
            unsafe { destroy(self.raw) }
        }
    }
}

pub(super) fn bad_call(operation: &'static str, reason: String) -> KernelError {
    KernelError::BadCall { operation, reason }
}

fn raw_plane(data: *mut u8, stride: usize, width: usize, height: usize) -> abi::Plane {
    abi::Plane {
        data: if height == 0 {
            std::ptr::null_mut()
        } else {
            data
        },
        stride: stride as u64,
        width: width as u32,
        height: height as u32,
    }
}

pub(super) fn raw_tensors(
    operation: &'static str,
    tensors: &Manifest,
) -> Result<RawTensors, KernelError> {
    RawTensors::new(tensors).map_err(|failure| bad_call(operation, failure.message))
}
