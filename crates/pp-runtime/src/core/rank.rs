//! The state of a rank, and what changes it.

use std::collections::VecDeque;

use pp_contract::{CacheEpoch, ChunkIndex};

use super::decision::{Ticket, TooMany};
use super::ending::{EndEvent, Ending};
use super::layout::{LocalStage, Membership, ONWARD, order};
use super::ledger::{Counts, Cut, CutShort, Ledger, Unexpected};
use super::order::{FixedOrder, Turns};
use super::state::StageState;

/// The state of one rank.
///
/// The core holds the one record of each chunk for the driver, and never looks at it: an `L` at the source until the
/// sink has accepted it, a `C` while it waits before a stage, a `W` while a device works on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RankCore<L, C, W> {
    depth: u32,
    pub(super) stages: Vec<StageState<C, W>>,
    /// Stage and input, in the order in which they are looked at. In a fixed order those of source and sink alone.
    pub(super) order: Vec<(usize, usize)>,
    /// In a fixed order, of the stages between them.
    pub(super) turns: Option<Turns>,
    /// On the rank of the source.
    pub(super) ledger: Option<Ledger<L>>,
    pub(super) attempt: u16,
    /// Chunks of older epochs are made stale by a hard cut.
    pub(super) oldest: CacheEpoch,
    /// The first chunk that the sink does not have.
    not_taken: ChunkIndex,
    pub(super) ending: Ending,
    /// The ranks meet again if one is lost, so a rank stays until the source needs it no more.
    pub(super) meets_again: bool,
}

impl<L, C, W> RankCore<L, C, W> {
    /// A rank with these stages, in a job that keeps at most `depth` chunks in flight.
    ///
    /// # Panics
    /// If `depth` is 0: nothing would ever be admitted.
    #[must_use]
    pub fn new(stages: Vec<LocalStage>, depth: u32) -> Self {
        let has_source = stages.first().is_some_and(LocalStage::is_source);
        Self {
            depth,
            order: order(&stages),
            turns: None,
            stages: stages.into_iter().map(StageState::new).collect(),
            ledger: has_source.then(|| Ledger::new(depth)),
            attempt: 0,
            oldest: CacheEpoch::new(0),
            not_taken: ChunkIndex::new(0),
            ending: Ending::Running,
            meets_again: false,
        }
    }

    /// Lets the rank go on after a loss: the ranks of the job meet again.
    #[must_use]
    pub fn with_restarts(mut self) -> Self {
        self.meets_again = true;
        self
    }

    /// Lets the rank work in a fixed order. It takes no cuts and no new attempts: a step is whole.
    ///
    /// # Panics
    /// If the order is that of another rank.
    #[must_use]
    pub fn in_order(mut self, order: &FixedOrder) -> Self {
        let stages = self.stages.iter().map(|state| &state.stage);
        self.turns = Some(Turns::new(order, stages));
        let stages = &self.stages;
        self.order.retain(|(stage, _)| {
            let stage = &stages[*stage].stage;
            stage.is_source() || stage.is_sink
        });
        if let Some(ledger) = &mut self.ledger {
            ledger.in_steps_of(order.chunks());
        }
        self
    }

    /// Where the chunk waits that is next at an input: the oldest one. In a fixed order the one whose turn it is.
    pub(super) fn next_at(&self, stage: usize, input: usize) -> Option<usize> {
        let state = &self.stages[stage];
        let mut waiting = state.waiting[input].iter();
        let has_turns = !state.stage.is_source() && !state.stage.is_sink;
        match self.turns.as_ref().filter(|_| has_turns) {
            Some(turns) => {
                let due = turns.due(stage)?;
                waiting.position(|(ticket, _)| ticket.chunk == due)
            }
            None => waiting.next().map(|_| 0),
        }
    }

    /// Says whether this is the sink, and it has the chunk.
    pub(super) fn has_taken(&self, stage: usize, ticket: &Ticket) -> bool {
        // In a fixed order they come in any order, and none comes twice.
        self.turns.is_none() && self.stages[stage].stage.is_sink && ticket.chunk < self.not_taken
    }

    /// Says whether a hard cut made the chunk stale. Only a leader decides; the other members finish what it has begun.
    pub(super) fn is_stale(&self, stage: usize, ticket: &Ticket) -> bool {
        let follows = self.stages[stage].stage.follows();
        !follows && (ticket.is_stale || ticket.epoch < self.oldest)
    }

