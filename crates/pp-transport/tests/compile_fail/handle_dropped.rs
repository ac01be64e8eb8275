//! A handle that nobody keeps: the program does not know when the peer has read the payload.
#![deny(unused_must_use)]
use pp_contract::{Prepared, Stamp};
use pp_transport::edge::EdgeTx;
use pp_transport::host::{HostTx, TxLease};

fn forget(edge: &mut HostTx, message: Prepared<'_>, stamp: Stamp, lease: TxLease) {
    edge.send(message, stamp, Some(lease)).unwrap();
}

fn main() {}
