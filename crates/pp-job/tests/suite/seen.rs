//! What is seen of a job while it runs, and of its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use pp_job::prelude::*;
use pp_job::seen::{self, Client, HowEnded, JobState, Viewer, jobs};
use pp_runtime::report::{Measures, default_warm_up};
use pp_testing::{Folder, Toy, ToySink, ToySource, bytes, done, until};
use serde_json::{Value, json};

use crate::open::{At2, config, open};

/// Chunks before the source waits for the test.
const CHUNKS: u64 = 9;

/// Runs one rank of a job whose source has nothing more behind [`CHUNKS`] until it may end.
fn rank(
    config: &Config,
    may_end: &Arc<AtomicBool>,
    (show, report): (Sender<(Viewer, Bell)>, Sender<Value>),
) -> Result<(), Error> {
    let pipeline: Pipeline = "a@0 -> b@1 -> c@0".parse()?;
    Job::new(config, &pipeline).number(3).run(|this| {
        let viewer = this.viewer();
        let open = |bell: Bell| {
            let viewer = viewer.expect("rank 0 shows the job");
            show.send((viewer, bell)).unwrap();
            let (mut offered, may_end) = (0, Arc::clone(may_end));
            let poll = move || {
                offered += 1;
                match offered {
                    ..=CHUNKS => Offer::Chunk(Cut::None),
                    _ if may_end.load(Ordering::Relaxed) => Offer::End,
                    _ => Offer::Later,
                }
            };
            let build =
                |place: Place, _: &mut TxLease| Built::new(Toy(place.chunk.get()), bytes(64), ());
            Ok(Opened::new(ToySource::new(poll, build)))
        };
        let program = Program::<Host, _, _>::new("a", open)
            .payloads(|_, ()| 64)
            .stage("b", |_, ()| {
                let work = |chunk: Chunk<'_, Toy>, _: &[u8], _: &mut [u8]| {
                    Ok(done(chunk.message, bytes(64)))
                };
                Ok(OnHost::new(work))
            })
            .sink("c", |(), _| Ok(ToySink::<Toy, _>::new(|_, _| Ok(()))))
            .finish(|_, finished| {
                let recorder = finished.summary.recorder;
                let warm_up = default_warm_up(recorder.totals().chunks);
                let measures = Measures::of(&recorder, warm_up, &[]);
                let source_bytes = recorder.totals().source_bytes;
                // Read again as the report is: the last digit of a number may differ.
                let text = serde_json::to_string(&(measures, source_bytes)).unwrap();
                report.send(serde_json::from_str(&text).unwrap()).unwrap();
                Ok(())
            });
        this.run(Host, Profile::new(), program)
    })
}

