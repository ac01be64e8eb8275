//! The real transport on the fakes: a rank that sends payloads, a second rank that answers each with a copy, each on a
//! thread of its own, and on a device of its own or one of them in host memory, in a process that is started for one case.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pp_contract::{Composer, Lockstep};
use pp_device::{Device, DeviceBuffer, Event, PinnedBuffer, Stream};
use pp_testing::{Barrier, Folder, number, prepare, until};
use pp_transport::backend::Backend;
use pp_transport::edge::{EdgeTx as _, Edges};
use pp_transport::error::TransportError;
use pp_transport::gpu::{DeviceRx, DeviceTx};
use pp_transport::gpu_backend::{GpuBackend, GpuTransport};
use pp_transport::host::{EdgeShape, Host};
use pp_transport::in_flight::{Completion, InFlight, Submission};
use pp_transport::launch::Via;
use pp_transport::nccl::{Nccl, NcclBackend};
use rustix::time::{ClockId, clock_gettime};

use crate::edges_support::{Meeting, Peer};
use crate::host::OnHost;
use crate::lifetimes::{self, Cut};
use crate::two_way::{TwoWay, by_backend, edge_ends};
use pp_fakes::Fakes;
use pp_fakes::check::Recording;
use pp_fakes::raw::TestKernels;

/// A job that does not end is a failure, not a hang of the tests.
pub(crate) const STUCK: Duration = Duration::from_secs(60);
/// One that was spoiled may well not end. The first is time of the processor, of which a machine that is busy gives less;
/// the second is for those that sleep.
const SPOILED: Duration = Duration::from_secs(2);
const ASLEEP: Duration = Duration::from_secs(10);
/// How many generations move their payloads by copy engine.
const BY_P2P: &str = "PP_ORDER_P2P";
/// The faults of the fakes, which count calls from the beginning of the run.
const FAULTS: &str = "PP_ORDER_FAULTS";
pub(crate) const LARGEST: usize = 20_000;

/// What a job is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) chunks: u64,
    pub(crate) depth: u32,
    pub(crate) seed: u64,
    /// Bytes that a send leaves behind without a receiver; payloads have up to 20,000.
    pub(crate) eager: u64,
    pub(crate) blocking: bool,
    /// By copy engine, and not by NCCL: so many generations, one after the other.
    pub(crate) p2p: Option<usize>,
    /// This rank is in host memory, beside the other one on a device.
    pub(crate) host: Option<u32>,
    /// The generation does not come to its end.
    pub(crate) cut: Option<Cut>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} {} {} {}",
            self.chunks,
            self.depth,
            u8::from(self.blocking),
            self.cut.map_or(0, |cut| 1 + cut as u8),
            self.host.map_or(0, |rank| 1 + rank)
        )
    }
}

/// What came of a job.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) recordings: Vec<Recording>,
    /// It came to its end, and every byte was right.
    pub(crate) is_right: bool,
    pub(crate) said: String,
}

/// Payloads of all kinds: empty ones, small ones, ones beyond every eager limit tried here.
fn bytes_of(n: u64) -> usize {
    match n % 5 {
        0 => 2 + (n as usize * 7919) % 300,
        3 => 0,
        4 => LARGEST,
        _ => 2 + (n as usize * 7919) % (LARGEST - 2),
    }
}

/// Runs a job in a process of its own, with faults of the fakes.
pub(crate) fn run(case: Case, faults: &str) -> Outcome {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "job::child",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env("PP_ORDER_CASE", case.to_string())
        .env("PP_FAKE_NCCL_EAGER", case.eager.to_string())
        .env("PP_FAKE_SEED", case.seed.to_string())
        .env("PP_FAKE_NCCL_ABORT_MS", "0")
        .env(FAULTS, faults);
    if let Some(generations) = case.p2p {
        command.env(BY_P2P, generations.to_string());
        command.env("PP_FAKE_WATCH", if case.host.is_some() { "2" } else { "1" });
    }
    record(&mut command)
}

