//! Kernels on GPU memory: every call only issues work to a stream.
//!
//! The leases order that work against the transfers (ready and read events); here it is ordered
//! against the host: frames lie in page-locked memory, which is read into again, or written from, only
//! once an event behind the GPU's last use is done. Nothing
//! waits for the device, and the host copies no frame.

use pp_command::timed::{Issued, Staged, Timed, read_on};
use pp_contract::{FaultKind, Manifest, VideoPlanParts, with_source};
use pp_device::{CudaError, Device, DevicePtr, PinnedBuffer, Stream};
use pp_kernels::{
    ChunkShape, FrameGeometry, KernelError, Layout, Payload, PayloadMut, RawSession, SessionConfig,
    Space, StageKind, Status,
};
use pp_runtime::stage::{Progress, StageError, StageResult};
use pp_transport::gpu::{DeviceRx, DeviceTx};
use pp_transport::nccl::Communicator;
use pp_video::buffer::{Buffer, FrameMemory};
use pp_video::estimates;

use super::digests::GpuDigester;
use super::group::OfGpu;
use super::kernels::{
    Encoded, Frames, Generated, Kernels, Memory, Opening, failed, internal, views, views_mut,
};

fn device(operation: &'static str) -> impl Fn(CudaError) -> StageError {
    failed(FaultKind::Device, operation)
}

/// A stream of its own for a session. That of a group's member has the collectives, and goes first: otherwise a message
/// would leave when the kernels need no multiprocessor any more.
fn stream_for(on: &Device, config: &SessionConfig) -> StageResult<Stream> {
    let device_error = device("open kernels");
    on.bind().map_err(&device_error)?;
    let stream = match config.members {
        1 => Stream::new(on),
        _ => Stream::urgent(on),
    };
    stream.map_err(&device_error)
}

/// The memory of a GPU.
pub struct OnGpu {
    /// The device, whose context the edges of this process use, too.
    pub device: Device,
}

/// A stage of kernels on a GPU, on a stream of its own.
pub struct GpuStage {
    name: &'static str,
    blame: FaultKind,
    // Dropped before the streams that they issue to.
    session: RawSession,
    digester: GpuDigester,
    timed: Timed,
    /// The stream that writes a group's output last; else that of the session.
    results: Stream,
    chunk_bytes: usize,
    /// Of a source, for noise that is estimated. Where all are in use, an estimate is not looked at.
    noises: Vec<Staged>,
}

impl Memory for OnGpu {
    type Kernels = GpuStage;

    fn open(&self, stage: &Opening<'_>) -> StageResult<GpuStage> {
        let on = &self.device;
        let stream = stream_for(on, &stage.config)?;
        let (context, raw) = (on.raw_context(), stream.raw());
        let config = SessionConfig {
            space: Space::Cuda {
                context,
                stream: raw,
            },
            ..stage.config
        };
        // SAFETY: the context is the device's primary one, which lives as long as the process, and was bound to this
        // thread when the stream was made. The stream is kept beside the session in `timed`, and dropped after it: also
        // where this function fails, since variables are dropped from the last on.
        let session = unsafe {
            stage
                .kernels
                .open_stage_on_device(stage.stage, &config, stage.args)
        };
        let session = session.map_err(|error| {
            let mut text = with_source(&error);
            // Built-in kernels say so themselves.
            if stage.blame == FaultKind::Plugin
                && matches!(
                    &error,
                    KernelError::Failed {
                        status: Status::OutOfMemory,
                        ..
                    }
                )
                && let Ok(left) = on.memory()
            {
                let (free, total) = (left.free, left.total);
                text += &format!(" ({free} of the device's {total} bytes are free)");
            }
            StageError::new(stage.blame, "open kernels", text)
        })?;
        let results = session.results().unwrap_or_else(|| stream.clone());
        let digester = GpuDigester::new(&results);
        let timed = Timed::new(stream.clone(), stage.depth as usize);
        let timed = timed.map_err(device("make events"))?;
        let noises = match session.stage().kind {
            StageKind::Source => stage.depth,
            _ => 0,
        };
        let noises: Result<_, _> = (0..noises)
            .map(|_| Staged::new(&stream, NOISE_BYTES))
            .collect();
        let noises = noises.map_err(device("lock memory"))?;
        let frames = session.frames();
        let most = stage.config.max_frames as usize * frames.frames_per_frame as usize;
        Ok(GpuStage {
            name: stage.stage,
            blame: stage.blame,
            session,
            digester,
            timed,
            results,
            chunk_bytes: frames.frame_bytes() * most,
            noises,
        })
    }
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

/// An encode under way.
pub struct Encoding {
    work: Issued,
    /// The noise that is estimated, if it is, and how many bytes that has.
    noise: Option<(Staged, usize)>,
}

/// A decode under way.
pub struct Decoding {
    frames: Buffer,
    work: Issued,
}

/// Page-locked memory, which the GPU reads and writes by itself.
struct Pinned(PinnedBuffer);

impl FrameMemory for Pinned {
    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }

