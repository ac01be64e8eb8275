//! What edges between GPUs must do, whichever mover their payloads take: claims over any [`Mover`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pp_contract::{Composer, Lockstep};
use pp_device::{Device, Event, Stream};
use pp_testing::{HANG, number, pattern, prepare, until, until_some};
use pp_transport::backend::{Abort, Backend};
use pp_transport::edge::EdgeTx as _;
use pp_transport::error::TransportError;
use pp_transport::gpu::{DeviceRx, DeviceTx, Receiving, Sending};
use pp_transport::host::EdgeShape;
use pp_transport::in_flight::{Completion, InFlight};
use pp_transport::launch::Via;

use crate::devices::{Held, download, is_real, upload, with};
use crate::edges_support::{Meeting, Peer};
use crate::suite;
use crate::two_way::{Met, TwoWay, edge_ends, whole};
use pp_fakes::raw::TestKernels;

/// What moves payloads between the devices of this process.
pub(crate) trait Mover: 'static {
    type Edges: Backend<
            Agreed: Send,
            Tx = DeviceTx,
            Rx = DeviceRx,
            Sending = Sending,
            Receiving = Receiving,
            Out: Send,
            In: Send,
        > + Send;

    /// Whether a receive waits for the work behind which its payload is sent. Otherwise the header waits for that.
    const RECEIVES_WAIT: bool = true;

    /// The backends of both ranks.
    fn backends(held: &mut Held) -> &mut [Self::Edges; 2];

    fn peers() -> [Peer; 2] {
        on_one_host()
    }
}

impl<M: Mover> suite::Backend for M {
    type Edges = M::Edges;
    const COMPLETIONS_RING: bool = false;
    const SENT_OUTLIVES_SENDER: bool = false;

    fn large() -> usize {
        if is_real() { 1 << 30 } else { 8 << 20 }
    }

    fn pair(depth: u32, slot_bytes: u64) -> (suite::Link<Self>, suite::Link<Self>) {
        let up = EdgeShape { depth, slot_bytes };
        let down = EdgeShape {
            depth: 1,
            slot_bytes: 64,
        };
        let met = meet::<M>(&mut M::peers(), up, down);
        let [(low, _), (high, _)] = connect::<M>(met, HANG, &|| true).map(Result::unwrap);
        (low, high)
    }

    fn write(lease: &mut DeviceTx, at: usize, bytes: &[u8]) {
        upload(0, lease, at, bytes);
    }

    fn read(lease: &DeviceRx) -> Vec<u8> {
        download(1, lease)
    }
}

/// Both ranks agree on an edge up and one down.
pub(crate) fn meet<M: Mover>(
    peers: &mut [Peer; 2],
    up: EdgeShape,
    down: EdgeShape,
) -> [Met<M::Edges>; 2] {
    with(|held| {
        let ([low, high], [zero, one]) = (M::backends(held), peers);
        std::thread::scope(|scope| {
            let one = scope.spawn(|| Met::new(high, one, edge_ends(up, down, false)));
            let zero = Met::new(low, zero, edge_ends(up, down, true));
            [zero, one.join().unwrap()]
        })
    })
}

/// Two ranks of one host.
pub(crate) fn on_one_host() -> [Peer; 2] {
    Meeting::of_two(Via::Unix)
}

type Linked<M> = (TwoWay<<M as Mover>::Edges>, Abort);

/// Both ranks connect, or try to.
pub(crate) fn connect<M: Mover>(
    met: [Met<M::Edges>; 2],
    within: Duration,
    is_wanted: &(dyn Fn() -> bool + Sync),
) -> [Result<Linked<M>, TransportError>; 2] {
    with(|held| {
        let ([low, high], [zero, one]) = (M::backends(held), met);
        std::thread::scope(|scope| {
            let one = scope.spawn(|| one.connect(high, within, is_wanted));
            [zero.connect(low, within, is_wanted), one.join().unwrap()]
        })
    })
}

