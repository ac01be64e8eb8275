//! Phase B dies at every possible point, and the output is the undisturbed one.
//!
//! Phase B here remembers frames: what it makes of a chunk depends on the frames before it in its
//! epoch. So a chunk that is lost, doubled, or computed without its context shows in the output.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pp_contract::{
    ChunkIndex, DType, Envelope, Fault, FaultKind, Manifest, Matched, Outcome, Plan, PlanError,
    Prepared, Rank, Stamp, TensorSpec,
};
use pp_runtime::core::Cut;
use pp_runtime::driver::{Driven, FrontOptions, FrontRun, FrontSummary, run_phase_b};
use pp_runtime::stage::{
    Computed, Decoded, FrontStages, Kept, Offer, PhaseBStages, Place, Progress, StageError,
    send_as_it_was,
};
use pp_runtime::switch::Switch;
use pp_transport::bell::Bell;
use pp_transport::error::TransportError;
use pp_transport::host::{EdgeShape, HostLink, RxLease, TxLease};
use pp_transport::in_flight::{InFlight, Part, Rejected};
use pp_transport::link::{Capabilities, Link, Sent};

const FRONT: Rank = Rank::new(0);
const PHASE_B: Rank = Rank::new(1);
/// Frames of a chunk, and bytes of a frame.
const FRAMES: usize = 2;
const WIDE: usize = 10;
/// Frames that Phase B remembers: more than a chunk has.
const CONTEXT: usize = 3;
const CONTEXT_CHUNKS: u32 = 2;

/// First chunk of a session, and how many frames of context come with it.
#[derive(Clone, Debug, PartialEq)]
struct Remember((bool, u32));

impl Plan for Remember {
    const NAME: &'static str = "remember";
    const VERSION: u16 = 1;
    type Parts = (bool, u32);

    fn from_parts(parts: (bool, u32)) -> Result<Self, PlanError> {
        Ok(Self(parts))
    }
    fn parts(&self) -> &(bool, u32) {
        &self.0
    }
    fn expected_calls(&self) -> u32 {
        1 + u32::from(self.0.1 > 0)
    }
    fn start_frame(&self) -> u64 {
        0
    }
    fn check_inputs(&self, inputs: &Manifest) -> Result<(), PlanError> {
        assert_eq!(inputs.get("context").is_some(), self.0.1 > 0);
        Ok(())
    }
    fn check_outputs(&self, _: &Manifest, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }
}

fn manifest(frames: usize, context: usize) -> Manifest {
    let tensor = |name, frames: usize| {
        TensorSpec::new(name, DType::U8, &[frames as u64, WIDE as u64]).unwrap()
    };
    let mut tensors = vec![tensor("x", frames)];
    if context > 0 {
        tensors.push(tensor("context", context));
    }
    Manifest::new(&tensors).unwrap()
}

type Frame = [u8; WIDE];

/// Frame `n` of the input.
fn frame(n: usize) -> Frame {
    std::array::from_fn(|i| (n * 31 + i * 7) as u8)
}

/// A frame and the frames before it, as Phase B mixes them.
fn mixed(frame: &Frame, before: &VecDeque<Frame>) -> Frame {
    std::array::from_fn(|i| {
        let before = before.iter().enumerate();
        before.fold(frame[i], |sum, (age, old)| {
            sum.wrapping_add(old[i].wrapping_mul(age as u8 + 1))
        })
    })
}

fn remember(history: &mut VecDeque<Frame>, frame: Frame) {
    history.push_back(frame);
    if history.len() > CONTEXT {
        history.pop_front();
    }
}

/// What the chunks come out as.
fn expected(cuts: &[Cut]) -> Vec<Vec<Frame>> {
    let mut history = VecDeque::new();
    let chunk = |(chunk, cut): (usize, &Cut)| {
        if *cut != Cut::None {
            history.clear();
        }
        let frames = (0..FRAMES).map(|f| frame(chunk * FRAMES + f));
        let mix = |frame| {
            let out = mixed(&frame, &history);
            remember(&mut history, frame);
            out
        };
        frames.map(mix).collect()
    };
    cuts.iter().enumerate().map(chunk).collect()
}