/// Runs a process on the fakes, and gives what it recorded.
pub(crate) fn record(command: &mut Command) -> Outcome {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder = Folder::new(env!("CARGO_TARGET_TMPDIR"), &format!("order-{next}"));
    command
        .env("PP_FAKE_RECORD", folder.path())
        .env("PP_FAKE_GATE", folder.path().join("gate"))
        .env("PP_FAKE_NCCL_DIR", folder.path());
    let output = Fakes::newest().give_to(command).output().unwrap();
    Outcome {
        recordings: Recording::read_all(folder.path()),
        is_right: output.status.success(),
        said: String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
    }
}

/// Ends this process when its job does not end.
pub(crate) fn end_when_stuck(is_spoiled: bool) {
    let began = Instant::now();
    let used = || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap();
    let patience = if is_spoiled { ASLEEP } else { STUCK };
    thread::spawn(move || {
        while began.elapsed() < patience && !(is_spoiled && used() > SPOILED) {
            thread::sleep(Duration::from_millis(20));
        }
        eprintln!("stuck");
        std::process::exit(3);
    });
}

/// The process of a job; not a test by itself.
#[test]
#[ignore = "the process that the other tests start"]
fn child() {
    let case = std::env::var("PP_ORDER_CASE").expect("started by the other tests");
    let numbers: Vec<u64> = case.split(' ').map(|word| word.parse().unwrap()).collect();
    let [chunks, depth, blocking, cut, host] = numbers[..] else {
        panic!("{case}");
    };
    let cut = [None, Some(Cut::AtWork), Some(Cut::AtPanic)][cut as usize];
    let faults = std::env::var(FAULTS).unwrap();
    end_when_stuck(!faults.is_empty());
    Fakes::newest().load();
    let shape = EdgeShape {
        depth: depth as u32,
        slot_bytes: LARGEST as u64,
    };
    if cut.is_some() {
        std::fs::write(gate(), []).unwrap();
    }
    let job = Job::new(chunks, cut, (host as u32).checked_sub(1));
    let wrong = match std::env::var(BY_P2P) {
        Ok(generations) => job.over(shape, generations.parse().unwrap(), |device| {
            GpuBackend::new(NcclBackend::alone(device), GpuTransport::P2p, |_| {})
        }),
        Err(_) => job.over(shape, 1, |device| {
            let mut backend = NcclBackend::new(device, Nccl::load().unwrap());
            backend.blocking = blocking == 1;
            backend
        }),
    };
    assert_eq!(wrong, 0, "bytes are wrong");
}

/// Where work waits for the end of a generation that is cut.
fn gate() -> std::ffi::OsString {
    std::env::var_os("PP_FAKE_GATE").expect("started by the other tests")
}

/// What both ranks of a process have.
struct Job {
    chunks: u64,
    cut: Option<Cut>,
    host: Option<u32>,
    connected: Barrier,
    finished: Barrier,
    busy: AtomicU32,
}

impl Job {
    fn new(chunks: u64, cut: Option<Cut>, host: Option<u32>) -> Self {
        Self {
            chunks,
            cut,
            host,
            connected: Barrier::new(2),
            finished: Barrier::new(2),
            busy: AtomicU32::new(2),
        }
    }

