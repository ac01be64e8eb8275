//! Receiving: a frame is admitted only if it is whole, right, and the next one in order.
//!
//! *Hazard.* The transports below check nothing: a payload that is received for the wrong header
//! is silently wrong data, a size that differs truncates or hangs.
//! *Guarantee.* [`Matched`] is the witness that a header was checked against its checksums and
//! against everything that came before on its edge; a receive is posted with one, and each is good
//! for one receive. After the first error nothing more is admitted: the two sides no longer agree
//! on where they are.

use std::collections::VecDeque;

use crate::codec::BodyError;
use crate::envelope::Envelope;
use crate::header::{Action, BodyKind, HEADER_BYTES, Header, HeaderError};
use crate::ids::{CacheEpoch, CallId, ChunkIndex, EdgeSeq};
use crate::outcome::{Failure, Outcome};
use crate::plan::Plan;

/// Why a frame is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LockstepError {
    /// The header is refused.
    #[error("header refused")]
    Header(#[from] HeaderError),
    /// The frame is shorter or longer than its header says.
    #[error("a frame of {got} bytes where {expected} were announced")]
    Length {
        /// What the header says, or the size of a header when not even that is there.
        expected: usize,
        /// What arrived.
        got: usize,
    },
    /// The body was damaged on its way.
    #[error("body checksum is {computed:08x}, the header says {stated:08x}")]
    BodyChecksum {
        /// Of the bytes as they arrived.
        computed: u32,
        /// As the sender wrote it.
        stated: u32,
    },
    /// A kind of body that does not travel in this direction.
    #[error("a body of kind {kind} does not travel in this direction")]
    WrongDirection {
        /// The kind.
        kind: BodyKind,
    },
    /// The call id did not rise.
    #[error("call_id {got} follows {last}: it must rise")]
    CallOrder {
        /// Of the message before.
        last: CallId,
        /// Of this one.
        got: CallId,
    },
    /// The chunk index of an INFER did not rise.
    #[error("chunk_index {got} follows {last}: it must rise")]
    ChunkOrder {
        /// Of the INFER before.
        last: ChunkIndex,
        /// Of this one.
        got: ChunkIndex,
    },
    /// The epoch fell.
    #[error("cache_epoch {got} follows {last}: it must not fall")]
    EpochOrder {
        /// Of the message before.
        last: CacheEpoch,
        /// Of this one.
        got: CacheEpoch,
    },
    /// A payload is missing, or was announced twice.
    #[error("payload {got} of the edge is announced where payload {expected} is due")]
    EdgeOrder {
        /// The number that is due.
        expected: EdgeSeq,
        /// The number announced.
        got: EdgeSeq,
    },
    /// An answer to a call that was not made, or not the next one to be answered.
    #[error("the answer ({action} call_id={call_id}) is not the one that is due")]
    NotDue {
        /// The action of the answer.
        action: Action,
        /// The call it answers.
        call_id: CallId,
    },
    /// Something follows SHUTDOWN or ERROR.
    #[error("a frame follows a terminal one")]
    AfterTerminal,
    /// An earlier frame was refused.
    #[error("an earlier frame was refused; the edge has to be built anew")]
    Poisoned,
}

/// What the receiving end of one directed edge knows of the messages so far.
///
/// Not `Clone`: two of them would admit a frame twice.
#[derive(Debug)]
pub struct Lockstep<D = Requests> {
    direction: D,
    next_edge: EdgeSeq,
    closed: Option<LockstepError>,
}

/// The direction from the front to Phase B: calls.
#[derive(Debug, Default)]
pub struct Requests {
    last: Option<(CallId, CacheEpoch)>,
    last_chunk: Option<ChunkIndex>,
}

/// The direction from Phase B to the front: answers, in the order of the calls.
#[derive(Debug, Default)]
pub struct Replies {
    due: VecDeque<Header>,
}

impl Lockstep<Requests> {
    /// For the Phase B end of an edge from the front.
    #[must_use]
    pub fn requests() -> Self {
        Self::start(Requests::default())
    }
}

impl Lockstep<Replies> {
    /// For the front end of an edge from Phase B.
    #[must_use]
    pub fn replies() -> Self {
        Self::start(Replies::default())
    }

    /// Says that an answer to this call is due, after those to the calls before.
    pub fn expect(&mut self, sent: &Header) {
        self.direction.due.push_back(*sent);
    }
}

#[expect(private_bounds, reason = "there are two directions and no third")]
impl<D: Direction> Lockstep<D> {
    fn start(direction: D) -> Self {
        Self {
            direction,
            next_edge: EdgeSeq::FIRST,
            closed: None,
        }
    }

