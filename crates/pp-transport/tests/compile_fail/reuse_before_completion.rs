//! The race of six projects: the buffer is written again while the send still reads it.
use pp_contract::{Prepared, Stamp};
use pp_transport::edge::EdgeTx;
use pp_transport::host::{HostTx, TxLease};

fn race(edge: &mut HostTx, message: Prepared<'_>, stamp: Stamp, mut lease: TxLease) {
    let _in_flight = edge.send(message, stamp, Some(lease));
    lease.bytes_mut()[0] = 2;
}

fn main() {}
