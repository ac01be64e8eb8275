//! What each step of a schedule waits for.
//!
//! Hazard: a checker, a simulator and a table of edges that each know the dependencies by themselves know three of them.
//! Guarantee: here they stand once, and a [`Graph`] exists only of a schedule that has each action once, in an order in
//! which every rank finds what it made itself.
//!
//! Choices: a *node* is a step, numbered over all ranks. Dependencies between ranks are looked up in dense tables, by
//! stage and microbatch, when they are asked for; none is stored.

mod rules;

use super::flaw::{Flaw, MOST_STEPS, StepPlace, Why};
use super::{Action, Op, Schedule, Step, Way};

/// No node.
pub(super) const NONE: u32 = u32::MAX;
const BOTH: [Way; 2] = [Way::Forward, Way::Backward];

/// What goes over an edge: an activation or a gradient of one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Which way.
    pub way: Way,
    /// The stage that sends it.
    pub from: u32,
    /// The stage that receives it, on another rank.
    pub to: u32,
    /// Its microbatch.
    pub microbatch: u32,
}

/// One thing that a node waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub(super) rank: u32,
    pub(super) node: u32,
    pub(super) why: Why,
    pub(super) message: Message,
}

/// What lies next to a stage, one way.
enum Neighbour {
    End,
    Here(u32),
    There(u32),
}

/// A schedule in which every action stands once, and behind what it needs of its own rank.
pub(super) struct Graph<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) is_lowered: bool,
    pub(super) has_waits: bool,
    /// The first node of each rank, and the end of the last.
    first: Vec<u32>,
    /// The node of each action, by [`table`], stage and microbatch.
    nodes: [Vec<u32>; 9],
    /// The place of each message among those of its edge as they are made, by way, sending stage and microbatch.
    turns: [Vec<u32>; 2],
    /// The nodes that use up what comes over an edge, in their order, by way, sending stage and place.
    users: [Vec<u32>; 2],
}

/// The table of an operation. `B` stands in those of `I` and `W`.
const fn table(op: Op) -> Option<usize> {
    match op {
        Op::Forward => Some(0),
        Op::BackwardInput | Op::Backward => Some(1),
        Op::BackwardWeight => Some(2),
        Op::Send(way) => Some(3 + way as usize),
        Op::Receive(way) => Some(5 + way as usize),
        Op::WaitSend(way) => Some(7 + way as usize),
        Op::Unshard | Op::Reshard | Op::ReduceGrad | Op::WaitReduceGrad => None,
    }
}

/// What makes the messages of one way, and uses up those that come.
const fn maker(way: Way) -> Op {
    match way {
        Way::Forward => Op::Forward,
        Way::Backward => Op::BackwardInput,
    }
}

/// Which way goes what an operation makes.
const fn way_of(op: Op) -> Option<Way> {
    match op {
        Op::Forward => Some(Way::Forward),
        Op::BackwardInput | Op::Backward => Some(Way::Backward),
        _ => None,
    }
}

const fn against(way: Way) -> Way {
    match way {
        Way::Forward => Way::Backward,
        Way::Backward => Way::Forward,
    }
}

impl<'a> Graph<'a> {
    /// Refuses actions that are missing or doubled, receives in another order than their sends, and an action that comes
    /// before one of its rank that it needs.
    pub(super) fn new(schedule: &'a Schedule) -> Result<Self, Flaw> {
        let mut first = vec![0];
        for steps in &schedule.ranks {
            let end = first[first.len() - 1] as usize + steps.len();
            let end = u32::try_from(end).ok().filter(|end| *end <= MOST_STEPS);
            first.push(end.ok_or_else(|| Flaw::TooLarge {
                steps: schedule.ranks.iter().map(Vec::len).sum(),
            })?);
        }
        let has = |found: fn(Op) -> bool| {
            let mut actions = schedule.ranks.iter().flatten().flat_map(Step::actions);
            actions.any(|action| found(action.op))
        };
        let mut graph = Self {
            schedule,
            is_lowered: schedule.is_lowered(),
            has_waits: has(|op| matches!(op, Op::WaitSend(_))),
            first,
            nodes: Default::default(),
            turns: Default::default(),
            users: Default::default(),
        };
        graph.judge(has(|op| op == Op::WaitReduceGrad))?;
        Ok(graph)
    }

