//! Stages that remember, and what they ought to make of a clip.

use std::collections::VecDeque;
use std::convert::Infallible;

use pp_contract::{ChunkIndex, DType, Envelope, FaultKind, Manifest, Outcome, TensorSpec};
use pp_runtime::core::Cut;
use pp_runtime::stage::{
    Built, Computed, Decoded, FrontStages, Offer, PhaseBStages, Place, Progress, RetainedPayloads,
    StageError, send_as_it_was,
};
use pp_testing::{Toy, ToyParts, computed};
use pp_transport::host::{RxLease, TxLease};
use pp_transport::in_flight::Part;
use serde::{Deserialize, Serialize};

/// Frames of a chunk, and bytes of a frame.
const FRAMES: usize = 2;
const WIDE: usize = 10;
/// Frames that Phase B remembers: more than a chunk has.
const CONTEXT: usize = 3;
pub(crate) const CONTEXT_CHUNKS: u32 = 2;

/// First chunk of a session, and how many frames of context come with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Session {
    begins: bool,
    context: u32,
}

impl ToyParts for Session {
    fn expected_calls(&self) -> u32 {
        1 + u32::from(self.context > 0)
    }
}

pub(crate) type Remember = Toy<Session>;

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

/// A frame and the frames before it, as Phase B mixes them.
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

/// What the chunks come out as.
pub(crate) fn expected(cuts: &[Cut]) -> Vec<Vec<Frame>> {
    let mut history = VecDeque::new();
    let chunk = |(chunk, cut): (usize, &Cut)| {
        if *cut != Cut::None {
            history.clear();
        }
        let frames = (0..FRAMES).map(|f| frame(chunk * FRAMES + f));
        let mix = |frame| {
            let out = mixed(&frame, &history);
            remember(&mut history, frame);
            out
        };
        frames.map(mix).collect()
    };
    cuts.iter().enumerate().map(chunk).collect()
}

/// The front: it brings context where it is asked to, and remembers what it needs for that.
pub(crate) struct Front {
    cuts: Vec<Cut>,
    offered: usize,
    history: VecDeque<Frame>,
    pub(crate) emitted: Vec<(u64, Vec<Frame>)>,
    pub(crate) forgotten: Vec<u64>,
    /// How often a chunk was composed again.
    pub(crate) rebuilt: usize,
}

impl Front {
    pub(crate) fn new(cuts: &[Cut]) -> Self {
        Self {
            cuts: cuts.to_vec(),
            offered: 0,
            history: VecDeque::new(),
            emitted: Vec::new(),
            forgotten: Vec::new(),
            rebuilt: 0,
        }
    }
}

fn envelope(begins: bool, context: usize) -> Envelope<Remember> {
    let session = Session {
        begins,
        context: context as u32,
    };
    Envelope::new(Toy(session), manifest(FRAMES, context), manifest(FRAMES, 0)).unwrap()
}

