//! A hard cut, then the death of rank 1, while an older chunk is still being taken.
//!
//! What the cut overtook went down with rank 1 and waits behind that chunk to be dropped. The new rank 1 owes nothing for
//! it: its first chunk is the one behind the cut.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pp_contract::{ChunkIndex, FaultKind, Manifest, Message, Rank};
use pp_runtime::core::Cut;
use pp_runtime::driver::{BoxedStage, Stages};
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, Place, Progress, RetainedPayloads, Sink, Source, Stage, StageError,
    StageResult, Taken,
};
use pp_testing::HANG;
use pp_transport::host::{RxLease, TxLease};

use super::stages::{Frames, Keeper, Mixer, Remember, Seen, expected};
use super::world::{Life, WHOLE, options, run};
use super::{CHAIN, PAIR};

/// The last chunk, which begins with a hard cut.
const CUT_AT: u64 = 2;
const CUTS: [Cut; 3] = [Cut::None, Cut::None, Cut::Hard];
/// Longer than a chunk is on its way.
const A_WHILE: Duration = Duration::from_millis(50);

/// How far the ranks are.
#[derive(Default)]
struct Scene {
    taking: AtomicBool,
    built: AtomicU64,
    /// The second rank 1 has worked on what came behind the cut.
    worked: AtomicBool,
}

/// The cut comes once a chunk before it is being taken, and cannot be dropped any more.
struct Waits<'a>(Frames<'a>, &'a Scene);

impl Source<TxLease> for Waits<'_> {
    type Plan = Remember;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        let is_cut = self.1.built.load(Ordering::SeqCst) == CUT_AT;
        if is_cut && !self.1.taking.load(Ordering::SeqCst) {
            return Ok(Offer::Later);
        }
        self.0.poll()
    }
    fn build(&mut self, place: Place, slot: &mut TxLease) -> StageResult<Built<Remember, ()>> {
        let built = self.0.build(place, slot);
        self.1.built.fetch_add(1, Ordering::SeqCst);
        built
    }
    fn rebuild(
        &mut self,
        place: Place,
        sent: &Message<Remember>,
        kept: &dyn RetainedPayloads<TxLease>,
        slot: &mut TxLease,
    ) -> StageResult<(Remember, Manifest)> {
        self.0.rebuild(place, sent, kept, slot)
    }
    fn accepted(
        &mut self,
        chunk: ChunkIndex,
        (): (),
        note: Option<&[u8]>,
    ) -> StageResult<Option<u64>> {
        self.0.accepted(chunk, (), note)
    }
}

/// The first one ends in its second chunk, once what overtakes that was sent.
struct Mortal<'a>(Mixer, &'a Scene, bool);

impl Stage<TxLease, RxLease> for Mortal<'_> {
    type Plan = Remember;
    type Kept = std::convert::Infallible;

    fn run(
        &mut self,
        chunk: Chunk<'_, Remember>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> StageResult<Progress<Done, Self::Kept>> {
        let (index, is_last) = (chunk.place.chunk.get(), self.2);
        let worked = self.0.run(chunk, input, output);
        if is_last || index == 0 {
            self.1.worked.store(index == CUT_AT, Ordering::SeqCst);
            return worked;
        }
        let deadline = Instant::now() + HANG;
        while self.1.built.load(Ordering::SeqCst) <= CUT_AT && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(100));
        }
        Err(StageError::new(FaultKind::Device, "mix", "it dies"))
    }
}

/// It takes its first chunk for as long as it takes the others to come.
struct Slow<'a> {
    keeper: Keeper<'a>,
    scene: &'a Scene,
    waited: bool,
}

impl Sink<RxLease> for Slow<'_> {
    type Plan = Remember;
    type Kept = Taken;

    fn take(
        &mut self,
        chunk: Chunk<'_, Remember>,
        input: Option<&RxLease>,
    ) -> StageResult<Progress<Taken, Taken>> {
        let index = chunk.place.chunk.get();
        let Progress::Done(taken) = self.keeper.take(chunk, input)? else {
            unreachable!("it takes at once");
        };
        if index > 0 {
            return Ok(Progress::Done(taken));
        }
        self.scene.taking.store(true, Ordering::SeqCst);
        Ok(Progress::UnderWay(taken))
    }
    fn poll(&mut self, taken: Taken) -> StageResult<Progress<Taken, Taken>> {
        if !self.scene.worked.load(Ordering::SeqCst) {
            return Ok(Progress::UnderWay(taken));
        }
        if !self.waited {
            // The driver looks at what came in before it asks again.
            std::thread::sleep(A_WHILE);
            self.waited = true;
            return Ok(Progress::UnderWay(taken));
        }
        Ok(Progress::Done(taken))
    }
    fn finish(&mut self) -> StageResult<()> {
        self.keeper.finish()
    }
}

#[test]
fn a_chunk_that_a_cut_overtook_is_not_due_from_the_next_process() {
    for pipeline in [PAIR, CHAIN] {
        let options = options(pipeline, 3, 1);
        let (scene, seen) = (Scene::default(), Mutex::new(Seen::default()));
        let lives = [
            Life {
                left: usize::MAX,
                ..WHOLE
            },
            WHOLE,
        ];
        let end = run(&options, &lives, false, &|rank, generation| {
            let source = Waits(Frames::new(&CUTS, &seen), &scene);
            let mut stages = Stages::new((rank == Rank::new(0)).then_some(source));
            if rank == Rank::new(1) {
                let mortal = Mortal(Mixer::default(), &scene, generation == 1);
                stages.push(BoxedStage::new(mortal));
            }
            if rank == options.pipeline.sink() {
                stages.push(BoxedStage::sink(Slow {
                    keeper: Keeper::new(&seen, 0),
                    scene: &scene,
                    waited: false,
                }));
            }
            stages
        });
        let (summary, seen) = (end.result.unwrap(), seen.into_inner().unwrap());
        let all = expected(&options.pipeline, &CUTS);
        assert_eq!(seen.taken, [(0, all[0].clone()), (2, all[2].clone())]);
        assert_eq!((seen.accepted, seen.forgotten), (vec![0, 2], vec![1]));
        assert_eq!((summary.counts.emitted, summary.counts.dropped), (2, 1));
        let records = summary.recorder.records();
        let overtaken = records.filter(|record| record.dropped);
        assert!(overtaken.map(|record| record.chunk_index).eq([1]));
    }
}
