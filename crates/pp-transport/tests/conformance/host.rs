//! The host backend, both ends in this process.

use pp_transport::bell::Bell;
use pp_transport::host::{EdgeShape, HostLink, RxLease, TxLease};

use crate::suite::Backend;

struct Host;

impl Backend for Host {
    type Link = HostLink;
    const SENT_OUTLIVES_SENDER: bool = true;

    fn large() -> usize {
        1 << 30
    }

    fn pair(depth: u32, slot_bytes: u64) -> (HostLink, HostLink) {
        let up = EdgeShape { depth, slot_bytes };
        let down = EdgeShape {
            depth: 1,
            slot_bytes: 64,
        };
        HostLink::pair(up, down, Bell::new().unwrap()).unwrap()
    }

    fn write(lease: &mut TxLease, at: usize, bytes: &[u8]) {
        lease.bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn read(lease: &RxLease) -> Vec<u8> {
        lease.bytes().to_vec()
    }
}

crate::conformance!(Host);
