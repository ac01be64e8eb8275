//! What the runtime asks of the stages: read, encode, compute, decode, write.
//!
//! The driver calls them inline, one at a time, on its own thread, so a stage needs no lock. A
//! stage writes straight into the slot that is sent and reads straight from the slot received.
//!
//! A stage on a processor is done when it returns. A stage on a device only gives work to it and
//! says [`Progress::UnderWay`]; the driver goes on and asks later. Order between the device's
//! works is the leases' affair, not the driver's. A stage is of one kind or of the other.
//!
//! What a stage keeps of a chunk goes to the driver and comes back with the next call for that
//! chunk: a stage needs no queue of its own.

use std::convert::Infallible;
use std::marker::PhantomData;
use std::path::Path;

use pp_contract::{
    CacheEpoch, ChunkIndex, Envelope, Fault, FaultKind, Manifest, ManifestError, Outcome, Plan,
    PlanError, Rank, Seal, with_source,
};

use pp_transport::error::TransportError;
use pp_transport::host::{RxLease, TxLease};
use pp_transport::in_flight::Part;

use crate::core::Cut;

/// Why a stage cannot go on; becomes a [`Fault`] that names this rank.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {detail}")]
pub struct StageError {
    /// What kind of thing went wrong; decides the exit code.
    pub kind: FaultKind,
    /// What was being done.
    pub operation: &'static str,
    /// What went wrong, and the remedy.
    pub detail: String,
    /// The rank that the evidence is against, where that is not the one that found it.
    pub blames: Option<Rank>,
}

impl StageError {
    /// An error of this kind.
    pub fn new(kind: FaultKind, operation: &'static str, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self {
            kind,
            operation,
            detail,
            blames: None,
        }
    }

    /// A file that cannot be opened, read or written, named by its path.
    pub fn file(operation: &'static str, path: &Path, error: &std::io::Error) -> Self {
        let detail = format!("{}: {error}", path.display());
        Self::new(FaultKind::Io, operation, detail)
    }

    /// This error, which the evidence blames on `rank`.
    #[must_use]
    pub fn blaming(mut self, rank: Rank) -> Self {
        self.blames = Some(rank);
        self
    }

    /// This error as a fault of `rank`, unless it blames another rank.
    pub fn into_fault(self, rank: Rank) -> Fault {
        let rank = self.blames.unwrap_or(rank);
        Fault::new(self.kind, rank, self.operation, self.detail)
    }
}

/// What a stage returns.
pub type StageResult<T> = Result<T, StageError>;

/// What a lease says when work on its slot could not be ordered.
impl From<TransportError> for StageError {
    fn from(error: TransportError) -> Self {
        Self::new(error.fault_kind(), "issue work", with_source(&error))
    }
}

/// A source that cannot be read, or a sink that cannot be written. An [`std::io::Error`] names no file:
/// [`StageError::file`] does.
impl From<std::io::Error> for StageError {
    fn from(error: std::io::Error) -> Self {
        Self::new(FaultKind::Io, "read or write", error.to_string())
    }
}

/// Tensors that no message can have.
impl From<ManifestError> for StageError {
    fn from(error: ManifestError) -> Self {
        Self::new(FaultKind::BadInput, "encode", with_source(&error))
    }
}

/// Tensors that do not fit their plan.
impl From<PlanError> for StageError {
    fn from(error: PlanError) -> Self {
        Self::new(FaultKind::BadInput, "encode", with_source(&error))
    }
}

/// Where a chunk stands in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its index; the order of the output.
    pub chunk: ChunkIndex,
    /// Its epoch.
    pub epoch: CacheEpoch,
    /// True for the first chunk of its epoch: nothing before it may influence it.
    pub starts_epoch: bool,
    /// True for the first chunk that a Phase B gets which was started anew: what it must know of
    /// the chunks before has to come with this one. Only the front is told.
    pub rebuilds: bool,
}

/// The payloads that were sent and are still there: of the chunk that is sent again, and of those
/// before it in its epoch.
pub trait RetainedPayloads<Tx> {
    /// What lies in the payload that was sent so many chunks before, 0 being the chunk itself;
    /// `None` if that is not kept.
    fn inputs(&self, chunks_back: usize) -> Option<&Manifest>;

    /// Copies parts of that payload into the slot.
    ///
    /// # Errors
    /// It is not kept, or a part lies outside it or outside the slot.
    fn copy(&self, chunks_back: usize, parts: &[Part], slot: &mut Tx)
    -> Result<(), TransportError>;
}

