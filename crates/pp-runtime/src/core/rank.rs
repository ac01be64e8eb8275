//! What a rank does next with its stages.

use std::collections::VecDeque;

use pp_contract::{CacheEpoch, ChunkIndex};

use super::action::{Action, StageFacts, Ticket, TooMany};
use super::layout::{LAP, LocalStage, Membership, ONWARD, Wire, order};
use super::ledger::{Counts, Cut, Due, Ledger, Unexpected};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct StageState<C, W> {
    stage: LocalStage,
    /// By input, oldest first.
    waiting: [VecDeque<(Ticket, C)>; 2],
    /// What a device works on, oldest first.
    working: VecDeque<(Ticket, W)>,
    /// Nothing more comes by this input.
    is_closed: [bool; 2],
    /// The stages behind were told that nothing more comes, and the other members of the group that this rank leads.
    has_closed: bool,
    /// Other members of that group that have said that nothing more comes from them.
    left: usize,
    /// The epoch that was worked on last, by lap.
    epochs: Vec<Option<CacheEpoch>>,
}

/// The state of one rank.
///
/// The core holds the one record of each chunk for the driver, and never looks at it: an `L` at the source until the
/// sink has accepted it, a `C` while it waits before a stage, a `W` while a device works on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RankCore<L, C, W> {
    depth: u32,
    stages: Vec<StageState<C, W>>,
    /// Stage and input, in the order in which they are looked at.
    order: Vec<(usize, usize)>,
    /// On the rank of the source.
    ledger: Option<Ledger<L>>,
    attempt: u16,
    /// Chunks of older epochs are overtaken by a hard cut.
    oldest: CacheEpoch,
    /// The first chunk that the sink does not have.
    not_taken: ChunkIndex,
    is_alone: bool,
    is_stopped: bool,
    /// The rank of the source needs no other: the ranks will not meet again.
    is_released: bool,
}

impl<L, C, W> RankCore<L, C, W> {
    /// A rank with these stages, in a job that keeps at most `depth` chunks in flight.
    ///
    /// # Panics
    /// If `depth` is 0: nothing would ever be admitted.
    #[must_use]
    pub fn new(stages: Vec<LocalStage>, depth: u32) -> Self {
        let has_source = stages.first().is_some_and(LocalStage::is_source);
        let state = |stage| StageState {
            stage,
            waiting: [VecDeque::new(), VecDeque::new()],
            working: VecDeque::new(),
            is_closed: [false; 2],
            has_closed: false,
            left: 0,
            epochs: Vec::new(),
        };
        Self {
            depth,
            order: order(&stages),
            stages: stages.into_iter().map(state).collect(),
            ledger: has_source.then(|| Ledger::new(depth)),
            attempt: 0,
            oldest: CacheEpoch::new(0),
            not_taken: ChunkIndex::new(0),
            is_alone: false,
            is_stopped: false,
            is_released: false,
        }
    }

    /// What to do now. `facts` has those of each stage.
    pub fn poll(&self, facts: &[StageFacts]) -> Action {
        if self.is_stopped {
            return Action::Stop;
        }
        if let Some(action) = self.releases() {
            return action;
        }
        let mut ready = self.order.iter().filter_map(|&(stage, input)| {
            let facts = &facts[stage];
            match self.stages[stage].stage.is_source() {
                true => self.feeds(facts),
                false => self.runs(stage, input, facts),
            }
        });
        if let Some(action) = ready.next() {
            return action;
        }
        if let Some(stage) = self.closes() {
            return Action::Close { stage };
        }
        if self.is_finished() {
            return Action::Finish;
        }
        Action::Wait
    }

    /// What can go at once, whatever else there is.
    fn releases(&self) -> Option<Action> {
        self.order.iter().find_map(|&(stage, input)| {
            let state = &self.stages[stage];
            let (ticket, _) = state.waiting[input].front()?;
            if !self.is_current(ticket) || self.has_taken(stage, ticket) {
                return Some(Action::Drop { stage, input });
            }
            // Chunks of one lap leave in order, so what is being worked on comes first.
            let mut working = state.working.iter();
            let is_next = working.all(|(working, _)| working.lap != ticket.lap);
            let passes = self.is_overtaken(stage, ticket) && is_next;
            passes.then_some(Action::PassOn { stage, input })
        })
    }