    /// Runs both ranks; how many bytes were wrong.
    fn ranks<L: Send>(&self, links: [L; 2], run: impl Fn(u32, L) -> u64 + Sync) -> u64 {
        thread::scope(|scope| {
            let run = &run;
            let ranks = (0..).zip(links);
            let ranks = ranks.map(|(rank, link)| scope.spawn(move || run(rank, link)));
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).sum()
        })
    }

    /// Makes generations one after the other, and does in each what a rank does.
    fn over<B: Backend<Tx = DeviceTx, Rx = DeviceRx>>(
        &self,
        shape: EdgeShape,
        generations: usize,
        backend: impl Fn(Device) -> B + Sync,
    ) -> u64 {
        let meetings = std::iter::repeat_with(|| Meeting::of_two(Via::Unix));
        let (low, high): (Vec<_>, Vec<_>) = meetings.take(generations).map(Into::into).unzip();
        self.ranks([low, high], |rank, peers| {
            let peers = peers.into_iter();
            if self.host == Some(rank) {
                return self.each(rank, peers, shape, &mut Host, &OnHost::default());
            }
            let stage = Stage::new(rank);
            let peers = peers.map(|peer| peer.beside(self.host.is_none()));
            let mut backend = backend(stage.device.clone());
            self.each(rank, peers, shape, &mut backend, &stage)
        })
    }

    /// Does in each generation what a rank does.
    fn each<B: Backend>(
        &self,
        rank: u32,
        peers: impl Iterator<Item = Peer>,
        shape: EdgeShape,
        backend: &mut B,
        stage: &impl Computes<B>,
    ) -> u64 {
        let one = |mut peer| {
            let ends = edge_ends(shape, shape, rank == 0);
            let link = by_backend(backend, &mut peer, ends);
            self.run(rank, link, stage)
        };
        peers.map(one).sum()
    }

    /// Does what a rank does, from its first send to its last; how many bytes were wrong.
    fn run<B: Edges>(&self, rank: u32, mut link: TwoWay<B>, stage: &impl Computes<B>) -> u64 {
        let loaded = Fakes::newest().load();
        if self.connected.wait() {
            loaded.note("Mark name=run");
            loaded.set("FAULTS", &std::env::var(FAULTS).unwrap());
        }
        self.connected.wait();
        if let Some(cut) = self.cut {
            lifetimes::leave(rank, link, stage, cut, &self.finished);
            // Once both have left, the work begins.
            if self.connected.wait() {
                std::fs::remove_file(gate()).unwrap();
            }
            stage.wait_until_freed(cut);
            if self.finished.wait() {
                loaded.note("Mark name=end");
            }
            self.finished.wait();
            return stage.wrong();
        }
        if rank == 0 {
            rank_0(&mut link, stage, self.chunks).unwrap();
        } else {
            answer(&mut link, stage, self.chunks).unwrap();
        }
        // A slot whose reader was not done when it was let go goes back in a later call.
        self.busy.fetch_sub(1, Ordering::Relaxed);
        while self.busy.load(Ordering::Relaxed) > 0 {
            assert!(!link.poll_frame(&mut Vec::new()).unwrap());
            thread::yield_now();
        }
        if self.finished.wait() {
            loaded.note("Mark name=end");
            self.busy.store(2, Ordering::Relaxed);
        }
        self.finished.wait();
        stage.wrong()
    }
}

/// What a rank computes with, where the payloads of its edges lie.
pub(crate) trait Computes<B: Edges> {
    /// Writes payload `n`.
    fn fill(&self, slot: &mut B::Tx, bytes: usize, n: u64) -> Result<(), TransportError>;

    /// Counts the bytes that are not those of payload `n`.
    fn check(&self, payload: &B::Rx, n: u64) -> Result<(), TransportError>;

    /// Answers payload `n` with a copy of it.
    fn copy(&self, from: &B::Rx, to: &mut B::Tx, n: u64) -> Result<(), TransportError>;

    /// How many bytes were not what they should have been. After the run: waits.
    fn wrong(&self) -> u64;

    /// From now on work waits at the gate, if it can, and is cut in this way. Says whether it can.
    fn hold(&self, cut: Cut) -> bool;

    /// Waits until all is freed that a generation had, and that may be.
    fn wait_until_freed(&self, cut: Cut);
}

/// What a rank on a device computes with.
struct Stage {
    device: Device,
    kernels: TestKernels,
    /// The first fills, the second compares; answers are made on both in turn.
    streams: [Stream; 2],
    wrong: DeviceBuffer,
    /// Bytes of the device that were free before there was an edge.
    free: u64,
    held: Cell<Option<Cut>>,
}

