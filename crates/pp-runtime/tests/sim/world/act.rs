//! What a rank does: the actions of its core, carried out as the driver does, and its devices.

use pp_contract::CacheEpoch;
use pp_runtime::core::{Decision, ONWARD, StageFacts, Ticket, Wire};

use super::{
    Device, Frame, Kept, Map, Message, Operation, Pool, Seen, Waiting, Working, World, hold,
};

impl World {
    #[expect(clippy::too_many_lines, reason = "one arm for each action")]
    pub(super) fn act(&mut self, map: &Map, rank: usize, facts: &[StageFacts], action: Decision) {
        match action {
            Decision::Build {
                chunk,
                epoch,
                starts_epoch,
                rebuilds,
            } => self.build(map, (chunk.get(), epoch.get()), starts_epoch, rebuilds),
            Decision::SendAgain { rebuilds } => {
                let (chunk, epoch) = *self.node(0).core.lost();
                hold(
                    chunk >= self.accepted,
                    "nothing is sent again that was accepted",
                    || format!("chunk {chunk}"),
                );
                self.send_again(map, (chunk, epoch), rebuilds);
                self.node(0).core.handle_sent_again();
            }
            Decision::Run { stage, input } => {
                self.holds_order(map, rank, facts, (stage, input));
                let (ticket, work) = self.begin(map, rank, (stage, input));
                self.takes_turn(map, rank, &[(stage, ticket)]);
                self.settle(map, (rank, stage), ticket, work);
            }
            Decision::RunOverlapped { stages } => {
                let begun = stages.map(|stage| self.begin(map, rank, (stage, ONWARD)));
                let [first, second] = [0, 1].map(|at| (stages[at], begun[at].0));
                self.takes_turn(map, rank, &[first, second]);
                for (stage, (ticket, work)) in stages.into_iter().zip(begun) {
                    self.settle(map, (rank, stage), ticket, work);
                }
            }
            Decision::Later { stage, chunk } => {
                self.does_later(map, (rank, stage), chunk.get());
                self.node(rank).core.handle_later();
            }
            Decision::PassOn { stage, input } => {
                let (ticket, waiting, _) = self.node(rank).core.begin(stage, input);
                self.leave(map, rank, &waiting);
                let mut message = Self::infer_of(&ticket, waiting.message);
                message.is_stale = true;
                if map.places[rank][stage].is_sink {
                    self.node(rank).core.handle_taken(ticket.chunk);
                    self.remember_said(map, ticket.chunk.get(), true);
                }
                self.hand_on(map, (rank, stage), &ticket, message);
            }
            Decision::Drop { stage, input } => {
                let (ticket, waiting, _) = self.node(rank).core.begin(stage, input);
                self.leave(map, rank, &waiting);
                let is_sink = map.places[rank][stage].is_sink;
                let said = self
                    .said
                    .iter()
                    .find(|(chunk, _)| *chunk == ticket.chunk.get());
                let said = said.copied().filter(|_| is_sink);
                let is_current = self.node(rank).core.is_current(&ticket);
                hold(
                    !is_current || said.is_some(),
                    "only what was sent twice is dropped",
                    || format!("{ticket:?}"),
                );
                if let (Some((_, is_stale)), true) = (said, is_current) {
                    let mut message = Self::infer_of(&ticket, waiting.message);
                    message.is_stale = is_stale;
                    self.hand_on(map, (rank, stage), &ticket, message);
                }
            }
            Decision::Close { stage } => self.close(map, rank, stage),
            Decision::Finish => {
                let is_busy = self.node(rank).core.is_busy();
                hold(!is_busy, "nothing is left", || format!("rank {rank}"));
                let lanes = self.lanes.iter().enumerate();
                let mut comes = lanes.filter(|(edge, _)| map.target(*edge).0 == rank);
                let is_told = comes.all(|(_, lane)| lane.is_closed && lane.queue.is_empty());
                hold(
                    is_told || self.is_alone(rank),
                    "a rank stays until it has heard all that comes",
                    || format!("rank {rank}"),
                );
                self.finish(map, rank);
            }
            Decision::Stop => self.stop(map, rank),
            Decision::Wait => unreachable!(),
        }
    }

