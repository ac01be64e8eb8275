//! Ranks, the edges between them, and what may happen next.
//!
//! Each rank is a [`RankCore`], and around it as little as the driver does: slots, payloads that arrive later than their
//! headers, devices. What must never be is looked for at each step, and the panic names the property.

mod act;
mod check;
mod fixed;
mod group;
mod hear;
mod lose;
mod mix;
mod steps;

use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};
use std::convert::Infallible;
use std::hash::{Hash, Hasher};
use std::rc::Rc;

use pp_contract::pipeline::{EdgeKind, Laps};
use pp_contract::{CacheEpoch, ChunkIndex, Pipeline, Rank};
use pp_runtime::core::{
    Cut, Decision, EndEvent, Ending, FixedOrder, LAP, LocalStage, ONWARD, RankCore, Sends,
    StageFacts, Ticket, Wire, stages_of,
};

use self::check::hold;
pub(crate) use self::mix::print_of;

/// When work and transfers are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// At once.
    None,
    /// The work of each stage in the order in which it began, at any later moment. Transfers at once.
    Working,
    /// A payload arrives at any moment after its header. Work is done at once.
    Moving,
    /// Both.
    Both,
    /// Work and transfers of a rank one at a time, in the order in which they were issued.
    InOrder,
}

/// Payloads that the source keeps as context once the sink has their chunks, where a rank may die.
const CONTEXT: usize = 1;

/// A case.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) pipeline: Pipeline,
    pub(crate) depth: u8,
    pub(crate) device: Device,
    pub(crate) deaths: u8,
    pub(crate) may_drain: bool,
    pub(crate) may_abort: bool,
    pub(crate) script: Vec<Cut>,
    /// By rank; none in a stream.
    pub(crate) orders: Vec<FixedOrder>,
    /// Slots of the edges, where they are not as many as the depth.
    pub(crate) slots: Option<u8>,
}

impl Shape {
    /// Slots of the outputs of a stage.
    fn slots(&self, at: usize, is_local: bool) -> u8 {
        // The source keeps what it sent, also as context. What it sends again goes into another slot, and those of a
        // rank are never new.
        let keeps = at == 0 && self.deaths > 0;
        let kept = if keeps { CONTEXT as u8 } else { 0 };
        let slots = self.slots.filter(|_| !is_local).unwrap_or(self.depth);
        slots + kept + u8::from(keeps && is_local)
    }

    fn epoch_of(&self, chunk: u64) -> u64 {
        let cuts = self.script[1..=chunk as usize].iter();
        cuts.filter(|cut| **cut != Cut::None).count() as u64
    }

    fn laps(&self, at: usize) -> u16 {
        match self.pipeline.ring_at(at).map(|ring| ring.laps) {
            Some(Laps::Fixed(laps)) => laps,
            _ => 1,
        }
    }

    fn may_die(&self, rank: usize) -> bool {
        rank != 0 && Rank::new(rank as u32) != self.pipeline.sink()
    }
}

/// A slot that a payload lies in: its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Pool {
    None,
    Local { stage: usize, output: usize },
    Edge { edge: usize, generation: u8 },
}

/// What goes over an edge or from stage to stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Message {
    chunk: u64,
    epoch: u64,
    attempt: u16,
    /// The lap in which the stage that gets it works on it.
    lap: u16,
    is_stale: bool,
    /// The plan brings what a stage must know of the chunks before.
    rebuilds: bool,
    /// Where its payload lies.
    slot: Pool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Frame {
    Infer(Message),
    Shutdown,
}

/// A chunk that waits before a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Waiting {
    message: Message,
    is_here: bool,
}

/// A chunk that a stage works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Working {
    message: Message,
    /// The slot that it writes.
    output: Pool,
    /// It is done. A leader waits for the reports of the other members.
    is_done: bool,
}

/// The payload of a chunk that the source sent, where a rank may die.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kept {
    chunk: u64,
    attempt: u16,
    slot: Pool,
    is_released: bool,
}

/// One transfer of a payload.
type Transfer = (usize, u64, u16, u16);

/// What a device does that does one thing at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Operation {
    Send(Transfer),
    Receive(Transfer),
    Work(usize),
}

/// The chunk that a stage worked on last, in one lap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Seen {
    attempt: u16,
    epoch: u64,
    chunk: u64,
}

