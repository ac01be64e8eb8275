//! The monotonic clock, in nanoseconds, as records and traces use it.

use rustix::time::{ClockId, clock_gettime};

use crate::report::{ChunkRecord, StageTimes};

/// Nanoseconds on `CLOCK_MONOTONIC`, which all processes of one host share.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // The clock starts at 0 when the machine does and is never negative.
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Where the work of other ranks lies on the clock of rank 0, rebuilt from durations alone.
///
/// A stage reports how long it waited and how long it worked; laid end to end that is its whole
/// history. Each chunk anchors it anew: a work neither begins before the stage before it has ended,
/// nor ends so late that what follows it would end after the next moment that rank 0 knows. So no
/// clocks need agree, on one host or many.
///
/// The works of all laps of a ring are drawn as one.
#[derive(Debug)]
pub(crate) struct Clock {
    /// Payloads take time to arrive.
    payload_moves: bool,
    /// When each stage behind the source ended its last work.
    ends_ns: Vec<u64>,
}

impl Clock {
    pub(crate) fn new(payload_moves: bool) -> Self {
        Self {
            payload_moves,
            ends_ns: Vec::new(),
        }
    }

    /// Fills in the times of stages that have none. To be called once for each chunk, when it is
    /// accepted or dropped. What a stage has not done, because a hard cut overtook the chunk, keeps
    /// or gets no times.
    ///
    /// A rank 0 that was not scheduled between its send and its look at the clock has sent later
    /// than the next stage began. Then works are drawn from the send on, shorter than they were.
    pub(crate) fn place(&mut self, record: &mut ChunkRecord) {
        let mut free_ns = record.sent_ns;
        self.ends_ns.resize(record.stages.len(), 0);
        for (at, end_ns) in self.ends_ns.iter_mut().enumerate() {
            let [stage, rest @ ..] = &mut record.stages[at..] else {
                break;
            };
            if let Some(times) = stage.times {
                stage.times = (times.end_ns > 0).then_some(times);
                free_ns = free_ns.max(times.end_ns);
                continue;
            }
            if record.dropped && (stage.work_us, stage.idle_us) == (0, 0) {
                continue;
            }
            let known_ns = rest.iter().find_map(|after| after.times);
            let known_ns = known_ns.map_or(record.accepted_ns, |times| times.arrived_ns);
            let room_ns = known_ns.saturating_sub(free_ns);
            let after_us = rest.iter().take_while(|after| after.times.is_none());
            let after_us = after_us.fold(0_u64, |sum, after| sum.saturating_add(after.work_us));
            let (work_ns, after_ns) = fit(ns(stage.work_us), ns(after_us), room_ns);
            let (earliest_ns, latest_ns) = (free_ns + work_ns, free_ns + (room_ns - after_ns));
            let idle_ns = ns(stage.idle_us);
            let told_ns = end_ns
                .saturating_add(idle_ns)
                .saturating_add(ns(stage.work_us));
            *end_ns = told_ns.clamp(earliest_ns, latest_ns);
            let start_ns = *end_ns - work_ns;
            // No side looks while it works, so none saw a payload arrive. Where payloads are handed
            // over they were there at once; where they move, no later than this.
            let arrived_ns = match self.payload_moves {
                true => start_ns.saturating_sub(idle_ns).max(free_ns),
                false => free_ns,
            };
            stage.times = Some(StageTimes {
                arrived_ns,
                start_ns,
                end_ns: *end_ns,
            });
            free_ns = *end_ns;
        }
    }
}

fn ns(us: u64) -> u64 {
    us.saturating_mul(1_000)
}

