//! Stages that count, and all ranks of a pipeline on them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use pp_contract::{Fault, FaultKind, Pipeline, Rank};
use pp_runtime::core::{Cut, LiveOptions};
use pp_runtime::driver::{BoxedStage, Stages, Summary};
use pp_runtime::stage::{
    Built, Chunk, Done, GroupStage, Offer, Place, Progress, Sink, Source, Stage, StageError,
    StageResult, Taken,
};
use pp_runtime::switch::Switch;
use pp_testing::{Toy, bytes, done, options, run_ranks};
use pp_transport::edge::GroupEnd as _;
use pp_transport::host::{HostGroup, RxLease, TxLease};

pub(crate) const BYTES: usize = 1000;
/// What a stage adds to every byte: the plan's number.
const ADDED: u64 = 7;

/// Works for as long as it is asked three times, and counts how much it had to do at once.
#[derive(Default)]
struct Device {
    at_work: usize,
    asked: u32,
    most: usize,
}

impl Device {
    fn begin<T>(&mut self, work: T) -> Progress<T, T> {
        self.at_work += 1;
        self.most = self.most.max(self.at_work);
        Progress::UnderWay(work)
    }

    /// The same, but some work is done at once, also while there is other work.
    fn begin_or_do<T>(&mut self, work: T, chunk: u64) -> Progress<T, T> {
        match chunk % 5 {
            4 => Progress::Done(work),
            _ => self.begin(work),
        }
    }

    fn poll<T>(&mut self, work: T) -> Progress<T, T> {
        self.asked += 1;
        if !self.asked.is_multiple_of(3) {
            return Progress::UnderWay(work);
        }
        self.at_work -= 1;
        Progress::Done(work)
    }
}

/// What a test wants of the stages.
#[derive(Default)]
pub(crate) struct Play {
    pub(crate) cuts: Vec<Cut>,
    /// The stages only give work to a device.
    pub(crate) on_devices: bool,
    pub(crate) live: LiveOptions,
    /// The source says when the frames of a chunk were read: chunk `n` from `n` to `n + 1` ns.
    pub(crate) tells_reads: bool,
    /// The first stage fails at this chunk.
    pub(crate) fails_at: Option<u64>,
    /// It says that it made a call more than planned.
    pub(crate) lies_about_calls: bool,
    pub(crate) sink_fails_at: Option<u64>,
    /// Taken before the first chunk is taken: the test decides when the sink may go on.
    pub(crate) gate: Mutex<Option<mpsc::Receiver<()>>>,
    /// The sink takes nothing before all chunks wait before it and the test says so.
    pub(crate) hold: Mutex<Option<Hold>>,
    /// Done by the sink when nothing more comes.
    pub(crate) at_the_end: Option<fn()>,
}

impl Play {
    pub(crate) fn chunks(chunks: usize) -> Self {
        Self {
            cuts: vec![Cut::None; chunks],
            ..Self::default()
        }
    }

    /// With a sink that waits for what the second value sends.
    pub(crate) fn gated(chunks: usize) -> (Self, mpsc::Sender<()>) {
        let (open, gate) = mpsc::channel();
        let play = Self {
            gate: Mutex::new(Some(gate)),
            ..Self::chunks(chunks)
        };
        (play, open)
    }
}

/// Holds a sink back that needs no other rank any more.
pub(crate) struct Hold {
    /// Told when all chunks are here.
    served: mpsc::Sender<()>,
    /// Taken from the moment on at which the sink is to go on.
    go_on: mpsc::Receiver<()>,
    is_served: Arc<AtomicBool>,
}

impl Hold {
    /// With what the test hears, and what it says.
    pub(crate) fn new() -> (Self, mpsc::Receiver<()>, mpsc::Sender<()>) {
        let ((served, is_served), (say, go_on)) = (mpsc::channel(), mpsc::channel());
        let hold = Self {
            served,
            go_on,
            is_served: Arc::default(),
        };
        (hold, is_served, say)
    }
}