    fn is_idle(&self) -> bool {
        matches!(self.0.is_idle(), Ok(true))
    }
}

/// Notes that the stream's work up to here uses the buffer, so that it is not freed under it.
/// Memory of another kind was copied from or to before the call returned.
fn used_by(buffer: &Buffer, stream: &Stream) -> Result<(), CudaError> {
    buffer
        .given::<Pinned>()
        .map_or(Ok(()), |memory| memory.0.used_by(stream))
}

impl Kernels for GpuStage {
    type Tx = DeviceTx;
    type Rx = DeviceRx;
    type Group = Communicator;
    type Digester = GpuDigester;
    type Encoding = Encoding;
    /// With the calls that were made.
    type Computing = (Issued, u32);
    type Decoding = Decoding;

    fn digester(&mut self) -> &mut GpuDigester {
        &mut self.digester
    }

    fn layout(&mut self, shape: ChunkShape, lap: u16) -> Result<Layout, KernelError> {
        self.session.layout(shape, lap.into())
    }

    fn frames(&self) -> FrameGeometry {
        self.session.frames()
    }

    fn memory(&self) -> StageResult<Option<Box<dyn FrameMemory>>> {
        let stream = &self.timed.stream;
        let made = PinnedBuffer::new(stream.device(), self.chunk_bytes).and_then(|buffer| {
            // Makes the event that follows its uses, now and not with a chunk.
            buffer.used_by(stream)?;
            Ok(Pinned(buffer))
        });
        Ok(Some(Box::new(made.map_err(device("lock memory"))?)))
    }

    fn encode(
        &mut self,
        frames: &Buffer,
        bytes: usize,
        plan: &VideoPlanParts,
        tensors: &Manifest,
        slot: &mut DeviceTx,
    ) -> StageResult<Progress<Encoded, Encoding>> {
        let (blame, name) = (self.blame, self.name);
        let on_error = device(name);
        let views = views(self.frames(), &frames[..bytes]);
        let place = estimates::place(plan, tensors, self.frames().chroma);
        let mut noise = place.and_then(|place| Some((self.noises.pop()?, place)));
        let Self { session, timed, .. } = self;
        let work = timed.open().map_err(&on_error)?;
        let stream = &timed.stream;
        let issued = slot.write_on(stream, |to| -> StageResult<()> {
            let mut payload =
                PayloadMut::on_device(tensors, to.address, to.len).map_err(internal(name))?;
            // SAFETY: the edges that live on this thread have bound the context to it; the slot
            // stays leased or in flight until the stream has passed; the memory of the frames knows
            // this use, and is not written before it is over.
            unsafe { session.encode(&views, plan, &mut payload) }.map_err(failed(blame, name))?;
            if let Some((copy, place)) = &mut noise {
                let from = DevicePtr {
                    address: to.address + place.start as u64,
                    len: place.len(),
                };
                // SAFETY: the range lies in the slot, where no work behind the encode writes before the stream has
                // passed; the copy is read once the work is done, whose end is behind it on the same stream, and if it is
                // dropped, its memory knows its use.
                unsafe { copy_noise(copy, stream, from) }.map_err(device(name))?;
            }
            // In front of the event that says that the slot is written: whoever has read the slot knows that the work
            // is done.
            work.close(stream).map_err(device(name))
        });
        // Also where that failed: some of it may have been issued.
        let noted = noise.as_ref().map(|(copy, _)| copy.is_used_by(stream));
        let used = used_by(frames, stream);
        issued?;
        used.map_err(&on_error)?;
        noted.transpose().map_err(&on_error)?;
        let noise = noise.map(|(copy, place)| (copy, place.len()));
        Ok(Progress::UnderWay(Encoding { work, noise }))
    }

    fn poll_encoded(&mut self, oldest: Encoding) -> StageResult<Progress<Encoded, Encoding>> {
        let polled = self.timed.poll(oldest.work);
        let done = match polled.map_err(device(self.name))? {
            Progress::Done(done) => done,
            Progress::UnderWay(work) => return Ok(Progress::UnderWay(Encoding { work, ..oldest })),
        };
        let noise = oldest.noise.and_then(|(copy, bytes)| {
            let sigmas = estimates::sigmas(&copy.host.bytes()[..bytes]);
            self.noises.push(copy);
            sigmas
        });
        Ok(Progress::Done(Encoded {
            worked: Some(done),
            noise,
        }))
    }

