//! What was verified, for the report: so that two runs can be compared, also runs of different pipelines.

use std::collections::VecDeque;
use std::fmt;

use pp_contract::{Digest, Digests, Manifest, Pipeline, Seal};
use serde::{Serialize, Serializer};

use super::{Digester, Sealed, Verify, label};
use crate::report::Count;
use crate::stage::StageResult;

/// The latest chunks that are kept one by one; older ones are in the digest of all.
const KEPT: usize = 16_384;

/// One chunk.
#[derive(Debug, Serialize)]
struct ChunkEntry {
    chunk: u64,
    #[serde(serialize_with = "named")]
    source: (Manifest, Digests),
    /// The digest of the seal of each stage between source and sink.
    #[serde(serialize_with = "hexadecimal")]
    seals: Vec<u64>,
}

/// A stage, and what digests cost it.
#[derive(Debug)]
struct DigestCost {
    stage: String,
    rank: u32,
    us: u64,
}

/// Collects, at rank 0, the results for the chunks that were verified.
#[derive(Debug)]
pub struct Log {
    every: Verify,
    stages: Vec<DigestCost>,
    entries: VecDeque<ChunkEntry>,
    count: u64,
    all_results: Digest,
}

impl Log {
    /// The log of a run in which these chunks are verified.
    pub fn new(every: Verify, pipeline: &Pipeline) -> Self {
        let stages = pipeline.stages().iter().map(|stage| DigestCost {
            stage: label(stage),
            rank: stage.leader().get(),
            us: 0,
        });
        Self {
            every,
            stages: stages.collect(),
            entries: VecDeque::new(),
            count: 0,
            all_results: Digest::new(),
        }
    }

    /// How many seals a chunk has: one of each stage behind the source.
    pub fn seals(&self) -> usize {
        self.stages.len() - 1
    }

    /// Takes in a chunk that the sink has: what the source sealed, and what each stage behind it reports.
    ///
    /// # Errors
    /// The digester's.
    ///
    /// # Panics
    /// If there are not as many as [`Log::seals`].
    pub fn note<N: Digester>(
        &mut self,
        digester: &mut N,
        sealed: Sealed<N::Ticket>,
        seals: &[Seal],
    ) -> StageResult<()> {
        assert_eq!(seals.len(), self.seals(), "a seal of each stage");
        let found = digester.read(sealed.ticket)?;
        let costs = [found.cost_ns / 1000].into_iter();
        let costs = costs.chain(seals.iter().map(|seal| seal.cost_us));
        for (stage, us) in self.stages.iter_mut().zip(costs) {
            stage.us += us;
        }
        let between = &seals[..seals.len() - 1];
        let result = between
            .last()
            .map_or_else(|| found.computed.seal(), |seal| seal.digest);
        self.count += 1;
        self.all_results.update(&result.to_le_bytes());
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        self.entries.push_back(ChunkEntry {
            chunk: sealed.chunk.get(),
            source: (sealed.tensors, found.computed),
            seals: between.iter().map(|seal| seal.digest).collect(),
        });
        Ok(())
    }

    /// Returns the part of the report on verification; `None` where nothing is verified.
    pub fn verified(&self) -> Option<Verified<'_>> {
        let mean = |us: u64| us as f64 / 1000.0 / self.count.max(1) as f64;
        let line = |cost: &DigestCost| Line {
            stage: cost.stage.clone(),
            rank: cost.rank,
            ms: mean(cost.us),
        };
        (self.every != Verify::Off).then(|| Verified {
            every: self.every.to_string(),
            chunks_verified: self.count,
            stages: self.stages.iter().map(line).collect(),
            all_results: format!("{:016x}", self.all_results.finish()),
            chunks: &self.entries,
        })
    }
}

/// A stage as the report has it.
#[derive(Debug, Serialize)]
struct Line {
    stage: String,
    rank: u32,
    /// What digests cost it, the mean of a chunk that is verified.
    ms: f64,
}

/// The log as the report has it.
#[derive(Debug, Serialize)]
pub struct Verified<'a> {
    every: String,
    chunks_verified: u64,
    /// All, the source first and the sink last.
    stages: Vec<Line>,
    /// Digest of what the sink got in all verified chunks, in their order.
    all_results: String,
    chunks: &'a VecDeque<ChunkEntry>,
}

impl fmt::Display for Verified<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chunks = Count(self.chunks_verified, "chunk");
        write!(f, "verified {chunks} ({}):", self.every)?;
        for (at, Line { stage, rank, ms }) in self.stages.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            write!(f, "{comma} {ms:.2} ms in {stage} on rank {rank}")?;
        }
        write!(
            f,
            " for each; results of the verified chunks together {}",
            self.all_results
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

fn hexadecimal<S: Serializer>(digests: &[u64], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(digests.iter().map(|digest| format!("{digest:016x}")))
}