impl FrontStages<TxLease, RxLease> for Front {
    type Plan = Remember;
    type Carry = ();
    type Decoding = Infallible;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        let cut = self.cuts.get(self.offered).copied();
        self.offered += 1;
        Ok(cut.map_or(Offer::End, Offer::Chunk))
    }

    fn build(
        &mut self,
        place: Place,
        slot: &mut TxLease,
    ) -> Result<Built<Remember, ()>, StageError> {
        if place.starts_epoch {
            self.history.clear();
        }
        let context = if place.rebuilds {
            self.history.len()
        } else {
            0
        };
        let envelope = envelope(place.rebuilds || place.chunk.get() == 0, context);
        let bytes = slot.bytes_mut();
        bytes.fill(0xEE);
        if let Some(range) = envelope.inputs().range("context") {
            bytes[range].copy_from_slice(self.history.make_contiguous().as_flattened());
        }
        let first = place.chunk.get() as usize * FRAMES;
        for (f, out) in bytes[..FRAMES * WIDE].chunks_exact_mut(WIDE).enumerate() {
            out.copy_from_slice(&frame(first + f));
            remember(&mut self.history, frame(first + f));
        }
        Ok(Built {
            frames: FRAMES as u32,
            ..Built::new(envelope, ())
        })
    }

    fn rebuild(
        &mut self,
        place: Place,
        sent: &Envelope<Remember>,
        kept: &dyn RetainedPayloads<TxLease>,
        slot: &mut TxLease,
    ) -> Result<Envelope<Remember>, StageError> {
        self.rebuilt += 1;
        slot.bytes_mut().fill(0xEE);
        let of_sent = sent.plan().0.context as usize;
        if place.starts_epoch || of_sent > 0 {
            send_as_it_was(sent, kept, slot)?;
            return Ok(envelope(true, of_sent));
        }
        // Every frame that is kept, newest first, as far as they are context.
        let kept_frames = |back| kept.inputs(back).map_or(0, |_| FRAMES);
        let all: usize = (1..).map(kept_frames).take_while(|f| *f > 0).sum();
        let context = all.min(CONTEXT);
        assert!(context > 0, "chunk {} without context", place.chunk);
        let envelope = envelope(true, context);
        let bytes = (FRAMES * WIDE) as u64;
        let whole = Part {
            from: 0,
            to: 0,
            bytes,
        };
        kept.copy(0, &[whole], slot)?;
        let to = envelope.inputs().range("context").unwrap().start;
        for age in 0..context {
            let part = Part {
                from: ((FRAMES - 1 - age % FRAMES) * WIDE) as u64,
                to: (to + (context - 1 - age) * WIDE) as u64,
                bytes: WIDE as u64,
            };
            kept.copy(1 + age / FRAMES, &[part], slot)?;
        }
        Ok(envelope)
    }

    fn decode(
        &mut self,
        chunk: ChunkIndex,
        (): (),
        _: &Outcome,
        payload: Option<RxLease>,
    ) -> Result<Progress<Decoded, Infallible>, StageError> {
        let payload = payload.unwrap();
        let frames = payload.bytes().chunks_exact(WIDE);
        let frames = frames.map(|frame| frame.try_into().unwrap()).collect();
        self.emitted.push((chunk.get(), frames));
        Ok(Progress::Done(Decoded::default()))
    }

    fn forget(&mut self, chunk: ChunkIndex, (): ()) {
        self.forgotten.push(chunk.get());
    }
}

/// Phase B: it knows nothing until it is told to begin.
#[derive(Default)]
pub(crate) struct Mixer {
    history: Option<VecDeque<Frame>>,
}

impl PhaseBStages<TxLease, RxLease> for Mixer {
    type Plan = Remember;
    type Computing = Infallible;

    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<Remember>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> Result<Progress<Computed, Infallible>, StageError> {
        let Session { begins, context } = envelope.plan().0;
        assert_eq!(envelope.inputs().get("context").is_some(), context > 0);
        let input = input.unwrap().bytes();
        if begins || place.starts_epoch {
            if self.history.is_none() && !begins {
                let text = format!(
                    "chunk {} is the first here and does not say so",
                    place.chunk
                );
                return Err(StageError::new(FaultKind::Plugin, "phase_b", text));
            }
            self.history = Some(VecDeque::new());
        }
        let history = self.history.as_mut().unwrap();
        if let Some(range) = envelope.inputs().range("context") {
            history.clear();
            let frames = input[range].chunks_exact(WIDE);
            history.extend(frames.map(|frame| Frame::try_from(frame).unwrap()));
        }
        let out = output.bytes_mut();
        let frames = input[..FRAMES * WIDE].chunks_exact(WIDE);
        for (frame, out) in frames.zip(out.chunks_exact_mut(WIDE)) {
            let frame = Frame::try_from(frame).unwrap();
            out.copy_from_slice(&mixed(&frame, history));
            remember(history, frame);
        }
        Ok(Progress::Done(computed(envelope.plan())))
    }
}