/// Two works as long as they were, or where there is no room for both, each shorter by the same share.
fn fit(work_ns: u64, after_ns: u64, room_ns: u64) -> (u64, u64) {
    let all_ns = u128::from(work_ns) + u128::from(after_ns);
    if all_ns <= u128::from(room_ns) {
        return (work_ns, after_ns);
    }
    let share_ns = u128::from(work_ns) * u128::from(room_ns) / all_ns;
    // A part of the room is no longer than the room.
    let share_ns = u64::try_from(share_ns).unwrap_or(room_ns);
    (share_ns, room_ns - share_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::StageRecord;
    use crate::report::testing;

    fn stage([idle_us, work_us]: [u64; 2]) -> StageRecord {
        StageRecord {
            work_us,
            idle_us,
            ..StageRecord::default()
        }
    }

    /// What a stage of rank 0 saw itself.
    fn exact([arrived_ns, start_ns, end_ns]: [u64; 3]) -> StageRecord {
        StageRecord {
            times: Some(StageTimes {
                arrived_ns,
                start_ns,
                end_ns,
            }),
            ..StageRecord::default()
        }
    }

    fn record(sent_ns: u64, accepted_ns: u64, stages: &[StageRecord]) -> ChunkRecord {
        ChunkRecord {
            sent_ns,
            accepted_ns,
            stages: stages.to_vec(),
            ..ChunkRecord::default()
        }
    }

    /// Starts and ends of the works of a chunk, whose times must rise.
    fn places(clock: &mut Clock, mut record: ChunkRecord) -> Vec<(u64, u64)> {
        clock.place(&mut record);
        let times = record.stages.iter().map(|s| s.times.unwrap());
        let moments = times
            .clone()
            .flat_map(|t| [t.arrived_ns, t.start_ns, t.end_ns]);
        let all = [record.sent_ns].into_iter().chain(moments);
        let all: Vec<_> = all.chain([record.accepted_ns]).collect();
        assert!(all.is_sorted(), "{all:?}");
        times.map(|t| (t.start_ns, t.end_ns)).collect()
    }

    /// Start and end of a work that waited and took so many microseconds, between rank 0 and rank 0.
    fn place(clock: &mut Clock, sent: u64, received: u64, us: [u64; 2]) -> (u64, u64) {
        let stages = [stage(us), exact([received; 3])];
        let ends_ns = clock.ends_ns.clone();
        let [handed_over, moved] = [false, true].map(|payload_moves| {
            clock.payload_moves = payload_moves;
            clock.ends_ns.clone_from(&ends_ns);
            places(clock, record(sent, received, &stages))[0]
        });
        assert_eq!(handed_over, moved);
        moved
    }

    #[test]
    fn the_clock_does_not_run_backwards() {
        let first = now_ns();
        assert!(first > 0 && now_ns() >= first);
    }

    #[test]
    fn works_lie_end_to_end_between_sent_and_received() {
        let clock = &mut Clock::new(true);
        // Truth: works 100..200 and 210..310 µs; received 20 µs after each.
        assert_eq!(
            place(clock, 90_000, 220_000, [100, 100]),
            (100_000, 200_000)
        );
        assert_eq!(place(clock, 95_000, 330_000, [10, 100]), (210_000, 310_000));
    }

    #[test]
    fn a_history_that_drifts_is_pulled_back_by_the_next_chunk() {
        let clock = &mut Clock::new(true);
        assert_eq!(place(clock, 0, 50_000, [9_999, 10]), (40_000, 50_000));
        assert_eq!(place(clock, 200_000, 300_000, [0, 10]), (200_000, 210_000));
    }

    #[test]
    fn a_work_that_began_before_rank_0_noted_its_send_is_drawn_from_the_send_on() {
        let clock = &mut Clock::new(true);
        // It took 300 µs, and rank 0 saw 200 µs pass.
        assert_eq!(place(clock, 100_000, 300_000, [0, 300]), (100_000, 300_000));
        assert_eq!(place(clock, 310_000, 420_000, [0, 100]), (310_000, 410_000));
    }

    #[test]
    fn a_payload_that_is_handed_over_is_there_at_once() {
        for (payload_moves, arrived_ns) in [(false, 5_000), (true, 20_000)] {
            let mut record = record(5_000, 90_000, &[stage([20, 30])]);
            let mut clock = Clock::new(payload_moves);
            clock.ends_ns.push(20_000);
            clock.place(&mut record);
            let times = record.stages[0].times.unwrap();
            assert_eq!((times.arrived_ns, times.start_ns), (arrived_ns, 40_000));
        }
    }

    #[test]
    fn a_work_leaves_room_for_those_that_follow_it() {
        let clock = &mut Clock::new(true);
        // The first says that it ended at 70 µs, and 30 and 20 µs of others are left before 100.
        let stages = [[60, 10], [0, 30], [0, 20]].map(stage);
        let placed = places(clock, record(0, 100_000, &stages));
        assert_eq!(
            placed,
            [(40_000, 50_000), (50_000, 80_000), (80_000, 100_000)]
        );
        // A stage of rank 0 between them is an anchor for both sides.
        let stages = [
            stage([0, 10]),
            exact([130_000, 140_000, 150_000]),
            stage([0, 10]),
        ];
        let placed = places(clock, record(110_000, 200_000, &stages));
        assert_eq!(
            placed,
            [(110_000, 120_000), (140_000, 150_000), (150_000, 160_000)]
        );
    }

    #[test]
    fn works_that_do_not_fit_are_all_shorter_by_the_same_share() {
        let stages = [[0, 10], [0, 20], [0, 10]].map(stage);
        let placed = places(&mut Clock::new(false), record(1_000, 21_000, &stages));
        assert_eq!(placed, [(1_000, 6_000), (6_000, 16_000), (16_000, 21_000)]);
    }

    #[test]
    fn a_stage_that_a_hard_cut_spared_has_no_times() {
        // It was stale behind the first stage; rank 0 saw it come and did nothing.
        let stages = [stage([5, 10]), stage([0, 0]), exact([90_000, 0, 0])];
        let mut record = record(0, 100_000, &stages);
        record.dropped = true;
        Clock::new(true).place(&mut record);
        let times: Vec<_> = record.stages.iter().map(|s| s.times.is_some()).collect();
        assert_eq!(times, [true, false, false]);
    }

    #[test]
    fn the_history_of_three_ranks_is_found_again() {
        let mut clock = Clock::new(true);
        for truth in testing::three_ranks(40).records() {
            let mut placed = truth.clone();
            for behind in [0, 1] {
                placed.stages[behind].times = None;
            }
            clock.place(&mut placed);
            for at in 1..=3 {
                let [truth, placed] = [truth, &placed].map(|r| r.times(at).unwrap());
                // The way of a message is all that durations do not tell.
                let error_ns = truth.start_ns.abs_diff(placed.start_ns);
                assert!(error_ns <= 60_000, "stage {at}: {error_ns} ns");
                assert_eq!(
                    truth.end_ns - truth.start_ns,
                    placed.end_ns - placed.start_ns
                );
            }
        }
    }

    #[test]
    fn nonsense_durations_stay_inside_the_flight() {
        let clock = &mut Clock::new(true);
        assert_eq!(place(clock, 5, 10, [u64::MAX; 2]), (5, 10));
        let stages = [[u64::MAX; 2]; 3].map(stage);
        places(clock, record(5, 10, &stages));
        // Times that fall, and a chunk that has more stages than the one before.
        let stages = [
            stage([1, 1]),
            exact([3, u64::MAX, 2]),
            stage([u64::MAX, 0]),
            exact([0, 9, 7]),
            stage([7, 7]),
        ];
        clock.place(&mut record(u64::MAX, 1, &stages));
        clock.place(&mut record(4, u64::MAX, &stages));
        clock.place(&mut record(0, 0, &[]));
    }
}
