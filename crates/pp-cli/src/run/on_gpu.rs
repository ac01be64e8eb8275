//! Kernels on GPU memory: every call only issues work to a stream.
//!
//! The leases order that work against the transfers (ready and read events); here it is ordered
//! against the host: frames are copied into page-locked memory before the GPU reads them, and out
//! of it only once an event behind the GPU's last write is done. Nothing waits for the device.

use std::collections::VecDeque;

use pp_contract::FaultKind;
use pp_kernels::{
    ChunkShape, DeviceSession, Failure, KernelError, KernelSet, Layout, Payload, PayloadMut, Plan,
    SessionConfig, TensorList,
};
use pp_runtime::driver::with_source;
use pp_runtime::stage::{FrontWork, PhaseBWork, Progress, StageError};
use pp_transport::cuda::{CudaError, DevicePtr, Event, PinnedBuffer, Stream};
use pp_transport::nccl::{DeviceRx, DeviceTx};

use super::codec::{Codec, Frames, Generated, Generator, Geometry};
use crate::args::KernelChoice;
use crate::backend::Gpu;
use crate::timed::{Done, Span, Timed};

fn device(operation: &'static str) -> impl Fn(CudaError) -> StageError {
    move |e| StageError::new(FaultKind::Device, operation, with_source(&e))
}

fn internal(operation: &'static str) -> impl Fn(Failure) -> StageError {
    move |e| StageError::new(FaultKind::Internal, operation, e.to_string())
}

/// Whose fault it is when kernels fail: a file's, or, for our own, the device's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blame(FaultKind);

impl Blame {
    pub(super) fn of(kernels: &KernelChoice) -> Self {
        Self(match kernels {
            KernelChoice::File(_) => FaultKind::Plugin,
            _ => FaultKind::Device,
        })
    }

    fn on(self, operation: &'static str) -> impl Fn(KernelError) -> StageError {
        move |e| StageError::new(self.0, operation, with_source(&e))
    }
}

/// The payload of a message that has none.
const NOTHING: DevicePtr = DevicePtr { address: 0, len: 0 };

/// A session of kernels on a stream of its own.
fn open(
    gpu: &Gpu,
    kernels: &KernelSet,
    config: &SessionConfig,
    blame: Blame,
) -> Result<(DeviceSession, Stream), StageError> {
    let device_error = device("open kernels");
    gpu.device.bind().map_err(&device_error)?;
    let stream = Stream::new(&gpu.device).map_err(&device_error)?;
    let mut on_device = SessionConfig::cuda(
        config.width,
        config.height,
        config.chroma,
        config.max_frames,
        gpu.device.raw_context(),
        stream.raw(),
    );
    on_device.noise_sigma = config.noise_sigma;
    // SAFETY: the context is the device's primary one, which lives as long as the process, and was
    // bound to this thread above; the stream is kept beside the session, which is dropped first.
    let session = unsafe { kernels.open_on_device(&on_device) };
    Ok((session.map_err(blame.on("open kernels"))?, stream))
}

/// Page-locked memory that frames are uploaded from.
struct Upload {
    frames: PinnedBuffer,
    uploaded: Event,
}

/// A decode under way.
struct Decoding {
    built: Span,
    staging: PinnedBuffer,
    frames: Vec<u8>,
}

/// Encode and decode of the front.
pub(super) struct GpuFront {
    blame: Blame,
    // Dropped before the stream that it issues to.
    session: DeviceSession,
    decoding: Timed<Decoding>,
    geometry: Geometry,
    chunk_bytes: usize,
    /// Oldest use first.
    uploads: VecDeque<Upload>,
    downloads: Vec<PinnedBuffer>,
    /// Spans of the chunks encoded and not yet decoded, oldest first.
    built: VecDeque<Span>,
    depth: usize,
}

