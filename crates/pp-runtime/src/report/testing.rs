//! Records of made-up runs for the tests of the outputs.

use std::sync::Arc;

use pp_contract::{ChunkIndex, Fault, FaultKind, Pipeline, Rank, StageReport};

use super::{ChunkRecord, Recorder, Restart, StageRecord, StageTimes};

pub(crate) const ONE: &str = "encode@0 -> phase_b@0 -> decode@0";
pub(crate) const TWO: &str = "encode@0 -> phase_b@1 -> decode@0";
pub(crate) const GROUP: &str = "encode@0 -> phase_b@1+2 -> decode@0";
pub(crate) const THREE: &str = "encode@0 -> phase_b@1 -> phase_b@2 -> decode@0";

/// Rank 1 is killed 20 ms after the beginning of [`overlapped`], and a new one serves 2 ms later.
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

/// A recorder with room for so many chunks of a pipeline, and none in it.
pub(crate) fn empty(pipeline: &str, records: usize) -> Recorder {
    Recorder::with_capacity(Arc::new(pipeline.parse().unwrap()), records)
}

/// A run with depth 4 where encode takes 1.2 ms and decode 2.1 ms, and phase_b on the other rank takes 4 ms.
pub(crate) fn overlapped(chunks: u64) -> Recorder {
    run(TWO, chunks, 4, &[1_200, 4_000, 2_100])
}

/// The work of [`overlapped`], one chunk at a time.
pub(crate) fn serial(chunks: u64) -> Recorder {
    run(TWO, chunks, 1, &[1_200, 4_000, 2_100])
}

/// A run with depth 5 of two parts that take 3.6 and 4 ms, on ranks 1 and 2.
pub(crate) fn three_ranks(chunks: u64) -> Recorder {
    run(THREE, chunks, 5, &[1_200, 3_600, 4_000, 1_100])
}

/// The work of [`overlapped`] with a group of ranks 1 and 2 that shares phase_b: the leader works 2 ms, the other 4 ms.
pub(crate) fn group(chunks: u64) -> Recorder {
    run(GROUP, chunks, 4, &[1_200, 4_000, 2_100])
}

/// The work of [`overlapped`] on one rank.
pub(crate) fn one_rank(chunks: u64) -> Recorder {
    run(ONE, chunks, 4, &[1_200, 4_000, 2_100])
}

/// How long a message is under way between two ranks, in microseconds.
const TRANSFER: u64 = 30;

/// Simulates a pipeline with at most `depth` chunks in flight, whose stages take so many microseconds. A rank does what it
/// can begin first, and of two such works that of the later stage. Of a group the last member works as long, and each before
/// it an equal share less.
pub(crate) fn run(pipeline: &str, chunks: u64, depth: u64, work_us: &[u64]) -> Recorder {
    let pipeline: Arc<Pipeline> = Arc::new(pipeline.parse().unwrap());
    let rank = |at: usize| pipeline.stages()[at].leader();
    let under_way = |from, to| if from == to { 0 } else { TRANSFER };
    let sink = work_us.len() - 1;
    let mut records: Vec<ChunkRecord> = Vec::new();
    let mut done = vec![0; work_us.len()];
    let mut stage_free_us = vec![1_000_000; work_us.len()];
    let mut rank_free_us = vec![1_000_000; pipeline.world_size().get() as usize];
    while done[sink] < chunks as usize {
        // When the next chunk of each stage is there.
        let arrived_us = |at: usize| match at {
            0 if done[0] == chunks as usize => None,
            0 => match done[0].checked_sub(depth as usize) {
                None => Some(0),
                Some(before) if before < done[sink] => Some(records[before].accepted_ns / 1_000),
                Some(_) => None,
            },
            _ => {
                let is_there = done[at] < done[at - 1];
                let left = is_there.then(|| records[done[at]].times(at - 1).unwrap().end_ns);
                left.map(|ns| ns / 1_000 + under_way(rank(at - 1), rank(at)))
            }
        };
        let free_us = |at: usize| rank_free_us[rank(at).get() as usize];
        let starts = (0..=sink).filter_map(|at| Some((arrived_us(at)?.max(free_us(at)), at)));
        let (start_us, at) = starts
            .min_by_key(|(start_us, at)| (*start_us, sink - at))
            .expect("a chunk is on its way");
        let arrived_us = arrived_us(at).unwrap();
        // A little unevenness, the same in every run, keeps the picture honest.
        let uneven = 37 + 8 * at as u64;
        let end_us = start_us + work_us[at] + uneven * (done[at] as u64 % (3 + at as u64));
        if at == 0 {
            let k = done[0] as u64;
            let accepted = records
                .iter()
                .take(done[sink])
                .filter(|r| r.accepted_ns <= start_us * 1_000);
            records.push(ChunkRecord {
                chunk_index: k,
                call_id: k + 1,
                frames: 4,
                first_read_ns: start_us * 1_000,
                last_read_ns: start_us * 1_000,
                build_start_ns: start_us * 1_000,
                build_end_ns: end_us * 1_000,
                sent_ns: end_us * 1_000 + 2_000,
                source_bytes: 22_118_400,
                source_queue: 2,
                in_flight: (k + 1) as u32 - accepted.count() as u32,
                ..ChunkRecord::default()
            });
        } else {
            let record = &mut records[done[at]];
            let spec = &pipeline.stages()[at];
            let mut stage = StageRecord::before(spec);
            let members = spec.ranks.len() as u64;
            let reports = (1..=members).map(|member| StageReport {
                work_us: (end_us - start_us) * member / members,
                idle_us: start_us - stage_free_us[at],
                ..StageReport::default()
            });
            stage.take_in(&reports.collect::<Vec<_>>());
            stage.times = Some(StageTimes {
                arrived_ns: arrived_us * 1_000,
                start_ns: start_us * 1_000,
                end_ns: end_us * 1_000,
            });
            record.stages.push(stage);
            record.accepted_ns = (end_us + under_way(rank(at), Rank::new(0))) * 1_000;
        }
        (stage_free_us[at], rank_free_us[rank(at).get() as usize]) = (end_us, end_us);
        done[at] += 1;
    }
    let mut recorder = Recorder::with_capacity(pipeline, 1_024);
    records.into_iter().for_each(|r| recorder.push(r));
    recorder
}
