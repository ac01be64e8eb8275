//! The calling side of the table: a session whose arguments are slices, and the checks around each call.
//!
//! Hazard: a raw pointer that crosses the border carries no length that anyone enforces. So the host checks every
//! argument against the session before the call, and after it the guard bytes, the counts and the texts.

use std::sync::Arc;

use crate::abi::{self, OpaqueSession, Table};
use crate::config::{ChunkShape, Description, SessionConfig};
use crate::error::{KernelError, Status};
use crate::frame::{FrameView, FrameViewMut};
use crate::guard;
use crate::plan::Plan;
use crate::tensor::{Layout, Payload, PayloadMut, TensorList, TensorSpec};

/// A table and the name to use in errors.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) table: Table,
    pub(super) name: Arc<str>,
}

/// Where the callee puts the text of an error; reused from call to call.
pub(super) struct ErrorBuffer {
    text: [u8; 512],
    length: u64,
}

impl ErrorBuffer {
    pub(super) fn new() -> ErrorBuffer {
        ErrorBuffer {
            text: [0; 512],
            length: 0,
        }
    }

    /// Calls `call` with an error struct that points here.
    pub(super) fn with(&mut self, call: impl FnOnce(*mut abi::ErrorText) -> u32) -> u32 {
        let mut raw = abi::ErrorText {
            struct_size: abi::size::<abi::ErrorText>(),
            reserved: 0,
            text: self.text.as_mut_ptr(),
            capacity: self.text.len() as u64,
            length: 0,
        };
        let status = call(&raw mut raw);
        self.length = raw.length;
        status
    }

    /// The text in one line; control characters and what is not UTF-8 are replaced, a length that lies is cut.
    fn text(&self) -> String {
        let length = usize::try_from(self.length)
            .unwrap_or(usize::MAX)
            .min(self.text.len());
        String::from_utf8_lossy(&self.text[..length])
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect()
    }
}

impl Caller {
    pub(super) fn new(table: Table, name: Arc<str>) -> Caller {
        Caller { table, name }
    }

    /// A status as a result.
    pub(super) fn judge(
        &self,
        operation: &'static str,
        status: u32,
        error: &ErrorBuffer,
    ) -> Result<(), KernelError> {
        if status == abi::OK {
            return Ok(());
        }
        let mut message = error.text();
        if message.is_empty() {
            message = format!("status {status} and no text");
        }
        let kernels = self.name.to_string();
        Err(match Status::from_code(status) {
            Status::Panic => KernelError::Panicked {
                kernels,
                operation,
                message,
            },
            status => KernelError::Failed {
                kernels,
                operation,
                status,
                message,
            },
        })
    }

    fn bad_answer(&self, operation: &'static str, reason: impl Into<String>) -> KernelError {
        KernelError::BadAnswer {
            kernels: self.name.to_string(),
            operation,
            reason: reason.into(),
        }
    }

    /// An entry that the loader has checked to be there.
    fn entry<F>(&self, operation: &'static str, entry: Option<F>) -> Result<F, KernelError> {
        entry.ok_or_else(|| self.bad_answer(operation, "the entry is missing"))
    }

    pub(super) fn describe(&self) -> Result<Description, KernelError> {
        let describe = self.entry("describe", self.table.describe)?;
        let mut raw = abi::Description {
            struct_size: abi::size::<abi::Description>(),
            spaces: 0,
            chroma_formats: 0,
            context_frames: 0,
            digest: 0,
            name: [0; 64],
            version: [0; 32],
        };
        let mut error = ErrorBuffer::new();
        // SAFETY: the table was checked; both structs live across the call and carry their sizes.
        let status = error.with(|error| unsafe { describe(&raw mut raw, error) });
        self.judge("describe", status, &error)?;
        Description::from_abi(&raw).map_err(|reason| self.bad_answer("describe", reason))
    }
}

