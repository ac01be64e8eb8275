//! The front of `pp run`: read and encode, decode and write.

use pp_contract::{
    ChunkIndex, Envelope, Fault, FaultKind, Manifest, Outcome, Rank, VideoPlan, VideoPlanParts,
    with_source,
};
use pp_job::{Error, FRONT};
use pp_kernels::{ChunkShape, Layout};
use pp_runtime::core::Cut;
use pp_runtime::stage::{
    Built, Decoded, FrontStages, Offer, Place, Progress, RetainedPayloads, StageError,
};
use pp_transport::bell::Bell;
use pp_transport::host::MAX_SLOTS;

use super::codec::{Codec, Frames};
use super::input::{QUEUE, io_threads};
use super::noise::Estimates;
use super::open::prepared;
use super::progress::FrameProgress;
use super::{Shape, kernel_fault, slot_bytes};
use crate::args::{CutChoice, RunArgs};
use crate::video::InputError;
use crate::video::buffer::Buffer;
use crate::video::header::Header;
use crate::video::noise::Noise;
use crate::video::psnr::LumaPsnr;
use crate::video::sink::{Sink, SinkOptions};
use crate::video::source::{Chunk, Polled, Source, SourceOptions};
use crate::video::y4m::{Params, Reader};
use pp_job::output::OutputError;
use pp_runtime::drift::{Digester, FrontCheck, FrontVerifier, seal_again};

/// A layout; depends on the number of frames and of context frames alone.
struct Known {
    shape: ChunkShape,
    layout: Layout,
    /// The manifests of inputs and outputs with digests, if some chunks have digests.
    sealed: Option<[Manifest; 2]>,
}

/// What is known of the digests of a chunk that is verified.
type Check<C> = FrontCheck<<<C as Codec>::Digester as Digester>::Ticket>;

/// A chunk between its encode and the end of its decode.
pub(super) struct Pending<K> {
    plan: VideoPlanParts,
    frames: usize,
    known: usize,
    /// Kept only when its PSNR is wanted, or the GPU still reads it.
    chunk: Option<Chunk>,
    params: Params,
    check: Option<K>,
}

type CarryOf<C> = (Pending<Check<C>>, <C as Codec>::Encoded);
type DecodingOf<C> = (Pending<Check<C>>, <C as Codec>::Decoding);

/// Luma PSNR of the input and of the output against the clean clip.
#[derive(Default)]
pub(super) struct Quality {
    pub(super) before: LumaPsnr,
    pub(super) after: LumaPsnr,
}

pub(super) struct VideoFront<C: Codec> {
    source: Source,
    sink: Option<Sink>,
    /// What is decoded into where nothing is written.
    idle: Vec<Buffer>,
    codec: C,
    pub(super) header: Header,
    /// Frames of context that a payload may carry.
    pub(super) context_frames: u32,
    steps: u32,
    recompute: bool,
    /// Chunks before one that hold its context.
    pub(super) context_chunks: u32,
    cuts: CutChoice,
    seed: u64,
    pub(super) shape: Shape,
    layouts: Vec<Known>,
    offered: Option<Chunk>,
    pub(super) verifier: FrontVerifier,
    /// The plan of the chunk before, and how many frames its epoch has had.
    last: Option<(VideoPlanParts, u32)>,
    epoch_frames: u32,
    /// The noise that the kernels estimated, as far as it is known.
    pub(super) noise: Estimates,
    pub(super) quality: Option<Quality>,
    progress: FrameProgress,
    /// Why the input ended before its end, behind whole frames.
    pub(super) broken: Option<InputError>,
    /// How many frames there are to read, where the input is a file and all of it was asked for.
    pub(super) frames_in_input: Option<u64>,
}

