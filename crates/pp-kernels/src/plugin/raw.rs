//! The plugin's own session behind a pointer, in memory of any kind, and the checks around each call.
//!
//! Hazard: a raw pointer that crosses the border carries no length that anyone enforces. So the host checks every
//! argument against the session before the call, and after it the counts and the texts.
//!
//! Hazard: a device reads and writes after the call has returned, so no borrow can hold the memory. The caller
//! promises instead, in one contract for all calls ([`RawSession`]).

use std::ffi::CString;
use std::ops::Deref;

use pp_contract::{Manifest, VideoPlan, VideoPlanParts};
use pp_device::Stream;

use crate::abi::{self, OpaqueSession};
use crate::config::{Bits, ChunkShape, Layout, SessionConfig, Space};
use crate::convert::{self, RawTensors, raw_plan};
use crate::error::KernelError;
use crate::frame::{FrameView, FrameViewMut, Plane};
use crate::group::{Collectives, Lent};
use crate::payload::{Payload, PayloadMut, TensorsIn};
use crate::stage::{FrameGeometry, StageInfo, StageKind};

use super::caller::{Caller, bad_call};

/// One session of a stage, in the memory of its configuration. [`StageSession`](super::StageSession) is its safe form on
/// host memory; this one is for devices.
///
/// # The contract of a call
/// On a device, [`encode`](RawSession::encode), [`run`](RawSession::run) and [`decode`](RawSession::decode) enqueue work
/// on the session's stream and return. A member of a group may have a stream for results beside it
/// ([`RawSession::results`]): then the session's stream has the work on the input, and the next call begins there before
/// this one is done. The caller promises:
/// 1. the session's context is current on the calling thread;
/// 2. the payloads are device memory of that context, as long as they say;
/// 3. payloads and frames stay allocated, and are touched by nothing that the stream does not order, until the stream
///    has passed the call: an event recorded behind it is done. Of the output, and of the call as a whole, that is the
///    stream of the results;
/// 4. the collectives of a group enqueue on that stream, and a gather on that of the results.
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
    stage: StageInfo,
    config: SessionConfig,
    geometry: FrameGeometry,
    raw: *mut OpaqueSession,
    /// Those of the call under way.
    frames: Vec<abi::PpFrame>,
    panicked: Option<(String, String)>,
}

// SAFETY: the ABI says that calls on one session may come from different threads as long as they do not overlap, and
// every call takes `&mut self` (or `self` in drop). The raw pointers in `frames` are only read during a call.
unsafe impl Send for RawSession {}

impl std::fmt::Debug for RawSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RawSession")
            .field("kernels", &self.caller.name)
            .field("stage", &self.stage)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// The user's pairs as texts that end with a NUL.
fn raw_args(args: &[(String, String)]) -> Result<Vec<(CString, CString)>, KernelError> {
    let text = |text: &str| {
        CString::new(text)
            .map_err(|_| bad_call("open", format!("the argument {text:?} holds a NUL")))
    };
    args.iter()
        .map(|(key, value)| Ok((text(key)?, text(value)?)))
        .collect()
}

/// Refuses parts, laps and members of a stage that does not have them.
fn check_share(stage: &StageInfo, config: &SessionConfig) -> Result<(), KernelError> {
    let asked = [
        (config.parts > 1 && !stage.in_parts, "cut into parts"),
        (config.laps > 1 && !stage.in_ring, "walked in a ring"),
        (config.members > 1 && !stage.in_group, "run by a group"),
    ];
    match asked.into_iter().find(|(refused, _)| *refused) {
        None => Ok(()),
        Some((_, what)) => Err(bad_call(
            "open",
            format!("the stage {} of these kernels cannot be {what}", stage.name),
        )),
    }
}

