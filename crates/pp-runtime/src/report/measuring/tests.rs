use pp_contract::{Fault, FaultKind, Rank};

use super::*;
use crate::report::testing::{self, ONE, THREE, TWO, empty};
use crate::report::{StageRecord, WhyNull};

const MS: u64 = 1_000_000;

/// A chunk accepted at `accepted_ms` whose build, decode and phase_b took so many milliseconds.
fn chunk(k: u64, accepted_ms: u64, build: u64, decode: u64, phase_b: u64) -> ChunkRecord {
    ChunkRecord {
        chunk_index: k,
        frames: 4,
        build_start_ns: 0,
        build_end_ns: build * MS,
        accepted_ns: accepted_ms * MS,
        stages: [phase_b, decode].map(worked).to_vec(),
        ..ChunkRecord::default()
    }
}

fn worked(work_ms: u64) -> StageRecord {
    StageRecord {
        work_us: work_ms * 1_000,
        ..StageRecord::default()
    }
}

/// The chunk with this wait of phase_b before it.
fn waited(mut record: ChunkRecord, idle_us: u64) -> ChunkRecord {
    record.stages[0].idle_us = idle_us;
    record
}

/// The measures of a run without restarts.
fn of(recorder: &Recorder, warm_up: u64) -> Measures {
    Measures::of(recorder, warm_up, &[])
}

fn recorder(records: impl IntoIterator<Item = ChunkRecord>) -> Recorder {
    filled(TWO, records)
}

fn filled(pipeline: &str, records: impl IntoIterator<Item = ChunkRecord>) -> Recorder {
    let mut recorder = empty(pipeline, 64);
    records.into_iter().for_each(|r| recorder.push(r));
    recorder
}

fn stage_works(m: &Measures) -> Vec<Option<f64>> {
    m.stages.iter().map(|stage| stage.work_ms).collect()
}

fn rank_works(m: &Measures) -> Vec<Option<f64>> {
    m.ranks.iter().map(|rank| rank.work_ms).collect()
}

#[test]
fn perfect_overlap_by_hand() {
    // Rank 0 takes 1 + 3 = 4 ms, rank 1 takes 6 ms, a chunk comes every 6 ms: 4 + 6 - 6 = 4 hidden of 4.
    let m = of(&recorder((0..10).map(|k| chunk(k, 20 + 6 * k, 1, 3, 6))), 0);
    assert_eq!(m.measured, 9);
    assert_eq!([m.period_ms, m.hidden_ms], [6.0, 4.0].map(Some));
    assert_eq!(rank_works(&m), [4.0, 6.0].map(Some));
    assert_eq!(stage_works(&m), [1.0, 6.0, 3.0].map(Some));
    assert_eq!(m.overlap_score, Some(1.0));
    assert_eq!(m.efficiency, Some(1.0));
    // 40 frames between 0 and 74 ms.
    assert_eq!(m.wall_ms, 74.0);
    assert!((m.frames_per_second - 540.5405).abs() < 1e-3);
}

#[test]
fn stages_that_take_turns_score_zero() {
    let m = of(&recorder((0..5).map(|k| chunk(k, 20 + 12 * k, 2, 4, 5))), 0);
    assert_eq!(m.hidden_ms, Some(0.0));
    assert_eq!(m.overlap_score, Some(0.0));
    assert_eq!(m.efficiency, Some(0.5));
}

