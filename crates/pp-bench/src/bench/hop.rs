//! How far apart two cores are: the one figure without which a rate between them says little.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const ROUNDS: u32 = 20_000;
/// Some milliseconds are enough where both threads have their core. Where other work has it, a round takes a time slice of
/// the scheduler, and the other ranks wait.
const RUN_WITHIN: Duration = Duration::from_millis(100);
/// Loads between two looks at the clock.
const SPINS: u32 = 1 << 12;
/// In place of a round: there are no more.
const OVER: u32 = u32::MAX;

#[repr(align(128))]
struct Line(AtomicU32);

/// Half a round trip of one cache line between two cores, in microseconds: the median of several
/// runs. `None` on one core, where threads cannot be pinned, or where other work has the cores.
pub(super) fn core_hop_us() -> Option<f64> {
    let allowed = sched_getaffinity(None).ok()?;
    let mut cores = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let (near, far) = (cores.next()?, cores.next_back()?);
    let mut runs: Vec<f64> = (0..5).filter_map(|_| one_run(near, far)).collect();
    runs.sort_by(f64::total_cmp);
    runs.get(runs.len() / 2).copied()
}

fn pin(cpu: usize) -> bool {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).is_ok()
}

/// Two threads of their own, so that this one keeps its cores.
fn one_run(near: usize, far: usize) -> Option<f64> {
    let (ping, pong) = (Line(AtomicU32::new(0)), Line(AtomicU32::new(0)));
    std::thread::scope(|scope| {
        let answering = scope.spawn(|| {
            let pinned = pin(far);
            for round in 1..=ROUNDS {
                loop {
                    match ping.0.load(Ordering::Acquire) {
                        OVER => return pinned,
                        asked if asked == round => break,
                        _ => std::hint::spin_loop(),
                    }
                }
                pong.0.store(round, Ordering::Release);
            }
            pinned
        });
        let asking = scope.spawn(|| {
            let pinned = pin(near);
            let start = Instant::now();
            for round in 1..=ROUNDS {
                ping.0.store(round, Ordering::Release);
                let mut spins: u32 = 0;
                while pong.0.load(Ordering::Acquire) != round {
                    spins = spins.wrapping_add(1);
                    if spins.is_multiple_of(SPINS) && start.elapsed() > RUN_WITHIN {
                        ping.0.store(OVER, Ordering::Release);
                        return None;
                    }
                    std::hint::spin_loop();
                }
            }
            let half = start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS) / 2.0;
            pinned.then_some(half)
        });
        let half = asking.join().ok()??;
        answering.join().ok()?.then_some(half)
    })
}
