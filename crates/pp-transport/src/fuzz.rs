//! Every decoder of this crate that a stranger, a peer or the environment can reach, run on any
//! bytes: for `cargo xtask fuzz`, and for a short pass over the seeds in the tests of this crate.
//!
//! Guarantee that is tried: no panic, no hang, no buffer beyond its bound, nobody let in, and what
//! was accepted is what an honest peer could have said. Compiled for tests and with the feature
//! `fuzz` alone.

pub use crate::control::fuzz::{answer, call, messages};
pub use crate::host::fuzz::{region, ring};
pub use crate::lane::fuzz::lane;
pub use crate::launch::fuzz::launch;

/// A target: takes any bytes, and panics where a guarantee does not hold.
pub type Target = fn(&[u8]);

/// All targets of this crate by name, which is also the name of their folder of seeds.
pub const TARGETS: [(&str, Target); 7] = [
    ("call", call),
    ("answer", answer),
    ("messages", messages),
    ("lane", lane),
    ("ring", ring),
    ("region", region),
    ("launch", launch),
];

/// Bytes that are read as a script of steps; 0 when there are no more.
pub(crate) struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    pub(crate) fn number(&mut self) -> u64 {
        let mut number = [0; 8];
        let bytes = self.bytes(8);
        number[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(number)
    }

    /// So many, or what is left.
    pub(crate) fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

#[cfg(test)]
mod tests;
