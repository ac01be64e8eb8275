//! The race of six projects: the buffer is written again while the send still reads it.
use pp_contract::{Prepared, Stamp};
use pp_transport::host::{HostLink, TxLease};
use pp_transport::link::Link;

fn race(link: &mut HostLink, message: Prepared<'_>, stamp: Stamp, mut lease: TxLease) {
    let _in_flight = link.send(message, stamp, Some(lease));
    lease.bytes_mut()[0] = 2;
}

fn main() {}