#[test]
fn a_client_sees_a_job_to_its_end_and_the_figures_of_its_report() {
    let folder = Folder::scratch();
    let job = LocalJob::new(WorldSize::new(2).unwrap());
    let may_end = Arc::default();
    let (show, shown) = channel();
    let (report, reported) = channel();
    let config = |rank| {
        let mut config = config();
        config.launch = Some(job.launch(Rank::new(rank)).unwrap());
        config.runtime_folder = Some(folder.path().to_owned());
        config
    };
    // Other programs of this user may have jobs meanwhile.
    let own = |found: &seen::FoundJob| found.pid == std::process::id() && found.number == 3;
    let (last, viewer) = thread::scope(|scope| {
        let run = |number| {
            let (config, may_end, told) =
                (config(number), &may_end, (show.clone(), report.clone()));
            scope.spawn(move || rank(&config, may_end, told).unwrap())
        };
        let threads = [0, 1].map(run);
        let (viewer, bell) = shown.recv().unwrap();
        until(|| viewer.snapshot().totals.chunks == CHUNKS);
        assert!(!viewer.is_watched());
        let found: Vec<_> = jobs(&config(0)).into_iter().filter(own).collect();
        let [found] = &found[..] else {
            panic!("{found:?}");
        };
        let mut client = Client::connect(found).unwrap();
        let mut next = || client.next_snapshot().unwrap();
        let first = next().unwrap();
        assert_eq!(first.job, *viewer.about());
        assert_eq!((first.state, &first.ended), (JobState::Running, &None));
        assert!(viewer.is_watched());
        // Both ranks are asked, and say something.
        let all_say = |ranks: &[seen::RankView]| ranks.iter().all(|rank| rank.queued == Some(0));
        let heard = std::iter::from_fn(&mut next).find(|snapshot| all_say(&snapshot.ranks));
        let ranks = heard.unwrap().ranks;
        assert!(
            ranks.iter().all(|rank| rank.resident_bytes > Some(0)),
            "{ranks:?}"
        );
        may_end.store(true, Ordering::Relaxed);
        bell.ring();
        let last = std::iter::from_fn(next).last().unwrap();
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        ranks_end(ranks.len(), &last);
        (last, viewer)
    });
    assert!(!viewer.is_watched());
    assert!(!jobs(&config(0)).iter().any(own));
    let report = reported.recv().unwrap();
    let (measures, totals) = (&report[0], json!(last.totals));
    for key in ["chunks", "frames", "dropped"] {
        assert_eq!(totals[key], measures[key], "{key}");
    }
    assert_eq!(
        (&totals["source_bytes"], &totals["lost_records"]),
        (&report[1], &json!(0))
    );
    let recent = json!(last.recent);
    for key in [
        "period_ms",
        "latency_ms",
        "latency_p99_ms",
        "added_latency_max_ms",
    ] {
        assert_eq!(recent[key], measures[key], "{key}");
    }
    let mut so_far = Vec::new();
    viewer.write_report(&mut so_far).unwrap();
    let so_far: Value = serde_json::from_slice(&so_far).unwrap();
    assert_eq!(so_far["measures"], *measures);
    assert_eq!(so_far["chunks"].as_array().unwrap().len() as u64, CHUNKS);
    assert_eq!(so_far["run"]["state"], "ended");
}

/// The last snapshot says how the job ended, and has the whole of a short run.
fn ranks_end(ranks: usize, last: &seen::Snapshot) {
    assert_eq!(last.state, JobState::Ended);
    assert_eq!(last.ended, Some(HowEnded::default()));
    assert_eq!((last.fault.as_ref(), last.ranks.len()), (None, ranks));
    let labels: Vec<_> = last.stages.iter().map(|stage| &*stage.stage).collect();
    assert_eq!(labels, ["a", "b", "c"]);
    let indices: Vec<_> = last
        .timeline
        .iter()
        .map(|chunk| chunk.chunk_index)
        .collect();
    assert_eq!(indices, (0..CHUNKS).collect::<Vec<_>>());
    let times = last.timeline.iter().flat_map(|chunk| &chunk.stages);
    assert!(times.clone().count() == 3 * CHUNKS as usize && times.clone().all(Option::is_some));
}

#[test]
fn a_loss_and_a_fault_are_seen_with_their_sentences() {
    let config = config();
    for (what, restarts) in [(At2::Kill, true), (At2::Fail, false)] {
        let folder = Folder::scratch();
        folder.write(&(what as u8).to_string(), b"");
        if restarts {
            folder.write("restarts", b"");
        }
        let (show, shown) = channel();
        let running = open(&config, folder.path(), None, Some(show)).unwrap();
        let ended = running.wait();
        let viewer = shown.recv().unwrap();
        if !restarts {
            // A driver that its caller has left behind says it a little later.
            until(|| viewer.snapshot().state == JobState::Ended);
        }
        let snapshot = viewer.snapshot();
        assert_eq!(snapshot.state, JobState::Ended);
        let how = snapshot.ended.unwrap();
        if restarts {
            assert_eq!(how, HowEnded::default());
            let [restart] = &snapshot.restarts[..] else {
                panic!("{:?}", snapshot.restarts);
            };
            assert_eq!((restart.rank, snapshot.totals.restarts), (1, 1));
            assert!(
                restart.sentence.starts_with("peer died: rank 1: "),
                "{restart:?}"
            );
            assert!(restart.served_ns > Some(restart.lost_ns), "{restart:?}");
            assert_eq!((snapshot.fault, snapshot.totals.chunks), (None, 6));
        } else {
            let error = ended.unwrap_err();
            let fault = snapshot.fault.unwrap();
            assert_eq!((how.code, fault.rank), (error.code(), 1));
            assert_eq!((&*fault.kind, &*fault.operation), ("bad input", "denoise"));
            assert!(how.sentence.contains("out of cheese"), "{how:?}");
        }
    }
}
