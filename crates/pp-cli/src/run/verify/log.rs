//! What was verified, for the report: so that two runs, or two replicas, can be compared.

use std::collections::VecDeque;
use std::fmt;

use pp_contract::{Digest, Digests, Manifest};
use pp_runtime::report::Count;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::args::Verify;

/// The latest chunks that are kept one by one; older ones are in the digest of all.
const KEPT: usize = 16_384;

/// One chunk.
pub(super) struct Entry {
    pub(super) chunk: u64,
    pub(super) inputs: (Manifest, Digests),
    pub(super) outputs: (Manifest, Digests),
    pub(super) front_us: u64,
    pub(super) phase_b_us: u64,
}

/// All of them.
#[derive(Default)]
pub(in super::super) struct Log {
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
            chunks: self.entries.iter().map(Line::of).collect(),
        }
    }
}

/// The log as the report has it.
#[derive(Serialize)]
pub(in super::super) struct Verified<'a> {
    every: String,
    chunks_verified: u64,
    /// What digests cost each rank, the mean of a chunk that is verified.
    front_ms: f64,
    phase_b_ms: f64,
    /// Digest of the digests of the outputs of all verified chunks, in their order.
    all_outputs: String,
    chunks: Vec<Line<'a>>,
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

#[derive(Serialize)]
struct Line<'a> {
    chunk: u64,
    inputs: Named<'a>,
    outputs: Named<'a>,
    front_ms: f64,
    phase_b_ms: f64,
}

impl<'a> Line<'a> {
    fn of(entry: &'a Entry) -> Self {
        Self {
            chunk: entry.chunk,
            inputs: Named(&entry.inputs),
            outputs: Named(&entry.outputs),
            front_ms: entry.front_us as f64 / 1e3,
            phase_b_ms: entry.phase_b_us as f64 / 1e3,
        }
    }
}

/// Digests by the names of their tensors, in the order of the payload.
struct Named<'a>(&'a (Manifest, Digests));

impl Serialize for Named<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (manifest, digests) = self.0;
        let mut map = serializer.serialize_map(Some(digests.as_slice().len()))?;
        for ((_, spec), digest) in manifest.iter().zip(digests.as_slice()) {
            map.serialize_entry(spec.name(), &format!("{digest:016x}"))?;
        }
        map.end()
    }
}
