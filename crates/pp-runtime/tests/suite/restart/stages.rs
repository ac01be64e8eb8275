//! Stages that remember, and what they ought to make of a clip.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Mutex;

use pp_contract::{
    CacheEpoch, ChunkIndex, DType, FaultKind, Manifest, Message, Pipeline, Rank, TensorSpec,
};
use pp_runtime::core::Cut;
use pp_runtime::driver::{BoxedStage, Stages};
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, Place, Progress, RetainedPayloads, Sink, Source, Stage, StageError,
    StageResult, Taken, send_as_it_was,
};
use pp_testing::{Toy, ToyParts, done};
use pp_transport::host::{HostGroup, RxLease, TxLease};
use pp_transport::in_flight::Part;
use serde::{Deserialize, Serialize};

/// Frames of a chunk, and bytes of a frame.
const FRAMES: usize = 2;
const WIDE: usize = 10;
/// Frames that a stage remembers: more than a chunk has.
const CONTEXT: usize = 3;
pub(crate) const CONTEXT_CHUNKS: u32 = 2;
/// Room for a chunk and its context.
pub(crate) const SLOT: u64 = 512;

/// First chunk of a session, and how many frames of context come with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Session {
    begins: bool,
    context: u32,
}

impl ToyParts for Session {}

pub(crate) type Remember = Toy<Session>;

fn session(begins: bool, context: usize) -> Remember {
    let context = context as u32;
    Toy(Session { begins, context })
}

fn manifest(frames: usize, context: usize) -> Manifest {
    let tensor = |name, frames: usize| {
        TensorSpec::new(name, DType::U8, &[frames as u64, WIDE as u64]).unwrap()
    };
    let mut tensors = vec![tensor("x", frames)];
    if context > 0 {
        tensors.push(tensor("context", context));
    }
    Manifest::new(&tensors).unwrap()
}

pub(crate) type Frame = [u8; WIDE];

/// Frame `n` of the input.
fn frame(n: usize) -> Frame {
    std::array::from_fn(|i| (n * 31 + i * 7) as u8)
}

/// A frame and the frames before it, as stage b mixes them.
fn mixed(frame: &Frame, before: &VecDeque<Frame>) -> Frame {
    std::array::from_fn(|i| {
        let before = before.iter().enumerate();
        before.fold(frame[i], |sum, (age, old)| {
            sum.wrapping_add(old[i].wrapping_mul(age as u8 + 1))
        })
    })
}

fn remember(history: &mut VecDeque<Frame>, frame: Frame) {
    history.push_back(frame);
    if history.len() > CONTEXT {
        history.pop_front();
    }
}

/// What stage b makes of a byte on a later lap, and stage d of any.
fn again(byte: u8) -> u8 {
    byte.rotate_left(1)
}
fn plus(byte: u8) -> u8 {
    byte.wrapping_add(1)
}

/// What the chunks come out as.
pub(crate) fn expected(pipeline: &Pipeline, cuts: &[Cut]) -> Vec<Vec<Frame>> {
    let mut history = VecDeque::new();
    let laps = match pipeline.rings().first().map(|ring| ring.laps) {
        Some(pp_contract::pipeline::Laps::Fixed(laps)) => laps,
        _ => 1,
    };
    let between = &pipeline.stages()[1..pipeline.stages().len() - 1];
    let chunk = |(chunk, cut): (usize, &Cut)| {
        if *cut != Cut::None {
            history.clear();
        }
        let frames = (0..FRAMES).map(|f| frame(chunk * FRAMES + f));
        let make = |frame| {
            let mut out = frame;
            for (lap, stage) in (0..laps).flat_map(|lap| between.iter().map(move |s| (lap, s))) {
                out = match (&*stage.name, lap) {
                    ("b", 0) => mixed(&out, &history),
                    ("b", _) => out.map(again),
                    _ => out.map(plus),
                };
            }
            remember(&mut history, frame);
            out
        };
        frames.map(make).collect()
    };
    cuts.iter().enumerate().map(chunk).collect()
}

/// What became of the chunks.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// What the sink took.
    pub(crate) taken: Vec<(u64, Vec<Frame>)>,
    /// What the source was told that the sink has.
    pub(crate) accepted: Vec<u64>,
    /// What the source was told that a cut overtook.
    pub(crate) forgotten: Vec<u64>,
    /// How often a chunk was composed again.
    pub(crate) rebuilt: usize,
    /// How often the sink stored all.
    pub(crate) stored: usize,
}

/// The source: it brings context where it is asked to, and remembers what it needs for that.
pub(crate) struct Frames<'a> {
    cuts: Vec<Cut>,
    offered: usize,
    history: VecDeque<Frame>,
    pub(crate) seen: &'a Mutex<Seen>,
}

impl<'a> Frames<'a> {
    pub(crate) fn new(cuts: &[Cut], seen: &'a Mutex<Seen>) -> Self {
        Self {
            cuts: cuts.to_vec(),
            offered: 0,
            history: VecDeque::new(),
            seen,
        }
    }
}

