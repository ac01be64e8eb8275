//! The world around both cores: two lanes, slots, stages, a source, a drain, deaths.
//!
//! It delivers frames and carries out actions one at a time, in whatever order the walk chooses.
//! What must never be is looked for at each step, and the panic names the property.

mod check;
mod hear;

use std::collections::VecDeque;

use pp_contract::{CacheEpoch, ChunkIndex};
use pp_runtime::core::{Cut, Facts, FrontAction, FrontCore, PhaseBAction, PhaseBCore};

use self::check::hold;

/// How small this world is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) depth: u32,
    /// Slots of each edge, but for those that are kept.
    pub(crate) slots: u32,
    /// Chunks before one that Phase B has to remember.
    pub(crate) context: usize,
    pub(crate) restarts: u32,
    pub(crate) may_drain: bool,
}

/// What goes to Phase B for one chunk.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Call {
    chunk: u64,
    epoch: CacheEpoch,
    /// The first chunk of a session, with these chunks as its context.
    begins: Option<Vec<u64>>,
}

/// A call whose payload lies in a slot of the front, of this generation.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Held {
    call: Call,
    generation: u32,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Frame {
    Call(Call),
    Answer(u64, CacheEpoch),
    Shutdown,
}

/// A result whose header is at the front.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Returned {
    chunk: u64,
    epoch: CacheEpoch,
    generation: u32,
    is_whole: bool,
}

/// Phase B: its core, and what its stage remembers.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Back {
    core: PhaseBCore<Call, (u64, CacheEpoch)>,
    /// Epoch and chunks it remembers; `None` before its first chunk.
    memory: Option<(CacheEpoch, Vec<u64>)>,
    free_slots: u32,
    finished: bool,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    /// The record of a chunk is its index.
    front: FrontCore<u64, u64>,
    back: Back,
    to_back: VecDeque<Frame>,
    to_front: VecDeque<Frame>,
    generation: u32,
    /// Payloads of calls without an accepted result, oldest first.
    held: VecDeque<Held>,
    /// Payloads that are context, oldest first.
    kept: VecDeque<Held>,
    script: VecDeque<Cut>,
    offered: Cut,
    may_drain: bool,
    restarts: u32,
    /// First chunk of each epoch that has left the front, and its number.
    epochs: Vec<(u64, CacheEpoch)>,
    /// Epoch of the last hard cut that has left the front.
    oldest: CacheEpoch,
    /// Last call that went over this link.
    last_call: Option<(u64, CacheEpoch)>,
    returned: VecDeque<Returned>,
    accepted: Vec<u64>,
    emitted: Vec<u64>,
    dropped: Vec<u64>,
    finished: bool,
}

impl World {
    pub(crate) fn new(shape: Shape, script: &[Cut]) -> Self {
        Self {
            front: FrontCore::new(shape.depth),
            back: Back::new(shape),
            to_back: VecDeque::new(),
            to_front: VecDeque::new(),
            generation: 0,
            held: VecDeque::new(),
            kept: VecDeque::new(),
            script: script.iter().copied().collect(),
            offered: Cut::None,
            may_drain: shape.may_drain,
            restarts: shape.restarts,
            epochs: Vec::new(),
            oldest: CacheEpoch::new(0),
            last_call: None,
            returned: VecDeque::new(),
            accepted: Vec::new(),
            emitted: Vec::new(),
            dropped: Vec::new(),
            finished: false,
        }
    }

