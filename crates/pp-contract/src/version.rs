//! The version of the wire format and the rule that says who may talk to whom.
//!
//! The rule is the simplest that is safe: both ends speak the same version. All ranks of a job are
//! one binary, so a rank of another version is a mistake in the deployment, and it is named at the
//! handshake with both versions rather than guessed around.

/// Version of the header, the bodies and the handshake. Raised by any change of any byte.
pub const WIRE_VERSION: u16 = 2;

/// Whether a peer that speaks `theirs` can be understood.
#[must_use]
pub const fn is_compatible(theirs: u16) -> bool {
    theirs == WIRE_VERSION
}
