//! Members as threads, on memory that each has mapped by itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use pp_contract::Rank;

use super::*;

/// Ranks that are not their places.
fn ranks(members: usize) -> Vec<Rank> {
    (0..members).map(|at| Rank::new(10 + at as u32)).collect()
}

fn group(members: usize) -> Vec<HostGroup> {
    HostGroup::of_threads("pair", &ranks(members)).unwrap()
}

/// Runs the part of each member on a thread of its own; gives what they return.
fn each<R: Send>(
    members: Vec<HostGroup>,
    part: impl Fn(usize, &mut HostGroup) -> R + Sync,
) -> Vec<R> {
    let part = &part;
    thread::scope(|scope| {
        let run = |(at, mut member): (usize, HostGroup)| scope.spawn(move || part(at, &mut member));
        let threads: Vec<_> = members.into_iter().enumerate().map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at * 31 + at / 251 + seed * 101) as u8)
        .collect()
}

/// Around the bounds of a piece and of the whole staging.
const SIZES: [usize; 8] = [
    0,
    1,
    7,
    PIECE - 1,
    PIECE,
    PIECE + 1,
    SLOTS as usize * PIECE + 3,
    3 * SLOTS as usize * PIECE,
];

#[test]
fn a_broadcast_reaches_all() {
    for members in 1..=5 {
        each(group(members), |at, group| {
            for (number, size) in SIZES.into_iter().enumerate() {
                let root = number % members;
                let mut data = bytes(if at == root { number } else { 99 }, size);
                group.broadcast(&mut data, root as u32).unwrap();
                assert!(
                    data == bytes(number, size),
                    "{size} bytes at {at} of {members}"
                );
                group.barrier().unwrap();
            }
        });
    }
}

/// Parts of all sizes at all members, some with none; and all of them empty.
fn all_parts(members: usize) -> impl Iterator<Item = Vec<u64>> {
    let rotated = (0..SIZES.len()).map(move |by| {
        let parts = (0..members).map(|at| SIZES[(at * 3 + by) % SIZES.len()] as u64);
        parts.collect()
    });
    rotated.chain([vec![0; members]])
}

#[test]
fn unequal_parts_go_out_and_come_back() {
    for members in 1..=5 {
        each(group(members), |at, group| {
            for (number, parts) in all_parts(members).enumerate() {
                let root = number % members;
                let total = parts.iter().sum::<u64>() as usize;
                let all = bytes(number, total);
                let start = parts[..at].iter().sum::<u64>() as usize;
                let own = &all[start..start + parts[at] as usize];
                let given: &[u8] = if at == root { &all } else { &[] };

                let mut part = vec![0xee; own.len()];
                group
                    .scatter(given, &parts, &mut part, root as u32)
                    .unwrap();
                assert!(part == own, "{parts:?} at {at}");
                let mut back = vec![0xee; if at == root { total } else { 0 }];
                group.gather(&part, &parts, &mut back, root as u32).unwrap();
                assert!(back == given, "{parts:?} at {at}");
            }
        });
    }
}

fn sum_of(dtype: DType, members: usize, len: usize) -> Vec<u8> {
    let mut total = vec![0; len];
    let all: Vec<_> = (0..members).map(|member| bytes(member, len)).collect();
    for (number, part) in total.chunks_mut(BLOCK).enumerate() {
        let mut sum = Sum::new(dtype);
        for (member, data) in all.iter().enumerate() {
            let block = &data[number * BLOCK..][..part.len()];
            if member == 0 {
                sum.set(block)
            } else {
                sum.add(block)
            }
        }
        sum.write(part);
    }
    total
}

#[test]
fn a_sum_has_the_same_bits_at_all_members() {
    for members in 2..=5 {
        for dtype in [DType::I32, DType::I64, DType::Bf16, DType::F16, DType::F32] {
            for size in SIZES.map(|size| size - size % 8) {
                let sums = each(group(members), |at, group| {
                    let mut data = bytes(at, size);
                    group.all_reduce_sum(&mut data, dtype).unwrap();
                    data
                });
                let wanted = sum_of(dtype, members, size);
                assert!(sums.iter().all(|sum| *sum == wanted), "{size} of {dtype}");
            }
        }
    }
    // Of one member nothing is added, not even bits that are no number.
    let mut data = [0xff; 8];
    group(1)[0].all_reduce_sum(&mut data, DType::F32).unwrap();
    assert_eq!(data, [0xff; 8]);
}

