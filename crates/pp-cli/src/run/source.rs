//! The source of `pp run`: reads frames and encodes them.

use std::rc::Rc;

use pp_contract::{ChunkIndex, FaultKind, Manifest, Message, Rank, VideoPlan, VideoPlanParts};
use pp_job::Error;
use pp_kernels::ChunkShape;
use pp_runtime::core::Cut;
use pp_runtime::drift::{Log, Sealed, Verifier, seal_again};
use pp_runtime::stage::{
    Built, Offer, Place, Progress, RetainedPayloads, Source, StageError, StageResult,
};
use pp_transport::bell::Bell;
use pp_video::estimates::Estimates;
use pp_video::header::Header;
use pp_video::noise::Noise;
use pp_video::psnr::LumaPsnr;
use pp_video::source::{Chunk, Polled, Source as Frames, SourceOptions};
use pp_video::y4m::Reader;
use pp_video::{InputError, QUEUE, io_threads};

use super::again::compose_again;
use super::clean::CleanStore;
use super::kernels::{Encoded, Kernels, Layouts, TicketOf};
use super::notes::{Made, ToSink, ToSource};
use super::open::buffers;
use super::progress::FrameProgress;
use crate::args::{CutChoice, RunArgs};
use pp_job::RANK_0;

/// A chunk between its encode and its acceptance.
pub struct Pending<E: Kernels> {
    frames: usize,
    /// Kept only when its PSNR is wanted.
    chunk: Option<Chunk>,
    sealed: Option<Sealed<TicketOf<E>>>,
    /// `None` only while it is asked for.
    encode: Option<Progress<Encoded, E::Encoding>>,
}

/// Luma PSNR of the input and of the output against the clean clip.
#[derive(Default)]
pub(super) struct Quality {
    pub(super) before: LumaPsnr,
    pub(super) after: LumaPsnr,
}

/// What the source is made for.
pub(super) struct Settings<'a> {
    pub(super) args: &'a RunArgs,
    /// Frames of context that a payload may carry.
    pub(super) context_frames: u32,
    pub(super) depth: u32,
    pub(super) sink: Rank,
    pub(super) verifier: Verifier,
    pub(super) log: Log,
    /// For the sink on this rank.
    pub(super) clean: Rc<CleanStore>,
}

pub struct VideoSource<'a, E: Kernels> {
    input: Frames,
    encoder: E,
    pub(super) header: Header,
    pub(super) settings: Settings<'a>,
    layouts: Layouts,
    offered: Option<Chunk>,
    /// The plan of the chunk before, and how many frames its epoch has had.
    last: Option<VideoPlanParts>,
    epoch_frames: u32,
    /// The noise that the kernels estimated, as far as it is known.
    pub(super) noise: Estimates,
    pub(super) quality: Option<Quality>,
    /// What the sink made so far.
    pub(super) made: Made,
    pub(super) progress: FrameProgress,
    /// Why the input ended before its end, behind whole frames.
    pub(super) broken: Option<InputError>,
    /// How many frames there are to read, where the input is a file and all of it was asked for.
    pub(super) frames_in_input: Option<u64>,
}

impl<'a, E: Kernels> VideoSource<'a, E> {
    /// Starts to read.
    pub(super) fn open(
        reader: Reader,
        encoder: E,
        settings: Settings<'a>,
        bell: Bell,
    ) -> Result<Self, Error> {
        let args = settings.args;
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
            noise: args
                .add_noise
                .map(|sigma| Noise::new(sigma, args.seed, header.bits())),
            scene_cuts: args.cuts != CutChoice::Off,
            queue: QUEUE,
            threads: io_threads(),
        };
        // As many as are read ahead, are read into and are on their way.
        let count = QUEUE + 3 + io_threads() + settings.depth as usize;
        let into = buffers(count, || encoder.memory()).map_err(|e| e.into_fault(RANK_0))?;
        let input = Frames::start(reader, options, into, move || bell.ring())
            .map_err(|e| anyhow::Error::new(e).context("cannot start the reading thread"))?;
        Ok(Self {
            input,
            encoder,
            header,
            settings,
            layouts: Layouts::default(),
            offered: None,
            last: None,
            epoch_frames: 0,
            noise: Estimates::default(),
            quality: args.add_noise.map(|_| Quality::default()),
            made: Made::default(),
            progress: FrameProgress::new(total),
            broken: None,
            frames_in_input,
        })
    }

    /// The tensors of a chunk like this.
    pub(super) fn tensors_of(&mut self, shape: ChunkShape) -> StageResult<Manifest> {
        let known = (self.layouts).of(&mut self.encoder, &self.settings.verifier, (shape, 0))?;
        Ok(known.layout.outputs.clone())
    }

    fn plan(&self, place: Place, start_frame: u64) -> VideoPlanParts {
        let (width, height) = (self.header.width(), self.header.height());
        let args = self.settings.args;
        let brings_context = args.recompute || place.rebuilds;
        let recompute = brings_context && !place.starts_epoch && self.settings.context_frames > 0;
        let mut plan = match &self.last {
            None => VideoPlanParts::first(width, height, args.denoise_steps),
            Some(last) => last.following(start_frame, recompute),
        };
        plan.current_start_frame = start_frame;
        plan.reset_kv_cache = place.starts_epoch && self.last.is_some();
        plan.reset_crossattn_cache = plan.reset_kv_cache;
        plan.base_seed = args.seed;
        plan
    }

    /// The memory of a chunk is read into again.
    fn recycle(&self, index: ChunkIndex, chunk: Option<Chunk>) {
        if let Some(mut chunk) = chunk {
            if self.quality.is_some() {
                chunk.clean = self.settings.clean.take(index);
            }
            self.input.recycle(chunk);
        }
    }
}