/// Refuses frames of more bits a sample than the kernels take.
fn check_bits(takes: Bits, config: &SessionConfig) -> Result<(), KernelError> {
    if config.bits <= takes {
        return Ok(());
    }
    let (has, takes, format) = (
        config.bits as u32,
        takes as u32,
        takes.ffmpeg_name(config.chroma),
    );
    let reason = format!(
        "these kernels take {takes} bits a sample, the frames have {has}; make them {takes}: ffmpeg -i IN -pix_fmt {format} OUT.y4m"
    );
    Err(bad_call("create", reason))
}

impl RawSession {
    /// Makes the session for the stage of this number.
    ///
    /// # Safety
    /// A configuration for CUDA holds a live context, current on this thread, and a live stream of it, both of which
    /// outlive the session.
    pub(super) unsafe fn open(
        caller: Caller,
        (number, stage): (u32, &StageInfo),
        (takes, config): (Bits, &SessionConfig),
        args: &[(String, String)],
    ) -> Result<Self, KernelError> {
        config
            .validate()
            .map_err(|failure| bad_call("create", failure.message))?;
        check_share(stage, config)?;
        check_bits(takes, config)?;
        let texts = raw_args(args)?;
        let pairs: Vec<abi::PpArg> = (texts.iter())
            .map(|(key, value)| abi::PpArg {
                key: key.as_ptr().cast(),
                value: value.as_ptr().cast(),
            })
            .collect();
        let create = caller.entry("create", caller.table.create)?;
        let raw_config = config.to_abi(number, &pairs);
        let mut frames = FrameGeometry::of(config).to_abi();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the table was checked; the structs and the user's pairs live across the call and carry their sizes; what
        // the configuration names is alive (the caller's duty).
        caller.call("create", |error| unsafe {
            create(&raw const raw_config, &raw mut frames, &raw mut raw, error)
        })?;
        if raw.is_null() {
            return Err(caller.bad_answer("create", "it said OK and gave no session"));
        }
        let mut session = RawSession {
            caller,
            stage: stage.clone(),
            config: *config,
            geometry: FrameGeometry::of(config),
            raw,
            frames: Vec::new(),
            panicked: None,
        };
        let geometry = FrameGeometry::from_abi(&frames)
            .map_err(|reason| session.caller.bad_answer("create", reason))?;
        if stage.kind != StageKind::Sink && geometry != session.geometry {
            let reason = format!("the stage {} is no sink and changed its frames", stage.name);
            return Err(session.caller.bad_answer("create", reason));
        }
        session.geometry = geometry;
        session.frames.reserve(session.most_frames());
        Ok(session)
    }

    /// What the session was made for.
    #[must_use]
    pub fn config(&self) -> &SessionConfig {
        &self.config
    }

    /// The stage that it runs.
    #[must_use]
    pub fn stage(&self) -> &StageInfo {
        &self.stage
    }

    /// The frames of a source or a sink; a sink's may differ from those of the source.
    #[must_use]
    pub fn frames(&self) -> FrameGeometry {
        self.geometry
    }

    /// The stream of the results, of a session that has one beside its own: it has passed a call once all work of the call
    /// is done. Behind a call that failed each of the two streams has all its work.
    #[must_use]
    pub fn results(&self) -> Option<Stream> {
        let results = (self.caller.results).filter(|_| self.config.members > 1)?;
        // SAFETY: a live session of these kernels, and `&self` keeps calls away.
        Some(unsafe { results(self.raw) })
    }

    fn most_frames(&self) -> usize {
        self.config.max_frames as usize * self.geometry.frames_per_frame as usize
    }