#[test]
fn transfers_go_between_two_while_others_do_something_else() {
    each(group(4), |at, group| {
        for (number, size) in SIZES.into_iter().enumerate() {
            let mut data = bytes(at, size);
            // 0 and 1, and 2 and 3, among themselves; the staging of 0 is in use by the broadcast before.
            group.broadcast(&mut data, 0).unwrap();
            for _ in 0..=at / 2 {
                if at % 2 == 0 {
                    group
                        .send(&bytes(number + at, size), at as u32 + 1)
                        .unwrap();
                    group.receive(&mut data, at as u32 + 1).unwrap();
                    assert!(data == bytes(number + at + 1, size));
                } else {
                    group.receive(&mut data, at as u32 - 1).unwrap();
                    assert!(data == bytes(number + at - 1, size));
                    group
                        .send(&bytes(number + at, size), at as u32 - 1)
                        .unwrap();
                }
            }
        }
        group.barrier().unwrap();
    });
}

type Run = fn(&mut HostGroup) -> Result<(), TransportError>;

/// Members make different calls: each gets an error that has all these words.
#[track_caller]
fn assert_apart(calls: &[Run], words: &[&str]) {
    for _ in 0..20 {
        let errors = each(group(calls.len()), |at, group| {
            let error = calls[at](group).unwrap_err().to_string();
            // It has ended for good.
            assert!(matches!(
                group.barrier(),
                Err(TransportError::Aborted { .. })
            ));
            error
        });
        for error in &errors {
            for word in words {
                assert!(error.contains(word), "no {word:?} in {error:?}");
            }
        }
    }
}

#[test]
fn members_in_different_calls_are_told_at_once() {
    assert_apart(
        &[HostGroup::barrier, |g| g.broadcast(&mut [0; 7], 0)],
        &[
            "rank 10 ",
            "a barrier",
            "rank 11 ",
            "a broadcast of 7 bytes from rank 10",
        ],
    );
    assert_apart(
        &[
            |g| g.broadcast(&mut [0; 7], 0),
            |g| g.broadcast(&mut [0; 9], 0),
        ],
        &["a broadcast of 7 bytes", "a broadcast of 9 bytes"],
    );
    assert_apart(
        &[
            |g| g.broadcast(&mut [0; 7], 0),
            |g| g.broadcast(&mut [0; 7], 1),
        ],
        &["7 bytes from rank 10", "7 bytes from rank 11"],
    );
    assert_apart(
        &[
            |g| g.all_reduce_sum(&mut [0; 8], DType::I32),
            |g| g.all_reduce_sum(&mut [0; 8], DType::F32),
        ],
        &["8 bytes of i32", "8 bytes of f32"],
    );
    assert_apart(
        &[
            |g| g.gather(&[0; 3], &[3, 5], &mut [0; 8], 0),
            |g| g.gather(&[0; 3], &[5, 3], &mut [], 0),
        ],
        &["a gather of 8 bytes to rank 10", "in other parts"],
    );
    // The third would wait for both.
    assert_apart(
        &[
            HostGroup::barrier,
            |g| g.broadcast(&mut [], 2),
            HostGroup::barrier,
        ],
        &["a barrier", "a broadcast of 0 bytes from rank 12"],
    );
}

