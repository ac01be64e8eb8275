//! Every decoder of this crate that a stranger, a peer or the environment can reach, run on any
//! bytes: for `cargo xtask fuzz`, and for a short pass over the seeds in the tests of this crate.
//!
//! Guarantee that is tried: no panic, no hang, no buffer beyond its bound, no stranger let in, and
//! what was accepted is what an honest peer could have said. Compiled for tests and with the
//! feature `fuzz` alone.

pub use pp_edges::host::fuzz::{region, ring};
pub use pp_edges::lane::fuzz::lane;
pub use pp_meet::control::fuzz::{answer, call, messages};
pub use pp_meet::launch::fuzz::launch;

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

#[cfg(test)]
mod tests;
