//! Random bytes.

use snow::resolvers::{CryptoResolver, DefaultResolver};

/// Random bytes of the system.
pub(crate) fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    DefaultResolver
        .resolve_rng()
        .expect("snow is built with the system's random numbers")
        .try_fill_bytes(&mut bytes)
        .expect("the system gives random numbers");
    bytes
}