/// The front: it brings context where it is asked to, and remembers what it needs for that.
struct Front {
    cuts: Vec<Cut>,
    offered: usize,
    history: VecDeque<Frame>,
    emitted: Vec<(u64, Vec<Frame>)>,
    forgotten: Vec<u64>,
    /// How often a chunk was composed again.
    rebuilt: usize,
}

impl Front {
    fn new(cuts: &[Cut]) -> Self {
        Self {
            cuts: cuts.to_vec(),
            offered: 0,
            history: VecDeque::new(),
            emitted: Vec::new(),
            forgotten: Vec::new(),
            rebuilt: 0,
        }
    }
}

fn envelope(init: bool, context: usize) -> Envelope<Remember> {
    let plan = Remember((init, context as u32));
    Envelope::new(plan, manifest(FRAMES, context), manifest(FRAMES, 0)).unwrap()
}

impl FrontStages<TxLease, RxLease> for Front {
    type Plan = Remember;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        let cut = self.cuts.get(self.offered).copied();
        self.offered += 1;
        Ok(cut.map_or(Offer::End, Offer::Chunk))
    }

    fn build(
        &mut self,
        place: Place,
        slot: &mut TxLease,
    ) -> Result<Envelope<Remember>, StageError> {
        if place.starts_epoch {
            self.history.clear();
        }
        let context = if place.rebuilds {
            self.history.len()
        } else {
            0
        };
        let envelope = envelope(place.rebuilds || place.chunk.get() == 0, context);
        let bytes = slot.bytes_mut();
        bytes.fill(0xEE);
        if let Some(range) = envelope.inputs().range("context") {
            bytes[range].copy_from_slice(self.history.make_contiguous().as_flattened());
        }
        let first = place.chunk.get() as usize * FRAMES;
        for (f, out) in bytes[..FRAMES * WIDE].chunks_exact_mut(WIDE).enumerate() {
            out.copy_from_slice(&frame(first + f));
            remember(&mut self.history, frame(first + f));
        }
        Ok(envelope)
    }

    fn rebuild(
        &mut self,
        place: Place,
        sent: &Envelope<Remember>,
        kept: &dyn Kept<TxLease>,
        slot: &mut TxLease,
    ) -> Result<Envelope<Remember>, StageError> {
        self.rebuilt += 1;
        slot.bytes_mut().fill(0xEE);
        let of_sent = sent.plan().0.1 as usize;
        if place.starts_epoch || of_sent > 0 {
            send_as_it_was(sent, kept, slot)?;
            return Ok(envelope(true, of_sent));
        }
        // Every frame that is kept, newest first, as far as they are context.
        let kept_frames = |back| kept.inputs(back).map_or(0, |_| FRAMES);
        let all: usize = (1..).map(kept_frames).take_while(|f| *f > 0).sum();
        let context = all.min(CONTEXT);
        assert!(context > 0, "chunk {} without context", place.chunk);
        let envelope = envelope(true, context);
        let bytes = (FRAMES * WIDE) as u64;
        let whole = Part {
            from: 0,
            to: 0,
            bytes,
        };
        kept.copy(0, &[whole], slot)?;
        let to = envelope.inputs().range("context").unwrap().start;
        for age in 0..context {
            let part = Part {
                from: ((FRAMES - 1 - age % FRAMES) * WIDE) as u64,
                to: (to + (context - 1 - age) * WIDE) as u64,
                bytes: WIDE as u64,
            };
            kept.copy(1 + age / FRAMES, &[part], slot)?;
        }
        Ok(envelope)
    }

    fn is_sink_ready(&mut self) -> Result<bool, StageError> {
        Ok(true)
    }

    fn decode(
        &mut self,
        chunk: ChunkIndex,
        _: &Outcome,
        payload: Option<RxLease>,
    ) -> Result<Progress<Decoded>, StageError> {
        let payload = payload.unwrap();
        let frames = payload.bytes().chunks_exact(WIDE);
        let frames = frames.map(|frame| frame.try_into().unwrap()).collect();
        self.emitted.push((chunk.get(), frames));
        Ok(Progress::Done(Decoded::default()))
    }

    fn forget(&mut self, chunk: ChunkIndex) {
        self.forgotten.push(chunk.get());
    }

    fn frames_built(&self) -> u32 {
        FRAMES as u32
    }

    fn queued(&self) -> (u32, u32) {
        (0, 0)
    }
}

