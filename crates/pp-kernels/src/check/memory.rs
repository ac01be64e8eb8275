//! Sessions on host memory or on a device, called alike: bytes go in, bytes come out, and the work is done.
//!
//! Hazard: kernels write where they should not. So each payload and each frame has memory of its own between guard
//! bytes, on a device too, and whatever a call may only read is compared with what it was before.
//!
//! The wait for a device has no bound: a check takes as long as the kernels do.

use std::ops::DerefMut;
use std::time::Duration;

use pp_contract::{Manifest, VideoPlanParts};
use pp_device::{CudaError, DevicePtr, Event, Stream, StreamBuffer};

use super::outcome::{Outcome, fail};
use crate::config::{ChunkShape, Layout, SessionConfig, Space};
use crate::cuda::{Pinned, borrow};
use crate::error::KernelError;
use crate::frame::{FrameView, FrameViewMut};
use crate::group::Collectives;
use crate::guard::{self, GUARD_BYTES};
use crate::payload::{Payload, PayloadMut};
use crate::plugin::{KernelSet, RawSession, StageSession};
use crate::stage::{FrameGeometry, StageInfo};

/// Where payloads lie.
#[derive(Debug)]
pub(super) enum Place {
    Host,
    Device(Stream),
}

impl Place {
    /// # Safety
    /// As [`super::Bench::on_device`].
    pub(super) unsafe fn device(context: u64, stream: u64) -> Result<Place, CudaError> {
        // SAFETY: the caller's duty.
        unsafe { borrow(context, stream) }.map(Place::Device)
    }

    pub(super) fn space(&self) -> Space {
        match self {
            Place::Host => Space::Host,
            Place::Device(stream) => Space::Cuda {
                context: stream.device().raw_context(),
                stream: stream.raw(),
            },
        }
    }

    /// Opens a session of a stage for a configuration of [`Place::space`]. Of a group every member but the first has a
    /// stream of its own.
    pub(super) fn open(
        &self,
        set: &KernelSet,
        stage: &str,
        config: &SessionConfig,
    ) -> Outcome<Session> {
        Ok(match self {
            Place::Host => Session::Host(set.open_stage(stage, config, &[])?),
            Place::Device(stream) => {
                let stream = match config.member {
                    0 => stream.clone(),
                    _ => Stream::new(stream.device())?,
                };
                let config = SessionConfig {
                    space: Place::Device(stream.clone()).space(),
                    ..*config
                };
                // SAFETY: the context is that of `Place::device`, whose caller promised it. The stream is the caller's
                // too, or is kept beside the session and dropped behind it.
                let session = unsafe { set.open_stage_on_device(stage, &config, &[]) }?;
                Session::Device(session, stream)
            }
        })
    }
}

/// A session of a stage. The outer error of a call is a rule that the kernels broke, or a device that failed; the
/// inner one is the kernels' own.
pub(super) enum Session {
    Host(StageSession),
    Device(RawSession, Stream),
}

impl Session {
    pub(super) fn config(&self) -> &SessionConfig {
        match self {
            Session::Host(session) => session.config(),
            Session::Device(session, _) => session.config(),
        }
    }

    pub(super) fn stage(&self) -> &StageInfo {
        match self {
            Session::Host(session) => session.stage(),
            Session::Device(session, _) => session.stage(),
        }
    }

    pub(super) fn frames(&self) -> FrameGeometry {
        match self {
            Session::Host(session) => session.frames(),
            Session::Device(session, _) => session.frames(),
        }
    }

    pub(super) fn layout(&mut self, shape: ChunkShape, lap: u32) -> Result<Layout, KernelError> {
        match self {
            Session::Host(session) => session.layout(shape, lap),
            Session::Device(session, _) => session.layout(shape, lap),
        }
    }

    /// Prepares a call on this thread; gives the stream of a device.
    pub(super) fn on_this_thread(&self) -> Result<Option<Stream>, CudaError> {
        let stream = self.stream();
        if let Some(stream) = &stream {
            stream.device().bind()?;
        }
        Ok(stream)
    }

