//! The source of `pp run`: reads frames and encodes them.

use std::rc::Rc;

use pp_contract::{ChunkIndex, FaultKind, Manifest, Message, Rank, VideoPlan, VideoPlanParts};
use pp_job::Error;
use pp_job::seen::{Thumb, Viewer};
use pp_kernels::ChunkShape;
use pp_runtime::clock::now_ns;
use pp_runtime::core::Cut;
use pp_runtime::drift::{Log, Sealed, Verifier, seal_again};
use pp_runtime::stage::{
    Built, Offer, Place, Progress, RetainedPayloads, Source, StageError, StageResult,
};
use pp_transport::bell::Bell;
use pp_video::estimates::Estimates;
use pp_video::header::Header;
use pp_video::noise::Noise;
use pp_video::origin::Origin;
use pp_video::psnr::LumaPsnr;
use pp_video::source::{Chunk, Polled, Skip, Source as Frames, SourceOptions};
use pp_video::thumbnail::thumbnail;
use pp_video::y4m::Reader;
use pp_video::{InputError, QUEUE, io_threads};

use super::again::compose_again;
use super::clean::CleanStore;
use super::kernels::{Encoded, Kernels, Layouts, TicketOf};
use super::live::{Cuts, Live};
use super::notes::{Made, ToSink, ToSource};
use super::open::buffers;
use super::progress::FrameProgress;
use crate::args::{CutChoice, RunArgs};
use pp_job::RANK_0;

/// A chunk between its encode and its acceptance.
pub struct Pending<E: Kernels> {
    /// Those that are written.
    frames: u64,
    /// When its first frame was there.
    read_ns: u64,
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
    /// Where the output begins.
    pub(super) skip: Skip,
    pub(super) depth: u32,
    /// What decides the bytes of the output.
    pub(super) origin: Origin,
    pub(super) sink: Rank,
    /// Stages remember, and cannot be told of a gap.
    pub(super) is_gap_a_cut: bool,
    pub(super) verifier: Verifier,
    pub(super) log: Log,
    /// For the sink on this rank.
    pub(super) clean: Rc<CleanStore>,
    /// Takes pictures of the input.
    pub(super) viewer: Option<Viewer>,
}