#[test]
fn transfers_that_do_not_meet_are_told_at_once() {
    assert_apart(
        &[|g| g.send(&[0; 7], 1), |g| g.receive(&mut [0; 9], 0)],
        &[
            "a send of 7 bytes to rank 11",
            "a receive of 9 bytes from rank 10",
        ],
    );
    assert_apart(
        &[|g| g.send(&[0; 7], 1), HostGroup::barrier],
        &["a send of 7 bytes to rank 11", "a barrier"],
    );
    assert_apart(
        &[|g| g.send(&[0; 7], 1), |g| g.send(&[0; 9], 0)],
        &[
            "a send of 7 bytes to rank 11",
            "a send of 9 bytes to rank 10",
        ],
    );
    // Each waits for the next.
    assert_apart(
        &[|g| g.send(&[], 1), |g| g.send(&[], 2), |g| g.send(&[], 0)],
        &["a send of 0 bytes"],
    );
    // The first waits for the second, which waits for the third, which waits for all.
    assert_apart(
        &[
            |g| g.receive(&mut [0; 4], 1),
            |g| g.receive(&mut [0; 4], 2),
            HostGroup::barrier,
        ],
        &["rank"],
    );
}

#[test]
fn arguments_that_cannot_be_are_refused_before_the_call_is_entered() {
    let mut two = group(2);
    let first = &mut two[0];
    let mut refused = |call: &dyn Fn(&mut HostGroup) -> Result<(), TransportError>, word: &str| {
        let error = call(&mut *first).unwrap_err();
        assert!(
            matches!(error, TransportError::WrongGroup { .. }),
            "{error}"
        );
        assert!(error.to_string().contains(word), "{error}");
    };
    refused(&|g| g.broadcast(&mut [], 2), "no member 2");
    refused(&|g| g.send(&[], 0), "rank 10 is this rank");
    refused(&|g| g.receive(&mut [], 7), "no member 7");
    refused(&|g| g.scatter(&[], &[1], &mut [], 0), "1 parts for 2");
    refused(
        &|g| g.scatter(&[0; 3], &[1, 1], &mut [0], 0),
        "has 3 bytes where the parts say 2",
    );
    refused(
        &|g| g.scatter(&[0; 2], &[1, 1], &mut [0; 2], 0),
        "has 2 bytes where the parts say 1",
    );
    refused(
        &|g| g.gather(&[], &[1, 1], &mut [0; 2], 0),
        "has 0 bytes where the parts say 1",
    );
    refused(
        &|g| g.gather(&[0], &[1, 1], &mut [], 0),
        "has 0 bytes where the parts say 2",
    );
    refused(
        &|g| g.gather(&[0], &[1, u64::MAX], &mut [], 0),
        "address space",
    );
    refused(
        &|g| g.all_reduce_sum(&mut [0; 6], DType::F32),
        "no whole number",
    );
    refused(
        &|g| g.all_reduce_sum(&mut [0; 6], DType::U8),
        "u8 are not summed",
    );
    // The group lives.
    each(two, |_, group| group.barrier().unwrap());
}

/// Calls in which the first member waits for another.
const BLOCKED: [Run; 8] = [
    HostGroup::barrier,
    |g| g.broadcast(&mut [0; 9], 0),
    |g| g.broadcast(&mut [0; 9], 1),
    |g| g.scatter(&[0; 2], &[1, 1], &mut [0], 0),
    |g| g.gather(&[0], &[1, 1], &mut [0; 2], 0),
    |g| g.all_reduce_sum(&mut [0; 8], DType::F32),
    |g| g.send(&[0; 9], 1),
    |g| g.receive(&mut [0; 9], 1),
];

#[test]
fn an_abort_frees_a_member_from_every_call() {
    for call in BLOCKED {
        for own in [true, false] {
            let mut two = group(2);
            let (handle, other) = (two[0].abort_handle(), two[1].abort_handle());
            let recorder = FlightRecorder::new(8);
            let (name, members) = ("pair", ranks(2));
            two[0].log = GroupLog::new(&recorder, name, &members, Generation::new(0));
            thread::scope(|scope| {
                let blocked = scope.spawn(|| call(&mut two[0]));
                while recorder.begun() == 0 {
                    thread::yield_now();
                }
                // By a thread of its own process, or by another member.
                let by = if own { &handle } else { &other };
                by.abort("the test ends it");
                by.abort("a second reason");
                let error = blocked.join().unwrap().unwrap_err().to_string();
                assert!(
                    error.contains("pair of ranks 10+11 was aborted: the test ends it"),
                    "{error}"
                );
            });
            assert!(handle.is_aborted() && other.is_aborted());
            let error = two[1].barrier().unwrap_err().to_string();
            assert!(error.contains("the test ends it"), "{error}");
            let (operations, _) = recorder.operations();
            assert_eq!(operations[0].state, State::Poisoned);
        }
    }
}

