//! How the ranks of a job meet: who this process is, where rank 0 is, and the channel between two ranks.
//!
//! Hazard: a rank that joins another job's ranks, a stranger at the door, a peer that is gone unnoticed. Guarantee: a place
//! is whole or an error that names the variable ([`launch`]); bytes are acted on only after they have proven to come from a
//! rank of this job ([`control`]).
//!
//! A part of pp-transport, which shows `control` and `launch` to other crates.

pub mod control;
pub mod launch;
mod limit;
mod random;
pub mod times;

pub use control::channel::Announced;
pub use limit::lift_limit;