impl Stage {
    fn new(rank: u32) -> Self {
        let device = Device::open(rank).unwrap();
        device.bind().unwrap();
        let streams = [(); 2].map(|()| Stream::new(&device).unwrap());
        let wrong = DeviceBuffer::new(&device, 8).unwrap();
        // SAFETY: the buffer lives as long as the stage, and its stream passes this first.
        unsafe { streams[1].fill(wrong.ptr(), 0).unwrap() };
        until(|| streams[1].is_idle().unwrap());
        Self {
            kernels: TestKernels::load(),
            streams,
            wrong,
            free: device.memory().unwrap().free,
            held: Cell::new(None),
            device,
        }
    }

    /// Issues work to a stream.
    fn issue(&self, on: &Stream, work: impl FnOnce(u64)) -> Result<(), TransportError> {
        let held = self.held.get();
        if held.is_some() {
            self.kernels.spin(on.raw(), u64::MAX);
        }
        work(on.raw());
        assert!(held != Some(Cut::AtPanic), "a stage panics");
        Ok(())
    }
}

impl<B: Edges<Tx = DeviceTx, Rx = DeviceRx>> Computes<B> for Stage {
    fn fill(&self, slot: &mut DeviceTx, bytes: usize, n: u64) -> Result<(), TransportError> {
        let (stream, kernels) = (&self.streams[0], &self.kernels);
        slot.write_on(stream, |to| {
            self.issue(stream, |on| kernels.fill(on, to.address, bytes, n))
        })
    }

    fn check(&self, payload: &DeviceRx, n: u64) -> Result<(), TransportError> {
        let (stream, kernels) = (&self.streams[1], &self.kernels);
        payload.read_on(stream, |from| {
            let wrong = self.wrong.address();
            self.issue(stream, |on| {
                kernels.check(on, from.address, from.len, n, wrong);
            })
        })
    }

    fn copy(&self, from: &DeviceRx, to: &mut DeviceTx, n: u64) -> Result<(), TransportError> {
        let (stream, kernels) = (&self.streams[n as usize % 2], &self.kernels);
        from.read_on(stream, |from| {
            to.write_on(stream, |to| {
                self.issue(stream, |on| {
                    kernels.copy(on, to.address, from.address, from.len);
                })
            })
        })?;
        // Before its message, and with it.
        if !n.is_multiple_of(3) {
            to.send_ahead(from.len())?;
        }
        Ok(())
    }

    fn wrong(&self) -> u64 {
        let mut count = PinnedBuffer::new(&self.device, 8).unwrap();
        let (stream, done) = (&self.streams[1], Event::new(&self.device).unwrap());
        // SAFETY: both buffers live until the event is done.
        unsafe { stream.download(self.wrong.ptr(), &mut count, 0).unwrap() };
        done.record(stream).unwrap();
        until(|| done.is_done().unwrap());
        u64::from_le_bytes(count.bytes().try_into().unwrap())
    }

    fn hold(&self, cut: Cut) -> bool {
        self.held.set(Some(cut));
        true
    }

    fn wait_until_freed(&self, cut: Cut) {
        lifetimes::wait_until_freed(&self.device, self.free, cut);
    }
}

/// Sends payloads as fast as slots allow, and compares the answers.
fn rank_0<B: Edges>(
    link: &mut TwoWay<B>,
    stage: &impl Computes<B>,
    chunks: u64,
) -> Result<(), TransportError> {
    let (mut composer, mut lockstep, mut inbox) = (Composer::new(), Lockstep::new(), Vec::new());
    let (mut sent, mut checked) = (0, 0);
    let mut sending = VecDeque::new();
    let mut receiving = VecDeque::new();
    while checked < chunks {
        let bytes = bytes_of(sent);
        let lease = if sent < chunks && bytes > 0 {
            link.try_lease()?
        } else {
            None
        };
        if sent < chunks && (bytes == 0 || lease.is_some()) {
            let payload = lease
                .map(|mut lease| {
                    stage.fill(&mut lease, bytes, sent)?;
                    Ok::<_, TransportError>(lease)
                })
                .transpose()?;
            let (message, stamp) = prepare(&mut composer, sent, bytes);
            let left = link
                .out
                .send(message, stamp, payload)
                .map_err(|rejected| rejected.error)?;
            // Both ways of letting go of a send: waiting for it, and dropping it.
            sending.extend(left.payload.filter(|_| sent % 2 == 0));
            sent += 1;
        }
        take_finished(&mut sending)?;
        receiving.extend(hear(link, &mut lockstep, &mut inbox)?);
        if let Some((n, arrived)) = take_arrived(&mut receiving)? {
            if let Some(arrived) = arrived {
                stage.check(&arrived, n)?;
            }
            checked += 1;
        }
        thread::yield_now();
    }
    while !sending.is_empty() {
        take_finished(&mut sending)?;
        thread::yield_now();
    }
    Ok(())
}

