//! The words that threads and processes share without a lock: slots, rings, bells, groups, recordings, and the gate of
//! NCCL's calls.
//!
//! Hazard: two processes read and write the same words in any order, and a test meets few of the orders. Guarantee: each
//! protocol stands here without the kernel, over atomics that are `std`'s or loom's, and the models of this crate
//! (`cargo test -p pp-words` with `--cfg loom`) walk through its orders. Only the parts of pp-transport use it.

#![allow(missing_docs, reason = "no user of pp-transport sees these items")]

pub mod bell;
pub mod flight;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod gate;
pub mod group;
pub mod ring;
pub mod slots;
mod sync;

#[cfg(all(test, loom))]
mod models;
