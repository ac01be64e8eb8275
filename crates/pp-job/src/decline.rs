//! The end of a rank that cannot take part.

use pp_transport::control::{RendezvousOptions, rendezvous};
use pp_transport::launch::Launch;
use pp_transport::times::DECLINE_WITHIN;

use crate::error::Error;

/// A rank that cannot take part joins all the same, to say why: the others would wait for it as long as for one that is
/// late.
pub(crate) fn join_to_abort(launch: &Launch, error: Error) -> Error {
    let options = RendezvousOptions {
        timeout: DECLINE_WITHIN,
        declines: Some(error.fault(launch.rank(), "set up")),
        ..RendezvousOptions::default()
    };
    // Where none is there, none waits.
    let _ = rendezvous(launch, &options);
    error
}
