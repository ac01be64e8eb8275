//! The sink of `pp run`: decodes frames and writes them.

use pp_contract::{ChunkIndex, FaultKind, Plan as _, Seal, VideoPlan};
use pp_job::seen::{Thumb, Viewer};
use pp_kernels::FrameGeometry;
use pp_runtime::drift::{Check, Verifier};
use pp_runtime::stage::{Chunk, Progress, Sink, StageError, StageResult, Taken};
use pp_transport::bell::Bell;
use pp_video::buffer::Buffer;
use pp_video::kept::Keep;
use pp_video::origin::Origin;
use pp_video::sink::{Sink as Output, SinkOptions};
use pp_video::thumbnail::thumbnail;
use pp_video::y4m::Params;
use pp_video::{QUEUE, io_threads};

use super::clean::CleanFrames;
use super::kernels::{Frames, Kernels, Layouts, TicketOf};
use super::notes::{Made, ToSink, ToSource};
use super::open::buffers;
use super::shape::Shape;
use crate::args::RunArgs;

/// A chunk under way: in the kernels, or in the digests behind them.
pub struct Taking<D: Kernels> {
    work: Progress<Frames, D::Decoding>,
    index: ChunkIndex,
    first_frame: u64,
    /// Frames of the input that were dropped before it.
    skipped: u64,
    /// A digest of the first chunk of the input.
    input: u64,
    params: Params,
    check: Option<Check<TicketOf<D>>>,
    /// What the stages before say of digests.
    seals: Vec<Seal>,
}

pub struct VideoSink<D: Kernels> {
    decoder: D,
    shape: Shape,
    /// The frames that the kernels make.
    made: FrameGeometry,
    output: Option<Output>,
    /// Frames are repeated in the place of those that were dropped.
    repeats: bool,
    /// What is decoded into where nothing is written.
    idle: Vec<Buffer>,
    max_frames: u32,
    /// The first frame of the input whose output is written.
    skip: u64,
    verifier: Verifier,
    /// What faults call it.
    name: &'static str,
    layouts: Layouts,
    clean: Option<CleanFrames>,
    /// Takes pictures of the output, on rank 0.
    viewer: Option<Viewer>,
    /// Whether there is something to be stored.
    has_frames: bool,
}

/// Refuses to compare frames with others that are not like them.
fn cannot_compare(shape: &Shape, frames: FrameGeometry) -> StageError {
    let header = &shape.0;
    let detail = format!(
        "--add-noise compares the output with the input, and these kernels give {} frames of {}x{} {:?} and {} bits for each \
         of {}x{} {:?} and {}; leave --add-noise out",
        frames.frames_per_frame,
        frames.width,
        frames.height,
        frames.chroma,
        frames.bits as u32,
        header.width(),
        header.height(),
        header.chroma(),
        header.bits() as u32
    );
    StageError::new(FaultKind::BadInput, "open kernels", detail)
}