#[test]
fn three_ranks_by_hand() {
    let chunk = |k: u64, period: u64| ChunkRecord {
        stages: [5, 8, 3].map(worked).to_vec(),
        ..chunk(k, 20 + period * k, 1, 0, 0)
    };
    // The ranks take 4, 5 and 8 ms. Of 17 ms, all but the 8 of the longest can be hidden.
    for (period, hidden, score, efficiency) in [
        (8, 9.0, 1.0, 1.0),
        (10, 7.0, 7.0 / 9.0, 0.8),
        (17, 0.0, 0.0, 8.0 / 17.0),
        (20, 0.0, 0.0, 0.4),
    ] {
        let m = of(&filled(THREE, (0..10).map(|k| chunk(k, period))), 0);
        assert_eq!(rank_works(&m), [4.0, 5.0, 8.0].map(Some));
        assert_eq!([m.hidden_ms, m.overlap_score], [hidden, score].map(Some));
        assert_eq!(m.efficiency, Some(efficiency));
    }
    // Simulated, and one chunk at a time.
    let works = [1_200, 3_600, 4_000, 1_100];
    for (depth, least, most) in [(5, 0.9, 1.0), (1, 0.0, 0.0)] {
        let m = of(&testing::run(THREE, 100, depth, &works), 16);
        let score = m.overlap_score.unwrap();
        assert!((least..=most).contains(&score), "{score} at depth {depth}");
    }
}

#[test]
fn one_rank_has_nothing_to_hide_its_work_behind() {
    let m = of(
        &filled(ONE, (0..10).map(|k| chunk(k, 20 + 12 * k, 2, 4, 6))),
        0,
    );
    assert_eq!(rank_works(&m), [Some(12.0)]);
    assert_eq!(m.efficiency, Some(1.0));
    let why = Some(WhyNull::OneRank);
    assert_eq!((m.overlap_score, m.overlap_score_why_null), (None, why));
    assert_eq!(m.hidden_ms, None);
}

#[test]
fn a_rank_has_a_median_a_mean_and_a_worst() {
    let phase_b = [9, 4, 6, 8, 20];
    let m = of(
        &recorder((0..5).map(|k| chunk(k, 10 + 20 * k, 1, 1, phase_b[k as usize]))),
        0,
    );
    let rank = &m.ranks[1];
    let figures = [rank.work_ms, rank.work_mean_ms, rank.work_max_ms];
    assert_eq!((rank.rank, figures), (1, [7.0, 9.5, 20.0].map(Some)));
}

#[test]
fn medians_not_means_and_not_medians_of_sums() {
    // Periods 10, 10, 10; rank 0 = 8, 8, 8; rank 1 = 4, 6, 8.
    let m = of(
        &recorder([
            chunk(0, 10, 4, 4, 9),
            chunk(1, 20, 4, 4, 4),
            chunk(2, 30, 4, 4, 6),
            chunk(3, 40, 4, 4, 8),
        ]),
        0,
    );
    // Hidden 2, 4, 6 of 4, 6, 8: shares 1/2, 2/3, 3/4.
    assert_eq!(m.hidden_ms, Some(4.0));
    assert_eq!(m.overlap_score, Some(4.0 / 6.0));
    assert_eq!([m.efficiency, m.efficiency_by_mean], [Some(0.8); 2]);
}

#[test]
fn chunks_in_bursts_have_no_ratio_of_medians() {
    // Periods 10, 10, 40.
    let accepted = [10, 20, 30, 70];
    let m = of(
        &recorder((0..4).map(|k| chunk(k, accepted[k as usize], 4, 4, 8))),
        0,
    );
    assert_eq!(
        [m.period_ms, m.period_mean_ms, m.period_p10_ms],
        [10.0, 20.0, 10.0].map(Some)
    );
    assert_eq!([m.period_p90_ms, m.period_max_ms], [Some(40.0); 2]);
    let why = Some(WhyNull::Bursts);
    assert_eq!((m.efficiency, m.efficiency_why_null), (None, why));
    assert_eq!((m.overlap_score, m.overlap_score_why_null), (None, why));
    assert_eq!(m.hidden_ms, None);
    assert_eq!(
        (m.efficiency_by_mean, m.efficiency_by_mean_why_null),
        (Some(0.4), None)
    );
}

