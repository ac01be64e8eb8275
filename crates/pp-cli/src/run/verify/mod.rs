//! Digests of payloads (`--verify`): what left one rank is what the other reads, and what it read is still what it was.
//!
//! *Hazard.* Bytes that change on their way or under a stage's hands make a film that is a little wrong, and nothing says
//! where that began.
//! *Guarantee.* In a chunk that is verified every tensor is compared with the digest its sender computed, before its
//! result is used; a difference names the rank, the tensor and the chunk. Chunks that are not verified cost nothing.
//! *Choices.* Digests are computed where the payload lies and travel in it (`docs/wire-format.md`, *Seals*). A stage on a
//! device only issues that, and nothing waits for it.

pub(super) mod gpu;
pub(super) mod host;
mod log;

use std::fs::File;
use std::io::Read as _;

use anyhow::Context as _;
use pp_contract::{
    ChunkIndex, Digest, Digests, Envelope, FaultKind, MAX_TENSORS, Manifest, Outcome, Plan, Rank,
    SEAL_TENSOR, Seal, TENSOR_ALIGN_BYTES, VideoPlan, with_source,
};
use pp_kernels::Description;
use pp_runtime::stage::StageError;

use self::log::Log;
pub(super) use self::log::Verified;
use crate::args::{KernelChoice, RunArgs, Verify};
use crate::exit::Failure;
use crate::job::{FRONT, PHASE_B};

/// Digests payloads in the memory of one backend.
pub(super) trait Notary {
    /// A slot to write.
    type Tx;
    /// A slot to read.
    type Rx;
    /// Digests that were asked for.
    type Sheet;

    /// Whether a sheet can be read as soon as it is there.
    const AT_ONCE: bool;

    /// Makes room for payloads of so many bytes, and for so many sheets at a time. Nothing is verified before that.
    fn prepare(&mut self, most_bytes: u64, sheets: usize) -> Result<(), StageError>;

    /// Writes the seal of a payload, behind what was issued to write it.
    fn seal(&mut self, manifest: &Manifest, slot: &mut Self::Tx)
    -> Result<Self::Sheet, StageError>;

    /// Digests a payload as it is when what was issued so far is done, and looks at its seal.
    fn examine(
        &mut self,
        manifest: &Manifest,
        payload: Option<&Self::Rx>,
    ) -> Result<Self::Sheet, StageError>;

    /// Whether the sheet can be read.
    fn is_there(&self, sheet: &Self::Sheet) -> Result<bool, StageError>;

    /// What was found, once it is there.
    fn read(&mut self, sheet: Self::Sheet) -> Result<Found, StageError>;

    /// The sheet is not read any more.
    fn drop_unread(&mut self, sheet: Self::Sheet);
}

/// The digests of one payload.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    /// As its seal says.
    pub(super) stated: Digests,
    /// As its tensors are.
    pub(super) computed: Digests,
    /// What that took.
    pub(super) cost_ns: u64,
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
        let Self {
            chunk,
            tensor,
            before,
            after,
        } = self;
        let detail = format!("chunk {chunk}: tensor {tensor}: {before:016x} {what} {after:016x}");
        StageError::new(FaultKind::Drift, operation, detail)
    }
}

/// A chunk that the front verifies.
pub(super) struct FrontCheck<S> {
    chunk: ChunkIndex,
    inputs: Manifest,
    /// What it was sealed with when it was built.
    sealed: S,
    result: Option<(Outcome, S)>,
}

/// What the front verifies, and what it found.
pub(super) struct FrontVerifier {
    every: Verify,
    phase_b: Rank,
    log: Log,
}

impl FrontVerifier {
    pub(super) fn new(every: Verify, ranks: u32) -> Self {
        Self {
            every,
            phase_b: if ranks > 1 { PHASE_B } else { FRONT },
            log: Log::default(),
        }
    }

    fn is_on(&self) -> bool {
        self.every != Verify::Off
    }

    /// Bytes of a slot behind its tensors, for the seal and what lies in front of it.
    pub(super) fn room(&self) -> u64 {
        let seal = 8 * MAX_TENSORS as u64 + TENSOR_ALIGN_BYTES;
        if self.is_on() { seal } else { 0 }
    }