/// As above, when a member has entered the call and gives nothing.
#[test]
fn an_abort_frees_a_member_in_the_middle_of_its_data() {
    let len = 3 * SLOTS as usize * PIECE;
    let calls: [(Call, Run); 2] = [
        (Kind::Broadcast.call(0, BYTES, len as u64, &[]), |g| {
            g.broadcast(&mut vec![0; 3 * SLOTS as usize * PIECE], 0)
        }),
        (Kind::AllReduce.call(0, DType::F32, len as u64, &[]), |g| {
            g.all_reduce_sum(&mut vec![0; 3 * SLOTS as usize * PIECE], DType::F32)
        }),
    ];
    for (call, run) in calls {
        let mut two = group(2);
        let mut second = two.pop().unwrap();
        let handle = second.abort_handle();
        second.counts.enter(call);
        second.shared.ring_others();
        thread::scope(|scope| {
            let blocked = scope.spawn(|| run(&mut two[0]));
            while !second.counts.has_published(0).unwrap() {
                thread::yield_now();
            }
            handle.abort("the test ends it");
            let error = blocked.join().unwrap().unwrap_err();
            assert!(matches!(error, TransportError::Aborted { .. }), "{error}");
        });
    }
}

#[test]
fn a_member_that_has_left_is_missed_by_those_who_wait_for_it() {
    for call in BLOCKED {
        let mut two = group(2);
        let second = two.pop().unwrap();
        let error = thread::scope(|scope| {
            let blocked = scope.spawn(|| call(&mut two[0]).unwrap_err().to_string());
            drop(second);
            blocked.join().unwrap()
        });
        assert!(
            error.contains("rank 11 has left it, and rank 10 waits in"),
            "{error}"
        );
    }
}

/// It has done its part: what it published is there for the others.
#[test]
fn a_member_counts_how_long_it_waited() {
    let mut members = group(2);
    members[0].wait(None, |_| Ok(true)).unwrap();
    assert_eq!(members[0].waited_ns(), 0);
    let mut looks = 0;
    let comes_late = |_: &mut Counts<Memory>| {
        looks += 1;
        thread::sleep(Duration::from_millis(1));
        Ok(looks == 3)
    };
    members[0].wait(None, comes_late).unwrap();
    // The first look belongs to the call.
    assert!(members[0].waited_ns() >= 2_000_000);
}

#[test]
fn a_member_may_leave_behind_its_last_call() {
    for _ in 0..50 {
        each(group(3), |at, group| {
            let mut data = bytes(at, 2 * PIECE);
            group.broadcast(&mut data, 0).unwrap();
            assert!(data == bytes(0, 2 * PIECE));
        });
    }
}

#[test]
fn a_panic_in_a_call_ends_the_group() {
    let mut two = group(2);
    let mut second = two.pop().unwrap();
    let call = Kind::Barrier.call(0, BYTES, 0, &[]);
    let lost = thread::spawn(move || {
        second.collective(Kind::Barrier, call, None, BYTES, |_| panic!("in the test"))
    });
    // The first is through; and has nothing to wait for in it.
    two[0].barrier().ok();
    lost.join().unwrap_err();
    let error = two[0].barrier().unwrap_err().to_string();
    assert!(
        error.contains("rank 11 was lost in the middle of a call"),
        "{error}"
    );
}

#[test]
fn a_reason_is_cut_at_a_character_and_cannot_control_a_terminal() {
    let two = group(2);
    two[0].abort_handle().abort(&format!(
        "\x1b[2Jaé{}",
        "é".repeat(pp_words::group::TEXT_BYTES)
    ));
    let error = two[1].shared.check().unwrap_err().to_string();
    assert!(
        error.ends_with('é') && error.contains(": [2Jaéé"),
        "{error}"
    );
}

