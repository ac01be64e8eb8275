//! Digests of payloads (`--verify`): what one stage made is what the next one reads, and what it read is still what it
//! was.
//!
//! *Hazard.* Bytes that change on their way or under a stage's hands make an output that is a little wrong, and nothing
//! says where that began.
//! *Guarantee.* In a chunk that is verified every stage compares every tensor that it gets with the digest that the maker
//! of the tensor computed, before and after its own work. A difference names the rank, the tensor and the chunk. Chunks
//! that are not verified cost nothing.
//! *Choices.* Digests are computed where the payload lies and travel in it (`docs/wire-format.md`, *Seals*). A stage on a
//! device only issues that, and nothing waits for it.

mod host;
mod log;
mod verify;

use pp_contract::{
    ChunkIndex, Digests, FaultKind, MAX_TENSORS, Manifest, Message, Pipeline, Plan, Rank,
    SEAL_TENSOR, Seal, StageSpec, TENSOR_ALIGN_BYTES, with_source,
};

pub use self::host::HostDigester;
pub use self::log::{Log, Verified};
pub use self::verify::Verify;
use crate::stage::{Chunk, Place, StageError, StageResult};

/// The operation of its faults.
const VERIFY: &str = "verify";

/// Digests payloads in the memory of one backend.
pub trait Digester {
    /// A slot to write.
    type Tx;
    /// A slot to read.
    type Rx;
    /// Names digests that were asked for.
    type Ticket;

    /// Says whether a ticket can be read as soon as it is there.
    const AT_ONCE: bool;

    /// Makes room for payloads of so many bytes, and for so many tickets at a time. Nothing is verified before that.
    fn prepare(&mut self, most_bytes: u64, tickets: usize) -> StageResult<()>;

    /// Writes the seal of a payload, behind what was issued to write it.
    fn seal(&mut self, manifest: &Manifest, slot: &mut Self::Tx) -> StageResult<Self::Ticket>;

    /// Digests a payload as it is when what was issued so far is done, and looks at its seal.
    fn examine(
        &mut self,
        manifest: &Manifest,
        payload: Option<&Self::Rx>,
    ) -> StageResult<Self::Ticket>;

    /// Says whether the ticket can be read.
    fn is_there(&self, ticket: &Self::Ticket) -> StageResult<bool>;

    /// Reads what was found, once it is there.
    fn read(&mut self, ticket: Self::Ticket) -> StageResult<DigestPair>;

    /// Gives the ticket up: it is not read any more.
    fn drop_unread(&mut self, ticket: Self::Ticket);
}

/// Holds the digests of one payload.
#[derive(Clone, Copy, Debug, Default)]
pub struct DigestPair {
    /// What its seal says they were.
    pub stated: Digests,
    /// What its tensors have now.
    pub computed: Digests,
    /// How long that took.
    pub cost_ns: u64,
}

/// Makes and compares the digests of one stage.
#[derive(Clone, Debug)]
pub struct Verifier {
    every: Verify,
    pipeline: Pipeline,
    at: usize,
}

/// A chunk that a stage behind the source verifies.
#[derive(Debug)]
pub struct Check<S> {
    chunk: ChunkIndex,
    /// The stage that made the tensors.
    maker: usize,
    tensors: Manifest,
    /// What the maker's report says of its digests. The report of a source says nothing.
    reported: Option<Seal>,
    /// What the tensors were before the stage: known, or asked for.
    known: Option<DigestPair>,
    before: Option<S>,
    after: Option<S>,
    sealed: Option<S>,
}

/// A chunk that the source has sealed.
#[derive(Debug)]
pub struct Sealed<S> {
    chunk: ChunkIndex,
    tensors: Manifest,
    ticket: S,
}

impl Verifier {
    /// Verifies these chunks at stage `at` of the pipeline.
    pub fn new(every: Verify, pipeline: &Pipeline, at: usize) -> Self {
        let pipeline = pipeline.clone();
        Self {
            every,
            pipeline,
            at,
        }
    }

    /// Says whether any chunk is verified.
    pub fn is_on(&self) -> bool {
        self.every != Verify::Off
    }

    /// Says whether the chunk is verified.
    pub fn is_due(&self, chunk: ChunkIndex) -> bool {
        self.every.is_due(chunk.get())
    }

    /// Gives the bytes of a slot behind its tensors, for the seal and what lies in front of it.
    pub fn room(&self) -> u64 {
        let seal = 8 * MAX_TENSORS as u64 + TENSOR_ALIGN_BYTES;
        if self.is_on() { seal } else { 0 }
    }

