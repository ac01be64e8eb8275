//! Chunks that the caller pushes into a job, and results that it pulls.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use pp_job::flow::{Flow, Refused};
use pp_job::prelude::*;
use pp_job::{Running, ThisRank};
use pp_testing::{Toy, done, until};

/// A number that is pushed, and what comes out: the number, and that of its stream.
type Numbers = Flow<u64, u64>;

/// A chunk of this number is never done.
const STUCK: u64 = 1000;

/// Runs a job of one rank.
fn open(flow: &Numbers) -> Running {
    open_with(flow, Late::Block)
}

fn open_with(flow: &Numbers, late: Late) -> Running {
    let config = Config::alone(|name| (name == "PP_STUCK_MS").then(|| "1000".into())).unwrap();
    let pipeline = "a@0 -> b@0 -> c@0".parse().unwrap();
    let own = flow.clone();
    let rank = move |this: ThisRank<'_>| {
        let build = |_: Place, (stream, number): (u32, u64), _: &mut TxLease| {
            let plan = Toy(u64::from(stream) << 32 | number);
            Ok(Built::new(plan, Manifest::empty(), ()))
        };
        let take = |chunk: Chunk<'_, Toy>, _: Option<&RxLease>| {
            let Toy(both) = *chunk.message.plan();
            if both == STUCK {
                std::thread::sleep(Duration::MAX);
            }
            Ok(((both >> 32) as u32, both & 0xffff_ffff))
        };
        let stage = |_: &StageSpec, (): &()| {
            Ok(OnHost::new(
                |chunk: Chunk<'_, Toy>, _: &[u8], _: &mut [u8]| {
                    Ok(done(chunk.message, Manifest::empty()))
                },
            ))
        };
        let program = Program::<Host, _, _>::new("a", |bell| {
            Ok(Opened {
                late,
                ..Opened::new(own.inlet(bell).source(build))
            })
        });
        let program = program.payloads(|_, ()| 64).stage("b", stage);
        let program = program.sink("c", |(), _| Ok(own.outlet().sink(take)));
        this.run(Host, Profile::new(), program)
    };
    Job::new(&config, &pipeline).open_flow(flow, rank).unwrap()
}

