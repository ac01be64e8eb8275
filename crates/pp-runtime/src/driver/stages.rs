//! The work of the stages behind the source: the driver begins it, polls it while a device works, and concludes it.

use std::time::Instant;

use pp_contract::{ChunkIndex, Fault, FaultKind, StageReport, Stamp};
use pp_transport::edge::{Edges, GroupEnd as _};

use super::chunk::Working;
use super::session::Session;
use crate::clock::now_ns;
use crate::core::{ONWARD, Ticket};
use crate::stage::{Chunk, Done, Place, Source, StageError, Taken};

/// Holds work that a stage has begun, and the payload that it reads.
type Begun<E, S> = (Ticket, Working<E, S>, Option<<E as Edges>::Rx>);

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    /// Works on the next chunk of an input.
    pub(super) fn work(&mut self, stage: usize, input: usize) -> Result<(), Fault> {
        let begun = self.begin(stage, input)?;
        self.settle(stage, begun)
    }

    /// Lets two stages work on a chunk each. Without a device, credits return and results leave when both stages are done.
    /// With a device, each result leaves when its own work is done.
    pub(super) fn work_overlapped(&mut self, stages: [usize; 2]) -> Result<(), Fault> {
        let [first, second] = stages;
        let first_begun = self.begin(first, ONWARD)?;
        let second_begun = self.begin(second, ONWARD)?;
        for (stage, begun) in [(first, first_begun), (second, second_begun)] {
            self.settle(stage, begun)?;
        }
        Ok(())
    }

    /// Lets a stage do the part of a chunk's work that it has put off.
    pub(super) fn do_later(&mut self, stage: usize, chunk: ChunkIndex) -> Result<(), Fault> {
        self.switch.progress().works(stage);
        let own = self.work_of(stage);
        let done = self.run.stages.work[own].work().later(chunk);
        self.of_stage((stage, Some(chunk)), done)?;
        // The time of this work does not count as idle time of the stage.
        self.run.last_end_ns[stage] = now_ns();
        self.run.core.handle_later();
        Ok(())
    }

    /// Lets a stage work on the next chunk of an input. Also returns the payload that the stage reads.
    fn begin(&mut self, stage: usize, input: usize) -> Result<Begun<E, S>, Fault> {
        let (ticket, mut waiting, starts_epoch) = self.run.core.begin(stage, input);
        let payload = waiting.payload.take();
        let mut slot = self.run.outbox.take_slot(stage, ticket.way_out.0);
        let by = (self.switch, self.blame);
        let outbox = &mut self.run.outbox;
        outbox.tell_followers(by, stage, waiting.stamp, &waiting.message)?;
        let start_ns = now_ns();
        self.switch.progress().works(stage);
        let place = Place {
            chunk: ticket.chunk,
            epoch: ticket.epoch,
            lap: ticket.lap,
            starts_epoch,
            rebuilds: false,
            steps: None,
        };
        let chunk = Chunk {
            place,
            message: &waiting.message,
            waited_ns: self.run.waited_ns,
            puts_off: self.run.core.puts_off(stage, ticket.chunk),
        };
        let own = self.work_of(stage);
        let group = self.run.groups[stage].as_mut();
        let had_waited_ns = group.as_ref().map_or(0, |group| group.waited_ns());
        let done =
            self.run.stages.work[own]
                .work()
                .run(chunk, payload.as_ref(), slot.as_mut(), group);
        let done = self.of_work((stage, ticket.chunk), done)?;
        let group = self.run.groups[stage].as_ref();
        let work = Working {
            stamp: waiting.stamp,
            message: waiting.message,
            slot,
            payload: None,
            start_ns,
            waited_ns: group.map_or(0, |group| group.waited_ns() - had_waited_ns),
            done: done.map(|done| (done, now_ns())),
        };
        Ok((ticket, work, payload))
    }

    /// Hands on a chunk if its stage is done with it. If a device or other members still work on it, the driver asks again
    /// later.
    fn settle(&mut self, stage: usize, begun: Begun<E, S>) -> Result<(), Fault> {
        let (ticket, mut work, payload) = begun;
        // Return the credit before the result leaves, so that the previous stage can fill the slot meanwhile.
        let is_kept = work.done.is_none() && self.run.places[stage].is_sink;
        work.payload = payload.filter(|_| is_kept);
        // What the stage began before leaves first.
        let is_oldest = self.run.core.working(stage).next().is_none();
        if work.done.is_some() && is_oldest && self.run.places[stage].followers() == 0 {
            return self.conclude(stage, ticket, work);
        }
        self.run.core.handle_working(stage, ticket, work);
        Ok(())
    }

    /// Concludes the work that devices have done. Returns whether there was any.
    pub(super) fn finish_work(&mut self) -> Result<bool, Fault> {
        let mut any = false;
        for stage in 0..self.run.places.len() {
            any |= self.look_ahead(stage)?;
            while let Some((ticket, mut work)) = self.run.core.take_working(stage) {
                if work.done.is_none() {
                    let own = self.work_of(stage);
                    let done = self.run.stages.work[own].work().poll();
                    let done = self.of_work((stage, ticket.chunk), done)?;
                    work.done = done.map(|done| (done, now_ns()));
                }
                if let (None, Some(group)) = (&work.done, &self.run.groups[stage]) {
                    let looked = group.look().map_err(StageError::from);
                    self.of_work((stage, ticket.chunk), looked)?;
                }
                // Work that an abort cut short looks done, but the fault is set before the abort.
                let is_cut_short =
                    self.run.groups[stage].is_some() && self.switch.fault().is_some();
                // No reports come for a chunk of an older attempt.
                let is_awaited = self.run.core.is_current(&ticket);
                if work.done.is_none()
                    || is_cut_short
                    || is_awaited && !self.run.inbox.have_reported(stage)
                {
                    self.run.core.handle_still_working(stage, ticket, work);
                    break;
                }
                self.conclude(stage, ticket, work)?;
                any = true;
            }
        }
        Ok(any)
    }

    /// Asks for the work on results that have gone on. Returns whether some is done.
    fn look_ahead(&mut self, stage: usize) -> Result<bool, Fault> {
        let mut any = false;
        self.run.is_ahead[stage] = false;
        while !self.run.places[stage].is_source() && !self.run.is_ahead[stage] {
            let own = self.work_of(stage);
            let Some((chunk, is_done)) = self.run.stages.work[own].work().ahead() else {
                break;
            };
            let is_done = self.of_work((stage, chunk), is_done)?;
            self.run.is_ahead[stage] = !is_done;
            any |= is_done;
        }
        Ok(any)
    }

    /// Hands on a chunk after its stage and the other members of its group are done. At the sink, accepts it.
    fn conclude(
        &mut self,
        stage: usize,
        ticket: Ticket,
        mut work: Working<E, S>,
    ) -> Result<(), Fault> {
        let (Done { tensors, report }, end_ns) = work.done.take().expect("it is done");
        drop(work.payload.take());
        self.switch.progress().concludes(self.run.options.depth);
        let worked = (stage, Some(ticket.chunk));
        let said = self.report(stage, &ticket, &work, (&report, end_ns))?;
        let is_current = self.run.core.is_current(&ticket);
        let at = self.run.places[stage].at;
        let pipeline = self.run.options.pipeline.clone();
        if self.run.places[stage].is_sink {
            self.run.core.handle_taken(ticket.chunk);
            let message = work.message.accepted(&pipeline, &said, report.note);
            let message = self.of_stage(worked, message.map_err(StageError::from))?;
            self.remember(stage, ticket.chunk, &message);
            if !is_current && self.is_source_apart(stage) {
                // The source sends the chunks before this one again, and this one too. It is accepted when it comes again.
                return Ok(());
            }
            return self.accept(stage, work.stamp, message);
        }
        if !is_current {
            // The slot may belong to an edge that is gone, so it is dropped, which returns it to its edge.
            return Ok(());
        }
        if self.run.places[stage].follows() {
            let message = work.message.reported(&pipeline, at, &said);
            self.hand_on((stage, ONWARD), work.stamp, message, &mut None)?;
            return Ok(());
        }
        let (output, lap) = ticket.way_out;
        let message = work
            .message
            .hand_on(&pipeline, (at, ticket.lap), tensors, &said);
        let message = self.of_stage(worked, message.map_err(StageError::from))?;
        let message = self.run.inbox.take_reports(stage, work.stamp, message)?;
        let stamp = Stamp { lap, ..work.stamp };
        let mut slot = work.slot;
        let left = self.hand_on((stage, output), stamp, message, &mut slot)?;
        self.run.outbox.leave(stage, output, left);
        Ok(())
    }

    /// Makes the report of a stage on a chunk, and checks that the stage kept to the plan.
    fn report(
        &mut self,
        stage: usize,
        ticket: &Ticket,
        work: &Working<E, S>,
        (taken, end_ns): (&Taken, u64),
    ) -> Result<StageReport, Fault> {
        let (work_ns, idle_ns) = match taken.worked {
            Some(worked) => (worked.work_ns, worked.idle_ns),
            None => (
                end_ns - work.start_ns,
                work.start_ns.saturating_sub(self.run.last_end_ns[stage]),
            ),
        };
        self.run.last_end_ns[stage] = end_ns;
        let waited_ns = work.waited_ns.min(work_ns);
        let said = StageReport {
            calls: taken.calls,
            start_frame: taken.start_frame,
            work_us: (work_ns - waited_ns) / 1000,
            idle_us: (idle_ns + waited_ns) / 1000,
            seal: taken.seal,
        };
        let place = self.run.places[stage];
        let (at, pipeline) = (place.at, &self.run.options.pipeline);
        let kept_to_plan = said.check(
            work.message.plan(),
            (&pipeline.stages()[at], self.blame.rank),
            ticket.lap..ticket.lap + 1,
            pipeline.laps_of(at, work.message.plan()),
        );
        kept_to_plan.map_err(|e| {
            let (rank, name) = (self.blame.rank, &pipeline.stages()[at].name);
            let detail = format!("{e}; let Taken::of make the report");
            let fault = Fault::new(FaultKind::Usage, rank, name, detail);
            self.run.in_stage((stage, Some(ticket.chunk)), fault)
        })?;
        if let Some(admitted) = self.run.core.admitted(ticket.chunk)
            && !place.follows()
            && let Some(times) = &mut admitted.record.stages[at - 1].times
        {
            times.start_ns = end_ns.saturating_sub(work_ns).max(work.start_ns);
            times.end_ns = end_ns;
        }
        Ok(said)
    }

    /// Hands on a stale chunk without tensors. At the sink, accepts it.
    pub(super) fn pass_on(&mut self, stage: usize, input: usize) -> Result<(), Fault> {
        let (ticket, waiting, _) = self.run.core.begin(stage, input);
        let message = waiting.message.overtaken();
        if self.run.places[stage].is_sink {
            self.run.core.handle_taken(ticket.chunk);
            self.remember(stage, ticket.chunk, &message);
            return self.accept(stage, waiting.stamp, message);
        }
        let (output, lap) = ticket.way_out;
        let stamp = Stamp {
            lap,
            ..waiting.stamp
        };
        self.hand_on((stage, output), stamp, message, &mut None)?;
        Ok(())
    }

    /// Releases a chunk that no stage works on. If the sink already has it, accepts it again with the same message: the
    /// source sent the chunk again, and the first acceptance may have been lost with a rank.
    pub(super) fn release(&mut self, stage: usize, input: usize) -> Result<(), Fault> {
        let (ticket, waiting, _) = self.run.core.begin(stage, input);
        let place = self.run.places[stage];
        if !(place.is_sink && self.run.core.is_current(&ticket)) {
            return Ok(());
        }
        drop(waiting.payload);
        let mut known = self.run.acceptances.iter();
        let said = known.find(|(chunk, _)| *chunk == ticket.chunk);
        // If the source stands on this rank, it has heard the first acceptance.
        let message = said.map_or(waiting.message, |(_, message)| message.clone());
        self.accept(stage, waiting.stamp, message)
    }

    /// Finishes a stage, and sends SHUTDOWN over all its outputs and to the other members of its group.
    pub(super) fn close(&mut self, stage: usize) -> Result<(), Fault> {
        let run = &mut *self.run;
        let is_source = run.places[stage].is_source();
        if is_source {
            let chunk = ChunkIndex::new(run.core.counts().admitted);
            let last = Stamp::new(chunk, run.core.epoch(), run.next_call);
            let attempt = run.core.attempt();
            self.goodbye = Some((Stamp { attempt, ..last }, Instant::now()));
            run.count_call();
        } else {
            // Finish first, so that the source hears of the end only if it went well.
            self.switch.progress().works(stage);
            let own = self.work_of(stage);
            let finished = self.run.stages.work[own].finish();
            self.of_stage((stage, None), finished)?;
        }
        // A rank that is alone uses no edge.
        if let (Some((stamp, _)), false) = (self.goodbye, self.is_alone()) {
            let by = (self.switch, self.blame);
            self.run.outbox.say_shutdown(by, stage, stamp)?;
        }
        self.run.core.handle_closed_behind(stage);
        Ok(())
    }
}