    /// Adds a seal to these tensors; `None` where nothing is verified.
    ///
    /// # Errors
    /// A payload has no room for one tensor more.
    pub fn sealed(&self, tensors: &Manifest) -> StageResult<Option<Manifest>> {
        let sealed = || {
            let sealed = tensors.sealed();
            sealed.map_err(|e| StageError::new(FaultKind::Plugin, "layout", with_source(&e)))
        };
        self.is_on().then(sealed).transpose()
    }

    /// Seals a chunk that the source just made.
    ///
    /// # Errors
    /// The digester's.
    pub fn seal<N: Digester>(
        &self,
        digester: &mut N,
        chunk: ChunkIndex,
        tensors: &Manifest,
        slot: &mut N::Tx,
    ) -> StageResult<Sealed<N::Ticket>> {
        Ok(Sealed {
            chunk,
            tensors: tensors.clone(),
            ticket: digester.seal(tensors, slot)?,
        })
    }

    /// Looks at the tensors before the stage works on them; `None` for a chunk that is not verified.
    ///
    /// # Errors
    /// The tensors have no seal and the chunk is to be verified, or the other way round: all ranks were started with the
    /// same setting. A tensor has changed. The digester's.
    pub fn begin<P: Plan, N: Digester>(
        &self,
        digester: &mut N,
        chunk: Chunk<'_, P>,
        input: Option<&N::Rx>,
    ) -> StageResult<Option<Check<N::Ticket>>> {
        let (message, index) = (chunk.message, chunk.place.chunk);
        let maker = self.maker(chunk.place);
        let is_sealed = message.tensors().is_sealed();
        if is_sealed != self.is_due(index) {
            let has = if is_sealed { "has" } else { "has no" };
            let (from, every) = (said(self.stage(maker)), self.every);
            let detail =
                format!("chunk {index} {has} digests from {from}, and --verify is {every}");
            let error = StageError::new(FaultKind::PeerMisbehaved, VERIFY, detail);
            return Err(error.blaming(self.stage(maker).leader()));
        }
        if !is_sealed {
            return Ok(None);
        }
        let mut check = Check {
            chunk: index,
            maker,
            tensors: message.tensors().clone(),
            reported: self.reported(message, maker),
            known: None,
            before: None,
            after: None,
            sealed: None,
        };
        let ticket = digester.examine(&check.tensors, input)?;
        if N::AT_ONCE {
            check.known = Some(self.arrived(&check, digester.read(ticket)?)?);
        } else {
            check.before = Some(ticket);
        }
        Ok(Some(check))
    }

    /// Looks at the tensors behind the work of the stage, and seals those that it made. A sink makes none.
    ///
    /// # Errors
    /// The digester's.
    pub fn end<N: Digester>(
        &self,
        digester: &mut N,
        check: &mut Check<N::Ticket>,
        input: Option<&N::Rx>,
        made: Option<(&Manifest, &mut N::Tx)>,
    ) -> StageResult<()> {
        check.after = Some(digester.examine(&check.tensors, input)?);
        if let Some((tensors, slot)) = made {
            check.sealed = Some(digester.seal(tensors, slot)?);
        }
        Ok(())
    }

    /// Says whether all that was issued for it is done.
    ///
    /// # Errors
    /// The digester's.
    pub fn is_there<N: Digester>(
        &self,
        digester: &N,
        check: &Check<N::Ticket>,
    ) -> StageResult<bool> {
        // What was issued last.
        let last = check.sealed.as_ref().or(check.after.as_ref());
        last.map_or(Ok(true), |ticket| digester.is_there(ticket))
    }

    /// Compares, when that is done. Gives what the report of the stage says: of the tensors that it made, and a sink of
    /// those that it got.
    ///
    /// # Errors
    /// A tensor has changed. The digester's.
    pub fn conclude<N: Digester>(
        &self,
        digester: &mut N,
        mut check: Check<N::Ticket>,
    ) -> StageResult<Seal> {
        let before = match check.before.take() {
            Some(ticket) => self.arrived(&check, digester.read(ticket)?)?,
            None => check.known.unwrap_or_default(),
        };
        let mut last = before;
        let mut cost_ns = before.cost_ns;
        if let Some(after) = check.after.take() {
            let after = digester.read(after)?;
            cost_ns += after.cost_ns;
            let what = || format!("before {} worked on it, and afterwards", self.own());
            check.compare(&before.computed, &after.computed, what)?;
        }
        if let Some(sealed) = check.sealed.take() {
            last = digester.read(sealed)?;
            cost_ns += last.cost_ns;
        }
        Ok(Seal {
            digest: last.computed.seal(),
            cost_us: cost_ns / 1000,
        })
    }