impl<C: Codec> VideoFront<C> {
    /// Starts to read, and opens the output.
    pub(super) fn open(
        args: &RunArgs,
        reader: Reader,
        mut codec: C,
        context_frames: u32,
        bell: Bell,
    ) -> Result<Self, Error> {
        let header = reader.header.clone();
        let in_file = reader.plain_frames().and_then(|frames| frames.count());
        let asked_for = args
            .chunks
            .map(|n| n.saturating_mul(args.frames_per_chunk.into()));
        // Where both are known the run ends with the first.
        let total = in_file.into_iter().chain(asked_for).min();
        let frames_in_input = in_file.filter(|_| args.chunks.is_none());
        let options = SourceOptions {
            frames_per_chunk: args.frames_per_chunk as usize,
            chunks: args.chunks,
            noise: args.add_noise.map(|sigma| Noise::new(sigma, args.seed)),
            scene_cuts: args.cuts != CutChoice::Off,
            queue: QUEUE,
            threads: io_threads(),
        };
        let sink = args
            .output
            .as_deref()
            .map(|target| {
                let bell = bell.clone();
                let options = SinkOptions {
                    queue: QUEUE,
                    threads: io_threads(),
                };
                // As many as wait to be written, are written and are decoded into.
                let buffers = buffers(&codec, QUEUE + 2 + 2 * io_threads() + args.depth as usize)?;
                let wake = move || bell.ring();
                Ok::<_, Error>(Sink::open(target, &header, options, buffers, wake)?)
            })
            .transpose()?;
        // As many as are read ahead, are read into and are on their way.
        let into = buffers(&codec, QUEUE + 3 + io_threads() + args.depth as usize)?;
        let source = Source::start(reader, options, into, move || bell.ring())
            .map_err(|e| anyhow::Error::new(e).context("cannot start the reading thread"))?;
        let context = if args.recompute || args.restarts > 0 {
            context_frames
        } else {
            0
        };
        // With recompute every payload has its context with it.
        let context_chunks = match args.recompute {
            true => 0,
            false => context.div_ceil(args.frames_per_chunk),
        };
        let forward_slots = args.depth + context_chunks;
        if forward_slots > MAX_SLOTS {
            let what = format!(
                "--depth {} and the {context_chunks} chunks of context that --restarts keeps take {forward_slots} \
                 slots, and an edge has {MAX_SLOTS} at most; lower --depth or raise --frames-per-chunk",
                args.depth
            );
            return Err(Fault::new(FaultKind::BadInput, FRONT, "lay out the edges", what).into());
        }
        let mut shape = Shape {
            width: header.width(),
            height: header.height(),
            planes: header.chroma(),
            frame_bytes: header.frame_bytes() as u64,
            forward_slots,
            forward_bytes: 0,
            backward_bytes: 0,
        };
        let largest = codec
            .layout(ChunkShape {
                frames: args.frames_per_chunk,
                steps: args.denoise_steps,
                context_frames: context,
            })
            .map_err(|e| kernel_fault(&e, FRONT, "lay out a chunk"))?;
        let verifier = FrontVerifier::new(args.verify, Rank::new(args.ranks - 1));
        let room = verifier.room();
        shape.forward_bytes = slot_bytes(largest.inputs.payload_bytes() + room);
        shape.backward_bytes = slot_bytes(largest.outputs.payload_bytes() + room);
        let codec = prepared(codec, C::digester, args, shape.largest(), FRONT)?;
        Ok(Self {
            source,
            idle: match sink {
                Some(_) => Vec::new(),
                None => buffers(&codec, args.depth as usize)?,
            },
            sink,
            codec,
            header,
            context_frames: context,
            steps: args.denoise_steps,
            recompute: args.recompute,
            context_chunks,
            cuts: args.cuts,
            seed: args.seed,
            shape,
            layouts: Vec::new(),
            offered: None,
            verifier,
            last: None,
            epoch_frames: 0,
            noise: Estimates::default(),
            quality: args.add_noise.map(|_| Quality::default()),
            progress: FrameProgress::new(total),
            broken: None,
            frames_in_input,
        })
    }

    /// Waits until everything is written and gives the output its name; the number of frames in
    /// it, if there is an output.
    pub(super) fn commit(&mut self) -> Result<Option<u64>, OutputError> {
        self.progress.end();
        self.sink.take().map(Sink::commit).transpose()
    }

    /// The tensors that go with a chunk like this.
    pub(super) fn inputs_of(&mut self, shape: ChunkShape) -> Result<Manifest, StageError> {
        let known = self.layout(shape)?;
        Ok(self.layouts[known].layout.inputs.clone())
    }