/// Phase B: it knows nothing until it is told to begin.
#[derive(Default)]
struct Mixer {
    history: Option<VecDeque<Frame>>,
}

impl PhaseBStages<TxLease, RxLease> for Mixer {
    type Plan = Remember;

    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<Remember>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> Result<Progress<Computed>, StageError> {
        let Remember((init, _)) = *envelope.plan();
        let input = input.unwrap().bytes();
        if init || place.starts_epoch {
            if self.history.is_none() && !init {
                let text = format!(
                    "chunk {} is the first here and does not say so",
                    place.chunk
                );
                return Err(StageError::new(FaultKind::Plugin, "phase_b", text));
            }
            self.history = Some(VecDeque::new());
        }
        let history = self.history.as_mut().unwrap();
        if let Some(range) = envelope.inputs().range("context") {
            history.clear();
            let frames = input[range].chunks_exact(WIDE);
            history.extend(frames.map(|frame| Frame::try_from(frame).unwrap()));
        }
        let out = output.bytes_mut();
        let frames = input[..FRAMES * WIDE].chunks_exact(WIDE);
        for (frame, out) in frames.zip(out.chunks_exact_mut(WIDE)) {
            let frame = Frame::try_from(frame).unwrap();
            out.copy_from_slice(&mixed(&frame, history));
            remember(history, frame);
        }
        Ok(Progress::Done(Computed {
            observed_calls: envelope.plan().expected_calls(),
            start_frame: 0,
            seal: None,
            worked: None,
        }))
    }
}

/// A link that fails at one of its operations, after it was done or instead, and is never dropped.
struct Fails {
    link: ManuallyDrop<HostLink>,
    /// Operations that are still done.
    left: usize,
    /// Operations that were done.
    done: Arc<AtomicUsize>,
    /// What happens when it fails.
    at_the_end: Box<dyn Fn() -> TransportError + Send>,
}

impl Fails {
    fn step(&mut self) -> Result<(), TransportError> {
        if self.left == 0 {
            return Err((self.at_the_end)());
        }
        self.left -= 1;
        self.done.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Link for Fails {
    type Tx = TxLease;
    type Rx = RxLease;
    type Sending = <HostLink as Link>::Sending;
    type Receiving = <HostLink as Link>::Receiving;

    fn capabilities(&self) -> Capabilities {
        self.link.capabilities()
    }
    fn bell(&self) -> &Bell {
        self.link.bell()
    }
    fn try_lease(&mut self) -> Result<Option<TxLease>, TransportError> {
        let lease = self.link.try_lease()?;
        // Looking in vain is no operation: how often that happens is chance.
        if lease.is_some() {
            self.step()?;
        }
        Ok(lease)
    }
    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<TxLease>,
    ) -> Result<Sent<Self::Sending>, Rejected<TxLease>> {
        if let Err(error) = self.step() {
            let buffer = payload;
            return Err(Rejected { buffer, error });
        }
        self.link.send(message, stamp, payload)
    }
    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        let polled = self.link.poll_frame(inbox)?;
        if polled {
            self.step()?;
        }
        Ok(polled)
    }
    fn receive(
        &mut self,
        header: &Matched<'_>,
    ) -> Result<InFlight<Self::Receiving>, TransportError> {
        let receive = self.link.receive(header)?;
        self.step()?;
        Ok(receive)
    }
}

fn died() -> Fault {
    Fault::new(FaultKind::PeerDied, PHASE_B, "watch", "it was killed")
}

fn broken() -> TransportError {
    TransportError::Aborted {
        what: "the link".into(),
        why: "this test wants it".into(),
    }
}

/// Where each generation breaks: operations that Phase B, and the front, still do.
#[derive(Clone, Copy, Debug)]
struct Life {
    phase_b: usize,
    front: usize,
}

const WHOLE: Life = Life {
    phase_b: usize::MAX,
    front: usize::MAX,
};

