//! The run of a rank, from its first chunk to its last, over all edges that it has had.
//!
//! Hazard: another rank dies, and its state, its received messages and its results die with it.
//! Guarantee: nothing is lost. The source keeps each chunk until the sink has accepted it. After a loss it sends the chunks
//! again, under their old numbers and as a new attempt, with the context that a new process lacks. Chunks of an older
//! attempt are received and dropped, and the sink takes no chunk twice.
//!
//! Choices: the state that outlives a loss ([`RankRun`]) and the loop that runs until a loss ([`super::session`]) are two
//! types. Without restarts nothing is kept, and slots return as early as they can.

use std::collections::VecDeque;

use pp_contract::{CallId, ChunkIndex, Fault, FaultKind, Generation, Message, Rank, StageSpec};
use pp_transport::backend::End;
use pp_transport::edge::{Edges, GroupEnd as _};
use pp_transport::error::TransportError;
use pp_transport::flight::EdgeLog;

use super::chunk::CoreOf;
use super::inbox::Inbox;
use super::options::RankOptions;
use super::outbox::Outbox;
use super::retained::Context;
use super::work::Stages;
use crate::clock::{Clock, now_ns};
use crate::core::{Behind, Counts, EndEvent, LivePolicy, LocalStage, RankCore, stages_of};
use crate::report::{Recorder, Restart};
use crate::stage::Source;

/// Sums up the run of a rank that finished.
#[derive(Debug)]
pub struct Summary {
    /// Counts the chunks; all counts are 0 on a rank without the source.
    pub counts: Counts,
    /// Holds the records of the latest chunks; empty on a rank without the source.
    pub recorder: Recorder,
    /// Names the backend that carried the chunks, by its short name.
    pub transport: &'static str,
    /// Lists every loss of a rank after which the run went on.
    pub restarts: Vec<Restart>,
}

/// Holds the run of a rank over edges that may be replaced.
///
/// # If dropped
/// Everything in flight is poisoned.
pub struct RankRun<'s, E: Edges, S: Source<E::Tx>> {
    pub(super) rank: Rank,
    pub(super) places: Vec<LocalStage>,
    /// Holds, by stage, this rank's member of the group that runs the stage. It is dropped before the stages, because its
    /// work uses their memory: the drop waits for the work, but where the process ends with it.
    pub(super) groups: Vec<Option<E::Group>>,
    pub(super) stages: Stages<'s, E::Tx, E::Rx, E::Group, S>,
    pub(super) options: RankOptions,
    pub(super) inbox: Inbox<E>,
    pub(super) outbox: Outbox<E>,
    pub(super) core: CoreOf<E, S>,
    pub(super) context: Context<E>,
    /// Holds the latest acceptances, if the source is on another rank: the loss of a rank also loses the acceptances under
    /// way.
    pub(super) acceptances: VecDeque<(ChunkIndex, Message<S::Plan>)>,
    pub(super) next_call: CallId,
    pub(super) recorder: Recorder,
    /// Places the times of other ranks on the clock of this rank.
    pub(super) clock: Clock,
    /// Tells whether a chunk waits for the sink while the sink is not ready.
    pub(super) waits_for_sink: bool,
    /// Tells, by stage, whether a device still works on what has gone on ([`crate::stage::Stage::ahead`]).
    pub(super) is_ahead: Vec<bool>,
    /// Holds the time when each stage ended its last work.
    pub(super) last_end_ns: Vec<u64>,
    /// Counts the nanoseconds that the driver has waited, in all.
    pub(super) waited_ns: u64,
    pub(super) restarts: Vec<Restart>,
    /// Lists the ranks that lead stages.
    pub(super) leaders: Vec<Rank>,
    pub(super) live: LivePolicy,
    pub(super) behind: Behind,
}