/// What came of it.
#[derive(Default)]
struct Seen {
    /// What the sink took: chunk, and the value of all its bytes.
    taken: Vec<(u64, u8)>,
    /// The source was told that the sink has these.
    accepted: Vec<u64>,
    /// So many of them before the device of the source was done.
    accepted_early: usize,
    /// The most works that each device had at once.
    most: Vec<usize>,
    /// How long the leader of a group waited for the other member, by chunk.
    waited_us: Vec<u64>,
    /// The sink has stored all.
    is_stored: bool,
    /// The sink had stored all when rank 0 was done.
    was_stored: bool,
}

/// Sends chunk `n` as bytes of value `n`, with these cuts.
struct Counting<'a> {
    play: &'a Play,
    seen: &'a Mutex<Seen>,
    offered: usize,
    device: Device,
    /// The chunk that its device works on.
    building: u64,
}

impl Source<TxLease> for Counting<'_> {
    type Plan = Toy;
    /// The chunk's own index, and whether a device works on it.
    type Carry = (u64, Option<Progress<(), ()>>);

    fn poll(&mut self) -> StageResult<Offer> {
        let cut = self.play.cuts.get(self.offered).copied();
        Ok(cut.map_or(Offer::End, Offer::Chunk))
    }

    fn is_built(&mut self, (chunk, work): &mut Self::Carry) -> StageResult<bool> {
        Progress::ask(work, |()| {
            assert_eq!(*chunk, self.building, "the oldest first");
            let progress = self.device.poll(());
            self.building += u64::from(progress == Progress::Done(()));
            Ok(progress)
        })
    }

    fn build(&mut self, place: Place, slot: &mut TxLease) -> StageResult<Built<Toy, Self::Carry>> {
        let chunk = place.chunk.get();
        self.offered += 1;
        // Every third chunk is shorter, every seventh empty.
        let bytes = match chunk {
            n if n % 7 == 3 => 0,
            n if n % 3 == 2 => BYTES / 2,
            _ => BYTES,
        };
        slot.bytes_mut()[..bytes].fill(chunk as u8);
        let work = self.play.on_devices.then(|| self.device.begin(()));
        Ok(Built {
            read_ns: self.play.tells_reads.then_some((chunk, chunk + 1)),
            ..Built::new(Toy(ADDED), self::bytes(bytes), (chunk, work))
        })
    }

    fn accepted(
        &mut self,
        chunk: pp_contract::ChunkIndex,
        (carry, work): Self::Carry,
        note: Option<&[u8]>,
    ) -> StageResult<Option<u64>> {
        assert_eq!(carry, chunk.get());
        if work == Some(Progress::UnderWay(())) {
            self.building += 1;
            self.seen.lock().unwrap().accepted_early += 1;
        }
        if let Some(note) = note {
            assert_eq!(note, chunk.get().to_le_bytes());
            self.seen.lock().unwrap().accepted.push(carry);
        }
        Ok(None)
    }
}

impl Drop for Counting<'_> {
    fn drop(&mut self) {
        let seen = &mut *self.seen.lock().unwrap();
        seen.was_stored = seen.is_stored;
    }
}

/// Adds to every byte.
struct Adder<'a> {
    play: &'a Play,
    seen: &'a Mutex<Seen>,
    /// It does what the test wants of the first one.
    is_first: bool,
    device: Device,
}

impl Stage<TxLease, RxLease> for Adder<'_> {
    type Plan = Toy;
    type Kept = Done;

    fn run(
        &mut self,
        chunk: Chunk<'_, Toy>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> StageResult<Progress<Done, Done>> {
        if self.is_first && self.play.fails_at == Some(chunk.place.chunk.get()) {
            let (kind, text) = (FaultKind::Plugin, "kernel exploded\nat line 7");
            return Err(StageError::new(kind, "add", text));
        }
        let input = input.map_or(&[][..], RxLease::bytes);
        for (out, byte) in output.bytes_mut().iter_mut().zip(input) {
            *out = byte.wrapping_add(chunk.message.plan().0 as u8);
        }
        let mut done = done(chunk.message, bytes(input.len()));
        done.report.calls += u32::from(self.is_first && self.play.lies_about_calls);
        Ok(match self.play.on_devices {
            true => self.device.begin_or_do(done, chunk.place.chunk.get()),
            false => Progress::Done(done),
        })
    }

    fn poll(&mut self, oldest: Done) -> StageResult<Progress<Done, Done>> {
        Ok(self.device.poll(oldest))
    }

    fn finish(&mut self) -> StageResult<()> {
        self.seen.lock().unwrap().most.push(self.device.most);
        Ok(())
    }
}

