//! Jobs whose ranks are threads of one process: each closure runs on its own rank alone, no job knows of another, and
//! a rank that ends says why.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use pp_job::prelude::*;
use pp_testing::{Toy, ToySink, ToySource, bytes, done};

/// Two ranks, and the same stages on one.
const PAIR: &str = "a@0 -> b@1 -> c@0";
const ALONE: &str = "a@0 -> b@0 -> c@0";
/// Chunks of a job.
const CHUNKS: u64 = 9;

/// How often each closure of a job was called.
#[derive(Default)]
struct Calls {
    source: AtomicU32,
    stage: AtomicU32,
    sink: AtomicU32,
    finish: AtomicU32,
    worked: AtomicU32,
}

fn config(job: &LocalJob, rank: Rank) -> Config {
    let mut config = crate::open::config();
    config.launch = Some(job.launch(rank).unwrap());
    config
}

/// What is wrong with the middle stage, the last two at this chunk.
#[derive(Clone, Copy)]
enum Wrong {
    PanicsAtStart,
    Panics(u64),
    Fails(u64),
}

/// Runs one rank of a job with this middle stage; all stages in this process without a rank.
fn rank(
    job: &LocalJob,
    rank: Option<Rank>,
    calls: &Calls,
    wrong: Option<Wrong>,
) -> Result<(), Error> {
    let count = |calls: &AtomicU32| calls.fetch_add(1, Ordering::Relaxed);
    let (config, pipeline) = match rank {
        Some(rank) => (config(job, rank), PAIR),
        None => (crate::open::config(), ALONE),
    };
    let open = |_| {
        count(&calls.source);
        let mut offered = 0;
        let poll = move || {
            offered += 1;
            match offered > CHUNKS {
                true => Offer::End,
                false => Offer::Chunk(Cut::None),
            }
        };
        let build =
            |place: Place, _: &mut TxLease| Built::new(Toy(place.chunk.get() + 1), bytes(64), ());
        Ok(Opened::new(ToySource::new(poll, build)))
    };
    let program = Program::<Host, _, _>::new("a", open)
        .payloads(|_, ()| 64)
        .stage("b", |_, ()| {
            count(&calls.stage);
            assert!(!matches!(wrong, Some(Wrong::PanicsAtStart)), "asked for");
            Ok(OnHost::new(
                |chunk: Chunk<'_, Toy>, _: &[u8], _: &mut [u8]| {
                    count(&calls.worked);
                    match wrong {
                        Some(Wrong::Fails(at)) if chunk.message.plan().0 == at => {
                            Err(StageError::new(FaultKind::Io, "compute", "asked for"))
                        }
                        Some(Wrong::Panics(at)) if chunk.message.plan().0 == at => {
                            panic!("asked for")
                        }
                        _ => Ok(done(chunk.message, Manifest::empty())),
                    }
                },
            ))
        })
        .sink("c", |(), _| {
            count(&calls.sink);
            Ok(ToySink::<Toy, _>::new(|_, _| Ok(())))
        })
        .finish(|_, _| {
            count(&calls.finish);
            Ok(())
        });
    let pipeline: Pipeline = pipeline.parse()?;
    Job::new(&config, &pipeline).run(|this| this.run(Host, Profile::new(), program))
}

#[test]
fn each_closure_runs_once_on_its_own_rank_and_one_job_does_not_end_the_other() {
    let jobs = [(); 2].map(|()| LocalJob::new(WorldSize::new(2).unwrap()));
    let calls = [(); 4].map(|()| Calls::default());
    let done = thread::scope(|scope| {
        let start = |at: usize| {
            let (job, calls) = (&jobs[at / 2], &calls[at]);
            let wrong = (at / 2 == 1).then_some(Wrong::Fails(3));
            scope.spawn(move || rank(job, Some(Rank::new(at as u32 % 2)), calls, wrong))
        };
        [0, 1, 2, 3].map(start).map(|thread| thread.join().unwrap())
    });
    let counts = calls.map(|calls| {
        let Calls {
            source,
            stage,
            sink,
            finish,
            worked,
        } = calls;
        [source, stage, sink, finish, worked].map(AtomicU32::into_inner)
    });
    let [good, failed] = [&done[..2], &done[2..]];
    assert!(good.iter().all(Result::is_ok), "{good:?}");
    assert_eq!(counts[..2], [[1, 0, 1, 1, 0], [0, 1, 0, 0, 9]]);
    assert_eq!(counts[2..], [[1, 0, 1, 0, 0], [0, 1, 0, 0, 3]]);
    for error in failed {
        let text = error.as_ref().unwrap_err().to_string();
        assert!(
            text.contains("rank 1") && text.contains("asked for"),
            "{text}"
        );
    }
}

#[test]
fn a_stage_that_fails_in_a_job_of_one_rank_ends_it_with_its_words() {
    let job = &LocalJob::new(WorldSize::new(2).unwrap());
    let error = rank(job, None, &Calls::default(), Some(Wrong::Fails(1))).unwrap_err();
    let Error::Fault(fault) = &error else {
        panic!("{error}");
    };
    let words = (fault.rank, fault.operation.as_str(), fault.detail.as_str());
    assert_eq!(fault.kind, FaultKind::Io, "{fault}");
    assert_eq!(words, (Rank::new(0), "compute", "asked for"));
}

#[test]
fn a_rank_that_fails_or_panics_at_any_moment_tells_the_other_why() {
    let early = |job: &LocalJob, panics: bool| {
        let (config, pipeline) = (config(job, Rank::new(1)), PAIR.parse().unwrap());
        Job::new(&config, &pipeline).run(|_| match panics {
            true => panic!("asked for"),
            false => Err(anyhow::anyhow!("asked for").into()),
        })
    };
    let late = |job: &LocalJob, wrong| rank(job, Some(Rank::new(1)), &Calls::default(), wrong);
    type Ends<'a> = &'a (dyn Fn(&LocalJob) -> Result<(), Error> + Sync);
    let ends: [(&str, Ends<'_>); 4] = [
        ("an error before it runs", &|job| early(job, false)),
        ("a panic before it runs", &|job| early(job, true)),
        ("a stage that panics at its start", &|job| {
            late(job, Some(Wrong::PanicsAtStart))
        }),
        ("a stage that panics at a chunk", &|job| {
            late(job, Some(Wrong::Panics(3)))
        }),
    ];
    for (how, end) in ends {
        let job = &LocalJob::new(WorldSize::new(2).unwrap());
        let told = thread::scope(|scope| {
            scope.spawn(|| end(job).unwrap_err());
            rank(job, Some(Rank::new(0)), &Calls::default(), None).unwrap_err()
        });
        let text = told.to_string();
        assert!(
            text.contains("rank 1") && text.contains("asked for"),
            "{how}: {text}"
        );
    }
}
