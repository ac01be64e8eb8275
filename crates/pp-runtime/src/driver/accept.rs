//! Sends and receives the sink's acceptances.

use pp_contract::{ChunkIndex, Fault, FaultKind, Message, Stamp};
use pp_transport::edge::Edges;

use super::blame::Blame;
use super::retained::Admitted;
use super::session::{SOURCE, Session};
use crate::clock::now_ns;
use crate::core::{ONWARD, Passed};
use crate::report::ChunkRecord;
use crate::stage::{Source, StageError, StageResult};

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    /// Keeps the acceptance of a chunk if it may be lost on its way. After a loss the source sends such a chunk again. At
    /// most `depth` chunks are in flight, so at most `depth` acceptances are kept.
    pub(super) fn remember(&mut self, stage: usize, chunk: ChunkIndex, message: &Message<S::Plan>) {
        if !self.run.options.keeps() || !self.is_source_apart(stage) {
            return;
        }
        let run = &mut *self.run;
        if run.acceptances.len() == run.options.depth as usize {
            run.acceptances.pop_front();
        }
        run.acceptances.push_back((chunk, message.clone()));
    }

    /// Tells whether the acceptances of this stage, the sink, go to another rank.
    pub(super) fn is_source_apart(&self, stage: usize) -> bool {
        self.run.outbox.is_edge(stage, ONWARD)
    }

    /// Tells the source that the sink has a chunk.
    pub(super) fn accept(
        &mut self,
        stage: usize,
        stamp: Stamp,
        message: Message<S::Plan>,
    ) -> Result<(), Fault> {
        if !self.is_source_apart(stage) {
            return self.accepted(stamp, &message, self.blame);
        }
        let stamp = Stamp { lap: 0, ..stamp };
        self.hand_on((stage, ONWARD), stamp, message, &mut None)?;
        Ok(())
    }

    /// Handles an acceptance: the sink has a chunk.
    pub(super) fn accepted(
        &mut self,
        stamp: Stamp,
        message: &Message<S::Plan>,
        blame: Blame,
    ) -> Result<(), Fault> {
        let is_stale = message.is_stale();
        let core = &mut self.run.core;
        let accepted = core.handle_accepted(stamp.chunk_index, stamp.attempt, is_stale);
        let accepted = accepted.map_err(|e| blame.body("receive acceptance", &e))?;
        let Some(mut admitted) = accepted else {
            return Ok(());
        };
        self.run.note_served();
        let oldest = self.run.core.oldest_epoch();
        self.run.context.accept(&mut admitted, oldest);
        for (at, stage) in (1..).zip(&mut admitted.record.stages) {
            stage.take_in(message.trail().of(&self.run.options.pipeline, at));
        }
        self.forget(admitted, (!is_stale).then_some(message.note()))
    }

    /// Stores the record of a chunk that is no longer in flight. `note` is the sink's note on the chunk; `None` if the chunk
    /// is stale.
    fn forget(&mut self, mut admitted: Admitted<E, S>, note: Option<&[u8]>) -> Result<(), Fault> {
        let is_stale = note.is_none();
        let chunk = admitted.place.chunk;
        let source = self.run.stages.source.as_mut();
        let source = source.expect("rank 0 has the source");
        let mut built_ns = Ok(None);
        if let Some(mut carry) = admitted.carry.take() {
            let built = source.is_built(&mut carry);
            built_ns = built.and_then(|_| source.accepted(chunk, carry, note));
        }
        let built_ns = self.of_stage((SOURCE, Some(chunk)), built_ns)?;
        let record = &mut admitted.record;
        if let Some(built_ns) = built_ns {
            // The time that a chunk waits in the queue of a device is not work.
            record.build_end_ns = record.build_start_ns.saturating_add(built_ns);
        }
        record.accepted_ns = now_ns();
        record.dropped = is_stale;
        record.sink_queue = self.run.stages.work.last().map_or(0, |last| last.queued());
        let mut record = std::mem::take(record);
        self.run.clock.place(&mut record);
        record.late = self.run.live.is_late(record.latency_ns());
        let keeps_up = self.keeps_up(&record);
        if let Some(tap) = &self.run.options.tap {
            tap.take(&record);
        }
        self.run.recorder.push(record);
        if is_stale {
            // The send is not poisoned: its slot is reclaimed when the transfer is done.
            drop(admitted.sending.take());
            tracing::debug!(
                chunk_index = chunk.get(),
                cache_epoch = admitted.place.epoch.get(),
                group = "pp",
                "a chunk that a hard cut overtook is dropped"
            );
        }
        self.of_stage((SOURCE, None), keeps_up)
    }

    /// Learns from a chunk that is no longer in flight how to keep up with the source, and tells the user of a job that does not.
    fn keeps_up(&mut self, record: &ChunkRecord) -> StageResult<()> {
        let run = &mut *self.run;
        let frames = (record.frames, record.skipped_frames);
        // Where nothing waits, the source itself is slower than it says.
        let behind_ns = record.behind_ns.filter(|_| record.source_queue > 0);
        if let Some(line) = run.behind.tell(record.accepted_ns, frames, behind_ns) {
            (run.options.say)(line);
        }
        if !run.live.is_needed() {
            return Ok(());
        }
        if record.dropped {
            run.live.overtaken(record.accepted_ns);
            return Ok(());
        }
        let ranks = run.leaders.iter();
        let works = ranks.map(|rank| record.rank_work_ns(&run.options.pipeline, *rank));
        let works: Vec<u64> = works.collect();
        let passed = run.live.passed(&Passed {
            works_ns: &works,
            read_ns: (record.first_read_ns, record.last_read_ns),
            build_start_ns: record.build_start_ns,
            accepted_ns: record.accepted_ns,
            steps: record.steps,
            frames,
        });
        passed.map_err(|error| {
            let what = "keep up with the source";
            StageError::new(FaultKind::Usage, what, error.to_string())
        })
    }
}
