//! What the driver asks of a source that does not wait.

use std::collections::VecDeque;
use std::sync::Mutex;

use pp_contract::{Fault, FaultKind, Rank};
use pp_runtime::clock::now_ns;
use pp_runtime::core::{Cut, Late, LiveOptions};
use pp_runtime::driver::{BoxedStage, Driven, RankOptions, RankRun, Stages, Summary};
use pp_runtime::stage::{Built, Chunk, Offer, OnHost, Place, Source, StageResult};
use pp_testing::{Toy, ToySink, bytes, done, local, options, seats};
use pp_transport::host::{Host, TxLease};

use super::SHAPES;
use super::stages::{Play, run};

/// More than a test takes.
const LONG_NS: u64 = 3_600_000_000_000;

/// A number, when its frame was there, and how it begins.
type Frame = (u64, Option<u64>, Cut);

/// Frames that wait. What is built of one is its number, and the steps and the epoch that were asked for go to `seen`.
struct Camera<'a> {
    waiting: VecDeque<Frame>,
    skipped: u32,
    /// Frames that come once so many chunks were built.
    later: Option<(u64, VecDeque<Frame>)>,
    seen: &'a Mutex<Vec<(u64, u64, Option<u16>)>>,
}

impl Source<TxLease> for Camera<'_> {
    type Plan = Toy;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        let cut = self.waiting.front().map(|(_, _, cut)| *cut);
        Ok(cut.map_or(Offer::End, Offer::Chunk))
    }

    fn build(&mut self, place: Place, _: &mut TxLease) -> StageResult<Built<Toy, ()>> {
        let (number, read_ns, _) = self.waiting.pop_front().unwrap();
        let seen = (number, place.epoch.get(), place.steps);
        self.seen.lock().unwrap().push(seen);
        let chunk = place.chunk.get() + 1;
        self.waiting.extend(
            self.later
                .take_if(|(at, _)| *at == chunk)
                .unwrap_or_default()
                .1,
        );
        Ok(Built {
            read_ns: read_ns.map(|at| (at, at)),
            skipped_frames: std::mem::take(&mut self.skipped),
            ..Built::new(Toy(number), bytes(8), ())
        })
    }

    fn drop_late(&mut self, before_ns: u64) -> StageResult<u64> {
        let mut dropped = 0;
        while let [(_, Some(first_ns), cut), _, ..] = *self.waiting.make_contiguous() {
            if first_ns >= before_ns {
                break;
            }
            self.waiting.pop_front();
            if cut != Cut::None {
                self.waiting[0].2 = cut;
            }
            (dropped, self.skipped) = (dropped + 1, self.skipped + 1);
        }
        Ok(dropped)
    }

    fn oldest_ns(&self) -> Option<u64> {
        self.waiting.front()?.1
    }
}

/// What came of it: number, epoch and steps of each chunk that was built, and the end.
struct Outcome {
    seen: Vec<(u64, u64, Option<u16>)>,
    end: Result<Driven, Fault>,
    summary: Summary,
}

/// Runs these frames through one rank.
fn film(live: LiveOptions, now: Vec<Frame>, later: Option<(u64, Vec<Frame>)>) -> Outcome {
    let options = RankOptions {
        live,
        ..options("a@0 -> b@0 -> c@0", 4)
    };
    let seen = Mutex::default();
    let camera = Camera {
        waiting: now.into(),
        skipped: 0,
        later: later.map(|(at, frames)| (at, frames.into())),
        seen: &seen,
    };
    let mut stages = Stages::new(Some(camera));
    stages.push(BoxedStage::new(OnHost::new(
        |chunk: Chunk<'_, Toy>, _: &[u8], _: &mut [u8]| Ok(done(chunk.message, bytes(8))),
    )));
    stages.push(BoxedStage::sink(ToySink::<Toy, _>::new(|_, _| Ok(()))));
    let seat = seats(&options, 8).remove(0);
    let slots = |_, _| Ok(local(&options, 8));
    let mut run = RankRun::<Host, _>::new(Rank::new(0), stages, options.clone(), slots).unwrap();
    let end = run.drive(&seat.switch);
    let summary = run.finish().1;
    let seen = seen.lock().unwrap().clone();
    Outcome { seen, end, summary }
}