    /// The stream of a device.
    fn stream(&self) -> Option<Stream> {
        match self {
            Session::Host(_) => None,
            Session::Device(_, stream) => Some(stream.clone()),
        }
    }

    /// The stream of a device for results.
    pub(super) fn results(&self) -> Option<Stream> {
        match self {
            Session::Host(_) => None,
            Session::Device(session, stream) => session.results().or(Some(stream.clone())),
        }
    }

    /// The stream of a device goes on behind the results.
    fn settle(&self) -> Result<(), CudaError> {
        if let (Some(stream), Some(results)) = (self.stream(), self.results()) {
            let made = Event::new(stream.device())?;
            made.record(&results)?;
            stream.wait(&made)?;
        }
        Ok(())
    }

    /// Frames to the bytes of these tensors.
    pub(super) fn encode(
        &mut self,
        frames: &[Vec<u8>],
        plan: &VideoPlanParts,
        outputs: &Manifest,
    ) -> Outcome<Result<Vec<u8>, KernelError>> {
        let (stream, geometry) = (self.stream(), self.frames());
        let name = self.stage().name.clone();
        let mut slot = Slot::new(stream.as_ref(), outputs, &[])?;
        let samples = Samples::new(stream.as_ref(), frames)?;
        let before = samples.memory.to_vec();
        let views = samples.views(&geometry);
        let result = match self {
            Session::Host(session) => session.encode(&views, plan, &mut slot.write()?),
            // SAFETY: the bench promised context and stream. Slot and samples are freed when the stream has passed the
            // call, or are leaked, and nothing touches them before `read` has waited for that.
            Session::Device(session, _) => unsafe {
                session.encode(&views, plan, &mut slot.write()?)
            },
        };
        finish(result, |()| {
            slot.read()?;
            if samples.memory[..] != before {
                return fail(format!("{name} wrote into its frames"));
            }
            slot.payload(&name)
        })
    }

    /// The bytes of the input to those of the output, and the number of generator calls.
    pub(super) fn run(
        &mut self,
        plan: &VideoPlanParts,
        lap: u32,
        layout: &Layout,
        input: &[u8],
        group: Option<&mut dyn Collectives>,
    ) -> Outcome<Result<(Vec<u8>, u32), KernelError>> {
        let stream = self.stream();
        let name = self.stage().name.clone();
        if self.config().member > 0 {
            let (from, mut to) = (
                Payload::of_leader(&layout.inputs),
                PayloadMut::of_leader(&layout.outputs),
            );
            let result = match self {
                Session::Host(session) => session.run(plan, lap, &from, &mut to, group),
                // SAFETY: the bench promised context and stream; there is no payload.
                Session::Device(session, _) => unsafe {
                    session.run(plan, lap, &from, &mut to, group)
                },
            };
            self.settle()?;
            return finish(result, |calls| {
                if let Some(stream) = &stream {
                    stream.wait_until_idle(Duration::MAX)?;
                }
                Ok((Vec::new(), calls))
            });
        }
        let mut from = Slot::new(stream.as_ref(), &layout.inputs, input)?;
        let mut to = Slot::new(stream.as_ref(), &layout.outputs, &[])?;
        let before = from.image.clone();
        // A group has more streams than its caller knows: its input comes late.
        let late = match &stream {
            Some(stream) if group.is_some() => from.arrive_late(stream)?,
            _ => None,
        };
        let result = match self {
            Session::Host(session) => {
                session.run(plan, lap, &from.given()?, &mut to.write()?, group)
            }
            // SAFETY: as in `encode`, for both slots, which are memory of their own.
            Session::Device(session, _) => unsafe {
                session.run(plan, lap, &from.given()?, &mut to.write()?, group)
            },
        };
        drop(late);
        self.settle()?;
        finish(result, |calls| {
            from.read()?;
            to.read()?;
            if from.image != before {
                return fail(format!("{name} wrote into its input"));
            }
            Ok((to.payload(&name)?, calls))
        })
    }