    /// The tensors of a chunk of this shape in this lap, each with its place in the payload. No work for the device.
    ///
    /// # Errors
    /// A shape that the session does not serve, or an answer that makes no sense.
    pub fn layout(&mut self, shape: ChunkShape, lap: u32) -> Result<Layout, KernelError> {
        const OP: &str = "layout";
        self.check_usable()?;
        self.check_lap(OP, lap)?;
        let most = self.config.max_frames;
        if shape.frames == 0 || shape.frames > most {
            return Err(bad_call(OP, too_many(shape.frames as usize, most as usize)));
        }
        let mut inputs = RawTensors::EMPTY;
        let mut outputs = RawTensors::EMPTY;
        let mut args = abi::PpLayoutArgs {
            struct_size: abi::size::<abi::PpLayoutArgs>(),
            frames: shape.frames,
            steps: shape.steps,
            context_frames: shape.context_frames,
            lap,
            capacity: abi::MAX_TENSORS as u32,
            input_count: 0,
            output_count: 0,
            inputs: inputs.as_mut_ptr(),
            outputs: outputs.as_mut_ptr(),
        };
        // SAFETY: the session's own table; the arrays hold `capacity` elements and live across the call.
        unsafe { self.call(OP, self.caller.table.layout, &mut args) }?;
        let read = |raw: &RawTensors, count: u32, which: &str, none: StageKind| {
            if self.stage.kind == none && count > 0 {
                return Err(format!(
                    "{count} {which} tensors of a {none:?}, which has none"
                ));
            }
            let written = raw
                .as_slice()
                .get(..count as usize)
                .ok_or_else(|| format!("{count} {which} tensors, at most {}", abi::MAX_TENSORS))?;
            convert::manifest(written).map_err(|failure| failure.message)
        };
        let bad_answer = |reason| self.caller.bad_answer(OP, reason);
        let inputs = read(&inputs, args.input_count, "input", StageKind::Source);
        let outputs = read(&outputs, args.output_count, "output", StageKind::Sink);
        Ok(Layout {
            inputs: inputs.map_err(bad_answer)?,
            outputs: outputs.map_err(bad_answer)?,
        })
    }