impl<'s, E, S> RankRun<'s, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    /// Makes the run of the stages that stand on `rank`, before its first chunk. `local` makes the slots between two stages
    /// of this rank; its arguments are their places in the pipeline. It makes as many slots as the depth. From a stage to
    /// itself it makes one more, because the stage writes one slot while it reads another.
    ///
    /// # Errors
    /// There is no memory for the slots.
    ///
    /// # Panics
    /// If the stages are not those of the rank, if the depth is 0, or if a run in a fixed order allows restarts.
    pub fn new(
        rank: Rank,
        stages: Stages<'s, E::Tx, E::Rx, E::Group, S>,
        options: RankOptions,
        local: impl FnMut(usize, usize) -> Result<E::Local, TransportError>,
    ) -> Result<Self, TransportError> {
        let places = stages_of(&options.pipeline, rank);
        let given = usize::from(stages.source.is_some()) + stages.work.len();
        assert_eq!(given, places.len(), "rank {rank} brings its stages");
        let mut inbox = Inbox::new(&options.pipeline, &places, options.steps);
        let outbox = Outbox::new(&options.pipeline, &places, local)?;
        let mut core = RankCore::new(places.clone(), options.depth);
        if let Some(order) = options.order.fixed() {
            assert!(!options.keeps(), "a fixed order takes no restarts");
            inbox.expect(order, &places);
            core = core.in_order(order);
        }
        if options.keeps() {
            core = core.with_restarts();
        }
        let stages_of_all = options.pipeline.stages().iter();
        let mut leaders: Vec<Rank> = stages_of_all.map(StageSpec::leader).collect();
        leaders.sort_unstable();
        leaders.dedup();
        Ok(Self {
            live: LivePolicy::new(options.live, options.depth, leaders.len()),
            behind: Behind::default(),
            leaders,
            inbox,
            outbox,
            core,
            context: Context::new(options.kept() as usize),
            acceptances: VecDeque::new(),
            next_call: CallId::new(0),
            recorder: match stages.source {
                Some(_) => Recorder::new(options.pipeline.clone()),
                None => Recorder::with_capacity(options.pipeline.clone(), 1),
            },
            clock: Clock::new(options.capabilities.payload_moves),
            groups: places.iter().map(|_| None).collect(),
            waits_for_sink: false,
            is_ahead: vec![false; places.len()],
            last_end_ns: vec![now_ns(); places.len()],
            waited_ns: 0,
            restarts: Vec::new(),
            rank,
            places,
            stages,
            options,
        })
    }

    /// Attaches the end of an edge for the attempt that begins. `edge` is the place of the edge in
    /// [`Pipeline::edges`](pp_contract::Pipeline::edges).
    ///
    /// # Panics
    /// If this rank has no such end.
    pub fn attach(&mut self, edge: usize, end: End<E>) {
        let log = |peer| EdgeLog {
            recorder: self.options.flight.clone(),
            peer,
            generation: Generation::new(self.core.attempt().into()),
            edge: edge as u32,
        };
        match end {
            End::In(end) => self.inbox.attach(edge, end, log),
            End::Out(end) => self.outbox.attach(edge, end, log),
        }
    }

    /// Attaches this rank's member of the group that runs the stage at place `at` of the pipeline.
    ///
    /// # Panics
    /// If the stage does not stand on this rank.
    pub fn attach_group(&mut self, at: usize, group: E::Group) {
        let place = self.places.iter().position(|place| place.at == at);
        self.groups[place.expect("the stage stands on this rank")] = Some(group);
    }

    /// Sets the slot size of the leader of the group that runs the stage at place `at` of the pipeline. A message that
    /// announces a larger payload to a member is refused.
    pub fn leader_holds(&mut self, at: usize, slot_bytes: u64) {
        let stages = (0..).zip(&self.places);
        for (stage, _) in stages.filter(|(_, place)| place.at == at) {
            self.inbox.leader_holds(stage, slot_bytes);
        }
    }

    /// Takes out the ends of all edges, and leaves all groups. Everything in flight over the edges is poisoned.
    pub fn detach(&mut self) -> Vec<End<E>> {
        self.groups.fill_with(|| None);
        let mut ends = self.outbox.detach();
        ends.extend(self.inbox.detach());
        ends
    }

    /// Returns the ranks to which there are edges, each once.
    pub(super) fn peers(&self) -> Vec<Rank> {
        let incoming = self.inbox.inputs().iter().map(|input| input.peer);
        let mut peers: Vec<Rank> = self.outbox.peers().chain(incoming).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// Returns this fault of a stage of this rank, at work on this chunk, with both named.
    pub(super) fn in_stage(
        &self,
        (stage, chunk): (usize, Option<ChunkIndex>),
        fault: Fault,
    ) -> Fault {
        let spec = &self.options.pipeline.stages()[self.places[stage].at];
        fault.in_stage(&spec.label(), chunk)
    }

    /// Returns the source, if it is on this rank, and the summary of a run that has finished.
    pub fn finish(self) -> (Option<S>, Summary) {
        let summary = Summary {
            counts: self.core.counts(),
            recorder: self.recorder,
            transport: self.options.capabilities.name,
            restarts: self.restarts,
        };
        (self.stages.source, summary)
    }

    /// Begins an attempt over new edges: the source sends again every chunk that the sink has not accepted. The first
    /// attempt, number 0, needs no such call.
    pub fn begin_attempt(&mut self, attempt: u16) {
        self.core.handle_attempt(attempt);
        self.core.handle_end(EndEvent::Reconnect);
    }

    /// Notes the loss of a rank, and gives up the payloads that were still arriving.
    pub(super) fn lose(&mut self, fault: &Fault) {
        for waiting in self.core.waiting_mut() {
            waiting.payload.give_up_if_arriving();
        }
        self.core.handle_end(EndEvent::Fault);
        self.waits_for_sink = false;
        self.restarts.push(Restart {
            fault: fault.clone(),
            lost_ns: now_ns(),
            chunk: None,
            sent_ns: None,
            served_ns: None,
            sent_again: 0,
        });
    }

    /// Returns the first and the last chunk that the sink does not have; `None` on a rank without the source.
    pub fn in_flight(&self) -> Option<(ChunkIndex, ChunkIndex)> {
        let first = self.core.not_accepted().next()?;
        Some((first, self.core.not_accepted().last()?))
    }

    /// Replaces the fault of the latest loss, after more is known of its cause.
    pub fn explain(&mut self, why: Fault) {
        if let Some(restart) = self.restarts.last_mut() {
            restart.fault = why;
        }
    }

    /// Tells all edges and groups that no other rank takes part in ending them.
    pub(super) fn leave_alone(&mut self) {
        let groups = self.groups.iter_mut().flatten();
        groups.for_each(|group| group.peer_is_gone());
        self.outbox.peers_are_gone();
        self.inbox.peers_are_gone();
    }

    /// Poisons everything in flight.
    pub(super) fn abandon(&mut self) {
        for waiting in self.core.waiting_mut() {
            waiting.payload.give_up_if_arriving();
        }
        self.outbox.abandon();
        // A slot that a device may still write is not freed: its lease prevents that.
        self.core.abandon();
    }

    /// Advances the number of the next call.
    pub(super) fn count_call(&mut self) {
        self.next_call = self.next_call.next().unwrap_or(self.next_call);
    }

    /// Notes that a chunk has left, perhaps the first one of an attempt.
    pub(super) fn note_sent(&mut self, chunk: ChunkIndex, again: bool) {
        if let Some(restart) = self.restarts.last_mut() {
            restart.chunk.get_or_insert(chunk);
            restart.sent_ns.get_or_insert_with(now_ns);
            restart.sent_again += u32::from(again);
        }
    }

    /// Notes that the sink has a chunk, perhaps the first one of an attempt.
    pub(super) fn note_served(&mut self) {
        if let Some(restart) = self.restarts.last_mut() {
            restart.served_ns.get_or_insert_with(now_ns);
        }
    }
}

/// Turns a fault of this rank into [`FaultKind::SharedDevice`] if its GPU has failed for every process on it, as `has_failed` says:
/// another process would fail, too.
#[must_use]
pub fn of_all_clients(fault: Fault, own: Rank, has_failed: fn() -> bool) -> Fault {
    let may_be = matches!(fault.kind, FaultKind::Device | FaultKind::Plugin) && fault.rank == own;
    if !may_be || !has_failed() {
        return fault;
    }
    let detail = format!(
        "a client of this GPU failed; MPS reports that to all clients and does not say which of them failed; run the job again when \
         all of them have ended: {}",
        fault.detail.as_str()
    );
    Fault {
        kind: FaultKind::SharedDevice,
        ..fault.with_detail(detail)
    }
}