    /// Says whether the tensors arrived as their maker has sealed them.
    fn arrived<S>(&self, check: &Check<S>, found: DigestPair) -> StageResult<DigestPair> {
        let maker = self.stage(check.maker);
        let (from, stated) = (said(maker), found.stated.seal());
        if let Some(reported) = check.reported.filter(|seal| seal.digest != stated) {
            let own = self.own();
            let what = format!("as the report of {from} says, and what came to {own} has");
            let error = drifted(check.chunk, SEAL_TENSOR, [reported.digest, stated], &what);
            return Err(error.blaming(maker.leader()));
        }
        let what = || format!("when {from} had made it, and when {} got it", self.own());
        let compared = check.compare(&found.stated, &found.computed, what);
        compared.map_err(|error| error.blaming(maker.leader()))?;
        Ok(found)
    }

    /// Reads the seals of the stages between the source and this one, in the order of the pipeline.
    pub fn seals<P: Plan>(&self, message: &Message<P>) -> Vec<Seal> {
        let seals = (1..self.at).map(|at| self.reported(message, at).unwrap_or_default());
        seals.collect()
    }

    /// What a stage says of what it made. The leader of a group has it all.
    fn reported<P: Plan>(&self, message: &Message<P>, stage: usize) -> Option<Seal> {
        let reports = message.trail().of(&self.pipeline, stage);
        reports.first()?.seal
    }

    /// The stage that made what this one gets.
    fn maker(&self, place: Place) -> usize {
        let ring = self.pipeline.ring_at(self.at);
        match ring.filter(|ring| place.lap > 0 && ring.first == self.at) {
            Some(ring) => ring.last,
            None => self.at.saturating_sub(1),
        }
    }

    fn stage(&self, at: usize) -> &StageSpec {
        &self.pipeline.stages()[at]
    }

    fn own(&self) -> String {
        said(self.stage(self.at))
    }
}

/// `phase_b on rank 1`.
fn said(stage: &StageSpec) -> String {
    let rank: Rank = stage.leader();
    format!("{} on rank {rank}", label(stage))
}

/// What the report calls what a stage makes. A stage that was cut into parts makes with its last part what it makes
/// uncut.
fn label(stage: &StageSpec) -> String {
    match stage.part + 1 {
        part if part == stage.parts => stage.name.to_string(),
        part => format!("{} part {part} of {}", stage.name, stage.parts),
    }
}

impl<S> Check<S> {
    /// Refuses the first tensor that differs between two looks at the payload; `what` says which they were.
    fn compare(
        &self,
        before: &Digests,
        after: &Digests,
        what: impl Fn() -> String,
    ) -> StageResult<()> {
        let Some(index) = before.first_difference(after) else {
            return Ok(());
        };
        let value = |of: &Digests| of.as_slice().get(index).copied().unwrap_or_default();
        let tensor = self.tensors.iter().nth(index);
        let tensor = tensor.map_or("(none)", |(_, spec)| spec.name());
        let values = [before, after].map(value);
        Err(drifted(self.chunk, tensor, values, &what()))
    }
}

/// A tensor is not what it was.
fn drifted(chunk: ChunkIndex, tensor: &str, [before, after]: [u64; 2], what: &str) -> StageError {
    let detail = format!("chunk {chunk}: tensor {tensor}: {before:016x} {what} {after:016x}");
    StageError::new(FaultKind::Drift, VERIFY, detail)
}

impl<S> Sealed<S> {
    /// The chunk was stale: nothing is compared.
    pub fn forget<N: Digester<Ticket = S>>(self, digester: &mut N) {
        digester.drop_unread(self.ticket);
    }
}

/// Gives a chunk that was composed again a seal, if it had one when it was sent first. In the report stand the digests
/// of what was sent first: what another run has, too.
///
/// # Errors
/// A payload has no room for one tensor more. The digester's.
pub fn seal_again<P: Plan, N: Digester>(
    digester: &mut N,
    sent: &Message<P>,
    (plan, tensors): (P, Manifest),
    slot: &mut N::Tx,
) -> StageResult<(P, Manifest)> {
    // Copied as it was, it has the seal that it had.
    if !sent.tensors().is_sealed() || tensors.is_sealed() {
        return Ok((plan, tensors));
    }
    let tensors = tensors.sealed();
    let tensors =
        tensors.map_err(|e| StageError::new(FaultKind::Plugin, "send again", with_source(&e)))?;
    let ticket = digester.seal(&tensors, slot)?;
    digester.drop_unread(ticket);
    Ok((plan, tensors))
}

#[cfg(test)]
mod tests;
