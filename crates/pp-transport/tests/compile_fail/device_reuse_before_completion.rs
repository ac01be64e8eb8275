//! The race of six projects, on a device: work that writes the slot is issued while it is sent.
use pp_contract::{Prepared, Stamp};
use pp_device::Stream;
use pp_transport::edge::EdgeTx;
use pp_transport::error::TransportError;
use pp_transport::gpu::{DeviceOut, DeviceTx};

fn race(
    edge: &mut DeviceOut,
    message: Prepared<'_>,
    stamp: Stamp,
    mut lease: DeviceTx,
    stream: &Stream,
) -> Result<(), TransportError> {
    let _in_flight = edge.send(message, stamp, Some(lease));
    lease.write_on(stream, |_slot| Ok(()))
}

fn main() {}
