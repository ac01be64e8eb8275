//! What the runtime asks of the stages: a source makes chunks, stages work on them, a sink takes them.
//!
//! The driver of a rank calls the stages that stand on this rank inline, one at a time, on its own thread, so a stage
//! needs no lock. A stage writes straight into the slot that is sent and reads straight from the slot received.
//!
//! A stage on a processor is done when it returns. A stage on a device only gives work to it and
//! says [`Progress::UnderWay`]; the driver goes on and asks later. Order between the device's
//! works is the leases' affair, not the driver's. A stage is of one kind or of the other.
//!
//! What a stage keeps of a chunk goes to the driver and comes back with the next call for that
//! chunk: a stage needs no queue of its own.

mod host;

use std::io::ErrorKind;
use std::path::Path;

use pp_contract::{
    CacheEpoch, ChunkIndex, Fault, FaultKind, Manifest, ManifestError, Message, Plan, PlanError,
    Rank, Seal, with_source,
};
use pp_transport::error::{TransportError, lift_limit};
use pp_transport::in_flight::Part;
use rustix::io::Errno;

pub use self::host::{OnHost, first_bytes};
use crate::core::Cut;

/// Why a stage cannot go on; becomes a [`Fault`] that names this rank.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {detail}")]
pub struct StageError {
    /// What kind of thing went wrong; decides the exit code.
    pub kind: FaultKind,
    /// What was being done.
    pub operation: &'static str,
    /// What went wrong, and the remedy. Further lines, such as a traceback, become the text of the fault: up to 16 KiB.
    pub detail: String,
    /// The rank that the evidence is against, where that is not the one that found it.
    pub blames: Option<Rank>,
    /// A call of the transport failed: the cause may be another rank, whose end the watchdog tells.
    pub is_of_transport: bool,
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
            is_of_transport: false,
        }
    }

    /// A file that cannot be opened, read or written, named by its path.
    pub fn file(operation: &'static str, path: &Path, error: &std::io::Error) -> Self {
        let remedy = remedy_of_file(error);
        let detail = format!("{}: {error}; {remedy}", path.display());
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

/// What to do about a file that cannot be opened, read or written.
#[must_use]
pub fn remedy_of_file(error: &std::io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::NotFound => "check its name",
        ErrorKind::PermissionDenied => "choose a file that you may open",
        ErrorKind::IsADirectory => "name a file in it",
        _ => Errno::from_io_error(error)
            .and_then(lift_limit)
            .unwrap_or("choose another file"),
    }
}

/// What a stage returns.
pub type StageResult<T> = Result<T, StageError>;

