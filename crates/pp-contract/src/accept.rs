//! Whether the front takes a result: the last check before a tensor is decoded.
//!
//! *Guarantee.* A result is taken only for the call, chunk and epoch it was asked for, with the
//! planned number of generator calls, and with exactly the tensors that were asked for. A result
//! of an epoch before a hard cut is [`Verdict::Stale`]: it is dropped, and its tensors are not
//! looked at.

use crate::digest::Digests;
use crate::dtype::DType;
use crate::envelope::Envelope;
use crate::header::Header;
use crate::ids::{CacheEpoch, CallId, ChunkIndex};
use crate::manifest::{Manifest, TensorSpec};
use crate::outcome::Outcome;
use crate::plan::Plan;
use crate::seal::SEAL_TENSOR;

/// What the result of one call must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expectation<'a> {
    /// The call.
    pub call_id: CallId,
    /// Its chunk.
    pub chunk_index: ChunkIndex,
    /// Its epoch.
    pub cache_epoch: CacheEpoch,
    /// The number of generator calls that were planned.
    pub expected_calls: u32,
    /// The first frame of the chunk.
    pub start_frame: u64,
    /// The tensors asked for.
    pub outputs: &'a Manifest,
}

/// What becomes of a result that is in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    /// It is taken.
    Accept,
    /// A hard cut came after its epoch: received, logged, dropped, not decoded.
    Stale,
}

/// Why a result is refused; Phase B is to blame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResultFault {
    /// A number that must be echoed differs.
    #[error("the result says {field} {got}, the call said {expected}")]
    Echo {
        /// Which number.
        field: &'static str,
        /// What the call said.
        expected: u64,
        /// What the result says.
        got: u64,
    },
    /// Another number of generator calls was made than planned.
    #[error("{observed} generator calls were made, {planned} were planned")]
    Calls {
        /// As planned.
        planned: u32,
        /// As made.
        observed: u32,
    },
    /// Other tensors came back than were asked for.
    #[error("the result has tensors {got}, asked for were {expected}")]
    Outputs {
        /// The manifest asked for.
        expected: String,
        /// The manifest of the result.
        got: String,
    },
    /// The payload is shorter than its manifest.
    #[error("a payload of {got} bytes where the manifest says {expected}")]
    PayloadSize {
        /// From the manifest.
        expected: u64,
        /// What there is.
        got: u64,
    },
    /// The payload is not the one that was sent.
    #[error("the digest of tensor {tensor} is {computed:016x}, the result says {stated:016x}")]
    Digest {
        /// The first tensor that differs.
        tensor: String,
        /// As the sender computed it.
        stated: u64,
        /// Of the bytes that arrived.
        computed: u64,
    },
    /// An infinity or a NaN.
    #[error("element {index} of tensor {tensor} is not finite")]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// Index of the element, row-major.
        index: usize,
    },
}

impl<'a> Expectation<'a> {
    /// What the result of this call must be.
    #[must_use]
    pub fn of<P: Plan>(sent: &Header, envelope: &'a Envelope<P>) -> Self {
        Self {
            call_id: sent.call_id(),
            chunk_index: sent.chunk_index(),
            cache_epoch: sent.cache_epoch(),
            expected_calls: envelope.plan().expected_calls(),
            start_frame: envelope.plan().start_frame(),
            outputs: envelope.outputs(),
        }
    }