    /// All worlds one step away.
    pub(crate) fn next(&self, shape: Shape) -> Vec<Self> {
        let mut worlds = Vec::new();
        let mut add = |step: &dyn Fn(&mut Self)| {
            let mut next = self.clone();
            step(&mut next);
            worlds.push(next);
        };
        if !self.finished && self.front.wants_offer() {
            add(&|w| match w.script.pop_front() {
                Some(cut) => {
                    w.offered = cut;
                    w.front.handle_offer(cut);
                }
                None => w.front.handle_source_end(),
            });
        }
        if self.may_drain {
            add(&|w| {
                w.may_drain = false;
                w.front.handle_drain();
            });
        }
        if self.restarts > 0 && !self.finished && !self.back.finished {
            add(&|w| {
                w.lose_phase_b(shape);
            });
        }
        let is_here = self.returned.iter().all(|result| result.is_whole);
        if self.front.is_served() && is_here && !self.finished && !self.back.finished {
            add(&|w| {
                w.let_phase_b_go();
            });
        }
        // The sink may or may not be ready at this moment.
        for sink_ready in [true, false] {
            let action = self.front.poll(self.facts(shape, sink_ready));
            if action != FrontAction::Wait && !self.finished {
                add(&|w| w.act_front(shape, action));
            }
        }
        let action = self.back.core.poll(self.back.free_slots > 0);
        if action != PhaseBAction::Wait && !self.back.finished {
            add(&|w| w.act_back(shape, action));
        }
        // A device may end its work at any moment.
        if self.back.core.computing() > 0 {
            add(&|w| {
                let (chunk, epoch) = w.back.core.take_computing().unwrap();
                w.to_front.push_back(Frame::Answer(chunk, epoch));
            });
        }
        if self.front.decoding() > 0 {
            add(&|w| {
                w.emitted.push(w.front.take_decoding().unwrap());
                w.front.handle_decoded();
            });
        }
        if self.returned.iter().any(|result| !result.is_whole) {
            add(&|w| w.payload_arrives(shape));
        }
        if !self.to_back.is_empty() {
            add(&Self::hear_back);
        }
        if !self.to_front.is_empty() {
            add(&|w| w.hear_front(shape));
        }
        worlds
    }

    fn facts(&self, shape: Shape, sink_ready: bool) -> Facts {
        let is_whole = self.returned.front().is_some_and(|result| result.is_whole);
        Facts {
            credit: self.free_slots(shape) > 0,
            sink_ready: sink_ready && is_whole,
        }
    }

    fn slots(shape: Shape) -> u32 {
        let kept = if shape.restarts > 0 {
            shape.context as u32
        } else {
            0
        };
        shape.slots + kept
    }

    /// Slots of this generation that payloads lie in.
    fn in_use(&self) -> u32 {
        let here = |held: &&Held| held.generation == self.generation;
        self.held.iter().chain(&self.kept).filter(here).count() as u32
    }

    fn free_slots(&self, shape: Shape) -> u32 {
        Self::slots(shape).saturating_sub(self.in_use())
    }

    fn is_draining(&self, shape: Shape) -> bool {
        shape.may_drain && !self.may_drain
    }

    /// The newest epoch that has left the front.
    fn newest(&self) -> CacheEpoch {
        let newest = self.epochs.last().map(|(_, epoch)| *epoch);
        newest.unwrap_or(CacheEpoch::new(0))
    }

    pub(super) fn starts_epoch(&self, chunk: u64) -> bool {
        self.epochs.iter().any(|(first, _)| *first == chunk)
    }

    /// The chunks that Phase B must remember when it begins with this one.
    fn context_of(&self, shape: Shape, chunk: u64) -> Vec<u64> {
        let start = self.epochs.iter().rev().find(|(first, _)| *first <= chunk);
        let start = start.map_or(0, |(first, _)| *first);
        (start.max(chunk.saturating_sub(shape.context as u64))..chunk).collect()
    }

    fn act_front(&mut self, shape: Shape, action: FrontAction) {
        match action {
            FrontAction::Build {
                chunk,
                epoch,
                starts_epoch,
                rebuilds,
            } => {
                let chunk = chunk.get();
                hold(!self.is_draining(shape), "a drain admits nothing", || {
                    format!("chunk {chunk}")
                });
                if starts_epoch {
                    self.epochs.push((chunk, epoch));
                    if self.offered == Cut::Hard {
                        self.oldest = epoch;
                    }
                }
                let begins = (rebuilds || chunk == 0).then(|| self.context_of(shape, chunk));
                let call = Call {
                    chunk,
                    epoch,
                    begins,
                };
                self.front.handle_sent(ChunkIndex::new(chunk), epoch, chunk);
                self.send(shape, call)
            }
            FrontAction::SendAgain { rebuilds } => {
                let chunk = *self.front.handle_sent_again();
                let at = |held: &Held| held.call.chunk == chunk;
                let at = self.held.iter().position(at);
                let at = at.expect("a lost chunk is held");
                let mut call = self.held.remove(at).unwrap().call;
                if rebuilds && call.begins.is_none() {
                    // From what is kept, and from nothing else.
                    let kept = self.kept.iter().map(|held| held.call.chunk);
                    let starts_epoch = self.starts_epoch(chunk);
                    call.begins = Some(kept.filter(|_| !starts_epoch).collect());
                }
                self.send(shape, call)
            }
            FrontAction::Decode => {
                let chunk = self.front.begin_decode();
                let result = self.take_returned(chunk);
                hold(result.is_whole, "only whole results are decoded", || {
                    format!("{result:?}")
                });
                hold(
                    result.epoch >= self.oldest,
                    "nothing is decoded that a hard cut overtook",
                    || format!("{result:?}"),
                );
                self.front.handle_decoding(chunk);
            }
            FrontAction::Drop => {
                let chunk = self.front.handle_dropped();
                // A stale chunk that went down with Phase B comes back with nothing.
                if self.returned.front().map(|result| result.chunk) == Some(chunk) {
                    self.take_returned(chunk);
                }
                self.held.retain(|held| held.call.chunk != chunk);
                self.dropped.push(chunk);
            }
            FrontAction::SendShutdown => {
                self.to_back.push_back(Frame::Shutdown);
                self.front.handle_shutdown_sent();
            }
            FrontAction::Finish => {
                self.finished = true;
            }
            FrontAction::Wait => unreachable!(),
        }
    }

