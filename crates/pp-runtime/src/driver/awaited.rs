//! What a rank waits for when it has nothing to do.

use pp_contract::pipeline::EdgeKind;
use pp_transport::edge::Edges;

use super::payload::Payload;
use super::rank::{Waiting, Working};
use super::session::Session;
use crate::progress::Awaited;
use crate::stage::Source;

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    pub(super) fn is_working(&self) -> bool {
        let mut stages = 0..self.run.places.len();
        let is_under_way = |work: &Working<E, S>| work.done.is_none();
        stages.any(|stage| self.run.core.working(stage).any(is_under_way))
    }

    /// Whether a chunk, or what was sent of one, is on its way.
    pub(super) fn is_in_flight(&self) -> bool {
        let mut outgoing = self.run.ports.outgoing();
        self.run.core.is_busy() || outgoing.any(|out| !out.sends.is_empty())
    }

    /// What has to do its part before this rank can do anything.
    pub(super) fn awaited(&mut self, is_working: bool) -> Awaited {
        let peer = self.run.ports.inputs.first().map(|input| input.peer);
        let peer = peer.map_or(Awaited::Own, Awaited::Peer);
        if is_working {
            let mut stages = 0..self.run.places.len();
            let of_group = |stage: usize| {
                let mut working = self.run.core.working(stage);
                self.run.groups[stage].is_some() && working.any(|work| work.done.is_none())
            };
            return match stages.any(of_group) {
                true => Awaited::Devices,
                false => Awaited::Device,
            };
        }
        if self.run.waits_for_sink {
            return Awaited::Nothing;
        }
        // A member of a group whose report is all that is missing.
        let mut reports = self.run.ports.inputs.iter();
        let late = reports.find(|input| {
            input.kind == EdgeKind::Report
                && input.reports.is_empty()
                && self.run.core.working(input.to.0).next().is_some()
        });
        if let Some(late) = late {
            return Awaited::Peer(late.peer);
        }
        let is_arriving =
            |waiting: &mut Waiting<E, S>| matches!(waiting.payload, Payload::Arriving(_));
        let is_arriving = self.run.core.waiting_mut().any(is_arriving);
        let is_storing =
            self.goodbye.is_some() && self.acceptances().is_some_and(|input| !input.is_closed);
        match self.run.core.holds_chunk() || is_arriving || is_storing {
            true => peer,
            false => Awaited::Nothing,
        }
    }
}