/// What the source says when asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    /// A chunk is ready, and begins like this.
    Chunk(Cut),
    /// Not yet; the bell rings when it is worth asking again.
    Later,
    /// There are no more.
    End,
}

/// How far a stage is with a chunk when it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress<T, W> {
    /// Done, with this result.
    Done(T),
    /// A device works on it. The driver carries what the stage keeps for that, and asks with it.
    UnderWay(W),
}

impl<T, W> Progress<T, W> {
    /// The progress with `done` applied to the result, or `under_way` to what the stage keeps.
    pub fn map<U, V>(
        self,
        done: impl FnOnce(T) -> U,
        under_way: impl FnOnce(W) -> V,
    ) -> Progress<U, V> {
        match self {
            Self::Done(result) => Progress::Done(done(result)),
            Self::UnderWay(kept) => Progress::UnderWay(under_way(kept)),
        }
    }
}

/// A chunk that was encoded.
#[derive(Clone, Debug)]
pub struct Built<P: Plan, C> {
    /// What is asked for.
    pub envelope: Envelope<P>,
    /// What the stage keeps of the chunk until it is decoded; the driver carries it.
    pub carry: C,
    /// Video frames (or whatever is counted) in the chunk.
    pub frames: u32,
    /// When the first and when the last frame of the chunk had been read, in nanoseconds of
    /// [`crate::clock::now_ns`]. `None` where nothing is read: then its latency counts from the
    /// beginning of its build.
    pub read_ns: Option<(u64, u64)>,
}

impl<P: Plan, C> Built<P, C> {
    /// A chunk of one frame that was not read.
    pub fn new(envelope: Envelope<P>, carry: C) -> Self {
        Self {
            envelope,
            carry,
            frames: 1,
            read_ns: None,
        }
    }
}

/// What the front says of a chunk it has decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decoded {
    /// How long a device worked on it, by the device's own clock; else the driver's clock counts.
    pub worked: Option<FrontWork>,
}

/// Time a device worked for the front on one chunk, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontWork {
    /// In the encode.
    pub build_ns: u64,
    /// In the decode.
    pub decode_ns: u64,
}

/// The stages of the front: source and encode, decode and sink.
///
/// `Tx` and `Rx` are the leases of the backend the stages were written for.
pub trait FrontStages<Tx, Rx> {
    /// The plan that goes with each chunk.
    type Plan: Plan;
    /// What these stages keep of a chunk between its encode and its decode.
    type Carry;
    /// What they keep of a chunk while a device decodes it.
    type Decoding;

    /// Asks the source for the next chunk. An offered chunk stays offered until it is built.
    ///
    /// # Errors
    /// The source is broken or ended in the middle of something.
    fn poll_source(&mut self) -> Result<Offer, StageError>;

    /// Encodes the offered chunk into the slot and says what lies there, or will: a device may
    /// still work on it, and the link then sends it when it is done. No code writes the slot after
    /// that: it may be read again.
    ///
    /// # Errors
    /// The chunk cannot be encoded.
    fn build(
        &mut self,
        place: Place,
        slot: &mut Tx,
    ) -> Result<Built<Self::Plan, Self::Carry>, StageError>;

    /// Composes a chunk again, into the slot, for a Phase B that was started anew and gets this one
    /// first. `sent` is what was asked for it before. Without an implementation the same is asked for
    /// again: enough where Phase B needs to know nothing of the chunks before.
    ///
    /// # Errors
    /// It cannot be composed.
    fn rebuild(
        &mut self,
        _place: Place,
        sent: &Envelope<Self::Plan>,
        kept: &dyn RetainedPayloads<Tx>,
        slot: &mut Tx,
    ) -> Result<Envelope<Self::Plan>, StageError> {
        send_as_it_was(sent, kept, slot)
    }

    /// Whether the sink would take a decoded chunk now, beside so many whose decode is under way;
    /// the bell rings when that changes.
    ///
    /// # Errors
    /// The sink is broken.
    fn is_sink_ready(&mut self, _decoding: usize) -> Result<bool, StageError> {
        Ok(true)
    }

    /// Decodes a result and gives it to the sink. Dropping `payload` frees its slot.
    ///
    /// # Errors
    /// The result cannot be decoded, or the sink is broken.
    fn decode(
        &mut self,
        chunk: ChunkIndex,
        carry: Self::Carry,
        outcome: &Outcome,
        payload: Option<Rx>,
    ) -> Result<Progress<Decoded, Self::Decoding>, StageError>;