#[test]
fn a_restart_counts_where_it_lies_between_measured_chunks() {
    let recorder = recorder((0..10).map(|k| chunk(k, 20 + 6 * k, 1, 3, 6)));
    let lost = |lost_ms: u64, served_ms: Option<u64>| Restart {
        fault: Fault::new(FaultKind::PeerDied, Rank::new(1), "run", "gone"),
        lost_ns: lost_ms * MS,
        chunk: None,
        sent_ns: None,
        served_ns: served_ms.map(|ms| ms * MS),
        sent_again: 0,
    };
    // With a warm-up of 4 the measured periods lie between 38 and 74 ms.
    for (restart, spans) in [
        (lost(10, Some(37)), false),
        (lost(10, Some(38)), true),
        (lost(40, Some(50)), true),
        (lost(70, Some(90)), true),
        (lost(70, None), true),
        (lost(75, None), false),
    ] {
        let m = Measures::of(&recorder, 4, &[lost(1, Some(2)), restart.clone()]);
        assert_eq!(m.spans_restart, spans, "{restart:?}");
        let why = spans.then_some(WhyNull::SpansRestart);
        assert_eq!(m.efficiency_why_null, why);
        assert_eq!(m.efficiency, (!spans).then_some(1.0));
    }
}

#[test]
fn latencies_against_numbers_counted_by_hand() {
    // Chunk k is accepted 1 ms after the last of its frames was read; its first was read another k ms earlier.
    let late = |k: u64| ChunkRecord {
        first_read_ns: (1_000 + 10 * k - 1 - k) * MS,
        last_read_ns: (1_000 + 10 * k - 1) * MS,
        ..chunk(k, 1_000 + 10 * k, 0, 0, 1)
    };
    let all = |records: Vec<ChunkRecord>, warm_up| {
        let mut recorder = empty(TWO, 256);
        records.into_iter().for_each(|r| recorder.push(r));
        let m = of(&recorder, warm_up);
        let first = [
            m.latency_ms,
            m.latency_mean_ms,
            m.latency_p99_ms,
            m.latency_max_ms,
        ];
        let last = [
            m.added_latency_ms,
            m.added_latency_p99_ms,
            m.added_latency_max_ms,
        ];
        (first, last)
    };
    // 1 to 200 ms: the middle two are 100 and 101; 198 of 200 are not above 198.
    let (first, last) = all((0..200).map(late).collect(), 0);
    assert_eq!(first, [100.5, 100.5, 198.0, 200.0].map(Some));
    assert_eq!(last, [1.0; 3].map(Some));
    // The warm-up goes: 101 to 200 ms. 99 of 100 are not above 199.
    let (first, _) = all((0..200).map(late).collect(), 100);
    assert_eq!(first, [150.5, 150.5, 199.0, 200.0].map(Some));
    // One chunk has a latency and no period; a dropped one has none.
    let (first, _) = all(vec![late(6)], 0);
    assert_eq!(first, [7.0; 4].map(Some));
    let dropped = ChunkRecord {
        dropped: true,
        ..late(6)
    };
    assert_eq!(all(vec![dropped], 0), ([None; 4], [None; 3]));
}

#[test]
fn an_even_count_takes_the_mean_of_the_middle_two() {
    let m = of(
        &recorder([
            chunk(0, 10, 1, 1, 1),
            chunk(1, 12, 1, 1, 1),
            chunk(2, 17, 1, 1, 1),
        ]),
        0,
    );
    assert_eq!(m.period_ms, Some(3.5));
}

#[test]
fn warm_up_counts_from_the_start_of_the_run_even_after_the_ring_wrapped() {
    let slow_start = |k: u64| {
        chunk(
            k,
            if k < 4 {
                100 * (k + 1)
            } else {
                400 + 5 * (k - 3)
            },
            1,
            1,
            4,
        )
    };
    let m = of(&recorder((0..9).map(slow_start)), 4);
    assert_eq!((m.warm_up, m.measured, m.period_ms), (4, 5, Some(5.0)));

    let mut small = empty(TWO, 3);
    (0..9).for_each(|k| small.push(slow_start(k)));
    assert_eq!(of(&small, 4).measured, 2);
    assert_eq!(of(&small, 8).measured, 1);
    assert_eq!(of(&small, 9).measured, 0);
}

