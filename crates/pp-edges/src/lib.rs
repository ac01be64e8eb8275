//! Edges between ranks: what they must do, buffers in flight, and those in shared memory.
//!
//! Hazard: a buffer reused while the other side still reads it, a receive posted for a payload that no rank sends.
//! Guarantee: buffers in flight are types that cannot be touched ([`in_flight`]); a header leaves only for a message that was
//! prepared whole, and a receive is posted only with the header that announced it ([`edge`]).
//!
//! A part of pp-transport, which shows these modules to other crates.

pub mod backend;
pub mod bell;
pub mod edge;
pub mod error;
pub mod flight;
pub mod group;
pub mod host;
pub mod in_flight;
pub mod lane;
pub mod shm;
mod times;
