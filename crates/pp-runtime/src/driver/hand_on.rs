//! Hands chunks from one stage to the next.

use pp_contract::{Fault, FaultKind, Message, Stamp};
use pp_transport::edge::Edges;

use super::blame::Blame;
use super::chunk::Waiting;
use super::outbox::{Handed, Left};
use super::session::Session;
use crate::clock::now_ns;
use crate::core::{Ticket, way_out};
use crate::report::StageTimes;
use crate::stage::Source;

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    /// Queues a chunk that has arrived at a stage of this rank.
    pub(super) fn arrive(
        &mut self,
        (stage, input): (usize, usize),
        waiting: Waiting<E, S>,
        blame: Blame,
    ) -> Result<(), Fault> {
        let run = &mut *self.run;
        let (at, pipeline) = (run.places[stage].at, &run.options.pipeline);
        let laps = pipeline.laps_of(at, waiting.message.plan());
        let lap = waiting.stamp.lap;
        let ticket = Ticket {
            chunk: waiting.stamp.chunk_index,
            epoch: waiting.stamp.cache_epoch,
            attempt: waiting.stamp.attempt,
            lap,
            way_out: way_out(pipeline, at, lap, laps),
            is_stale: waiting.message.is_stale(),
        };
        if let Some(admitted) = run.core.admitted(ticket.chunk)
            && !run.places[stage].follows()
        {
            admitted.record.stages[at - 1].times = Some(StageTimes {
                arrived_ns: waiting.arrived_ns,
                ..StageTimes::default()
            });
        }
        let arrived = run.core.handle_arrival(stage, input, ticket, waiting);
        arrived.map_err(|e| blame.body("receive message", &e))?;
        Ok(())
    }

    /// Hands a chunk to the next stage. If that fails, the payload stays in `slot`, unless it is lost. If the next rank is
    /// gone and no longer needed, the chunk is discarded.
    pub(super) fn hand_on(
        &mut self,
        (stage, output): (usize, usize),
        stamp: Stamp,
        message: Message<S::Plan>,
        slot: &mut Option<E::Tx>,
    ) -> Result<Left<E>, Fault> {
        let outbox = &mut self.run.outbox;
        let by = (self.switch, self.blame);
        match outbox.hand_on(by, (stage, output), stamp, &message, slot) {
            Ok(Handed::Away(left)) => Ok(left),
            Ok(Handed::Here {
                to,
                payload,
                sending,
            }) => {
                let waiting = Waiting {
                    stamp,
                    message,
                    payload,
                    arrived_ns: now_ns(),
                };
                self.arrive(to, waiting, self.blame)?;
                Ok(sending)
            }
            // The output of the stage is larger than its slots.
            Err(fault) if fault.kind == FaultKind::Usage => {
                let at = self.run.places[stage].at;
                let name = &self.run.options.pipeline.stages()[at].name;
                Err(Fault::new(fault.kind, fault.rank, name, fault.detail))
            }
            Err(fault) if outbox.is_edge(stage, output) => {
                self.unless_served(Err(fault)).map(|()| None)
            }
            Err(fault) => Err(fault),
        }
    }
}
