use super::*;

const MS: u64 = 1_000_000;

/// A chunk emitted at `emit_ms` whose build, decode and phase B took so many milliseconds.
fn chunk(k: u64, emit_ms: u64, build: u64, decode: u64, phase_b: u64) -> ChunkRecord {
    ChunkRecord {
        chunk_index: k,
        frames: 4,
        build_start_ns: 0,
        build_end_ns: build * MS,
        decode_start_ns: emit_ms * MS - decode * MS,
        decode_end_ns: emit_ms * MS,
        emitted_ns: emit_ms * MS,
        phase_b_us: phase_b * 1_000,
        ..ChunkRecord::default()
    }
}

fn recorder(records: impl IntoIterator<Item = ChunkRecord>) -> Recorder {
    let mut recorder = Recorder::with_capacity(64);
    records.into_iter().for_each(|r| recorder.push(r));
    recorder
}

#[test]
fn perfect_overlap_by_hand() {
    // Stage 0 takes 1 + 3 = 4 ms, stage 1 takes 6 ms, a chunk comes every 6 ms: 4 + 6 - 6 = 4 hidden of 4.
    let m = Measures::of(&recorder((0..10).map(|k| chunk(k, 20 + 6 * k, 1, 3, 6))), 0);
    assert_eq!(m.measured, 9);
    assert_eq!((m.period_ms, m.stage0_ms, m.stage1_ms), (6.0, 4.0, 6.0));
    assert_eq!((m.build_ms, m.decode_ms, m.hidden_ms), (1.0, 3.0, 4.0));
    assert_eq!(m.overlap_score, Some(1.0));
    assert_eq!(m.efficiency, Some(1.0));
    // 40 frames between 0 and 74 ms.
    assert_eq!(m.wall_ms, 74.0);
    assert!((m.frames_per_second - 540.5405).abs() < 1e-3);
}

#[test]
fn stages_that_take_turns_score_zero() {
    let m = Measures::of(&recorder((0..5).map(|k| chunk(k, 20 + 12 * k, 2, 4, 5))), 0);
    assert_eq!(m.hidden_ms, 0.0);
    assert_eq!(m.overlap_score, Some(0.0));
    assert_eq!(m.efficiency, Some(0.5));
}

#[test]
fn medians_not_means_and_not_medians_of_sums() {
    // Periods 10, 10, 40; stage 0 = 8, 8, 8; stage 1 = 4, 6, 8.
    let m = Measures::of(
        &recorder([
            chunk(0, 10, 4, 4, 9),
            chunk(1, 20, 4, 4, 4),
            chunk(2, 30, 4, 4, 6),
            chunk(3, 70, 4, 4, 8),
        ]),
        0,
    );
    assert_eq!((m.period_ms, m.period_mean_ms), (10.0, 20.0));
    assert_eq!(
        (m.period_p10_ms, m.period_p90_ms, m.period_max_ms),
        (10.0, 40.0, 40.0)
    );
    // Hidden 2, 4, 0 of 4, 6, 8: shares 1/2, 2/3, 0.
    assert_eq!(m.hidden_ms, 2.0);
    assert_eq!(m.overlap_score, Some(0.5));
    assert_eq!(m.efficiency, Some(0.8));
}

#[test]
fn an_even_count_takes_the_mean_of_the_middle_two() {
    let m = Measures::of(
        &recorder([
            chunk(0, 10, 1, 1, 1),
            chunk(1, 12, 1, 1, 1),
            chunk(2, 17, 1, 1, 1),
        ]),
        0,
    );
    assert_eq!(m.period_ms, 3.5);
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
    let m = Measures::of(&recorder((0..9).map(slow_start)), 4);
    assert_eq!((m.warm_up, m.measured, m.period_ms), (4, 5, 5.0));

    let mut small = Recorder::with_capacity(3);
    (0..9).for_each(|k| small.push(slow_start(k)));
    assert_eq!(Measures::of(&small, 4).measured, 2);
    assert_eq!(Measures::of(&small, 8).measured, 1);
    assert_eq!(Measures::of(&small, 9).measured, 0);
}

#[test]
fn a_dropped_chunk_takes_its_neighbours_period_with_it() {
    let mut records: Vec<_> = (0..6).map(|k| chunk(k, 10 + 5 * k, 1, 1, 5)).collect();
    records[2].dropped = true;
    records[2].emitted_ns = 0;
    let m = Measures::of(&recorder(records), 0);
    // 0-1, 3-4 and 4-5 remain.
    assert_eq!(
        (m.measured, m.dropped, m.frames, m.period_ms),
        (3, 1, 20, 5.0)
    );
}

#[test]
fn idle_queues_and_bytes() {
    let m = Measures::of(
        &recorder((0..5).map(|k| ChunkRecord {
            idle_us: [9_000, 0, 2_000, 1_000, 1_000][k as usize],
            source_queue: k as u32,
            sink_queue: 1,
            in_flight: 2,
            forward_bytes: 100,
            back_bytes: 7,
            ..chunk(k, 10 + 10 * k, 1, 1, 5)
        })),
        0,
    );
    assert_eq!(m.phase_b_idle_ms, 1.0);
    assert_eq!(m.phase_b_idle_share, 0.1);
    assert_eq!((m.source_queue_mean, m.source_queue_max), (2.5, 4));
    assert_eq!((m.sink_queue_mean, m.sink_queue_max), (1.0, 1));
    assert_eq!(
        (m.forward_bytes, m.back_bytes, m.max_in_flight),
        (100, 7, 2)
    );
}

#[test]
fn stages_without_work_have_no_score_but_an_efficiency() {
    let m = Measures::of(&recorder((0..5).map(|k| chunk(k, 10 + k, 0, 0, 0))), 0);
    assert_eq!((m.overlap_score, m.efficiency), (None, Some(0.0)));
    let empty = Measures::of(&recorder([]), 0);
    assert_eq!(
        (empty.overlap_score, empty.efficiency, empty.measured),
        (None, None, 0)
    );
}

#[test]
fn the_mark_of_a_serial_schedule_is_seen() {
    let serial = |k: u64| ChunkRecord {
        idle_us: 4_000,
        ..chunk(k, 20 + 9 * k, 0, 4, 5)
    };
    assert!(Measures::of(&recorder((0..9).map(serial)), 0).looks_serial());
    // Overlapped with the same waits, because the front is the slower side: no fault.
    let overlapped = |k: u64| ChunkRecord {
        idle_us: 4_000,
        ..chunk(k, 20 + 5 * k, 1, 4, 1)
    };
    assert!(!Measures::of(&recorder((0..9).map(overlapped)), 0).looks_serial());
}

#[test]
fn a_short_run_keeps_three_quarters() {
    assert_eq!(default_warm_up(8), 2);
    assert_eq!(default_warm_up(1_000), DEFAULT_WARM_UP);
    assert_eq!(default_warm_up(0), 0);
}