    pub(super) fn ranks(&self) -> u32 {
        self.schedule.ranks.len() as u32
    }

    /// The first node of a rank. That of the rank behind the last is the end of all.
    pub(super) fn first(&self, rank: u32) -> u32 {
        self.first[rank as usize]
    }

    pub(super) fn rank_of(&self, stage: u32) -> u32 {
        self.schedule.rank_of[stage as usize]
    }

    pub(super) fn step(&self, rank: u32, node: u32) -> Step {
        self.schedule.ranks[rank as usize][(node - self.first(rank)) as usize]
    }

    pub(super) fn place(&self, node: u32) -> StepPlace {
        let rank = self.first.partition_point(|first| *first <= node) as u32 - 1;
        StepPlace {
            rank,
            number: node - self.first(rank) + 1,
            step: self.step(rank, node),
        }
    }

    /// The node of an action, or [`NONE`]. A `B` is found as `I` and as `W`, too.
    pub(super) fn node(&self, action: Action) -> u32 {
        let found = table(action.op).and_then(|at| self.nodes[at].get(self.index(action)));
        found.copied().unwrap_or(NONE)
    }

    /// The edges: way, sending stage, receiving stage.
    pub(super) fn edges(&self) -> impl Iterator<Item = (Way, u32, u32)> {
        let all = (0..self.schedule.stages()).flat_map(|from| BOTH.map(|way| (way, from)));
        all.filter_map(|(way, from)| Some((way, from, self.across(from, way)?)))
    }

    /// Calls `each` with what `node` waits for before it begins, where an edge has so many slots.
    pub(super) fn waits(
        &self,
        rank: u32,
        node: u32,
        slots: Option<u32>,
        mut each: impl FnMut(Wait),
    ) {
        for action in self.step(rank, node).actions() {
            if let Some(message) = self.arriving(action) {
                each(self.wait(self.sending(message), Why::Input, message));
            }
            if let Some(message) = self.making(action)
                && let Some(slots) = slots.filter(|slots| *slots > 0)
            {
                let (table, from) = (message.way as usize, message.from);
                let turn = self.turns[table][self.index_of(from, message.microbatch)];
                if let Some(freed) = turn.checked_sub(slots) {
                    let node = self.users[table][self.index_of(from, freed)];
                    each(Wait {
                        rank: self.rank_of(message.to),
                        node,
                        why: Why::Slot,
                        message,
                    });
                }
            }
            if let Op::WaitSend(way) = action.op
                && let Some(message) = self.message_to(action, way)
            {
                each(self.wait(self.sending(message), Why::Input, message));
                each(self.wait(self.receiving(message), Why::Receive, message));
            }
        }
    }

    /// Calls `each` with what `node` waits for before it ends, where a send waits for its receive.
    pub(super) fn holds(&self, rank: u32, node: u32, mut each: impl FnMut(Wait)) {
        for action in self.step(rank, node).actions() {
            if let Some(message) = self.leaving(action) {
                each(self.wait(self.receiving(message), Why::Receive, message));
            }
        }
    }

    /// The message that an action sends: a `SEND`, or in a compute list the computation.
    fn leaving(&self, action: Action) -> Option<Message> {
        match self.is_lowered {
            true => self.sent(action),
            false => self.making(action),
        }
    }

    /// The message of a `SEND`.
    pub(super) fn sent(&self, action: Action) -> Option<Message> {
        match action.op {
            Op::Send(way) => self.message_to(action, way),
            _ => None,
        }
    }

    /// The message of a `RECV`.
    pub(super) fn received(&self, action: Action) -> Option<Message> {
        match action.op {
            Op::Receive(way) => self.message_from(action, way),
            _ => None,
        }
    }