    /// The place in `layouts` of the layout for a chunk like this.
    fn layout(&mut self, shape: ChunkShape) -> Result<usize, StageError> {
        if let Some(at) = self.layouts.iter().position(|known| known.shape == shape) {
            return Ok(at);
        }
        let layout = self
            .codec
            .layout(shape)
            .map_err(|e| StageError::new(FaultKind::Plugin, "layout", with_source(&e)))?;
        self.layouts.push(Known {
            shape,
            sealed: self.verifier.sealed(&layout.inputs, &layout.outputs)?,
            layout,
        });
        Ok(self.layouts.len() - 1)
    }

    /// Gives the frames of a decode that is done to the sink.
    fn emit(
        &mut self,
        mut pending: Pending<Check<C>>,
        decoded: Progress<Frames, C::Decoding>,
    ) -> Result<Progress<Decoded, DecodingOf<C>>, StageError> {
        let frames = match decoded {
            Progress::Done(frames) => frames,
            Progress::UnderWay(decoding) => return Ok(Progress::UnderWay((pending, decoding))),
        };
        self.noise.take_from(&mut self.codec);
        let digester = self.codec.digester();
        self.verifier.conclude(digester, &mut pending.check)?;
        if let (Some(quality), Some(chunk)) = (&mut self.quality, &pending.chunk)
            && let Some(clean) = chunk.clean()
        {
            quality.before.add(&self.header, clean, chunk.data());
            quality.after.add(&self.header, clean, &frames.bytes);
        }
        if let Some(chunk) = pending.chunk {
            self.source.recycle(chunk);
        }
        match &mut self.sink {
            Some(sink) => sink
                .push(frames.bytes, pending.params)
                .map_err(|e| StageError::new(FaultKind::Io, "write output", e.to_string()))?,
            None => self.idle.push(frames.bytes),
        }
        self.progress.add(pending.frames as u64);
        Ok(Progress::Done(Decoded {
            worked: frames.worked,
        }))
    }

    fn plan(&self, place: Place, start_frame: u64) -> VideoPlanParts {
        let (width, height) = (self.header.width(), self.header.height());
        let brings_context = self.recompute || place.rebuilds;
        let recompute = brings_context && !place.starts_epoch && self.context_frames > 0;
        let mut plan = match &self.last {
            None => VideoPlanParts::first(width, height, self.steps),
            Some((last, _)) => last.following(start_frame, recompute),
        };
        plan.current_start_frame = start_frame;
        plan.reset_kv_cache = place.starts_epoch && self.last.is_some();
        plan.reset_crossattn_cache = plan.reset_kv_cache;
        plan.base_seed = self.seed;
        plan
    }
}

/// What is asked for, of these tensors.
pub(super) fn envelope_of(
    plan: VideoPlanParts,
    inputs: Manifest,
    outputs: Manifest,
) -> Result<Envelope<VideoPlan>, StageError> {
    VideoPlan::new(plan)
        .and_then(|plan| Envelope::new(plan, inputs, outputs))
        .map_err(|e| StageError::new(FaultKind::Plugin, "plan", e.to_string()))
}

/// Memory of the codec's choice for so many chunks.
fn buffers<C: Codec>(codec: &C, count: usize) -> Result<Vec<Buffer>, Error> {
    let make = |_| Ok(codec.memory()?.map_or_else(Buffer::default, Buffer::from));
    let made: Result<_, StageError> = (0..count).map(make).collect();
    made.map_err(|e| e.into_fault(FRONT).into())
}

