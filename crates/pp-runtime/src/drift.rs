//! Digests of payloads (`--verify`): what left one rank is what the other reads, and what it read is still what it was.
//!
//! *Hazard.* Bytes that change on their way or under a stage's hands make an output that is a little wrong, and nothing
//! says where that began.
//! *Guarantee.* In a chunk that is verified every tensor is compared with the digest its sender computed, before its
//! result is used; a difference names the rank, the tensor and the chunk. Chunks that are not verified cost nothing.
//! *Choices.* Digests are computed where the payload lies and travel in it (`docs/wire-format.md`, *Seals*). A stage on a
//! device only issues that, and nothing waits for it.

mod host;
mod log;
mod verify;

use pp_contract::{
    ChunkIndex, Digests, Envelope, FaultKind, MAX_TENSORS, Manifest, Outcome, Plan, Rank,
    SEAL_TENSOR, Seal, TENSOR_ALIGN_BYTES, with_source,
};

pub use self::host::HostDigester;
use self::log::Log;
pub use self::log::Verified;
pub use self::verify::Verify;
use crate::stage::StageError;

/// Digests payloads in the memory of one backend.
pub trait Digester {
    /// A slot to write.
    type Tx;
    /// A slot to read.
    type Rx;
    /// Digests that were asked for.
    type Ticket;

    /// Whether a ticket can be read as soon as it is there.
    const AT_ONCE: bool;

    /// Makes room for payloads of so many bytes, and for so many tickets at a time. Nothing is verified before that.
    fn prepare(&mut self, most_bytes: u64, tickets: usize) -> Result<(), StageError>;

    /// Writes the seal of a payload, behind what was issued to write it.
    fn seal(
        &mut self,
        manifest: &Manifest,
        slot: &mut Self::Tx,
    ) -> Result<Self::Ticket, StageError>;

    /// Digests a payload as it is when what was issued so far is done, and looks at its seal.
    fn examine(
        &mut self,
        manifest: &Manifest,
        payload: Option<&Self::Rx>,
    ) -> Result<Self::Ticket, StageError>;

    /// Whether the ticket can be read.
    fn is_there(&self, ticket: &Self::Ticket) -> Result<bool, StageError>;

    /// What was found, once it is there.
    fn read(&mut self, ticket: Self::Ticket) -> Result<DigestPair, StageError>;

    /// The ticket is not read any more.
    fn drop_unread(&mut self, ticket: Self::Ticket);
}

/// The digests of one payload.
#[derive(Clone, Copy, Debug, Default)]
pub struct DigestPair {
    /// As its seal says.
    pub stated: Digests,
    /// As its tensors are.
    pub computed: Digests,
    /// What that took.
    pub cost_ns: u64,
}

/// A tensor that is not what it was.
struct Difference<'a> {
    chunk: ChunkIndex,
    tensor: &'a str,
    before: u64,
    after: u64,
}

impl<'a> Difference<'a> {
    /// The first one between two looks at one payload.
    fn between(
        chunk: ChunkIndex,
        manifest: &'a Manifest,
        before: &Digests,
        after: &Digests,
    ) -> Option<Self> {
        let index = before.first_difference(after)?;
        let value = |of: &Digests| of.as_slice().get(index).copied().unwrap_or_default();
        let tensor = manifest.iter().nth(index);
        Some(Self {
            chunk,
            tensor: tensor.map_or("(none)", |(_, spec)| spec.name()),
            before: value(before),
            after: value(after),
        })
    }

    fn told(&self, operation: &'static str, what: &str) -> StageError {
        let (before, after) = (self.before, self.after);
        let (chunk, tensor) = (self.chunk, self.tensor);
        let detail = format!("chunk {chunk}: tensor {tensor}: {before:016x} {what} {after:016x}");
        StageError::new(FaultKind::Drift, operation, detail)
    }
}

/// A chunk that the front verifies.
pub struct FrontCheck<S> {
    chunk: ChunkIndex,
    inputs: Manifest,
    /// What it was sealed with when it was built.
    sealed: S,
    result: Option<(Outcome, S)>,
}

/// What the front verifies, and what it found.
pub struct FrontVerifier {
    every: Verify,
    phase_b: Rank,
    log: Log,
}

impl FrontVerifier {
    /// Verifies these chunks, which this rank computes.
    pub fn new(every: Verify, phase_b: Rank) -> Self {
        Self {
            every,
            phase_b,
            log: Log::default(),
        }
    }

    fn is_on(&self) -> bool {
        self.every != Verify::Off
    }

    /// Bytes of a slot behind its tensors, for the seal and what lies in front of it.
    pub fn room(&self) -> u64 {
        let seal = 8 * MAX_TENSORS as u64 + TENSOR_ALIGN_BYTES;
        if self.is_on() { seal } else { 0 }
    }

