//! A fixed ring of the latest records, and totals of all of them.
//!
//! A run may last for days: memory is claimed and touched once, at construction, so the resident size of a process does
//! not depend on how many chunks have passed.

use std::sync::Arc;

use pp_contract::Pipeline;

use super::ChunkRecord;

/// Records that a [`Recorder`] keeps: about ten minutes at 25 chunks a second, in 3 MiB and 1 MiB for each stage.
pub const RING_RECORDS: usize = 16_384;

/// Sums over every record ever pushed, also those the ring has forgotten.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Records pushed.
    pub chunks: u64,
    /// Chunks that a hard cut overtook.
    pub dropped: u64,
    /// Frames that the sink has.
    pub frames: u64,
    /// Payload bytes that the source sent.
    pub source_bytes: u64,
    /// Most chunks that were ever in flight at once.
    pub max_in_flight: u32,
    /// When the first chunk began to be built.
    pub first_build_ns: u64,
    /// When the latest chunk was accepted; 0 when none was.
    pub last_accepted_ns: u64,
    /// Frames that were dropped because they came too fast.
    pub skipped_frames: u64,
    /// Chunks that took longer than the job may take.
    pub late: u64,
    /// Denoising steps that were saved to keep up.
    pub steps_saved: u64,
    /// How long the reader was held back before it could hand chunks on.
    pub held_back_ns: u64,
    /// By how much the latest chunk was later than the rate that the source names.
    pub behind_ns: u64,
    /// The most of it.
    pub behind_max_ns: u64,
}

/// The latest [`RING_RECORDS`] chunks of a run, and the totals of all.
#[derive(Debug)]
pub struct Recorder {
    pipeline: Arc<Pipeline>,
    /// The n-th record stands at n, modulo its length.
    ring: Vec<ChunkRecord>,
    totals: Totals,
}

impl Recorder {
    /// An empty recorder of chunks of this pipeline, with its memory already resident.
    pub fn new(pipeline: Arc<Pipeline>) -> Self {
        Self::with_capacity(pipeline, RING_RECORDS)
    }

    /// An empty recorder with room for `records` records, at least one, and its memory already resident.
    pub fn with_capacity(pipeline: Arc<Pipeline>, records: usize) -> Self {
        // Not the all-zero value: an allocator may answer a request for zeroes with pages that are not there yet.
        let untouched = ChunkRecord {
            chunk_index: u64::MAX,
            ..ChunkRecord::before(&pipeline)
        };
        Self {
            pipeline,
            ring: vec![untouched; records.max(1)],
            totals: Totals::default(),
        }
    }

    /// Takes in the record of a chunk that was accepted or dropped. Constant time, no allocation: it takes the place of the
    /// oldest, whose memory is freed.
    pub fn push(&mut self, record: ChunkRecord) {
        let totals = &mut self.totals;
        let place = totals.chunks as usize % self.ring.len();
        if totals.chunks == 0 {
            totals.first_build_ns = record.build_start_ns;
        }
        totals.chunks += 1;
        if record.dropped {
            totals.dropped += 1;
        } else {
            totals.frames += u64::from(record.frames);
            totals.last_accepted_ns = totals.last_accepted_ns.max(record.accepted_ns);
        }
        totals.source_bytes = totals.source_bytes.saturating_add(record.source_bytes);
        totals.max_in_flight = totals.max_in_flight.max(record.in_flight);
        totals.skipped_frames += u64::from(record.skipped_frames);
        totals.late += u64::from(record.late);
        totals.steps_saved += u64::from(record.steps_saved);
        totals.held_back_ns = totals.held_back_ns.saturating_add(record.held_back_ns);
        totals.behind_ns = record.behind_ns.unwrap_or(0);
        totals.behind_max_ns = totals.behind_max_ns.max(totals.behind_ns);

        self.ring[place] = record;
    }

    /// The stages that the records speak of.
    pub fn pipeline(&self) -> &Pipeline {
        &self.pipeline
    }

    /// The records still held, oldest first.
    pub fn records(
        &self,
    ) -> impl ExactSizeIterator<Item = &ChunkRecord> + DoubleEndedIterator + Clone {
        let (chunks, size) = (self.totals.chunks as usize, self.ring.len());
        (chunks.saturating_sub(size)..chunks).map(move |at| &self.ring[at % size])
    }

    /// Totals of the whole run.
    pub fn totals(&self) -> &Totals {
        &self.totals
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::testing::{TWO, empty};

    fn record(chunk_index: u64) -> ChunkRecord {
        ChunkRecord {
            chunk_index,
            frames: 4,
            source_bytes: 10,
            in_flight: 1 + (chunk_index % 3) as u32,
            build_start_ns: 100 + chunk_index,
            accepted_ns: 1_000 + chunk_index,
            dropped: chunk_index == 1,
            skipped_frames: 2,
            late: chunk_index == 2,
            steps_saved: 3,
            held_back_ns: 7,
            behind_ns: Some(if chunk_index == 3 { 9 } else { chunk_index }),
            ..ChunkRecord::default()
        }
    }

    fn indices(recorder: &Recorder) -> Vec<u64> {
        recorder.records().map(|r| r.chunk_index).collect()
    }

    #[test]
    fn the_ring_keeps_the_latest_in_order() {
        let mut recorder = empty(TWO, 3);
        assert_eq!(recorder.records().len(), 0);
        recorder.push(record(0));
        recorder.push(record(1));
        assert_eq!(indices(&recorder), [0, 1]);
        recorder.push(record(2));
        assert_eq!(indices(&recorder), [0, 1, 2]);
        recorder.push(record(3));
        recorder.push(record(4));
        assert_eq!(indices(&recorder), [2, 3, 4]);
        assert_eq!(recorder.records().len(), 3);
    }

    #[test]
    fn totals_outlive_the_ring() {
        let mut recorder = empty(TWO, 2);
        (0..5).for_each(|k| recorder.push(record(k)));
        assert_eq!(
            *recorder.totals(),
            Totals {
                chunks: 5,
                dropped: 1,
                frames: 16,
                source_bytes: 50,
                max_in_flight: 3,
                first_build_ns: 100,
                last_accepted_ns: 1_004,
                skipped_frames: 10,
                late: 1,
                steps_saved: 15,
                held_back_ns: 35,
                behind_ns: 4,
                behind_max_ns: 9,
            }
        );
    }
}