impl<E: Kernels> Source<E::Tx> for VideoSource<'_, E> {
    type Plan = VideoPlan;
    type Carry = Pending<E>;

    fn poll(&mut self) -> StageResult<Offer> {
        let polled = match self.input.poll() {
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
                let cut = match self.settings.args.cuts {
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

    fn is_built(&mut self, pending: &mut Pending<E>) -> StageResult<bool> {
        Progress::ask(&mut pending.encode, |encoding| {
            self.encoder.poll_encoded(encoding)
        })
    }

    fn build(
        &mut self,
        place: Place,
        slot: &mut E::Tx,
    ) -> StageResult<Built<VideoPlan, Pending<E>>> {
        let mut chunk = self.offered.take().expect("built only when offered");
        let plan = self.plan(place, chunk.first_frame);
        if place.starts_epoch {
            self.epoch_frames = 0;
        }
        let context = if plan.do_kv_recompute {
            self.settings.context_frames.min(self.epoch_frames)
        } else {
            0
        };
        let frames = chunk.frames;
        let shape = ChunkShape {
            frames: frames as u32,
            steps: plan.num_denoise_steps,
            context_frames: context,
        };
        let known = (self.layouts).of(&mut self.encoder, &self.settings.verifier, (shape, 0))?;
        let (tensors, sealed) = (&known.layout.outputs, known.sealed.as_ref());
        let bytes = chunk.data().len();
        let encode = self
            .encoder
            .encode(chunk.memory(), bytes, &plan, tensors, slot)?;
        let sealed = sealed.filter(|_| self.settings.verifier.is_due(place.chunk));
        let tensors = sealed.unwrap_or(tensors).clone();
        let sealed = match sealed {
            Some(_) => {
                let digester = self.encoder.digester();
                Some(
                    self.settings
                        .verifier
                        .seal(digester, place.chunk, &tensors, slot)?,
                )
            }
            None => None,
        };
        // To the kernels here it is a chunk like any other; for a stage that was started anew it is the first.
        let asked = VideoPlan::new(VideoPlanParts {
            init_cache: plan.init_cache || place.rebuilds,
            ..plan
        })?;
        self.epoch_frames += frames as u32;
        self.last = Some(plan);
        let read_ns = Some(chunk.read_ns);
        let note = ToSink {
            frames: frames as u32,
            params: std::mem::take(&mut chunk.params),
        };
        let note = note.encode(place.chunk.get())?;
        let chunk = if self.quality.is_some() {
            self.settings
                .clean
                .put(place.chunk, std::mem::take(&mut chunk.clean));
            Some(chunk)
        } else {
            self.input.recycle(chunk);
            None
        };
        Ok(Built {
            plan: asked,
            tensors,
            note,
            carry: Pending {
                frames,
                chunk,
                sealed,
                encode: Some(encode),
            },
            frames: frames as u32,
            read_ns,
        })
    }

    fn rebuild(
        &mut self,
        place: Place,
        sent: &Message<VideoPlan>,
        kept: &dyn RetainedPayloads<E::Tx>,
        slot: &mut E::Tx,
    ) -> StageResult<(VideoPlan, Manifest)> {
        let context_frames = self.settings.context_frames;
        let tensors_of = |shape| self.tensors_of(shape);
        let composed = compose_again(place, sent, kept, slot, context_frames, tensors_of)?;
        seal_again(self.encoder.digester(), sent, composed, slot)
    }

    fn accepted(
        &mut self,
        index: ChunkIndex,
        pending: Pending<E>,
        note: Option<&[u8]>,
    ) -> StageResult<Option<u64>> {
        let Pending {
            frames,
            chunk,
            sealed,
            encode,
        } = pending;
        let Some(note) = note else {
            if let Some(Progress::UnderWay(encoding)) = encode {
                self.encoder.forget(encoding);
            }
            if let Some(sealed) = sealed {
                sealed.forget(self.encoder.digester());
            }
            self.recycle(index, chunk);
            return Ok(None);
        };
        let seals = sealed.as_ref().map_or(0, |_| self.settings.log.seals());
        let said = ToSource::decode(note, seals, self.settings.sink)?;
        let frames_before = self.made.frames;
        self.made = said.made;
        self.made.frames = frames_before.saturating_add(said.made.frames);
        let Some(Progress::Done(encoded)) = encode else {
            let what = "a chunk was accepted whose encode is not done";
            return Err(StageError::new(FaultKind::Internal, "encode", what));
        };
        if let Some(sigmas) = encoded.noise {
            self.noise.note(sigmas);
        }
        if let Some(sealed) = sealed {
            let digester = self.encoder.digester();
            self.settings.log.note(digester, sealed, &said.seals)?;
        }
        if let (Some(quality), Some(chunk)) = (&mut self.quality, &chunk) {
            let (header, noisy) = (&self.header, chunk.data());
            self.settings
                .clean
                .look(index, |clean| quality.before.add(header, clean, noisy));
            quality.after.merge(said.after.unwrap_or_default());
        }
        self.recycle(index, chunk);
        self.progress.add(frames as u64);
        Ok(encoded.worked.map(|worked| worked.work_ns))
    }

    fn queued(&self) -> u32 {
        self.input.queued() as u32
    }
}
