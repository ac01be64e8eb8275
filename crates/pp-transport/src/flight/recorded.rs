//! A link whose operations are recorded.

use pp_contract::{Generation, HEADER_BYTES, Header, Matched, Prepared, Rank, Stamp};

use super::operation::{Draft, Kind, State};
use super::recorder::{FlightRecorder, Record};
use crate::bell::Bell;
use crate::error::TransportError;
use crate::in_flight::{InFlight, Part, Rejected, Resend, Submission};
use crate::link::{Capabilities, Link, Sent};

/// A link, and the recorder of what it does. Behaves as the link does.
#[derive(Debug)]
pub struct Recorded<L> {
    link: L,
    payload_moves: bool,
    recorder: FlightRecorder,
    peer: Rank,
    generation: Generation,
    /// The message polled last, whose payload is to be received.
    heard: Record,
    /// A send that was refused for now and will be tried again.
    refused: Option<Record>,
}

impl<L: Link> Recorded<L> {
    /// Records what this link to `peer`, of this generation, does from now on.
    pub fn new(link: L, recorder: &FlightRecorder, peer: Rank, generation: Generation) -> Self {
        Self {
            payload_moves: link.capabilities().payload_moves,
            link,
            recorder: recorder.clone(),
            peer,
            generation,
            heard: Record::default(),
            refused: None,
        }
    }

    /// The link inside.
    pub const fn link(&self) -> &L {
        &self.link
    }

    fn draft(&self, kind: Kind, bytes: u64) -> Draft {
        Draft {
            kind,
            group: None,
            peer: Some(self.peer),
            generation: self.generation,
            number: None,
            bytes,
            dtype: None,
            chunk: None,
        }
    }

    /// Records a message that came.
    fn hear(&self, frame: &[u8]) -> Option<Record> {
        // Once more, and for the record alone: what is wrong with it, its reader will say.
        let header = Header::decode(frame.first_chunk::<HEADER_BYTES>()?).ok()?;
        let draft = Draft {
            chunk: Some((header.chunk_index(), header.cache_epoch())),
            ..self.draft(Kind::Receive, header.payload_bytes())
        };
        Some(self.recorder.heard(&draft, &header))
    }
}

impl<L: Link> Link for Recorded<L> {
    type Tx = L::Tx;
    type Rx = L::Rx;
    type Sending = Tracked<L::Sending>;
    type Receiving = Tracked<L::Receiving>;

    fn capabilities(&self) -> Capabilities {
        self.link.capabilities()
    }

    fn bell(&self) -> &Bell {
        self.link.bell()
    }

    fn try_lease(&mut self) -> Result<Option<L::Tx>, TransportError> {
        self.link.try_lease()
    }

    fn peer_is_gone(&mut self) {
        self.link.peer_is_gone();
    }

    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<L::Tx>,
    ) -> Result<Sent<Self::Sending>, Rejected<L::Tx>> {
        let draft = Draft {
            chunk: Some((stamp.chunk_index, stamp.cache_epoch)),
            ..self.draft(Kind::Send, message.payload_bytes())
        };
        let record = match self.refused.take() {
            // Not once more for each look at a lane that is full.
            Some(record) => {
                record.begin_again(&draft);
                record
            }
            None => self.recorder.begin(&draft),
        };
        match self.link.send(message, stamp, payload) {
            Ok(Sent { header, payload }) => {
                let last = if payload.is_some() {
                    State::Started
                } else {
                    State::Done
                };
                record.left(&header, last);
                let payload = payload.map(|sending| track(sending, record));
                Ok(Sent { header, payload })
            }
            Err(rejected) => {
                if rejected.error.is_backpressure() {
                    self.refused = Some(record);
                } else {
                    record.reached(State::Poisoned);
                }
                Err(rejected)
            }
        }
    }

    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        let polled = self.link.poll_frame(inbox)?;
        if polled && self.recorder.is_on() {
            self.heard = self.hear(inbox).unwrap_or_default();
        }
        Ok(polled)
    }

    fn receive(
        &mut self,
        header: &Matched<'_>,
    ) -> Result<InFlight<Self::Receiving>, TransportError> {
        let record = std::mem::take(&mut self.heard);
        // Where the payload is there with its header, nothing is called that may not come back.
        if self.payload_moves {
            record.reached(State::Committed);
        }
        let receiving = self.link.receive(header);
        match &receiving {
            Ok(_) if self.payload_moves => record.reached(State::Started),
            Ok(_) => record.started(),
            Err(_) => record.reached(State::Poisoned),
        }
        Ok(track(receiving?, record))
    }
}

fn track<S: Submission>(flight: InFlight<S>, record: Record) -> InFlight<Tracked<S>> {
    let inner = flight.take();
    InFlight::new(Tracked { inner, record })
}

/// An operation of a backend, and its record.
#[derive(Debug)]
pub struct Tracked<S> {
    inner: S,
    record: Record,
}

impl<S: Submission> Submission for Tracked<S> {
    type Buffer = S::Buffer;

    fn is_done(&self) -> Result<bool, TransportError> {
        let done = self.inner.is_done();
        self.record.look(&done);
        done
    }

    fn into_buffer(self) -> S::Buffer {
        self.record.end(State::Done);
        self.inner.into_buffer()
    }

    fn orphan(self) {
        self.record.end(State::Left);
        self.inner.orphan();
    }

    fn quarantine(self) {
        self.record.end(State::Poisoned);
        self.inner.quarantine();
    }
}

impl<S: Resend> Resend for Tracked<S> {
    fn copy_into(&self, parts: &[Part], slot: &mut S::Buffer) -> Result<(), TransportError> {
        self.inner.copy_into(parts, slot)
    }

    fn unsent(buffer: S::Buffer) -> Self {
        Self {
            inner: S::unsent(buffer),
            record: Record::default(),
        }
    }
}
