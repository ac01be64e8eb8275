//! What was verified, for the report: so that two runs, or two replicas, can be compared.

use std::collections::VecDeque;
use std::fmt;

use pp_contract::{Digest, Digests, Manifest};
use serde::{Serialize, Serializer};

use super::verify::Verify;
use crate::report::{Count, as_ms};

/// The latest chunks that are kept one by one; older ones are in the digest of all.
const KEPT: usize = 16_384;

/// One chunk.
#[derive(Serialize)]
pub(super) struct Entry {
    pub(super) chunk: u64,
    #[serde(serialize_with = "named")]
    pub(super) inputs: (Manifest, Digests),
    #[serde(serialize_with = "named")]
    pub(super) outputs: (Manifest, Digests),
    #[serde(rename = "front_ms", serialize_with = "as_ms")]
    pub(super) front_us: u64,
    #[serde(rename = "phase_b_ms", serialize_with = "as_ms")]
    pub(super) phase_b_us: u64,
}

/// All of them.
#[derive(Default)]
pub(super) struct Log {
    entries: VecDeque<Entry>,
    count: u64,
    front_us: u64,
    phase_b_us: u64,
    all_outputs: Digest,
}

impl Log {
    pub(super) fn note(&mut self, entry: Entry) {
        self.count += 1;
        self.front_us += entry.front_us;
        self.phase_b_us += entry.phase_b_us;
        for digest in entry.outputs.1.as_slice() {
            self.all_outputs.update(&digest.to_le_bytes());
        }
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    pub(super) fn report(&self, every: Verify) -> Verified<'_> {
        let mean = |us: u64| us as f64 / 1000.0 / self.count.max(1) as f64;
        Verified {
            every: every.to_string(),
            chunks_verified: self.count,
            front_ms: mean(self.front_us),
            phase_b_ms: mean(self.phase_b_us),
            all_outputs: format!("{:016x}", self.all_outputs.finish()),
            chunks: &self.entries,
        }
    }
}

/// The log as the report has it.
#[derive(Serialize)]
pub struct Verified<'a> {
    every: String,
    chunks_verified: u64,
    /// What digests cost each rank, the mean of a chunk that is verified.
    front_ms: f64,
    phase_b_ms: f64,
    /// Digest of the digests of the outputs of all verified chunks, in their order.
    all_outputs: String,
    chunks: &'a VecDeque<Entry>,
}

impl fmt::Display for Verified<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "verified {} ({}): {:.2} ms at the front and {:.2} ms at phase B for each; outputs of the verified chunks together {}",
            Count(self.chunks_verified, "chunk"),
            self.every,
            self.front_ms,
            self.phase_b_ms,
            self.all_outputs
        )
    }
}

/// Digests by the names of their tensors, in the order of the payload.
fn named<S: Serializer>(
    (manifest, digests): &(Manifest, Digests),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let named = manifest.iter().zip(digests.as_slice());
    serializer.collect_map(named.map(|((_, spec), digest)| (spec.name(), format!("{digest:016x}"))))
}
