//! The end of a rank that cannot take part.

use std::time::Instant;

use pp_transport::control::{Message, RendezvousOptions, rendezvous};
use pp_transport::launch::Launch;

use crate::error::Error;
use crate::times;

/// A rank that cannot take part joins all the same, to say why: the others would wait for it as long as for one that is
/// late.
pub(crate) fn join_to_abort(launch: &Launch, error: Error) -> Error {
    let options = RendezvousOptions {
        timeout: times::DECLINE_WITHIN,
        ..RendezvousOptions::default()
    };
    // Where none is there, none waits.
    if let Ok(peers) = rendezvous(launch, &options) {
        let told = Message::Abort(error.fault(launch.rank(), "set up"));
        for channel in peers.iter() {
            let deadline = Instant::now() + times::DECLINE_WITHIN;
            let _ = channel.sender().send(&told, deadline);
        }
    }
    error
}
