//! The work of the source: the driver asks it for chunks, lets it build them, and sends again the chunks that were lost with
//! a rank.

use pp_contract::{Fault, FaultKind, Message, Stamp, with_source};
use pp_transport::edge::Edges;
use pp_transport::in_flight::{InFlight, Resend as _};

use super::outbox::Left;
use super::rank::RankRun;
use super::retained::{Admitted, Context, Kept};
use super::session::{SOURCE, Session};
use crate::clock::now_ns;
use crate::core::{Cut, EndEvent, ONWARD};
use crate::progress::Doing;
use crate::report::ChunkRecord;
use crate::stage::{Built, Offer, Place, Source, StageError, StageResult, send_as_it_was};

impl<E, S> Session<'_, '_, E, S>
where
    E: Edges,
    S: Source<E::Tx>,
{
    pub(super) fn ask_source(&mut self) -> Result<(), Fault> {
        let Some(source) = &mut self.run.stages.source else {
            return Ok(());
        };
        self.switch.progress().at(Doing::Source);
        let mut built = Ok(true);
        let mut chunk = None;
        if !self.run.options.capabilities.completions_ring {
            // A device works on one chunk after the other. The sooner the driver sees a chunk done, the more exact are the
            // times.
            for admitted in self.run.core.all_admitted() {
                built = admitted
                    .carry
                    .as_mut()
                    .map_or(built, |c| source.is_built(c));
                if built != Ok(true) {
                    chunk = built.is_err().then_some(admitted.place.chunk);
                    break;
                }
            }
        }
        let source_may_wait = built.is_err() || !self.run.live.drops();
        let wants_offer = match source_may_wait {
            true => Ok(self.run.core.wants_offer()),
            false => drop_late(self.run),
        };
        let source = self.run.stages.source.as_mut().expect("it is there");
        let offer = built.and(wants_offer).and_then(|wants| match wants {
            true => source.poll(),
            false => Ok(Offer::Later),
        });
        self.switch.progress().at(Doing::Looking);
        let offer = self.of_stage((SOURCE, chunk), offer)?;
        let core = &mut self.run.core;
        let refuse = |why: String| Err(StageError::new(FaultKind::BadInput, "ask the source", why));
        let taken = match offer {
            Offer::Chunk(Cut::Flush | Cut::Hard) if self.run.options.order.fixed().is_some() => {
                refuse("it offers a cut, and a fixed order has none; offer chunks without".into())
            }
            Offer::Chunk(cut) => {
                core.handle_offer(cut);
                Ok(())
            }
            Offer::Later => Ok(()),
            Offer::End => core
                .handle_source_end()
                .or_else(|e| refuse(with_source(&e))),
        };
        self.of_stage((SOURCE, None), taken)
    }

    /// A chunk is built now. Gives the steps that are asked for.
    pub(super) fn admit(&mut self) -> Option<u16> {
        if !self.run.live.is_needed() {
            return None;
        }
        let source = self.run.stages.source.as_ref();
        let read_ns = source.and_then(Source::oldest_ns);
        self.run.live.admit(now_ns(), read_ns)
    }

    pub(super) fn build(&mut self, place: Place) -> Result<(), Fault> {
        let mut slot = self
            .run
            .outbox
            .take_slot(0, ONWARD)
            .expect("the core builds only on a credit");
        let build_start_ns = now_ns();
        self.switch.progress().at(Doing::Build);
        let source = self
            .run
            .stages
            .source
            .as_mut()
            .expect("rank 0 has the source");
        let built = built_by(source, place, &self.run.context, &mut slot);
        let source_queue = source.queued();
        let built = self.of_stage((SOURCE, Some(place.chunk)), built)?;
        let spec = &self.run.options.pipeline.stages()[0];
        let message = Message::new(built.plan, spec, built.tensors)
            .and_then(|message| message.with_note(built.note))
            .map_err(StageError::from);
        let message = self.of_stage((SOURCE, Some(place.chunk)), message)?;
        let build_end_ns = now_ns();
        let (first_read_ns, last_read_ns) =
            built.read_ns.unwrap_or((build_start_ns, build_start_ns));
        let call_id = self.run.next_call;
        let stamp = self.stamp(Stamp::new(place.chunk, place.epoch, call_id));
        let bytes = message.tensors().payload_bytes();
        let mut slot = Some(slot);
        let sent = self.hand_on((0, ONWARD), stamp, message.clone(), &mut slot);
        self.run.count_call();
        let (sending, sent) = match sent {
            Ok(sending) => (sending, Ok(())),
            // The chunk stays, and is sent when a new process is there: a source builds each chunk only once.
            Err(fault) => {
                if slot.is_none() && bytes > 0 {
                    self.run.core.handle_end(EndEvent::Break);
                }
                let unsent = |slot| InFlight::new(E::Sending::unsent(slot));
                (slot.map(unsent), Err(fault))
            }
        };
        let sending = self.keep_or_leave(sending);
        let record = ChunkRecord {
            chunk_index: place.chunk.get(),
            call_id: call_id.get(),
            cache_epoch: place.epoch.get(),
            frames: built.frames,
            first_read_ns,
            last_read_ns,
            build_start_ns,
            build_end_ns,
            sent_ns: now_ns(),
            source_bytes: bytes,
            source_queue,
            steps: place.steps,
            steps_saved: self.run.live.saved(place.steps),
            skipped_frames: built.skipped_frames,
            held_back_ns: built.held_ns,
            behind_ns: built.late_ns,
            in_flight: self.run.core.in_flight() + 1,
            ..ChunkRecord::before(&self.run.options.pipeline)
        };
        let admitted = Admitted {
            place,
            call_id,
            message,
            carry: Some(built.carry),
            sending,
            record,
        };
        let cut = self
            .run
            .core
            .handle_built(place.chunk, place.epoch, admitted);
        if let Some(epoch) = cut {
            self.switch.cut(epoch);
        }
        sent?;
        self.run.note_sent(place.chunk, false);
        Ok(())
    }

    /// Sends a chunk again that was lost with a rank, under its old numbers. A stale chunk is sent without its payload.
    pub(super) fn send_again(&mut self, rebuilds: bool) -> Result<(), Fault> {
        let mut slot = self
            .run
            .outbox
            .take_slot(0, ONWARD)
            .expect("the core sends only on a credit");
        self.switch.progress().at(Doing::Build);
        let run = &mut *self.run;
        let oldest = run.core.oldest_epoch();
        let lost = &*run.core.lost();
        let place = Place {
            rebuilds,
            ..lost.place
        };
        let call_id = lost.call_id;
        let is_stale = place.epoch < oldest;
        let kept = Kept {
            chunk: place.chunk,
            lost: Some(lost),
            context: &run.context,
        };
        let source = run.stages.source.as_mut().expect("rank 0 has the source");
        let composed = match is_stale {
            // Only the sink knows whether it already has this stale chunk.
            true => None,
            false if rebuilds => Some(source.rebuild(place, &lost.message, &kept, &mut slot)),
            false => Some(send_as_it_was(&lost.message, &kept, &mut slot)),
        };
        let sent = lost.message.clone();
        let spec = &run.options.pipeline.stages()[0];
        let message = composed.map_or(Ok(sent.clone().overtaken()), |composed| {
            let (plan, tensors) = composed?;
            let message = Message::new(plan, spec, tensors)?;
            Ok(message.with_note(sent.note().to_vec())?)
        });
        let message = self.of_stage((SOURCE, Some(place.chunk)), message)?;
        let stamp = self.stamp(Stamp::new(place.chunk, place.epoch, call_id));
        let bytes = message.tensors().payload_bytes();
        let mut slot = Some(slot);
        let sending = self.hand_on((0, ONWARD), stamp, message.clone(), &mut slot)?;
        let sending = self.keep_or_leave(sending);
        let admitted = self.run.core.handle_sent_again();
        admitted.record.sent_ns = now_ns();
        admitted.record.source_bytes = bytes;
        admitted.message = message;
        // The previous payload returns to its pool when the copy from it is done.
        admitted.sending = sending;
        self.run.note_sent(place.chunk, true);
        Ok(())
    }

    /// Returns the send of a source's payload if the payload may be sent again: it then stays in its slot. Otherwise leaves
    /// the send to its edge, which reclaims the slot.
    fn keep_or_leave(&mut self, sending: Left<E>) -> Left<E> {
        if self.run.options.keeps() {
            return sending;
        }
        self.run.outbox.leave(0, ONWARD, sending);
        None
    }

    /// Returns the stamp with the number of the current attempt.
    fn stamp(&self, stamp: Stamp) -> Stamp {
        Stamp {
            attempt: self.run.core.attempt(),
            ..stamp
        }
    }
}

/// Lets the source drop what would come out too late, where a chunk would be admitted now. Says whether the source is to be asked
/// for one. What it offered before counts no more.
fn drop_late<E: Edges, S: Source<E::Tx>>(run: &mut RankRun<'_, E, S>) -> StageResult<bool> {
    let now = now_ns();
    let admits = run.core.ask_anew(run.live.most_in_flight(now));
    let source = run.stages.source.as_mut();
    let Some(source) = source.filter(|_| admits && run.outbox.is_free(SOURCE, ONWARD)) else {
        return Ok(false);
    };
    source.drop_late(run.live.drops_before_ns(now))?;
    Ok(!run.live.holds(now, source.oldest_ns()))
}

/// Lets the source build a chunk.
fn built_by<E: Edges, S: Source<E::Tx>>(
    source: &mut S,
    place: Place,
    context: &Context<E>,
    slot: &mut E::Tx,
) -> StageResult<Built<S::Plan, S::Carry>> {
    if !place.rebuilds {
        return source.build(place, slot);
    }
    let kept: Kept<'_, E, S> = Kept {
        chunk: place.chunk,
        lost: None,
        context,
    };
    source.build_anew(place, &kept, slot)
}
