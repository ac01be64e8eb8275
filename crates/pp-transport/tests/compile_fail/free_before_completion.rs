//! Corrupted gradients: the output is freed while its send still reads it.
use pp_contract::{Prepared, Stamp};
use pp_transport::edge::EdgeTx;
use pp_transport::host::{HostTx, TxLease};

fn free(edge: &mut HostTx, message: Prepared<'_>, stamp: Stamp, lease: TxLease) {
    let _in_flight = edge.send(message, stamp, Some(lease));
    drop(lease);
}

fn main() {}