pub struct VideoSource<'a, E: Kernels> {
    input: Frames,
    encoder: E,
    pub(super) header: Header,
    pub(super) settings: Settings<'a>,
    layouts: Layouts,
    /// The next chunk, and in how many steps it was played, where a run is played again.
    offered: Option<(Chunk, Option<u32>)>,
    pub(super) live: Live,
    /// The chunk that began the epoch of the first one, where that is skipped.
    head: Option<Chunk>,
    /// The plan of the chunk before and its frames, and how many frames its epoch has had.
    last: Option<(VideoPlanParts, u32)>,
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
        let live = Live::open(args, &settings.origin, in_file.is_none() || args.live.pace)?;
        // Where both are known the run ends with the first.
        let total = in_file.into_iter().chain(asked_for).min();
        let total = total.map(|frames| frames.saturating_sub(settings.skip.frames));
        let total = total.filter(|_| !args.live.has_gaps());
        let frames_in_input = in_file.filter(|_| args.chunks.is_none());
        let options = SourceOptions {
            frames_per_chunk: args.frames_per_chunk as usize,
            chunks: args.chunks,
            skip: settings.skip,
            noise: args
                .add_noise
                .map(|sigma| Noise::new(sigma, args.seed, header.bits())),
            scene_cuts: args.cuts != CutChoice::Off,
            queue: QUEUE,
            threads: io_threads(),
            late: args.live.late,
            pace: args.live.pace,
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
            live,
            head: None,
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

    fn plan(&self, place: Place, chunk: &Chunk, steps: u32) -> VideoPlanParts {
        let (width, height) = (self.header.width(), self.header.height());
        let args = self.settings.args;
        let brings_context = args.recompute || place.rebuilds;
        let recompute = brings_context && !place.starts_epoch && self.settings.context_frames > 0;
        // Stages that begin anew behind a gap need not know of it.
        let skipped = match self.settings.is_gap_a_cut {
            true => 0,
            false => chunk.skipped_frames(),
        };
        let mut plan = match &self.last {
            None => VideoPlanParts::first(width, height, steps),
            Some((last, frames)) => last.behind(*frames, skipped, recompute),
        };
        plan.skipped_frames = skipped;
        plan.current_start_frame = chunk.first_frame;
        plan.num_denoise_steps = steps;
        plan.expected_generator_calls = plan.planned_calls();
        plan.reset_kv_cache = place.starts_epoch && self.last.is_some();
        plan.reset_crossattn_cache = plan.reset_kv_cache;
        plan.base_seed = args.seed;
        plan
    }

    /// Lets the kernels look at the chunk that began an epoch, as they did in the whole run: they estimate its noise there.
    /// The slot is written again behind it.
    fn look_at(&mut self, head: Chunk, slot: &mut E::Tx) -> StageResult<()> {
        let shape = ChunkShape {
            frames: head.frames as u32,
            steps: self.settings.args.denoise_steps,
            context_frames: 0,
        };
        let tensors = self.tensors_of(shape)?;
        let (width, height) = (self.header.width(), self.header.height());
        let mut plan = VideoPlanParts::first(width, height, shape.steps);
        plan.current_start_frame = head.first_frame;
        plan.base_seed = self.settings.args.seed;
        let bytes = head.data().len();
        let encode = self
            .encoder
            .encode(head.memory(), bytes, &plan, &tensors, slot)?;
        if let Progress::UnderWay(encoding) = encode {
            self.encoder.forget(encoding);
        }
        self.input.recycle(head);
        Ok(())
    }

    /// What the next chunk begins with.
    fn cuts(&self) -> Cuts {
        Cuts {
            choice: self.settings.args.cuts,
            is_gap_a_cut: self.settings.is_gap_a_cut,
            is_first: self.last.is_none(),
        }
    }

    /// The chunk that is built, and its steps.
    fn taken(&mut self, place: Place) -> (Chunk, u32) {
        let (mut chunk, played) = self.offered.take().expect("built only when offered");
        let cuts = self.cuts();
        let may = |old: &Chunk, new: &Chunk| cuts.of(old) == cuts.of(new);
        self.input.catch_up(&mut chunk, may);
        let steps = played.or(place.steps.map(u32::from));
        (chunk, steps.unwrap_or(self.settings.args.denoise_steps))
    }

    /// Shows the first frame of a chunk to whoever looks.
    fn show(&self, chunk: &Chunk) {
        if let Some(viewer) = &self.settings.viewer
            && viewer.wants(Thumb::Before)
        {
            let frame = &chunk.data()[..chunk.data().len() / chunk.frames.max(1)];
            let size = (self.header.width(), self.header.height());
            let picture = thumbnail(size, self.header.chroma(), frame);
            viewer.set_thumbnail(Thumb::Before, picture);
        }
    }

    /// What is kept of a chunk that was built.
    fn kept(&mut self, index: ChunkIndex, mut chunk: Chunk) -> Option<Chunk> {
        if self.quality.is_some() {
            let clean = std::mem::take(&mut chunk.clean);
            self.settings.clean.put(index, clean);
            return Some(chunk);
        }
        self.input.recycle(chunk);
        None
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
        while self.offered.is_none() {
            let polled = match self.live.is_over() || self.broken.is_some() {
                true => Ok(Polled::End),
                false => self.input.poll(),
            };
            match polled {
                Err(error) if error.follows_frames() => {
                    self.broken = Some(error);
                    return Ok(Offer::End);
                }
                Err(error) => {
                    let detail = error.to_string();
                    return Err(StageError::new(error.kind(), "read input", detail));
                }
                Ok(Polled::Later) => return Ok(Offer::Later),
                Ok(Polled::End) if self.broken.is_some() => return Ok(Offer::End),
                Ok(Polled::End) => return self.live.end().map(|()| Offer::End),
                Ok(Polled::Ready(head)) if head.is_head => self.head = Some(head),
                Ok(Polled::Ready(chunk)) => match self.live.replayed(&chunk)? {
                    (true, steps) => self.offered = Some((chunk, steps)),
                    (false, _) => self.input.skip(chunk),
                },
            }
        }
        let offered = self.offered.as_ref();
        Ok(Offer::Chunk(
            offered.map_or(Cut::None, |(chunk, _)| self.cuts().of(chunk)),
        ))
    }

    fn drop_late(&mut self, before_ns: u64) -> StageResult<u64> {
        // What waits is offered first.
        self.poll()?;
        let Some((chunk, _)) = &mut self.offered else {
            return Ok(0);
        };
        let mut dropped = 0;
        while self.input.drop_late(chunk, before_ns) {
            dropped += 1;
        }
        Ok(dropped)
    }

    fn oldest_ns(&self) -> Option<u64> {
        self.offered.as_ref().map(|(chunk, _)| chunk.read_ns.0)
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
        let (mut chunk, steps) = self.taken(place);
        let mut plan = self.plan(place, &chunk, steps);
        let is_behind_head = match self.head.take() {
            Some(head) => self.look_at(head, slot).map(|()| true)?,
            None => false,
        };
        plan.init_cache &= !is_behind_head;
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
        self.show(&chunk);
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
            init_cache: plan.init_cache || place.rebuilds || is_behind_head,
            ..plan
        })?;
        self.epoch_frames += frames as u32;
        self.last = Some((plan, frames as u32));
        let late_ns = self.live.built(&chunk, &self.header, steps);
        let (read_ns, skipped_frames) = (chunk.read_ns, chunk.skipped_frames());
        let held_ns = self.live.held_ns(&chunk);
        let note = ToSink {
            frames: frames as u32,
            skipped: chunk.skipped,
            input: chunk.input,
            params: std::mem::take(&mut chunk.params),
        };
        let note = note.encode(place.chunk.get())?;
        let chunk = self.kept(place.chunk, chunk);
        Ok(Built {
            plan: asked,
            tensors,
            note,
            carry: Pending {
                frames: (plan.current_start_frame + frames as u64)
                    .saturating_sub(self.settings.skip.frames)
                    .min(frames as u64),
                read_ns: read_ns.0,
                chunk,
                sealed,
                encode: Some(encode),
            },
            frames: frames as u32,
            read_ns: Some(read_ns),
            skipped_frames,
            held_ns,
            late_ns,
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
            read_ns,
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
        let most = self.settings.args.live.max_latency;
        let is_late = most.is_some_and(|most| u128::from(now_ns() - read_ns) > most.as_nanos());
        self.live.kept_up.late += u64::from(is_late);
        self.progress.add(frames, self.live.kept_up);
        Ok(encoded.worked.map(|worked| worked.work_ns))
    }

    fn queued(&self) -> u32 {
        self.input.queued() as u32
    }
}