    /// Judges a result, without its payload. Results of an epoch before `oldest_epoch` are stale.
    ///
    /// # Errors
    /// [`ResultFault`] says what differs from what was asked for.
    pub fn judge(
        &self,
        header: &Header,
        outcome: &Outcome,
        oldest_epoch: CacheEpoch,
    ) -> Result<Verdict, ResultFault> {
        let (chunk, epoch) = (header.chunk_index(), header.cache_epoch());
        echoed("call_id", self.call_id.get(), header.call_id().get())?;
        echoed("chunk_index", self.chunk_index.get(), chunk.get())?;
        echoed("cache_epoch", self.cache_epoch.get(), epoch.get())?;
        if self.cache_epoch < oldest_epoch {
            return Ok(Verdict::Stale);
        }
        echoed("start_frame", self.start_frame, outcome.start_frame)?;
        let (planned, observed) = (self.expected_calls, outcome.observed_calls);
        if observed != planned {
            return Err(ResultFault::Calls { planned, observed });
        }
        if outcome.outputs != *self.outputs {
            return Err(ResultFault::Outputs {
                expected: self.outputs.to_string(),
                got: outcome.outputs.to_string(),
            });
        }
        Ok(Verdict::Accept)
    }
}

impl Outcome {
    /// Reads the whole payload: it has the digests that it states, if it is sealed, and
    /// every float in it is finite. For jobs that ask for it; it costs a pass over the memory.
    ///
    /// # Errors
    /// [`ResultFault::PayloadSize`], [`ResultFault::Digest`], [`ResultFault::NotFinite`].
    pub fn check_payload(&self, payload: &[u8]) -> Result<(), ResultFault> {
        let short = ResultFault::PayloadSize {
            expected: self.outputs.payload_bytes(),
            got: payload.len() as u64,
        };
        let Some(computed) = Digests::of(&self.outputs.unsealed(), payload) else {
            return Err(short);
        };
        if self.outputs.is_sealed() {
            let Some(stated) = self.outputs.stated(payload) else {
                return Err(short);
            };
            self.check_digests(&stated, &computed)?;
        }
        for (_, spec) in self.outputs.iter() {
            let range = self.outputs.range(spec.name());
            let Some(bytes) = range.and_then(|range| payload.get(range)) else {
                return Err(short);
            };
            if let Some(index) = first_not_finite(spec.dtype(), bytes) {
                let tensor = spec.name().to_owned();
                return Err(ResultFault::NotFinite { tensor, index });
            }
        }
        Ok(())
    }
}

impl Outcome {
    /// Whether the digests that a payload states are those that its sender computed, and those that were computed of
    /// what arrived.
    ///
    /// # Errors
    /// [`ResultFault::Digest`]: the tensor of the digests itself, if that is what changed, else the first that differs.
    pub fn check_digests(&self, stated: &Digests, computed: &Digests) -> Result<(), ResultFault> {
        if let Some(seal) = self.seal.filter(|seal| seal.digest != stated.seal()) {
            return Err(ResultFault::Digest {
                tensor: SEAL_TENSOR.to_owned(),
                stated: seal.digest,
                computed: stated.seal(),
            });
        }
        let Some(index) = stated.first_difference(computed) else {
            return Ok(());
        };
        let name = |(_, spec): (u64, &TensorSpec)| spec.name().to_owned();
        let value = |of: &Digests| of.as_slice().get(index).copied().unwrap_or_default();
        Err(ResultFault::Digest {
            tensor: self
                .outputs
                .iter()
                .nth(index)
                .map_or_else(String::new, name),
            stated: value(stated),
            computed: value(computed),
        })
    }
}

fn echoed(field: &'static str, expected: u64, got: u64) -> Result<(), ResultFault> {
    if expected != got {
        return Err(ResultFault::Echo {
            field,
            expected,
            got,
        });
    }
    Ok(())
}

/// A float is not finite when all bits of its exponent are set.
fn first_not_finite(dtype: DType, bytes: &[u8]) -> Option<usize> {
    let all_set_16 = |exponent: u16| {
        let (elements, _) = bytes.as_chunks();
        elements
            .iter()
            .position(|e| u16::from_le_bytes(*e) & exponent == exponent)
    };
    match dtype {
        DType::U8 | DType::I32 | DType::I64 => None,
        DType::Bf16 => all_set_16(0x7f80),
        DType::F16 => all_set_16(0x7c00),
        DType::F32 => {
            let (elements, _) = bytes.as_chunks();
            elements
                .iter()
                .position(|e| !f32::from_le_bytes(*e).is_finite())
        }
    }
}