#[test]
fn group_memory_for_another_number_of_members_is_refused() {
    let made = Memory::create(2).unwrap();
    let fd = made.region().fd().try_clone_to_owned().unwrap();
    let members = Members::new("three", &ranks(3), Rank::new(11)).unwrap();
    let error = GroupMemory::open(&members, fd).unwrap_err();
    assert!(matches!(error, TransportError::BadRegion { .. }), "{error}");
}

/// A small generator with a fixed seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let x = self.0 ^ self.0 >> 29;
        x.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7
    }

    /// What words hold, what they can never hold, and anything.
    fn word(&mut self) -> u64 {
        match self.next() % 4 {
            0 => self.next() % 8,
            1 => u64::MAX - self.next() % 3,
            2 => self.next() << 7,
            _ => ((self.next() % 4) << 32) | (self.next() % 4),
        }
    }
}

/// A member writes what it likes, where it likes, while two others work: they get errors, wrong bytes at most, and end.
#[test]
fn any_bytes_in_the_shared_memory_do_no_harm() {
    let (refused, done) = (AtomicU64::new(0), AtomicU64::new(0));
    for seed in 0..200 {
        let mut three = group(3);
        let handles: Vec<_> = three.iter().map(HostGroup::abort_handle).collect();
        let hostile = three.pop().unwrap();
        let words = hostile.shared.memory.bytes_of_words();
        let mut random = Random(seed);
        thread::scope(|scope| {
            for mut member in three {
                let (refused, done) = (&refused, &done);
                scope.spawn(move || {
                    let mut random = Random(seed);
                    loop {
                        let mut data = bytes(1, (random.next() % 3) as usize * PIECE);
                        let other = 1 - member.own() as u32;
                        let result = match random.next() % 6 {
                            0 => member.barrier(),
                            1 => member.broadcast(&mut data, (random.next() % 3) as u32),
                            2 => member.all_reduce_sum(&mut data, DType::F32),
                            3 => member.gather(&[1, 2], &[2, 2, 2], &mut [0; 6], 0),
                            _ if member.own() == 0 => member.send(&data, other),
                            _ => member.receive(&mut data, other),
                        };
                        match result {
                            Ok(()) => done.fetch_add(1, Ordering::Relaxed),
                            Err(TransportError::PeerMisbehaved { .. }) => {
                                refused.fetch_add(1, Ordering::Relaxed);
                                break;
                            }
                            Err(_) => break,
                        };
                    }
                });
            }
            for _ in 0..400 {
                let at = random.next() as usize % (words / 8);
                // The life of the group is at the beginning: mostly left alone.
                let at = if random.next().is_multiple_of(50) {
                    at % 40
                } else {
                    at
                };
                hostile.shared.memory.scribble(at * 8, random.word());
                if random.next().is_multiple_of(8) {
                    hostile.shared.ring_others();
                }
                thread::yield_now();
            }
            handles
                .iter()
                .for_each(|handle| handle.abort("the watchdogs have seen enough"));
        });
    }
    let (refused, done) = (refused.into_inner(), done.into_inner());
    assert!(
        refused > 10 && done > 10,
        "{refused} refused and {done} done"
    );
}

/// The best and the middle of many short runs, which say what it costs where nothing else runs, and here. Run it alone, with
/// `--release --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn all_reduce_latency_and_rate_are_printed() {
    for (bytes, rounds) in [(64, 500), (4096, 500), (1 << 20, 10), (16 << 20, 1)] {
        for members in [2, 3] {
            let runs = each(group(members), |_, group| {
                let mut data = vec![0; bytes];
                let mut runs = Vec::new();
                for _ in 0..100 {
                    let start = Instant::now();
                    for _ in 0..rounds {
                        group.all_reduce_sum(&mut data, DType::F32).unwrap();
                    }
                    runs.push(start.elapsed().as_secs_f64() / f64::from(rounds));
                }
                runs.sort_by(f64::total_cmp);
                [runs[0], runs[runs.len() / 2]]
            });
            let [best, middle] = runs[0].map(|seconds| {
                let rate = bytes as f64 / seconds / 1e9;
                format!("{:.2} µs, {rate:.2} GB/s", seconds * 1e6)
            });
            println!("all-reduce of {bytes} B, {members} members: {best}; middle {middle}");
        }
    }
}