fn dropping(max_latency_ns: Option<u64>, steps: Option<(u16, u16)>) -> LiveOptions {
    LiveOptions {
        late: Late::Drop,
        max_latency_ns,
        steps,
    }
}

/// Nothing is known before the first chunk. Then what is older than the target goes, but for the last one, which gets the cut.
#[test]
fn what_would_be_late_is_dropped_but_never_the_last_one() {
    let now = now_ns();
    // The clock counts from the start of the machine, so the target is a part of what it shows.
    let target = now / 4;
    let old = |number, cut| (number, Some(now - 2 * target), cut);
    let mut frames: Vec<Frame> = (0..6).map(|number| old(number, Cut::None)).collect();
    frames[3].2 = Cut::Flush;
    // Behind them comes one that is offered in time, with those before it.
    let fresh = vec![
        old(6, Cut::None),
        (7, Some(now), Cut::None),
        (8, Some(now), Cut::None),
    ];
    let out = film(dropping(Some(target), None), frames, Some((2, fresh)));
    assert_eq!(out.end, Ok(Driven::Finished));
    assert_eq!(
        out.seen,
        [(0, 0, None), (5, 1, None), (7, 1, None), (8, 1, None)]
    );
    let records = out.summary.recorder.records();
    let skipped: Vec<u32> = records
        .clone()
        .map(|record| record.skipped_frames)
        .collect();
    assert_eq!(skipped, [0, 4, 1, 0]);
    assert!(
        records
            .map(|record| record.late)
            .eq([true, true, false, false])
    );
    let totals = out.summary.recorder.totals();
    assert_eq!(
        (totals.skipped_frames, totals.late, totals.chunks),
        (5, 2, 4)
    );
}

#[test]
fn steps_begin_with_the_fewest_and_rise_where_there_is_room() {
    let frames = || (0..120).map(|number| (number, None, Cut::None)).collect();
    let out = film(dropping(Some(LONG_NS), Some((2, 4))), frames(), None);
    let steps: Vec<u16> = out
        .seen
        .iter()
        .map(|(_, _, steps)| steps.unwrap())
        .collect();
    assert_eq!(steps.len(), 120);
    assert!(
        steps[..8].iter().all(|steps| *steps == 2) && steps.is_sorted(),
        "{steps:?}"
    );
    assert_eq!(steps.last(), Some(&4));
    let recorder = &out.summary.recorder;
    assert!(
        recorder
            .records()
            .map(|record| record.steps.unwrap())
            .eq(steps.iter().copied())
    );
    let saved: u16 = steps.iter().map(|steps| 4 - steps).sum();
    assert_eq!(recorder.totals().steps_saved, u64::from(saved));
}

#[test]
fn a_target_that_no_chunk_can_meet_ends_the_run_with_the_figure() {
    let film = |frames| {
        let frames = (0..frames).map(|number| (number, None, Cut::None));
        film(dropping(Some(1), None), frames.collect(), None).end
    };
    assert_eq!(film(7), Ok(Driven::Finished));
    let fault = film(9).unwrap_err();
    assert_eq!((fault.kind, fault.rank), (FaultKind::Usage, Rank::new(0)));
    let detail = fault.detail.as_str();
    assert!(
        detail.contains("at most 0.0 ms is asked for, and one chunk takes "),
        "{detail}"
    );
}

/// Devices, laps, several ranks and cuts: all that is admitted comes out, and nothing waits for ever.
#[test]
fn a_source_that_drops_loses_nothing_that_was_admitted() {
    for (pipeline, stages) in SHAPES {
        for on_devices in [false, true] {
            let mut play = Play {
                on_devices,
                live: dropping(Some(LONG_NS), None),
                ..Play::chunks(200)
            };
            play.cuts[50] = Cut::Flush;
            let ends = run(pipeline, 4, play, |_| {});
            ends.assert_all(200, stages);
        }
    }
    let mut play = Play {
        live: dropping(None, None),
        ..Play::chunks(100)
    };
    play.cuts[50] = Cut::Hard;
    let ends = run(super::CHAIN, 4, play, |_| {});
    let counts = ends.summary().counts;
    assert_eq!(counts.emitted + counts.dropped, 100);
    assert!(
        ends.summary()
            .recorder
            .records()
            .any(|record| record.chunk_index == 50 && !record.dropped)
    );
}
