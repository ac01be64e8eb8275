//! Kernels on GPU memory: every call only issues work to a stream.
//!
//! The leases order that work against the transfers (ready and read events); here it is ordered
//! against the host: frames lie in page-locked memory, which is read into again only when its chunk
//! has come back, and written from only once an event behind the GPU's last write is done. Nothing
//! waits for the device, and the host copies no frame.

use pp_contract::{FaultKind, Manifest, VideoPlanParts};
use pp_device::{Allocation, CudaError, Device, DevicePtr, PinnedBuffer, Stream};
use pp_kernels::{
    ChunkShape, KernelError, KernelSet, Layout, Payload, PayloadMut, RawSession, SessionConfig,
};
use pp_runtime::stage::{FrontWork, PhaseBWork, Progress, StageError};
use pp_transport::nccl::{DeviceRx, DeviceTx};

use super::codec::{Codec, Frames, Generated, Generator, Geometry, failed, internal};
use super::digests::GpuDigester;
use super::noise;
use crate::args::KernelChoice;
use crate::timed::{Done, Span, Staged, Timed, read_on};
use crate::video::buffer::{Buffer, FrameMemory};

fn device(operation: &'static str) -> impl Fn(CudaError) -> StageError {
    failed(FaultKind::Device, operation)
}

/// Whose fault it is when kernels fail: a file's, or, for our own, the device's.
pub(super) fn blame(kernels: &KernelChoice) -> FaultKind {
    match kernels {
        KernelChoice::File(_) => FaultKind::Plugin,
        _ => FaultKind::Device,
    }
}

/// A session of kernels on a stream of its own.
fn open(
    on: &Device,
    kernels: &KernelSet,
    config: &SessionConfig,
    blame: FaultKind,
) -> Result<(Stream, RawSession), StageError> {
    let device_error = device("open kernels");
    on.bind().map_err(&device_error)?;
    let stream = Stream::new(on).map_err(&device_error)?;
    let mut on_device = SessionConfig::cuda(
        config.width,
        config.height,
        config.chroma,
        config.max_frames,
        on.raw_context(),
        stream.raw(),
    );
    on_device.noise_sigma = config.noise_sigma;
    // SAFETY: the context is the device's primary one, which lives as long as the process, and was
    // bound to this thread above; both callers keep the stream beside the session, and drop the
    // session first: also where they fail, since values of a pattern are dropped from the last on.
    let session = unsafe { kernels.open_on_device(&on_device) };
    let session = session.map_err(failed(blame, "open kernels"))?;
    Ok((stream, session))
}

/// Bytes of the noise of a frame: bf16 for each of three planes at most.
const NOISE_BYTES: usize = 6;

/// Issues copies of what lies there in a payload: within the GPU, since the host does not touch payloads, and from there
/// to the host.
///
/// # Safety
/// Until the stream has passed them, no other work writes `from`, and the copy is neither read nor given to another
/// stream.
unsafe fn copy_noise(copy: &mut Staged, stream: &Stream, from: DevicePtr) -> Result<(), CudaError> {
    let to = copy.part(0, from.len.min(NOISE_BYTES));
    // SAFETY: the caller's promise; the buffer on the device is the copy's own.
    unsafe {
        stream.copy(from, to)?;
        stream.download(to, &mut copy.host, 0)
    }
}

/// A chunk that was encoded.
pub(super) struct Encoded {
    span: Span,
    /// The noise that was estimated in it, and how many bytes it has.
    noise: Option<(Staged, usize)>,
}

/// A decode under way.
pub(super) struct Decoding {
    encoded: Encoded,
    frames: Buffer,
    span: Span,
}

/// Encode and decode of the front.
pub(super) struct GpuFront {
    blame: FaultKind,
    // Dropped before the stream that they issue to.
    session: RawSession,
    digester: GpuDigester,
    timed: Timed,
    geometry: Geometry,
    chunk_bytes: usize,
    /// For noise that is estimated. Where all are in use, an estimate is not looked at.
    noises: Vec<Staged>,
    estimated_noise: Option<Vec<f32>>,
}

impl GpuFront {
    pub(super) fn open(
        on: &Device,
        kernels: &KernelSet,
        config: &SessionConfig,
        geometry: Geometry,
        depth: u32,
        blame: FaultKind,
    ) -> Result<Self, StageError> {
        let (stream, session) = open(on, kernels, config, blame)?;
        let chunk_bytes = geometry.frame_bytes * config.max_frames as usize;
        let depth = depth as usize;
        let noises: Result<_, _> = (0..depth)
            .map(|_| Staged::new(&stream, NOISE_BYTES))
            .collect();
        Ok(Self {
            noises: noises.map_err(device("lock memory"))?,
            estimated_noise: None,
            blame,
            session,
            digester: GpuDigester::new(&stream),
            // A chunk is timed twice: when it is encoded, and when it is decoded.
            timed: Timed::new(stream.clone(), 2 * depth).map_err(device("make events"))?,
            geometry,
            chunk_bytes,
        })
    }
}

