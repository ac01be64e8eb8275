//! What the front sends: new chunks, lost ones again, and the goodbye.

use std::time::Instant;

use pp_contract::{Bare, ChunkIndex, Envelope, Fault, Stamp};
use pp_transport::in_flight::{InFlight, Resend as _};
use pp_transport::link::Link;

use super::super::{log_commitment, send};
use super::in_flight::{InFlightChunk, Sources, Transfers};
use super::session::FrontSession;
use crate::clock::now_ns;
use crate::progress::Doing;
use crate::report::ChunkRecord;
use crate::stage::{FrontStages, Place, send_as_it_was};

impl<L, S> FrontSession<'_, '_, L, S>
where
    L: Link,
    S: FrontStages<L::Tx, L::Rx>,
{
    pub(super) fn build(&mut self, place: Place) -> Result<(), Fault> {
        let mut slot = self.spare.take().expect("the core builds only on a credit");
        let build_start_ns = now_ns();
        self.switch.progress().at(Doing::Build);
        let built = self.run.stages.build(place, &mut slot);
        let built = self.of_stage(built)?;
        let envelope = built.envelope;
        let build_end_ns = now_ns();
        let (first_read_ns, last_read_ns) =
            built.read_ns.unwrap_or((build_start_ns, build_start_ns));
        let mut payload = self.payload_of(&envelope, slot);
        let call_id = self.run.next_call;
        let sent = send(
            &mut self.link,
            self.switch,
            self.blame,
            &mut self.run.composer,
            Stamp::numbered(place.chunk, place.epoch, call_id),
            &mut payload,
            |composer| composer.prepare_envelope(&envelope),
        );
        self.run.count_call();
        let forward_bytes = envelope.inputs().payload_bytes();
        let (sending, sent) = match sent {
            Ok(sent) => (sent.payload, Ok(sent.header)),
            // It was built, and the next Phase B gets it: a stage builds a chunk only once.
            Err(fault) => {
                self.is_broken = payload.is_none() && forward_bytes > 0;
                let unsent = |slot| InFlight::new(L::Sending::unsent(slot));
                (payload.map(unsent), Err(fault))
            }
        };
        let chunk = InFlightChunk {
            place,
            call_id,
            envelope,
            carry: built.carry,
            transfers: Transfers {
                sending,
                result: None,
            },
            record: ChunkRecord {
                chunk_index: place.chunk.get(),
                call_id: call_id.get(),
                cache_epoch: place.epoch.get(),
                frames: built.frames,
                first_read_ns,
                last_read_ns,
                build_start_ns,
                build_end_ns,
                sent_ns: now_ns(),
                forward_bytes,
                source_queue: self.run.stages.queued().0,
                in_flight: self.run.core.in_flight() + 1,
                ..ChunkRecord::default()
            },
        };
        self.run.core.handle_sent(place.chunk, place.epoch, chunk);
        let header = sent?;
        self.lockstep.expect(&header);
        log_commitment("envelope sent", &header, self.blame.peer);
        self.run.note_sent(place.chunk, false);
        Ok(())
    }

    /// Sends a chunk again that went down with a Phase B, under the numbers it had.
    pub(super) fn send_again(&mut self, rebuilds: bool) -> Result<(), Fault> {
        let mut slot = self.spare.take().expect("the core sends only on a credit");
        self.switch.progress().at(Doing::Build);
        let lost = &*self.run.core.lost();
        let place = Place {
            rebuilds,
            ..lost.place
        };
        let call_id = lost.call_id;
        let sources = Sources {
            lost,
            context: &self.run.context,
        };
        let envelope = if rebuilds {
            self.run
                .stages
                .rebuild(place, &lost.envelope, &sources, &mut slot)
        } else {
            send_as_it_was(&lost.envelope, &sources, &mut slot)
        };
        let envelope = self.of_stage(envelope)?;
        let mut payload = self.payload_of(&envelope, slot);
        let sent = send(
            &mut self.link,
            self.switch,
            self.blame,
            &mut self.run.composer,
            Stamp::numbered(place.chunk, place.epoch, call_id),
            &mut payload,
            |composer| composer.prepare_envelope(&envelope),
        )?;
        self.lockstep.expect(&sent.header);
        log_commitment("envelope sent again", &sent.header, self.blame.peer);
        let chunk = self.run.core.handle_sent_again();
        chunk.record.sent_ns = now_ns();
        chunk.record.forward_bytes = envelope.inputs().payload_bytes();
        chunk.envelope = envelope;
        // What it was copied from goes back to its pool when the copy is done.
        chunk.transfers.sending = sent.payload;
        self.run.note_sent(place.chunk, true);
        Ok(())
    }

    /// A message without a payload needs no slot.
    fn payload_of(&mut self, envelope: &Envelope<S::Plan>, slot: L::Tx) -> Option<L::Tx> {
        if envelope.inputs().payload_bytes() > 0 {
            return Some(slot);
        }
        self.spare = Some(slot);
        None
    }

    pub(super) fn send_shutdown(&mut self) -> Result<(), Fault> {
        let chunk = ChunkIndex::new(self.run.core.counts().admitted);
        let sent = send(
            &mut self.link,
            self.switch,
            self.blame,
            &mut self.run.composer,
            Stamp::numbered(chunk, self.run.core.epoch(), self.run.next_call),
            &mut None,
            |composer| Ok(composer.prepare_bare(Bare::Shutdown)),
        )?;
        self.run.count_call();
        self.lockstep.expect(&sent.header);
        self.run.core.handle_shutdown_sent();
        self.goodbye = Some(Instant::now());
        log_commitment("shutdown sent", &sent.header, self.blame.peer);
        Ok(())
    }
}