/// Answers every payload with a copy of it.
fn answer<B: Edges>(
    link: &mut TwoWay<B>,
    stage: &impl Computes<B>,
    chunks: u64,
) -> Result<(), TransportError> {
    let (mut composer, mut lockstep, mut inbox) = (Composer::new(), Lockstep::new(), Vec::new());
    let mut receiving = VecDeque::new();
    let mut waiting: Option<Arrived<B::Rx>> = None;
    let mut answered = 0;
    while answered < chunks {
        receiving.extend(hear(link, &mut lockstep, &mut inbox)?);
        if waiting.is_none() {
            waiting = take_arrived(&mut receiving)?;
        }
        let needs_slot = waiting.as_ref().is_some_and(|(_, input)| input.is_some());
        let lease = if needs_slot { link.try_lease()? } else { None };
        if waiting.is_some() && needs_slot == lease.is_some() {
            let (n, input) = waiting.take().expect("looked at just now");
            let bytes = bytes_of(n);
            let output = match (&input, lease) {
                (Some(input), Some(mut output)) => {
                    stage.copy(input, &mut output, n)?;
                    Some(output)
                }
                _ => None,
            };
            let (message, stamp) = prepare(&mut composer, n, bytes);
            drop(
                link.out
                    .send(message, stamp, output)
                    .map_err(|rejected| rejected.error)?
                    .payload,
            );
            // Not before: its drop looks whether the device has read it, and what it sees would order the send too.
            drop(input);
            answered += 1;
        }
        thread::yield_now();
    }
    Ok(())
}

/// A message, and the receive of its payload, if it has one.
pub(crate) type Announced<B> = (u64, Option<InFlight<<B as Edges>::Receiving>>);

/// The next message, if one was announced, and the receive of its payload, if it has one.
pub(crate) fn hear<B: Edges>(
    link: &mut TwoWay<B>,
    lockstep: &mut Lockstep,
    inbox: &mut Vec<u8>,
) -> Result<Option<Announced<B>>, TransportError> {
    if !link.poll_frame(inbox)? {
        return Ok(None);
    }
    let matched = lockstep.admit(inbox).expect("a frame of this test");
    let n = number(&matched);
    let flight = (bytes_of(n) > 0).then(|| link.receive(&matched));
    Ok(Some((n, flight.transpose()?)))
}

/// Lets go of the sends at the head that are done.
fn take_finished<S: Submission>(sending: &mut VecDeque<InFlight<S>>) -> Result<(), TransportError> {
    while let Some(first) = sending.pop_front() {
        match first.complete().map_err(|failed| failed.error)? {
            Completion::Done(lease) => drop(lease),
            Completion::Pending(first) => {
                sending.push_front(first);
                break;
            }
        }
    }
    Ok(())
}

/// A message whose payload is there, if it has one.
type Arrived<P> = (u64, Option<P>);

/// The first message that was announced, if its payload is there.
pub(crate) fn take_arrived<S: Submission>(
    receiving: &mut VecDeque<(u64, Option<InFlight<S>>)>,
) -> Result<Option<Arrived<S::Buffer>>, TransportError> {
    let Some((n, flight)) = receiving.pop_front() else {
        return Ok(None);
    };
    let Some(flight) = flight else {
        return Ok(Some((n, None)));
    };
    match flight.complete().map_err(|failed| failed.error)? {
        Completion::Done(payload) => Ok(Some((n, Some(payload)))),
        Completion::Pending(flight) => {
            receiving.push_front((n, Some(flight)));
            Ok(None)
        }
    }
}