impl<D: Kernels> VideoSink<D> {
    /// Opens the output.
    pub(super) fn open(
        (args, depth, viewer): (&RunArgs, u32, Option<Viewer>),
        origin: Origin,
        shape: &Shape,
        (name, decoder): (&'static str, D),
        (verifier, clean): (Verifier, Option<CleanFrames>),
        bell: Bell,
    ) -> StageResult<Self> {
        let depth = depth as usize;
        let frames = decoder.frames();
        let header = shape.0.of_frames(frames);
        let header = header.map_err(|fault| {
            let detail = format!("a Y4M file cannot have the frames of these kernels: {fault}");
            StageError::new(FaultKind::Plugin, "open kernels", detail)
        })?;
        if clean.is_some() && header != shape.0 {
            return Err(cannot_compare(shape, frames));
        }
        let repeats = args.live.repeats();
        let (output, idle) = match args.output.as_deref() {
            Some(target) => {
                let options = SinkOptions {
                    queue: QUEUE,
                    threads: io_threads(),
                    keep: args.going_on.keep_partial.then_some(Keep {
                        skip: args.going_on.skip,
                        per_frame: frames.frames_per_frame.into(),
                        origin: origin.set("gaps", args.live.has_gaps()),
                    }),
                    repeats,
                };
                // As many as wait to be written, are written, may be repeated, and are decoded into.
                let count = QUEUE + 3 + 2 * io_threads() + depth;
                let buffers = buffers(count, || decoder.memory())?;
                let wake = move || bell.ring();
                let output = Output::open(target, &header, options, buffers, wake)?;
                (Some(output), Vec::new())
            }
            None => (None, buffers(depth, || decoder.memory())?),
        };
        Ok(Self {
            decoder,
            shape: shape.clone(),
            made: frames,
            output,
            repeats,
            idle,
            max_frames: args.frames_per_chunk,
            skip: args.going_on.skip,
            verifier,
            name,
            layouts: Layouts::default(),
            clean,
            viewer,
            has_frames: false,
        })
    }

    /// Takes out the first frames of a chunk that begins before those that are written.
    fn cut_off(&self, first: u64, frames: &mut Buffer, params: &mut Params) {
        let per_frame = u64::from(self.made.frames_per_frame);
        let before = self.skip.saturating_sub(first).saturating_mul(per_frame) as usize;
        let all = frames.len();
        let bytes = before.saturating_mul(self.made.frame_bytes()).min(all);
        if bytes > 0 {
            frames.copy_within(bytes.., 0);
            frames.resize(all - bytes);
            params.retain_mut(|(at, _)| {
                let is_written = *at >= before;
                *at -= before.min(*at);
                is_written
            });
        }
    }

    /// Gives the frames of a decode that is done to the output.
    fn conclude(&mut self, mut taking: Taking<D>) -> StageResult<Progress<Taken, Taking<D>>> {
        let Progress::Done(mut frames) = taking.work else {
            return Ok(Progress::UnderWay(taking));
        };
        let (verifier, digester) = (&self.verifier, self.decoder.digester());
        let seal = match taking.check.take() {
            Some(check) if !verifier.is_there(digester, &check)? => {
                (taking.check, taking.work) = (Some(check), Progress::Done(frames));
                return Ok(Progress::UnderWay(taking));
            }
            Some(check) => Some(verifier.conclude(digester, check)?),
            None => None,
        };
        let (index, first) = (taking.index, taking.first_frame);
        let clean = self.clean.as_mut();
        let after = clean.map(|clean| clean.compare(&self.shape, index, first, &frames.bytes));
        let mut seals = taking.seals;
        seals.extend(seal);
        self.cut_off(first, &mut frames.bytes, &mut taking.params);
        let per_frame = u64::from(self.made.frames_per_frame);
        let repeated = match self.repeats {
            true => taking.skipped.saturating_mul(per_frame),
            false => 0,
        };
        let made = (frames.bytes.len() / self.made.frame_bytes()) as u64;
        let note = ToSource {
            made: Made {
                width: self.made.width,
                height: self.made.height,
                frames: made.saturating_add(repeated),
            },
            after: after.transpose()?,
            seals,
        };
        if let Some(viewer) = &self.viewer
            && viewer.wants(Thumb::After)
            && let Some(frame) = frames.bytes.get(..self.made.frame_bytes())
        {
            let size = (self.made.width, self.made.height);
            viewer.set_thumbnail(Thumb::After, thumbnail(size, self.made.chroma, frame));
        }
        if let Some(output) = &mut self.output {
            output.of_input(taking.input)?;
        }
        match &mut self.output {
            Some(output) if !frames.bytes.is_empty() => {
                output.push(frames.bytes, taking.params, repeated)?;
            }
            _ => self.idle.push(frames.bytes),
        }
        self.has_frames = true;
        Ok(Progress::Done(Taken {
            calls: 1,
            start_frame: first,
            seal,
            worked: frames.worked,
            note: note.encode()?,
        }))
    }
}

impl<D: Kernels> Sink<D::Rx> for VideoSink<D> {
    type Plan = VideoPlan;
    type Kept = Taking<D>;

    fn is_ready(&mut self, under_way: usize) -> StageResult<bool> {
        let output = self.output.as_ref();
        Ok(output.is_none_or(|output| output.has_room_beside(under_way)))
    }

    fn take(
        &mut self,
        chunk: Chunk<'_, VideoPlan>,
        input: Option<&D::Rx>,
    ) -> StageResult<Progress<Taken, Taking<D>>> {
        let (message, index) = (chunk.message, chunk.place.chunk);
        let plan = message.plan().parts();
        let mut said = ToSink::decode(message.note(), self.max_frames)?;
        let per_frame = self.made.frames_per_frame as usize;
        for (at, _) in &mut said.params {
            *at *= per_frame;
        }
        let digester = self.decoder.digester();
        let mut check = self.verifier.begin(digester, chunk, input)?;
        let output = self.output.as_ref();
        let idle = self.idle.pop();
        let mut frames = idle.unwrap_or_else(|| output.map(Output::buffer).unwrap_or_default());
        frames.resize(said.frames as usize * per_frame * self.made.frame_bytes());
        let tensors = message.tensors().unsealed();
        let came = (&chunk, said.frames, &tensors);
        (self.layouts).of_chunk(&mut self.decoder, &self.verifier, came, self.name)?;
        let work = self.decoder.decode(frames, plan, &tensors, input)?;
        let mut seals = Vec::new();
        if let Some(check) = &mut check {
            let digester = self.decoder.digester();
            self.verifier.end(digester, check, input, None)?;
            seals = self.verifier.seals(message);
        }
        self.conclude(Taking {
            work,
            index,
            first_frame: plan.current_start_frame,
            skipped: said.skipped,
            input: said.input,
            params: said.params,
            check,
            seals,
        })
    }

    fn poll(&mut self, mut oldest: Taking<D>) -> StageResult<Progress<Taken, Taking<D>>> {
        if let Progress::UnderWay(work) = oldest.work {
            oldest.work = self.decoder.poll_decoded(work)?;
        }
        self.conclude(oldest)
    }

    fn finish(&mut self) -> StageResult<()> {
        // A run that was interrupted before its first chunk leaves no file.
        let Some(output) = self.output.take().filter(|_| self.has_frames) else {
            return Ok(());
        };
        output.commit()?;
        Ok(())
    }

    fn queued(&self) -> u32 {
        self.output.as_ref().map_or(0, Output::queued) as u32
    }
}
