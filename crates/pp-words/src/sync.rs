//! The atomics that the shared-memory protocols are written in: `std`'s, or loom's when the
//! models run (`--cfg loom`).
//!
//! The ring, the slot states and the bell take these by reference, so the same code runs over a
//! mapping shared by two processes and over loom's model of the memory order.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Lets another thread go on, in a loop that looks.
#[cfg(loom)]
pub(crate) use loom::thread::yield_now as pause;
#[cfg(not(loom))]
pub(crate) use std::hint::spin_loop as pause;
