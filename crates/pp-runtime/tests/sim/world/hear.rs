//! What reaches the two sides: frames, payloads, and the death of Phase B.

use pp_contract::ChunkIndex;

use super::{Back, Frame, Returned, Shape, World, hold};

impl World {
    pub(super) fn hear_back(&mut self) {
        match self.to_back.pop_front().unwrap() {
            Frame::Call(call) => {
                let chunk = ChunkIndex::new(call.chunk);
                let taken = self.back.core.handle_envelope(chunk, call);
                hold(taken.is_ok(), "in flight stays within the depth", || {
                    format!("{taken:?}")
                });
            }
            Frame::Shutdown => self.back.core.handle_shutdown(),
            Frame::Answer(..) => unreachable!("the front answers nothing"),
        }
    }

    pub(super) fn hear_front(&mut self, shape: Shape) {
        match self.to_front.pop_front().unwrap() {
            Frame::Answer(chunk, epoch) => {
                let taken = self.front.handle_result(ChunkIndex::new(chunk), epoch);
                hold(taken.is_ok(), "only what is due is answered", || {
                    format!("{taken:?}")
                });
                self.returned.push_back(Returned {
                    chunk,
                    epoch,
                    generation: self.generation,
                    is_whole: false,
                });
                if shape.restarts == 0 {
                    // Nothing is kept: its slot is free with its header.
                    self.held.retain(|held| held.call.chunk != chunk);
                }
            }
            Frame::Shutdown => {
                let closed = self.front.handle_peer_closed();
                hold(closed, "only what is due is answered", || "shutdown".into());
            }
            Frame::Call(_) => unreachable!("Phase B calls nobody"),
        }
    }

    /// The payload of the oldest result that was announced is here: it is accepted.
    pub(super) fn payload_arrives(&mut self, shape: Shape) {
        let result = self.returned.iter_mut().find(|result| !result.is_whole);
        let result = result.unwrap();
        result.is_whole = true;
        let (chunk, epoch) = (result.chunk, result.epoch);
        hold(
            !self.accepted.contains(&chunk),
            "a result is accepted once",
            || format!("chunk {chunk}"),
        );
        self.accepted.push(chunk);
        let at = self.held.iter().position(|held| held.call.chunk == chunk);
        let held = at.and_then(|at| self.held.remove(at));
        if let Some(held) = held.filter(|_| epoch >= self.oldest && shape.context > 0) {
            if self.starts_epoch(chunk) {
                self.kept.clear();
            }
            if self.kept.len() == shape.context {
                self.kept.pop_front();
            }
            self.kept.push_back(held);
        }
    }

    /// Phase B is gone, and nothing is missed of it.
    pub(super) fn let_phase_b_go(&mut self) {
        self.to_back.clear();
        self.to_front.clear();
        self.back.finished = true;
        self.front.handle_peer_gone();
    }

    /// Phase B is gone, with both lanes; the next one is there.
    pub(super) fn lose_phase_b(&mut self, shape: Shape) {
        self.restarts -= 1;
        self.generation += 1;
        let whole = self.returned.iter().take_while(|r| r.is_whole).count();
        self.returned.truncate(whole);
        self.front.handle_lost(whole);
        self.back = Back::new(shape);
        self.to_back.clear();
        self.to_front.clear();
        self.last_call = None;
    }
}