#[test]
fn a_dropped_chunk_takes_its_neighbours_period_with_it() {
    let mut records: Vec<_> = (0..6).map(|k| chunk(k, 10 + 5 * k, 1, 1, 5)).collect();
    records[2].dropped = true;
    records[2].accepted_ns = 0;
    let m = of(&recorder(records), 0);
    // 0-1, 3-4 and 4-5 remain.
    assert_eq!(
        (m.measured, m.dropped, m.frames, m.period_ms),
        (3, 1, 20, Some(5.0))
    );
}

#[test]
fn idle_queues_and_bytes() {
    let m = of(
        &recorder((0..5).map(|k| {
            let record = ChunkRecord {
                source_queue: k as u32,
                sink_queue: 1,
                in_flight: 2,
                source_bytes: 100,
                ..chunk(k, 10 + 10 * k, 1, 1, 5)
            };
            waited(record, [9_000, 0, 2_000, 1_000, 1_000][k as usize])
        })),
        0,
    );
    let idle: Vec<_> = m.stages.iter().map(|s| (s.idle_ms, s.idle_share)).collect();
    let waits = [(None, None), (Some(1.0), Some(0.1)), (Some(0.0), Some(0.0))];
    assert_eq!(idle, waits);
    let starved = |k| waited(chunk(k, 10 + 10 * k, 1, 1, 5), [9_000, 12_000][k as usize]);
    let b = of(&recorder((0..2).map(starved)), 0).stages.remove(1);
    assert_eq!((b.idle_ms, b.idle_share), (Some(12.0), None));
    assert_eq!(
        (m.source_queue_mean, m.source_queue_max),
        (Some(2.5), Some(4))
    );
    assert_eq!((m.sink_queue_mean, m.sink_queue_max), (Some(1.0), Some(1)));
    assert_eq!((m.source_bytes, m.max_in_flight), (Some(100), 2));
}

#[test]
fn stages_without_work_have_no_ratio_and_no_chunks_no_figure() {
    let m = of(&recorder((0..5).map(|k| chunk(k, 10 + k, 0, 0, 0))), 0);
    assert_eq!((m.overlap_score, m.efficiency), (None, None));
    assert_eq!(m.overlap_score_why_null, Some(WhyNull::NoWork));
    assert_eq!(m.efficiency_why_null, Some(WhyNull::NoWork));
    let empty = of(&recorder([]), 0);
    assert_eq!((empty.period_ms, empty.measured), (None, 0));
    assert_eq!(
        (stage_works(&empty), rank_works(&empty)),
        (vec![None; 3], vec![None; 2])
    );
    assert_eq!(empty.stages[1].idle_share, None);
    assert_eq!(empty.efficiency_why_null, Some(WhyNull::NothingMeasured));
}

#[test]
fn the_mark_of_a_serial_schedule_is_seen() {
    let serial = |k: u64| waited(chunk(k, 20 + 9 * k, 0, 4, 5), 4_000);
    assert!(of(&recorder((0..9).map(serial)), 0).looks_serial());
    // Overlapped with the same waits, because rank 0 is the slower side: no fault.
    let overlapped = |k: u64| waited(chunk(k, 20 + 5 * k, 1, 4, 1), 4_000);
    assert!(!of(&recorder((0..9).map(overlapped)), 0).looks_serial());
}

#[test]
fn a_short_run_keeps_three_quarters() {
    assert_eq!(default_warm_up(8), 2);
    assert_eq!(default_warm_up(1_000), DEFAULT_WARM_UP);
    assert_eq!(default_warm_up(0), 0);
}