struct End {
    result: Result<FrontSummary, Fault>,
    stages: Front,
    /// Operations of the first Phase B, and of the front over its first link.
    done: (usize, usize),
}

/// Runs a front over one Phase B after the other; the last one lives.
fn run(cuts: &[Cut], depth: u32, restarts: u32, lives: &[Life]) -> End {
    let mut stages = Front::new(cuts);
    let options = FrontOptions {
        restarts,
        context_chunks: CONTEXT_CHUNKS,
        ..FrontOptions::new(PHASE_B, depth)
    };
    let edge = |depth| EdgeShape {
        depth,
        slot_bytes: 512,
    };
    let bell = Bell::new().unwrap();
    let counts: Vec<_> = (0..lives.len())
        .map(|_| <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default())
        .collect();
    let mut front = FrontRun::new(&mut stages, options);
    let mut result = Err(died());
    for (life, (phase_b_done, front_done)) in lives.iter().zip(&counts) {
        let (up, down) = (edge(options.forward_slots()), edge(depth));
        let (front_link, back_link) = HostLink::pair(up, down, bell.clone()).unwrap();
        let switch = Switch::new(FRONT, bell.clone()).unwrap();
        let back_switch = Switch::new(PHASE_B, back_link.bell().clone()).unwrap();
        let driven = std::thread::scope(|scope| {
            let phase_b = scope.spawn(|| {
                let link = Fails {
                    link: ManuallyDrop::new(back_link),
                    left: life.phase_b,
                    done: Arc::clone(phase_b_done),
                    at_the_end: Box::new(broken),
                };
                let mut mixer = Mixer::default();
                let result = run_phase_b(link, &mut mixer, &back_switch, FRONT, depth);
                // What the watch thread of the front would say.
                if let Err(fault) = result {
                    let own = fault.operation.as_str() == "phase_b";
                    switch.raise(if own { fault } else { died() });
                }
            });
            let seen = switch.clone();
            let gone = move || {
                seen.raise(died());
                broken()
            };
            let link = Fails {
                link: ManuallyDrop::new(front_link),
                left: life.front,
                done: Arc::clone(front_done),
                at_the_end: Box::new(gone),
            };
            let driven = front.drive(link, &switch);
            if driven != Ok(Driven::Finished) {
                back_switch.raise(died());
            }
            phase_b.join().unwrap();
            driven
        });
        match driven {
            Ok(Driven::Lost(fault)) => assert_eq!(fault, died()),
            Ok(Driven::Finished) => {
                result = Ok(front.finish());
                break;
            }
            Err(fault) => {
                drop(front);
                result = Err(fault);
                break;
            }
        }
    }
    let (phase_b, front) = &counts[0];
    End {
        result,
        stages,
        done: (
            phase_b.load(Ordering::Relaxed),
            front.load(Ordering::Relaxed),
        ),
    }
}

/// What was emitted is right and in order, and what is missing was overtaken by a hard cut.
fn check(end: &End, cuts: &[Cut], lives: &[Life]) {
    let summary = end.result.as_ref().unwrap_or_else(|fault| {
        panic!("{lives:?}: {fault}");
    });
    let expected = expected(cuts);
    for (chunk, frames) in &end.stages.emitted {
        assert_eq!(
            frames, &expected[*chunk as usize],
            "{lives:?}: chunk {chunk}"
        );
    }
    let mut chunks: Vec<u64> = end.stages.emitted.iter().map(|(chunk, _)| *chunk).collect();
    assert!(chunks.is_sorted(), "{lives:?}: {chunks:?}");
    chunks.extend(&end.stages.forgotten);
    chunks.sort_unstable();
    let all: Vec<u64> = (0..cuts.len() as u64).collect();
    assert_eq!(chunks, all, "{lives:?}: lost or doubled");
    if !cuts.contains(&Cut::Hard) {
        assert_eq!(end.stages.forgotten, [0; 0], "{lives:?}");
    }
    assert_eq!(summary.counts.emitted, end.stages.emitted.len() as u64);
    assert!(summary.counts.max_in_flight <= 4);
}

const SIX: [Cut; 6] = [Cut::None; 6];