/// More than NCCL sends with no receiver there: 64 MiB on an H200, 1 MiB on the fake.
pub(crate) fn past_the_buffers() -> usize {
    if is_real() { 160 << 20 } else { 2 << 20 }
}

/// One rank, sending and receiving.
pub(crate) struct End<M: Mover> {
    on: usize,
    pub(crate) link: TwoWay<M::Edges>,
    /// Gives up all edges of the rank, from any thread.
    pub(crate) abort: Arc<Abort>,
    composer: Composer,
    lockstep: Lockstep,
    inbox: Vec<u8>,
    pub(crate) sent: u64,
    pub(crate) received: u64,
    arriving: VecDeque<(u64, InFlight<Receiving>)>,
}

pub(crate) fn ends<M: Mover>(edge: EdgeShape) -> [End<M>; 2] {
    ends_of(meet::<M>(&mut M::peers(), edge, edge))
}

pub(crate) fn ends_of<M: Mover>(met: [Met<M::Edges>; 2]) -> [End<M>; 2] {
    let [low, high] = connect::<M>(met, HANG, &|| true).map(Result::unwrap);
    let end = |on, (link, abort)| End {
        on,
        link,
        abort: Arc::new(abort),
        composer: Composer::new(),
        lockstep: Lockstep::new(),
        inbox: Vec::new(),
        sent: 0,
        received: 0,
        arriving: VecDeque::new(),
    };
    [end(0, low), end(1, high)]
}

pub(crate) fn payload(on: usize, n: u64, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| pattern(n * 2 + on as u64, i)).collect()
}

impl<M: Mover> End<M> {
    pub(crate) fn lease(&mut self) -> DeviceTx {
        until_some("a credit", || self.link.try_lease().unwrap())
    }

    /// Sends without waiting until the header has left.
    pub(crate) fn commit(
        &mut self,
        bytes: usize,
        lease: Option<DeviceTx>,
    ) -> Option<InFlight<Sending>> {
        let (message, stamp) = prepare(&mut self.composer, self.sent, bytes);
        self.sent += 1;
        self.link.out.send(message, stamp, lease).unwrap().payload
    }

    pub(crate) fn try_send(
        &mut self,
        bytes: usize,
        lease: DeviceTx,
    ) -> Result<InFlight<Sending>, TransportError> {
        let (message, stamp) = prepare(&mut self.composer, self.sent, bytes);
        let sent = self.link.send(message, stamp, Some(lease));
        self.sent += 1;
        sent.map(|sent| sent.payload.unwrap()).map_err(|r| r.error)
    }

    /// A send that fails: its payload comes back.
    pub(crate) fn fail_to_send(&mut self, bytes: usize) -> DeviceTx {
        let mut lease = self.lease();
        upload(self.on, &mut lease, 0, &payload(self.on, self.sent, bytes));
        let (message, stamp) = prepare(&mut self.composer, self.sent, bytes);
        let sent = self.link.send(message, stamp, Some(lease));
        sent.unwrap_err().buffer.expect("the payload comes back")
    }

    pub(crate) fn send(&mut self, bytes: usize) -> InFlight<Sending> {
        let mut lease = self.lease();
        upload(self.on, &mut lease, 0, &payload(self.on, self.sent, bytes));
        self.try_send(bytes, lease).unwrap()
    }

    /// Posts the receive of the next message, if one is there.
    pub(crate) fn hear(&mut self) -> bool {
        self.try_hear(|| ()).unwrap()
    }

    pub(crate) fn try_hear(&mut self, before: impl FnOnce()) -> Result<bool, TransportError> {
        if !self.link.poll_frame(&mut self.inbox)? {
            return Ok(false);
        }
        let matched = self.lockstep.admit(&self.inbox).unwrap();
        before();
        let flight = self.link.receive(&matched)?;
        self.arriving.push_back((number(&matched), flight));
        Ok(true)
    }

    pub(crate) fn hear_one(&mut self) -> (u64, InFlight<Receiving>) {
        until(|| self.hear());
        self.arriving.pop_back().unwrap()
    }

