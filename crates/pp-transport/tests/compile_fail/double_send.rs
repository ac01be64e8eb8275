//! One buffer, two sends.
use pp_contract::{Prepared, Stamp};
use pp_transport::host::{HostLink, TxLease};
use pp_transport::link::Link;

fn twice(link: &mut HostLink, messages: [Prepared<'_>; 2], stamp: Stamp, lease: TxLease) {
    let [first, second] = messages;
    let _ = link.send(first, stamp, Some(lease));
    let _ = link.send(second, stamp, Some(lease));
}

fn main() {}