/// What a lease says when work on its slot could not be ordered.
impl From<TransportError> for StageError {
    fn from(error: TransportError) -> Self {
        let said = Self::new(error.fault_kind(), "issue work", with_source(&error));
        let blames = match error {
            TransportError::PeerMisbehaved { rank, .. } => Some(rank),
            _ => None,
        };
        Self {
            blames,
            // An argument that is wrong is wrong here.
            is_of_transport: !matches!(error, TransportError::WrongGroup { .. }),
            ..said
        }
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Its index; the order of the output.
    pub chunk: ChunkIndex,
    /// Its epoch.
    pub epoch: CacheEpoch,
    /// The lap of its ring, from 0; 0 outside of a ring.
    pub lap: u16,
    /// True for the first chunk of its epoch that this stage works on: nothing that the stage remembers may influence it.
    /// So it is true of the first chunk after a restart, too, which may stand in the middle of its epoch: that chunk brings
    /// what a stage must know, as [`Source::rebuild`] has composed it.
    pub starts_epoch: bool,
    /// True for the first chunk that is sent after a rank was replaced: what a stage must know of the chunks before has
    /// to come with this one. Only the source is told; the plan tells the other stages.
    pub rebuilds: bool,
    /// The denoising steps that the job asks for of this chunk, to keep up with its source; `None`: as the source likes. Only the
    /// source is told; the plan tells the other stages.
    pub steps: Option<u16>,
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

/// Says whether the source has a chunk.
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
    /// Asks `poll` again where a device still works; whether it is done. The place is empty where that failed.
    ///
    /// # Errors
    /// What `poll` returns.
    pub fn ask(
        place: &mut Option<Self>,
        poll: impl FnOnce(W) -> StageResult<Self>,
    ) -> StageResult<bool> {
        *place = match place.take() {
            Some(Self::UnderWay(kept)) => Some(poll(kept)?),
            done => done,
        };
        Ok(!matches!(place, Some(Self::UnderWay(_))))
    }

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

/// A chunk that the source made.
#[derive(Clone, Debug)]
pub struct Built<P: Plan, C> {
    /// What is asked of the stages.
    pub plan: P,
    /// What lies in the slot.
    pub tensors: Manifest,
    /// What the sink is told of the chunk, beside plan and tensors; the stages between may read it.
    pub note: Vec<u8>,
    /// What the source keeps of the chunk until the sink has accepted it; the driver carries it.
    pub carry: C,
    /// Video frames (or whatever is counted) in the chunk.
    pub frames: u32,
    /// When the first and when the last frame of the chunk had been read, in nanoseconds of
    /// [`crate::clock::now_ns`]. `None` where nothing is read: then its latency counts from the
    /// beginning of its build.
    pub read_ns: Option<(u64, u64)>,
    /// Frames that are missing between the chunk before and this one: they were dropped.
    pub skipped_frames: u32,
    /// How long its reader was held back before it could hand the chunk on, in nanoseconds.
    pub held_ns: u64,
    /// By how much later than the rate that the source names its first frame is built, in nanoseconds; `None` where no rate is
    /// named, or none has to be kept.
    pub late_ns: Option<u64>,
}

impl<P: Plan, C> Built<P, C> {
    /// A chunk of one frame that was not read.
    pub fn new(plan: P, tensors: Manifest, carry: C) -> Self {
        Self {
            plan,
            tensors,
            note: Vec::new(),
            carry,
            frames: 1,
            read_ns: None,
            skipped_frames: 0,
            held_ns: 0,
            late_ns: None,
        }
    }
}

/// The first stage of a pipeline, on rank 0. `Tx` is the lease of the backend that it was written for.
pub trait Source<Tx> {
    /// The plan that goes with each chunk.
    type Plan: Plan;
    /// What it keeps of a chunk until the sink has accepted the chunk.
    type Carry;

    /// Asks for the next chunk. An offered chunk stays offered until it is built.
    ///
    /// # Errors
    /// The source is broken or ended in the middle of something.
    fn poll(&mut self) -> StageResult<Offer>;

    /// Makes the offered chunk in the slot and says what lies there, or will: a device may
    /// still work on it, and it is sent when that is done. No code writes the slot after
    /// that: it may be read again.
    ///
    /// # Errors
    /// The chunk cannot be made.
    fn build(&mut self, place: Place, slot: &mut Tx)
    -> StageResult<Built<Self::Plan, Self::Carry>>;

    /// As [`Source::build`], for the first chunk that is sent after a rank was replaced, where no earlier one is sent again.
    /// `kept` has the payloads of the chunks before it. Without an implementation it is built like any other: enough where no
    /// stage needs to know the chunks before, or where the source knows them by itself.
    ///
    /// # Errors
    /// As [`Source::build`].
    fn build_anew(
        &mut self,
        place: Place,
        _kept: &dyn RetainedPayloads<Tx>,
        slot: &mut Tx,
    ) -> StageResult<Built<Self::Plan, Self::Carry>> {
        self.build(place, slot)
    }

    /// Says whether the device is done that works on a chunk which was built. Asked again and again, for the oldest such chunk
    /// first, and once more before [`Source::accepted`].
    ///
    /// # Errors
    /// The device failed.
    fn is_built(&mut self, _carry: &mut Self::Carry) -> StageResult<bool> {
        Ok(true)
    }

    /// Composes a chunk again, into the slot, as the first that is sent after a rank was replaced. `sent` is what was
    /// sent for it before. Gives the plan and what lies in the slot. Without an implementation the same is sent again:
    /// enough where no stage needs to know the chunks before.
    ///
    /// # Errors
    /// It cannot be composed.
    fn rebuild(
        &mut self,
        _place: Place,
        sent: &Message<Self::Plan>,
        kept: &dyn RetainedPayloads<Tx>,
        slot: &mut Tx,
    ) -> StageResult<(Self::Plan, Manifest)> {
        send_as_it_was(sent, kept, slot)
    }

    /// The sink has taken the chunk and says `note` of it; `None` if a hard cut overtook it. Gives how long a device worked
    /// on its build, in nanoseconds; `None` where the driver's clock counts.
    ///
    /// # Errors
    /// The device failed.
    fn accepted(
        &mut self,
        _chunk: ChunkIndex,
        _carry: Self::Carry,
        _note: Option<&[u8]>,
    ) -> StageResult<Option<u64>> {
        Ok(None)
    }

    /// Chunks that wait in its queue, for the records.
    fn queued(&self) -> u32 {
        0
    }

    /// Drops chunks that wait, not yet built, whose first frame was there before this time of [`crate::clock::now_ns`]: the
    /// oldest first, the one that is offered included, never the last one that waits (of each stream). Gives how many.
    /// After it the driver asks for the offer anew, because the chunk that is next, and its cut, may be others. It is called
    /// with [`Late::Drop`](crate::core::Late::Drop) alone. Without an implementation nothing is dropped.
    ///
    /// # Errors
    /// The source is broken.
    fn drop_late(&mut self, _before_ns: u64) -> StageResult<u64> {
        Ok(0)
    }

    /// When the first frame of the chunk that is built next was there, in nanoseconds of [`crate::clock::now_ns`]; `None`
    /// where nothing is read, and where nothing waits.
    fn oldest_ns(&self) -> Option<u64> {
        None
    }
}

/// Copies a payload as it was, for a [`Source::rebuild`] that has nothing to change.
///
/// # Errors
/// As [`RetainedPayloads::copy`].
pub fn send_as_it_was<P: Plan, Tx>(
    sent: &Message<P>,
    kept: &dyn RetainedPayloads<Tx>,
    slot: &mut Tx,
) -> StageResult<(P, Manifest)> {
    let whole = Part {
        from: 0,
        to: 0,
        bytes: sent.tensors().payload_bytes(),
    };
    if whole.bytes > 0 {
        kept.copy(0, &[whole], slot)?;
    }
    Ok((sent.plan().clone(), sent.tensors().clone()))
}

/// A chunk that a stage is to work on.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a, P: Plan> {
    /// Where it stands.
    pub place: Place,
    /// What is to be done, and with which tensors.
    pub message: &'a Message<P>,
    /// How long the driver of this rank has waited on its bell since the run began, in nanoseconds.
    pub waited_ns: u64,
    /// In a fixed order: [`Stage::later`] is called for this chunk too. What nobody waits for can be left for then.
    pub puts_off: bool,
}

/// A stage between source and sink, or one part of it, that one rank runs. [`GroupStage`] is one that several run together.
///
/// `Tx` and `Rx` are the leases of the backend it was written for.
pub trait Stage<Tx, Rx> {
    /// The plan it understands.
    type Plan: Plan;
    /// What it keeps of a chunk while a device works on it.
    type Kept;

