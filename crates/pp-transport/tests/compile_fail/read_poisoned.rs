//! After an abort the contents mean nothing, whatever the device says.
use pp_transport::host::Receiving;
use pp_transport::in_flight::InFlight;

fn believe(receive: InFlight<Receiving>) -> u8 {
    let poisoned = receive.abort();
    poisoned.bytes()[0]
}

fn main() {}
