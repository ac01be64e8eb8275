//! Ranks of one process that meet as those of a job do, and what they compute with.
#![allow(dead_code, reason = "each test crate uses its part")]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pp_contract::{Fault, Rank};
use pp_device::{Device, DeviceBuffer, Event, PinnedBuffer, Stream};
use pp_testing::{Barrier, HANG, pattern, until};
use pp_transport::backend::{self, Backend, OnFrame};
use pp_transport::control::{ControlChannel, ControlError, ControlSender, Message};
use pp_transport::edge::Edges;
use pp_transport::error::TransportError;
use pp_transport::gpu::{DeviceRx, DeviceTx};
use pp_transport::gpu_backend::{GpuBackend, GpuTransport};
use pp_transport::host::{RxLease, TxLease};
use pp_transport::launch::Via;
use pp_transport::nccl::{Nccl, NcclBackend};

use crate::control_support;
use pp_fakes::Fakes;
use pp_fakes::raw::TestKernels;

/// One test of this process at a time: a device has one issuer.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one rank says to another beside the channel.
type Said = (Vec<u8>, Vec<OwnedFd>);

/// Another rank, as a backend sees it.
pub(crate) struct Peer {
    me: Rank,
    other: Rank,
    channel: ControlChannel,
    is_on_host: bool,
    /// The other rank's payloads lie on a device.
    is_on_device: bool,
    to: Sender<Said>,
    from: Receiver<Said>,
}

impl Peer {
    /// The same, on a host that cannot be passed descriptors.
    pub(crate) fn on_another_host(self) -> Self {
        let is_on_host = false;
        Self { is_on_host, ..self }
    }

    /// The same, where the other rank works in memory of this kind.
    pub(crate) fn beside(self, is_on_device: bool) -> Self {
        Self {
            is_on_device,
            ..self
        }
    }

    /// Hands every frame that comes over the channel to `on_frame`, until the peer is gone. Does not read while it is
    /// stopped.
    pub(crate) fn listen(
        self,
        on_frame: Option<OnFrame>,
        stopped: &Arc<AtomicBool>,
    ) -> Option<ControlSender> {
        let (peer, stopped) = (self.other, Arc::clone(stopped));
        let (sender, mut receiver) = self.channel.split();
        let mut on_frame = on_frame?;
        thread::spawn(move || {
            loop {
                while stopped.load(Ordering::Relaxed) {
                    thread::sleep(Duration::from_millis(1));
                }
                match receiver.recv_deadline(Instant::now() + Duration::from_millis(5)) {
                    Ok(Message::Frame(body)) => on_frame(peer, body).unwrap(),
                    Ok(_) | Err(ControlError::TimedOut { .. }) => {}
                    // The other end is done.
                    Err(_) => return,
                }
            }
        });
        Some(sender)
    }
}

impl backend::Peer for Peer {
    fn own_rank(&self) -> Rank {
        self.me
    }

    fn rank(&self) -> Rank {
        self.other
    }

    fn shares_host(&self) -> bool {
        self.is_on_host
    }

    fn is_on_device(&self) -> bool {
        self.is_on_device
    }

    fn sender(&self) -> &ControlSender {
        self.channel.sender()
    }

    fn send(&self, body: &[u8]) -> Result<(), Fault> {
        self.to.send((body.to_vec(), Vec::new())).unwrap();
        Ok(())
    }

    fn receive(&mut self, _: &'static str) -> Result<Vec<u8>, Fault> {
        let (bytes, fds) = self.from.recv_timeout(HANG).unwrap();
        assert!(fds.is_empty(), "descriptors where bytes were due");
        Ok(bytes)
    }

    fn send_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<(), Fault> {
        let fds = fds.iter().map(|fd| fd.try_clone_to_owned().unwrap());
        self.to.send((Vec::new(), fds.collect())).unwrap();
        Ok(())
    }

    fn receive_fds(&mut self) -> Result<Vec<OwnedFd>, Fault> {
        let (bytes, fds) = self.from.recv_timeout(HANG).unwrap();
        assert!(bytes.is_empty(), "bytes where descriptors were due");
        Ok(fds)
    }
}