    /// Works on one chunk, from the slot received into the slot that goes on. What is done at once leaves behind what was begun
    /// before it.
    ///
    /// # Errors
    /// The work failed; that ends the job.
    fn run(
        &mut self,
        chunk: Chunk<'_, Self::Plan>,
        input: Option<&Rx>,
        output: &mut Tx,
    ) -> StageResult<Progress<Done, Self::Kept>>;

    /// How far the oldest work is that is under way.
    ///
    /// # Errors
    /// As [`Stage::run`].
    fn poll(&mut self, oldest: Self::Kept) -> StageResult<Progress<Done, Self::Kept>> {
        Ok(Progress::UnderWay(oldest))
    }

    /// The oldest chunk whose result went on while a device still worked on it, and whether the device is done with it now:
    /// then the stage forgets it. The driver asks whenever it looks for work, so that a device that fails or hangs is named by
    /// its own rank. A stage whose results are done when they go on has none.
    fn ahead(&mut self) -> Option<(ChunkIndex, StageResult<bool>)> {
        None
    }

    /// Does what it has put off of a chunk ([`Chunk::puts_off`]): no slot is read, and none is written. A device may still
    /// work on it when this returns.
    ///
    /// # Errors
    /// The work failed. A stage without an implementation puts nothing off.
    fn later(&mut self, chunk: ChunkIndex) -> StageResult<()> {
        Err(puts_nothing_off(chunk))
    }