/// Fills the context of a payload with the frames before it that are kept.
fn bring(
    tensors: &Manifest,
    kept: &dyn RetainedPayloads<TxLease>,
    slot: &mut TxLease,
) -> StageResult<()> {
    let range = tensors.range("context").expect("it has context");
    let context = range.len() / WIDE;
    for age in 0..context {
        let part = Part {
            from: ((FRAMES - 1 - age % FRAMES) * WIDE) as u64,
            to: (range.start + (context - 1 - age) * WIDE) as u64,
            bytes: WIDE as u64,
        };
        kept.copy(1 + age / FRAMES, &[part], slot)?;
    }
    Ok(())
}

impl Source<TxLease> for Frames<'_> {
    type Plan = Remember;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        let cut = self.cuts.get(self.offered).copied();
        self.offered += 1;
        Ok(cut.map_or(Offer::End, Offer::Chunk))
    }

    fn build(&mut self, place: Place, slot: &mut TxLease) -> StageResult<Built<Remember, ()>> {
        if place.starts_epoch {
            self.history.clear();
        }
        let context = match place.rebuilds {
            true => self.history.len(),
            false => 0,
        };
        let tensors = manifest(FRAMES, context);
        let bytes = slot.bytes_mut();
        bytes.fill(0xEE);
        if let Some(range) = tensors.range("context") {
            bytes[range].copy_from_slice(self.history.make_contiguous().as_flattened());
        }
        let first = place.chunk.get() as usize * FRAMES;
        for (f, out) in bytes[..FRAMES * WIDE].chunks_exact_mut(WIDE).enumerate() {
            out.copy_from_slice(&frame(first + f));
            remember(&mut self.history, frame(first + f));
        }
        let plan = session(place.rebuilds || place.chunk.get() == 0, context);
        Ok(Built {
            frames: FRAMES as u32,
            ..Built::new(plan, tensors, ())
        })
    }

    fn build_anew(
        &mut self,
        place: Place,
        kept: &dyn RetainedPayloads<TxLease>,
        slot: &mut TxLease,
    ) -> StageResult<Built<Remember, ()>> {
        let built = self.build(place, slot)?;
        assert_eq!(kept.inputs(0), None, "nothing was sent of it");
        if let Some(range) = built.tensors.range("context") {
            // What is kept takes the place of what it remembers.
            slot.bytes_mut()[range].fill(0xEE);
            bring(&built.tensors, kept, slot)?;
        }
        Ok(built)
    }

    fn rebuild(
        &mut self,
        place: Place,
        sent: &Message<Remember>,
        kept: &dyn RetainedPayloads<TxLease>,
        slot: &mut TxLease,
    ) -> StageResult<(Remember, Manifest)> {
        self.seen.lock().unwrap().rebuilt += 1;
        slot.bytes_mut().fill(0xEE);
        let of_sent = sent.plan().0.context as usize;
        if place.starts_epoch || of_sent > 0 {
            let (_, tensors) = send_as_it_was(sent, kept, slot)?;
            return Ok((session(true, of_sent), tensors));
        }
        // Every frame that is kept, newest first, as far as they are context.
        let kept_frames = |back| kept.inputs(back).map_or(0, |_| FRAMES);
        let all: usize = (1..).map(kept_frames).take_while(|f| *f > 0).sum();
        let context = all.min(CONTEXT);
        assert!(context > 0, "chunk {} without context", place.chunk);
        let tensors = manifest(FRAMES, context);
        let bytes = (FRAMES * WIDE) as u64;
        let whole = Part {
            from: 0,
            to: 0,
            bytes,
        };
        kept.copy(0, &[whole], slot)?;
        bring(&tensors, kept, slot)?;
        Ok((session(true, context), tensors))
    }

    fn accepted(
        &mut self,
        chunk: ChunkIndex,
        (): (),
        note: Option<&[u8]>,
    ) -> StageResult<Option<u64>> {
        let mut seen = self.seen.lock().unwrap();
        match note {
            // Also of what is accepted again.
            Some(note) => {
                assert_eq!(note, chunk.get().to_le_bytes());
                seen.accepted.push(chunk.get());
            }
            None => seen.forgotten.push(chunk.get()),
        }
        Ok(None)
    }
}

/// Stage b: it knows nothing until it is told to begin.
#[derive(Default)]
pub(crate) struct Mixer {
    history: Option<VecDeque<Frame>>,
}

impl Stage<TxLease, RxLease> for Mixer {
    type Plan = Remember;
    type Kept = Infallible;

