//! Turns of a fixed order that a stream does not have.

use pp_contract::{ChunkIndex, Fault};
use pp_transport::edge::Edges;

use super::session::Session;
use crate::clock::now_ns;
use crate::core::ONWARD;
use crate::stage::Source;

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    /// Two stages work on a chunk each. Credits go back and results leave when both are done; where a device works, each
    /// result leaves when it is done.
    pub(super) fn work_overlapped(&mut self, stages: [usize; 2]) -> Result<(), Fault> {
        let [first, second] = stages;
        let first_begun = self.begin(first, ONWARD)?;
        let second_begun = self.begin(second, ONWARD)?;
        for (stage, (ticket, work, payload)) in [(first, first_begun), (second, second_begun)] {
            drop(payload);
            self.settle(stage, ticket, work)?;
        }
        Ok(())
    }

    /// A stage does what it has put off of a chunk.
    pub(super) fn do_later(&mut self, stage: usize, chunk: ChunkIndex) -> Result<(), Fault> {
        self.switch.progress().works(stage);
        let own = self.work_of(stage);
        let done = self.run.stages.work[own].work().later(chunk);
        self.of_stage(done)?;
        // It is no idle time of the stage.
        self.run.last_end_ns[stage] = now_ns();
        self.run.core.handle_later();
        Ok(())
    }
}