/// Page-locked memory, which the GPU reads and writes by itself.
impl FrameMemory for PinnedBuffer {
    fn bytes(&self) -> &[u8] {
        self.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes_mut()
    }

    fn is_idle(&self) -> bool {
        matches!(Allocation::is_idle(self), Ok(true))
    }
}

/// Notes that the stream's work up to here uses the buffer, so that it is not freed under it.
/// Memory of another kind was copied from or to before the call returned.
fn used_by(buffer: &Buffer, stream: &Stream) -> Result<(), CudaError> {
    buffer
        .given::<PinnedBuffer>()
        .map_or(Ok(()), |memory| memory.used_by(stream))
}

impl Codec for GpuFront {
    type Tx = DeviceTx;
    type Rx = DeviceRx;
    type Digester = GpuDigester;
    type Encoded = Encoded;
    type Decoding = Decoding;

    fn digester(&mut self) -> &mut GpuDigester {
        &mut self.digester
    }

    fn layout(&mut self, shape: ChunkShape) -> Result<Layout, KernelError> {
        self.session.layout(shape)
    }

    fn memory(&self) -> Result<Option<Box<dyn FrameMemory>>, StageError> {
        let stream = &self.timed.stream;
        let made = PinnedBuffer::new(stream.device(), self.chunk_bytes).and_then(|buffer| {
            // Makes the event that follows its uses, now and not with a chunk.
            buffer.used_by(stream)?;
            Ok(buffer)
        });
        let made = made.map_err(device("lock memory"))?;
        Ok(Some(Box::new(made)))
    }

    const READS_LATER: bool = true;

    fn encode(
        &mut self,
        frames: &Buffer,
        bytes: usize,
        plan: &VideoPlanParts,
        tensors: &Manifest,
        slot: &mut DeviceTx,
    ) -> Result<Encoded, StageError> {
        let blame = self.blame;
        let on_error = device("encode");
        let views = self.geometry.views(&frames[..bytes]);
        let place = noise::place(tensors, self.geometry.chroma);
        let place = place.filter(|_| noise::is_estimated(plan));
        let mut noise = place.and_then(|place| Some((self.noises.pop()?, place)));
        let span = self.timed.open().map_err(&on_error)?;
        let (stream, session) = (&self.timed.stream, &mut self.session);
        let issued = slot.write_on(stream, |to| -> Result<(), StageError> {
            let mut payload =
                PayloadMut::on_device(tensors, to.address, to.len).map_err(internal("encode"))?;
            // SAFETY: the link that lives on this thread has bound the context to it; the slot
            // stays leased or in flight until the stream has passed, and so do the frames: their
            // chunk is kept until it comes back, and if it is dropped, its memory knows its use.
            unsafe { session.encode(&views, plan, &mut payload) }
                .map_err(failed(blame, "encode"))?;
            let Some((copy, place)) = &mut noise else {
                return Ok(());
            };
            let from = DevicePtr {
                address: to.address + place.start as u64,
                len: place.len(),
            };
            // SAFETY: the range lies in the slot, where no work behind the encode writes before the stream has passed;
            // the copy is read once its chunk's decode is done, which is behind this on the same stream, and if it is
            // dropped, its memory knows its use.
            unsafe { copy_noise(copy, stream, from) }.map_err(device("encode"))
        });
        // Also where that failed: some of it may have been issued.
        let noted = noise.as_ref().map(|(copy, _)| copy.is_used_by(stream));
        used_by(frames, stream).map_err(&on_error)?;
        noted.transpose().map_err(&on_error)?;
        issued?;
        span.close(stream).map_err(&on_error)?;
        let noise = noise.map(|(copy, place)| (copy, place.len()));
        Ok(Encoded { span, noise })
    }

    fn estimated_noise(&mut self) -> Option<Vec<f32>> {
        self.estimated_noise.take()
    }