    fn take_returned(&mut self, chunk: u64) -> Returned {
        let result = self.returned.pop_front();
        let is_next = result.as_ref().is_some_and(|r| r.chunk == chunk);
        hold(is_next, "results are taken in order", || {
            format!("chunk {chunk}, found {result:?}")
        });
        let result = result.unwrap();
        if result.generation == self.generation {
            self.back.free_slots += 1;
        }
        result
    }

    /// A call leaves, in a slot of this link.
    fn send(&mut self, shape: Shape, call: Call) {
        hold(
            self.in_use() < Self::slots(shape),
            "a slot has one payload at a time",
            || format!("{call:?} while {} are in use", self.in_use()),
        );
        hold(
            call.epoch >= self.oldest,
            "nothing is sent that a hard cut overtook",
            || format!("{call:?} behind epoch {}", self.oldest),
        );
        let follows = self
            .last_call
            .is_none_or(|(chunk, epoch)| chunk < call.chunk && epoch <= call.epoch);
        hold(follows, "calls go in order", || {
            format!("{call:?} after {:?}", self.last_call)
        });
        hold(
            !self.accepted.contains(&call.chunk),
            "nothing is computed again that was accepted",
            || format!("{call:?}"),
        );
        self.last_call = Some((call.chunk, call.epoch));
        self.to_back.push_back(Frame::Call(call.clone()));
        let held = Held {
            call,
            generation: self.generation,
        };
        // In the order of the chunks, whether they were lost or not.
        let at = self
            .held
            .iter()
            .position(|h| h.call.chunk > held.call.chunk);
        self.held.insert(at.unwrap_or(self.held.len()), held);
    }

    fn act_back(&mut self, shape: Shape, action: PhaseBAction) {
        match action {
            PhaseBAction::Compute => {
                let call = self.back.core.begin_compute();
                hold(
                    self.held.iter().any(|h| h.call.chunk == call.chunk),
                    "a payload is there until it is read",
                    || format!("{call:?}"),
                );
                self.remember(shape, &call);
                self.back.free_slots -= 1;
                self.back.core.handle_computing((call.chunk, call.epoch));
            }
            PhaseBAction::AnswerShutdown => {
                self.to_front.push_back(Frame::Shutdown);
                self.back.core.handle_shutdown_answered();
            }
            PhaseBAction::Finish => self.back.finished = true,
            PhaseBAction::Wait => unreachable!(),
        }
    }

    /// Phase B's stage: it must know the chunks before this one.
    fn remember(&mut self, shape: Shape, call: &Call) {
        let mut memory = match (&call.begins, self.back.memory.take()) {
            (Some(context), _) => context.clone(),
            (None, Some((epoch, memory))) if epoch == call.epoch => memory,
            (None, Some(_)) => Vec::new(),
            (None, None) => vec![u64::MAX],
        };
        let wanted = self.context_of(shape, call.chunk);
        hold(
            memory == wanted,
            "a chunk is computed with what came before it",
            || format!("{call:?} with {memory:?}, not {wanted:?}"),
        );
        memory.push(call.chunk);
        let first = memory.len().saturating_sub(shape.context);
        self.back.memory = Some((call.epoch, memory.split_off(first)));
    }
}

impl Back {
    fn new(shape: Shape) -> Self {
        Self {
            core: PhaseBCore::new(shape.depth),
            memory: None,
            free_slots: shape.slots,
            finished: false,
        }
    }
}