    /// The bytes of these tensors to so many frames.
    pub(super) fn decode(
        &mut self,
        plan: &VideoPlanParts,
        inputs: &Manifest,
        input: &[u8],
        count: usize,
    ) -> Outcome<Result<Vec<Vec<u8>>, KernelError>> {
        let (stream, geometry) = (self.stream(), self.frames());
        let name = self.stage().name.clone();
        let size = (geometry.chroma).packed_frame_bytes(geometry.width, geometry.height);
        let mut slot = Slot::new(stream.as_ref(), inputs, input)?;
        let mut samples = Samples::new(stream.as_ref(), &vec![vec![0; size]; count])?;
        let before = slot.image.clone();
        let mut views = samples.views_mut(&geometry);
        let result = match self {
            Session::Host(session) => session.decode(plan, &slot.given()?, &mut views),
            // SAFETY: as in `encode`.
            Session::Device(session, _) => unsafe {
                session.decode(plan, &slot.given()?, &mut views)
            },
        };
        finish(result, |()| {
            slot.read()?;
            if slot.image != before {
                return fail(format!("{name} wrote into its input"));
            }
            samples.frames(&name)
        })
    }
}

/// Judges what a call left behind, unless the kernels refused it.
fn finish<T, U>(
    result: Result<T, KernelError>,
    judge: impl FnOnce(T) -> Outcome<U>,
) -> Outcome<Result<U, KernelError>> {
    match result {
        Ok(value) => judge(value).map(Ok),
        Err(error) => Ok(Err(error)),
    }
}

/// A payload of its own: guard bytes, the tensors from a multiple of 256 on, guard bytes.
struct Slot<'a> {
    list: &'a Manifest,
    /// Host memory that the kernels work on; of a device, what was last known of its memory.
    image: Vec<u8>,
    start: usize,
    device: Option<StreamBuffer>,
}

impl<'a> Slot<'a> {
    /// Begins with these bytes; the rest of the payload is zero.
    fn new(stream: Option<&Stream>, list: &'a Manifest, bytes: &[u8]) -> Outcome<Slot<'a>> {
        let mut image = vec![0; list.payload_bytes() as usize + 3 * GUARD_BYTES];
        // Memory of a device starts at a multiple of 256 by itself.
        let start = match stream {
            None => GUARD_BYTES + image.as_ptr().addr().wrapping_neg() % GUARD_BYTES,
            Some(_) => GUARD_BYTES,
        };
        let end = start + list.payload_bytes() as usize;
        image.truncate(end + GUARD_BYTES);
        guard::arm(&mut image[..start]);
        guard::arm(&mut image[end..]);
        image[start..][..bytes.len()].copy_from_slice(bytes);
        let device = match stream {
            None => None,
            Some(stream) => {
                let memory = StreamBuffer::new(stream, image.len())?;
                memory.fill_with(image.clone())?;
                Some(memory)
            }
        };
        Ok(Slot {
            list,
            image,
            start,
            device,
        })
    }

    fn address(&self, memory: &StreamBuffer) -> u64 {
        memory.address() + self.start as u64
    }

    /// For a call that reads it.
    fn given(&self) -> Outcome<Payload<'_>> {
        let bytes = self.list.payload_bytes() as usize;
        Ok(match &self.device {
            None => Payload::new(self.list, &self.image[self.start..])?,
            Some(memory) => Payload::on_device(self.list, self.address(memory), bytes)?,
        })
    }