    fn decode(
        &mut self,
        encoded: Encoded,
        mut frames: Buffer,
        plan: &VideoPlanParts,
        tensors: &Manifest,
        payload: Option<DeviceRx>,
    ) -> Result<Progress<Frames, Decoding>, StageError> {
        let blame = self.blame;
        let on_error = device("decode");
        let span = self.timed.open().map_err(&on_error)?;
        let (stream, session) = (&self.timed.stream, &mut self.session);
        let mut views = self.geometry.views_mut(&mut frames);
        let issued = read_on(payload.as_ref(), stream, |from| -> Result<(), StageError> {
            let input =
                Payload::on_device(tensors, from.address, from.len).map_err(internal("decode"))?;
            // SAFETY: the link that lives on this thread has bound the context to it; the slot
            // goes back only behind its read event, and the frames stay in a `Decoding` until the
            // span's end is done; if that is dropped, their memory knows its use.
            unsafe { session.decode(plan, &input, &mut views) }.map_err(failed(blame, "decode"))
        });
        // Also where that failed: some of it may have been issued.
        used_by(&frames, stream).map_err(&on_error)?;
        issued?;
        span.close(stream).map_err(&on_error)?;
        Ok(Progress::UnderWay(Decoding {
            encoded,
            frames,
            span,
        }))
    }

    fn poll_decoded(&mut self, oldest: Decoding) -> Result<Progress<Frames, Decoding>, StageError> {
        let on_error = device("decode");
        let work_ns = match self.timed.poll(oldest.span).map_err(&on_error)? {
            Progress::Done(Done { work_ns, .. }) => work_ns,
            Progress::UnderWay(span) => return Ok(Progress::UnderWay(Decoding { span, ..oldest })),
        };
        let encoded = oldest.encoded;
        let worked = FrontWork {
            build_ns: encoded.span.ns().map_err(&on_error)?,
            decode_ns: work_ns,
        };
        self.timed.recycle(encoded.span);
        if let Some((copy, bytes)) = encoded.noise {
            self.estimated_noise = noise::sigmas(&copy.host.bytes()[..bytes]);
            self.noises.push(copy);
        }
        Ok(Progress::Done(Frames {
            bytes: oldest.frames,
            worked: Some(worked),
        }))
    }

    fn forget(&mut self, encoded: Encoded) {
        self.timed.recycle(encoded.span);
        // A copy that is under way is on the one stream, in front of what its next user issues.
        self.noises.extend(encoded.noise.map(|(copy, _)| copy));
    }
}

/// Phase B.
pub(super) struct GpuPhaseB {
    blame: FaultKind,
    // Dropped before the stream that they issue to.
    session: RawSession,
    digester: GpuDigester,
    timed: Timed,
}

impl GpuPhaseB {
    pub(super) fn open(
        on: &Device,
        kernels: &KernelSet,
        config: &SessionConfig,
        depth: u32,
        blame: FaultKind,
    ) -> Result<Self, StageError> {
        let (stream, session) = open(on, kernels, config, blame)?;
        let timed = Timed::new(stream.clone(), depth as usize).map_err(device("make events"))?;
        Ok(Self {
            blame,
            session,
            digester: GpuDigester::new(&timed.stream),
            timed,
        })
    }
}

impl Generator for GpuPhaseB {
    type Tx = DeviceTx;
    type Rx = DeviceRx;
    type Digester = GpuDigester;
    /// With the calls that were made.
    type Computing = (Span, u32);

    fn digester(&mut self) -> &mut GpuDigester {
        &mut self.digester
    }

    fn generate(
        &mut self,
        plan: &VideoPlanParts,
        inputs: &Manifest,
        input: Option<&DeviceRx>,
        outputs: &Manifest,
        output: &mut DeviceTx,
    ) -> Result<Progress<Generated, (Span, u32)>, StageError> {
        let blame = self.blame;
        let on_error = device("phase_b");
        let span = self.timed.open().map_err(&on_error)?;
        let (stream, session) = (&self.timed.stream, &mut self.session);
        let calls = read_on(input, stream, |from| {
            output.write_on(stream, |to| -> Result<u32, StageError> {
                let refuse = internal("phase_b");
                let input = Payload::on_device(inputs, from.address, from.len).map_err(&refuse)?;
                let mut output =
                    PayloadMut::on_device(outputs, to.address, to.len).map_err(&refuse)?;
                // SAFETY: the link that lives on this thread has bound the context to it; the
                // slots go on only behind their ready and read events.
                unsafe { session.phase_b(plan, &input, &mut output) }
                    .map_err(failed(blame, "phase_b"))
            })
        })?;
        span.close(stream).map_err(&on_error)?;
        Ok(Progress::UnderWay((span, calls)))
    }

    fn poll_generated(
        &mut self,
        (span, calls): (Span, u32),
    ) -> Result<Progress<Generated, (Span, u32)>, StageError> {
        let polled = self.timed.poll(span).map_err(device("phase_b"))?;
        let generated = |done: Done| Generated {
            calls,
            worked: Some(PhaseBWork {
                compute_ns: done.work_ns,
                idle_ns: done.idle_ns,
            }),
        };
        Ok(polled.map(generated, |span| (span, calls)))
    }
}