    /// How far the oldest decode is that is under way.
    ///
    /// # Errors
    /// As [`FrontStages::decode`].
    fn poll_decoded(
        &mut self,
        oldest: Self::Decoding,
    ) -> Result<Progress<Decoded, Self::Decoding>, StageError> {
        Ok(Progress::UnderWay(oldest))
    }

    /// The chunk's result was dropped after a hard cut.
    fn forget(&mut self, _chunk: ChunkIndex, _carry: Self::Carry) {}

    /// Chunks waiting in the source's and in the sink's queue, for the records.
    fn queued(&self) -> (u32, u32) {
        (0, 0)
    }
}

/// Copies a payload as it was, for a [`FrontStages::rebuild`] that has nothing to change.
///
/// # Errors
/// As [`RetainedPayloads::copy`].
pub fn send_as_it_was<P: Plan, Tx>(
    sent: &Envelope<P>,
    kept: &dyn RetainedPayloads<Tx>,
    slot: &mut Tx,
) -> Result<Envelope<P>, StageError> {
    let whole = Part {
        from: 0,
        to: 0,
        bytes: sent.inputs().payload_bytes(),
    };
    if whole.bytes > 0 {
        kept.copy(0, &[whole], slot)?;
    }
    Ok(sent.clone())
}

/// The stage of Phase B.
pub trait PhaseBStages<Tx, Rx> {
    /// The plan it understands.
    type Plan: Plan;
    /// What it keeps of a chunk while a device works on it.
    type Computing;

    /// Computes one chunk from the slot received into the slot that goes back. `output` is ready
    /// to hold `envelope.outputs()`.
    ///
    /// # Errors
    /// The computation failed; the front gets a failure in place of a result.
    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<Self::Plan>,
        input: Option<&Rx>,
        output: &mut Tx,
    ) -> Result<Progress<Computed, Self::Computing>, StageError>;

    /// How far the oldest computation is that is under way.
    ///
    /// # Errors
    /// As [`PhaseBStages::compute`].
    fn poll_computed(
        &mut self,
        oldest: Self::Computing,
    ) -> Result<Progress<Computed, Self::Computing>, StageError> {
        Ok(Progress::UnderWay(oldest))
    }
}

/// A Phase B that computes at once, on the host: from the bytes that came into those that go back.
#[derive(Clone, Copy, Debug)]
pub struct OnHost<P, F>(F, PhantomData<P>);

impl<P: Plan, F> OnHost<P, F>
where
    F: FnMut(&Envelope<P>, &[u8], &mut [u8]) -> StageResult<()>,
{
    /// Computes with this closure. The bytes that go back are a whole slot; what the envelope does not ask for is not
    /// sent.
    pub fn new(compute: F) -> Self {
        Self(compute, PhantomData)
    }
}

impl<P: Plan, F> PhaseBStages<TxLease, RxLease> for OnHost<P, F>
where
    F: FnMut(&Envelope<P>, &[u8], &mut [u8]) -> StageResult<()>,
{
    type Plan = P;
    type Computing = Infallible;

    fn compute(
        &mut self,
        _: Place,
        envelope: &Envelope<P>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> StageResult<Progress<Computed, Infallible>> {
        (self.0)(
            envelope,
            input.map_or(&[], RxLease::bytes),
            output.bytes_mut(),
        )?;
        Ok(Progress::Done(Computed::of(envelope.plan())))
    }
}

/// What Phase B says of a chunk it computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Computed {
    /// Generator calls that were made.
    pub observed_calls: u32,
    /// The first frame as this side saw it.
    pub start_frame: u64,
    /// What is said of outputs that carry digests; none where they do not.
    pub seal: Option<Seal>,
    /// How long a device worked on it, by the device's own clock; else the driver's clock counts.
    pub worked: Option<PhaseBWork>,
}

impl Computed {
    /// What a processor says that computed the chunk as planned.
    pub fn of(plan: &impl Plan) -> Self {
        Self {
            observed_calls: plan.expected_calls(),
            start_frame: plan.start_frame(),
            seal: None,
            worked: None,
        }
    }
}

/// Time a device spent on one chunk of Phase B, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseBWork {
    /// In the computation.
    pub compute_ns: u64,
    /// Idle, between the end of the computation before and the beginning of this one.
    pub idle_ns: u64,
}
