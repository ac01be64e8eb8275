//! Receiving: a frame is admitted only if it is whole, right, and the next one in order.
//!
//! *Hazard.* The transports below check nothing: a payload that is received for the wrong header
//! is silently wrong data, a size that differs truncates or hangs.
//! *Guarantee.* [`Matched`] is the witness that a header was checked against its checksums and
//! against everything that came before on its edge; a receive is posted with one, and each is good
//! for one receive. After the first error nothing more is admitted: the two sides no longer agree
//! on where they are.

use crate::codec::BodyError;
use crate::header::{Action, HEADER_BYTES, Header, HeaderError};
use crate::ids::{CacheEpoch, CallId, ChunkIndex, EdgeSeq, Rank};
use crate::message::Message;
use crate::pipeline::Pipeline;
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
    /// The attempt fell.
    #[error("attempt {got} follows {last}: it must not fall")]
    AttemptOrder {
        /// Of the message before.
        last: u16,
        /// Of this one.
        got: u16,
    },
    /// A lap that the edge does not have.
    #[error("lap {got} on an edge of {laps}, counted from 0")]
    Lap {
        /// The lap, from 0.
        got: u16,
        /// How many laps there are.
        laps: u16,
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
    /// Another chunk than the one that a fixed order has next.
    #[error("chunk_index {got} came where {expected} is due in the order of this edge")]
    ChunkDue {
        /// The chunk that is due.
        expected: ChunkIndex,
        /// Of this INFER.
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
    /// Something follows SHUTDOWN.
    #[error("a frame follows a terminal one")]
    AfterTerminal,
    /// An earlier frame was refused.
    #[error("an earlier frame was refused; this edge can no longer be used")]
    Poisoned,
}

/// What the receiving end of one directed edge knows of the messages so far.
///
/// Within an attempt the calls and the chunks of each lap rise, and the epoch does not fall. An attempt begins anew: the
/// source sends again what was not accepted. Payloads are counted over all attempts and laps. In a fixed order the chunks
/// come in that order and in no other. Not `Clone`: two of them would admit a frame twice.
#[derive(Debug)]
pub struct Lockstep {
    next_edge: EdgeSeq,
    attempt: u16,
    /// By lap.
    last: Vec<Option<Last>>,
    due: Option<Due>,
    closed: Option<LockstepError>,
}

/// What comes next in a fixed order.
#[derive(Debug)]
struct Due {
    /// The chunks of a step, counted from its beginning.
    chunks: Vec<u64>,
    /// INFERs so far.
    seen: u64,
}

impl Due {
    fn next(&self) -> ChunkIndex {
        let step = self.chunks.len() as u64;
        let within = self.chunks[(self.seen % step) as usize];
        ChunkIndex::new(
            (self.seen / step)
                .saturating_mul(step)
                .saturating_add(within),
        )
    }
}

/// The message before, in one lap.
#[derive(Debug, Clone, Copy)]
struct Last {
    call: CallId,
    epoch: CacheEpoch,
    chunk: Option<ChunkIndex>,
}

impl Lockstep {
    /// The receiving end of an edge outside of a ring, or into or out of one.
    #[must_use]
    pub fn new() -> Self {
        Self::with_laps(1)
    }

    /// The receiving end of an edge between two stages of a ring of at most so many laps. Its laps are numbered as the
    /// receiving stage counts them, so those of the edge back to the first stage begin with 1.
    #[must_use]
    pub fn with_laps(laps: u16) -> Self {
        Self {
            next_edge: EdgeSeq::FIRST,
            attempt: 0,
            last: vec![None; laps.into()],
            due: None,
            closed: None,
        }
    }

    /// The receiving end of an edge whose chunks come in a fixed order: for each step of so many chunks, these, counted from
    /// the beginning of the step. An empty order is none.
    #[must_use]
    pub fn in_order(chunks: Vec<u64>) -> Self {
        let due = (!chunks.is_empty()).then_some(Due { chunks, seen: 0 });
        Self { due, ..Self::new() }
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
        self.check_order(&header)?;
        if let Some(got) = header.edge_seq() {
            let expected = self.next_edge;
            if got != expected {
                return Err(LockstepError::EdgeOrder { expected, got });
            }
            self.next_edge = expected.next().unwrap_or(expected);
        }
        Ok(Matched { header, body })
    }

    fn check_order(&mut self, header: &Header) -> Result<(), LockstepError> {
        let (last, got) = (self.attempt, header.attempt());
        if got < last {
            return Err(LockstepError::AttemptOrder { last, got });
        }
        if got > last {
            self.attempt = got;
            self.last.fill(None);
        }
        let laps = self.last.len() as u16;
        let got = header.lap();
        let Some(place) = self.last.get_mut(usize::from(got)) else {
            return Err(LockstepError::Lap { got, laps });
        };
        let (call, epoch) = (header.call_id(), header.cache_epoch());
        let is_infer = header.action() == Action::Infer;
        if let Some(due) = self.due.as_mut().filter(|_| is_infer) {
            let (expected, got) = (due.next(), header.chunk_index());
            if got != expected {
                return Err(LockstepError::ChunkDue { expected, got });
            }
            due.seen += 1;
        }
        let rises = self.due.is_none();
        if let Some(last) = place {
            if rises && call <= last.call {
                let (last, got) = (last.call, call);
                return Err(LockstepError::CallOrder { last, got });
            }
            if epoch < last.epoch {
                let (last, got) = (last.epoch, epoch);
                return Err(LockstepError::EpochOrder { last, got });
            }
        }
        let mut chunk = place.and_then(|last| last.chunk);
        if is_infer {
            let got = header.chunk_index();
            if let Some(last) = chunk.filter(|last| rises && got <= *last) {
                return Err(LockstepError::ChunkOrder { last, got });
            }
            chunk = Some(got);
        }
        *place = Some(Last { call, epoch, chunk });
        Ok(())
    }
}

impl Default for Lockstep {
    fn default() -> Self {
        Self::new()
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

    /// Decodes its message, which stage `maker` of the pipeline sent with its payload. From the sink it is an acceptance.
    ///
    /// # Errors
    /// [`BodyError`]: there is none, it breaks a rule of the plan, its trail is not that of a chunk which `maker` hands
    /// on for this lap, or it describes another payload than the header.
    ///
    /// # Panics
    /// If the pipeline has no stage `maker`.
    pub fn message<P: Plan>(
        &self,
        pipeline: &Pipeline,
        maker: usize,
    ) -> Result<Message<P>, BodyError> {
        let is_acceptance = maker + 1 == pipeline.stages().len();
        let sender = pipeline.stages()[maker].leader();
        let message = self.decode::<P>(pipeline, (maker, sender), !is_acceptance)?;
        self.check_payload(message.tensors().payload_bytes())?;
        Ok(message)
    }

    /// Decodes the message that the leader of the group of stage `at` got with its payload, into a slot of so many bytes,
    /// and sent to a member without.
    ///
    /// # Errors
    /// As [`Matched::message`]; a payload is announced; the slot cannot have held the one that is described.
    ///
    /// # Panics
    /// If the pipeline has no stage `at`, or it is the source.
    pub fn followed<P: Plan>(
        &self,
        pipeline: &Pipeline,
        at: usize,
        slot: u64,
    ) -> Result<Message<P>, BodyError> {
        let sender = pipeline.stages()[at - 1].leader();
        let message = self.of_group::<P>(pipeline, (at - 1, sender), true)?;
        match message.tensors().payload_bytes() {
            manifest if manifest > slot => Err(BodyError::NoSuchPayload { manifest, slot }),
            _ => Ok(message),
        }
    }

    /// Decodes the message by which this member of the group of stage `at` reports to the leader ([`Message::reported`]).
    ///
    /// # Errors
    /// As [`Matched::message`]; there are tensors, or a payload is announced.
    ///
    /// # Panics
    /// If the pipeline has no stage `at`.
    pub fn reported<P: Plan>(
        &self,
        pipeline: &Pipeline,
        at: usize,
        member: Rank,
    ) -> Result<Message<P>, BodyError> {
        self.of_group(pipeline, (at, member), false)
    }

    fn of_group<P: Plan>(
        &self,
        pipeline: &Pipeline,
        maker: (usize, Rank),
        has_tensors: bool,
    ) -> Result<Message<P>, BodyError> {
        self.check_payload(0)?;
        let message = self.decode::<P>(pipeline, maker, has_tensors)?;
        match message.is_stale() {
            true => Err(BodyError::Stale),
            false => Ok(message),
        }
    }

    fn decode<P: Plan>(
        &self,
        pipeline: &Pipeline,
        (maker, sender): (usize, Rank),
        has_tensors: bool,
    ) -> Result<Message<P>, BodyError> {
        let action = self.header.action();
        if action != Action::Infer {
            return Err(BodyError::NoBody { action });
        }
        let at = (maker, self.header.lap());
        Message::from_body(self.body, pipeline, at, sender, has_tensors)
    }

    fn check_payload(&self, manifest: u64) -> Result<(), BodyError> {
        match self.header.payload_bytes() {
            header if header == manifest => Ok(()),
            header => Err(BodyError::PayloadSize { header, manifest }),
        }
    }
}