    /// The manifests with a seal; `None` where nothing is verified.
    pub fn sealed(
        &self,
        inputs: &Manifest,
        outputs: &Manifest,
    ) -> Result<Option<[Manifest; 2]>, StageError> {
        let sealed = |of: &Manifest| {
            of.sealed()
                .map_err(|e| StageError::new(FaultKind::Plugin, "layout", with_source(&e)))
        };
        let both = || Ok([sealed(inputs)?, sealed(outputs)?]);
        self.is_on().then(both).transpose()
    }

    /// Whether the chunk is verified.
    pub fn is_due(&self, chunk: ChunkIndex) -> bool {
        self.every.is_due(chunk.get())
    }

    /// What the report says of it.
    pub fn verified(&self) -> Option<Verified<'_>> {
        self.is_on().then(|| self.log.report(self.every))
    }

    /// Looks at the result before it is decoded.
    pub fn examine<N: Digester>(
        &mut self,
        digester: &mut N,
        check: &mut Option<FrontCheck<N::Ticket>>,
        outcome: &Outcome,
        payload: Option<&N::Rx>,
    ) -> Result<(), StageError> {
        let Some(waiting) = check else {
            return Ok(());
        };
        let ticket = digester.examine(&outcome.outputs, payload)?;
        waiting.result = Some((outcome.clone(), ticket));
        if N::AT_ONCE {
            return self.conclude(digester, check);
        }
        Ok(())
    }

    /// Compares, when the decode is done.
    pub fn conclude<N: Digester>(
        &mut self,
        digester: &mut N,
        check: &mut Option<FrontCheck<N::Ticket>>,
    ) -> Result<(), StageError> {
        let Some(FrontCheck {
            chunk,
            inputs,
            sealed,
            result: Some((outcome, examined)),
        }) = check.take()
        else {
            return Ok(());
        };
        let sent = digester.read(sealed)?;
        let received = digester.read(examined)?;
        let seal = outcome.seal.unwrap_or_default();
        let operation = "verify result";
        if seal.digest != received.stated.seal() {
            let (before, after) = (seal.digest, received.stated.seal());
            let difference = Difference {
                chunk,
                tensor: SEAL_TENSOR,
                before,
                after,
            };
            let what = "as the header of the result says, and what arrived has";
            return Err(difference.told(operation, what).blaming(self.phase_b));
        }
        let outputs = &outcome.outputs;
        if let Some(difference) =
            Difference::between(chunk, outputs, &received.stated, &received.computed)
        {
            let what = "when phase B had computed it, and on arrival";
            return Err(difference.told(operation, what).blaming(self.phase_b));
        }
        self.log.note(log::Entry {
            chunk: chunk.get(),
            inputs: (inputs, sent.computed),
            outputs: (outcome.outputs, received.computed),
            front_us: (sent.cost_ns + received.cost_ns) / 1000,
            phase_b_us: seal.cost_us,
        });
        Ok(())
    }
}

impl<S> FrontCheck<S> {
    /// Seals a chunk that was just encoded.
    pub fn seal<N: Digester<Ticket = S>>(
        digester: &mut N,
        chunk: ChunkIndex,
        inputs: &Manifest,
        slot: &mut N::Tx,
    ) -> Result<Self, StageError> {
        Ok(Self {
            chunk,
            inputs: inputs.clone(),
            sealed: digester.seal(inputs, slot)?,
            result: None,
        })
    }

    /// The chunk's result is dropped.
    pub fn forget<N: Digester<Ticket = S>>(digester: &mut N, check: Option<Self>) {
        let Some(Self { sealed, result, .. }) = check else {
            return;
        };
        digester.drop_unread(sealed);
        if let Some((_, examined)) = result {
            digester.drop_unread(examined);
        }
    }
}

/// Gives a chunk that was composed again a seal, if it had one when it was sent first. In the report stand the digests
/// of what was sent first: what another run has, too.
pub fn seal_again<P: Plan, N: Digester>(
    digester: &mut N,
    sent: &Envelope<P>,
    composed: Envelope<P>,
    slot: &mut N::Tx,
) -> Result<Envelope<P>, StageError> {
    // Copied as it was, it has the seal that it had.
    if !sent.inputs().is_sealed() || composed.inputs().is_sealed() {
        return Ok(composed);
    }
    let refuse = |what: String| StageError::new(FaultKind::Plugin, "send again", what);
    let inputs = composed.inputs().sealed();
    let inputs = inputs.map_err(|e| refuse(with_source(&e)))?;
    let ticket = digester.seal(&inputs, slot)?;
    digester.drop_unread(ticket);
    let outputs = composed.outputs().clone();
    Envelope::new(composed.plan().clone(), inputs, outputs).map_err(|e| refuse(with_source(&e)))
}