    /// The message that a computation makes.
    pub(super) fn making(&self, action: Action) -> Option<Message> {
        self.message_to(action, way_of(action.op)?)
    }

    fn message_to(&self, action: Action, way: Way) -> Option<Message> {
        let to = self.across(action.stage, way)?;
        Some(message(way, action.stage, to, action.microbatch))
    }

    /// The message that a computation needs.
    fn arriving(&self, action: Action) -> Option<Message> {
        self.message_from(action, way_of(action.op)?)
    }

    fn message_from(&self, action: Action, way: Way) -> Option<Message> {
        let from = self.across(action.stage, against(way))?;
        Some(message(way, from, action.stage, action.microbatch))
    }

    /// What sends a message: the `SEND`, or what makes it.
    pub(super) fn sending(&self, message: Message) -> Action {
        let op = match self.is_lowered {
            true => Op::Send(message.way),
            false => maker(message.way),
        };
        Action::new(message.from, op, message.microbatch)
    }

    /// What receives a message: the `RECV`, or what uses it up.
    pub(super) fn receiving(&self, message: Message) -> Action {
        match self.is_lowered {
            true => Action::new(message.to, Op::Receive(message.way), message.microbatch),
            false => using(message),
        }
    }

    /// The node whose end frees the slot of a message.
    pub(super) fn user(&self, message: Message) -> u32 {
        self.node(using(message))
    }

    /// The nodes that use up what comes over an edge, in their order.
    pub(super) fn users(&self, way: Way, from: u32) -> &[u32] {
        let microbatches = self.schedule.microbatches as usize;
        let start = from as usize * microbatches;
        &self.users[way as usize][start..start + microbatches]
    }

    fn wait(&self, action: Action, why: Why, message: Message) -> Wait {
        Wait {
            rank: self.rank_of(action.stage),
            node: self.node(action),
            why,
            message,
        }
    }

    /// The stage next to this one, where it stands on another rank.
    fn across(&self, stage: u32, way: Way) -> Option<u32> {
        match self.next(stage, way) {
            Neighbour::There(next) => Some(next),
            Neighbour::End | Neighbour::Here(_) => None,
        }
    }

    fn next(&self, stage: u32, way: Way) -> Neighbour {
        let next = match way {
            Way::Forward => Some(stage + 1).filter(|next| *next < self.schedule.stages()),
            Way::Backward => stage.checked_sub(1),
        };
        match next {
            None => Neighbour::End,
            Some(next) if self.rank_of(next) == self.rank_of(stage) => Neighbour::Here(next),
            Some(next) => Neighbour::There(next),
        }
    }

    fn index(&self, action: Action) -> usize {
        self.index_of(action.stage, action.microbatch)
    }

    fn index_of(&self, stage: u32, microbatch: u32) -> usize {
        stage as usize * self.schedule.microbatches as usize + microbatch as usize
    }

    /// Every action with its rank and its node, rank by rank.
    pub(super) fn actions(&self) -> impl Iterator<Item = (u32, u32, Action)> + use<'a> {
        let of_step = |(rank, node, step): (u32, u32, Step)| {
            step.actions().map(move |action| (rank, node, action))
        };
        self.steps().flat_map(of_step)
    }

    /// Every step with its node, rank by rank.
    fn steps(&self) -> impl Iterator<Item = (u32, u32, Step)> + use<'a> {
        let ranks = self.schedule.ranks.iter().enumerate();
        let steps = ranks.flat_map(|(rank, steps)| steps.iter().map(move |step| (rank, step)));
        let numbered = steps.enumerate();
        numbered.map(|(node, (rank, step))| (rank as u32, node as u32, *step))
    }
}

const fn message(way: Way, from: u32, to: u32, microbatch: u32) -> Message {
    Message {
        way,
        from,
        to,
        microbatch,
    }
}

/// The computation that uses a message up.
const fn using(message: Message) -> Action {
    Action::new(message.to, maker(message.way), message.microbatch)
}
