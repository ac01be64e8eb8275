//! Records of made-up runs for the tests of the outputs.

use pp_contract::{ChunkIndex, Fault, FaultKind, Rank};

use super::{ChunkRecord, PhaseBTimes, Recorder, Restart};

/// A Phase B that is killed 20 ms after the beginning of [`overlapped`], and served again 2 ms later.
pub(crate) fn restart() -> Restart {
    Restart {
        fault: Fault::new(FaultKind::PeerDied, Rank::new(1), "run", "ended by SIGKILL"),
        lost_ns: 1_020_000_000,
        chunk: Some(ChunkIndex::new(9)),
        sent_ns: Some(1_021_000_000),
        served_ns: Some(1_022_000_000),
        sent_again: 2,
    }
}

/// A run with depth 4 whose front takes 1.2 ms to encode and 2.1 ms to decode, and whose phase B takes 4 ms.
pub(crate) fn overlapped(chunks: u64) -> Recorder {
    run(chunks, 4, [1_200, 2_100, 4_000], 30)
}

/// The work of [`overlapped`], one chunk at a time.
pub(crate) fn serial(chunks: u64) -> Recorder {
    run(chunks, 1, [1_200, 2_100, 4_000], 30)
}

/// Simulates `encode → phase B → decode` with at most `depth` chunks in flight; durations in microseconds. The front
/// decodes as soon as a result is there and encodes otherwise.
pub(crate) fn run(
    chunks: u64,
    depth: u64,
    [encode, decode, phase_b]: [u64; 3],
    transfer: u64,
) -> Recorder {
    let mut records: Vec<ChunkRecord> = Vec::new();
    let (mut front_us, mut phase_b_us) = (1_000_000, 1_000_000);
    let mut decoded = 0;
    while decoded < chunks {
        let built = records.len() as u64;
        let next_result = records.get(decoded as usize).map(|r| r.received_ns / 1_000);
        let may_build = built < chunks && built - decoded < depth;
        if may_build && next_result.is_none_or(|at| at > front_us) {
            let mut r = ChunkRecord {
                chunk_index: built,
                call_id: built + 1,
                frames: 4,
                first_read_ns: front_us * 1_000,
                last_read_ns: front_us * 1_000,
                build_start_ns: front_us * 1_000,
                forward_bytes: 22_118_400,
                back_bytes: 22_118_400,
                in_flight: (built - decoded + 1) as u32,
                source_queue: 2,
                ..ChunkRecord::default()
            };
            // A little unevenness, the same in every run, keeps the picture honest.
            front_us += encode + 37 * (built % 5);
            r.build_end_ns = front_us * 1_000;
            r.sent_ns = r.build_end_ns + 2_000;
            let recv_us = front_us + transfer;
            let start_us = recv_us.max(phase_b_us);
            let end_us = start_us + phase_b + 53 * (built % 3);
            r.idle_us = start_us - phase_b_us;
            r.phase_b_us = end_us - start_us;
            r.received_ns = (end_us + transfer) * 1_000;
            r.phase_b = Some(PhaseBTimes {
                recv_ns: recv_us * 1_000,
                compute_start_ns: start_us * 1_000,
                compute_end_ns: end_us * 1_000,
                sent_ns: end_us * 1_000 + 2_000,
            });
            phase_b_us = end_us;
            records.push(r);
            continue;
        }
        let r = &mut records[decoded as usize];
        front_us = front_us.max(r.received_ns / 1_000);
        r.decode_start_ns = front_us * 1_000;
        front_us += decode + 41 * (decoded % 4);
        r.decode_end_ns = front_us * 1_000;
        r.emitted_ns = front_us * 1_000;
        decoded += 1;
    }
    let mut recorder = Recorder::with_capacity(1_024);
    records.into_iter().for_each(|r| recorder.push(r));
    recorder
}
