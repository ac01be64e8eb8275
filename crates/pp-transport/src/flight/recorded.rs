//! Edges whose operations are recorded.

use std::marker::PhantomData;

use pp_contract::{Generation, HEADER_BYTES, Header, Matched, Prepared, Rank, Stamp};

use super::operation::{Draft, Kind, State};
use super::recorder::{FlightRecorder, Record};
use crate::backend::End;
use crate::edge::{Capabilities, EdgeLocal, EdgeRx, EdgeTx, Edges, Sent};
use crate::error::TransportError;
use crate::in_flight::{InFlight, Part, Rejected, Resend, Submission};

/// What the operations of an edge have in common.
#[derive(Clone, Debug)]
pub struct EdgeLog {
    /// Records them.
    pub recorder: FlightRecorder,
    /// The rank at the other end.
    pub peer: Rank,
    /// The generation of the edge.
    pub generation: Generation,
    /// The number of the edge.
    pub edge: u32,
}

impl EdgeLog {
    fn draft(&self, kind: Kind, bytes: u64) -> Draft {
        Draft {
            kind,
            group: None,
            peer: Some(self.peer),
            generation: self.generation,
            edge: Some(self.edge),
            number: None,
            bytes,
            dtype: None,
            chunk: None,
        }
    }
}

/// The edges of a backend, recorded: a name for their types, and no value.
#[derive(Debug)]
pub struct Recorded<B>(PhantomData<fn() -> B>);

impl<B: Edges> Edges for Recorded<B> {
    type Tx = B::Tx;
    type Rx = B::Rx;
    type Sending = Tracked<B::Sending>;
    type Receiving = Tracked<B::Receiving>;
    type Out = RecordedTx<B::Out>;
    type In = RecordedRx<B::In>;
    type Local = RecordedLocal<B::Local>;
    /// It records by itself what it does.
    type Group = B::Group;
}

impl<B: Edges> Recorded<B> {
    /// Records what this end does from now on. `of` is what its backend says of itself.
    pub fn end(end: End<B>, of: &Capabilities, log: EdgeLog) -> End<Self> {
        match end {
            End::Out(edge) => End::Out(RecordedTx::new(edge, log)),
            End::In(edge) => End::In(RecordedRx::new(edge, of, log)),
        }
    }
}

/// The sending end of an edge, and the recorder of what it does. Behaves as the end does.
#[derive(Debug)]
pub struct RecordedTx<E> {
    edge: E,
    log: EdgeLog,
    /// A send that was refused for now and will be tried again.
    refused: Option<Record>,
}

impl<E: EdgeTx> RecordedTx<E> {
    /// Records what this end does from now on.
    pub const fn new(edge: E, log: EdgeLog) -> Self {
        Self {
            edge,
            log,
            refused: None,
        }
    }
}

impl<E: EdgeTx> EdgeTx for RecordedTx<E> {
    type Tx = E::Tx;
    type Sending = Tracked<E::Sending>;

    fn try_lease(&mut self) -> Result<Option<E::Tx>, TransportError> {
        self.edge.try_lease()
    }

    fn peer_is_gone(&mut self) {
        self.edge.peer_is_gone();
    }

    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<E::Tx>,
    ) -> Result<Sent<Self::Sending>, Rejected<E::Tx>> {
        let draft = Draft {
            chunk: Some((stamp.chunk_index, stamp.cache_epoch)),
            ..self.log.draft(Kind::Send, message.payload_bytes())
        };
        let record = match self.refused.take() {
            // Not once more for each look at a lane that is full.
            Some(record) => {
                record.begin_again(&draft);
                record
            }
            None => self.log.recorder.begin(&draft),
        };
        match self.edge.send(message, stamp, payload) {
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
}

/// The receiving end of an edge, and the recorder of what it does. Behaves as the end does.
#[derive(Debug)]
pub struct RecordedRx<E> {
    edge: E,
    payload_moves: bool,
    log: EdgeLog,
    /// The message polled last, whose payload is to be received.
    heard: Record,
}

impl<E: EdgeRx> RecordedRx<E> {
    /// Records what this end does from now on. `of` is what its backend says of itself.
    pub fn new(edge: E, of: &Capabilities, log: EdgeLog) -> Self {
        Self {
            edge,
            payload_moves: of.payload_moves,
            log,
            heard: Record::default(),
        }
    }

    /// Records a message that came.
    fn hear(&self, frame: &[u8]) -> Option<Record> {
        // Once more, and for the record alone: what is wrong with it, its reader will say.
        let header = Header::decode(frame.first_chunk::<HEADER_BYTES>()?).ok()?;
        let draft = Draft {
            chunk: Some((header.chunk_index(), header.cache_epoch())),
            ..self.log.draft(Kind::Receive, header.payload_bytes())
        };
        Some(self.log.recorder.heard(&draft, &header))
    }
}

impl<E: EdgeRx> EdgeRx for RecordedRx<E> {
    type Rx = E::Rx;
    type Receiving = Tracked<E::Receiving>;

    fn peer_is_gone(&mut self) {
        self.edge.peer_is_gone();
    }

    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        let polled = self.edge.poll_frame(inbox)?;
        if polled && self.log.recorder.is_on() {
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
        let receiving = self.edge.receive(header);
        match &receiving {
            Ok(_) if self.payload_moves => record.reached(State::Started),
            Ok(_) => record.started(),
            Err(_) => record.reached(State::Poisoned),
        }
        Ok(track(receiving?, record))
    }
}

/// An edge within a rank, with handles of the same type as those of recorded edges. What it hands on is not recorded:
/// it waits for no peer.
#[derive(Debug)]
pub struct RecordedLocal<E>(pub E);

impl<E: EdgeLocal> EdgeLocal for RecordedLocal<E> {
    type Tx = E::Tx;
    type Rx = E::Rx;
    type Sending = Tracked<E::Sending>;

    fn try_lease(&mut self) -> Result<Option<E::Tx>, TransportError> {
        self.0.try_lease()
    }

    fn hand_on(
        &mut self,
        payload: E::Tx,
        bytes: u64,
    ) -> Result<(InFlight<Self::Sending>, E::Rx), Rejected<E::Tx>> {
        let (sending, lease) = self.0.hand_on(payload, bytes)?;
        Ok((track(sending, Record::default()), lease))
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