    /// A stage begins with the next chunk of an input.
    fn begin(
        &mut self,
        map: &Map,
        rank: usize,
        (stage, input): (usize, usize),
    ) -> (Ticket, Working) {
        let (ticket, waiting, starts_epoch) = self.node(rank).core.begin(stage, input);
        hold(waiting.is_here, "only what is here is worked on", || {
            format!("{waiting:?}")
        });
        self.remember(map, (rank, stage), &ticket, waiting.message, starts_epoch);
        let place = map.places[rank][stage];
        let output = match place.is_sink || place.follows() {
            true => Pool::None,
            false => self.lease(map, (rank, stage, ticket.way_out.0)),
        };
        let message = waiting.message;
        if map.is_group(rank, stage) {
            self.begin_together(map, (rank, stage), message);
        }
        let work = Working {
            message,
            output,
            is_done: false,
        };
        (ticket, work)
    }

    /// What was begun is done at once, or a device works on it.
    fn settle(&mut self, map: &Map, (rank, stage): (usize, usize), ticket: Ticket, work: Working) {
        match map.shape.device {
            Device::None | Device::Moving if map.is_group(rank, stage) => {
                self.enter(map, rank, (stage, ticket, work));
            }
            Device::None | Device::Moving => {
                self.release(map, rank, work.message);
                self.conclude(map, (rank, stage), ticket, work);
            }
            Device::Working | Device::Both => {
                self.node(rank).core.handle_working(stage, ticket, work);
            }
            Device::InOrder => {
                self.node(rank).core.handle_working(stage, ticket, work);
                self.node(rank).operations.push_back(Operation::Work(stage));
            }
        }
    }

    fn build(&mut self, map: &Map, (chunk, epoch): (u64, u64), starts_epoch: bool, rebuilds: bool) {
        let due = map.shape.epoch_of(chunk);
        let starts = chunk == 0 || due != map.shape.epoch_of(chunk - 1);
        hold(
            chunk + 1 == self.offered as u64 && (epoch, starts_epoch) == (due, starts),
            "each chunk is admitted once, in its epoch",
            || format!("chunk {chunk} of epoch {epoch}"),
        );
        let may_begin = !self.has_drained || map.is_within_step(chunk);
        hold(
            may_begin,
            "a drain admits nothing but the rest of a step",
            || format!("chunk {chunk}"),
        );
        self.send(map, (chunk, epoch), rebuilds);
        let (index, number) = (Self::index(chunk), CacheEpoch::new(epoch));
        let record = (chunk, epoch);
        if let Some(cut) = self.node(0).core.handle_built(index, number, record) {
            self.hard.push(cut.get());
            self.node(0).told = cut.get();
        }
    }

    /// The source sends a chunk again; of one that a hard cut overtook the message alone.
    fn send_again(&mut self, map: &Map, (chunk, epoch): (u64, u64), rebuilds: bool) {
        let newest = self.hard.last().copied().unwrap_or(0);
        if epoch >= newest {
            return self.send(map, (chunk, epoch), rebuilds);
        }
        hold(!rebuilds, "no stage is rebuilt from what is stale", || {
            format!("chunk {chunk}")
        });
        self.drop_kept(chunk);
        let message = Message {
            chunk,
            epoch,
            attempt: self.node(0).core.attempt(),
            lap: 0,
            is_stale: true,
            rebuilds,
            slot: Pool::None,
        };
        self.hand_to(map, (0, 0, ONWARD), message);
    }

    /// What the sink said of a chunk: whether it passed the chunk over. Of so many chunks as can be in flight.
    fn remember_said(&mut self, map: &Map, chunk: u64, is_stale: bool) {
        if map.shape.deaths > 0 {
            self.said.push_back((chunk, is_stale));
            if self.said.len() > usize::from(map.shape.depth) {
                self.said.pop_front();
            }
        }
    }

    /// The source sends a chunk.
    fn send(&mut self, map: &Map, (chunk, epoch): (u64, u64), rebuilds: bool) {
        let slot = self.lease(map, (0, 0, ONWARD));
        let attempt = self.node(0).core.attempt();
        let message = Message {
            chunk,
            epoch,
            attempt,
            lap: 0,
            is_stale: false,
            rebuilds,
            slot,
        };
        if map.shape.deaths > 0 {
            self.drop_kept(chunk);
            self.node(0).kept.push(Kept {
                chunk,
                attempt,
                slot,
                is_released: false,
            });
        }
        self.hand_to(map, (0, 0, ONWARD), message);
    }

