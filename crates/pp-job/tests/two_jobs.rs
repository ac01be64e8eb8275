//! Jobs whose ranks are threads of one process: each closure runs on its own rank alone, no job knows of another, and
//! a rank says why it takes no part.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use pp_contract::{FaultKind, Manifest, WorldSize};
use pp_job::prelude::*;
use pp_testing::{Toy, ToyFront, bytes};
use pp_transport::launch::LocalJob;

/// Chunks of a job.
const CHUNKS: u64 = 9;

/// How often each closure of a job was called.
#[derive(Default)]
struct Calls {
    front: AtomicU32,
    phase_b: AtomicU32,
    finish: AtomicU32,
    computed: AtomicU32,
}

fn config(job: &LocalJob, rank: Rank) -> Config {
    let mut config = Config::alone(|_| None).unwrap();
    config.launch = Some(job.launch(rank).unwrap());
    config
}

/// Runs one rank of a job whose Phase B fails at this chunk; both in this process without a rank.
fn rank(
    job: &LocalJob,
    rank: Option<Rank>,
    calls: &Calls,
    fails_at: Option<u64>,
) -> Result<(), Error> {
    let count = |calls: &AtomicU32| calls.fetch_add(1, Ordering::Relaxed);
    let config = config(job, rank.unwrap_or(FRONT));
    let edges = Edges::new(4, 64, 64);
    let ranks = Ranks {
        front: |_| {
            count(&calls.front);
            let built = Rc::new(Cell::new(0));
            let next = Rc::clone(&built);
            let source = move || match built.get() {
                CHUNKS => Offer::End,
                _ => Offer::Chunk(Cut::None),
            };
            let build = move |_: &mut TxLease| {
                next.set(next.get() + 1);
                Envelope::new(Toy(next.get()), bytes(64), Manifest::empty()).unwrap()
            };
            Ok(FrontPart::new(ToyFront::new(source, build, drop), edges))
        },
        phase_b: |()| {
            count(&calls.phase_b);
            let stages = OnHost::new(|asked: &Envelope<Toy>, _: &[u8], _: &mut [u8]| {
                count(&calls.computed);
                match fails_at {
                    Some(at) if asked.plan().0 == at => {
                        Err(StageError::new(FaultKind::Io, "compute", "asked for"))
                    }
                    _ => Ok(()),
                }
            });
            Ok(PhaseBPart { stages, edges })
        },
        finish: |_, _| {
            count(&calls.finish);
            Ok(())
        },
    };
    match rank {
        None => Job::new(&config).run_alone(ranks),
        Some(_) => Job::new(&config).run(|this| this.run(Host, Profile::new(), ranks)),
    }
}

#[test]
fn each_closure_runs_once_on_its_own_rank_and_one_job_does_not_end_the_other() {
    let jobs = [(); 2].map(|()| LocalJob::new(WorldSize::new(2).unwrap()));
    let calls = [(); 4].map(|()| Calls::default());
    let done = thread::scope(|scope| {
        let start = |at: usize| {
            let (job, calls) = (&jobs[at / 2], &calls[at]);
            let fails_at = (at / 2 == 1).then_some(3);
            scope.spawn(move || rank(job, Some(Rank::new(at as u32 % 2)), calls, fails_at))
        };
        [0, 1, 2, 3].map(start).map(|thread| thread.join().unwrap())
    });
    let counts = calls.map(|calls| {
        let Calls {
            front,
            phase_b,
            finish,
            computed,
        } = calls;
        [front, phase_b, finish, computed].map(AtomicU32::into_inner)
    });
    let [good, failed] = [&done[..2], &done[2..]];
    assert!(good.iter().all(Result::is_ok), "{good:?}");
    assert_eq!(counts[..3], [[1, 0, 1, 0], [0, 1, 0, 9], [1, 0, 0, 0]]);
    assert_eq!(counts[3], [0, 1, 0, 3]);
    for error in failed {
        let text = error.as_ref().unwrap_err().to_string();
        assert!(
            text.contains("rank 1") && text.contains("asked for"),
            "{text}"
        );
    }
}

/// The front is told of it by a message that has no word for it.
#[test]
fn what_phase_b_fails_with_is_the_same_whichever_thread_of_the_process_is_first() {
    let job = &LocalJob::new(WorldSize::new(2).unwrap());
    for _ in 0..50 {
        let error = rank(job, None, &Calls::default(), Some(1)).unwrap_err();
        let Error::Fault(fault) = &error else {
            panic!("{error}");
        };
        let words = (fault.rank, fault.operation.as_str(), fault.detail.as_str());
        assert_eq!(fault.kind, FaultKind::Io, "{fault}");
        assert_eq!(words, (FRONT, "compute", "asked for"));
    }
}

#[test]
fn a_rank_that_declines_tells_the_other_why_whatever_the_error_is() {
    let job = &LocalJob::new(WorldSize::new(2).unwrap());
    let told = thread::scope(|scope| {
        scope.spawn(|| {
            let error = Error::Other(anyhow::anyhow!("no weights"));
            let ended = Job::new(&config(job, Rank::new(1))).run(|this| Err(this.decline(error)));
            ended.unwrap_err()
        });
        rank(job, Some(FRONT), &Calls::default(), None).unwrap_err()
    });
    let text = told.to_string();
    assert!(
        text.contains("rank 1") && text.contains("no weights"),
        "{text}"
    );
}