#[test]
fn a_phase_b_that_dies_at_any_point_changes_nothing() {
    for depth in [1, 2, 4] {
        let undisturbed = run(&SIX, depth, 1, &[WHOLE]);
        check(&undisturbed, &SIX, &[WHOLE]);
        let (of_phase_b, of_front) = undisturbed.done;
        assert!(of_phase_b > 18 && of_front > 18, "{of_phase_b} {of_front}");
        // In the last place nothing breaks.
        for phase_b in 0..of_phase_b {
            let lives = [Life { phase_b, ..WHOLE }, WHOLE];
            check(&run(&SIX, depth, 1, &lives), &SIX, &lives);
        }
        for front in 0..of_front {
            let lives = [Life { front, ..WHOLE }, WHOLE];
            check(&run(&SIX, depth, 1, &lives), &SIX, &lives);
        }
    }
}

#[test]
fn so_does_a_second_death_at_any_point() {
    let depth = 2;
    let (of_phase_b, _) = run(&SIX, depth, 1, &[WHOLE]).done;
    for first in 0..of_phase_b {
        for second in 0..8 {
            let life = |phase_b| Life { phase_b, ..WHOLE };
            let lives = [life(first), life(second), WHOLE];
            check(&run(&SIX, depth, 2, &lives), &SIX, &lives);
            let front = |front| Life { front, ..WHOLE };
            let lives = [life(first), front(second), WHOLE];
            check(&run(&SIX, depth, 2, &lives), &SIX, &lives);
        }
    }
}

#[test]
fn cuts_and_deaths_get_along() {
    for cut in [Cut::Flush, Cut::Hard] {
        let mut cuts = SIX;
        cuts[3] = cut;
        let (of_phase_b, of_front) = run(&cuts, 3, 1, &[WHOLE]).done;
        for phase_b in 0..of_phase_b {
            let lives = [Life { phase_b, ..WHOLE }, WHOLE];
            check(&run(&cuts, 3, 1, &lives), &cuts, &lives);
        }
        for front in 0..of_front {
            let lives = [Life { front, ..WHOLE }, WHOLE];
            check(&run(&cuts, 3, 1, &lives), &cuts, &lives);
        }
    }
}

#[test]
fn without_restarts_a_death_ends_the_run() {
    let life = Life {
        phase_b: 9,
        ..WHOLE
    };
    let end = run(&SIX, 2, 0, &[life, WHOLE]);
    assert_eq!(end.result.unwrap_err(), died());
    assert_eq!(end.stages.rebuilt, 0);
}

#[test]
fn restarts_are_used_up_one_by_one() {
    let life = Life {
        phase_b: 5,
        ..WHOLE
    };
    let lives = [life, life, life, WHOLE];
    let end = run(&SIX, 2, 3, &lives);
    check(&end, &SIX, &lives);
    let summary = end.result.unwrap();
    assert_eq!(summary.restarts.len(), 3);
    for restart in &summary.restarts {
        assert_eq!(restart.fault, died());
        assert!(restart.sent_ns.unwrap() >= restart.lost_ns);
        assert!((1..=2).contains(&restart.sent_again), "{restart:?}");
    }
    let end = run(&SIX, 2, 2, &lives);
    assert_eq!(end.result.unwrap_err(), died());
}

#[test]
fn what_would_happen_again_is_no_reason_to_start_again() {
    // A Phase B that is told to go on where it never began: a fault of ours, not a death.
    for kind in [
        FaultKind::Plugin,
        FaultKind::BadInput,
        FaultKind::PeerMisbehaved,
        FaultKind::Interrupted,
        FaultKind::HandshakeMismatch,
        FaultKind::Internal,
    ] {
        let fault = Fault::new(kind, PHASE_B, "phase_b", "again and again");
        assert_eq!(drive_with(&fault), Err(fault));
    }
    for rank in [FRONT, PHASE_B] {
        for kind in [FaultKind::PeerDied, FaultKind::TimedOut, FaultKind::Device] {
            let fault = Fault::new(kind, rank, "watch", "gone");
            let driven = drive_with(&fault);
            if rank == PHASE_B {
                assert_eq!(driven, Ok(Driven::Lost(fault)));
            } else {
                assert_eq!(driven, Err(fault));
            }
        }
    }
}

