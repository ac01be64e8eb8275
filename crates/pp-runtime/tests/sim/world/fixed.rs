//! Ranks in a fixed order. What they do is compared with the lists of the case.

use pp_runtime::core::{ONWARD, Task, Ticket, Turn};

use super::{Map, World, hold};

impl Map {
    /// Says whether a step has begun when this chunk is admitted.
    pub(super) fn is_within_step(&self, chunk: u64) -> bool {
        let order = self.shape.orders.first();
        order.is_some_and(|order| !chunk.is_multiple_of(order.chunks()))
    }
}

impl World {
    /// The stages of a rank begin with these chunks, all at once. Source and sink take no turns.
    pub(super) fn takes_turn(&mut self, map: &Map, rank: usize, begun: &[(usize, Ticket)]) {
        let task = |&(stage, ticket): &(usize, Ticket)| Task {
            stage: map.places[rank][stage].at,
            chunk: ticket.chunk.get(),
        };
        let turn = match begun {
            [(stage, _)] if map.places[rank][*stage].is_sink => return,
            [first, second] => Turn::Overlapped([task(first), task(second)]),
            _ => Turn::Run(task(&begun[0])),
        };
        self.is_due(map, rank, turn);
    }

    pub(super) fn does_later(&mut self, map: &Map, (rank, stage): (usize, usize), chunk: u64) {
        let stage = map.places[rank][stage].at;
        self.is_due(map, rank, Turn::Later(Task { stage, chunk }));
    }

    fn is_due(&mut self, map: &Map, rank: usize, turn: Turn) {
        let Some(order) = map.shape.orders.get(rank) else {
            return;
        };
        let taken = &mut self.turns[rank];
        let (step, at) = (*taken / order.turns().len(), *taken % order.turns().len());
        *taken += 1;
        let first = step as u64 * order.chunks();
        let chunk = |task: Task| Task {
            chunk: first + task.chunk,
            ..task
        };
        let due = match order.turns()[at] {
            Turn::Run(task) => Turn::Run(chunk(task)),
            Turn::Overlapped(tasks) => Turn::Overlapped(tasks.map(chunk)),
            Turn::Later(task) => Turn::Later(chunk(task)),
        };
        hold(turn == due, "a rank keeps to its order", || {
            format!("rank {rank}: {turn:?}, and {due:?} is due")
        });
    }

    /// What comes over an edge comes in the order that its receiving end checks.
    pub(super) fn comes_in_order(&mut self, map: &Map, edge: usize, chunk: u64) {
        let (rank, stage, input) = map.target(edge);
        let Some(order) = map.shape.orders.get(rank).filter(|_| input == ONWARD) else {
            return;
        };
        let chunks = order.arrivals_at(map.places[rank][stage].at);
        let heard = &mut self.lanes[edge].heard;
        let (step, at) = (*heard / chunks.len(), *heard % chunks.len());
        *heard += 1;
        let due = step as u64 * order.chunks() + chunks[at];
        hold(
            chunk == due,
            "chunks come in the order of their edge",
            || format!("edge {edge}: {chunk}, and {due} is due"),
        );
    }

    /// At the end each rank has taken all of its turns, in whole steps.
    pub(super) fn check_turns(&self, map: &Map, admitted: u64) {
        for (rank, order) in map.shape.orders.iter().enumerate() {
            let steps = admitted / order.chunks();
            let all = steps as usize * order.turns().len();
            let are_taken = self.turns[rank] == all && steps * order.chunks() == admitted;
            hold(are_taken, "every turn of a step is taken", || {
                format!("rank {rank}: {} of {all}", self.turns[rank])
            });
        }
    }
}
