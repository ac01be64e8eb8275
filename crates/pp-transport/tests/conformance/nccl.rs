//! The NCCL backend, both ends in this process, on two devices.

use pp_transport::gpu::{DeviceRx, DeviceTx};
use pp_transport::nccl::NcclBackend;

use crate::devices::{self, Shape};
use crate::suite::{Backend, Link};

struct Nccl;

impl Backend for Nccl {
    type Edges = NcclBackend;
    const COMPLETIONS_RING: bool = false;
    const SENT_OUTLIVES_SENDER: bool = false;

    fn large() -> usize {
        if devices::is_real() { 1 << 30 } else { 8 << 20 }
    }

    fn pair(depth: u32, slot_bytes: u64) -> (Link<Self>, Link<Self>) {
        let (lower, higher) = devices::pair(Shape::up(depth, slot_bytes));
        (lower.both, higher.both)
    }

    fn write(lease: &mut DeviceTx, at: usize, bytes: &[u8]) {
        devices::upload(0, lease, at, bytes);
    }

    fn read(lease: &DeviceRx) -> Vec<u8> {
        devices::download(1, lease)
    }
}

crate::conformance!(Nccl);
