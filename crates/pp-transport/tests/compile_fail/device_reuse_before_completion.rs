//! The race of six projects, on a device: work that writes the slot is issued while it is sent.
use pp_contract::{Prepared, Stamp};
use pp_device::Stream;
use pp_transport::error::TransportError;
use pp_transport::link::Link;
use pp_transport::nccl::{DeviceTx, NcclLink};

fn race(
    link: &mut NcclLink,
    message: Prepared<'_>,
    stamp: Stamp,
    mut lease: DeviceTx,
    stream: &Stream,
) -> Result<(), TransportError> {
    let _in_flight = link.send(message, stamp, Some(lease));
    lease.write_on(stream, |_slot| Ok(()))
}

fn main() {}