#[derive(Clone, Hash)]
struct Node {
    /// The source's record of a chunk is its epoch.
    core: RankCore<(u64, u64), Waiting, Working>,
    /// What each stage remembers, by lap.
    seen: Vec<Vec<Option<Seen>>>,
    /// Whether the oldest chunk of each input is here.
    is_here: Vec<[bool; 2]>,
    /// Where its payload will lie, if the rank asks for it and it is not here.
    asked: Vec<[Pool; 2]>,
    /// Whether a hard cut overtook it, as far as the rank knows.
    is_stale: Vec<[bool; 2]>,
    /// Free slots of the outputs to stages of the same rank.
    free: Vec<[u8; 2]>,
    kept: Vec<Kept>,
    /// Chunks that the sink has, and whose payloads are kept.
    context: VecDeque<u64>,
    operations: VecDeque<Operation>,
    /// A collective of this stage, which blocks the rank until all members are inside.
    inside: Option<(usize, Ticket, Working)>,
    /// Of other members, by their edges: chunk and attempt.
    reports: VecDeque<(usize, u64, u16)>,
    /// The epoch of the newest hard cut that it knows of.
    told: u64,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Running,
    /// It has dropped its edges, and waits for all ranks to meet. If the rank of the source has finished it leaves.
    Waiting,
    Finished,
}

/// A rank of one world or of several.
#[derive(Clone)]
struct Shared {
    node: Rc<Node>,
    /// The hash of the node.
    print: u64,
}

impl Hash for Shared {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.print);
    }
}

/// One edge.
#[derive(Clone, Hash)]
struct Lane {
    queue: VecDeque<Frame>,
    free: u8,
    /// The payloads that its sender has sent: chunk and lap.
    sends: Sends<(u64, u16)>,
    /// Those of them whose slots are back.
    back: BTreeSet<(u64, u16)>,
    /// How often it was made anew.
    generation: u8,
    /// Messages that its reader has taken in.
    heard: usize,
    /// Its reader is there.
    is_open: bool,
    is_closed: bool,
    /// By lap the chunk of the newest message.
    last: Vec<Option<u64>>,
    /// Headers that are here, and whose payloads are not.
    arriving: u8,
    /// Chunk and attempt of what the leader of a group has begun, and this member of it has not.
    begun: VecDeque<(u64, u16)>,
}

#[derive(Clone, Hash)]
pub(crate) struct World {
    /// `None` while a rank is replaced.
    ranks: Vec<Option<Shared>>,
    lanes: Vec<Lane>,
    offered: usize,
    has_drained: bool,
    deaths: u8,
    /// Ranks that have not heard of a loss.
    unaware: Vec<bool>,
    /// Hard cuts that began, by their epochs.
    hard: Vec<u64>,
    /// Those before are told no more.
    told: usize,
    has_aborted: bool,
    taken: Vec<u64>,
    /// What the sink remembers that it said, where a rank may die.
    said: VecDeque<(u64, bool)>,
    accepted: u64,
    /// Turns that each rank has taken, in a fixed order.
    turns: Vec<usize>,
    /// Transfers whose send is done.
    sent: BTreeSet<Transfer>,
}

/// What may happen.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Offer,
    Drain,
    /// A rank hears of a hard cut.
    Tell {
        rank: usize,
        epoch: u64,
    },
    /// A rank does this, where the sink is ready or not.
    Act(usize, bool, Decision),
    Hear {
        edge: usize,
    },
    Arrive {
        edge: usize,
    },
    FinishWork {
        rank: usize,
        stage: usize,
    },
    Operate {
        rank: usize,
    },
    /// A rank dies.
    Lose {
        rank: usize,
    },
    /// The job is aborted: every rank is to hear of it.
    Abort,
    /// A rank hears of the loss or the abort.
    HearLoss {
        rank: usize,
    },
    /// All ranks meet, with another process for each that died.
    Meet,
    /// A rank hears that the source needs no other.
    HearServed {
        rank: usize,
    },
    /// A rank that waits hears that the rank of the source has finished.
    Leave {
        rank: usize,
    },
}

/// What is the same in all worlds of a case.
pub(crate) struct Map {
    pub(crate) shape: Shape,
    places: Vec<Vec<LocalStage>>,
    edges: Vec<pp_contract::pipeline::EdgeSpec>,
}

impl Map {
    pub(crate) fn new(shape: Shape) -> Self {
        let ranks = 0..shape.pipeline.world_size().get();
        let places = ranks.map(|rank| stages_of(&shape.pipeline, Rank::new(rank)));
        Self {
            places: places.collect(),
            edges: shape.pipeline.edges().collect(),
            shape,
        }
    }