/// A member of a group of two: the leader waits for the other and adds to every byte, and the other is done only after the
/// leader.
struct Member<'a> {
    seen: &'a Mutex<Seen>,
    led: &'a mpsc::Sender<()>,
    hears: &'a Mutex<mpsc::Receiver<()>>,
}

impl GroupStage<TxLease, RxLease, HostGroup> for Member<'_> {
    type Plan = Toy;
    type Kept = Done;

    fn run(
        &mut self,
        chunk: Chunk<'_, Toy>,
        input: Option<&RxLease>,
        output: Option<&mut TxLease>,
        group: &mut HostGroup,
    ) -> StageResult<Progress<Done, Done>> {
        let size = chunk.message.tensors().payload_bytes() as usize;
        let done = done(chunk.message, bytes(size));
        if output.is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let before_ns = group.waited_ns();
        group.barrier()?;
        let Some(output) = output else {
            self.hears.lock().unwrap().recv().unwrap();
            return Ok(Progress::Done(done));
        };
        let waited_us = (group.waited_ns() - before_ns) / 1_000;
        self.seen.lock().unwrap().waited_us.push(waited_us);
        let input = input.map_or(&[][..], RxLease::bytes);
        for (out, byte) in output.bytes_mut().iter_mut().zip(input) {
            *out = byte.wrapping_add(chunk.message.plan().0 as u8);
        }
        Ok(Progress::UnderWay(done))
    }

    fn poll(&mut self, oldest: Done) -> StageResult<Progress<Done, Done>> {
        self.led.send(()).unwrap();
        Ok(Progress::Done(oldest))
    }
}

/// Keeps what comes.
struct Collecting<'a> {
    pipeline: &'a Pipeline,
    play: &'a Play,
    seen: &'a Mutex<Seen>,
    device: Device,
}

impl Sink<RxLease> for Collecting<'_> {
    type Plan = Toy;
    type Kept = Taken;

    fn is_ready(&mut self, _: usize) -> StageResult<bool> {
        let mut hold = self.play.hold.lock().unwrap();
        hold.take_if(|hold| hold.is_served.load(Ordering::SeqCst) && hold.go_on.try_recv().is_ok());
        Ok(hold.is_none())
    }

    fn take(
        &mut self,
        chunk: Chunk<'_, Toy>,
        input: Option<&RxLease>,
    ) -> StageResult<Progress<Taken, Taken>> {
        let (index, plan) = (chunk.place.chunk.get(), chunk.message.plan());
        let gate = self.play.gate.lock().unwrap().take();
        if let Some(gate) = gate {
            gate.recv().unwrap();
        }
        if self.play.sink_fails_at == Some(index) {
            return Err(StageError::new(FaultKind::Io, "write output", "disk full"));
        }
        let trail = chunk.message.trail();
        let stages = 1..self.pipeline.stages().len() - 1;
        let worked: u32 = stages.map(|at| trail.of(self.pipeline, at)[0].calls).sum();
        let expected = index as u8 + (worked as u64 * ADDED) as u8;
        let bytes = input.map_or(&[][..], RxLease::bytes);
        let value = bytes.first().copied().unwrap_or(expected);
        assert!(bytes.iter().all(|byte| *byte == value));
        self.seen.lock().unwrap().taken.push((index, value));
        let taken = Taken {
            note: index.to_le_bytes().into(),
            ..Taken::of(plan, 1)
        };
        Ok(match self.play.on_devices {
            true => self.device.begin_or_do(taken, index),
            false => Progress::Done(taken),
        })
    }

    fn poll(&mut self, oldest: Taken) -> StageResult<Progress<Taken, Taken>> {
        Ok(self.device.poll(oldest))
    }

    fn finish(&mut self) -> StageResult<()> {
        if let Some(act) = self.play.at_the_end {
            act();
        }
        let mut seen = self.seen.lock().unwrap();
        seen.most.push(self.device.most);
        seen.is_stored = true;
        Ok(())
    }
}