impl GpuFront {
    pub(super) fn open(
        gpu: &Gpu,
        kernels: &KernelSet,
        config: &SessionConfig,
        geometry: Geometry,
        depth: u32,
        blame: Blame,
    ) -> Result<Self, StageError> {
        let (session, stream) = open(gpu, kernels, config, blame)?;
        let chunk_bytes = geometry.frame_bytes * config.max_frames as usize;
        let depth = depth as usize;
        let mut front = Self {
            blame,
            session,
            // A chunk is timed twice: when it is encoded, and when it is decoded.
            decoding: Timed::new(stream, 2 * depth).map_err(device("make events"))?,
            geometry,
            chunk_bytes,
            uploads: VecDeque::with_capacity(depth + 1),
            downloads: Vec::with_capacity(depth),
            built: VecDeque::with_capacity(depth),
            depth,
        };
        for _ in 0..=depth {
            let upload = front.new_upload().map_err(device("lock memory"))?;
            front.uploads.push_back(upload);
        }
        for _ in 0..depth {
            let buffer = front.new_staging().map_err(device("lock memory"))?;
            front.downloads.push(buffer);
        }
        Ok(front)
    }

    fn new_upload(&self) -> Result<Upload, CudaError> {
        Ok(Upload {
            frames: self.new_staging()?,
            uploaded: Event::new(self.decoding.stream().device())?,
        })
    }

    fn new_staging(&self) -> Result<PinnedBuffer, CudaError> {
        let stream = self.decoding.stream();
        let buffer = PinnedBuffer::new(stream.device(), self.chunk_bytes)?;
        // Makes the event that follows its uses, now and not with a chunk.
        buffer.used_by(stream)?;
        Ok(buffer)
    }

    /// Page-locked memory that the GPU has read.
    fn free_upload(&mut self) -> Result<Upload, CudaError> {
        match self.uploads.front() {
            Some(oldest) if oldest.uploaded.is_done()? => {
                Ok(self.uploads.pop_front().expect("just seen"))
            }
            // More than the depth: a stream that is far behind.
            _ => self.new_upload(),
        }
    }
}

impl Codec for GpuFront {
    type Tx = DeviceTx;
    type Rx = DeviceRx;

    fn layout(&mut self, shape: ChunkShape) -> Result<Layout, KernelError> {
        self.session.layout(shape)
    }

    fn encode(
        &mut self,
        frames: &[u8],
        plan: &Plan,
        tensors: &TensorList,
        slot: &mut DeviceTx,
    ) -> Result<(), StageError> {
        let blame = self.blame;
        let on_error = device("encode");
        let mut upload = self.free_upload().map_err(&on_error)?;
        upload.frames.bytes_mut()[..frames.len()].copy_from_slice(frames);
        let views = self.geometry.views(&upload.frames.bytes()[..frames.len()]);
        let span = self.decoding.open().map_err(&on_error)?;
        let (stream, session) = (self.decoding.stream(), &mut self.session);
        let issued = slot.write_on(stream, |to| -> Result<(), StageError> {
            let mut payload =
                PayloadMut::on_device(tensors, to.address, to.len).map_err(internal("encode"))?;
            // SAFETY: the link that lives on this thread has bound the context to it; the slot
            // stays leased or in flight, and the frames in `uploads`, until the stream has passed.
            unsafe { session.encode(&views, plan, &mut payload) }.map_err(blame.on("encode"))
        });
        // Also where that failed: some of it may have been issued.
        upload.frames.used_by(stream).map_err(&on_error)?;
        issued?;
        span.close(stream).map_err(&on_error)?;
        upload.uploaded.record(stream).map_err(&on_error)?;
        self.uploads.push_back(upload);
        self.built.push_back(span);
        Ok(())
    }

    fn can_decode(&self) -> bool {
        self.decoding.len() < self.depth
    }