    /// Takes a free slot of an output.
    fn lease(&mut self, map: &Map, (rank, stage, output): (usize, usize, usize)) -> Pool {
        let property = "a slot has one payload at a time";
        match map.places[rank][stage].outputs[output] {
            Wire::Edge(edge) => {
                let lane = &mut self.lanes[edge];
                let free = lane.free.checked_sub(1);
                hold(free.is_some(), property, || format!("edge {edge}"));
                lane.free = free.unwrap_or(0);
                let generation = lane.generation;
                Pool::Edge { edge, generation }
            }
            _ => {
                let free = &mut self.node(rank).free[stage][output];
                hold(*free > 0, property, || {
                    format!("rank {rank}, stage {stage}")
                });
                *free -= 1;
                Pool::Local { stage, output }
            }
        }
    }

    /// A slot of this rank, or of an edge to or from it, is not used any more.
    pub(super) fn free(&mut self, rank: usize, slot: Pool) {
        match slot {
            Pool::None => {}
            Pool::Local { stage, output } => self.node(rank).free[stage][output] += 1,
            Pool::Edge { edge, generation } => {
                let lane = &mut self.lanes[edge];
                lane.free += u8::from(lane.generation == generation);
            }
        }
    }

    /// A chunk that waited is released without work.
    fn leave(&mut self, map: &Map, rank: usize, waiting: &Waiting) {
        if let Pool::Edge { edge, generation } = waiting.message.slot {
            let lane = &mut self.lanes[edge];
            lane.arriving -= u8::from(!waiting.is_here && lane.generation == generation);
        }
        self.release(map, rank, waiting.message);
    }

    /// The stage behind is done with a payload.
    pub(super) fn release(&mut self, map: &Map, rank: usize, message: Message) {
        if map.shape.deaths > 0 && self.is_of_source(map, message.slot, rank) {
            let mut kept = self.node(0).kept.iter_mut();
            let same = |kept: &&mut Kept| {
                (kept.chunk, kept.attempt, kept.slot)
                    == (message.chunk, message.attempt, message.slot)
            };
            return match kept.find(same) {
                Some(kept) => kept.is_released = true,
                None => self.free(rank, message.slot),
            };
        }
        match message.slot {
            Pool::Edge { edge, generation } if self.lanes[edge].generation == generation => {
                self.lanes[edge].back.insert((message.chunk, message.lap));
            }
            slot => self.free(rank, slot),
        }
    }

    fn is_of_source(&self, map: &Map, slot: Pool, rank: usize) -> bool {
        match slot {
            Pool::None => false,
            Pool::Local { stage, .. } => rank == 0 && stage == 0,
            Pool::Edge { edge, .. } => map.edges[edge].from == 0,
        }
    }

    /// The source needs the payload of a chunk no more.
    pub(super) fn drop_kept(&mut self, chunk: u64) {
        let kept = &mut self.node(0).kept;
        let Some(at) = kept.iter().position(|kept| kept.chunk == chunk) else {
            return;
        };
        let kept = kept.remove(at);
        if kept.is_released {
            self.free(0, kept.slot);
        }
    }

    /// What a stage knows when it begins with a chunk.
    fn remember(
        &mut self,
        map: &Map,
        (rank, stage): (usize, usize),
        ticket: &Ticket,
        message: Message,
        starts_epoch: bool,
    ) {
        let node = self.node(rank);
        let (chunk, epoch) = (ticket.chunk.get(), ticket.epoch.get());
        let detail = || format!("rank {rank}, stage {stage}: {ticket:?}");
        hold(
            ticket.attempt == node.core.attempt(),
            "older attempts are not run on",
            detail,
        );
        let place = map.places[rank][stage];
        hold(
            epoch >= node.told || place.follows(),
            "nothing stale is worked on",
            detail,
        );
        let is_sink = place.is_sink;
        if !map.shape.orders.is_empty() {
            if is_sink {
                self.taken.push(chunk);
            }
            return;
        }
        let seen = &mut node.seen[stage][usize::from(ticket.lap)];
        let before =
            seen.filter(|seen| seen.epoch == epoch && (is_sink || seen.attempt == ticket.attempt));
        let begins = chunk == 0 || map.shape.epoch_of(chunk - 1) != epoch;
        let follows = before.is_some_and(|before| before.chunk + 1 == chunk);
        hold(
            starts_epoch == before.is_none() && (follows || begins || message.rebuilds),
            "a stage works with what came before",
            detail,
        );
        if let Some(last) = *seen {
            hold(
                ticket.attempt > last.attempt || chunk > last.chunk,
                "chunks of one lap come in order",
                detail,
            );
        }
        *seen = Some(Seen {
            attempt: ticket.attempt,
            epoch,
            chunk,
        });
        if is_sink {
            let rises = self.taken.last().is_none_or(|last| *last < chunk);
            hold(rises, "the sink takes each chunk once, in order", detail);
            self.taken.push(chunk);
        }
    }