    /// Nothing more comes.
    ///
    /// # Errors
    /// What it was to store cannot be stored.
    fn finish(&mut self) -> StageResult<()> {
        Ok(())
    }
}

/// Makes the fault of a stage that puts nothing off and is told to do something later.
pub(crate) fn puts_nothing_off(chunk: ChunkIndex) -> StageError {
    let detail =
        format!("the order puts something off of chunk {chunk}, and this stage puts nothing off");
    StageError::new(FaultKind::Internal, "work later", detail)
}

/// One member of a group: ranks that run a stage together. The first of them leads.
///
/// `Tx` and `Rx` are the leases of the backend it was written for, and `G` is its member of the group, which has the
/// collectives.
pub trait GroupStage<Tx, Rx, G> {
    /// The plan it understands.
    type Plan: Plan;
    /// What it keeps of a chunk while a device works on it.
    type Kept;

    /// Works on one chunk, together with the other members. The leader has the slot received and the slot that goes on;
    /// the others have neither. The message is the same for all, and says what lies in the leader's slot. All members
    /// make the same collective calls in the same order. Only the leader's tensor descriptions are used.
    ///
    /// # Errors
    /// The work failed; that ends the job. So does a collective of which a member is lost.
    fn run(
        &mut self,
        chunk: Chunk<'_, Self::Plan>,
        input: Option<&Rx>,
        output: Option<&mut Tx>,
        group: &mut G,
    ) -> StageResult<Progress<Done, Self::Kept>>;

    /// How far the oldest work is that is under way.
    ///
    /// # Errors
    /// As [`GroupStage::run`].
    fn poll(&mut self, oldest: Self::Kept) -> StageResult<Progress<Done, Self::Kept>> {
        Ok(Progress::UnderWay(oldest))
    }

    /// Nothing more comes.
    ///
    /// # Errors
    /// What it was to store cannot be stored.
    fn finish(&mut self) -> StageResult<()> {
        Ok(())
    }
}

/// The last stage of a pipeline.
pub trait Sink<Rx> {
    /// The plan it understands.
    type Plan: Plan;
    /// What it keeps of a chunk while a device works on it.
    type Kept;

    /// Says whether it would take a chunk now, beside so many that a device works on; the bell rings when that changes.
    ///
    /// # Errors
    /// The sink is broken.
    fn is_ready(&mut self, _under_way: usize) -> StageResult<bool> {
        Ok(true)
    }

    /// Takes a chunk. Where this says [`Progress::UnderWay`], the slot stays as it is until [`Sink::poll`] says that the work is
    /// done.
    ///
    /// # Errors
    /// It cannot be decoded or written.
    fn take(
        &mut self,
        chunk: Chunk<'_, Self::Plan>,
        input: Option<&Rx>,
    ) -> StageResult<Progress<Taken, Self::Kept>>;

    /// How far the oldest chunk is that a device works on.
    ///
    /// # Errors
    /// As [`Sink::take`].
    fn poll(&mut self, oldest: Self::Kept) -> StageResult<Progress<Taken, Self::Kept>> {
        Ok(Progress::UnderWay(oldest))
    }

    /// Nothing more comes: all that was taken is to be stored when this returns. The source hears of it afterwards.
    ///
    /// # Errors
    /// It cannot be stored.
    fn finish(&mut self) -> StageResult<()> {
        Ok(())
    }

    /// Chunks that wait in its queue, for the records.
    fn queued(&self) -> u32 {
        0
    }
}

/// Reports the work of a stage, or of the sink, on a chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Calls that were made.
    pub calls: u32,
    /// The first frame as it saw it.
    pub start_frame: u64,
    /// What is said of tensors that carry digests; none where they do not.
    pub seal: Option<Seal>,
    /// How long a device worked on it, where the stage knows; else the driver's clock counts.
    pub worked: Option<Worked>,
    /// From the sink: what the source is told of the chunk.
    pub note: Vec<u8>,
}

/// Holds the results of a stage for a chunk: the tensors that go on, and its report.
#[derive(Clone, Debug)]
pub struct Done {
    /// What lies in the slot that goes on.
    pub tensors: Manifest,
    /// What it says of its work.
    pub report: Taken,
}

impl Taken {
    /// The report of a processor that made `calls` calls for this plan.
    pub fn of(plan: &impl Plan, calls: u32) -> Self {
        Self {
            calls,
            start_frame: plan.start_frame(),
            ..Self::default()
        }
    }
}

/// Time of a device for one chunk, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worked {
    /// At work.
    pub work_ns: u64,
    /// Idle, between the end of the work before and the beginning of this.
    pub idle_ns: u64,
}