impl<C: Codec> FrontStages<C::Tx, C::Rx> for VideoFront<C> {
    type Plan = VideoPlan;
    type Carry = CarryOf<C>;
    type Decoding = DecodingOf<C>;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        let polled = match self.source.poll() {
            Err(error) if error.follows_frames() => {
                self.broken = Some(error);
                Polled::End
            }
            polled => polled.map_err(|e| StageError::new(e.kind(), "read input", e.to_string()))?,
        };
        Ok(match polled {
            Polled::Later => Offer::Later,
            Polled::End => Offer::End,
            Polled::Ready(chunk) => {
                let cut = match self.cuts {
                    _ if !chunk.cut => Cut::None,
                    CutChoice::Flush => Cut::Flush,
                    CutChoice::Hard => Cut::Hard,
                    CutChoice::Off => Cut::None,
                };
                self.offered = Some(chunk);
                Offer::Chunk(cut)
            }
        })
    }

    fn build(
        &mut self,
        place: Place,
        slot: &mut C::Tx,
    ) -> Result<Built<VideoPlan, CarryOf<C>>, StageError> {
        let mut chunk = self.offered.take().expect("built only when offered");
        let plan = self.plan(place, chunk.first_frame);
        if place.starts_epoch {
            self.epoch_frames = 0;
        }
        let context = if plan.do_kv_recompute {
            self.context_frames.min(self.epoch_frames)
        } else {
            0
        };
        let known = self.layout(ChunkShape {
            frames: chunk.frames as u32,
            steps: plan.num_denoise_steps,
            context_frames: context,
        })?;
        let known_layout = &self.layouts[known];
        let is_due = self.verifier.is_due(place.chunk);
        let [inputs, outputs] = match &known_layout.sealed {
            Some([inputs, outputs]) if is_due => [inputs, outputs],
            _ => [&known_layout.layout.inputs, &known_layout.layout.outputs],
        };
        let encoded = self.codec.encode(
            chunk.memory(),
            chunk.data().len(),
            &plan,
            &known_layout.layout.inputs,
            slot,
        )?;
        self.noise.take_from(&mut self.codec);
        let check = if is_due {
            let digester = self.codec.digester();
            Some(FrontCheck::seal(digester, place.chunk, inputs, slot)?)
        } else {
            None
        };
        // To the kernels here it is a chunk like any other; for Phase B it is the first.
        let asked = VideoPlanParts {
            init_cache: plan.init_cache || place.rebuilds,
            ..plan
        };
        let envelope = envelope_of(asked, inputs.clone(), outputs.clone())?;
        let (frames, read_ns) = (chunk.frames, Some(chunk.read_ns));
        self.epoch_frames += frames as u32;
        self.last = Some((plan, frames as u32));
        let params = std::mem::take(&mut chunk.params);
        let keep = self.quality.is_some() || C::READS_LATER;
        let chunk = if keep {
            Some(chunk)
        } else {
            self.source.recycle(chunk);
            None
        };
        let pending = Pending {
            plan,
            frames,
            known,
            chunk,
            params,
            check,
        };
        Ok(Built {
            envelope,
            carry: (pending, encoded),
            frames: frames as u32,
            read_ns,
        })
    }

    fn rebuild(
        &mut self,
        place: Place,
        sent: &Envelope<VideoPlan>,
        kept: &dyn RetainedPayloads<C::Tx>,
        slot: &mut C::Tx,
    ) -> Result<Envelope<VideoPlan>, StageError> {
        let envelope = self.compose_again(place, sent, kept, slot)?;
        seal_again(self.codec.digester(), sent, envelope, slot)
    }

    fn is_sink_ready(&mut self, decoding: usize) -> Result<bool, StageError> {
        let sink = self.sink.as_ref();
        Ok(sink.is_none_or(|sink| sink.has_room_beside(decoding)))
    }

    fn decode(
        &mut self,
        _: ChunkIndex,
        (mut pending, encoded): CarryOf<C>,
        outcome: &Outcome,
        payload: Option<C::Rx>,
    ) -> Result<Progress<Decoded, DecodingOf<C>>, StageError> {
        let (digester, received) = (self.codec.digester(), payload.as_ref());
        self.verifier
            .examine(digester, &mut pending.check, outcome, received)?;
        let mut frames = match &self.sink {
            Some(sink) => sink.buffer(),
            None => self.idle.pop().unwrap_or_default(),
        };
        frames.resize(pending.frames * self.header.frame_bytes());
        let tensors = &self.layouts[pending.known].layout.outputs;
        let decoded = self
            .codec
            .decode(encoded, frames, &pending.plan, tensors, payload)?;
        self.emit(pending, decoded)
    }

    fn poll_decoded(
        &mut self,
        (pending, decoding): DecodingOf<C>,
    ) -> Result<Progress<Decoded, DecodingOf<C>>, StageError> {
        let decoded = self.codec.poll_decoded(decoding)?;
        self.emit(pending, decoded)
    }

    fn forget(&mut self, _: ChunkIndex, (pending, encoded): CarryOf<C>) {
        self.codec.forget(encoded);
        FrontCheck::forget(self.codec.digester(), pending.check);
        if let Some(chunk) = pending.chunk {
            self.source.recycle(chunk);
        }
    }

    fn queued(&self) -> (u32, u32) {
        let sink = self.sink.as_ref().map_or(0, Sink::queued);
        (self.source.queued() as u32, sink as u32)
    }
}