    /// For a call that writes it.
    fn write(&mut self) -> Outcome<PayloadMut<'_>> {
        let bytes = self.list.payload_bytes() as usize;
        Ok(match &self.device {
            None => PayloadMut::new(self.list, &mut self.image[self.start..])?,
            Some(memory) => PayloadMut::on_device(self.list, self.address(memory), bytes)?,
        })
    }

    /// Spoils the memory on a device, and enqueues a copy that mends it; gives the memory that it is from.
    fn arrive_late(&self, stream: &Stream) -> Outcome<Option<StreamBuffer>> {
        let Some(memory) = &self.device else {
            return Ok(None);
        };
        let kept = StreamBuffer::new(stream, self.image.len())?;
        kept.fill_with(self.image.clone())?;
        let at = |memory: &StreamBuffer| DevicePtr {
            address: memory.address(),
            len: self.image.len(),
        };
        // SAFETY: both are this check's, and used in the order of the stream, which frees the one behind the copy.
        unsafe {
            stream.fill(at(memory), 0x5A)?;
            stream.wait_until_idle(Duration::MAX)?;
            stream.copy(at(&kept), at(memory))?;
        }
        Ok(Some(kept))
    }

    /// Waits for a device, and takes its memory into the image.
    fn read(&mut self) -> Outcome {
        if let Some(memory) = &self.device {
            self.image = memory.read(Duration::MAX)?;
        }
        Ok(())
    }

    /// The bytes that a call wrote, if it wrote nothing else.
    fn payload(&self, call: &str) -> Outcome<Vec<u8>> {
        let (front, rest) = self.image.split_at(self.start);
        let (payload, behind) = rest.split_at(self.list.payload_bytes() as usize);
        if let Err(at) = guard::check(front) {
            let bytes = self.start - at;
            return fail(format!(
                "{call} wrote {bytes} bytes in front of the payload"
            ));
        }
        if let Err(tensor) = guard::check_gaps(self.list, payload) {
            let name = tensor.name();
            return fail(format!("{call} wrote past the end of tensor {name}"));
        }
        if let Err(at) = guard::check(behind) {
            return fail(format!(
                "{call} wrote past the end of the payload (byte {at} behind it)"
            ));
        }
        Ok(payload.to_vec())
    }
}

/// Frames of one size, each behind guard bytes, and guard bytes behind the last.
struct Samples {
    /// Page-locked for a device.
    memory: Box<dyn DerefMut<Target = [u8]>>,
    /// Bytes from one frame's guard bytes to the next one's.
    stride: usize,
}

impl Samples {
    fn new(stream: Option<&Stream>, frames: &[Vec<u8>]) -> Outcome<Samples> {
        let mut guard = [0; GUARD_BYTES];
        guard::arm(&mut guard);
        let mut image = Vec::new();
        for frame in frames {
            image.extend_from_slice(&guard);
            image.extend_from_slice(frame);
        }
        image.extend_from_slice(&guard);
        let memory: Box<dyn DerefMut<Target = [u8]>> = match stream {
            None => Box::new(image),
            Some(stream) => {
                let mut pinned = Pinned::new(stream, image.len())?;
                pinned.copy_from_slice(&image);
                Box::new(pinned)
            }
        };
        let stride = GUARD_BYTES + frames.first().map_or(0, Vec::len);
        Ok(Samples { memory, stride })
    }

    fn views(&self, geometry: &FrameGeometry) -> Vec<FrameView<'_>> {
        let (width, height, chroma) = (geometry.width, geometry.height, geometry.chroma);
        let frames = self.memory.chunks_exact(self.stride);
        frames
            .filter_map(|frame| FrameView::packed(&frame[GUARD_BYTES..], width, height, chroma))
            .collect()
    }

    fn views_mut(&mut self, geometry: &FrameGeometry) -> Vec<FrameViewMut<'_>> {
        let (width, height, chroma) = (geometry.width, geometry.height, geometry.chroma);
        self.memory
            .chunks_exact_mut(self.stride)
            .filter_map(|frame| {
                FrameViewMut::packed(&mut frame[GUARD_BYTES..], width, height, chroma)
            })
            .collect()
    }

    /// The frames that decode wrote, if it wrote nothing else.
    fn frames(&self, call: &str) -> Outcome<Vec<Vec<u8>>> {
        let frames = self.memory.chunks_exact(self.stride);
        let behind = frames.remainder();
        let mut guards = frames.clone().map(|frame| &frame[..GUARD_BYTES]);
        if guards.any(|bytes| guard::check(bytes).is_err()) || guard::check(behind).is_err() {
            return fail(format!("{call} wrote outside the frame's planes"));
        }
        Ok(frames.map(|frame| frame[GUARD_BYTES..].to_vec()).collect())
    }
}