    /// Says whether a chunk waits that the leader of a group has begun: the other members wait for this rank in a collective.
    pub fn is_told(&self) -> bool {
        let mut stages = self.stages.iter();
        stages.any(|state| state.stage.follows() && !state.waiting[ONWARD].is_empty())
    }

    /// Says whether the source should be asked for the next chunk.
    pub fn wants_offer(&self) -> bool {
        self.ledger.as_ref().is_some_and(Ledger::wants_offer)
    }

    /// The source has a chunk ready; the offer stands until it is built.
    pub fn handle_offer(&mut self, cut: Cut) {
        self.ledger().offer(cut);
    }

    /// The source has no more chunks.
    ///
    /// # Errors
    /// A step of a fixed order has begun and is not whole.
    pub fn handle_source_end(&mut self) -> Result<(), CutShort> {
        self.ending = self.ending.after(EndEvent::Drain);
        self.ledger().end()
    }

    /// How far the rank is on its way to its end.
    pub fn ending(&self) -> Ending {
        self.ending
    }

    pub(super) fn is_alone(&self) -> bool {
        self.ending == Ending::Alone
    }

    /// Moves the rank toward its end, or back from it. An event that comes twice changes nothing the second time.
    ///
    /// A drain finishes the chunks in flight, and in a fixed order the step that has begun. It outlives a loss.
    pub fn handle_end(&mut self, event: EndEvent) {
        let was_alone = self.is_alone();
        self.ending = self.ending.after(event);
        match event {
            EndEvent::Drain => {
                if let Some(ledger) = &mut self.ledger {
                    ledger.drain();
                }
            }
            EndEvent::Leave if self.is_alone() && !was_alone => self.leave_others(),
            // What was said over the old edges counts no more.
            EndEvent::Reconnect => self.stages.iter_mut().for_each(StageState::reopen),
            _ => {}
        }
    }

    /// The chunk of a [`Decision::Build`](crate::core::Decision::Build) was built. If a hard cut begins it, chunks of an older
    /// epoch are stale from now on: gives that epoch, which the other ranks are to be told.
    pub fn handle_built(
        &mut self,
        chunk: ChunkIndex,
        epoch: CacheEpoch,
        record: L,
    ) -> Option<CacheEpoch> {
        let is_draining = self.ending == Ending::Draining;
        let ledger = self.ledger();
        let is_hard = ledger.built(chunk, epoch, record);
        if is_draining {
            ledger.drain();
        }
        if !is_hard {
            return None;
        }
        self.handle_cut(epoch);
        Some(epoch)
    }

    /// The source has told that a hard cut began this epoch.
    pub fn handle_cut(&mut self, epoch: CacheEpoch) {
        self.oldest = self.oldest.max(epoch);
    }

    /// A rank was lost, and this attempt begins: chunks of older ones are dropped, and the source sends again what the
    /// sink has not accepted.
    pub fn handle_attempt(&mut self, attempt: u16) {
        if attempt <= self.attempt {
            return;
        }
        self.attempt = attempt;
        // The sink takes nothing twice, so it goes on where it was.
        for state in self.stages.iter_mut().filter(|state| !state.stage.is_sink) {
            state.epochs.clear();
        }
        if let Some(ledger) = &mut self.ledger {
            ledger.lose();
        }
    }

    /// The attempt that this rank is in.
    pub fn attempt(&self) -> u16 {
        self.attempt
    }

    /// Says whether a chunk goes on behind a stage: it is of the attempt that goes on, and somebody needs it.
    pub fn is_current(&self, ticket: &Ticket) -> bool {
        ticket.attempt >= self.attempt && !self.is_needless(ticket.chunk)
    }

    /// Says whether the rank is alone, and no stage has to work on this chunk: the sink has it, or works on it as it came before.
    /// Its payload may never come.
    fn is_needless(&self, chunk: ChunkIndex) -> bool {
        let Some(ledger) = self.ledger.as_ref().filter(|_| self.is_alone()) else {
            return self.is_alone();
        };
        let is_open = ledger.not_accepted().any(|open| open == chunk);
        !is_open || self.stages.iter().any(|state| state.is_taking(chunk))
    }