    /// Waits until a slot comes back, which must not be before its reader is done.
    pub(crate) fn assert_back_once(&mut self, read: &Event, sent: &InFlight<Sending>) {
        until(|| {
            self.hear();
            let is_back = sent.is_done().unwrap();
            let is_read = read.is_done().unwrap();
            assert!(is_read || !is_back, "given back while it is read");
            is_read
        });
        until(|| {
            // The link gives it back in any of its calls.
            self.link.try_lease().unwrap();
            sent.is_done().unwrap()
        });
    }

    /// Reads what has arrived, and checks that it is the next and whole.
    pub(crate) fn take(&mut self, bytes: usize) {
        while let Some((n, flight)) = self.arriving.pop_front() {
            match flight.complete().unwrap() {
                Completion::Pending(again) => return self.arriving.push_front((n, again)),
                Completion::Done(lease) => {
                    assert_eq!(n, self.received);
                    let wanted = payload(1 - self.on, n, bytes);
                    assert!(download(self.on, &lease) == wanted, "message {n} is wrong");
                    self.received += 1;
                }
            }
        }
    }
}

pub(crate) fn edge(depth: u32, bytes: usize) -> EdgeShape {
    EdgeShape {
        depth,
        slot_bytes: bytes as u64,
    }
}

/// Bytes of the payloads that are sent again.
pub(crate) const BYTES: usize = 6000;

pub(crate) fn stream(on: u32) -> Stream {
    Stream::new(&Device::open(on).unwrap()).unwrap()
}

pub(crate) fn abort<M: Mover>(ends: [End<M>; 2]) {
    for end in &ends {
        (end.abort)("the test", Instant::now() + HANG).unwrap();
    }
}

/// Sends what an earlier generation sent, from slot to slot.
pub(crate) fn send_again<M: Mover>(end: &mut End<M>, old: &InFlight<Sending>) -> InFlight<Sending> {
    let mut lease = end.lease();
    old.copy_into(&[whole(BYTES as u64)], &mut lease).unwrap();
    end.try_send(BYTES, lease).unwrap()
}

pub(crate) fn receive_all<M: Mover>(ends: &mut [End<M>; 2], count: u64) {
    until(|| {
        while ends[1].hear() {}
        ends[1].take(BYTES);
        ends[1].received >= count
    });
}

/// Sends this many messages each way at once, all of one thread, and checks each.
pub(crate) fn talk<M: Mover>(ends: &mut [End<M>; 2], bytes: usize, messages: u64) {
    let deadline = Instant::now() + HANG * 2;
    let goal = ends[0].sent + messages;
    while ends.iter().any(|end| end.received < goal) {
        assert!(Instant::now() < deadline, "the talk stands still");
        for end in &mut *ends {
            if end.sent < goal
                && let Some(mut lease) = end.link.try_lease().unwrap()
            {
                upload(end.on, &mut lease, 0, &payload(end.on, end.sent, bytes));
                drop(end.try_send(bytes, lease).unwrap());
            }
            while end.hear() {}
            end.take(bytes);
        }
    }
}

/// The kernels of the fake driver, on this device.
pub(crate) fn on_device(ordinal: u32) -> TestKernels {
    Device::open(ordinal).unwrap().bind().unwrap();
    TestKernels::load()
}

/// Issues a write of the slot that takes so many microseconds.
pub(crate) fn write_slowly(lease: &mut DeviceTx, on: &Stream, kernels: &TestKernels, us: u64) {
    let written = lease.write_on(on, |_| -> Result<(), TransportError> {
        kernels.spin(on.raw(), us);
        Ok(())
    });
    written.unwrap();
}

/// The same for a read of what arrived.
pub(crate) fn read_slowly(payload: &DeviceRx, on: &Stream, kernels: &TestKernels, us: u64) {
    let read = payload.read_on(on, |_| -> Result<(), TransportError> {
        kernels.spin(on.raw(), us);
        Ok(())
    });
    read.unwrap();
}