    fn feeds(&self, facts: &StageFacts) -> Option<Action> {
        // A rank that is alone has all that is needed behind the source.
        if self.is_alone || !facts.is_free[ONWARD] {
            return None;
        }
        match self.ledger.as_ref()?.due(self.oldest) {
            Due::Nothing => None,
            Due::SendAgain { rebuilds } => Some(Action::SendAgain { rebuilds }),
            Due::Build {
                chunk,
                epoch,
                starts_epoch,
                rebuilds,
            } => Some(Action::Build {
                chunk,
                epoch,
                starts_epoch,
                rebuilds,
            }),
        }
    }

    fn runs(&self, stage: usize, input: usize, facts: &StageFacts) -> Option<Action> {
        let state = &self.stages[stage];
        let (ticket, _) = state.waiting[input].front()?;
        let is_ready = facts.is_here[input] && facts.is_free[ticket.way_out.0];
        let runs = is_ready && !self.is_overtaken(stage, ticket);
        runs.then_some(Action::Run { stage, input })
    }

    /// Whether this is the sink, and it has the chunk.
    fn has_taken(&self, stage: usize, ticket: &Ticket) -> bool {
        self.stages[stage].stage.is_sink && ticket.chunk < self.not_taken
    }

    /// Whether a hard cut overtook the chunk. What a group has begun all its members do: the leader alone judges.
    fn is_overtaken(&self, stage: usize, ticket: &Ticket) -> bool {
        let follows = self.stages[stage].stage.follows();
        !follows && (ticket.is_overtaken || ticket.epoch < self.oldest)
    }

    /// The stage that has nothing more to do and whose successors do not know it.
    fn closes(&self) -> Option<usize> {
        let mut stages = self.stages.iter();
        stages.position(|state| {
            !state.has_closed && state.is_empty() && self.is_closed_before(&state.stage)
        })
    }

    /// Whether nothing more comes to a stage, but for what is inside of its ring.
    fn is_closed_before(&self, stage: &LocalStage) -> bool {
        if stage.is_source() {
            return self.ledger.as_ref().is_some_and(Ledger::is_done);
        }
        self.is_closed(stage, ONWARD)
    }

    fn is_closed(&self, stage: &LocalStage, input: usize) -> bool {
        match stage.inputs[input] {
            Wire::None => true,
            Wire::Local(before) => self.stages[before].has_closed,
            Wire::Edge(_) => {
                let state = self.stages.iter().find(|state| state.stage.at == stage.at);
                self.is_alone || state.is_some_and(|state| state.is_closed[input])
            }
        }
    }

    fn is_finished(&self) -> bool {
        // The source meets all ranks again if one is lost before.
        let may_leave = self.ledger.is_some() || self.is_released;
        let mut stages = self.stages.iter();
        may_leave
            && stages.all(|state| {
                let all_closed = [ONWARD, LAP]
                    .into_iter()
                    .all(|input| self.is_closed(&state.stage, input));
                let have_left = self.is_alone || state.left == state.stage.followers();
                state.has_closed && all_closed && have_left
            })
    }

    /// Whether a chunk waits that the leader of a group has begun: the other members wait for this rank in a collective.
    pub fn is_told(&self) -> bool {
        let mut stages = self.stages.iter();
        stages.any(|state| state.stage.follows() && !state.waiting[ONWARD].is_empty())
    }

    /// Whether the source should be asked for the next chunk.
    pub fn wants_offer(&self) -> bool {
        self.ledger.as_ref().is_some_and(Ledger::wants_offer)
    }

    /// The source has a chunk ready; the offer stands until it is built.
    pub fn handle_offer(&mut self, cut: Cut) {
        self.ledger().offer(cut);
    }

    /// The source has no more chunks.
    pub fn handle_source_end(&mut self) {
        self.ledger().end();
    }

    /// Take nothing new, finish what is in flight. Saying it twice changes nothing.
    pub fn handle_drain(&mut self) {
        if let Some(ledger) = &mut self.ledger {
            ledger.drain();
        }
    }

