//! What reaches a rank: frames, payloads, acceptances.

use pp_contract::CacheEpoch;
use pp_contract::pipeline::EdgeKind;
use pp_runtime::core::{Ticket, way_out};

use super::{Device, Frame, Map, Message, Operation, Pool, Transfer, World, hold};

impl World {
    /// A rank takes in the next frame of an edge.
    pub(super) fn hear(&mut self, map: &Map, edge: usize) {
        let (rank, stage, input) = map.target(edge);
        let frame = self.lanes[edge]
            .queue
            .pop_front()
            .expect("a frame is there");
        match frame {
            Frame::Infer(message) if map.edges[edge].kind == EdgeKind::Report => {
                let report = (edge, message.chunk, message.attempt);
                self.node(rank).reports.push_back(report);
                self.conclude_done(map, rank, stage);
            }
            Frame::Infer(message) => {
                self.comes_in_order(map, edge, message.chunk);
                let node = self.node(rank);
                node.core.handle_attempt(message.attempt);
                if map.places[rank][stage].is_source() {
                    return self.accepted(message);
                }
                let is_moved = message.slot != Pool::None && map.shape.device.moves();
                self.lanes[edge].arriving += u8::from(is_moved);
                self.arrive(map, (rank, stage, input), message, !is_moved);
                if is_moved && map.shape.device == Device::InOrder {
                    let transfer = (edge, message.chunk, message.lap, message.attempt);
                    let operation = Operation::Receive(transfer);
                    self.node(rank).operations.push_back(operation);
                }
            }
            Frame::Shutdown if map.edges[edge].kind == EdgeKind::Report => {
                self.node(rank).core.handle_left(stage);
            }
            Frame::Shutdown => self.node(rank).core.handle_closed(stage, input),
        }
    }

    /// A chunk is there for a stage.
    pub(super) fn arrive(
        &mut self,
        map: &Map,
        (rank, stage, input): (usize, usize, usize),
        message: Message,
        is_here: bool,
    ) {
        let at = map.places[rank][stage].at;
        let laps = map.shape.laps(at);
        let ticket = Ticket {
            chunk: Self::index(message.chunk),
            epoch: CacheEpoch::new(message.epoch),
            attempt: message.attempt,
            lap: message.lap,
            way_out: way_out(&map.shape.pipeline, at, message.lap, laps),
            is_stale: message.is_stale,
        };
        let waiting = super::Waiting { message, is_here };
        let arrived = self
            .node(rank)
            .core
            .handle_arrival(stage, input, ticket, waiting);
        hold(arrived.is_ok(), "a rank takes in what it was sent", || {
            format!("{arrived:?}")
        });
    }

    /// The payload of the oldest header whose payload is not here.
    pub(super) fn payload_arrives(&mut self, map: &Map, edge: usize) {
        let (rank, ..) = map.target(edge);
        let generation = self.lanes[edge].generation;
        let slot = Pool::Edge { edge, generation };
        let mut waiting = self.node(rank).core.waiting_mut();
        let oldest = waiting.find(|waiting| !waiting.is_here && waiting.message.slot == slot);
        oldest.expect("a payload is on its way").is_here = true;
        drop(waiting);
        self.lanes[edge].arriving -= 1;
    }

    /// This payload is here. Its chunk may have been passed on.
    pub(super) fn transferred(&mut self, map: &Map, transfer: Transfer) {
        let edge = transfer.0;
        let (rank, ..) = map.target(edge);
        let generation = self.lanes[edge].generation;
        let slot = Pool::Edge { edge, generation };
        let mut all = self.node(rank).core.waiting_mut();
        let same = |message: &Message| {
            let this = (edge, message.chunk, message.lap, message.attempt);
            message.slot == slot && this == transfer
        };
        let Some(waiting) = all.find(|waiting| same(&waiting.message)) else {
            return;
        };
        waiting.is_here = true;
        drop(all);
        self.lanes[edge].arriving -= 1;
    }

    /// The source hears that the sink has a chunk.
    pub(super) fn accepted(&mut self, message: Message) {
        let chunk = message.chunk;
        let (index, attempt) = (Self::index(chunk), message.attempt);
        let core = &mut self.node(0).core;
        let accepted = core.handle_accepted(index, attempt, message.is_stale);
        hold(accepted.is_ok(), "chunks are accepted in order", || {
            format!("{accepted:?}")
        });
        if let Ok(Some(_)) = accepted {
            hold(
                !self.turns.is_empty() || self.accepted == chunk,
                "each chunk is accepted once, in order",
                || format!("chunk {chunk}"),
            );
            self.accepted += 1;
            self.node(0).context.push_back(chunk);
            if self.node(0).context.len() > super::CONTEXT
                && let Some(oldest) = self.node(0).context.pop_front()
            {
                self.drop_kept(oldest);
            }
        }
    }
}

impl Device {
    fn moves(self) -> bool {
        matches!(self, Self::Moving | Self::Both | Self::InOrder)
    }
}