    /// The manifests with a seal; `None` where nothing is verified.
    pub(super) fn sealed(
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

    pub(super) fn is_due(&self, chunk: ChunkIndex) -> bool {
        self.every.is_due(chunk.get())
    }

    /// What the report says of it.
    pub(super) fn verified(&self) -> Option<Verified<'_>> {
        self.is_on().then(|| self.log.report(self.every))
    }

    /// Looks at the result before it is decoded.
    pub(super) fn examine<N: Notary>(
        &mut self,
        notary: &mut N,
        check: &mut Option<FrontCheck<N::Sheet>>,
        outcome: &Outcome,
        payload: Option<&N::Rx>,
    ) -> Result<(), StageError> {
        let Some(waiting) = check else {
            return Ok(());
        };
        let sheet = notary.examine(&outcome.outputs, payload)?;
        waiting.result = Some((outcome.clone(), sheet));
        if N::AT_ONCE {
            return self.conclude(notary, check);
        }
        Ok(())
    }

    /// Compares, when the decode is done.
    pub(super) fn conclude<N: Notary>(
        &mut self,
        notary: &mut N,
        check: &mut Option<FrontCheck<N::Sheet>>,
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
        let sent = notary.read(sealed)?;
        let received = notary.read(examined)?;
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
    pub(super) fn seal<N: Notary<Sheet = S>>(
        notary: &mut N,
        chunk: ChunkIndex,
        inputs: &Manifest,
        slot: &mut N::Tx,
    ) -> Result<Self, StageError> {
        Ok(Self {
            chunk,
            inputs: inputs.clone(),
            sealed: notary.seal(inputs, slot)?,
            result: None,
        })
    }

    /// The chunk's result is dropped.
    pub(super) fn forget<N: Notary<Sheet = S>>(notary: &mut N, check: Option<Self>) {
        let Some(Self { sealed, result, .. }) = check else {
            return;
        };
        notary.drop_unread(sealed);
        if let Some((_, examined)) = result {
            notary.drop_unread(examined);
        }
    }
}

/// Gives a chunk that was composed again a seal, if it had one when it was sent first. In the report stand the digests
/// of what was sent first: what another run has, too.
pub(super) fn seal_again<N: Notary>(
    notary: &mut N,
    sent: &Envelope<VideoPlan>,
    composed: Envelope<VideoPlan>,
    slot: &mut N::Tx,
) -> Result<Envelope<VideoPlan>, StageError> {
    // Copied as it was, it has the seal that it had.
    if !sent.inputs().is_sealed() || composed.inputs().is_sealed() {
        return Ok(composed);
    }
    let refuse = |what: String| StageError::new(FaultKind::Plugin, "send again", what);
    let inputs = composed.inputs().sealed();
    let inputs = inputs.map_err(|e| refuse(with_source(&e)))?;
    let sheet = notary.seal(&inputs, slot)?;
    notary.drop_unread(sheet);
    let outputs = composed.outputs().clone();
    Envelope::new(*composed.plan(), inputs, outputs).map_err(|e| refuse(with_source(&e)))
}

/// Makes ready whoever digests slots of so many bytes, where chunks are verified.
pub(super) fn prepared<T, N: Notary>(
    mut kernels: T,
    notary: impl FnOnce(&mut T) -> &mut N,
    args: &RunArgs,
    slot_bytes: u64,
    rank: Rank,
) -> Result<T, Failure> {
    if args.verify != Verify::Off {
        // Phase B has three of a chunk, and the front two of each that is in flight or is decoded.
        let sheets = 4 * args.depth as usize;
        let made = notary(&mut kernels).prepare(slot_bytes, sheets);
        made.map_err(|e| e.into_fault(rank))?;
    }
    Ok(kernels)
}

/// What tells one set of kernels, weights included, from another: what they say of themselves and, of a plugin, its file.
pub(super) fn digest_of_kernels(
    kernels: &KernelChoice,
    about: &Description,
) -> Result<u64, Failure> {
    let KernelChoice::File(path) = kernels else {
        return Ok(about.digest);
    };
    let mut state = Digest::new();
    state.update(&about.digest.to_le_bytes());
    let mut piece = vec![0; 1 << 20];
    let read = File::open(path).and_then(|mut file| {
        loop {
            match file.read(&mut piece)? {
                0 => return Ok(()),
                bytes => state.update(&piece[..bytes]),
            }
        }
    });
    read.with_context(|| format!("cannot read {} again", path.display()))?;
    Ok(state.finish())
}

/// A chunk that Phase B verifies.
pub(super) struct PhaseBCheck<S> {
    chunk: ChunkIndex,
    inputs: Manifest,
    /// What the inputs were before the stage: known, or asked for.
    known: Option<Found>,
    before: Option<S>,
    after: Option<S>,
    sealed: Option<S>,
}

/// Refuses an envelope that has no seal although its chunk is to be verified: both ranks were started with the same
/// setting. Inputs that were composed again for a Phase B that was started anew may have none.
pub(super) fn check_due<P: Plan>(
    every: Verify,
    chunk: ChunkIndex,
    envelope: &Envelope<P>,
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
    Err(StageError::new(FaultKind::PeerMisbehaved, "verify", detail).blaming(FRONT))
}

impl<S> PhaseBCheck<S> {
    /// Looks at the inputs before the stage; `None` for a chunk that is not verified.
    pub(super) fn begin<P: Plan, N: Notary<Sheet = S>>(
        notary: &mut N,
        chunk: ChunkIndex,
        envelope: &Envelope<P>,
        input: Option<&N::Rx>,
    ) -> Result<Option<Self>, StageError> {
        let (inputs, outputs) = (envelope.inputs(), envelope.outputs());
        if !inputs.is_sealed() && !outputs.is_sealed() {
            return Ok(None);
        }
        let mut check = Self {
            chunk,
            inputs: inputs.clone(),
            known: None,
            before: None,
            after: None,
            sealed: None,
        };
        if inputs.is_sealed() {
            let sheet = notary.examine(inputs, input)?;
            if N::AT_ONCE {
                check.known = Some(check.arrived(notary.read(sheet)?)?);
            } else {
                check.before = Some(sheet);
            }
        }
        Ok(Some(check))
    }

