//! What `pp bench overlap` sends: payloads of one size, or blocks of chunks with these and with smaller ones in turn. How
//! much longer the period is in the former is what their payloads cost the stages.

use std::fmt;

use pp_contract::{Manifest, with_source};
use pp_job::Error;
use pp_runtime::report::ChunkRecord;
use serde::Serialize;

use super::plan::payload;
use crate::args::OverlapArgs;

/// Chunks of a block, and those of its beginning that do not count: chunks of the block before are in flight beside them.
const BLOCK: u64 = 48;
const MIXED: usize = 12;
/// Pairs of blocks by default, the first of them to warm up.
const PAIRS: u64 = 37;

/// Chunks that are compared at least: a pair of blocks to warm up, and one that counts.
const LEAST: u64 = 4 * BLOCK;

/// Refuses what gives nothing to compare.
pub(super) fn check(args: &OverlapArgs) -> Result<(), Error> {
    let Some(bytes) = args.against else {
        return Ok(());
    };
    let text = match args.chunks {
        _ if bytes == args.bytes => {
            format!("--against {bytes}: the payloads of --bytes are as large; give two sizes")
        }
        Some(chunks) if chunks < LEAST => format!(
            "--chunks {chunks}: --against needs {LEAST} or more, which is a pair of blocks of {BLOCK} chunks to warm up and \
             a pair to compare"
        ),
        _ => return Ok(()),
    };
    Err(Error::Usage(text))
}

/// What a source sends.
#[derive(Clone)]
pub(super) struct Payloads {
    own: Manifest,
    against: Option<Manifest>,
}

impl Payloads {
    pub(super) fn of(args: &OverlapArgs) -> Result<Self, Error> {
        let payload = |(name, bytes): (&str, u64)| {
            payload(bytes).map_err(|e| Error::Usage(format!("{name} {bytes}: {}", with_source(&e))))
        };
        let against = args.against.map(|bytes| ("--against", bytes));
        Ok(Self {
            own: payload(("--bytes", args.bytes))?,
            against: against.map(payload).transpose()?,
        })
    }

    /// That of a chunk.
    pub(super) fn of_chunk(&self, chunk: u64) -> &Manifest {
        let against = self.against.as_ref().filter(|_| is_against(chunk / BLOCK));
        against.unwrap_or(&self.own)
    }
}

/// The first block of each pair has the other payloads.
fn is_against(block: u64) -> bool {
    block.is_multiple_of(2)
}

/// The bytes of the largest payload.
pub(super) fn most_bytes(args: &OverlapArgs) -> u64 {
    // Without payloads there are slots all the same.
    args.bytes.max(args.against.unwrap_or(1))
}

/// How many chunks there are by default.
pub(super) fn chunks() -> u64 {
    2 * PAIRS * BLOCK
}

/// The periods of blocks with payloads of `--bytes` over those of the blocks before, with payloads of `--against`.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Against {
    bytes: u64,
    pairs: usize,
    /// The median.
    ratio: f64,
    ratio_mean: f64,
    ratio_p10: f64,
    ratio_p90: f64,
    ratio_worst: f64,
}

/// None where no second pair of blocks is done.
pub(super) fn against<'r>(
    bytes: u64,
    records: impl Iterator<Item = &'r ChunkRecord>,
) -> Option<Against> {
    let records: Vec<&ChunkRecord> = records.collect();
    let blocks: Vec<_> = records
        .chunk_by(|a, b| a.chunk_index / BLOCK == b.chunk_index / BLOCK)
        .filter(|block| block.len() as u64 == BLOCK)
        .collect();
    // The mean: what a chunk is late by, the next one is not.
    let period = |block: &[&ChunkRecord]| {
        let ends = [MIXED, block.len() - 1].map(|at| block[at].accepted_ns);
        ends[1].saturating_sub(ends[0]) as f64
    };
    let pairs = blocks.windows(2).filter_map(|pair| {
        let number = pair[0][0].chunk_index / BLOCK;
        let is_pair = is_against(number) && number > 0;
        is_pair.then(|| period(pair[1]) / period(pair[0]).max(1.0))
    });
    let mut ratios: Vec<f64> = pairs.collect();
    ratios.sort_unstable_by(f64::total_cmp);
    let last = ratios.len().checked_sub(1)?;
    let at = |share: f64| ratios[((ratios.len() as f64 * share) as usize).min(last)];
    Some(Against {
        bytes,
        pairs: ratios.len(),
        ratio: at(0.5),
        ratio_mean: ratios.iter().sum::<f64>() / ratios.len() as f64,
        ratio_p10: at(0.1),
        ratio_p90: at(0.9),
        ratio_worst: at(1.0),
    })
}

impl fmt::Display for Against {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            bytes,
            pairs,
            ratio,
            ratio_mean,
            ratio_p10,
            ratio_p90,
            ratio_worst,
        } = self;
        write!(
            f,
            "{ratio:.4} of the period with payloads of {bytes} bytes (median of {pairs} pairs of blocks of {BLOCK} chunks; mean \
             {ratio_mean:.4}, p10 {ratio_p10:.4}, p90 {ratio_p90:.4}, worst {ratio_worst:.4})"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chunks of so many blocks, each block with a period of its own.
    fn records(periods: &[u64]) -> Vec<ChunkRecord> {
        let mut now = 0;
        let mut records = Vec::new();
        for period in periods {
            for _ in 0..BLOCK {
                now += period;
                records.push(ChunkRecord {
                    chunk_index: records.len() as u64,
                    accepted_ns: now,
                    ..ChunkRecord::default()
                });
            }
        }
        records
    }

    #[test]
    fn each_block_is_compared_with_the_one_before_it_and_the_first_pair_warms_up() {
        let records = records(&[100, 900, 100, 110, 200, 240, 100, 130]);
        let found = against(64, records.iter()).unwrap();
        assert_eq!((found.pairs, found.ratio), (3, 1.2));
        assert_eq!((found.ratio_p10, found.ratio_worst), (1.1, 1.3));
        // A block that was cut short does not count, nor one of which the beginning is forgotten.
        let short = against(64, records[..records.len() - 1].iter()).unwrap();
        assert_eq!((short.pairs, short.ratio), (2, 1.2));
        let forgotten = against(64, records[2 * BLOCK as usize + 1..].iter()).unwrap();
        assert_eq!((forgotten.pairs, forgotten.ratio_p10), (2, 1.2));
        assert_eq!(against(64, records[..4 * BLOCK as usize - 1].iter()), None);
    }

    #[test]
    fn a_chunk_has_the_payload_of_its_block() {
        let manifest = |bytes| payload(bytes).unwrap();
        let (own, against) = (manifest(9), Some(manifest(4)));
        let payloads = Payloads { own, against };
        let bytes = |chunk| payloads.of_chunk(chunk).payload_bytes();
        let found = [0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK].map(bytes);
        assert_eq!(found, [4, 4, 9, 9, 4]);
    }
}
