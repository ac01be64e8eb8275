//! A second, slow way to run a schedule: rank after rank, round after round, with queues. It knows nothing of graphs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use pp_runtime::schedule::{Action, Op, Schedule, Step, Way};

/// Way and sending stage.
type Edge = (Way, u32);

/// What the ranks have done so far.
#[derive(Default)]
struct World {
    /// Computations that are done.
    done: BTreeSet<Action>,
    /// Messages that lie on each edge, in their order.
    queues: BTreeMap<Edge, VecDeque<u32>>,
    /// Receives that were posted and have got nothing yet, in their order.
    posted: BTreeMap<Edge, VecDeque<u32>>,
    /// What each receive got.
    got: BTreeMap<(Edge, u32), u32>,
    /// Slots that are taken.
    taken: BTreeMap<Edge, u32>,
    /// Messages that were sent, and receives that were posted.
    sent: BTreeSet<(Edge, u32)>,
    received: BTreeSet<(Edge, u32)>,
}

/// Says whether all ranks come to their end with so many slots an edge, and every receive gets what it names.
#[expect(clippy::too_many_lines, reason = "an oracle that shares nothing")]
pub(crate) fn ends(schedule: &Schedule, slots: u32) -> bool {
    let rank_of = |stage: u32| schedule.stage_to_rank().get(stage as usize).copied();
    let is_apart = |one: u32, other: u32| rank_of(other).is_some_and(|it| Some(it) != rank_of(one));
    let before = |action: Action| match action.op {
        Op::Forward => action.stage.checked_sub(1).map(|it| (Way::Forward, it)),
        Op::BackwardInput | Op::Backward => {
            Some((Way::Backward, action.stage + 1)).filter(|it| it.1 < schedule.stages())
        }
        _ => None,
    };
    // The message that a computation needs, the one that it makes, and the one that an action sends.
    let arriving = |action: Action| before(action).filter(|it| is_apart(action.stage, it.1));
    let message = |action: Action, way: Way| -> Option<(Edge, u32)> {
        let to = match way {
            Way::Forward => action.stage + 1,
            Way::Backward => action.stage.checked_sub(1)?,
        };
        is_apart(action.stage, to).then_some(((way, action.stage), to))
    };
    let making = |action: Action| match action.op {
        Op::Forward => message(action, Way::Forward),
        Op::BackwardInput | Op::Backward => message(action, Way::Backward),
        _ => None,
    };
    let leaving = |action: Action| match action.op {
        Op::Send(way) => message(action, way),
        _ if !schedule.is_lowered() => making(action),
        _ => None,
    };
    let made = |world: &World, stage, microbatch, way| {
        let has = |op| world.done.contains(&Action::new(stage, op, microbatch));
        match way {
            Way::Forward => has(Op::Forward),
            Way::Backward => has(Op::BackwardInput) || has(Op::Backward),
        }
    };
    let can = |world: &World, action: Action| {
        let Action {
            stage, microbatch, ..
        } = action;
        let input = match (before(action), arriving(action)) {
            (Some(_), Some(edge)) if schedule.is_lowered() => {
                world.got.contains_key(&(edge, microbatch))
            }
            (Some((way, from)), _) => made(world, from, microbatch, way),
            (None, _) => true,
        };
        let own = match action.op {
            Op::Backward | Op::BackwardInput => made(world, stage, microbatch, Way::Forward),
            Op::BackwardWeight => {
                world
                    .done
                    .contains(&Action::new(stage, Op::BackwardInput, microbatch))
            }
            Op::Send(way) => made(world, stage, microbatch, way),
            Op::WaitSend(way) => {
                let message = ((way, stage), microbatch);
                world.sent.contains(&message) && world.received.contains(&message)
            }
            _ => true,
        };
        let room = making(action).is_none_or(|(edge, _)| {
            slots == 0 || world.taken.get(&edge).copied().unwrap_or(0) < slots
        });
        input && own && room
    };
    // Whether the rank of the receiver stands at the receive of a message, or is past it.
    let has_come = |at: &[usize], (way, from): Edge, to: u32, microbatch: u32| {
        let rank = rank_of(to).unwrap() as usize;
        let is_it = |action: Action| {
            let is_receive = match schedule.is_lowered() {
                true => action.op == Op::Receive(way),
                false => arriving(action) == Some((way, from)),
            };
            is_receive && (action.stage, action.microbatch) == (to, microbatch)
        };
        let mut steps = schedule.ranks()[rank].iter();
        let found = steps.position(|step| step.actions().any(is_it));
        found.is_some_and(|found| found <= at[rank])
    };
    let mut world = World::default();
    let mut at = vec![0; schedule.ranks().len()];
    let mut is_held = vec![false; at.len()];
    loop {
        let mut moved = false;
        for (rank, steps) in schedule.ranks().iter().enumerate() {
            let Some(step) = steps.get(at[rank]) else {
                continue;
            };
            if !is_held[rank] {
                if !step.actions().all(|action| can(&world, action)) {
                    continue;
                }
                moved = true;
                is_held[rank] = true;
                for action in step.actions() {
                    let edges = [arriving(action), making(action).map(|it| it.0)];
                    world.act(action, edges, leaving(action).map(|it| it.0));
                }
            }
            let mut sends = step.actions().filter_map(|action| {
                leaving(action).map(|(edge, to)| (edge, to, action.microbatch))
            });
            if slots > 0 || sends.all(|(edge, to, it)| has_come(&at, edge, to, it)) {
                (at[rank], is_held[rank], moved) = (at[rank] + 1, false, true);
            }
        }
        if !moved {
            break;
        }
    }
    let all = schedule.ranks().iter().map(Vec::len);
    all.eq(at) && world.got.iter().all(|((_, wanted), got)| wanted == got)
}

