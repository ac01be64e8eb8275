//! Work that reads a payload is issued before the payload has arrived.
use pp_device::Stream;
use pp_transport::error::TransportError;
use pp_transport::in_flight::InFlight;
use pp_transport::gpu::Receiving;

fn peek(arriving: &InFlight<Receiving>, stream: &Stream) -> Result<(), TransportError> {
    arriving.read_on(stream, |_payload| Ok(()))
}

fn main() {}
