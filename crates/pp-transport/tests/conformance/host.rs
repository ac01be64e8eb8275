//! The host backend, both ends in this process.

use pp_transport::host::{EdgeShape, RxLease, TxLease};

use crate::suite::{Backend, Link};
use crate::two_way::on_host;

struct Host;

impl Backend for Host {
    type Edges = pp_transport::host::Host;
    const COMPLETIONS_RING: bool = true;
    const SENT_OUTLIVES_SENDER: bool = true;

    fn large() -> usize {
        1 << 30
    }

    fn pair(depth: u32, slot_bytes: u64) -> (Link<Self>, Link<Self>) {
        let up = EdgeShape { depth, slot_bytes };
        let down = EdgeShape {
            depth: 1,
            slot_bytes: 64,
        };
        on_host(up, down)
    }

    fn write(lease: &mut TxLease, at: usize, bytes: &[u8]) {
        lease.bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn read(lease: &RxLease) -> Vec<u8> {
        lease.bytes().to_vec()
    }
}

crate::conformance!(Host);
