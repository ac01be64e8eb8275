//! A hard cut, then the death of Phase B, while an older chunk is still being decoded.
//!
//! What the cut overtook went down with Phase B and waits behind that decode to be dropped. The new
//! Phase B owes nothing for it: its first result is that of the chunk behind the cut.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pp_contract::{ChunkIndex, Envelope, FaultKind, Outcome};
use pp_runtime::core::Cut;
use pp_runtime::driver::{Driven, FrontRun, run_phase_b};
use pp_runtime::stage::{
    Built, Decoded, FrontStages, Offer, PhaseBStages as _, Place, Progress, RetainedPayloads,
    StageError,
};
use pp_testing::ToyPhaseB;
use pp_transport::bell::Bell;
use pp_transport::host::{RxLease, TxLease};

use crate::stages::{Front, Mixer, Remember, expected};
use crate::{FRONT, TellPanic, died, options, pair};

/// The last chunk, which begins with a hard cut.
const CUT_AT: u64 = 2;
const CUTS: [Cut; 3] = [Cut::None, Cut::None, Cut::Hard];
/// Longer than a result is on its way.
const A_WHILE: Duration = Duration::from_millis(50);

/// How far both ranks are.
#[derive(Default)]
struct Scene {
    decoding: AtomicBool,
    built: AtomicU64,
    /// The second Phase B has computed what came behind the cut.
    computed: AtomicBool,
}

/// A front that decodes its first chunk for as long as it takes the others to come back.
struct Slow<'a> {
    front: Front,
    scene: &'a Scene,
    waited: bool,
}

impl FrontStages<TxLease, RxLease> for Slow<'_> {
    type Plan = Remember;
    type Carry = ();
    type Decoding = ();

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        // The cut comes once a chunk before it is being decoded, and cannot be dropped any more.
        let is_cut = self.scene.built.load(Ordering::SeqCst) == CUT_AT;
        if is_cut && !self.scene.decoding.load(Ordering::SeqCst) {
            return Ok(Offer::Later);
        }
        self.front.poll_source()
    }
    fn build(
        &mut self,
        place: Place,
        slot: &mut TxLease,
    ) -> Result<Built<Remember, ()>, StageError> {
        let built = self.front.build(place, slot);
        self.scene.built.fetch_add(1, Ordering::SeqCst);
        built
    }
    fn rebuild(
        &mut self,
        place: Place,
        sent: &Envelope<Remember>,
        kept: &dyn RetainedPayloads<TxLease>,
        slot: &mut TxLease,
    ) -> Result<Envelope<Remember>, StageError> {
        self.front.rebuild(place, sent, kept, slot)
    }
    fn decode(
        &mut self,
        chunk: ChunkIndex,
        (): (),
        outcome: &Outcome,
        payload: Option<RxLease>,
    ) -> Result<Progress<Decoded, ()>, StageError> {
        let Progress::Done(decoded) = self.front.decode(chunk, (), outcome, payload)?;
        if chunk.get() > 0 {
            return Ok(Progress::Done(decoded));
        }
        self.scene.decoding.store(true, Ordering::SeqCst);
        Ok(Progress::UnderWay(()))
    }
    fn poll_decoded(&mut self, (): ()) -> Result<Progress<Decoded, ()>, StageError> {
        if !self.scene.computed.load(Ordering::SeqCst) {
            return Ok(Progress::UnderWay(()));
        }
        if !self.waited {
            // The driver looks at what came in before it asks again.
            std::thread::sleep(A_WHILE);
            self.waited = true;
            return Ok(Progress::UnderWay(()));
        }
        Ok(Progress::Done(Decoded::default()))
    }
    fn forget(&mut self, chunk: ChunkIndex, (): ()) {
        self.front.forget(chunk, ());
    }
}

#[test]
fn a_chunk_that_a_cut_overtook_is_not_due_from_the_next_phase_b() {
    let scene = Scene::default();
    let mut stages = Slow {
        front: Front::new(&CUTS),
        scene: &scene,
        waited: false,
    };
    let options = options(1, 3);
    let bell = Bell::new().unwrap();
    let mut front = FrontRun::new(&mut stages, options);
    for is_last in [false, true] {
        let pair = pair(options, &bell);
        let driven = std::thread::scope(|scope| {
            scope.spawn(|| {
                // The first one ends in its second chunk, once what overtakes that was sent.
                let mut mixer = Mixer::default();
                let mut mortal = ToyPhaseB::new(|place, envelope: &_, input, output: &mut _| {
                    let computed = mixer.compute(place, envelope, input, output);
                    if is_last || place.chunk.get() == 0 {
                        let is_cut = place.chunk.get() == CUT_AT;
                        scene.computed.store(is_cut, Ordering::SeqCst);
                        return computed;
                    }
                    while scene.built.load(Ordering::SeqCst) <= CUT_AT {
                        std::thread::sleep(Duration::from_micros(100));
                    }
                    pair.front_switch.raise(died());
                    Err(StageError::new(FaultKind::Device, "phase_b", "it dies"))
                });
                let ended = run_phase_b(pair.back, &mut mortal, &pair.back_switch, FRONT, 3);
                assert_eq!(ended.is_ok(), is_last, "{ended:?}");
            });
            let _tell = TellPanic(&pair.back_switch);
            let driven = front.drive(pair.front, &pair.front_switch);
            if driven != Ok(Driven::Finished) {
                pair.back_switch.raise(died());
            }
            driven
        });
        let wanted = match is_last {
            false => Driven::Lost(died()),
            true => Driven::Finished,
        };
        assert_eq!(driven, Ok(wanted));
    }
    let summary = front.finish();
    assert_eq!((summary.counts.emitted, summary.counts.dropped), (2, 1));
    let overtaken = summary.recorder.records().find(|record| record.dropped);
    assert_eq!(overtaken.map(|record| record.chunk_index), Some(1));
    let all = expected(&CUTS);
    assert_eq!(
        stages.front.emitted,
        [(0, all[0].clone()), (2, all[2].clone())]
    );
    assert_eq!(stages.front.forgotten, [1]);
}
