//! Takes in the messages that come to a rank.

use std::time::Instant;

use pp_contract::Fault;
use pp_contract::pipeline::EdgeKind;
use pp_transport::edge::Edges;

use super::chunk::Waiting;
use super::inbox::{Heard, Incoming, Judge};
use super::session::Session;
use crate::clock::now_ns;
use crate::core::LocalStage;
use crate::progress::Doing;
use crate::stage::Source;

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    /// Handles all messages that have arrived, those of leaders first. On a device that runs operations in order, a receive
    /// that is posted before a collective can deadlock with a rank whose send follows that collective. A leader may have
    /// sent its message before the one that was just copied, so the leader's edge is checked again after each copy.
    pub(super) fn listen(&mut self) -> Result<(), Fault> {
        self.hear_all(|input| !input.has_payloads())?;
        if !self.run.core.is_told()
            && let Some(input) = self.run.inbox.take_held()
        {
            self.take_in(input)?;
        }
        let follows = self.run.places.iter().any(LocalStage::follows);
        for input in 0..self.run.inbox.inputs().len() {
            if !self.run.inbox.inputs()[input].has_payloads() {
                continue;
            }
            while !self.run.core.is_told() && self.poll(input)? {
                if follows {
                    self.run.inbox.swap();
                    self.hear_all(|input| input.kind == EdgeKind::Follow)?;
                    if self.run.core.is_told() {
                        self.run.inbox.hold(input);
                        break;
                    }
                    self.run.inbox.swap();
                }
                self.take_in(input)?;
            }
        }
        self.switch.progress().at(Doing::Lease);
        self.run.outbox.lease(self.blame)
    }

    /// Takes in all messages of the selected inputs.
    fn hear_all(&mut self, these: impl Fn(&Incoming<E>) -> bool) -> Result<(), Fault> {
        for input in 0..self.run.inbox.inputs().len() {
            while these(&self.run.inbox.inputs()[input]) && self.poll(input)? {
                self.take_in(input)?;
            }
        }
        Ok(())
    }

    /// Copies the next frame of an input. Returns false if there is none.
    fn poll(&mut self, input: usize) -> Result<bool, Fault> {
        let inbox = &mut self.run.inbox;
        let blame = self.blame.on(inbox.inputs()[input].peer);
        inbox.poll(input, blame)
    }

    /// Takes in the frame that was copied last.
    fn take_in(&mut self, input: usize) -> Result<(), Fault> {
        let run = &mut *self.run;
        let Incoming { peer, kind, to, .. } = run.inbox.inputs()[input];
        let blame = self.blame.on(peer);
        let judge = Judge {
            options: &run.options,
            places: &run.places,
            switch: self.switch,
            blame,
        };
        match run.inbox.take_in(input, &judge)? {
            Heard::Nothing => Ok(()),
            Heard::Accepted(stamp, message) => {
                // A new attempt means that another rank was lost and the source has started again.
                run.core.handle_attempt(stamp.attempt);
                self.accepted(stamp, &message, blame)
            }
            Heard::Chunk(stamp, message, payload) => {
                run.core.handle_attempt(stamp.attempt);
                let waiting = Waiting {
                    stamp,
                    message,
                    payload,
                    arrived_ns: now_ns(),
                };
                self.arrive(to, waiting, blame)
            }
            Heard::Closed(stamp) => {
                let (stage, which) = to;
                match kind {
                    EdgeKind::Report if !run.core.has_closed(stage) => {
                        return Err(blame.left_early());
                    }
                    EdgeKind::Report => run.core.handle_left(stage),
                    _ => run.core.handle_closed(stage, which),
                }
                self.goodbye.get_or_insert_with(|| (stamp, Instant::now()));
                Ok(())
            }
        }
    }
}