/// Ranks that have met.
pub(crate) struct Meeting {
    peers: Mutex<Vec<Peer>>,
    /// For all of them.
    pub(crate) all: Barrier,
}

impl Meeting {
    pub(crate) fn new(ranks: &[Rank], via: Via) -> Self {
        let mut peers = Vec::new();
        for (at, &low) in ranks.iter().enumerate() {
            for &high in &ranks[at + 1..] {
                let ((to_high, from_low), (to_low, from_high)) = (channel(), channel());
                // Each two in a job of their own: there they are rank 0 and rank 1.
                let (zero, one) = control_support::pair(via);
                for (me, other, channel, to, from) in [
                    (low, high, zero, to_high, from_high),
                    (high, low, one, to_low, from_low),
                ] {
                    peers.push(Peer {
                        me,
                        other,
                        channel,
                        is_on_host: via == Via::Unix,
                        is_on_device: true,
                        to,
                        from,
                    });
                }
            }
        }
        Self {
            peers: Mutex::new(peers),
            all: Barrier::new(ranks.len()),
        }
    }

    pub(crate) fn of_two(via: Via) -> [Peer; 2] {
        let [zero, one] = [0, 1].map(Rank::new);
        let meeting = Self::new(&[zero, one], via);
        [meeting.peer(zero, one), meeting.peer(one, zero)]
    }

    /// What `me` has of `other`.
    pub(crate) fn peer(&self, me: Rank, other: Rank) -> Peer {
        let mut peers = self.peers.lock().unwrap();
        let is_it = |peer: &Peer| peer.me == me && peer.other == other;
        let at = peers.iter().position(is_it).unwrap();
        peers.swap_remove(at)
    }
}

/// A kind of backend, and the memory of a rank that uses it.
pub(crate) trait Kind: Sized {
    type Backend: Backend;
    const IS_ON_DEVICE: bool = true;

    fn rank(rank: u32) -> (Self, Self::Backend);

    /// Writes content `n` to the first bytes of the slot.
    fn write(&mut self, lease: &mut Tx<Self>, bytes: usize, n: u64);

    /// That the payload is so long, and content `n`.
    fn assert_holds(&mut self, payload: &Rx<Self>, bytes: usize, n: u64);
}

pub(crate) type Tx<K> = <<K as Kind>::Backend as Edges>::Tx;
pub(crate) type Rx<K> = <<K as Kind>::Backend as Edges>::Rx;

pub(crate) struct Host;

impl Kind for Host {
    type Backend = pp_transport::host::Host;
    const IS_ON_DEVICE: bool = false;

    fn rank(_: u32) -> (Self, Self::Backend) {
        (Self, pp_transport::host::Host)
    }

    fn write(&mut self, lease: &mut TxLease, bytes: usize, n: u64) {
        let content = lease.bytes_mut()[..bytes].iter_mut().enumerate();
        content.for_each(|(i, byte)| *byte = pattern(n, i));
    }

    fn assert_holds(&mut self, payload: &RxLease, bytes: usize, n: u64) {
        assert_eq!(payload.bytes().len(), bytes);
        let mut content = payload.bytes().iter().enumerate();
        assert!(content.all(|(i, byte)| *byte == pattern(n, i)));
    }
}

/// One rank's device of the fakes.
pub(crate) struct Gpu {
    device: Device,
    kernels: TestKernels,
    /// The first writes, the second reads.
    streams: [Stream; 2],
    wrong: DeviceBuffer,
}

impl Gpu {
    fn of(rank: u32) -> Self {
        Fakes::newest().load().set("DEVICES", "3");
        let device = Device::open(rank).unwrap();
        device.bind().unwrap();
        Self {
            kernels: TestKernels::load(),
            streams: [(); 2].map(|()| Stream::new(&device).unwrap()),
            wrong: DeviceBuffer::new(&device, 8).unwrap(),
            device,
        }
    }

    pub(crate) fn stream(&self) -> Stream {
        Stream::new(&self.device).unwrap()
    }

    pub(crate) fn event(&self) -> Event {
        Event::new(&self.device).unwrap()
    }