    fn run(
        &mut self,
        chunk: Chunk<'_, Remember>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> StageResult<Progress<Done, Infallible>> {
        let (place, message) = (chunk.place, chunk.message);
        let (input, out) = (input.unwrap().bytes(), output.bytes_mut());
        let over = || Progress::Done(done(message, manifest(FRAMES, 0)));
        if place.lap > 0 {
            let bytes = out.iter_mut().zip(input);
            bytes.for_each(|(out, byte)| *out = again(*byte));
            return Ok(over());
        }
        let Session { begins, context } = message.plan().0;
        assert_eq!(message.tensors().get("context").is_some(), context > 0);
        if begins || place.starts_epoch {
            if self.history.is_none() && !begins {
                let text = format!(
                    "chunk {} is the first here and does not say so",
                    place.chunk
                );
                return Err(StageError::new(FaultKind::Plugin, "mix", text));
            }
            self.history = Some(VecDeque::new());
        }
        let history = self.history.as_mut().unwrap();
        if let Some(range) = message.tensors().range("context") {
            history.clear();
            let frames = input[range].chunks_exact(WIDE);
            history.extend(frames.map(|frame| Frame::try_from(frame).unwrap()));
        }
        let frames = input[..FRAMES * WIDE].chunks_exact(WIDE);
        for (frame, out) in frames.zip(out.chunks_exact_mut(WIDE)) {
            let frame = Frame::try_from(frame).unwrap();
            out.copy_from_slice(&mixed(&frame, history));
            remember(history, frame);
        }
        Ok(over())
    }
}

/// Asked so often before work on a device is done.
const LOOKS: u32 = 3;

/// Stage d, on a device.
struct Plus;

impl Stage<TxLease, RxLease> for Plus {
    type Plan = Remember;
    type Kept = (u32, Done);

    fn run(
        &mut self,
        chunk: Chunk<'_, Remember>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> StageResult<Progress<Done, Self::Kept>> {
        let bytes = output.bytes_mut().iter_mut().zip(input.unwrap().bytes());
        bytes.for_each(|(out, byte)| *out = plus(*byte));
        let done = done(chunk.message, manifest(FRAMES, 0));
        Ok(Progress::UnderWay((LOOKS, done)))
    }

    fn poll(&mut self, (left, done): Self::Kept) -> StageResult<Progress<Done, Self::Kept>> {
        Ok(match left {
            0 => Progress::Done(done),
            _ => Progress::UnderWay((left - 1, done)),
        })
    }
}

/// The sink: it takes nothing twice.
pub(crate) struct Keeper<'a> {
    pub(crate) seen: &'a Mutex<Seen>,
    /// It looks so often before it has a chunk.
    pub(crate) looks: u32,
    epoch: Option<CacheEpoch>,
}

impl<'a> Keeper<'a> {
    pub(crate) fn new(seen: &'a Mutex<Seen>, looks: u32) -> Self {
        let epoch = None;
        Self { seen, looks, epoch }
    }
}

impl Sink<RxLease> for Keeper<'_> {
    type Plan = Remember;
    type Kept = (u32, Taken);

    fn take(
        &mut self,
        chunk: Chunk<'_, Remember>,
        input: Option<&RxLease>,
    ) -> StageResult<Progress<Taken, Self::Kept>> {
        let (place, index) = (chunk.place, chunk.place.chunk.get());
        assert_eq!(place.starts_epoch, self.epoch != Some(place.epoch));
        self.epoch = Some(place.epoch);
        let frames = input.unwrap().bytes().chunks_exact(WIDE);
        let frames = frames.map(|frame| frame.try_into().unwrap()).collect();
        self.seen.lock().unwrap().taken.push((index, frames));
        let taken = Taken {
            note: index.to_le_bytes().into(),
            ..Taken::of(chunk.message.plan(), 1)
        };
        Ok(match self.looks {
            0 => Progress::Done(taken),
            looks => Progress::UnderWay((looks, taken)),
        })
    }

    fn poll(&mut self, (left, taken): Self::Kept) -> StageResult<Progress<Taken, Self::Kept>> {
        Ok(match left {
            0 => Progress::Done(taken),
            _ => Progress::UnderWay((left - 1, taken)),
        })
    }

    fn finish(&mut self) -> StageResult<()> {
        self.seen.lock().unwrap().stored += 1;
        Ok(())
    }
}

/// The stages of a rank: a is [`Frames`], b [`Mixer`], c [`Keeper`], which works on a device where the chunks are to
/// stay with it for a while.
pub(crate) fn stages<'a>(
    pipeline: &Pipeline,
    rank: Rank,
    cuts: &[Cut],
    seen: &'a Mutex<Seen>,
) -> Stages<'a, TxLease, RxLease, HostGroup, Frames<'a>> {
    let source = Frames::new(cuts, seen);
    let mut stages = Stages::new((rank == Rank::new(0)).then_some(source));
    for (_, stage) in pipeline.stages_at(rank) {
        match &*stage.name {
            "a" => {}
            "b" => stages.push(BoxedStage::new(Mixer::default())),
            "c" => stages.push(BoxedStage::sink(Keeper::new(seen, LOOKS))),
            _ => stages.push(BoxedStage::new(Plus)),
        }
    }
    stages
}