    fn forget(&mut self, encoding: Encoding) {
        self.timed.forget(encoding.work);
        // A copy that is under way is on the one stream, in front of what its next user issues.
        self.noises.extend(encoding.noise.map(|(copy, _)| copy));
    }

    fn decode(
        &mut self,
        mut frames: Buffer,
        plan: &VideoPlanParts,
        tensors: &Manifest,
        payload: Option<&DeviceRx>,
    ) -> StageResult<Progress<Frames, Decoding>> {
        let (blame, name) = (self.blame, self.name);
        let on_error = device(name);
        let mut views = views_mut(self.frames(), &mut frames);
        let Self { session, timed, .. } = self;
        let work = timed.open().map_err(&on_error)?;
        let stream = &timed.stream;
        let issued = read_on(payload, stream, |from| -> StageResult<()> {
            let input =
                Payload::on_device(tensors, from.address, from.len).map_err(internal(name))?;
            // SAFETY: the edges that live on this thread have bound the context to it; the slot
            // goes back only behind its read event, and the frames stay in a `Decoding` until the
            // work is done; if that is dropped, their memory knows its use.
            unsafe { session.decode(plan, &input, &mut views) }.map_err(failed(blame, name))
        });
        // Also where that failed: some of it may have been issued.
        let used = used_by(&frames, stream);
        issued?;
        used.map_err(&on_error)?;
        work.close(stream).map_err(&on_error)?;
        Ok(Progress::UnderWay(Decoding { frames, work }))
    }

    fn poll_decoded(&mut self, oldest: Decoding) -> StageResult<Progress<Frames, Decoding>> {
        let polled = self.timed.poll(oldest.work);
        let done = match polled.map_err(device(self.name))? {
            Progress::Done(done) => done,
            Progress::UnderWay(work) => return Ok(Progress::UnderWay(Decoding { work, ..oldest })),
        };
        Ok(Progress::Done(Frames {
            bytes: oldest.frames,
            worked: Some(done),
        }))
    }

    fn generate(
        &mut self,
        (plan, lap): (&VideoPlanParts, u16),
        (inputs, input): (&Manifest, Option<&DeviceRx>),
        (outputs, output): (&Manifest, Option<&mut DeviceTx>),
        group: Option<&mut Communicator>,
    ) -> StageResult<Progress<Generated, (Issued, u32)>> {
        let (blame, name) = (self.blame, self.name);
        let on_error = device(name);
        let work = self.timed.open().map_err(&on_error)?;
        let (stream, results, session) = (&self.timed.stream, &self.results, &mut self.session);
        let run = |input: &Payload<'_>, output: &mut PayloadMut<'_>| match group {
            None => {
                // SAFETY: the edges that live on this thread have bound the context to it; the slots, if there are any, go
                // on only behind their ready and read events.
                let calls = unsafe { session.run(plan, lap.into(), input, output, None) };
                calls.map_err(failed(blame, name))
            }
            Some(group) => {
                let mut lent = OfGpu::new(group, [stream, results]);
                // SAFETY: as above.
                let calls =
                    unsafe { session.run(plan, lap.into(), input, output, Some(&mut lent)) };
                lent.judge(calls, (blame, name))
            }
        };
        let calls = match output {
            Some(output) => {
                let calls = read_on(input, stream, |from| {
                    output.write_on(stream, |to| -> StageResult<u32> {
                        let refuse = internal(name);
                        let input =
                            Payload::on_device(inputs, from.address, from.len).map_err(&refuse)?;
                        let mut output =
                            PayloadMut::on_device(outputs, to.address, to.len).map_err(&refuse)?;
                        run(&input, &mut output)
                    })
                })?;
                // Where that fails, the session's stream has all the work.
                if !results.is_same(stream) {
                    output.write_on(results, |_| StageResult::Ok(()))?;
                }
                calls
            }
            None => run(
                &Payload::of_leader(inputs),
                &mut PayloadMut::of_leader(outputs),
            )?,
        };
        work.close(results).map_err(&on_error)?;
        Ok(Progress::UnderWay((work, calls)))
    }

    fn send_ahead(&mut self, output: &mut DeviceTx, bytes: u64) -> StageResult<()> {
        Ok(output.send_ahead(bytes as usize)?)
    }

    fn poll_generated(
        &mut self,
        (work, calls): (Issued, u32),
    ) -> StageResult<Progress<Generated, (Issued, u32)>> {
        let polled = self.timed.poll(work).map_err(device(self.name))?;
        let generated = |done| Generated {
            calls,
            worked: Some(done),
        };
        Ok(polled.map(generated, |work| (work, calls)))
    }
}
