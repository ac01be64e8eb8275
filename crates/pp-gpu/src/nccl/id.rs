//! The secret id by which ranks find each other for one communicator.

use std::ffi::c_char;
use std::fmt;

use nccl_sys::{Nccl, ncclUniqueId};

use pp_edges::error::TransportError;

/// The id of one communicator. Every process that has it can join, so it travels only inside the authenticated control
/// channel and is never printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; Self::BYTES]);

impl UniqueId {
    /// Bytes of an id on the wire.
    pub const BYTES: usize = 128;

    /// Makes a new id. One rank makes it for all.
    ///
    /// # Errors
    /// NCCL finds no network interface to listen on (`NCCL_SOCKET_IFNAME`).
    pub fn new(nccl: &Nccl) -> Result<Self, TransportError> {
        let raw = nccl.unique_id().map_err(|source| TransportError::Nccl {
            doing: "make an id for a communicator".into(),
            source,
        })?;
        Ok(Self(raw.internal.map(c_char::cast_unsigned)))
    }

    /// Returns the bytes of the id, to be sent to the other ranks.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.0
    }

    /// Returns the id that another rank made.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    pub(super) fn raw(&self) -> ncclUniqueId {
        ncclUniqueId {
            internal: self.0.map(u8::cast_signed),
        }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_the_wire_and_shows_nothing() {
        let id = UniqueId::from_bytes([0xA5; UniqueId::BYTES]);
        let raw = id.raw();
        assert!(raw.internal.iter().all(|b| b.cast_unsigned() == 0xA5));
        assert_eq!(UniqueId::from_bytes(id.to_bytes()), id);
        assert_eq!(format!("{id:?}"), "UniqueId(..)");
    }
}