    fn decode(
        &mut self,
        frames: Vec<u8>,
        plan: &Plan,
        tensors: &TensorList,
        payload: Option<DeviceRx>,
    ) -> Result<Progress<Frames>, StageError> {
        let blame = self.blame;
        let on_error = device("decode");
        let built = self
            .built
            .pop_front()
            .expect("encoded before it is decoded");
        let span = self.decoding.open().map_err(&on_error)?;
        let mut staging = match self.downloads.pop() {
            Some(staging) => staging,
            None => self.new_staging().map_err(&on_error)?,
        };
        let (stream, session) = (self.decoding.stream(), &mut self.session);
        let mut views = self
            .geometry
            .views_mut(&mut staging.bytes_mut()[..frames.len()]);
        let mut issue = |from: DevicePtr| -> Result<(), StageError> {
            let input =
                Payload::on_device(tensors, from.address, from.len).map_err(internal("decode"))?;
            // SAFETY: the link that lives on this thread has bound the context to it; the slot
            // goes back only behind its read event, and the frames stay in `decoding` until the
            // span's end is done.
            unsafe { session.decode(plan, &input, &mut views) }.map_err(blame.on("decode"))
        };
        let issued = match &payload {
            Some(payload) => payload.read_on(stream, issue),
            None => issue(NOTHING),
        };
        // Also where that failed: some of it may have been issued.
        staging.used_by(stream).map_err(&on_error)?;
        issued?;
        let decoding = Decoding {
            built,
            staging,
            frames,
        };
        self.decoding.close(span, decoding).map_err(&on_error)?;
        Ok(Progress::UnderWay)
    }

    fn poll_decoded(&mut self) -> Result<Option<Frames>, StageError> {
        let on_error = device("decode");
        let Some(Done { what, work_ns, .. }) = self.decoding.poll().map_err(&on_error)? else {
            return Ok(None);
        };
        let Decoding {
            built,
            staging,
            mut frames,
        } = what;
        let bytes = frames.len();
        frames.copy_from_slice(&staging.bytes()[..bytes]);
        let worked = FrontWork {
            build_ns: built.ns().map_err(&on_error)?,
            decode_ns: work_ns,
        };
        self.downloads.push(staging);
        self.decoding.recycle(built);
        Ok(Some(Frames {
            bytes: frames,
            worked: Some(worked),
        }))
    }

    fn forget(&mut self) {
        if let Some(span) = self.built.pop_front() {
            self.decoding.recycle(span);
        }
    }
}

/// Phase B.
pub(super) struct GpuPhaseB {
    blame: Blame,
    // Dropped before the stream that it issues to.
    session: DeviceSession,
    /// With the calls that were made.
    under_way: Timed<u32>,
}

impl GpuPhaseB {
    pub(super) fn open(
        gpu: &Gpu,
        kernels: &KernelSet,
        config: &SessionConfig,
        depth: u32,
        blame: Blame,
    ) -> Result<Self, StageError> {
        let (session, stream) = open(gpu, kernels, config, blame)?;
        let under_way = Timed::new(stream, depth as usize).map_err(device("make events"))?;
        Ok(Self {
            blame,
            session,
            under_way,
        })
    }
}

impl Generator for GpuPhaseB {
    type Tx = DeviceTx;
    type Rx = DeviceRx;

    fn generate(
        &mut self,
        plan: &Plan,
        inputs: &TensorList,
        input: Option<&DeviceRx>,
        outputs: &TensorList,
        output: &mut DeviceTx,
    ) -> Result<Progress<Generated>, StageError> {
        let blame = self.blame;
        let on_error = device("phase_b");
        let span = self.under_way.open().map_err(&on_error)?;
        let (stream, session) = (self.under_way.stream(), &mut self.session);
        let mut issue = |from: DevicePtr| {
            output.write_on(stream, |to| -> Result<u32, StageError> {
                let refuse = internal("phase_b");
                let input = Payload::on_device(inputs, from.address, from.len).map_err(&refuse)?;
                let mut output =
                    PayloadMut::on_device(outputs, to.address, to.len).map_err(&refuse)?;
                // SAFETY: the link that lives on this thread has bound the context to it; the
                // slots go on only behind their ready and read events.
                unsafe { session.phase_b(plan, &input, &mut output) }.map_err(blame.on("phase_b"))
            })
        };
        let calls = match input {
            Some(input) => input.read_on(stream, issue)?,
            None => issue(NOTHING)?,
        };
        self.under_way.close(span, calls).map_err(&on_error)?;
        Ok(Progress::UnderWay)
    }

    fn poll_generated(&mut self) -> Result<Option<Generated>, StageError> {
        let done = self.under_way.poll().map_err(device("phase_b"))?;
        Ok(done.map(|done| Generated {
            calls: done.what,
            worked: Some(PhaseBWork {
                compute_ns: done.work_ns,
                idle_ns: done.idle_ns,
            }),
        }))
    }
}
