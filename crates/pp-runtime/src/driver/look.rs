//! What the core cannot know by itself, and what a rank waits for when it has nothing to do.

use pp_contract::pipeline::EdgeKind;
use pp_contract::{Fault, Rank};
use pp_transport::edge::Edges;

use super::chunk::{Waiting, Working};
use super::payload::Payload;
use super::session::Session;
use crate::core::{LAP, ONWARD, StageFacts};
use crate::progress::Awaited;
use crate::stage::Source;
use crate::times;

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    /// What the core cannot know by itself.
    pub(super) fn look(&mut self, facts: &mut [StageFacts]) -> Result<(), Fault> {
        self.run.waits_for_sink = false;
        for (stage, facts) in facts.iter_mut().enumerate() {
            let place = self.run.places[stage];
            for input in [ONWARD, LAP] {
                let waiting = self.run.core.oldest_waiting(stage, input);
                let is_here = waiting.map_or(Ok(false), |waiting| waiting.payload.settle());
                facts.is_here[input] =
                    is_here.map_err(|e| self.blame.transport("receive payload", e))?;
                facts.is_free[input] = self.run.outbox.is_free(stage, input);
            }
            // The leader of a group would keep what is made for as long as it works on the next chunk.
            let is_made = |work: &Working<E, S>| work.done.is_some();
            if self.run.core.working(stage).any(is_made) && !self.run.inbox.have_reported(stage) {
                facts.is_here = [false; 2];
            }
            if place.is_sink && facts.is_here[ONWARD] {
                let own = self.work_of(stage);
                let ready = self.run.stages.work[own].work().is_ready();
                let ready = self.of_stage((stage, None), ready)?;
                self.run.waits_for_sink = !ready;
                facts.is_free[ONWARD] &= ready;
            }
        }
        Ok(())
    }

    /// Says whether nothing more is needed of other ranks. Of a sink on another rank its last word is: it has stored all.
    pub(super) fn is_served(&mut self) -> Result<bool, Fault> {
        if !self.run.core.has_heard_sink() {
            return Ok(false);
        }
        let mut failed = None;
        let served = self.run.core.is_served(|waiting| {
            let is_here = waiting.payload.settle();
            is_here.unwrap_or_else(|error| {
                failed = Some(error);
                false
            })
        });
        match failed {
            Some(error) => Err(self.blame.transport("receive payload", error)),
            None => Ok(served),
        }
    }

    pub(super) fn is_working(&self) -> bool {
        let mut stages = 0..self.run.places.len();
        stages.any(|stage| self.is_at_work(stage))
    }

    /// Says whether a device, or another member of its group, works for a stage.
    fn is_at_work(&self, stage: usize) -> bool {
        let is_under_way = |work: &Working<E, S>| work.done.is_none();
        self.run.is_ahead[stage] || self.run.core.working(stage).any(is_under_way)
    }

    /// Says whether a chunk, or what was sent of one, is on its way.
    pub(super) fn is_in_flight(&self) -> bool {
        self.run.core.is_busy() || self.run.outbox.is_sending()
    }

    /// What has to do its part before this rank can do anything.
    pub(super) fn awaited(&mut self, is_working: bool) -> Awaited {
        if is_working {
            let stages = 0..self.run.places.len();
            let (mut is_of_group, mut is_of_sink) = (false, true);
            for stage in stages.filter(|stage| self.is_at_work(*stage)) {
                is_of_group |= self.run.groups[stage].is_some();
                is_of_sink &= self.run.places[stage].is_sink;
            }
            return match (is_of_group, is_of_sink) {
                (true, _) => Awaited::Devices,
                (false, true) => Awaited::Sink,
                (false, false) => Awaited::Device,
            };
        }
        if self.run.waits_for_sink {
            return Awaited::Nothing;
        }
        // A member of a group whose report is all that is missing.
        let mut reports = self.run.inbox.inputs().iter();
        let late = reports.find(|input| {
            input.kind == EdgeKind::Report
                && input.reports.is_empty()
                && self.run.core.working(input.to.0).next().is_some()
        });
        if let Some(late) = late {
            return Awaited::Peer(late.peer);
        }
        let is_arriving = |waiting: &Waiting<E, S>| matches!(waiting.payload, Payload::Arriving(_));
        // The payload that is next at its stage tells most.
        let (inbox, core) = (&self.run.inbox, &mut self.run.core);
        let next = inbox.inputs().iter().find(|input| {
            let (stage, way) = input.to;
            let waiting = core.oldest_waiting(stage, way);
            waiting.is_some_and(|waiting| is_arriving(waiting))
        });
        let any = self
            .run
            .core
            .waiting_mut()
            .any(|waiting| is_arriving(waiting));
        let is_storing = self.goodbye.is_some() && !self.run.core.has_heard_sink();
        let first = self.run.inbox.inputs().first();
        match next.or(first).map(|input| input.peer) {
            _ if !self.run.core.holds_chunk() && !any && !is_storing => Awaited::Nothing,
            Some(peer) => Awaited::Peer(peer),
            None => Awaited::Own,
        }
    }

    /// Says whether the other ranks owe only the answer to the goodbye, and do not give it.
    pub(super) fn is_unanswered(&self) -> bool {
        let is_first = self
            .run
            .places
            .first()
            .is_some_and(|stage| stage.is_source());
        let since = self.goodbye.map(|(_, said)| said.elapsed());
        let is_owed = is_first && !self.is_alone() && self.switch.is_served();
        let is_late = is_owed && since > Some(times::ANSWERED_WITHIN);
        if is_late {
            tracing::warn!("no answer to the shutdown");
        }
        is_late
    }

    /// Says whether an edge to this rank is still needed.
    pub(super) fn is_missed(&self, peer: Rank) -> bool {
        !self.is_alone() && (self.goodbye.is_none() || self.run.inbox.is_open_from(peer))
    }
}
