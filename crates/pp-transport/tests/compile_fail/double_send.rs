//! One buffer, two sends.
use pp_contract::{Prepared, Stamp};
use pp_transport::edge::EdgeTx;
use pp_transport::host::{HostTx, TxLease};

fn twice(edge: &mut HostTx, messages: [Prepared<'_>; 2], stamp: Stamp, lease: TxLease) {
    let [first, second] = messages;
    let _ = edge.send(first, stamp, Some(lease));
    let _ = edge.send(second, stamp, Some(lease));
}

fn main() {}
