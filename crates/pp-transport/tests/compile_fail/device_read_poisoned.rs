//! After an abort the device says that the payload arrived; no code can read it.
use pp_device::Stream;
use pp_transport::error::TransportError;
use pp_transport::in_flight::InFlight;
use pp_transport::gpu::Receiving;

fn salvage(arriving: InFlight<Receiving>, stream: &Stream) -> Result<(), TransportError> {
    let poisoned = arriving.abort();
    poisoned.read_on(stream, |_payload| Ok(()))
}

fn main() {}