impl World {
    fn act(&mut self, action: Action, [used, made]: [Option<Edge>; 2], leaving: Option<Edge>) {
        let microbatch = action.microbatch;
        if action.op.is_compute() {
            self.done.insert(action);
        }
        if let Some(edge) = used {
            *self.taken.entry(edge).or_default() -= 1;
        }
        if let Some(edge) = made {
            *self.taken.entry(edge).or_default() += 1;
        }
        if let Some(edge) = leaving {
            self.queues.entry(edge).or_default().push_back(microbatch);
            self.sent.insert((edge, microbatch));
        }
        if let Op::Receive(way) = action.op {
            let from = match way {
                Way::Forward => action.stage - 1,
                Way::Backward => action.stage + 1,
            };
            let posted = self.posted.entry((way, from)).or_default();
            posted.push_back(microbatch);
            self.received.insert(((way, from), microbatch));
        }
        for (edge, posted) in &mut self.posted {
            let queue = self.queues.entry(*edge).or_default();
            while let (Some(wanted), Some(sent)) = (posted.front(), queue.front()) {
                self.got.insert((*edge, *wanted), *sent);
                posted.pop_front();
                queue.pop_front();
            }
        }
    }
}

/// Says whether `later` needs `earlier`, where both stand on one rank.
pub(crate) fn needs(schedule: &Schedule, later: Step, earlier: Step) -> bool {
    let rank_of = |stage: u32| schedule.stage_to_rank().get(stage as usize);
    let one = |later: Action, earlier: Action| {
        if later.microbatch != earlier.microbatch || later.op.is_of_stage() {
            return false;
        }
        let of = |stage: u32, ops: &[Op]| earlier.stage == stage && ops.contains(&earlier.op);
        let gradient = [Op::BackwardInput, Op::Backward];
        let stage = later.stage;
        match later.op {
            Op::Forward => {
                of(stage, &[Op::Receive(Way::Forward)])
                    || stage > 0 && of(stage - 1, &[Op::Forward])
            }
            Op::BackwardInput | Op::Backward => {
                of(stage, &[Op::Forward, Op::Receive(Way::Backward)]) || of(stage + 1, &gradient)
            }
            Op::BackwardWeight => of(stage, &[Op::BackwardInput]),
            Op::Send(Way::Forward) => of(stage, &[Op::Forward]),
            Op::Send(Way::Backward) => of(stage, &gradient),
            Op::WaitSend(way) => of(stage, &[Op::Send(way)]),
            _ => false,
        }
    };
    let later: Vec<Action> = later.actions().collect();
    let earlier: Vec<Action> = earlier.actions().collect();
    let on_rank = |action: &Action| rank_of(action.stage).is_some();
    later
        .iter()
        .filter(|it| on_rank(it))
        .any(|later| earlier.iter().any(|earlier| one(*later, *earlier)))
}
