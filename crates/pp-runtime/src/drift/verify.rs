//! Which chunks are verified.

use std::fmt::{self, Display};
use std::num::NonZeroU64;
use std::str::FromStr;

/// How often chunks are verified by digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// None.
    Off,
    /// One chunk in so many, the first among them.
    Every(NonZeroU64),
}

impl Verify {
    /// Says whether the chunk with this index is verified.
    pub fn is_due(self, chunk: u64) -> bool {
        matches!(self, Self::Every(every) if chunk % every == 0)
    }
}

impl Display for Verify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Every(every) => write!(f, "every={every}"),
        }
    }
}

impl FromStr for Verify {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self::Off);
        }
        let every = text.strip_prefix("every=").and_then(|n| n.parse().ok());
        every.map(Self::Every).ok_or_else(|| {
            format!(
                "it takes 'off', or 'every=N' for one chunk in N, from 1 to {}",
                u64::MAX
            )
        })
    }
}
