//! A receive that is under way has no bytes to read.
use pp_transport::host::Receiving;
use pp_transport::in_flight::InFlight;

fn peek(receive: &InFlight<Receiving>) -> u8 {
    receive.bytes()[0]
}

fn main() {}