pub(crate) struct Ends {
    pub(crate) ranks: Vec<Result<Summary, Fault>>,
    pub(crate) taken: Vec<(u64, u8)>,
    pub(crate) accepted: Vec<u64>,
    pub(crate) accepted_early: usize,
    pub(crate) most: Vec<usize>,
    pub(crate) waited_us: Vec<u64>,
    pub(crate) was_stored: bool,
}

impl Ends {
    /// What rank 0 has to tell of a run in which no rank failed.
    pub(crate) fn summary(&self) -> &Summary {
        for ended in &self.ranks {
            assert!(ended.is_ok(), "{ended:?}");
        }
        self.ranks[0].as_ref().unwrap()
    }

    /// Asserts that the sink took all of so many chunks once and in order, after so many stages.
    pub(crate) fn assert_all(&self, chunks: u64, stages: u64) {
        let value = |n: u64| n.wrapping_add(stages * ADDED) as u8;
        let expected: Vec<_> = (0..chunks).map(|n| (n, value(n))).collect();
        assert_eq!(self.taken, expected);
        assert_eq!(self.accepted, Vec::from_iter(0..chunks));
        let counts = self.summary().counts;
        let all = (counts.admitted, counts.emitted, counts.dropped);
        assert_eq!(all, (chunks, chunks, 0));
        assert!(
            self.was_stored,
            "rank 0 left before the sink had stored all"
        );
    }
}

/// Runs all ranks; `meanwhile` gets their switches.
pub(crate) fn run(
    pipeline: &str,
    depth: u32,
    play: Play,
    meanwhile: impl FnOnce(&[Switch]) + Send,
) -> Ends {
    let mut options = options(pipeline, depth);
    options.capabilities.completions_ring = !play.on_devices;
    options.live = play.live;
    let seen = Mutex::new(Seen::default());
    let pipeline = &options.pipeline;
    let (led, hears) = mpsc::channel();
    let hears = Mutex::new(hears);
    let stages = |rank: Rank| {
        let source = Counting {
            play: &play,
            seen: &seen,
            offered: 0,
            device: Device::default(),
            building: 0,
        };
        let mut stages = Stages::new((rank == Rank::new(0)).then_some(source));
        for (at, stage) in pipeline.stages_at(rank).filter(|(at, _)| *at > 0) {
            if stage.ranks.len() > 1 {
                let (led, hears, seen) = (&led, &hears, &seen);
                stages.push(BoxedStage::member(Member { seen, led, hears }));
                continue;
            }
            stages.push(match at + 1 == pipeline.stages().len() {
                true => BoxedStage::sink(Collecting {
                    pipeline,
                    play: &play,
                    seen: &seen,
                    device: Device::default(),
                }),
                false => BoxedStage::new(Adder {
                    play: &play,
                    seen: &seen,
                    is_first: at == 1,
                    device: Device::default(),
                }),
            });
        }
        stages
    };
    let ranks = run_ranks(&options, BYTES as u64, stages, |switches| {
        if let Some(hold) = &*play.hold.lock().unwrap() {
            let (is_served, served) = (Arc::clone(&hold.is_served), hold.served.clone());
            let tell = move || {
                is_served.store(true, Ordering::SeqCst);
                let _ = served.send(());
            };
            switches[0].when_served(tell.clone());
            // It may have been so before: the ranks run already.
            if switches[0].is_served() {
                tell();
            }
        }
        meanwhile(switches);
    });
    let seen = seen.into_inner().unwrap();
    Ends {
        ranks,
        taken: seen.taken,
        accepted: seen.accepted,
        accepted_early: seen.accepted_early,
        most: seen.most,
        waited_us: seen.waited_us,
        was_stored: seen.was_stored,
    }
}