    /// The record of the chunk of a [`Decision::SendAgain`](crate::core::Decision::SendAgain).
    ///
    /// # Panics
    /// If no chunk is lost.
    pub fn lost(&mut self) -> &mut L {
        let lost = self.ledger().oldest_lost();
        lost.expect("a chunk is lost")
    }

    /// The chunk of a [`Decision::SendAgain`](crate::core::Decision::SendAgain) has left. Gives its record.
    ///
    /// # Panics
    /// If no chunk is lost.
    pub fn handle_sent_again(&mut self) -> &mut L {
        let oldest = self.oldest;
        let sent = self.ledger().sent_again(oldest);
        sent.expect("a chunk is lost")
    }

    /// A chunk came by this input of a stage. Gives its record.
    ///
    /// # Errors
    /// More came than can be in flight.
    pub fn handle_arrival(
        &mut self,
        stage: usize,
        input: usize,
        ticket: Ticket,
        record: C,
    ) -> Result<&mut C, TooMany> {
        let depth = self.depth;
        let waiting = &mut self.stages[stage].waiting[input];
        let of_attempt = waiting
            .iter()
            .filter(|(waiting, _)| waiting.attempt == ticket.attempt);
        if of_attempt.count() >= depth as usize {
            let chunk = ticket.chunk;
            return Err(TooMany { chunk, depth });
        }
        waiting.push_back((ticket, record));
        Ok(&mut waiting.back_mut().expect("just put there").1)
    }

    /// The record of the oldest chunk that waits at this input; in a fixed order of the one whose turn it is. `None` if it
    /// is to be dropped, or the sink works on it as it came before: its payload may never come.
    pub fn oldest_waiting(&mut self, stage: usize, input: usize) -> Option<&mut C> {
        let next = self.next_at(stage, input)?;
        let (ticket, _) = &self.stages[stage].waiting[input][next];
        let is_sent_twice =
            self.has_taken(stage, ticket) || self.stages[stage].is_taking(ticket.chunk);
        if !self.is_current(ticket) || is_sent_twice {
            return None;
        }
        let waiting = self.stages[stage].waiting[input].get_mut(next);
        waiting.map(|(_, record)| record)
    }

    /// Takes out the oldest chunk of an input, and says whether it is the first of its epoch that the stage works on. In a
    /// fixed order takes the one whose turn it is. Of two that overlap the first stage begins first.
    ///
    /// # Panics
    /// If none waits.
    pub fn begin(&mut self, stage: usize, input: usize) -> (Ticket, C, bool) {
        let next = self.next_at(stage, input);
        let waiting = &mut self.stages[stage].waiting[input];
        let next = next.and_then(|next| waiting.remove(next));
        let (ticket, record) = next.expect("a chunk waits");
        if let Some(turns) = &mut self.turns {
            turns.begun(stage);
        }
        let is_dropped = !self.is_current(&ticket) || self.has_taken(stage, &ticket);
        let state = &mut self.stages[stage];
        let lap = usize::from(ticket.lap);
        if state.epochs.len() <= lap {
            state.epochs.resize(lap + 1, None);
        }
        let last = state.epochs[lap];
        if !is_dropped && !ticket.is_stale {
            state.epochs[lap] = Some(ticket.epoch);
        }
        (ticket, record, last != Some(ticket.epoch))
    }

    /// Whether a stage puts something off of a chunk that it runs, until a [`Decision::Later`](crate::core::Decision::Later).
    pub fn puts_off(&self, stage: usize, chunk: ChunkIndex) -> bool {
        let turns = self.turns.as_ref();
        turns.is_some_and(|turns| turns.puts_off(stage, chunk))
    }

    /// Notes that a [`Decision::Later`](crate::core::Decision::Later) was carried out.
    pub fn handle_later(&mut self) {
        if let Some(turns) = &mut self.turns {
            turns.advance();
        }
    }

    /// A device works on the chunk that began last.
    pub fn handle_working(&mut self, stage: usize, ticket: Ticket, record: W) {
        self.stages[stage].working.push_back((ticket, record));
    }

    /// Takes out the oldest chunk that a device works on, to ask how far it is.
    pub fn take_working(&mut self, stage: usize) -> Option<(Ticket, W)> {
        self.stages[stage].working.pop_front()
    }

    /// The device still works on the chunk that was taken out.
    pub fn handle_still_working(&mut self, stage: usize, ticket: Ticket, record: W) {
        self.stages[stage].working.push_front((ticket, record));
    }

