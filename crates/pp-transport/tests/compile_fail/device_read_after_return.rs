//! A slot that was given back to the peer is read.
use pp_device::Stream;
use pp_transport::error::TransportError;
use pp_transport::gpu::DeviceRx;

fn late(payload: DeviceRx, stream: &Stream) -> Result<(), TransportError> {
    drop(payload);
    payload.read_on(stream, |_payload| Ok(()))
}

fn main() {}
