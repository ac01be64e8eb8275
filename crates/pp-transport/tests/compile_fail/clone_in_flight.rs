//! One operation, one completion.
use pp_transport::host::Sending;
use pp_transport::in_flight::InFlight;

fn two_completions(send: InFlight<Sending>) -> [InFlight<Sending>; 2] {
    [send.clone(), send]
}

fn main() {}
