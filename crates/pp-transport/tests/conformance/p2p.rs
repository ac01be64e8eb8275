//! Edges by copy engine, both ends in this process, on two devices.

use pp_device::Device;
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