    fn node(&self, rank: usize) -> Node {
        let places = &self.places[rank];
        let slots = |stage: &LocalStage| {
            let slots = self.shape.slots(stage.at, true);
            // A stage that is a ring of its own writes into one slot while it reads another one.
            let ring = self.shape.pipeline.ring_at(stage.at);
            let is_alone = ring.is_some_and(|ring| ring.first == ring.last);
            [slots, slots + u8::from(is_alone)]
        };
        let mut core = RankCore::new(places.clone(), self.shape.depth.into());
        if self.shape.deaths > 0 {
            core = core.with_restarts();
        }
        if let Some(order) = self.shape.orders.get(rank) {
            core = core.in_order(order);
        }
        Node {
            core,
            seen: places
                .iter()
                .map(|stage| vec![None; usize::from(self.shape.laps(stage.at))])
                .collect(),
            is_here: vec![[false; 2]; places.len()],
            asked: vec![[Pool::None; 2]; places.len()],
            is_stale: vec![[false; 2]; places.len()],
            free: places.iter().map(slots).collect(),
            kept: Vec::new(),
            context: VecDeque::new(),
            operations: VecDeque::new(),
            inside: None,
            reports: VecDeque::new(),
            told: 0,
            phase: Phase::Running,
        }
    }

    fn lane(&self, edge: usize, generation: u8) -> Lane {
        let edge = &self.edges[edge];
        let laps = self.shape.laps(edge.from).max(self.shape.laps(edge.to));
        Lane {
            queue: VecDeque::new(),
            free: self.shape.slots(edge.from, false),
            sends: Sends::default(),
            back: BTreeSet::new(),
            generation,
            heard: 0,
            is_open: true,
            is_closed: false,
            last: vec![None; laps.into()],
            arriving: 0,
            begun: VecDeque::new(),
        }
    }

    fn has_payloads(&self, edge: usize) -> bool {
        matches!(self.edges[edge].kind, EdgeKind::Onward | EdgeKind::Lap)
    }

    /// Rank, stage and input that an edge leads to.
    fn target(&self, edge: usize) -> (usize, usize, usize) {
        let rank = self.edges[edge].target.get() as usize;
        if self.edges[edge].kind == EdgeKind::Report {
            return (rank, self.place(rank, self.edges[edge].to), ONWARD);
        }
        let to = self.places[rank].iter().enumerate();
        let mut to = to.flat_map(|(stage, place)| [(stage, ONWARD, place), (stage, LAP, place)]);
        let found = to.find(|(_, input, place)| place.inputs[*input] == Wire::Edge(edge));
        let (stage, input, _) = found.expect("an edge leads to a stage");
        (rank, stage, input)
    }
}

impl Shared {
    fn new(node: Node) -> Self {
        let mut shared = Self {
            node: Rc::new(node),
            print: 0,
        };
        shared.settle();
        shared
    }

    /// What follows from the rest of a node that changed.
    fn settle(&mut self) {
        let node = Rc::make_mut(&mut self.node);
        for stage in 0..node.is_here.len() {
            for input in [ONWARD, LAP] {
                let oldest = node.core.oldest_waiting(stage, input);
                let oldest = oldest.map(|oldest| (oldest.is_here, oldest.message));
                node.is_here[stage][input] = oldest.is_some_and(|(is_here, _)| is_here);
                let asked = oldest.filter(|(is_here, _)| !is_here);
                node.asked[stage][input] = asked.map_or(Pool::None, |(_, message)| message.slot);
                node.is_stale[stage][input] = oldest
                    .is_some_and(|(_, message)| message.is_stale || message.epoch < node.told);
            }
        }
        // As the driver does before it asks its core. Once there is a fault, it is too late.
        let is_needed = node.core.ending() < Ending::Served;
        if is_needed && node.core.has_heard_sink() && node.core.is_served(|w| w.is_here) {
            node.core.handle_end(EndEvent::Serve);
        }
        self.print = print_of(node);
    }
}

impl Lane {
    /// Looks for a slot that is back, as the driver does before it asks its core.
    fn settle(&mut self) {
        if self.back.is_empty() {
            return;
        }
        let free = Cell::new(self.free);
        let is_done = |send: &(u64, u16)| {
            let is_back = self.back.remove(send);
            free.set(free.get() + u8::from(is_back));
            Ok::<bool, Infallible>(is_back)
        };
        let lease = || Ok((free.get() > 0).then_some(()));
        let Ok(_) = self.sends.lease(is_done, lease);
        self.free = free.get();
    }
}

