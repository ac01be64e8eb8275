//! Edges between ranks: the rules for every backend, buffers in flight, and edges in shared memory.
//!
//! Hazard: a buffer is reused while the other side still reads it, or a receive is posted for a payload that no rank
//! sends. Guarantee: buffers in flight have types through which no code can touch them ([`in_flight`]). A header leaves
//! only for a message that was completely prepared, and a receive is posted only with the header that announced it
//! ([`edge`]).
//!
//! This crate is a part of pp-transport, which re-exports these modules.

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
#[doc(hidden)]
pub mod trial;