    /// Nothing is worked on, taken or written any more.
    pub fn handle_abort(&mut self) {
        self.is_stopped = true;
    }

    /// The chunk of an [`Action::Build`] was built. If a hard cut begins it, chunks of an older
    /// epoch are overtaken from now on: gives that epoch, which the other ranks are to be told.
    pub fn handle_built(
        &mut self,
        chunk: ChunkIndex,
        epoch: CacheEpoch,
        record: L,
    ) -> Option<CacheEpoch> {
        let is_hard = self.ledger().built(chunk, epoch, record);
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

    /// The rank of the source needs no other any more. Until then a rank without the source does not finish.
    pub fn handle_released(&mut self) {
        self.is_released = true;
    }

    /// All edges are new: what was said over the old ones counts no more, nor does an abort while they were there.
    pub fn handle_reconnected(&mut self) {
        self.is_stopped = false;
        self.is_alone = false;
        self.is_released = false;
        for state in &mut self.stages {
            state.is_closed = [false; 2];
            state.has_closed = false;
            state.left = 0;
        }
    }

    /// The attempt that this rank is in.
    pub fn attempt(&self) -> u16 {
        self.attempt
    }

    /// Whether a chunk goes on behind a stage: it is of the attempt that goes on, and somebody needs it.
    pub fn is_current(&self, ticket: &Ticket) -> bool {
        ticket.attempt >= self.attempt && !self.is_needless(ticket.chunk)
    }

    /// Whether the rank is alone, and no stage has to work on this chunk: the sink has it, or works on it as it came before.
    /// Its payload may never come.
    fn is_needless(&self, chunk: ChunkIndex) -> bool {
        let Some(ledger) = self.ledger.as_ref().filter(|_| self.is_alone) else {
            return self.is_alone;
        };
        let is_open = ledger.not_accepted().any(|open| open == chunk);
        !is_open || self.stages.iter().any(|state| state.is_taking(chunk))
    }

    /// The record of the chunk of an [`Action::SendAgain`].
    ///
    /// # Panics
    /// If no chunk is lost.
    pub fn lost(&mut self) -> &mut L {
        let lost = self.ledger().oldest_lost();
        lost.expect("a chunk is lost")
    }

    /// The chunk of an [`Action::SendAgain`] has left. Gives its record.
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

    /// The record of the oldest chunk that waits at this input. `None` if it is to be dropped, or the sink works on it as
    /// it came before: its payload may never come.
    pub fn oldest_waiting(&mut self, stage: usize, input: usize) -> Option<&mut C> {
        let (ticket, _) = self.stages[stage].waiting[input].front()?;
        let is_sent_twice =
            self.has_taken(stage, ticket) || self.stages[stage].is_taking(ticket.chunk);
        if !self.is_current(ticket) || is_sent_twice {
            return None;
        }
        let waiting = self.stages[stage].waiting[input].front_mut();
        waiting.map(|(_, record)| record)
    }

    /// Takes out the oldest chunk of an input, and says whether it is the first of its epoch that the stage works on.
    ///
    /// # Panics
    /// If none waits.
    pub fn begin(&mut self, stage: usize, input: usize) -> (Ticket, C, bool) {
        let waiting = &mut self.stages[stage].waiting[input];
        let (ticket, record) = waiting.pop_front().expect("a chunk waits");
        let is_dropped = !self.is_current(&ticket) || self.has_taken(stage, &ticket);
        let state = &mut self.stages[stage];
        let lap = usize::from(ticket.lap);
        if state.epochs.len() <= lap {
            state.epochs.resize(lap + 1, None);
        }
        let last = state.epochs[lap];
        if !is_dropped && !ticket.is_overtaken {
            state.epochs[lap] = Some(ticket.epoch);
        }
        (ticket, record, last != Some(ticket.epoch))
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
        is_overtaken: bool,
    ) -> Result<Option<L>, Unexpected> {
        // To a rank that is alone nothing comes again.
        let is_current = attempt == self.attempt || self.is_alone;
        self.ledger().accept(chunk, is_current, is_overtaken)
    }

    /// Nothing more comes by this input of a stage: another rank has said so.
    pub fn handle_closed(&mut self, stage: usize, input: usize) {
        self.stages[stage].is_closed[input] = true;
    }

    /// Nothing more comes from another member of the group of this stage: it has said so.
    pub fn handle_left(&mut self, stage: usize) {
        self.stages[stage].left += 1;
    }

    /// The stages behind this one were told that nothing more comes.
    pub fn handle_closed_behind(&mut self, stage: usize) {
        self.stages[stage].has_closed = true;
    }

    /// Other ranks are gone, and none of them is needed: nothing more comes over any edge, and no work of a group is ever
    /// done.
    pub fn handle_alone(&mut self) {
        self.is_alone = true;
        let groups = self.stages.iter_mut();
        for group in groups.filter(|state| state.stage.membership != Membership::Alone) {
            group.working.clear();
        }
        if let Some(ledger) = &mut self.ledger {
            ledger.forget_accepted();
        }
    }

    /// Whether nothing more is needed of other ranks: no chunk will be admitted, and each that the sink does not have
    /// waits, with all that belongs to it, before stages that stand on this rank to the last. `is_here` says whether all
    /// of a waiting chunk is here.
    pub fn is_served(&mut self, mut is_here: impl FnMut(&mut C) -> bool) -> bool {
        let Some(ledger) = &self.ledger else {
            return false;
        };
        if !ledger.admits_no_more() {
            return false;
        }
        let mut here = Vec::new();
        for place in (0..self.stages.len()).rev() {
            let stage = self.stages[place].stage;
            let is_last = stage.is_sink;
            let goes_on = stage.outputs[ONWARD] == Wire::Local(place + 1);
            let is_alone =
                stage.membership == Membership::Alone && stage.outputs[LAP] == Wire::None;
            if stage.is_source() || !is_alone || !(is_last || goes_on) {
                break;
            }
            let attempt = self.attempt;
            let state = &mut self.stages[place];
            // What the sink works on is accepted, of whichever attempt it is.
            let working = state.working.iter().map(|(ticket, _)| ticket);
            let working = working.filter(|ticket| is_last || ticket.attempt == attempt);
            here.extend(working.map(|ticket| ticket.chunk));
            let waiting = state.waiting.iter_mut().flatten();
            let waiting = waiting.filter(|(ticket, _)| ticket.attempt == attempt);
            let arrived = waiting.filter_map(|(ticket, record)| is_here(record).then_some(ticket));
            here.extend(arrived.map(|ticket| ticket.chunk));
        }
        let mut needed = self.ledger.iter().flat_map(Ledger::not_accepted);
        needed.all(|chunk| here.contains(&chunk))
    }

    /// The record of a chunk in flight, at the source.
    pub fn admitted(&mut self, chunk: ChunkIndex) -> Option<&mut L> {
        self.ledger.as_mut()?.find(chunk)
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

    /// Whether a chunk waits or is worked on here, or was admitted here and not accepted.
    pub fn is_busy(&self) -> bool {
        self.in_flight() > 0 || !self.stages.iter().all(StageState::is_empty)
    }

    /// Whether this is the rank of the source and all is done but the goodbyes: the sink has all chunks, and if it is on
    /// another rank it has said so.
    pub fn is_closing(&self) -> bool {
        self.ledger.is_some() && self.stages[0].has_closed && self.has_heard_sink()
    }

    /// Whether the stages behind this one were told that nothing more comes.
    pub fn has_closed(&self, stage: usize) -> bool {
        self.stages[stage].has_closed
    }

    /// Whether the last word of the sink is here, where it comes from another rank.
    pub fn has_heard_sink(&self) -> bool {
        self.stages.first().is_none_or(|state| {
            let comes =
                state.stage.is_source() && matches!(state.stage.inputs[ONWARD], Wire::Edge(_));
            !comes || state.is_closed[ONWARD]
        })
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

impl<C, W> StageState<C, W> {
    /// Whether this is the sink, and a device works on the chunk for it.
    fn is_taking(&self, chunk: ChunkIndex) -> bool {
        let mut working = self.working.iter();
        self.stage.is_sink && working.any(|(ticket, _)| ticket.chunk == chunk)
    }

    fn is_empty(&self) -> bool {
        self.working.is_empty() && self.waiting.iter().all(VecDeque::is_empty)
    }
}
