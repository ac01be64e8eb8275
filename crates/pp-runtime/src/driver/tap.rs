//! What shows the records of a run to another thread while the run goes on.
//!
//! Hazard: a viewer that is slow or stuck holds up the driver. Guarantee: the driver gives each record to a bounded queue
//! with one `try_send`; where the queue is full the record is lost to the viewer, and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use crate::report::ChunkRecord;

/// The end of the queue at the driver, for [`RankOptions::tap`](super::RankOptions::tap).
#[derive(Clone, Debug)]
pub struct Tap {
    records: SyncSender<ChunkRecord>,
    lost: Arc<AtomicU64>,
}

impl Tap {
    /// A queue of so many records, and its other end. Without that end all records are lost.
    #[must_use]
    pub fn new(records: usize) -> (Self, Receiver<ChunkRecord>) {
        let (sender, receiver) = sync_channel(records);
        let lost = Arc::default();
        let records = sender;
        (Self { records, lost }, receiver)
    }

    /// Records that found the queue full.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Gives a record to the other end, if there is room. Never waits.
    pub(super) fn take(&self, record: &ChunkRecord) {
        if self.records.try_send(record.clone()).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_loses_records_and_counts_them() {
        let (tap, records) = Tap::new(2);
        let record = |chunk_index| ChunkRecord {
            chunk_index,
            ..ChunkRecord::default()
        };
        (0..5).for_each(|chunk| tap.take(&record(chunk)));
        let seen = records.try_iter().map(|record| record.chunk_index);
        assert_eq!((seen.collect::<Vec<_>>(), tap.lost()), (vec![0, 1], 3));
        tap.take(&record(5));
        assert_eq!(records.try_iter().count(), 1);
        drop(records);
        tap.take(&record(6));
        assert_eq!(tap.lost(), 4);
    }
}
