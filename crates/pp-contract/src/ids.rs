//! Identities as newtypes: a chunk index is never passed where a call id is meant.
//!
//! Ranges are checked once, in the constructor; `next()` is checked, so that nothing wraps.

use core::fmt;

use serde::{Deserialize, Serialize};

/// A number that is outside the range of its identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// A world needs at least one rank.
    #[error("world size is 0; a world has at least one rank")]
    EmptyWorld,
    /// `u64::MAX` stands for "no payload" in a header.
    #[error(
        "edge sequence {} is reserved for messages without a payload",
        u64::MAX
    )]
    ReservedEdgeSeq,
}

/// Declares an identity, without its constructor.
macro_rules! id {
    ($(#[$meta:meta])* $name:ident: $raw:ty) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        $(#[$meta])*
        pub struct $name($raw);

        impl $name {
            /// The number.
            #[must_use]
            pub const fn get(self) -> $raw {
                self.0
            }

            /// The one after, unless the numbers are used up.
            #[must_use]
            pub fn next(self) -> Option<Self> {
                let next = self.0.checked_add(1)?;
                Self::try_from(next).ok()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<$name> for $raw {
            fn from(id: $name) -> $raw {
                id.0
            }
        }
    };
}

/// Declares identities for which every number stands.
macro_rules! full_range {
    ($($(#[$meta:meta])* $name:ident: $raw:ty;)*) => {$(
        id! {
            $(#[$meta])*
            #[serde(transparent)]
            $name: $raw
        }

        impl $name {
            /// The identity with this number.
            #[must_use]
            pub const fn new(value: $raw) -> Self {
                Self(value)
            }
        }

        impl From<$raw> for $name {
            fn from(value: $raw) -> Self {
                Self(value)
            }
        }
    )*};
}

/// Declares identities for which every number stands but one.
macro_rules! all_but_one {
    ($($(#[$meta:meta])* $name:ident: $raw:ty, not $reserved:pat => $error:ident;)*) => {$(
        id! {
            $(#[$meta])*
            $name: $raw
        }

        impl $name {
            /// The identity with this number.
            ///
            /// # Errors
            #[doc = concat!("[`IdError::", stringify!($error), "`] for ", stringify!($reserved), ".")]
            pub const fn new(value: $raw) -> Result<Self, IdError> {
                match value {
                    $reserved => Err(IdError::$error),
                    value => Ok(Self(value)),
                }
            }
        }

        impl TryFrom<$raw> for $name {
            type Error = IdError;
            fn try_from(value: $raw) -> Result<Self, IdError> {
                Self::new(value)
            }
        }
    )*};
}

full_range! {
    /// Index of a process in the world.
    Rank: u32;
    /// Number of a call: strictly increasing over everything that the source sends. Every stage hands it on.
    CallId: u64;
    /// Number of a unit of streaming work, strictly increasing; the order of the output.
    ChunkIndex: u64;
    /// Number of an epoch. Each scene cut begins a new one. A result of an earlier epoch is dropped and not decoded.
    CacheEpoch: u64;
    /// Number of a life of all edges of a job, from 0. Each restart begins a new one.
    Generation: u32;
}
all_but_one! {
    /// Number of ranks, at least one.
    #[serde(try_from = "u32")]
    WorldSize: u32, not 0 => EmptyWorld;
    /// Counts the messages with a payload on one directed edge, from 0.
    #[serde(try_from = "u64")]
    EdgeSeq: u64, not u64::MAX => ReservedEdgeSeq;
}

impl WorldSize {
    /// Says whether `rank` is one of this world.
    #[must_use]
    pub const fn contains(self, rank: Rank) -> bool {
        rank.0 < self.0
    }

    /// The ranks of this world, in order.
    pub fn ranks(self) -> impl ExactSizeIterator<Item = Rank> + DoubleEndedIterator {
        (0..self.0).map(Rank)
    }
}

impl EdgeSeq {
    /// The number of the first payload on an edge.
    pub const FIRST: Self = Self(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_never_wraps() {
        assert_eq!(CallId::new(7).next(), Some(CallId::new(8)));
        assert_eq!(CallId::new(u64::MAX).next(), None);
    }

    #[test]
    fn next_edge_seq_never_reaches_the_reserved_number() {
        let last = EdgeSeq::new(u64::MAX - 1).unwrap();
        assert_eq!(last.next(), None);
        assert_eq!(EdgeSeq::new(u64::MAX), Err(IdError::ReservedEdgeSeq));
    }

    #[test]
    fn world_without_ranks_is_refused() {
        assert_eq!(WorldSize::new(0), Err(IdError::EmptyWorld));
        assert!(postcard::from_bytes::<WorldSize>(&[0]).is_err());
    }

    #[test]
    fn world_contains_its_ranks_and_no_other() {
        let world = WorldSize::new(3).unwrap();
        let ranks: Vec<u32> = world.ranks().map(Rank::get).collect();
        assert_eq!(ranks, [0, 1, 2]);
        assert!(world.contains(Rank::new(2)));
        assert!(!world.contains(Rank::new(3)));
    }
}