    pub(crate) fn write_slowly(&self, lease: &mut DeviceTx, on: &Stream, us: u64, n: u64) {
        let bytes = lease.capacity();
        let written = lease.write_on(on, |slot| {
            self.kernels.spin(on.raw(), us);
            self.kernels.fill(on.raw(), slot.address, bytes, n);
            Ok::<_, TransportError>(())
        });
        written.unwrap();
    }

    pub(crate) fn read_slowly(&self, payload: &DeviceRx, on: &Stream, us: u64, passed: &Event) {
        self.read(payload, on, || {
            self.kernels.spin(on.raw(), us);
            passed.record(on).unwrap();
        });
    }

    /// Reads on this stream, behind what `first` does.
    pub(crate) fn read(&self, payload: &DeviceRx, on: &Stream, first: impl FnOnce()) {
        let read = payload.read_on(on, |from| {
            first();
            let wrong = self.wrong.address();
            self.kernels
                .check(on.raw(), from.address, from.len, 0, wrong);
            Ok::<_, TransportError>(())
        });
        read.unwrap();
    }

    fn wrong(&self) -> u64 {
        let mut count = PinnedBuffer::new(&self.device, 8).unwrap();
        let stream = &self.streams[1];
        // SAFETY: both buffers live until the stream has passed the copy, below.
        unsafe { stream.download(self.wrong.ptr(), &mut count, 0) }.unwrap();
        until(|| stream.is_idle().unwrap());
        u64::from_le_bytes(count.bytes().try_into().unwrap())
    }
}

impl Kind for Gpu {
    type Backend = NcclBackend;

    fn rank(rank: u32) -> (Self, NcclBackend) {
        let gpu = Self::of(rank);
        let backend = NcclBackend::new(gpu.device.clone(), Nccl::load().unwrap());
        (gpu, backend)
    }

    fn write(&mut self, lease: &mut DeviceTx, bytes: usize, n: u64) {
        let stream = &self.streams[0];
        let written = lease.write_on(stream, |slot| {
            self.kernels.fill(stream.raw(), slot.address, bytes, n);
            Ok::<_, TransportError>(())
        });
        written.unwrap();
    }

    fn assert_holds(&mut self, payload: &DeviceRx, bytes: usize, n: u64) {
        assert_eq!(payload.len(), bytes);
        let (stream, wrong) = (&self.streams[1], &self.wrong);
        let read = payload.read_on(stream, |from| {
            // SAFETY: the buffer is this rank's own, and its stream orders all work on it.
            unsafe { stream.fill(wrong.ptr(), 0) }?;
            let (raw, wrong) = (stream.raw(), wrong.address());
            self.kernels.check(raw, from.address, bytes, n, wrong);
            Ok::<_, TransportError>(())
        });
        read.unwrap();
        assert_eq!(self.wrong(), 0, "bytes of content {n} are wrong");
    }
}

macro_rules! other_gpus {
    ($($(#[$about:meta])* $kind:ident($backend:ty) = $make:expr;)+) => {
        $(
            $(#[$about])*
            pub(crate) struct $kind(Gpu);

            impl Kind for $kind {
                type Backend = $backend;

                fn rank(rank: u32) -> (Self, $backend) {
                    let gpu = Gpu::of(rank);
                    let backend = $make(gpu.device.clone());
                    (Self(gpu), backend)
                }

                fn write(&mut self, lease: &mut DeviceTx, bytes: usize, n: u64) {
                    self.0.write(lease, bytes, n);
                }

                fn assert_holds(&mut self, payload: &DeviceRx, bytes: usize, n: u64) {
                    self.0.assert_holds(payload, bytes, n);
                }
            }
        )+
    };
}
other_gpus! {
    /// The same without NCCL: what a job of one rank has.
    OneGpu(NcclBackend) = NcclBackend::alone;
    /// By copy engine.
    P2pGpu(GpuBackend) = |device| GpuBackend::new(NcclBackend::alone(device), GpuTransport::P2p, |_| {});
    /// Whichever way is there.
    AnyGpu(GpuBackend) = |device| GpuBackend::new(NcclBackend::alone(device), GpuTransport::Best, hear);
}

/// What the ranks of this process have said about the ways that they take.
pub(crate) static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn hear(line: &str) {
    SAID.lock().unwrap().push(line.to_owned());
}

impl std::ops::Deref for OneGpu {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.0
    }
}
