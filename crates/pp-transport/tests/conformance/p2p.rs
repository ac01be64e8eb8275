//! Edges by copy engine, both ends in this process, on two devices.

use std::time::{Duration, Instant};

use pp_contract::{Composer, Lockstep};
use pp_device::{Device, Stream};
use pp_testing::{prepare, wait_for};
use pp_transport::error::TransportError;
use pp_transport::gpu::p2p::{GpuBackend, Way};
use pp_transport::gpu::{DeviceRx, DeviceTx};
use pp_transport::host::EdgeShape;
use pp_transport::launch::Via;
use pp_transport::nccl::NcclBackend;

use crate::devices;
use crate::edges_support::{Meeting, Peer};
use crate::suite::{Backend, Link};
use crate::two_way::{TwoWay, by_backend, edge_ends};

/// A backend for the device of this number.
pub(crate) fn backend(ordinal: u32, way: Way) -> GpuBackend {
    devices::fakes();
    let device = Device::open(ordinal).unwrap();
    GpuBackend::new(NcclBackend::alone(device), way, |_| {})
}

/// One end of an edge up and one down.
fn connect(ordinal: u32, mut peer: Peer, up: EdgeShape, down: EdgeShape) -> TwoWay<GpuBackend> {
    let backend = backend(ordinal, Way::P2p);
    by_backend(backend, &mut peer, edge_ends(up, down, ordinal == 0))
}

struct P2p;

impl Backend for P2p {
    type Edges = GpuBackend;
    const COMPLETIONS_RING: bool = false;
    const SENT_OUTLIVES_SENDER: bool = false;

    fn large() -> usize {
        if devices::is_real() { 1 << 30 } else { 8 << 20 }
    }

    fn pair(depth: u32, slot_bytes: u64) -> (Link<Self>, Link<Self>) {
        let up = EdgeShape { depth, slot_bytes };
        let down = EdgeShape {
            depth: 1,
            slot_bytes: 64,
        };
        let [low, high] = Meeting::of_two(Via::Unix);
        std::thread::scope(|scope| {
            let high = scope.spawn(|| connect(1, high, up, down));
            (connect(0, low, up, down), high.join().unwrap())
        })
    }

    fn write(lease: &mut DeviceTx, at: usize, bytes: &[u8]) {
        devices::upload(0, lease, at, bytes);
    }

    fn read(lease: &DeviceRx) -> Vec<u8> {
        devices::download(1, lease)
    }
}

crate::conformance!(P2p);

#[test]
fn a_slot_that_was_sent_ahead_is_sent_as_it_was() {
    const BYTES: usize = 64;
    let (mut sender, mut receiver) = P2p::pair(2, BYTES as u64);
    let (mut composer, mut lockstep, mut inbox) = (Composer::new(), Lockstep::new(), Vec::new());
    let stream = Stream::new(&Device::open(0).unwrap()).unwrap();
    for n in 0..3 {
        let mut lease = wait_for_some(|| sender.try_lease().unwrap());
        P2p::write(&mut lease, 0, &[n as u8; BYTES]);
        lease.send_ahead(BYTES + 1).unwrap_err();
        lease.send_ahead(BYTES).unwrap();
        assert!(matches!(
            lease.send_ahead(BYTES),
            Err(TransportError::SentAhead)
        ));
        let written = lease.write_on(&stream, |_| Ok::<_, TransportError>(()));
        assert!(matches!(written, Err(TransportError::SentAhead)));
        let (message, stamp) = prepare(&mut composer, n, BYTES / 2);
        let refused = sender.send(message, stamp, Some(lease)).unwrap_err();
        let text = refused.error.to_string();
        assert!(text.contains("of which 64 bytes were sent ahead"), "{text}");
        let (message, stamp) = prepare(&mut composer, n, BYTES);
        drop(sender.send(message, stamp, refused.buffer).unwrap());
        wait_for_some(|| receiver.poll_frame(&mut inbox).unwrap().then_some(()));
        let matched = lockstep.admit(&inbox).unwrap();
        let payload = wait_for(receiver.receive(&matched).unwrap());
        assert_eq!(P2p::read(&payload), [n as u8; BYTES]);
    }
    let mut leases = [(); 2].map(|()| wait_for_some(|| sender.try_lease().unwrap()));
    leases[0].send_ahead(BYTES).unwrap();
    let [ahead, mut left] = leases;
    drop(ahead);
    let leased = sender.try_lease().unwrap();
    assert!(leased.is_none(), "a slot that moves is leased");
    // The send says that the edge is gone.
    drop(sender);
    left.send_ahead(BYTES).unwrap();
}

fn wait_for_some<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + devices::HANG;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "nothing came");
        std::thread::sleep(Duration::from_micros(50));
    }
}
