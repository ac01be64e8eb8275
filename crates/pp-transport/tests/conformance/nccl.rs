//! The NCCL backend, both ends in this process, on two devices.

use pp_transport::nccl::{DeviceRx, DeviceTx, NcclLink};

use crate::devices::{self, Shape};
use crate::suite::Backend;

struct Nccl;

impl Backend for Nccl {
    type Link = NcclLink;
    const SENT_OUTLIVES_SENDER: bool = false;

    fn large() -> usize {
        if devices::is_real() { 1 << 30 } else { 8 << 20 }
    }

    fn pair(depth: u32, slot_bytes: u64) -> (NcclLink, NcclLink) {
        devices::pair(Shape::up(depth, slot_bytes))
    }

    fn write(lease: &mut DeviceTx, at: usize, bytes: &[u8]) {
        devices::upload(0, lease, at, bytes);
    }

    fn read(lease: &DeviceRx) -> Vec<u8> {
        devices::download(1, lease)
    }
}

crate::conformance!(Nccl);