    /// A stage is done with a chunk.
    pub(super) fn conclude(
        &mut self,
        map: &Map,
        at: (usize, usize),
        ticket: Ticket,
        work: Working,
    ) {
        let (rank, stage) = at;
        let is_current = self.node(rank).core.is_current(&ticket);
        let place = map.places[rank][stage];
        if place.is_sink {
            self.node(rank).core.handle_taken(ticket.chunk);
            self.remember_said(map, ticket.chunk.get(), false);
        }
        // The acceptance goes to the source of this rank in any case. Over an edge only in order with those before it.
        let tells_here = place.is_sink && matches!(place.outputs[ONWARD], Wire::Local(_));
        if !is_current && !tells_here {
            self.free(rank, work.output);
            return;
        }
        let mut message = Self::infer_of(&ticket, work.message);
        message.slot = work.output;
        self.hand_on(map, at, &ticket, message);
    }

    /// Hands a chunk on. From the sink, its acceptance goes to the source.
    fn hand_on(&mut self, map: &Map, at: (usize, usize), ticket: &Ticket, message: Message) {
        let (rank, stage) = at;
        let output = ticket.way_out.0;
        let is_sink = map.places[rank][stage].is_sink;
        match map.places[rank][stage].outputs[output] {
            Wire::Local(_) if is_sink => self.accepted(message),
            _ if is_sink => self.hand_to(map, (rank, stage, output), Message { lap: 0, ..message }),
            _ => self.hand_to(map, (rank, stage, output), message),
        }
    }

    fn hand_to(
        &mut self,
        map: &Map,
        (rank, stage, output): (usize, usize, usize),
        message: Message,
    ) {
        match map.places[rank][stage].outputs[output] {
            Wire::Local(to) => self.arrive(map, (rank, to, output), message, true),
            Wire::Edge(edge) => {
                hold(
                    !self.is_alone(rank),
                    "a rank that is alone sends nothing",
                    || format!("rank {rank}: {message:?}"),
                );
                self.push(edge, message);
                let is_kept = map.shape.deaths > 0 && self.is_of_source(map, message.slot, rank);
                if message.slot != Pool::None && !is_kept {
                    self.lanes[edge].sends.push((message.chunk, message.lap));
                }
                if map.shape.device == Device::InOrder && message.slot != Pool::None {
                    let transfer = (edge, message.chunk, message.lap, message.attempt);
                    let operation = Operation::Send(transfer);
                    self.node(rank).operations.push_back(operation);
                }
            }
            Wire::None => unreachable!("a chunk goes on to a stage"),
        }
    }

    pub(super) fn push(&mut self, edge: usize, message: Message) {
        let lane = &mut self.lanes[edge];
        hold(!lane.is_closed, "nothing follows a SHUTDOWN", || {
            format!("{message:?}")
        });
        let last = &mut lane.last[usize::from(message.lap)];
        let rises = !self.turns.is_empty() || *last < Some(message.chunk);
        hold(rises, "chunks of one lap go in order", || {
            format!("{message:?}")
        });
        *last = Some(message.chunk);
        if lane.is_open {
            lane.queue.push_back(Frame::Infer(message));
        }
    }

    fn close(&mut self, map: &Map, rank: usize, stage: usize) {
        let open = self.at(0).core.in_flight();
        let is_alone = self.is_alone(rank);
        hold(
            open == 0 || is_alone,
            "no SHUTDOWN before all is accepted",
            || format!("{open} are not"),
        );
        for edge in self.closes(map, rank, stage) {
            if !self.is_alone(rank) {
                let lane = &mut self.lanes[edge];
                hold(!lane.is_closed, "one SHUTDOWN goes over each edge", || {
                    format!("edge {edge}")
                });
                lane.is_closed = true;
                if lane.is_open {
                    lane.queue.push_back(Frame::Shutdown);
                }
            }
        }
        self.node(rank).core.handle_closed_behind(stage);
    }

    pub(super) fn operate_one(&mut self, map: &Map, rank: usize) {
        match self.node(rank).operations.pop_front() {
            Some(Operation::Send(transfer)) => {
                self.sent.insert(transfer);
            }
            Some(Operation::Receive(transfer)) => {
                self.sent.remove(&transfer);
                self.transferred(map, transfer);
            }
            Some(Operation::Work(stage)) => self.finish_work(map, rank, stage),
            None => unreachable!(),
        }
    }
}