    /// Looks at the inputs behind the stage, and seals its outputs.
    pub(super) fn end<P: Plan, N: Notary<Sheet = S>>(
        &mut self,
        notary: &mut N,
        envelope: &Envelope<P>,
        input: Option<&N::Rx>,
        output: &mut N::Tx,
    ) -> Result<(), StageError> {
        if self.inputs.is_sealed() {
            self.after = Some(notary.examine(&self.inputs, input)?);
        }
        if envelope.outputs().is_sealed() {
            self.sealed = Some(notary.seal(envelope.outputs(), output)?);
        }
        Ok(())
    }

    /// Whether all that was issued for it is done.
    pub(super) fn is_there<N: Notary<Sheet = S>>(&self, notary: &N) -> Result<bool, StageError> {
        // What was issued last.
        let last = self.sealed.as_ref().or(self.after.as_ref());
        last.map_or(Ok(true), |sheet| notary.is_there(sheet))
    }

    /// Compares, when that is done; gives what the result says of its seal.
    pub(super) fn conclude<N: Notary<Sheet = S>>(
        mut self,
        notary: &mut N,
    ) -> Result<Option<Seal>, StageError> {
        let before = match self.before.take() {
            Some(sheet) => Some(self.arrived(notary.read(sheet)?)?),
            None => self.known,
        };
        let mut cost_ns = 0;
        if let (Some(before), Some(after)) = (before, self.after.take()) {
            let after = notary.read(after)?;
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
        let found = notary.read(sealed)?;
        cost_ns += found.cost_ns;
        Ok(Some(Seal {
            digest: found.computed.seal(),
            cost_us: cost_ns / 1000,
        }))
    }

    /// Whether the inputs arrived as the front sealed them.
    fn arrived(&self, found: Found) -> Result<Found, StageError> {
        let (stated, computed) = (&found.stated, &found.computed);
        match Difference::between(self.chunk, &self.inputs, stated, computed) {
            None => Ok(found),
            Some(difference) => {
                let what = "when the front had encoded it, and on arrival";
                Err(difference.told("phase_b", what).blaming(FRONT))
            }
        }
    }
}

#[cfg(test)]
mod tests;