impl World {
    pub(crate) fn new(map: &Map) -> Self {
        let ranks = 0..map.places.len();
        Self {
            ranks: ranks
                .map(|rank| Some(Shared::new(map.node(rank))))
                .collect(),
            lanes: (0..map.edges.len()).map(|edge| map.lane(edge, 0)).collect(),
            offered: 0,
            has_drained: false,
            deaths: 0,
            unaware: vec![false; map.places.len()],
            hard: Vec::new(),
            told: 0,
            has_aborted: false,
            taken: Vec::new(),
            said: VecDeque::new(),
            accepted: 0,
            turns: vec![0; map.shape.orders.len()],
            sent: BTreeSet::new(),
        }
    }

    fn at(&self, rank: usize) -> &Node {
        &self.ranks[rank].as_ref().expect("the rank is there").node
    }

    fn node(&mut self, rank: usize) -> &mut Node {
        let shared = self.ranks[rank].as_mut().expect("the rank is there");
        Rc::make_mut(&mut shared.node)
    }

    fn lives(&self, rank: usize) -> bool {
        self.ranks[rank].is_some() && self.at(rank).phase == Phase::Running
    }

    fn is_alone(&self, rank: usize) -> bool {
        self.at(rank).core.ending() == Ending::Alone
    }

    fn waits(&self, rank: usize) -> bool {
        self.ranks[rank].is_some() && self.at(rank).phase == Phase::Waiting
    }

    /// The world after one step.
    pub(crate) fn after(&self, map: &Map, step: Step) -> Self {
        let mut next = self.clone();
        next.take(map, step);
        next.lanes.iter_mut().for_each(Lane::settle);
        for (rank, before) in next.ranks.iter_mut().zip(&self.ranks) {
            if let Some(rank) = rank {
                let before = before.as_ref().map(|before| &before.node);
                if !before.is_some_and(|before| Rc::ptr_eq(before, &rank.node)) {
                    rank.settle();
                }
            }
        }
        next
    }

    fn take(&mut self, map: &Map, step: Step) {
        match step {
            Step::Offer => match map.shape.script.get(self.offered) {
                Some(cut) => {
                    self.offered += 1;
                    self.node(0).core.handle_offer(*cut);
                }
                None => {
                    let ended = self.node(0).core.handle_source_end();
                    hold(ended.is_ok(), "the source ends between two steps", || {
                        format!("{ended:?}")
                    });
                }
            },
            Step::Drain => {
                self.has_drained = true;
                self.node(0).core.handle_end(EndEvent::Drain);
            }
            Step::Tell { rank, epoch } => {
                self.node(rank).told = epoch;
                self.node(rank).core.handle_cut(CacheEpoch::new(epoch));
            }
            Step::Act(rank, is_ready, action) => {
                let facts = self.facts(map, rank, is_ready);
                self.act(map, rank, &facts, action);
            }
            Step::Hear { edge } => self.hear(map, edge),
            Step::Arrive { edge } => self.payload_arrives(map, edge),
            Step::FinishWork { rank, stage } => self.finish_work(map, rank, stage),
            Step::Operate { rank } => self.operate(map, rank),
            Step::Lose { rank } => self.lose(map, rank),
            Step::Abort => self.abort(),
            Step::HearLoss { rank } => self.hear_loss(map, rank),
            Step::Meet => self.meet(map),
            Step::HearServed { rank } => self.hear_served(rank),
            Step::Leave { rank } => self.finish(map, rank),
        }
    }

    fn facts(&self, map: &Map, rank: usize, is_ready: bool) -> Vec<StageFacts> {
        let node = self.at(rank);
        let stages = map.places[rank].iter().enumerate();
        let facts = stages.map(|(stage, place)| {
            let is_free = |output: usize| match place.outputs[output] {
                Wire::None => false,
                Wire::Local(_) if place.is_sink => is_ready,
                Wire::Local(_) => node.free[stage][output] > 0,
                Wire::Edge(edge) => {
                    let has_room = self.lanes[edge].free > 0 || !map.has_payloads(edge);
                    has_room && (is_ready || !place.is_sink)
                }
            };
            StageFacts {
                is_here: node.is_here[stage],
                is_free: [ONWARD, LAP].map(is_free),
            }
        });
        facts.collect()
    }

    fn infer_of(ticket: &Ticket, message: Message) -> Message {
        Message {
            lap: ticket.way_out.1,
            is_stale: ticket.is_stale,
            slot: Pool::None,
            ..message
        }
    }

    fn index(chunk: u64) -> ChunkIndex {
        ChunkIndex::new(chunk)
    }
}