/// A chunk that Phase B verifies.
pub struct PhaseBCheck<S> {
    front: Rank,
    chunk: ChunkIndex,
    inputs: Manifest,
    /// What the inputs were before the stage: known, or asked for.
    known: Option<DigestPair>,
    before: Option<S>,
    after: Option<S>,
    sealed: Option<S>,
}

/// Refuses an envelope that has no seal although its chunk is to be verified: both ranks were started with the same
/// setting. Inputs that were composed again for a Phase B that was started anew may have none.
pub fn check_due<P: Plan>(
    every: Verify,
    chunk: ChunkIndex,
    envelope: &Envelope<P>,
    front: Rank,
) -> Result<(), StageError> {
    if every.is_due(chunk.get()) == envelope.outputs().is_sealed() {
        return Ok(());
    }
    let has = if envelope.outputs().is_sealed() {
        "asks for"
    } else {
        "has no"
    };
    let detail = format!("chunk {chunk} {has} digests, and --verify is {every}");
    Err(StageError::new(FaultKind::PeerMisbehaved, "verify", detail).blaming(front))
}

impl<S> PhaseBCheck<S> {
    /// Looks at the inputs before the stage; `None` for a chunk that is not verified.
    pub fn begin<P: Plan, N: Digester<Ticket = S>>(
        digester: &mut N,
        chunk: ChunkIndex,
        envelope: &Envelope<P>,
        input: Option<&N::Rx>,
        front: Rank,
    ) -> Result<Option<Self>, StageError> {
        let (inputs, outputs) = (envelope.inputs(), envelope.outputs());
        if !inputs.is_sealed() && !outputs.is_sealed() {
            return Ok(None);
        }
        let mut check = Self {
            front,
            chunk,
            inputs: inputs.clone(),
            known: None,
            before: None,
            after: None,
            sealed: None,
        };
        if inputs.is_sealed() {
            let ticket = digester.examine(inputs, input)?;
            if N::AT_ONCE {
                check.known = Some(check.arrived(digester.read(ticket)?)?);
            } else {
                check.before = Some(ticket);
            }
        }
        Ok(Some(check))
    }

    /// Looks at the inputs behind the stage, and seals its outputs.
    pub fn end<P: Plan, N: Digester<Ticket = S>>(
        &mut self,
        digester: &mut N,
        envelope: &Envelope<P>,
        input: Option<&N::Rx>,
        output: &mut N::Tx,
    ) -> Result<(), StageError> {
        if self.inputs.is_sealed() {
            self.after = Some(digester.examine(&self.inputs, input)?);
        }
        if envelope.outputs().is_sealed() {
            self.sealed = Some(digester.seal(envelope.outputs(), output)?);
        }
        Ok(())
    }

    /// Whether all that was issued for it is done.
    pub fn is_there<N: Digester<Ticket = S>>(&self, digester: &N) -> Result<bool, StageError> {
        // What was issued last.
        let last = self.sealed.as_ref().or(self.after.as_ref());
        last.map_or(Ok(true), |ticket| digester.is_there(ticket))
    }

    /// Compares, when that is done; gives what the result says of its seal.
    pub fn conclude<N: Digester<Ticket = S>>(
        mut self,
        digester: &mut N,
    ) -> Result<Option<Seal>, StageError> {
        let before = match self.before.take() {
            Some(ticket) => Some(self.arrived(digester.read(ticket)?)?),
            None => self.known,
        };
        let mut cost_ns = 0;
        if let (Some(before), Some(after)) = (before, self.after.take()) {
            let after = digester.read(after)?;
            cost_ns += before.cost_ns + after.cost_ns;
            let (before, after) = (&before.computed, &after.computed);
            if let Some(difference) = Difference::between(self.chunk, &self.inputs, before, after) {
                let what = "before phase B computed with it, and afterwards";
                return Err(difference.told("phase_b", what));
            }
        }
        let Some(sealed) = self.sealed else {
            return Ok(None);
        };
        let found = digester.read(sealed)?;
        cost_ns += found.cost_ns;
        Ok(Some(Seal {
            digest: found.computed.seal(),
            cost_us: cost_ns / 1000,
        }))
    }

    /// Whether the inputs arrived as the front sealed them.
    fn arrived(&self, found: DigestPair) -> Result<DigestPair, StageError> {
        let (stated, computed) = (&found.stated, &found.computed);
        match Difference::between(self.chunk, &self.inputs, stated, computed) {
            None => Ok(found),
            Some(difference) => {
                let what = "when the front had encoded it, and on arrival";
                Err(difference.told("phase_b", what).blaming(self.front))
            }
        }
    }
}

#[cfg(test)]
mod tests;