/// One session of a set of kernels.
///
/// Its state (the frames it remembers, its scratch memory) is its own; results depend on the sequence of calls alone.
/// # If dropped
/// The kernels destroy it; after a panic inside them too.
pub struct KernelSession {
    caller: Caller,
    config: SessionConfig,
    raw: *mut OpaqueSession,
    error: ErrorBuffer,
    frames: Vec<abi::Frame>,
    panicked: Option<(&'static str, String)>,
}

// SAFETY: the ABI says that calls on one session may come from different threads as long as they do not overlap, and
// every call takes `&mut self` (or `self` in drop). The raw pointers in `frames` are only read during a call.
unsafe impl Send for KernelSession {}

impl std::fmt::Debug for KernelSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelSession")
            .field("kernels", &self.caller.name)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl KernelSession {
    pub(super) fn open(caller: Caller, config: &SessionConfig) -> Result<Self, KernelError> {
        config
            .validate()
            .map_err(|failure| bad_call("create", failure.message))?;
        let create = caller.entry("create", caller.table.create)?;
        let raw_config = config.to_abi();
        let mut raw = std::ptr::null_mut();
        let mut error = ErrorBuffer::new();
        // SAFETY: the table was checked; the structs live across the call and carry their sizes.
        let status =
            error.with(|error| unsafe { create(&raw const raw_config, &raw mut raw, error) });
        caller.judge("create", status, &error)?;
        if raw.is_null() {
            return Err(caller.bad_answer("create", "it said OK and gave no session"));
        }
        Ok(KernelSession {
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

    /// The tensors of a chunk of this shape, each with its place in the payload.
    ///
    /// # Errors
    /// A shape that the session does not serve, or an answer that makes no sense.
    pub fn layout(&mut self, shape: ChunkShape) -> Result<Layout, KernelError> {
        const OP: &str = "layout";
        self.check_usable()?;
        self.check_frames(OP, shape.frames as usize)?;
        const EMPTY: abi::Tensor = abi::Tensor {
            name: [0; 48],
            dtype: 0,
            ndim: 0,
            dims: [0; 8],
            offset: 0,
            bytes: 0,
        };
        let mut inputs = [EMPTY; abi::MAX_TENSORS];
        let mut outputs = [EMPTY; abi::MAX_TENSORS];
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
        let read = |raw: &[abi::Tensor], count: u32, which: &str| {
            let written = raw
                .get(..count as usize)
                .ok_or_else(|| format!("{count} {which} tensors, at most {}", abi::MAX_TENSORS))?;
            let specs: Result<Vec<_>, _> =
                written.iter().map(|t| TensorSpec::from_abi(*t)).collect();
            specs
                .and_then(TensorList::new)
                .map_err(|failure| failure.message)
        };
        let lists = read(&inputs, args.input_count, "input")
            .and_then(|i| Ok((i, read(&outputs, args.output_count, "output")?)));
        match lists {
            Ok((inputs, outputs)) => Ok(Layout { inputs, outputs }),
            Err(reason) => Err(self.caller.bad_answer(OP, reason)),
        }
    }

    /// Frames to the input tensors of `phase_b`, written straight into `input`.
    ///
    /// # Errors
    /// Frames or plan of another size, a failure of the kernels, or a write past a tensor.
    pub fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &Plan,
        input: &mut PayloadMut<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "encode";
        self.check_call(OP, plan)?;
        self.check_frames(OP, frames.len())?;
        self.frames.clear();
        for frame in frames {
            let raw = std::array::from_fn(|index| {
                let plane = frame.plane(index);
                raw_plane(
                    plane.as_ptr().cast_mut(),
                    plane.stride(),
                    plane.width(),
                    plane.height(),
                )
            });
            self.frames.push(abi::Frame { planes: raw });
        }
        self.check_planes(OP)?;
        let encode = self.caller.entry(OP, self.caller.table.encode)?;
        let plan = plan.to_abi();
        let raw = self.raw;
        let (frames, error) = (&self.frames, &mut self.error);
        let status = write_payload(input, |payload| {
            let mut args = abi::EncodeArgs {
                struct_size: abi::size::<abi::EncodeArgs>(),
                frame_count: frames.len() as u32,
                plan: &raw const plan,
                frames: frames.as_ptr(),
                input: payload,
            };
            // SAFETY: a live session used by one thread; every plane was checked to hold the session's size and is
            // borrowed across the call; the payload covers its tensors.
            error.with(|error| unsafe { encode(raw, &raw mut args, error) })
        });
        self.finish(OP, status)
    }

    /// The generator: `input` to `output`. Gives the number of generator calls it made.
    ///
    /// # Errors
    /// A plan of another size, a failure of the kernels, or a write past a tensor.
    pub fn phase_b(
        &mut self,
        plan: &Plan,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
    ) -> Result<u32, KernelError> {
        const OP: &str = "phase_b";
        self.check_call(OP, plan)?;
        let phase_b = self.caller.entry(OP, self.caller.table.phase_b)?;
        let plan = plan.to_abi();
        let raw = self.raw;
        let error = &mut self.error;
        let input = read_payload(input);
        let mut observed = 0;
        let status = write_payload(output, |payload| {
            let mut args = abi::PhaseBArgs {
                struct_size: abi::size::<abi::PhaseBArgs>(),
                observed_generator_calls: 0,
                plan: &raw const plan,
                input: &raw const input,
                output: payload,
            };
            // SAFETY: a live session used by one thread; both payloads cover their tensors and are borrowed across
            // the call, the output exclusively.
            let status = error.with(|error| unsafe { phase_b(raw, &raw mut args, error) });
            observed = args.observed_generator_calls;
            status
        });
        self.finish(OP, status)?;
        Ok(observed)
    }

    /// The output tensors of `phase_b` to frames, read straight from `output`.
    ///
    /// # Errors
    /// Frames or plan of another size, or a failure of the kernels.
    pub fn decode(
        &mut self,
        plan: &Plan,
        output: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), KernelError> {
        const OP: &str = "decode";
        self.check_call(OP, plan)?;
        self.check_frames(OP, frames.len())?;
        self.frames.clear();
        for frame in frames.iter_mut() {
            let raw = std::array::from_fn(|index| {
                let plane = frame.plane_mut(index);
                let (stride, width, height) = (plane.stride(), plane.width(), plane.height());
                raw_plane(plane.as_mut_ptr(), stride, width, height)
            });
            self.frames.push(abi::Frame { planes: raw });
        }
        self.check_planes(OP)?;
        let decode = self.caller.entry(OP, self.caller.table.decode)?;
        let plan = plan.to_abi();
        let output = read_payload(output);
        let mut args = abi::DecodeArgs {
            struct_size: abi::size::<abi::DecodeArgs>(),
            frame_count: self.frames.len() as u32,
            plan: &raw const plan,
            output: &raw const output,
            frames: self.frames.as_ptr(),
        };
        let raw = self.raw;
        // SAFETY: a live session used by one thread; every plane was checked to hold the session's size and is
        // borrowed exclusively across the call; the payload covers its tensors.
        let status = self
            .error
            .with(|error| unsafe { decode(raw, &raw mut args, error) });
        self.judge(OP, status)
    }

    fn finish(
        &mut self,
        operation: &'static str,
        outcome: Result<u32, (u32, String)>,
    ) -> Result<(), KernelError> {
        match outcome {
            Ok(status) => self.judge(operation, status),
            Err((status, what)) => {
                // A panic is remembered even when the guard bytes are what is reported.
                let _ = self.judge(operation, status);
                Err(KernelError::Overrun {
                    kernels: self.caller.name.to_string(),
                    operation,
                    what,
                })
            }
        }
    }

    fn judge(&mut self, operation: &'static str, status: u32) -> Result<(), KernelError> {
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

    fn check_call(&self, operation: &'static str, plan: &Plan) -> Result<(), KernelError> {
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
        plan.validate()
            .map_err(|failure| bad_call(operation, failure.message))
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

impl Drop for KernelSession {
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

fn read_payload(payload: &Payload<'_>) -> abi::Payload {
    abi::Payload {
        struct_size: abi::size::<abi::Payload>(),
        tensor_count: payload.specs().len() as u32,
        tensors: payload.specs().as_ptr().cast(),
        // Read only by the rules of the entry it is given to.
        data: payload.data().as_ptr().cast_mut(),
        bytes: payload.data().len() as u64,
    }
}

/// Arms the guards, runs `call`, checks the guards. The error holds the status and what was overrun.
fn write_payload(
    payload: &mut PayloadMut<'_>,
    call: impl FnOnce(*const abi::Payload) -> u32,
) -> Result<u32, (u32, String)> {
    let (specs, data, tail) = payload.parts();
    guard::zero_gaps(specs, data);
    guard::arm(tail);
    let raw = abi::Payload {
        struct_size: abi::size::<abi::Payload>(),
        tensor_count: specs.len() as u32,
        tensors: specs.as_ptr().cast(),
        data: data.as_mut_ptr(),
        bytes: data.len() as u64,
    };
    let status = call(&raw const raw);
    if let Err(spec) = guard::check_gaps(specs, data) {
        return Err((status, format!("tensor {}", spec.name())));
    }
    if let Err(index) = guard::check(tail) {
        return Err((status, format!("the payload (byte {index} behind it)")));
    }
    Ok(status)
}