/// One chunk, and this fault before anything is answered.
fn drive_with(fault: &Fault) -> Result<Driven, Fault> {
    let mut stages = Front::new(&[Cut::None]);
    let edge = EdgeShape {
        depth: 3,
        slot_bytes: 512,
    };
    let bell = Bell::new().unwrap();
    let (link, _back) = HostLink::pair(edge, edge, bell.clone()).unwrap();
    let switch = Switch::new(FRONT, bell).unwrap();
    let options = FrontOptions {
        restarts: 1,
        context_chunks: CONTEXT_CHUNKS,
        ..FrontOptions::new(PHASE_B, 1)
    };
    switch.raise(fault.clone());
    FrontRun::new(&mut stages, options).drive(link, &switch)
}

#[test]
fn a_link_that_fails_first_waits_for_the_verdict_on_its_peer() {
    let mut stages = Front::new(&SIX);
    let edge = EdgeShape {
        depth: 3,
        slot_bytes: 512,
    };
    let bell = Bell::new().unwrap();
    let (link, _back) = HostLink::pair(edge, edge, bell.clone()).unwrap();
    let switch = Switch::new(FRONT, bell).unwrap();
    let options = FrontOptions {
        restarts: 1,
        context_chunks: CONTEXT_CHUNKS,
        ..FrontOptions::new(PHASE_B, 1)
    };
    let late = || TransportError::NotInTime {
        what: "the link".into(),
        step: "poll",
        after: Duration::from_secs(1),
    };
    let link = Fails {
        link: ManuallyDrop::new(link),
        left: 1,
        done: Arc::default(),
        at_the_end: Box::new(late),
    };
    let mut front = FrontRun::new(&mut stages, options);
    let driven = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            switch.raise(died());
        });
        front.drive(link, &switch)
    });
    assert_eq!(driven, Ok(Driven::Lost(died())));
}

#[test]
fn a_death_after_the_last_chunk_was_emitted_ends_the_run_well() {
    let (of_phase_b, _) = run(&SIX, 2, 1, &[WHOLE]).done;
    // Its last operation is the answer to the goodbye.
    let life = Life {
        phase_b: of_phase_b - 1,
        ..WHOLE
    };
    let end = run(&SIX, 2, 1, &[life]);
    check(&end, &SIX, &[life]);
    assert_eq!(end.result.unwrap().restarts, []);
}

#[test]
fn a_drain_that_was_asked_for_before_the_death_is_still_one_after_it() {
    let cuts = [Cut::None; 200];
    let mut stages = Front::new(&cuts);
    let options = FrontOptions {
        restarts: 1,
        context_chunks: CONTEXT_CHUNKS,
        ..FrontOptions::new(PHASE_B, 2)
    };
    let bell = Bell::new().unwrap();
    let edge = |depth| EdgeShape {
        depth,
        slot_bytes: 512,
    };
    let pair = || HostLink::pair(edge(4), edge(2), bell.clone()).unwrap();
    let mut front = FrontRun::new(&mut stages, options);
    let (link, back) = pair();
    let switch = Switch::new(FRONT, bell.clone()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let back_switch = Switch::new(PHASE_B, back.bell().clone()).unwrap();
            let link = Fails {
                link: ManuallyDrop::new(back),
                left: 20,
                done: Arc::default(),
                at_the_end: Box::new(broken),
            };
            let died_of = run_phase_b(link, &mut Mixer::default(), &back_switch, FRONT, 2);
            died_of.unwrap_err();
            switch.request_drain();
            switch.raise(died());
        });
        assert_eq!(front.drive(link, &switch), Ok(Driven::Lost(died())));
    });
    let (link, back) = pair();
    let switch = Switch::new(FRONT, bell.clone()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let back_switch = Switch::new(PHASE_B, back.bell().clone()).unwrap();
            run_phase_b(back, &mut Mixer::default(), &back_switch, FRONT, 2).unwrap();
        });
        assert_eq!(front.drive(link, &switch), Ok(Driven::Finished));
    });
    let counts = front.finish().counts;
    assert!(counts.admitted < 200 && counts.emitted == counts.admitted);
    assert_eq!(stages.emitted.len() as u64, counts.admitted);
}