    /// A source: frames to tensors.
    ///
    /// # Safety
    /// [The contract of a call](RawSession#the-contract-of-a-call).
    ///
    /// # Errors
    /// A stage of another kind, frames or plan of another size, a payload in memory of another kind, or a failure of the
    /// kernels.
    pub unsafe fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        output: &mut PayloadMut<'_>,
    ) -> Result<(), KernelError> {
        self.check_call(StageKind::Source, plan)?;
        self.check_space(output)?;
        let planes = |frame: &FrameView<'_>| {
            std::array::from_fn(|index| {
                let plane = frame.plane(index);
                (raw_plane(&plane, plane.as_ptr().cast_mut()), plane.bits())
            })
        };
        self.take_frames(frames.iter().map(planes))?;
        let tensors = self.raw_tensors(output.tensors())?;
        let output = tensors.payload(output.raw());
        let plan = self.raw_plan(plan);
        let mut args = abi::PpRunArgs {
            frame_count: self.frames.len() as u32,
            frames: self.frames.as_ptr(),
            output: &raw const output,
            ..run_args(&plan)
        };
        // SAFETY: the structs live across the call, every plane was checked to hold the stage's size, and the payload covers
        // its tensors; the rest is the caller's duty.
        unsafe { self.call_run(&mut args) }
    }

    /// A middle stage: `input` to `output`, in this lap. Gives the number of generator calls that were made or enqueued. A
    /// member of a group needs the group's collectives; only member 0 needs the memory of the tensors.
    ///
    /// # Safety
    /// [The contract of a call](RawSession#the-contract-of-a-call); the payloads do not overlap.
    ///
    /// # Errors
    /// A stage of another kind, a plan of another size, a payload in memory of another kind, a group that is missing, or
    /// a failure of the kernels.
    pub unsafe fn run(
        &mut self,
        plan: &VideoPlanParts,
        lap: u32,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
        group: Option<&mut dyn Collectives>,
    ) -> Result<u32, KernelError> {
        self.check_call(StageKind::Middle, plan)?;
        self.check_lap(&self.stage.name, lap)?;
        let members = self.config.members;
        if group.is_some() != (members > 1) {
            let given = if group.is_some() {
                "given"
            } else {
                "not given"
            };
            let reason = format!("the group is {given}, the session has {members} members");
            return Err(bad_call(&self.stage.name, reason));
        }
        self.check_space(input)?;
        self.check_space(output)?;
        let input_tensors = self.raw_tensors(input.tensors())?;
        let input = input_tensors.payload(input.raw());
        let output_tensors = self.raw_tensors(output.tensors())?;
        let output = output_tensors.payload(output.raw());
        let plan = self.raw_plan(plan);
        let mut lent = group.map(|collectives| Lent {
            collectives,
            members,
        });
        let table = lent.as_mut().map(Lent::table);
        let mut args = abi::PpRunArgs {
            lap,
            input: &raw const input,
            output: &raw const output,
            group: table.as_ref().map_or(std::ptr::null(), std::ptr::from_ref),
            ..run_args(&plan)
        };
        // SAFETY: as in `encode`; the table lends the collectives, which nothing else uses until the call returns.
        unsafe { self.call_run(&mut args) }?;
        Ok(args.observed_generator_calls)
    }

    /// A sink: tensors to frames.
    ///
    /// # Safety
    /// [The contract of a call](RawSession#the-contract-of-a-call).
    ///
    /// # Errors
    /// As [`RawSession::encode`].
    pub unsafe fn decode(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), KernelError> {
        self.check_call(StageKind::Sink, plan)?;
        self.check_space(input)?;
        let planes = |frame: &mut FrameViewMut<'_>| {
            std::array::from_fn(|index| {
                let plane = frame.plane_mut(index);
                let data = plane.as_mut_ptr();
                (raw_plane(plane, data), plane.bits())
            })
        };
        self.take_frames(frames.iter_mut().map(planes))?;
        let tensors = self.raw_tensors(input.tensors())?;
        let input = tensors.payload(input.raw());
        let plan = self.raw_plan(plan);
        let mut args = abi::PpRunArgs {
            frame_count: self.frames.len() as u32,
            frames: self.frames.as_ptr(),
            input: &raw const input,
            ..run_args(&plan)
        };
        // SAFETY: as in `encode`.
        unsafe { self.call_run(&mut args) }
    }

    /// # Safety
    /// As [`RawSession::call`].
    unsafe fn call_run(&mut self, args: &mut abi::PpRunArgs) -> Result<(), KernelError> {
        let name = self.stage.name.clone();
        // SAFETY: the session's own table; the rest is the caller's duty.
        unsafe { self.call(&name, self.caller.table.run, args) }
    }

    /// Calls an entry, and remembers a panic.
    ///
    /// # Safety
    /// The entry is of the session's table, and what the arguments point to is as the ABI asks for until the call returns.
    unsafe fn call<A>(
        &mut self,
        operation: &str,
        entry: Option<abi::CallFn<A>>,
        args: &mut A,
    ) -> Result<(), KernelError> {
        let (raw, entry) = (self.raw, self.caller.entry(operation, entry)?);
        // SAFETY: a live session, used by one thread at a time (`&mut self`); the rest is the caller's duty.
        let result = (self.caller).call(operation, |error| unsafe { entry(raw, args, error) });
        if let Err(KernelError::Panicked { message, .. }) = &result {
            self.panicked = Some((operation.into(), message.clone()));
        }
        result
    }

    pub(super) fn overrun(&self, what: String) -> KernelError {
        KernelError::Overrun {
            kernels: self.caller.name.to_string(),
            operation: self.stage.name.clone(),
            what,
        }
    }

    fn check_usable(&self) -> Result<(), KernelError> {
        match &self.panicked {
            None => Ok(()),
            Some((operation, message)) => Err(KernelError::Panicked {
                kernels: self.caller.name.to_string(),
                operation: operation.clone(),
                message: message.clone(),
            }),
        }
    }

    fn check_call(&self, kind: StageKind, plan: &VideoPlanParts) -> Result<(), KernelError> {
        let name = &self.stage.name;
        self.check_usable()?;
        if kind != self.stage.kind {
            return Err(bad_call(
                name,
                format!("called as a {kind:?}, it is a {:?}", self.stage.kind),
            ));
        }
        if (plan.width, plan.height) != (self.config.width, self.config.height) {
            return Err(bad_call(
                name,
                format!(
                    "the plan is for {}x{}, the session for {}x{}",
                    plan.width, plan.height, self.config.width, self.config.height
                ),
            ));
        }
        VideoPlan::new(*plan).map_err(|error| bad_call(name, error.to_string()))?;
        Ok(())
    }

    /// A stage without the flag is told of no gap.
    fn raw_plan(&self, plan: &VideoPlanParts) -> abi::PpPlan {
        let mut raw = raw_plan(plan);
        if !self.stage.in_gaps {
            (raw.skipped_frames, raw.context_skipped) = (0, [0; _]);
        }
        raw
    }

    fn check_lap(&self, operation: &str, lap: u32) -> Result<(), KernelError> {
        let laps = self.config.laps;
        if lap < laps {
            return Ok(());
        }
        Err(bad_call(
            operation,
            format!("lap {lap} of {laps}: laps are counted from 0"),
        ))
    }

    /// Refuses a payload in memory of another kind than the session's.
    /// Only a member that does not lead may have tensors without memory.
    fn check_space<H>(&self, payload: &TensorsIn<H>) -> Result<(), KernelError> {
        let reason = match (self.config.space, payload.is_on_device()) {
            (Space::Host, Some(true)) => {
                "the payload lies on a device, the session works on host memory"
            }
            (Space::Cuda { .. }, Some(false)) => {
                "the payload lies in host memory, the session works on a device"
            }
            (_, None) if self.config.member == 0 => {
                "the payload has no memory; member 0 of a group gives it"
            }
            _ => return Ok(()),
        };
        Err(bad_call(&self.stage.name, reason.into()))
    }

    /// Checks the frames of a call, and takes them up.
    fn take_frames(
        &mut self,
        frames: impl ExactSizeIterator<Item = [(abi::PpPlane, Bits); 3]>,
    ) -> Result<(), KernelError> {
        let (count, most) = (frames.len(), self.most_frames());
        if count == 0 || count > most {
            return Err(bad_call(&self.stage.name, too_many(count, most)));
        }
        self.frames.clear();
        for (number, planes) in frames.enumerate() {
            for (index, (plane, bits)) in planes.iter().enumerate() {
                let must = self.geometry.plane_size(index);
                let of = self.geometry.bits;
                let what = if (plane.width, plane.height) != must {
                    format!(
                        "is {}x{}, must be {}x{}",
                        plane.width, plane.height, must.0, must.1
                    )
                } else if plane.height > 0 && *bits != of {
                    let (has, must) = (*bits as u32, of as u32);
                    format!("has {has} bits a sample, must have {must}")
                } else {
                    continue;
                };
                let reason = format!("plane {index} of frame {number} {what}");
                return Err(bad_call(&self.stage.name, reason));
            }
            let planes = planes.map(|(plane, _)| plane);
            self.frames.push(abi::PpFrame { planes });
        }
        Ok(())
    }

    fn raw_tensors(&self, tensors: &Manifest) -> Result<RawTensors, KernelError> {
        RawTensors::new(tensors).map_err(|failure| bad_call(&self.stage.name, failure.message))
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

fn too_many(frames: usize, most: usize) -> String {
    format!("{frames} frames in a chunk, the session takes 1 to {most}")
}

fn run_args(plan: &abi::PpPlan) -> abi::PpRunArgs {
    abi::PpRunArgs {
        struct_size: abi::size::<abi::PpRunArgs>(),
        lap: 0,
        frame_count: 0,
        observed_generator_calls: 0,
        plan,
        frames: std::ptr::null(),
        input: std::ptr::null(),
        output: std::ptr::null(),
        group: std::ptr::null(),
    }
}

fn raw_plane<D: Deref<Target = [u8]>>(plane: &Plane<D>, data: *mut u8) -> abi::PpPlane {
    abi::PpPlane {
        data: match plane.height() {
            0 => std::ptr::null_mut(),
            _ => data,
        },
        stride: plane.stride() as u64,
        width: plane.width() as u32,
        height: plane.height() as u32,
    }
}