    /// The records of the chunks that a stage has begun and not concluded.
    pub fn working(&self, stage: usize) -> impl Iterator<Item = &W> {
        self.stages[stage].working.iter().map(|(_, record)| record)
    }

    /// The sink has taken a chunk, or passed it over.
    pub fn handle_taken(&mut self, chunk: ChunkIndex) {
        let next = chunk.next().unwrap_or(chunk);
        self.not_taken = self.not_taken.max(next);
    }

    /// The sink has a chunk, which came to it in this attempt. Gives the chunk's record; `None` if the sink had said so
    /// before.
    ///
    /// # Errors
    /// It is not the oldest chunk in flight.
    pub fn handle_accepted(
        &mut self,
        chunk: ChunkIndex,
        attempt: u16,
        is_stale: bool,
    ) -> Result<Option<L>, Unexpected> {
        // To a rank that is alone nothing comes again.
        let is_current = attempt == self.attempt || self.is_alone();
        self.ledger().accept(chunk, is_current, is_stale)
    }

    /// Nothing more comes over any edge, and no work of a group is ever done.
    fn leave_others(&mut self) {
        let groups = self.stages.iter_mut();
        for group in groups.filter(|state| state.stage.membership != Membership::Alone) {
            group.working.clear();
        }
        if let Some(ledger) = &mut self.ledger {
            ledger.forget_accepted();
        }
    }

    /// The record of a chunk in flight, at the source.
    pub fn admitted(&mut self, chunk: ChunkIndex) -> Option<&mut L> {
        self.ledger.as_mut()?.find(chunk)
    }

    /// The records of all chunks in flight that the sink does not have, at the source, the oldest first.
    pub fn all_admitted(&mut self) -> impl DoubleEndedIterator<Item = &mut L> {
        self.ledger.iter_mut().flat_map(Ledger::records)
    }

    /// How many chunks wait before stages.
    pub fn waiting(&self) -> usize {
        let waiting = self.stages.iter().flat_map(|state| &state.waiting);
        waiting.map(VecDeque::len).sum()
    }

    /// The records of all chunks that wait before a stage.
    pub fn waiting_mut(&mut self) -> impl Iterator<Item = &mut C> {
        let waiting = self.stages.iter_mut().flat_map(|state| &mut state.waiting);
        waiting.flatten().map(|(_, record)| record)
    }

    /// The job is over: the records of all chunks go.
    pub fn abandon(&mut self) {
        if let Some(ledger) = &mut self.ledger {
            ledger.clear();
        }
        for state in &mut self.stages {
            state.waiting.iter_mut().for_each(VecDeque::clear);
            state.working.clear();
        }
    }

    /// Chunks between admission and acceptance; 0 on a rank without the source.
    pub fn in_flight(&self) -> u32 {
        self.ledger.as_ref().map_or(0, Ledger::in_flight)
    }

    /// Says whether a chunk is in flight or offered, and goes on without another word of the source; never on a rank without
    /// the source.
    pub fn holds_chunk(&self) -> bool {
        self.ledger.as_ref().is_some_and(Ledger::holds_chunk)
    }

    /// Chunks that were admitted, and that the sink does not have; none on a rank without the source.
    pub fn not_accepted(&self) -> impl Iterator<Item = ChunkIndex> {
        self.ledger.iter().flat_map(Ledger::not_accepted)
    }

    /// Says whether a chunk waits or is worked on here, or was admitted here and not accepted.
    pub fn is_busy(&self) -> bool {
        self.in_flight() > 0 || !self.stages.iter().all(StageState::is_empty)
    }

    /// The epoch of the newest chunk that was admitted.
    pub fn epoch(&self) -> CacheEpoch {
        let ledger = self.ledger.as_ref();
        ledger.map_or(CacheEpoch::new(0), Ledger::epoch)
    }

    /// The oldest epoch whose chunks are worked on.
    pub fn oldest_epoch(&self) -> CacheEpoch {
        self.oldest
    }

    /// How many chunks went where so far.
    pub fn counts(&self) -> Counts {
        let ledger = self.ledger.as_ref();
        ledger.map_or(Counts::default(), Ledger::counts)
    }

    fn ledger(&mut self) -> &mut Ledger<L> {
        let ledger = self.ledger.as_mut();
        ledger.expect("the source stands on this rank")
    }
}