#[test]
fn a_stream_that_nobody_pulls_stalls_no_other_and_each_keeps_its_order() {
    let flow = Numbers::new(1, 2);
    let running = open(&flow);
    let [(idle, idle_results), (busy, mut busy_results)] = [flow.stream(), flow.stream()];
    flow.end();
    let pushes = std::thread::spawn(move || (0..5).try_for_each(|n| idle.push(n, Cut::None)));
    for n in 0..20 {
        busy.push(n, Cut::None).unwrap();
        assert_eq!(busy_results.next(), Some(n));
    }
    busy.end(Some(20));
    assert_eq!(busy.push(21, Cut::None), Err(Refused::Over(21)));
    assert_eq!(busy_results.collect::<Vec<_>>(), [20]);
    assert!(!pushes.is_finished());
    assert_eq!(idle_results.collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    pushes.join().unwrap().unwrap();
    running.wait().unwrap();
}

#[test]
fn a_full_queue_gives_the_chunk_back() {
    // Without a job nothing is taken.
    let flow = Numbers::new(1, 1);
    let (pusher, puller) = flow.stream();
    let at_once = |n| pusher.push_within(n, Cut::None, Duration::ZERO);
    assert_eq!((at_once(1), at_once(2)), (Ok(()), Err(Refused::Full(2))));
    assert_eq!(pusher.waiting(), 1);
    let waits = Duration::from_millis(1);
    assert_eq!(
        pusher.push_within(2, Cut::None, waits),
        Err(Refused::Full(2))
    );
    assert_eq!(puller.pull_within(waits), Poll::Pending);
}

#[test]
fn every_wait_ends_with_the_job() {
    for is_stuck in [false, true] {
        let flow = Numbers::new(1, 1);
        let running = open(&flow);
        let (pusher, mut puller) = flow.stream();
        let pulls = std::thread::spawn(move || puller.next());
        if is_stuck {
            pusher.push(STUCK, Cut::None).unwrap();
            assert_eq!(running.wait().unwrap_err().code(), 9);
        } else {
            running.abort();
            assert!(running.wait().is_err());
        }
        assert_eq!(pulls.join().unwrap(), None);
        // The end of the job is told a moment before the flow is closed.
        until(|| pusher.push(1, Cut::None) == Err(Refused::Over(1)));
    }
}

#[test]
fn tasks_wait_as_threads_do() {
    let flow = Numbers::new(1, 1);
    let running = open(&flow);
    let (pusher, puller) = flow.stream();
    flow.end();
    let pushes = std::thread::spawn(move || {
        block_on(async {
            for n in 0..10 {
                pusher.push_async(n, Cut::None).await.unwrap();
            }
        });
    });
    let pulled = block_on(async {
        let mut all = Vec::new();
        while let Some(number) = puller.pull_async().await {
            all.push(number);
        }
        all
    });
    assert_eq!(pulled, (0..10).collect::<Vec<_>>());
    pushes.join().unwrap();
    running.wait().unwrap();
}

/// The smallest runtime: it polls one task on this thread.
fn block_on<T>(task: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut task = pin!(task);
    loop {
        match task.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(result) => return result,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Where nothing waits for room the oldest chunk goes, never the last, and the cut of one that is gone goes to the next. What
/// was offered stays until the job asks anew.
#[test]
fn a_full_queue_that_drops_keeps_the_newest() {
    // Without a job nothing is taken.
    let flow = Numbers::new(2, 4).dropping(|late, next| *next += 1000 * (late / 1000 + 1));
    let (pusher, puller) = flow.stream();
    let inlet = flow.inlet(Bell::new().unwrap());
    let push = |n, cut| pusher.push_within(n, cut, Duration::ZERO).unwrap();
    push(1, Cut::None);
    push(2, Cut::Flush);
    assert_eq!(inlet.offer(), Offer::Chunk(Cut::None));
    (3..6).for_each(|n| push(n, Cut::None));
    // 2, 3 and 4 are gone: 1 was offered.
    assert_eq!(pusher.waiting(), 2);
    assert_eq!(inlet.offer(), Offer::Chunk(Cut::None));
    assert_eq!(inlet.drop_late(0), 0);
    let first = inlet.take().unwrap();
    assert_eq!((first.stream, first.chunk, first.skipped), (0, 1, 0));
    assert_eq!(inlet.offer(), Offer::Chunk(Cut::Flush));
    pusher.end(Some(6));
    // All of it is late, and the last of what was pushed stays, and so does what came with the end.
    assert_eq!(inlet.drop_late(u64::MAX), 0);
    assert!(inlet.oldest_ns().is_some());
    let next = inlet.take().unwrap();
    assert_eq!((next.chunk, next.skipped), (3005, 3));
    assert_eq!(
        inlet.take().map(|last| (last.chunk, last.skipped)),
        Some((6, 0))
    );
    // The gap in front of a chunk that has no result is in front of the next one that has.
    let outlet = flow.outlet();
    outlet.give(0, Some(1));
    outlet.give(0, None);
    outlet.give(0, Some(6));
    let pulled = |within| (puller.pull_within(within), puller.skipped());
    assert_eq!(pulled(Duration::ZERO), (Poll::Ready(Some(1)), 0));
    assert_eq!(pulled(Duration::ZERO), (Poll::Ready(Some(6)), 3));
}

#[test]
fn a_job_that_drops_lets_no_pusher_wait() {
    let flow = Numbers::new(1, 8).dropping(|_, _| ());
    let running = open_with(&flow, Late::Drop);
    let (pusher, puller) = flow.stream();
    flow.end();
    for n in 0..500 {
        pusher.push_within(n, Cut::None, Duration::ZERO).unwrap();
    }
    drop(pusher);
    let mut next = 0;
    while let Poll::Ready(Some(n)) = puller.pull_within(Duration::MAX) {
        assert_eq!(n, next + puller.skipped());
        next = n + 1;
    }
    assert_eq!(next, 500, "the last one is never dropped");
    running.wait().unwrap();
}
