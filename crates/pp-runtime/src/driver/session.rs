//! A session: the run of a rank over one set of edges, until a rank is lost. This file holds the state and the functions
//! that all parts of a session share.

use std::time::Instant;

use pp_contract::{ChunkIndex, Fault, Stamp};
use pp_transport::edge::Edges;

use super::blame::Blame;
use super::rank::{RankRun, of_all_clients};
use crate::core::{EndEvent, Ending};
use crate::stage::{Source, StageError};
use crate::switch::Switch;
use crate::times;

/// The source among the stages of its rank.
pub(super) const SOURCE: usize = 0;

/// Holds the state of a run until a rank is lost.
pub(super) struct Session<'a, 's, E: Edges, S: Source<E::Tx>> {
    pub(super) run: &'a mut RankRun<'s, E, S>,
    pub(super) switch: &'a Switch,
    pub(super) blame: Blame,
    /// Holds the stamp of the SHUTDOWN, and the time when it was sent or received.
    pub(super) goodbye: Option<(Stamp, Instant)>,
}

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    /// Returns the index of a stage among the stages behind the source.
    pub(super) fn work_of(&self, stage: usize) -> usize {
        stage - usize::from(self.run.stages.source.is_some())
    }

    /// Turns the error of a stage's work on a chunk into a fault. A collective also fails if a member is lost or has failed. In
    /// that case the fault of the lost member is returned, and this rank is not blamed.
    pub(super) fn of_work<T>(
        &mut self,
        (stage, chunk): (usize, ChunkIndex),
        said: Result<T, StageError>,
    ) -> Result<T, Fault> {
        let is_of_group = self.run.groups[stage].is_some();
        if is_of_group && said.as_ref().is_err_and(|error| error.is_of_transport) {
            if self.switch.is_served() {
                return Err(self.blame.left_early());
            }
            let within = match self.run.places[stage].follows() {
                true => times::VERDICT_WITHIN,
                false => times::LEADER_SPEAKS_AFTER,
            };
            if let Some(lost) = self.switch.verdict_within(within) {
                return Err(lost.clone());
            }
        }
        self.of_stage((stage, Some(chunk)), said)
    }

    /// Turns the error of a stage, at work on this chunk, into a fault of this rank, and raises it.
    pub(super) fn of_stage<T>(
        &mut self,
        (stage, chunk): (usize, Option<ChunkIndex>),
        said: Result<T, StageError>,
    ) -> Result<T, Fault> {
        said.map_err(|error| {
            self.run.core.handle_end(EndEvent::Break);
            let own = self.blame.rank;
            let fault = self.run.in_stage((stage, chunk), error.into_fault(own));
            let fault = of_all_clients(fault, own, self.run.options.has_failed);
            // Raise the fault here, so that the other ranks hear the words of the stage.
            self.switch.raise(fault.clone());
            fault
        })
    }

    /// Goes on without other ranks if this error comes from a lost rank and no other rank is needed any more.
    pub(super) fn unless_served(&mut self, done: Result<(), Fault>) -> Result<(), Fault> {
        match done {
            Err(fault) if self.switch.is_served() && fault.kind.is_worth_a_restart() => {
                tracing::debug!(%fault, "a rank is gone, and needed no more");
                self.go_alone();
                Ok(())
            }
            done => done,
        }
    }

    /// Goes on without other ranks. From now on no edge is used.
    pub(super) fn go_alone(&mut self) {
        self.run.core.handle_end(EndEvent::Serve);
        self.run.core.handle_end(EndEvent::Leave);
    }

    pub(super) fn is_alone(&self) -> bool {
        self.run.core.ending() == Ending::Alone
    }
}
