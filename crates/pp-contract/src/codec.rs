//! Bodies to bytes and back: [postcard](https://postcard.jamesmunns.com/wire-format), bounded.
//!
//! Writing stops at the bound instead of growing, reading must use up every byte.

use postcard::ser_flavors::Flavor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::header::{Action, MAX_BODY_BYTES};
use crate::manifest::ManifestError;
use crate::plan::PlanError;
use crate::trail::TrailError;

/// Why the body of a frame, or another encoded value, is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BodyError {
    /// A body was asked for, and the action has none.
    #[error("{action} has no body")]
    NoBody {
        /// The action.
        action: Action,
    },
    /// The bytes are not an encoding of the value.
    #[error("{what} of {len} bytes does not decode: {reason}")]
    Malformed {
        /// The value that was expected.
        what: &'static str,
        /// Length of the encoding.
        len: usize,
        /// What postcard says of it.
        reason: postcard::Error,
    },
    /// The value does not encode, or not within [`MAX_BODY_BYTES`].
    #[error("{what} does not encode: {reason}")]
    Unserializable {
        /// The value.
        what: &'static str,
        /// What postcard says of it.
        reason: postcard::Error,
    },
    /// The value decodes, and something follows it.
    #[error("{extra} bytes follow {what}")]
    Trailing {
        /// The value that was expected.
        what: &'static str,
        /// How many bytes are left.
        extra: usize,
    },
    /// The header and the manifest in the body disagree on the size of the payload.
    #[error("the header announces a payload of {header} bytes, its manifest adds up to {manifest}")]
    PayloadSize {
        /// From the header.
        header: u64,
        /// From the manifest.
        manifest: u64,
    },
    /// The leader of a group tells a member of a payload that it cannot have received.
    #[error("it tells of a payload of {manifest} bytes, its slots hold {slot}")]
    NoSuchPayload {
        /// From the manifest.
        manifest: u64,
        /// What a slot of the leader holds.
        slot: u64,
    },
    /// A hard cut overtook the chunk, and on such chunks no group works.
    #[error("a stale message came on an edge of a group")]
    Stale,
    /// The manifest breaks a rule.
    #[error("manifest refused")]
    Manifest(#[from] ManifestError),
    /// The plan breaks a rule, or the manifest does not follow it.
    #[error("plan refused")]
    Plan(#[from] PlanError),
    /// The trail is not that of a chunk which went through these stages.
    #[error("trail refused")]
    Trail(#[from] TrailError),
}

/// Decodes a value that takes up `bytes` entirely.
pub(crate) fn decode<T: DeserializeOwned>(
    what: &'static str,
    bytes: &[u8],
) -> Result<T, BodyError> {
    let (value, rest) = postcard::take_from_bytes(bytes).map_err(|reason| {
        let len = bytes.len();
        BodyError::Malformed { what, len, reason }
    })?;
    match rest.len() {
        0 => Ok(value),
        extra => Err(BodyError::Trailing { what, extra }),
    }
}

/// Encodes a value on its own.
pub(crate) fn encode<T: Serialize>(what: &'static str, value: &T) -> Result<Vec<u8>, BodyError> {
    let mut bytes = Vec::new();
    append(value, &mut bytes).map_err(|reason| BodyError::Unserializable { what, reason })?;
    Ok(bytes)
}

/// Appends the encoding of `value` to `buffer`, of at most [`MAX_BODY_BYTES`].
///
/// On an error the buffer holds a part of the encoding; the caller gives it up.
pub(crate) fn append<T: Serialize + ?Sized>(
    value: &T,
    buffer: &mut Vec<u8>,
) -> Result<(), postcard::Error> {
    let end = buffer.len() + MAX_BODY_BYTES;
    postcard::serialize_with_flavor(value, Tail { buffer, end })
}

/// The end of a buffer, up to a bound.
struct Tail<'a> {
    buffer: &'a mut Vec<u8>,
    end: usize,
}

impl Flavor for Tail<'_> {
    type Output = ();

    #[inline]
    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.try_extend(&[byte])
    }

    #[inline]
    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        if self.end - self.buffer.len() < bytes.len() {
            return Err(postcard::Error::SerializeBufferFull);
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailing_bytes_are_an_error() {
        assert_eq!(decode::<u8>("a byte", &[7]), Ok(7));
        let trailing = BodyError::Trailing {
            what: "a byte",
            extra: 2,
        };
        assert_eq!(decode::<u8>("a byte", &[7, 0, 0]), Err(trailing));
    }

    #[test]
    fn writing_stops_at_the_bound() {
        let mut buffer = vec![0; 64];
        let full = vec![1u8; MAX_BODY_BYTES - 3];
        append(full.as_slice(), &mut buffer).unwrap();
        assert_eq!(buffer.len(), 64 + MAX_BODY_BYTES);

        let mut buffer = vec![0; 64];
        let over = vec![1u8; MAX_BODY_BYTES - 2];
        let error = append(over.as_slice(), &mut buffer);
        assert_eq!(error, Err(postcard::Error::SerializeBufferFull));
    }
}