    /// Admits the next frame of the edge: header and body, nothing more.
    ///
    /// # Errors
    /// [`LockstepError`]; from then on every frame is refused.
    pub fn admit<'a>(&mut self, frame: &'a [u8]) -> Result<Matched<'a>, LockstepError> {
        if let Some(reason) = self.closed {
            return Err(reason);
        }
        let matched = self.check(frame);
        self.closed = match &matched {
            Err(_) => Some(LockstepError::Poisoned),
            Ok(matched) if matched.header.action().is_terminal() => {
                Some(LockstepError::AfterTerminal)
            }
            Ok(_) => None,
        };
        matched
    }

    fn check<'a>(&mut self, frame: &'a [u8]) -> Result<Matched<'a>, LockstepError> {
        let got = frame.len();
        let Some((header, body)) = frame.split_first_chunk::<HEADER_BYTES>() else {
            let expected = HEADER_BYTES;
            return Err(LockstepError::Length { expected, got });
        };
        let header = Header::decode(header)?;
        if body.len() != header.body_bytes() {
            let expected = HEADER_BYTES + header.body_bytes();
            return Err(LockstepError::Length { expected, got });
        }
        let (computed, stated) = (crc32fast::hash(body), header.body_crc32);
        if computed != stated {
            return Err(LockstepError::BodyChecksum { computed, stated });
        }
        self.direction.check(&header)?;
        if let Some(got) = header.edge_seq() {
            let expected = self.next_edge;
            if got != expected {
                return Err(LockstepError::EdgeOrder { expected, got });
            }
            self.next_edge = expected.next().unwrap_or(expected);
        }
        Ok(Matched { header, body })
    }
}

/// The order of the messages in one direction.
trait Direction {
    fn check(&mut self, header: &Header) -> Result<(), LockstepError>;
}

impl Direction for Requests {
    fn check(&mut self, header: &Header) -> Result<(), LockstepError> {
        if header.body_kind() == BodyKind::Result {
            let kind = header.body_kind();
            return Err(LockstepError::WrongDirection { kind });
        }
        let (call, epoch) = (header.call_id(), header.cache_epoch());
        if let Some((last_call, last_epoch)) = self.last {
            if call <= last_call {
                let (last, got) = (last_call, call);
                return Err(LockstepError::CallOrder { last, got });
            }
            if epoch < last_epoch {
                let (last, got) = (last_epoch, epoch);
                return Err(LockstepError::EpochOrder { last, got });
            }
        }
        self.last = Some((call, epoch));
        if header.action() == Action::Infer {
            let got = header.chunk_index();
            if let Some(last) = self.last_chunk.filter(|last| got <= *last) {
                return Err(LockstepError::ChunkOrder { last, got });
            }
            self.last_chunk = Some(got);
        }
        Ok(())
    }
}

impl Direction for Replies {
    fn check(&mut self, header: &Header) -> Result<(), LockstepError> {
        let (action, kind) = (header.action(), header.body_kind());
        if kind == BodyKind::Envelope {
            return Err(LockstepError::WrongDirection { kind });
        }
        let answers = |call: &Header| {
            call.call_id() == header.call_id()
                && call.chunk_index() == header.chunk_index()
                && call.cache_epoch() == header.cache_epoch()
        };
        // A failure may overtake: it is about a call further back in the queue, and it ends the
        // edge. Everything else is an answer in kind to the oldest call.
        let due = if action == Action::Error {
            self.due.iter().any(answers)
        } else {
            let oldest = self.due.pop_front();
            oldest.is_some_and(|call| call.action() == action && answers(&call))
        };
        if !due {
            let call_id = header.call_id();
            return Err(LockstepError::NotDue { action, call_id });
        }
        Ok(())
    }
}

/// A frame that was checked and is the next one in order: the witness with which its payload is
/// received, once. It cannot be made from a header that was not admitted, nor copied:
///
/// ```compile_fail,E0451
/// use pp_contract::{Header, Matched};
/// fn forge<'a>(header: Header, body: &'a [u8]) -> Matched<'a> {
///     Matched { header, body }
/// }
/// ```
///
/// ```compile_fail,E0382
/// use pp_contract::Matched;
/// fn post_receive(_: Matched<'_>) {}
/// fn twice(matched: Matched<'_>) {
///     post_receive(matched);
///     post_receive(matched);
/// }
/// ```
#[derive(Debug)]
#[must_use = "the payload of a matched header has to be received"]
pub struct Matched<'a> {
    header: Header,
    body: &'a [u8],
}

impl Matched<'_> {
    /// Its header.
    #[must_use]
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// Decodes its envelope.
    ///
    /// # Errors
    /// [`BodyError`]: it is not an envelope of this plan, breaks a rule of the plan, or describes
    /// another payload than the header.
    pub fn envelope<P: Plan>(&self) -> Result<Envelope<P>, BodyError> {
        let envelope = Envelope::from_body(self.body(BodyKind::Envelope)?)?;
        self.check_payload(envelope.inputs().payload_bytes())?;
        Ok(envelope)
    }

    /// Decodes its result.
    ///
    /// # Errors
    /// [`BodyError`]: it is not a result, or describes another payload than the header.
    pub fn outcome(&self) -> Result<Outcome, BodyError> {
        let outcome = Outcome::from_body(self.body(BodyKind::Result)?)?;
        self.check_payload(outcome.outputs.payload_bytes())?;
        Ok(outcome)
    }

    /// Decodes its failure.
    ///
    /// # Errors
    /// [`BodyError`]: it is not a failure.
    pub fn failure(&self) -> Result<Failure, BodyError> {
        Failure::from_body(self.body(BodyKind::Failure)?)
    }

    fn body(&self, wanted: BodyKind) -> Result<&[u8], BodyError> {
        let got = self.header.body_kind();
        if got != wanted {
            return Err(BodyError::WrongKind { wanted, got });
        }
        Ok(self.body)
    }

    fn check_payload(&self, manifest: u64) -> Result<(), BodyError> {
        let header = self.header.payload_bytes();
        if header != manifest {
            return Err(BodyError::PayloadSize { header, manifest });
        }
        Ok(())
    }
}
